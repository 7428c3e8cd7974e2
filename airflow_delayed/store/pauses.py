"""Pauses: messages that no dispatcher takes for a time, by destination, connection, tag, DAG or run of a task.

The table ``_pauses`` has a row for each. What a pause holds follows from its row and the database's time alone, so
nobody has to be at work when it ends, and no message is written: neither its id nor its due time changes.

- Until it ends, a pause holds all its messages.
- From then on it holds messages that fell due before its end, and no others. ``spread`` lets them go evenly within a
  time, each at the moment that a hash of its id names; ``at_once`` lets them all go; ``drop`` holds them until they are
  cancelled, by whoever ends the pause or, when it ends by itself, by the dispatchers.

A dispatcher reads the pauses every second while it claims, and in between while it sends (:class:`PauseReader`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from shlex import quote
from threading import Lock
from typing import Any, ClassVar, Literal, TypedDict, get_args

from sqlalchemy import (
    Boolean,
    ColumnElement,
    Connection,
    Engine,
    and_,
    delete,
    exists,
    false,
    func,
    insert,
    not_,
    select,
    update,
)

from airflow_delayed.delivery import Finding, State
from airflow_delayed.errors import InputError, check_choice
from airflow_delayed.identity import SentBy
from airflow_delayed.message import MICROSECOND
from airflow_delayed.store import remembered_ids
from airflow_delayed.store.audit import AuditEntry
from airflow_delayed.store.bulk_changes import MAX_COUNTED, BulkChanges
from airflow_delayed.store.changes import Cancel
from airflow_delayed.store.dialects import HashOf, database_time
from airflow_delayed.store.engine import retried
from airflow_delayed.store.filters import FARTHEST_LOOKAHEAD, OWN, Conditions, FilterArgs, MessageFilter
from airflow_delayed.store.outcomes import Outcome, Outcomes
from airflow_delayed.store.schema import Tables, UtcTime, Where

#: What becomes of messages that fell due during a pause.
OnUnpause = Literal["spread", "at_once", "drop"]
#: Within this time messages that fell due meanwhile are sent, unless another is given.
SPREAD = timedelta(minutes=10)
#: The verdict warns so long before a pause ends by itself.
WARN_BEFORE = timedelta(minutes=15)
#: The most pauses of a store: each is a condition of each claim.
MOST_PAUSES = 50
#: Seconds for which a dispatcher goes by the pauses that it has read.
READ_EVERY = 1.0
#: The steps of a spread: the values of :class:`airflow_delayed.store.dialects.HashOf`.
_STEPS = 16**4
#: The mark that a transaction locks which begins or ends a pause.
_CHANGING = f"{remembered_ids.MARK_BEGINS}pauses"


class PauseArgs(TypedDict, total=False):
    """What is paused, as keywords: messages that meet all of them, at least one; as in a filter of messages."""

    destination: str
    #: The connection that delivers; the store's own ``conn_id`` for its queue tables.
    deliver_conn_id: str
    tag: str
    #: What these runs of tasks stored: of a DAG, or of one of its runs.
    sent_by: SentBy


@dataclass(frozen=True, slots=True)
class Hold:
    """What a pause holds at a moment.

    :param due_until: only messages that are due then or before; None: all.
    :param released: messages whose hash comes before these digits are free; "": none is.
    """

    wanted: MessageFilter
    due_until: datetime | None = None
    released: str = ""

    @property
    def is_whole_connection(self) -> bool:
        """Whether it holds all messages of a connection."""
        return self.due_until is None and self.wanted == MessageFilter(deliver_conn_id=self.wanted.deliver_conn_id)

    @property
    def destination(self) -> str | None:
        """The destination of which it holds all messages; None: there is none."""
        name = self.wanted.destination
        return name if self.due_until is None and self.wanted == MessageFilter(destination=name) else None

    def holds_as(self, other: Hold) -> bool:
        """Return whether another hold is of the same messages, of which a spread may have released more."""
        return (self.wanted, self.due_until, bool(self.released)) == (
            other.wanted,
            other.due_until,
            bool(other.released),
        )


def not_held(tables: Tables, holds: Sequence[Hold]) -> Conditions:
    """Return the conditions for waiting messages that none of these holds."""
    table, conditions = tables.messages, Conditions()
    for hold in holds:
        held = hold.wanted.stable_conditions(tables, table)
        if hold.due_until is not None:
            held.append(table.c.Time <= hold.due_until)
        if hold.released:
            held.append(HashOf(table.c.Id) >= hold.released)
        # null where a message has no tag, run or connection
        conditions.append(not_(func.coalesce(and_(*held), false(), type_=Boolean())))
    return conditions


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """A pause of a store."""

    #: The number of its record in the audit.
    seq: int
    wanted: MessageFilter
    #: When it began, by the database's clock.
    at: datetime
    #: When it ends, or has ended; None: when somebody ends it.
    ends_at: datetime | None
    on_unpause: OnUnpause
    #: Of ``on_unpause="spread"``: within so long after its end all that fell due meanwhile is sent.
    spread: timedelta
    #: Of ``on_unpause="drop"``: for so long the cancel can be taken back.
    grace: timedelta
    #: The user, and the reason.
    who: str | None = field(default=None, compare=False)
    because: str | None = field(default=None, compare=False)

    @property
    def selection(self) -> Mapping[str, Any]:
        """The criteria of its messages."""
        return self.wanted.criteria

    @property
    def name(self) -> str:
        """What is paused, in words."""
        return ", ".join(f"{name} {value!r}" for name, value in self.selection.items())

    def arguments(self, conn_id: str) -> dict[str, Any]:
        """Return the criteria as a pause takes them: the name of the store stands for its queue tables."""
        own = {"deliver_conn_id": conn_id} if self.wanted.deliver_conn_id is OWN else {}
        return {**self.selection, **own}

    @property
    def released_at(self) -> datetime | None:
        """From when on it holds nothing; None: not known yet."""
        if self.ends_at is None or self.on_unpause == "drop":
            return None
        return self.ends_at + (self.spread if self.on_unpause == "spread" else timedelta(0))

    def has_ended(self, now: datetime) -> bool:
        """Return whether it holds at most what fell due before its end."""
        return self.ends_at is not None and self.ends_at <= now

    def is_over(self, now: datetime) -> bool:
        """Return whether it holds nothing any more."""
        return self.released_at is not None and self.released_at <= now

    def hold(self, now: datetime) -> Hold | None:
        """Return what it holds at a time; None: nothing."""
        if not self.has_ended(now):
            return Hold(self.wanted)
        if self.is_over(now):
            return None
        if self.on_unpause == "drop":
            return Hold(self.wanted, self.ends_at)
        assert self.ends_at is not None
        return Hold(self.wanted, self.ends_at, f"{int(_STEPS * ((now - self.ends_at) / self.spread)):04x}")

    def summary(self) -> dict[str, Any]:
        """Return it as plain values; ``spread`` in seconds."""
        return {
            "pause": self.seq,
            "selection": dict(self.selection),
            "at": self.at.isoformat(),
            "ends_at": None if self.ends_at is None else self.ends_at.isoformat(),
            "on_unpause": self.on_unpause,
            "spread": self.spread.total_seconds(),
            "who": self.who,
            "because": self.because,
        }

    def concerns(self, deliver_conn_id: str | None) -> bool:
        """Return whether it may hold messages of a connection; None: of the store's own queue tables."""
        return self.wanted.deliver_conn_id in (None, OWN if deliver_conn_id is None else deliver_conn_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseReport:
    """A pause that was begun.

    Counted up to a million. What the store has dispatched within a day and is not due yet is with the broker: nobody
    can stop it.
    """

    pause: Pause
    #: Messages in the store that it holds.
    waiting: int
    with_broker: int
    #: When the last of these is due.
    arrive_until: datetime | None
    #: Nothing was paused.
    dry_run: bool = False

    def __str__(self) -> str:
        """Return a sentence."""
        until = "" if self.pause.ends_at is None else f" until {_text(self.pause.ends_at)}"
        done = "would pause" if self.dry_run else "paused"
        line = f"{done} {self.pause.name}{until}: {_number(self.waiting)} messages wait in the store"
        if self.arrive_until is not None:
            line += f"; {_number(self.with_broker)} are already with the broker and arrive until"
            line += f" {_text(self.arrive_until)}"
        return line

    def summary(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            **self.pause.summary(),
            "waiting": self.waiting,
            "with_broker": self.with_broker,
            "arrive_until": None if self.arrive_until is None else self.arrive_until.isoformat(),
            "dry_run": self.dry_run,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpauseReport:
    """A pause that was ended; ``pause`` is None if there was none of this selection.

    ``due`` messages fell due meanwhile, counted up to a million; ``cancelled`` of them were dropped by this call.
    """

    pause: Pause | None
    due: int = 0
    cancelled: int = 0
    dry_run: bool = False

    def __str__(self) -> str:
        """Return a sentence."""
        if self.pause is None:
            return "nothing is paused by these criteria"
        done = "would unpause" if self.dry_run else "unpaused"
        line = f"{done} {self.pause.name}: {_number(self.due)} messages fell due meanwhile"
        if self.pause.on_unpause == "drop":
            return line + ("; they would be cancelled" if self.dry_run else f"; {self.cancelled:,} were cancelled")
        if self.pause.on_unpause == "spread" and self.pause.released_at is not None:
            return line + f", and are sent by {_text(self.pause.released_at)}"
        return line + ", and are sent at once"

    def summary(self) -> dict[str, Any]:
        """Return it as plain values."""
        counts = {"due": self.due, "cancelled": self.cancelled, "dry_run": self.dry_run}
        return {**({} if self.pause is None else self.pause.summary()), "ended": self.pause is not None, **counts}


def _number(count: int) -> str:
    return f"at least {MAX_COUNTED:,}" if count >= MAX_COUNTED else f"{count:,}"


def _text(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


# -- reading -----------------------------------------------------------------------------------------------------------


def read(connection: Connection, tables: Tables, *, reasons: bool = False) -> tuple[Pause, ...]:
    """Return the pauses, also a pause that is over and has a row; rows that this release cannot read are left out.

    :param reasons: read also who began them, and why.
    """
    table, audit = tables.pauses, tables.audit
    statement = select(table).order_by(table.c.Seq).limit(2 * MOST_PAUSES)
    if reasons:
        statement = statement.add_columns(audit.c.Who, audit.c.Selection.label("Audited"))
        statement = statement.select_from(table.outerjoin(audit, audit.c.Seq == table.c.Seq))
    return tuple(pause for row in connection.execute(statement).mappings() if (pause := _pause(row)) is not None)


def _pause(row: Mapping[Any, Any]) -> Pause | None:
    try:
        criteria = json.loads(row["Selection"])
        sent_by = criteria.pop("sent_by", None)
        if "deliver_conn_id" in criteria and criteria["deliver_conn_id"] is None:
            criteria["deliver_conn_id"] = OWN
        return Pause(
            seq=int(row["Seq"]),
            wanted=MessageFilter(**criteria, sent_by=None if sent_by is None else SentBy(**sent_by)),
            at=row["At"],
            ends_at=row["EndsAt"],
            on_unpause=check_on_unpause(row["OnUnpause"]),
            spread=timedelta(seconds=row["Spread"]),
            grace=timedelta(seconds=row["Grace"]),
            who=row.get("Who"),
            because=json.loads(row.get("Audited") or "{}").get("because"),
        )
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError, InputError):
        return None


def _selection(wanted: MessageFilter) -> str:
    """Return the filter as :func:`_pause` reads it."""
    names = ("destination", "deliver_conn_id", "tag")
    criteria = {name: value for name in names if (value := getattr(wanted, name)) is not None}
    if wanted.deliver_conn_id is OWN:
        criteria["deliver_conn_id"] = None
    if wanted.sent_by is not None:
        sender = asdict(wanted.sent_by)
        criteria["sent_by"] = {name: value for name, value in sender.items() if value is not None}
    return json.dumps(criteria, ensure_ascii=False)


class PauseReader:
    """The pauses as one dispatcher knows them, at most :data:`READ_EVERY` seconds old; several threads may use it."""

    def __init__(self, tables: Tables, monotonic: Callable[[], float]) -> None:
        self._tables = tables
        self._monotonic = monotonic
        self._lock = Lock()
        self._read_at: float | None = None
        self._pauses: tuple[Pause, ...] = ()

    @property
    def is_old(self) -> bool:
        """Whether it is time to read them again."""
        return self._read_at is None or self._monotonic() - self._read_at >= READ_EVERY

    def read(self, connection: Connection) -> None:
        """Read the pauses if it is time, and no other thread does; only the first time wait for that thread."""
        if self.is_old and self._lock.acquire(blocking=self._read_at is None):
            try:
                began = self._monotonic()
                self._pauses = read(connection, self._tables)
                self._read_at = began
            finally:
                self._lock.release()

    def all(self) -> tuple[Pause, ...]:
        """Return the pauses that were read last."""
        return self._pauses

    def of(self, deliver_conn_id: str | None) -> tuple[Pause, ...]:
        """Return the pauses that may hold messages of a connection; None: of the store's own queue tables."""
        return tuple(one for one in self._pauses if one.concerns(deliver_conn_id)) if self._pauses else ()


def holds_of(pauses: Sequence[Pause], now: datetime) -> tuple[Hold, ...]:
    """Return what pauses hold at a time."""
    return tuple(hold for one in pauses if (hold := one.hold(now)) is not None) if pauses else ()


# -- changing ----------------------------------------------------------------------------------------------------------


def check_on_unpause(value: str) -> OnUnpause:
    """Return the value if it is an :data:`OnUnpause`.

    :raises ValueError: it is not.
    """
    check_choice("on_unpause", value, get_args(OnUnpause))
    return value  # type: ignore[return-value]


def check_selection(selection: PauseArgs) -> FilterArgs:
    """Return what is paused as the keywords of a filter.

    :raises TypeError: a keyword is not one of :class:`PauseArgs`.
    :raises ValueError: there is none.
    """
    names = ", ".join(f"{name}=" for name in PauseArgs.__annotations__)
    if unknown := sorted(selection.keys() - PauseArgs.__annotations__.keys()):
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}; what is paused is selected by {names}")
    if not selection:
        raise ValueError(f"give what to pause: at least one of {names}")
    return {**selection}  # type: ignore[typeddict-item]


def begin(
    engine: Engine,
    tables: Tables,
    wanted: MessageFilter,
    *,
    duration: timedelta | None,
    on_unpause: OnUnpause,
    spread: timedelta,
    grace: timedelta,
    who: str,
    because: str | None,
    dry_run: bool,
) -> Pause:
    """Begin a pause in place of an earlier one of the same selection, record that in the audit, and return it.

    :raises ValueError: there are too many.
    """
    options = {"on_unpause": on_unpause, "duration": None if duration is None else duration.total_seconds()}
    entry = AuditEntry(who, "pause", {**wanted.criteria, **options}, because=because)
    table = tables.pauses

    def work(connection: Connection) -> Pause:
        now = database_time(connection)
        pause = Pause(
            seq=0,
            wanted=wanted,
            at=now,
            ends_at=None if duration is None else now + duration,
            on_unpause=on_unpause,
            spread=spread,
            grace=grace,
            who=who,
            because=because,
        )
        if dry_run:
            return pause
        remembered_ids.lock_mark(connection, tables, _CHANGING, now)
        there = read(connection, tables)
        gone = [one.seq for one in there if one.wanted == wanted or one.is_over(now)]
        if len(there) - len(gone) >= MOST_PAUSES:
            raise ValueError(f"{MOST_PAUSES} pauses are in this store, each a part of each claim; end some of them")
        connection.execute(delete(table).where(table.c.Seq.in_(gone)))
        seq = entry.write(connection, tables, {}, now)
        row = {"Seq": seq, "Selection": _selection(wanted), "At": now, "EndsAt": pause.ends_at}
        row |= {"OnUnpause": on_unpause, "Spread": spread.total_seconds(), "Grace": grace.total_seconds()}
        connection.execute(insert(table).values(row))
        return replace(pause, seq=seq)

    return retried(engine, work)


def end(
    engine: Engine,
    tables: Tables,
    wanted: MessageFilter,
    *,
    on_unpause: OnUnpause | None,
    spread: timedelta | None,
    who: str,
    because: str | None,
    dry_run: bool,
) -> Pause | None:
    """End the pause of this selection, record that in the audit, and return it as it is then; None: there is none.

    A pause that has ended already keeps its end, and gets the other parameters.

    :param on_unpause: None: as the pause says; also ``spread``.
    """
    entry, table = AuditEntry(who, "unpause", wanted.criteria, because=because), tables.pauses

    def work(connection: Connection) -> Pause | None:
        now = database_time(connection)
        if not dry_run:
            remembered_ids.lock_mark(connection, tables, _CHANGING, now)
        same = [one for one in read(connection, tables) if one.wanted == wanted and not one.is_over(now)]
        if not same:
            return None
        ended = replace(
            same[0],
            ends_at=now if same[0].ends_at is None else min(now, same[0].ends_at),
            on_unpause=on_unpause or same[0].on_unpause,
            spread=same[0].spread if spread is None else spread,
        )
        if not dry_run:
            row = {"EndsAt": ended.ends_at, "OnUnpause": ended.on_unpause, "Spread": ended.spread.total_seconds()}
            connection.execute(update(table).where(table.c.Seq == ended.seq).values(row))
            entry.write(connection, tables, {}, now)
        return ended

    return retried(engine, work)


class _Drop(Cancel):
    """A cancel of messages that wait, not of failed ones."""

    where: ClassVar[Sequence[Where]] = ("messages",)


def drop(
    engine: Engine,
    tables: Tables,
    pause: Pause,
    *,
    who: str,
    because: str | None = None,
    limit: int | None = None,
    clock: Callable[[Connection], datetime] = database_time,
) -> Outcomes:
    """Cancel what fell due before the end of a pause, and remove the pause when nothing of it is left.

    :param limit: consider at most so many messages.
    """
    with engine.connect().execution_options(read_only=True) as connection:
        if connection.execute(select(tables.pauses.c.Seq).where(*_as_read(tables, pause))).first() is None:
            # another dispatcher has come to its end, and what was taken back since is not dropped again
            return Outcomes()
        is_done = not waiting(connection, tables, pause, due=True, most=1)
    found = Outcomes()
    if not is_done:
        changes = BulkChanges(engine, tables, database_time=clock)
        wanted = _due_meanwhile(pause)
        found = changes.by_filter(_Drop(pause.grace), wanted, who=who, because=because, limit=limit)
    if found.next is None and Outcome.IN_FLIGHT not in found.counts:
        retried(engine, lambda connection: remove(connection, tables, pause))
    return found


def remove(connection: Connection, tables: Tables, pause: Pause) -> None:
    """Remove a pause, unless it was changed since it was read."""
    connection.execute(delete(tables.pauses).where(*_as_read(tables, pause)))


def _as_read(tables: Tables, pause: Pause) -> Sequence[ColumnElement[bool]]:
    return tables.pauses.c.Seq == pause.seq, tables.pauses.c.EndsAt == pause.ends_at


def _due_meanwhile(pause: Pause) -> MessageFilter:
    assert pause.ends_at is not None
    return replace(pause.wanted, due_until=pause.ends_at + MICROSECOND)


# -- counting ----------------------------------------------------------------------------------------------------------


def waiting(connection: Connection, tables: Tables, pause: Pause, *, due: bool = False, most: int = MAX_COUNTED) -> int:
    """Count the messages of a pause that wait in the store, up to ``most``.

    :param due: only messages that fell due before its end.
    """
    wanted = _due_meanwhile(pause) if due else pause.wanted
    some = select(tables.messages.c.Id).where(*wanted.stable_conditions(tables, tables.messages)).limit(most)
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


def findings(conn_id: str, pauses: Sequence[Pause], now: datetime) -> Iterator[Finding]:
    """Report each pause that holds messages; its code is "pause-ends" shortly before it ends, else "paused"."""
    for pause in pauses:
        if pause.is_over(now):
            continue
        ends, then = pause.ends_at, _THEN[pause.on_unpause].format(f"{pause.spread.total_seconds():g} s")
        if ends is None:
            text = f"they are paused since {_text(pause.at)}, until somebody ends that"
        elif not pause.has_ended(now):
            text = f"they are paused since {_text(pause.at)}, until {_text(ends)}; what fell due meanwhile {then}"
        else:
            text = f"their pause ended at {_text(ends)}; what fell due meanwhile {then}"
        is_close = ends is not None and now < ends <= now + WARN_BEFORE
        yield Finding(
            state=State.WARNING,
            resource=f"messages of store {conn_id!r}, {pause.name}",
            found=text,
            code="pause-ends" if is_close else "paused",
            remedy=f"nothing, if that is intended; to end it: airflow delayed unpause --store-conn-id {quote(conn_id)}"
            f" {' '.join(_options(pause, conn_id))}; to prolong it: pause them again",
        )


_THEN: Mapping[OnUnpause, str] = {
    "spread": "is then sent within {}",
    "at_once": "is then sent at once",
    "drop": "is then cancelled",
}


def _options(pause: Pause, conn_id: str) -> Iterator[str]:
    """Yield the options of the command that name a pause."""
    for name, value in pause.arguments(conn_id).items():
        yield f"--{name.replace('_', '-')} {quote(value)}"
