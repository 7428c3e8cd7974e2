"""Pauses: destinations and connections whose messages no dispatcher takes until somebody ends that.

The table ``_pauses`` has a row for each. No message is written: neither its id nor its due time changes. A dispatcher
reads the pauses every second while it claims (:class:`PauseReader`); what it has claimed before, it sends.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from shlex import quote
from threading import Lock
from typing import Any, TypedDict

from sqlalchemy import ColumnElement, Connection, Engine, delete, exists, func, insert, not_, or_, select

from airflow_delayed.delivery import Finding, State
from airflow_delayed.store import remembered_ids
from airflow_delayed.store.audit import AuditEntry
from airflow_delayed.store.bulk_changes import MAX_COUNTED
from airflow_delayed.store.dialects import database_time
from airflow_delayed.store.engine import retried
from airflow_delayed.store.filters import FARTHEST_LOOKAHEAD, OWN, Conditions, FilterArgs, MessageFilter
from airflow_delayed.store.schema import Tables, UtcTime

#: The most pauses of a store: each is a condition of each claim.
MOST_PAUSES = 50
#: Seconds for which a dispatcher goes by the pauses that it has read.
READ_EVERY = 1.0
#: The mark that a transaction locks which begins or ends a pause.
_CHANGING = f"{remembered_ids.MARK_BEGINS}pauses"


class PauseArgs(TypedDict, total=False):
    """What is paused, one of both."""

    destination: str
    #: The connection that delivers; the store's own ``conn_id`` for its queue tables.
    deliver_conn_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """A pause of a store."""

    #: The number of its record in the audit.
    seq: int
    #: A destination, or a connection.
    wanted: MessageFilter
    #: When it began, by the database's clock.
    at: datetime
    #: The user, and the reason.
    who: str | None = field(default=None, compare=False)
    because: str | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """What is paused, in words."""
        if self.wanted.destination is not None:
            return f"destination {self.wanted.destination!r}"
        name = self.wanted.deliver_conn_id
        return f"connection {name!r}" if isinstance(name, str) else str(name)

    def arguments(self, conn_id: str) -> dict[str, str]:
        """Return it as a pause takes it: the name of the store stands for its queue tables."""
        if self.wanted.destination is not None:
            return {"destination": self.wanted.destination}
        name = self.wanted.deliver_conn_id
        return {"deliver_conn_id": name if isinstance(name, str) else conn_id}

    def summary(self, conn_id: str) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "pause": self.seq,
            "selection": self.arguments(conn_id),
            "at": self.at.isoformat(),
            "who": self.who,
            "because": self.because,
        }

    def is_of_connection(self, deliver_conn_id: str | None) -> bool:
        """Return whether all messages of a connection are paused; None: of the store's own queue tables."""
        return self.wanted.deliver_conn_id == (OWN if deliver_conn_id is None else deliver_conn_id)


def not_paused(tables: Tables, pauses: Sequence[Pause]) -> Conditions:
    """Return the conditions for messages that none of these pauses is of."""
    table, conditions = tables.messages, Conditions()
    destinations = [one.wanted.destination for one in pauses if one.wanted.destination is not None]
    if destinations:
        conditions.append(table.c.Destination.not_in(destinations))
    connections = [name for one in pauses if isinstance(name := one.wanted.deliver_conn_id, str)]
    if connections:
        conditions.append(or_(table.c.DeliverConnId.is_(None), table.c.DeliverConnId.not_in(connections)))
    if any(one.wanted.deliver_conn_id is OWN for one in pauses):
        conditions.append(table.c.DeliverConnId.is_not(None))
    return conditions


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseReport:
    """A pause that was begun.

    Counted up to a million. What the store has dispatched within a day and is not due yet is with the broker: nobody
    can stop it.
    """

    pause: Pause
    #: Messages in the store that wait for its end.
    waiting: int
    with_broker: int
    #: When the last of these is due.
    arrive_until: datetime | None
    #: Nothing was paused.
    dry_run: bool = False

    def __str__(self) -> str:
        done = "would pause" if self.dry_run else "paused"
        line = f"{done} {self.pause.name}: {_number(self.waiting)} messages wait in the store"
        if self.arrive_until is not None:
            line += f"; {_number(self.with_broker)} are already with the broker and arrive until"
            line += f" {_text(self.arrive_until)}"
        return line

    def summary(self, conn_id: str) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            **self.pause.summary(conn_id),
            "waiting": self.waiting,
            "with_broker": self.with_broker,
            "arrive_until": None if self.arrive_until is None else self.arrive_until.isoformat(),
            "dry_run": self.dry_run,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpauseReport:
    """A pause that was ended; ``pause`` is None if there was none.

    ``due`` messages fell due meanwhile, counted up to a million.
    """

    pause: Pause | None
    due: int = 0
    dry_run: bool = False

    def __str__(self) -> str:
        if self.pause is None:
            return "that is not paused"
        done = "would unpause" if self.dry_run else "unpaused"
        return f"{done} {self.pause.name}: {_number(self.due)} messages fell due meanwhile, and are sent at once"

    def summary(self, conn_id: str) -> dict[str, Any]:
        """Return it as plain values."""
        of_pause = {} if self.pause is None else self.pause.summary(conn_id)
        return {**of_pause, "ended": self.pause is not None, "due": self.due, "dry_run": self.dry_run}


def _number(count: int) -> str:
    return f"at least {MAX_COUNTED:,}" if count >= MAX_COUNTED else f"{count:,}"


def _text(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


# -- reading -----------------------------------------------------------------------------------------------------------


def read(connection: Connection, tables: Tables, *, reasons: bool = False) -> tuple[Pause, ...]:
    """Return the pauses, the earliest first; with ``reasons`` also who began them, and why."""
    table, audit = tables.pauses, tables.audit
    statement = select(table).order_by(table.c.Seq).limit(2 * MOST_PAUSES)
    if reasons:
        statement = statement.add_columns(audit.c.Who, audit.c.Selection.label("Audited"))
        statement = statement.select_from(table.outerjoin(audit, audit.c.Seq == table.c.Seq))
    return tuple(_pause(row) for row in connection.execute(statement).mappings())


def _pause(row: Mapping[Any, Any]) -> Pause:
    destination, deliver_conn_id = row["Destination"], row["DeliverConnId"]
    if destination is None and deliver_conn_id is None:
        deliver_conn_id = OWN
    return Pause(
        seq=int(row["Seq"]),
        wanted=MessageFilter(destination=destination, deliver_conn_id=deliver_conn_id),
        at=row["At"],
        who=row.get("Who"),
        because=json.loads(row.get("Audited") or "{}").get("because"),
    )


class PauseReader:
    """The pauses as one dispatcher knows them, at most :data:`READ_EVERY` seconds old; several threads may use it."""

    def __init__(self, tables: Tables, monotonic: Callable[[], float]) -> None:
        self._tables = tables
        self._monotonic = monotonic
        self._lock = Lock()
        self._read_at: float | None = None
        self._pauses: tuple[Pause, ...] = ()

    def read(self, connection: Connection) -> Sequence[Pause]:
        """Return the pauses, read again if it is time and no other thread does; only the first time wait for it."""
        is_old = self._read_at is None or self._monotonic() - self._read_at >= READ_EVERY
        if is_old and self._lock.acquire(blocking=self._read_at is None):
            try:
                began = self._monotonic()
                self._pauses = read(connection, self._tables)
                self._read_at = began
            finally:
                self._lock.release()
        return self._pauses

    @property
    def known(self) -> bool:
        """Whether there were pauses when they were read last."""
        return bool(self._pauses)


# -- changing ----------------------------------------------------------------------------------------------------------


def check_selection(selection: PauseArgs) -> FilterArgs:
    """Return what is paused as the keywords of a filter."""
    if unknown := sorted(selection.keys() - PauseArgs.__annotations__.keys()):
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}: a destination= or a deliver_conn_id= is paused")
    if len(selection) != 1:
        raise ValueError("give what to pause: a destination= or a deliver_conn_id=")
    return {**selection}  # type: ignore[typeddict-item]


def begin(
    engine: Engine, tables: Tables, wanted: MessageFilter, *, who: str, because: str | None, dry_run: bool
) -> Pause:
    """Begin a pause, record that in the audit, and return it; an existing pause stays as it is."""
    entry, table = AuditEntry(who, "pause", wanted.criteria, because=because), tables.pauses

    def work(connection: Connection) -> Pause:
        now = database_time(connection)
        pause = Pause(seq=0, wanted=wanted, at=now, who=who, because=because)
        if not dry_run:
            remembered_ids.lock_mark(connection, tables, _CHANGING, now)
        there = read(connection, tables, reasons=True)
        if same := next((one for one in there if one.wanted == wanted), None):
            return same
        if dry_run:
            return pause
        if len(there) >= MOST_PAUSES:
            raise ValueError(f"{MOST_PAUSES} pauses are in this store, each a part of each claim; end some of them")
        seq = entry.write(connection, tables, {}, now)
        own = None if wanted.deliver_conn_id is OWN else wanted.deliver_conn_id
        row = {"Seq": seq, "Destination": wanted.destination, "DeliverConnId": own, "At": now}
        connection.execute(insert(table).values(row))
        return replace(pause, seq=seq)

    return retried(engine, work)


def end(
    engine: Engine, tables: Tables, wanted: MessageFilter, *, who: str, because: str | None, dry_run: bool
) -> Pause | None:
    """End a pause, record that in the audit, and return it; None: there is none."""
    entry, table = AuditEntry(who, "unpause", wanted.criteria, because=because), tables.pauses

    def work(connection: Connection) -> Pause | None:
        now = database_time(connection)
        if not dry_run:
            remembered_ids.lock_mark(connection, tables, _CHANGING, now)
        same = next((one for one in read(connection, tables, reasons=True) if one.wanted == wanted), None)
        if same is not None and not dry_run:
            connection.execute(delete(table).where(table.c.Seq == same.seq))
            entry.write(connection, tables, {}, now)
        return same

    return retried(engine, work)


# -- counting ----------------------------------------------------------------------------------------------------------


def waiting(connection: Connection, tables: Tables, wanted: MessageFilter, *, due_by: datetime | None = None) -> int:
    """Count the messages that wait in the store, up to a million; ``due_by``: only messages due by then."""
    conditions = wanted.stable_conditions(tables, tables.messages)
    conditions += [] if due_by is None else [tables.messages.c.Time <= due_by]
    some = select(tables.messages.c.Id).where(*conditions).limit(MAX_COUNTED)
    return int(connection.execute(select(func.count()).select_from(some.subquery())).scalar_one())


def with_broker(
    connection: Connection, tables: Tables, wanted: MessageFilter, now: datetime
) -> tuple[int, datetime | None]:
    """Count the messages that were dispatched within a day and are not due yet; and return when the last is due."""
    past, messages = tables.past, tables.messages
    ours: Sequence[ColumnElement[bool]] = (
        past.c.Outcome == remembered_ids.DISPATCHED,
        past.c.At >= now - FARTHEST_LOOKAHEAD,
        past.c.Time > now,
        past.c.Id >= remembered_ids.FIRST_ID,
        # a lease looks like a dispatch
        not_(exists().where(messages.c.Id == past.c.Id)),
        *wanted.stable_conditions(tables, past),
    )
    some = select(past.c.Time).where(*ours).limit(MAX_COUNTED).subquery()
    many, last = connection.execute(select(func.count(), func.max(some.c.Time, type_=UtcTime()))).one()
    return int(many), last


# -- the verdict -------------------------------------------------------------------------------------------------------


def findings(conn_id: str, pauses: Sequence[Pause]) -> Iterator[Finding]:
    """Report each pause, with the code "paused"."""
    for pause in pauses:
        ((name, value),) = pause.arguments(conn_id).items()
        yield Finding(
            state=State.WARNING,
            resource=f"messages of store {conn_id!r}, {pause.name}",
            found=f"they are paused since {_text(pause.at)}, until somebody ends that",
            code="paused",
            remedy="nothing, if that is intended; to end it: airflow delayed pause --end"
            f" --store-conn-id {quote(conn_id)} --{name.replace('_', '-')} {quote(value)}",
        )
