"""The number of messages in each state, and the runs of dispatchers. No Airflow here.

A count reads only the rows that are due or wait for a retry. It counts all others by an index, so ten million messages
that wait for next year cost little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    FromClause,
    Table,
    and_,
    case,
    func,
    null,
    or_,
    select,
)

from airflow_delayed.store.database import TimeUnit
from airflow_delayed.store.dialects import database_time, dialect_of
from airflow_delayed.store.dispatch.report import MOST_RUNS, connection_names, names_column
from airflow_delayed.store.filters import AHEAD, LONGEST_LEASE, MessageFilter, MessageState, retries_later
from airflow_delayed.store.history import beginning, per_minute
from airflow_delayed.store.leases import FIRST_ID
from airflow_delayed.store.queries import DatabaseTime
from airflow_delayed.store.records import count_rows
from airflow_delayed.store.schema import Tables
from airflow_delayed.store.versions import columns_after, table_version

#: The most hours and minutes ahead that are counted one by one.
MAX_HOURS = 24 * 31
MAX_MINUTES = 24 * 60

_SPANS: Mapping[TimeUnit, timedelta] = {"hour": timedelta(hours=1), "minute": timedelta(minutes=1)}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCounts:
    """The number of messages in each state at ``at``, by the database's clock."""

    at: datetime
    waiting: int
    due: int
    #: Messages of ``due`` that have been due for longer than the parameter ``overdue``.
    overdue: int
    in_flight: int
    retrying: int
    failed: int
    #: In the table of failed messages, or not moved there by a dispatcher yet.
    expired: int
    #: Ids that are remembered; None for a filter by tag or connection, which are not remembered.
    remembered: int | None
    #: The due time of the next message that is not yet due.
    next_due: datetime | None
    #: The due time of the message that has been due the longest.
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


def count(
    engine: Engine,
    tables: Tables,
    wanted: MessageFilter,
    *,
    overdue: timedelta,
    hours: int,
    by_destination: bool,
    minutes: int = 0,
    database_time: DatabaseTime = database_time,
) -> StoreCounts:
    """Count, in one read-only transaction.

    :raises ValueError: ``hours`` is negative or over 744, ``minutes`` negative or over 1440, or ``overdue`` negative.
    """
    if not 0 <= hours <= MAX_HOURS:
        raise ValueError(f"hours={hours} must be 0 to {MAX_HOURS}")
    if not 0 <= minutes <= MAX_MINUTES:
        raise ValueError(f"minutes={minutes} must be 0 to {MAX_MINUTES}")
    if overdue < timedelta(0):
        raise ValueError(f"overdue={overdue} is negative")
    table, failed = tables.messages, tables.failed
    matching, matching_failed = wanted.stable_conditions(tables, table), wanted.stable_conditions(tables, failed)
    with engine.connect().execution_options(read_only=True) as connection:
        now = database_time(connection)
        soon = table.c.Time <= now + AHEAD
        # no message expires before it is due, so a message that is not due yet either waits or is tried again
        tried = or_(table.c.Time <= now, and_(soon, retries_later(table, now)))
        near = _sums(connection, table, [tried, *matching], now=now, overdue=overdue, select_from=table)
        leased = _sums(connection, table, [soon, *matching], now=now, overdue=overdue, select_from=_leased(tables, now))
        # a message in flight is in no other state
        due, late, retrying, expired = (near[name] - leased[name] for name in ("due", "overdue", "retrying", "expired"))
        total = count_rows(connection, table, *matching)
        over = select(failed.c.Reason, func.count()).where(*matching_failed).group_by(failed.c.Reason)
        reasons = {str(reason): int(many) for reason, many in connection.execute(over)}
        soonest = select(func.min(table.c.Time)).where(table.c.Time > now, *matching)
        return StoreCounts(
            at=now,
            waiting=total - leased["all"] - due - retrying - expired,
            due=due,
            overdue=late,
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
    overdue: timedelta,
    select_from: FromClause,
) -> dict[str, Any]:
    """Count messages by state, without regard to leases."""
    expired = and_(table.c.ExpiresAt.is_not(None), table.c.ExpiresAt <= now)
    retrying = retries_later(table, now)
    alive = or_(table.c.ExpiresAt.is_(None), table.c.ExpiresAt > now)
    due = and_(alive, or_(table.c.NextTry.is_(None), table.c.NextTry <= now), table.c.Time <= now)
    conditions = {
        "expired": expired,
        "retrying": and_(alive, retrying),
        "due": due,
        "overdue": and_(due, table.c.Time <= now - overdue),
    }
    statement = (
        select(
            func.count().label("all"),
            func.min(case((and_(alive, table.c.Time <= now), table.c.Time))).label("oldest"),
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
    """Count by the hour or by the minute."""
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
    #: When it last finished a piece of work. None: not yet, or the tables are of version 4.
    worked_at: datetime | None = None
    #: What keeps it from working. None: nothing, or the tables are of version 4.
    problem: str | None = None
    #: The machine that it runs on. None: the tables are of version 4.
    host: str | None = None
    #: The DAG whose task it is. None: it is no task, or the tables are of version 4.
    dag_id: str | None = None
    #: Messages that it dispatched in the last full minute. None: it has ended, or the tables are of version 4.
    per_minute: int | None = None


def dispatchers(engine: Engine, tables: Tables) -> list[DispatcherSeen]:
    """Return the running dispatchers and those of the last day, up to a thousand runs; the one seen last is first."""
    table = tables.dispatchers
    with dialect_of(engine).read_only(engine) as connection:
        lacking = {column.name for column in columns_after(tables, table_version(connection, tables))}
        columns = [column for column in table.columns if column is not table.c.ConnIds]
        there = [null().label(column.name) if column.name in lacking else column for column in columns]
        statement = select(*there, names_column(connection, tables).label("names"))
        statement = statement.order_by(table.c.SeenAt.desc(), table.c.Id).limit(MOST_RUNS)
        rows = connection.execute(statement).all()
        rates = per_minute(connection, tables, [row.Id for row in rows if not row.EndedAt], database_time(connection))
        return [
            DispatcherSeen(
                dispatcher=row.Id,
                conn_ids=connection_names(row.names),
                started_at=row.StartedAt,
                seen_at=row.SeenAt,
                ended_at=row.EndedAt,
                worked_at=row.WorkedAt,
                problem=row.Problem,
                host=row.Host,
                dag_id=row.DagId,
                per_minute=rates.get(row.Id),
            )
            for row in rows
        ]
