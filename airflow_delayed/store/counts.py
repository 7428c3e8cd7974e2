"""The number of messages in each state, and the runs of dispatchers. No Airflow here.

A count reads only the rows that are due or wait for a retry. It counts all others by an index, so ten million messages
that wait for next year cost little.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import (
    ColumnElement,
    CompoundSelect,
    Connection,
    Engine,
    FromClause,
    Select,
    Table,
    and_,
    case,
    exists,
    func,
    literal_column,
    not_,
    or_,
    select,
    union_all,
)

from airflow_delayed.identity import NOTIFIER
from airflow_delayed.store import pauses
from airflow_delayed.store.database import TimeUnit, slices
from airflow_delayed.store.dialects import database_time, dialect_of
from airflow_delayed.store.dispatch.report import (
    DISPATCHER_SILENT,
    MOST_RUNS,
    Trouble,
    connection_names,
    names_column,
    troubles_column,
    troubles_in,
)
from airflow_delayed.store.filters import (
    CANCELLED,
    FARTHEST_LOOKAHEAD,
    LONGEST_LEASE,
    MessageFilter,
    MessageState,
    claimed_until,
    failed_state,
    in_state,
    moments,
    retries_later,
    state_of,
)
from airflow_delayed.store.outcomes import Outcome
from airflow_delayed.store.pauses import not_paused
from airflow_delayed.store.queries import DatabaseTime
from airflow_delayed.store.records import count_rows
from airflow_delayed.store.remembered_ids import DEAD_LETTERED, DISPATCHED, FIRST_ID
from airflow_delayed.store.schema import Tables
from airflow_delayed.store.timeline import beginning

#: The most hours and minutes ahead that are counted one by one.
MAX_HOURS = 24 * 31
MAX_MINUTES = 24 * 60
#: Messages of each table that are counted by state.
MOST_BY_STATE = 1000

_SPANS: Mapping[TimeUnit, timedelta] = {"hour": timedelta(hours=1), "minute": timedelta(minutes=1)}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCounts:
    """The number of messages in each state at ``at``, by the database's clock."""

    at: datetime
    waiting: int
    due: int
    #: Messages that have been due for longer than the parameter ``overdue``, in flight and retrying ones too, but no
    #: paused ones.
    overdue: int
    in_flight: int
    retrying: int
    failed: int
    #: In the table of failed messages, or not moved there by a dispatcher yet.
    expired: int
    #: Ids that are remembered; None with another criterion than the destination.
    remembered: int | None
    #: The due time of the next message that is not yet due.
    next_due: datetime | None
    #: The due time of the message that has been due the longest, and is not paused.
    oldest_due: datetime | None
    #: By the beginning of each hour, in UTC: how many messages fall due in it. The present hour counts from now.
    by_hour: Mapping[datetime, int]
    #: All messages in the store, failed ones too, by destination; empty without ``by_destination``.
    by_destination: Mapping[str, int]
    #: The same by minute.
    by_minute: Mapping[datetime, int]

    def numbers(self) -> dict[str, int]:
        """Return the fields that are single numbers."""
        names = ("waiting", "due", "overdue", "in_flight", "retrying", "failed", "expired", "remembered")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far messages have come, in numbers; an id that the store does not know counts nowhere."""

    #: By the database's clock.
    at: datetime
    #: In the store: a dispatcher sends them later, or is about to.
    waiting: int = 0
    #: Sent to their destination, by a dispatcher or at once by the task that stored the others.
    dispatched: int = 0
    cancelled: int = 0
    #: Given up, and in the table of failed messages.
    failed: int = 0
    #: Not sent before their ``expires_at``.
    expired: int = 0
    #: Given up, and sent to the error destination.
    dead_lettered: int = 0
    #: Removed after they had failed or expired.
    purged: int = 0
    #: Only the id is known: they were removed with all that was known of them, before or after they were sent.
    erased: int = 0
    #: The due time of the next message that waits.
    next_due: datetime | None = None

    @property
    def outcomes(self) -> dict[str, int]:
        """The numbers by name."""
        return {name: getattr(self, name) for name in ("waiting", *_OUTCOMES)}

    @property
    def total(self) -> int:
        """The number of messages."""
        return sum(self.outcomes.values())

    @property
    def given_up(self) -> int:
        """The number of messages that will not reach their destination, though nobody cancelled them."""
        return self.failed + self.expired + self.dead_lettered + self.purged


def by_state(
    engine: Engine, tables: Tables, wanted: MessageFilter, *, database_time: DatabaseTime = database_time
) -> tuple[dict[str, int], bool]:
    """Count by state up to a thousand messages of each table, and return whether there are more.

    Dispatched and cancelled ones are counted by tag or run alone, for which there is an index.
    """
    messages, failed, past = tables.messages, tables.failed, tables.past
    timed = [messages.c[name] for name in ("Time", "ExpiresAt", "NextTry", "RetryCount")]
    waiting = select(*timed, claimed_until(tables).label("ClaimedUntil"))
    indexed = wanted.tag is not None or (wanted.sent_by is not None and wanted.sent_by.run_id is not None)
    counted: Counter[str] = Counter()
    with dialect_of(engine).read_only(engine) as connection:
        now = database_time(connection)

        def rows(chosen: Select[Any], table: Table, *more: ColumnElement[bool]) -> list[dict[str, Any]]:
            some = chosen.where(*wanted.stable_conditions(tables, table), *more).limit(MOST_BY_STATE + 1)
            return [dict(row) for row in connection.execute(some).mappings()]

        parts = [
            [state_of(row, now).value for row in rows(waiting, messages)],
            [failed_state(row["Reason"]).value for row in rows(select(failed.c.Reason), failed)],
        ]
        if indexed and wanted.reason is None:
            # a leased message has a row there, too
            there = (not_(exists().where(table.c.Id == past.c.Id)) for table in (messages, failed))
            outcomes = {DISPATCHED: DISPATCHED, DEAD_LETTERED: DISPATCHED, CANCELLED: CANCELLED}
            left = rows(select(past.c.Outcome), past, past.c.Outcome.in_(list(outcomes)), *there)
            parts.append([outcomes[row["Outcome"]] for row in left])
            counted.update({DISPATCHED: 0, CANCELLED: 0})
    for part in parts:
        counted.update(part[:MOST_BY_STATE])
    return dict(counted), any(len(part) > MOST_BY_STATE for part in parts)


#: The fields of Progress for messages that wait no longer.
_OUTCOMES = ("dispatched", "cancelled", "failed", "expired", "dead_lettered", "purged", "erased")


def progress(
    engine: Engine,
    tables: Tables,
    wanted: MessageFilter,
    *,
    ids: Sequence[str] | None = None,
    database_time: DatabaseTime = database_time,
) -> Progress:
    """Count messages by outcome; a message counts once, whatever becomes of it meanwhile."""
    sums: Counter[str] = Counter()
    next_due: datetime | None = None
    with dialect_of(engine).read_only(engine) as connection:
        now = database_time(connection)
        for some in [None] if ids is None else slices(list(dict.fromkeys(ids))):
            # one statement, so that a message which moves from one table to another counts once
            for row in connection.execute(_outcomes(tables, wanted, some), moments(now)).mappings():
                sums.update({name: int(number) for name, number in row.items()})
            table = tables.messages
            soonest = select(func.min(table.c.Time)).where(*_conditions(tables, table, wanted, some))
            first = connection.execute(soonest).scalar_one()
            next_due = min(filter(None, (next_due, first)), default=None)
    # what has expired is in the table of messages until a dispatcher moves it
    moving = sums.pop("moving", 0)
    sums.update(waiting=-moving, expired=moving)
    return Progress(at=now, next_due=next_due if sums["waiting"] else None, **sums)


def _conditions(
    tables: Tables, table: Table, wanted: MessageFilter, ids: Sequence[str] | None
) -> list[ColumnElement[bool]]:
    matching = wanted.stable_conditions(tables, table)
    if wanted.sent_by is not None and wanted.tag is None:
        # what notifiers store about a run is no message that its tasks sent
        tag = table.c.Tag
        matching.append(or_(tag.is_(None), not_(tag.startswith(NOTIFIER, autoescape=True))))
    return matching if ids is None else [*matching, table.c.Id.in_(ids)]


def _outcomes(tables: Tables, wanted: MessageFilter, ids: Sequence[str] | None) -> CompoundSelect[Any]:
    """Return the statement whose rows add up to the counts; its parameters are those of :func:`moments`."""
    waiting, failed, past = tables.messages, tables.failed, tables.past

    def row(table: Table, *more: ColumnElement[bool], **counted: ColumnElement[int]) -> Select[Any]:
        columns: list[ColumnElement[Any]] = [
            counted.get(name, literal_column("0")).label(name) for name in (*_OUTCOMES, "waiting", "moving")
        ]
        return select(*columns).select_from(table).where(*_conditions(tables, table, wanted, ids), *more)

    def times(column: ColumnElement[str], value: str) -> ColumnElement[int]:
        return func.coalesce(func.sum(case((column == value, 1), else_=0)), 0)

    # a leased message has a row there, too
    there = (exists().where(table.c.Id == past.c.Id) for table in (waiting, failed))
    return union_all(
        row(waiting, waiting=func.count()),
        row(waiting, in_state(tables, MessageState.EXPIRED), moving=func.count()),
        row(failed, failed=times(failed.c.Reason, "failed"), expired=times(failed.c.Reason, "expired")),
        row(
            past,
            past.c.Id >= FIRST_ID,
            *map(not_, there),
            **{name: times(past.c.Outcome, value) for name, value in _LEFT_AS.items()},
        ),
    )


#: By field of Progress, the value of the column Outcome.
_LEFT_AS = {
    "dispatched": DISPATCHED,
    "dead_lettered": DEAD_LETTERED,
    **{outcome.value: outcome.value for outcome in (Outcome.CANCELLED, Outcome.PURGED, Outcome.ERASED)},
}


def count(
    connection: Connection,
    tables: Tables,
    wanted: MessageFilter,
    now: datetime,
    *,
    overdue: timedelta,
    hours: int,
    minutes: int,
    by_destination: bool,
) -> StoreCounts:
    """Count, in a snapshot; raise ValueError for a number out of range."""
    if not 0 <= hours <= MAX_HOURS:
        raise ValueError(f"hours={hours} must be 0 to {MAX_HOURS}")
    if not 0 <= minutes <= MAX_MINUTES:
        raise ValueError(f"minutes={minutes} must be 0 to {MAX_MINUTES}")
    if overdue < timedelta(0):
        raise ValueError(f"overdue={overdue} is negative")
    table, failed = tables.messages, tables.failed
    matching, matching_failed = wanted.stable_conditions(tables, table), wanted.stable_conditions(tables, failed)
    soon = table.c.Time <= now + FARTHEST_LOOKAHEAD
    # no message expires before it is due, so a message that is not due yet either waits or is tried again
    tried = or_(table.c.Time <= now, and_(soon, retries_later(table, now)))
    free = not_paused(tables, pauses.read(connection, tables))
    late = and_(table.c.Time <= now - overdue, *free)
    near = _sums(connection, table, [tried, *matching], now=now, late=late, free=free, select_from=table)
    leased = _sums(
        connection, table, [soon, *matching], now=now, late=late, free=free, select_from=_leased(tables, now)
    )
    # a message in flight is in no other state
    due, retrying, expired = (near[name] - leased[name] for name in ("due", "retrying", "expired"))
    total = count_rows(connection, table, *matching)
    over = select(failed.c.Reason, func.count()).where(*matching_failed).group_by(failed.c.Reason)
    reasons = {str(reason): int(many) for reason, many in connection.execute(over)}
    soonest = select(func.min(table.c.Time)).where(table.c.Time > now, *matching)
    return StoreCounts(
        at=now,
        waiting=total - leased["all"] - due - retrying - expired,
        due=due,
        overdue=near["overdue"],
        in_flight=leased["all"],
        retrying=retrying,
        failed=reasons.get(MessageState.FAILED.value, 0),
        expired=expired + reasons.get(MessageState.EXPIRED.value, 0),
        remembered=_remembered(connection, tables, wanted, leased["all"]),
        next_due=connection.execute(soonest).scalar_one(),
        oldest_due=near["oldest"],
        by_hour=_bars(connection, table, matching, now, "hour", hours),
        by_minute=_bars(connection, table, matching, now, "minute", minutes),
        by_destination=_by_destination(connection, tables, wanted) if by_destination else {},
    )


def _leased(tables: Tables, now: datetime) -> FromClause:
    """Return the messages in flight, found quickly by the index on At, however many ids are remembered."""
    table, past = tables.messages, tables.past
    leased = and_(past.c.Id == table.c.Id, past.c.At > now - LONGEST_LEASE, past.c.ClaimedUntil > now)
    return past.join(table, leased)


def _sums(
    connection: Connection,
    table: Table,
    matching: Sequence[ColumnElement[bool]],
    *,
    now: datetime,
    late: ColumnElement[bool],
    free: Sequence[ColumnElement[bool]],
    select_from: FromClause,
) -> dict[str, Any]:
    expired = and_(table.c.ExpiresAt.is_not(None), table.c.ExpiresAt <= now)
    retrying = retries_later(table, now)
    alive = or_(table.c.ExpiresAt.is_(None), table.c.ExpiresAt > now)
    due = and_(alive, or_(table.c.NextTry.is_(None), table.c.NextTry <= now), table.c.Time <= now)
    conditions = {
        "expired": expired,
        "retrying": and_(alive, retrying),
        "due": due,
        "overdue": and_(alive, late),
    }
    statement = (
        select(
            func.count().label("all"),
            func.min(case((and_(alive, table.c.Time <= now, *free), table.c.Time))).label("oldest"),
            *(func.coalesce(func.sum(case((one, 1), else_=0)), 0).label(name) for name, one in conditions.items()),
        )
        .select_from(select_from)
        .where(*matching)
    )
    row = connection.execute(statement).one()._mapping
    return {name: value if name == "oldest" else int(value) for name, value in row.items()}


def _remembered(connection: Connection, tables: Tables, wanted: MessageFilter, in_flight: int) -> int | None:
    if wanted.criteria.keys() - {"destination"}:
        return None
    past = tables.past
    matching = [] if wanted.destination is None else [past.c.Destination == wanted.destination]
    # two counts, each by an index; marks have no destination
    marks = 0 if matching else count_rows(connection, past, past.c.Id < FIRST_ID)
    return max(0, count_rows(connection, past, *matching) - marks - in_flight)


def _bars(
    connection: Connection,
    table: Table,
    matching: Sequence[ColumnElement[bool]],
    now: datetime,
    unit: TimeUnit,
    bars: int,
) -> dict[datetime, int]:
    if not bars:
        return {}
    span, first = _SPANS[unit], now.replace(second=0, microsecond=0)
    if unit == "hour":
        first = first.replace(minute=0)
    begin = dialect_of(connection).truncated(table.c.Time, unit).label("begin")
    statement = (
        select(begin, func.count().label("many"))
        .where(table.c.Time > now, table.c.Time < first + bars * span, *matching)
        .group_by(begin)
    )
    counted = {beginning(row.begin): int(row.many) for row in connection.execute(statement)}
    return {first + number * span: counted.get(first + number * span, 0) for number in range(bars)}


def _by_destination(connection: Connection, tables: Tables, wanted: MessageFilter) -> dict[str, int]:
    counted: dict[str, int] = {}
    for table in (tables.messages, tables.failed):
        statement = (
            select(table.c.Destination, func.count())
            .where(*wanted.stable_conditions(tables, table))
            .group_by(table.c.Destination)
        )
        for destination, many in connection.execute(statement):
            counted[destination] = counted.get(destination, 0) + int(many)
    return dict(sorted(counted.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatcherSeen:
    """One run of a dispatcher."""

    dispatcher: str
    #: The connections that it delivers through; None: the queue tables of the store's database.
    conn_ids: tuple[str | None, ...]
    started_at: datetime
    seen_at: datetime
    #: None: it is running, or was killed.
    ended_at: datetime | None
    #: It has not ended, and gave a sign of life within :data:`DISPATCHER_SILENT`.
    at_work: bool
    #: When it last finished a piece of work. None: not yet.
    worked_at: datetime | None = None
    #: What it cannot do, at most 20 troubles.
    troubles: tuple[Trouble, ...] = ()
    #: The machine that it runs on.
    host: str | None = None
    #: The DAG whose task it is. None: it is no task.
    dag_id: str | None = None

    @property
    def problem(self) -> str | None:
        """The text of its troubles; None: there is none."""
        return "; ".join(map(str, self.troubles)) or None


def dispatchers(connection: Connection, tables: Tables) -> list[DispatcherSeen]:
    """Return the running dispatchers and those of the last day, up to a thousand runs; the one seen last is first."""
    table = tables.dispatchers
    columns = [column for column in table.columns if column not in {table.c.ConnIds, table.c.Troubles}]
    now = database_time(connection)
    # no dispatcher writes a time to come, which would be the last sign of life for as long
    texts = names_column(connection, tables).label("names"), troubles_column(connection, tables).label("troubles")
    statement = select(*columns, *texts).where(table.c.SeenAt < now + DISPATCHER_SILENT)
    statement = statement.order_by(table.c.SeenAt.desc(), table.c.Id).limit(MOST_RUNS)
    rows = connection.execute(statement).all()
    return [
        DispatcherSeen(
            dispatcher=row.Id,
            conn_ids=connection_names(row.names),
            started_at=row.StartedAt,
            seen_at=row.SeenAt,
            ended_at=row.EndedAt,
            at_work=row.EndedAt is None and now - row.SeenAt <= DISPATCHER_SILENT,
            worked_at=row.WorkedAt,
            troubles=troubles_in(row.troubles),
            host=row.Host,
            dag_id=row.DagId,
        )
        for row in rows
    ]
