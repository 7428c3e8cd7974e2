"""How many messages stand in which way. No Airflow here.

Written so that ten million messages that wait for next year cost little: rows are looked at only where they are due
or are tried again, all others are counted by the index.
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
    String,
    Table,
    and_,
    case,
    func,
    literal_column,
    or_,
    select,
)

from airflow_delayed.errors import DelayedError
from airflow_delayed.message import UTC
from airflow_delayed.store import claims
from airflow_delayed.store.criteria import Criteria
from airflow_delayed.store.listing import DatabaseTime
from airflow_delayed.store.schema import MYSQL, Tables, UtcTime
from airflow_delayed.store.states import AHEAD, LONGEST_LEASE, MessageState

#: The most hours of what is to come.
MAX_HOURS = 24 * 31

MAX_MINUTES = 24 * 60

_HOUR = timedelta(hours=1)
_MINUTE = timedelta(minutes=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCounts:
    """How many messages stand in which way at ``at``, by the database's clock."""

    at: datetime
    waiting: int
    due: int
    #: Those of ``due`` that have been so for longer than a given span.
    overdue: int
    in_flight: int
    retrying: int
    failed: int
    #: In the table of failed messages, and those that no dispatcher has moved there yet.
    expired: int
    #: Ids that are remembered; None if a tag or a connection was asked for, which are not remembered.
    remembered: int | None
    #: The due time of the next that is not yet due.
    next_due: datetime | None
    #: The due time of the one that is due for longest.
    oldest_due: datetime | None
    #: By the beginning of each hour, in UTC: how many come due in it. The present hour counts from now.
    by_hour: Mapping[datetime, int]
    #: All messages in the store, failed ones too, by destination; empty unless asked for.
    by_destination: Mapping[str, int]
    #: As ``by_hour``, for minutes.
    by_minute: Mapping[datetime, int]

    def numbers(self) -> dict[str, int]:
        """Return those that are single numbers."""
        names = ("waiting", "due", "overdue", "in_flight", "retrying", "failed", "expired", "remembered")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def count(
    engine: Engine,
    tables: Tables,
    criteria: Criteria,
    *,
    overdue: timedelta,
    hours: int,
    by_destination: bool,
    minutes: int = 0,
    database_time: DatabaseTime = claims.database_time,
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
    meant, meant_failed = _some(criteria.fixed(tables, table)), _some(criteria.fixed(tables, failed))
    with engine.connect().execution_options(read_only=True) as connection:
        now = database_time(connection)
        soon = table.c.Time <= now + AHEAD
        # no message expires before it is due, so what is not due yet either waits or is tried again
        tried = or_(table.c.Time <= now, and_(soon, table.c.NextTry > now))
        near = _sums(connection, table, [tried, *meant], now=now, overdue=overdue, select_from=table)
        held = _sums(connection, table, [soon, *meant], now=now, overdue=overdue, select_from=_leased(tables, now))
        # whatever is in flight is nothing else
        due, late, retrying, expired = (near[name] - held[name] for name in ("due", "overdue", "retrying", "expired"))
        total = claims.count(connection, table, *meant)
        over = select(failed.c.Reason, func.count()).where(*meant_failed).group_by(failed.c.Reason)
        reasons = {str(reason): int(many) for reason, many in connection.execute(over)}
        soonest = select(func.min(table.c.Time)).where(table.c.Time > now, *meant)
        return StoreCounts(
            at=now,
            waiting=total - held["all"] - due - retrying - expired,
            due=due,
            overdue=late,
            in_flight=held["all"],
            retrying=retrying,
            failed=reasons.get(MessageState.FAILED.value, 0),
            expired=expired + reasons.get(MessageState.EXPIRED.value, 0),
            remembered=_remembered(connection, tables, criteria, held["all"]),
            next_due=connection.execute(soonest).scalar_one(),
            oldest_due=near["oldest"],
            by_hour=_bars(connection, table, meant, now, _HOUR, hours),
            by_minute=_bars(connection, table, meant, now, _MINUTE, minutes),
            by_destination=_by_destination(connection, tables, criteria) if by_destination else {},
        )


def _some(condition: ColumnElement[bool] | None) -> list[ColumnElement[bool]]:
    return [] if condition is None else [condition]


def _leased(tables: Tables, now: datetime) -> FromClause:
    """Return the messages in flight; the index on At makes that quick, for whatever has been in the past so long."""
    table, past = tables.messages, tables.past
    leased = and_(past.c.Id == table.c.Id, past.c.At > now - LONGEST_LEASE, past.c.ClaimedUntil > now)
    return past.join(table, leased)


def _sums(
    connection: Connection,
    table: Table,
    meant: Sequence[ColumnElement[bool]],
    *,
    now: datetime,
    overdue: timedelta,
    select_from: FromClause,
) -> dict[str, Any]:
    """Count messages by how they stand, as if none was in flight."""
    expired = and_(table.c.ExpiresAt.is_not(None), table.c.ExpiresAt <= now)
    retrying = and_(table.c.NextTry.is_not(None), table.c.NextTry > now)
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
        .where(*meant)
    )
    row = connection.execute(statement).one()._mapping
    return {name: value if name == "oldest" else int(value) for name, value in row.items()}


def _remembered(connection: Connection, tables: Tables, criteria: Criteria, in_flight: int) -> int | None:
    if criteria.given.keys() - {"destination"}:
        return None
    past = tables.past
    of = [] if criteria.destination is None else [past.c.Destination == criteria.destination]
    return max(0, claims.count(connection, past, *of) - in_flight)


def _bars(
    connection: Connection,
    table: Table,
    meant: Sequence[ColumnElement[bool]],
    now: datetime,
    span: timedelta,
    bars: int,
) -> dict[datetime, int]:
    """Count by the hour or by the minute."""
    if not bars:
        return {}
    first = now.replace(second=0, microsecond=0)
    if span == _HOUR:
        first = first.replace(minute=0)
    begin = beginning(table.c.Time, span, connection.dialect.name).label("begin")
    statement = (
        select(begin, func.count().label("many"))
        .where(table.c.Time > now, table.c.Time < first + bars * span, *meant)
        .group_by(begin)
    )
    counted = {_beginning(row.begin): int(row.many) for row in connection.execute(statement)}
    return {first + number * span: counted.get(first + number * span, 0) for number in range(bars)}


def beginning(column: ColumnElement[datetime], span: timedelta, dialect_name: str) -> ColumnElement[Any]:
    """Return the SQL for the hour or minute of a time in UTC: a time on PostgreSQL, elsewhere ``2030-01-31 09[:30]``.

    :param span: an hour, else it is the minute.
    :raises DelayedError: a database whose functions are not known.
    """
    hour = span == _HOUR
    characters = 13 if hour else 16
    if dialect_name == "postgresql":
        return func.date_trunc("hour" if hour else "minute", column, type_=UtcTime())
    if dialect_name == "sqlite":
        return func.substr(column, 1, characters, type_=String())
    if dialect_name in MYSQL:
        return func.date_format(column, literal_column("'%Y-%m-%d %H'" if hour else "'%Y-%m-%d %H:%i'"), type_=String())
    if dialect_name == "mssql":
        return func.convert(literal_column(f"VARCHAR({characters})"), column, literal_column("120"), type_=String())
    raise DelayedError(f"the store does not know how to count by hours on {dialect_name}; give hours=0 and minutes=0")


def _beginning(said: datetime | str) -> datetime:
    if isinstance(said, datetime):
        return said
    return datetime.strptime(said, "%Y-%m-%d %H:%M" if ":" in said else "%Y-%m-%d %H").replace(tzinfo=UTC)


def _by_destination(connection: Connection, tables: Tables, criteria: Criteria) -> dict[str, int]:
    counted: dict[str, int] = {}
    for table in (tables.messages, tables.failed):
        statement = (
            select(table.c.Destination, func.count())
            .where(*_some(criteria.fixed(tables, table)))
            .group_by(table.c.Destination)
        )
        for destination, many in connection.execute(statement):
            counted[destination] = counted.get(destination, 0) + int(many)
    return dict(sorted(counted.items()))
