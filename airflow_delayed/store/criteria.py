"""Which messages are meant: the filters that list, counts and the changes share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Table, and_, or_

from airflow_delayed.message import utc
from airflow_delayed.origin import SentBy
from airflow_delayed.store import runs
from airflow_delayed.store.schema import Tables, value_of
from airflow_delayed.store.states import EXAMPLE, MessageState, in_state

#: The states of the table of failed messages.
OVER = (MessageState.FAILED, MessageState.EXPIRED)


#: The number of a run, or the column of a query that has it; None: any that is meant.
Run = int | ColumnElement[int] | None


#: The names of the parameters in the conditions, with a value for each that serves as an example.
_PARAMETERS: dict[str, Any] = {
    "destination": "",
    "deliver_conn_id": "",
    "tag": "",
    "due_from": EXAMPLE,
    "due_until": EXAMPLE,
}
_OF_RUN: dict[str, Any] = {"dag_id": "", "run_id": "", "task_id": "", "map_index": 0}


class _Own:
    """The store's own queue tables, of which the rows name no connection."""

    def __str__(self) -> str:
        return "its own queue tables"


OWN = _Own()


@dataclass(frozen=True, slots=True, kw_only=True)
class Criteria:
    """What must be true of a message; None says nothing. Texts are compared byte by byte.

    :param due_from: due then or later; aware.
    :param due_until: due before then; aware.
    :param states: stands in one of these ways.
    :raises NaiveTime: a time has no zone.
    """

    destination: str | None = None
    #: ``OWN`` for queue tables in the store's database.
    deliver_conn_id: str | _Own | None = None
    tag: str | None = None
    due_from: datetime | None = None
    due_until: datetime | None = None
    states: Sequence[MessageState] | None = None
    sent_by: SentBy | None = None

    def __post_init__(self) -> None:
        for name in ("due_from", "due_until"):
            if (moment := getattr(self, name)) is not None:
                object.__setattr__(self, name, utc(name, moment))

    @property
    def given(self) -> dict[str, Any]:
        """What was given, as plain values."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        told = {name: _plain(value) for name, value in found.items() if value is not None and name != "sent_by"}
        if self.sent_by is not None:
            told.update((name, value) for name, value in asdict(self.sent_by).items() if value is not None)
        return told

    @property
    def values(self) -> dict[str, Any]:
        """The parameters of the conditions; the times that states are told by are not among them."""
        found = {name: getattr(self, name) for name in _PARAMETERS}
        found.update({name: getattr(self.sent_by, name, None) for name in _OF_RUN})
        return {name: value for name, value in found.items() if value is not None and value is not OWN}

    @property
    def shape(self) -> Criteria:
        """The same for all that differ in values only: a statement made for it serves each of them."""
        given = self.values
        sent_by = SentBy(**{name: one for name, one in _OF_RUN.items() if name in given}) if self.sent_by else None
        values = {name: one for name, one in _PARAMETERS.items() if name in given}
        return replace(self, **values, sent_by=sent_by, states=None if self.states is None else tuple(self.states))

    def fixed(self, tables: Tables, table: Table, *, run: Run = None) -> ColumnElement[bool] | None:
        """Return the condition for what does not change by itself with time; None: any message.

        :param run: of the runs that are meant, only the one of this number.
        """
        columns, conditions = table.c, list[ColumnElement[bool]]()
        if self.destination is not None:
            conditions.append(columns.Destination == value_of(columns.Destination, "destination", self.destination))
        if isinstance(self.deliver_conn_id, _Own):
            conditions.append(columns.DeliverConnId.is_(None))
        elif self.deliver_conn_id is not None:
            given = value_of(columns.DeliverConnId, "deliver_conn_id", self.deliver_conn_id)
            conditions.append(columns.DeliverConnId == given)
        if self.tag is not None:
            conditions.append(columns.Tag == value_of(columns.Tag, "tag", self.tag))
        if self.due_from is not None:
            conditions.append(columns.Time >= value_of(columns.Time, "due_from", self.due_from))
        if self.due_until is not None:
            conditions.append(columns.Time < value_of(columns.Time, "due_until", self.due_until))
        if run is not None:
            conditions.append(columns.Run == (value_of(columns.Run, "run", run) if isinstance(run, int) else run))
        elif self.sent_by is not None:
            conditions.append(columns.Run.in_(runs.meant(tables, self.sent_by)))
        return and_(*conditions) if conditions else None

    def of_messages(self, tables: Tables, now: datetime, *, run: Run = None) -> list[ColumnElement[bool]] | None:
        """Return the conditions for the table of messages, or None if none of them can be meant."""
        conditions = _some(self.fixed(tables, tables.messages, run=run))
        if self.states is not None:
            wanted = [in_state(tables, state, now) for state in self.states if state is not MessageState.FAILED]
            if not wanted:
                return None
            conditions.append(or_(*wanted))
        return conditions

    def of_failed(self, tables: Tables, *, run: Run = None) -> list[ColumnElement[bool]] | None:
        """Return the conditions for the table of failed messages, or None if none of them can be meant."""
        conditions = _some(self.fixed(tables, tables.failed, run=run))
        if self.states is not None:
            reasons = [state.value for state in self.states if state in OVER]
            if not reasons:
                return None
            conditions.append(tables.failed.c.Reason.in_(reasons))
        return conditions


def _some(condition: ColumnElement[bool] | None) -> list[ColumnElement[bool]]:
    return [] if condition is None else [condition]


def _plain(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    return str(value) if isinstance(value, str | _Own) else [state.value for state in value]  # type: ignore[attr-defined]


def states_of(state: str | Sequence[str] | None) -> tuple[MessageState, ...] | None:
    """Return the states that are meant by one name or several.

    :raises ValueError: a name is none of a state.
    """
    if state is None:
        return None
    names = [state] if isinstance(state, str) else list(state)
    known = [one.value for one in MessageState]
    if wrong := [name for name in names if name not in known]:
        raise ValueError(f"state={wrong[0]!r} is none of {', '.join(known)}")
    return tuple(MessageState(name) for name in names)
