"""Filters of messages for lists, counts and changes, and the states of a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timedelta
from enum import Enum
from typing import Any, TypedDict

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    FromClause,
    ScalarSelect,
    Table,
    and_,
    bindparam,
    exists,
    false,
    func,
    not_,
    or_,
    select,
)

from airflow_delayed.criteria import passed
from airflow_delayed.identity import SentBy
from airflow_delayed.message import utc
from airflow_delayed.store.runs import matching_runs
from airflow_delayed.store.schema import LEFT, Tables, UtcTime, Where

#: A dispatcher delivers at most so long ahead, so a message that is due later can only be waiting.
FARTHEST_LOOKAHEAD = timedelta(days=1)
#: A message that was claimed longer ago than this does not count as in flight.
LONGEST_LEASE = timedelta(hours=1)
#: The state of messages that have left the store, and for a while can be restored.
CANCELLED = "cancelled"

Conditions = list[ColumnElement[bool]]
#: Both tables of messages that are in the store.
BOTH: tuple[Where, ...] = ("messages", "failed")


class MessageState(str, Enum):
    """The state of a message, by the database's clock."""

    #: Not yet due.
    WAITING = "waiting"
    #: Due, and no dispatcher has taken it yet.
    DUE = "due"
    #: A dispatcher is delivering it.
    IN_FLIGHT = "in flight"
    #: Its delivery failed; a dispatcher tries again later.
    RETRYING = "retrying"
    #: Not tried any more.
    FAILED = "failed"
    #: Its ``expires_at`` has passed; it is not delivered.
    EXPIRED = "expired"


class FilterArgs(TypedDict, total=False):
    """A filter as keywords of a method: a message matches if it meets all of them; without any, each message matches.

    Texts are compared byte by byte. A keyword that is passed and is None is an error.
    """

    destination: str
    #: The connection that delivers; the store's own ``conn_id`` for its queue tables.
    deliver_conn_id: str
    tag: str
    #: The last failure, as ``last_error`` of a message has it.
    reason: str
    #: Due then or later; with a time zone.
    due_from: datetime
    #: Due before then; with a time zone.
    due_until: datetime
    #: "waiting", "due", "in flight", "retrying", "failed" or "expired", or several of them.
    state: str | Sequence[str]
    #: Only messages that these runs of tasks stored.
    sent_by: SentBy


class _Own:
    """The store's own queue tables; the rows of their messages name no connection."""

    def __str__(self) -> str:
        return "its own queue tables"


OWN = _Own()


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFilter:
    """The criteria of :class:`FilterArgs`, checked; None matches every message.

    :raises NaiveTime: a time has no zone.
    """

    destination: str | None = None
    #: ``OWN`` for queue tables in the store's database.
    deliver_conn_id: str | _Own | None = None
    tag: str | None = None
    reason: str | None = None
    due_from: datetime | None = None
    due_until: datetime | None = None
    states: Sequence[MessageState] | None = None
    sent_by: SentBy | None = None
    #: Only cancelled messages that can be restored.
    cancelled: bool = False

    def __post_init__(self) -> None:
        for name in ("due_from", "due_until"):
            if (moment := getattr(self, name)) is not None:
                object.__setattr__(self, name, utc(name, moment))
        if self.states is not None:
            # hashable, so that a filter can be the key of a cache
            object.__setattr__(self, "states", tuple(self.states))

    @property
    def criteria(self) -> dict[str, Any]:
        """The criteria that are not None, as plain values."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "sent_by"}
        if values.pop("cancelled"):
            values["states"] = [CANCELLED]
        if self.sent_by is not None:
            values.update(asdict(self.sent_by))
        return {name: _plain(value) for name, value in values.items() if value is not None}

    def stable_conditions(
        self, tables: Tables, table: FromClause, *, run: ColumnElement[int] | None = None
    ) -> Conditions:
        """Return the conditions of all criteria but the states, which change with time; only of ``run``, if given."""
        columns, conditions = table.c, Conditions()
        if self.destination is not None:
            conditions.append(columns.Destination == self.destination)
        if isinstance(self.deliver_conn_id, _Own):
            conditions.append(columns.DeliverConnId.is_(None))
        elif self.deliver_conn_id is not None:
            conditions.append(columns.DeliverConnId == self.deliver_conn_id)
        if self.tag is not None:
            conditions.append(columns.Tag == self.tag)
        if self.reason is not None:
            conditions.append(columns.LastError == self.reason)
        if self.due_from is not None:
            conditions.append(columns.Time >= self.due_from)
        if self.due_until is not None:
            conditions.append(columns.Time < self.due_until)
        if run is not None:
            conditions.append(columns.Run == run)
        elif self.sent_by is not None:
            conditions.append(columns.Run.in_(matching_runs(tables, self.sent_by)))
        return conditions

    def conditions(self, tables: Tables, where: Where, *, run: ColumnElement[int] | None = None) -> Conditions | None:
        """Return the conditions for one table, or None if none of its rows can match."""
        conditions = self.stable_conditions(tables, tables.of(where), run=run)
        if where == "cancelled":
            return conditions if self.states is None else None
        if self.cancelled:
            return None
        if self.states is None:
            return conditions
        if where == "failed":
            reasons = [one.value for one in self.states if one in (MessageState.FAILED, MessageState.EXPIRED)]
            return [*conditions, tables.failed.c.Reason.in_(reasons)] if reasons else None
        states = [in_state(tables, one) for one in self.states if one is not MessageState.FAILED]
        return [*conditions, or_(*states)] if states else None


def filter_of(args: FilterArgs, *, own_conn_id: str) -> MessageFilter:
    """Return the filter of a method's keywords.

    :param own_conn_id: the store's connection.
    :raises TypeError: a keyword is not one of :class:`FilterArgs`.
    :raises NullCriterion: one is None.
    :raises ValueError: the name of a state is unknown.
    :raises NaiveTime: a time has no zone.
    """
    if unknown := sorted(args.keys() - FilterArgs.__annotations__.keys()):
        names = ", ".join(FilterArgs.__annotations__)
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}; those of a filter are {names}")
    criteria = passed(**args)
    states = states_of(criteria.pop("state", None))
    if args.get("deliver_conn_id") == own_conn_id:
        criteria["deliver_conn_id"] = OWN
    return MessageFilter(**criteria, states=states)


def take_left(args: FilterArgs) -> tuple[str, ...]:
    """Remove the states of messages that have left the store from the keywords of a filter, and return them.

    :raises ValueError: other states are among them, whose messages have another order.
    """
    state = args.get("state")
    states = [state] if isinstance(state, str) else state or ()
    left = tuple(name for name in states if name in LEFT)
    if left and len(left) < len(states):
        raise ValueError(f"state: {' and '.join(LEFT)} messages have left the store; list them without other states")
    if left:
        del args["state"]
    return left


def states_of(state: str | Sequence[str] | None) -> tuple[MessageState, ...] | None:
    """Return the states of one name or several."""
    if state is None:
        return None
    names = [state] if isinstance(state, str) else list(state)
    known = [one.value for one in MessageState]
    if wrong := [name for name in names if name not in known]:
        raise ValueError(f"state={wrong[0]!r} is none of {', '.join(known)}")
    return tuple(MessageState(name) for name in names)


def _plain(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, tuple):
        return [state.value for state in value]
    return str(value) if isinstance(value, _Own) else value


def failed_state(reason: str) -> MessageState:
    """Return the state of a message in the table of failed messages, by its column Reason."""
    return MessageState.EXPIRED if reason == MessageState.EXPIRED.value else MessageState.FAILED


def state_of(row: Mapping[str, Any], now: datetime) -> MessageState:
    """Return the state of a row of messages; its ClaimedUntil is the end of its lease, or None."""
    if row["ClaimedUntil"] is not None and row["ClaimedUntil"] > now:
        return MessageState.IN_FLIGHT
    if row["ExpiresAt"] is not None and row["ExpiresAt"] <= now:
        return MessageState.EXPIRED
    if row["NextTry"] is not None and row["NextTry"] > now and not stays_until_due(row):
        return MessageState.RETRYING
    return MessageState.DUE if row["Time"] <= now else MessageState.WAITING


def stays_until_due(row: Mapping[str, Any]) -> bool:
    """Return whether no dispatcher takes a message before it is due: its first try is then, and no retry."""
    return bool(row["NextTry"] == row["Time"] and row["RetryCount"] == 0)


def moments(now: datetime) -> dict[str, datetime]:
    """Return the parameters of the condition of :func:`in_state`, by name."""
    return {"now": now, "soon": now + FARTHEST_LOOKAHEAD, "lately": now - LONGEST_LEASE}


def claimed_until(tables: Tables) -> ScalarSelect[datetime]:
    """Return the SQL for the end of a message's lease, a subquery: a join may read all remembered ids."""
    lease = tables.past.alias("lease")
    return (
        select(lease.c.ClaimedUntil).where(lease.c.Id == tables.messages.c.Id).correlate(tables.messages)
    ).scalar_subquery()


def in_state(tables: Tables, state: MessageState) -> ColumnElement[bool]:
    """Return :func:`state_of` in SQL; its times are the parameters of :func:`moments`, so it can be cached."""
    table, lease = tables.messages, tables.past.alias("lease")
    now, soon, lately = (_moment(name) for name in ("now", "soon", "lately"))
    if state is MessageState.IN_FLIGHT:
        # so that the index on At finds the few leased messages first
        return exists().where(lease.c.Id == table.c.Id, lease.c.At > lately, lease.c.ClaimedUntil > now)
    leased = func.coalesce(claimed_until(tables), now, type_=UtcTime()) > now
    expired = and_(table.c.ExpiresAt.is_not(None), table.c.ExpiresAt <= now)
    if state is MessageState.EXPIRED:
        # no message expires before it is due; with this condition the index on Time can be used
        return and_(table.c.Time <= now, expired, not_(leased))
    retrying = retries_later(table, now)
    alive = and_(or_(table.c.ExpiresAt.is_(None), table.c.ExpiresAt > now), not_(leased))
    if state is MessageState.RETRYING:
        # the first condition lets the index on Time be used
        return and_(table.c.Time <= soon, retrying, alive)
    tried = or_(table.c.NextTry.is_(None), table.c.NextTry <= now)
    if state is MessageState.DUE:
        return and_(table.c.Time <= now, tried, alive)
    if state is MessageState.WAITING:
        return and_(table.c.Time > now, or_(tried, _until_due(table)), alive)
    return false()  # failed messages are in another table


def retries_later(table: Table, now: ColumnElement[datetime] | datetime) -> ColumnElement[bool]:
    """Return the condition for messages whose delivery failed and is tried again later."""
    return and_(table.c.NextTry.is_not(None), table.c.NextTry > now, not_(_until_due(table)))


def _until_due(table: Table) -> ColumnElement[bool]:
    """Return :func:`stays_until_due` in SQL."""
    return and_(table.c.NextTry == table.c.Time, table.c.RetryCount == 0)


def _moment(name: str) -> BindParameter[datetime]:
    return bindparam(name, type_=UtcTime())
