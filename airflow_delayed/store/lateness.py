"""How late messages are, by destination: what waits, and what was dispatched in the last minutes. No Airflow here.

It is the one truth of the page's verdict and counters, of ``airflow delayed doctor`` and of the metrics. A message that
is past its due time by more than :data:`LATE_AFTER` is overdue, also while a dispatcher has leased it or tries it again
later: nobody has received it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import Connection, case, func, or_, select

from airflow_delayed.store.history import LATE_BOUNDS, MINUTE, HistoryCounts
from airflow_delayed.store.pauses import Hold, not_held
from airflow_delayed.store.schema import HISTORY_COUNTS, Tables

#: A message that has not been dispatched for longer than this after its due time is overdue.
LATE_AFTER = timedelta(seconds=10)
#: The most overdue messages that are counted; further ones make a count "at least".
MOST_OVERDUE = 10_000
#: How many minutes of the history count as the present, beside the minute that is not over.
_MINUTES = 2
#: The destinations that are named, those with the latest messages first.
_MOST_NAMED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class OverdueMessages:
    """The overdue messages of one destination."""

    #: None: the queue tables of the store's own database.
    deliver_conn_id: str | None
    destination: str
    #: At most 10,000 of all destinations are counted, the first by due time.
    messages: int
    #: Those of them that were tried in vain, and are tried again later.
    retrying: int = 0
    #: The due time of the first.
    oldest: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class DestinationLateness:
    """How late the messages of one destination are: what is overdue, and what went out in the last two minutes."""

    #: The connection that delivers them; the store's own name stands for its queue tables.
    conn_id: str
    destination: str
    overdue: int = 0
    #: Of the overdue message that was due first; 0: there is none.
    late_seconds: float = 0.0
    dispatched: int = 0
    #: Of 100 dispatched messages 99 were at most so late. None: none was dispatched.
    p99_seconds: float | None = None


def overdue(connection: Connection, tables: Tables, now: datetime, holds: Sequence[Hold] = ()) -> list[OverdueMessages]:
    """Count the overdue messages by connection and destination, the largest number first.

    Neither expired messages count, nor what pauses hold.
    """
    table = tables.messages
    alive = or_(table.c.ExpiresAt.is_(None), table.c.ExpiresAt > now)
    first = (
        select(table.c.DeliverConnId, table.c.Destination, table.c.Time, table.c.NextTry)
        .where(table.c.Time <= now - LATE_AFTER, alive, *not_held(tables, holds))
        .order_by(table.c.Time)
        .limit(MOST_OVERDUE)
        .subquery()
    )
    by = first.c.DeliverConnId, first.c.Destination
    many, oldest = func.count().label("many"), func.min(first.c.Time, type_=table.c.Time.type).label("oldest")
    retrying = func.sum(case((first.c.NextTry > now, 1), else_=0)).label("retrying")
    found = select(*by, many, retrying, oldest).group_by(*by).order_by(many.desc(), by[1])
    return [
        OverdueMessages(
            deliver_conn_id=row.DeliverConnId,
            destination=row.Destination,
            messages=int(row.many),
            retrying=int(row.retrying),
            oldest=row.oldest,
        )
        for row in connection.execute(found)
    ]


def lateness(
    connection: Connection, tables: Tables, conn_id: str, late: Sequence[OverdueMessages], now: datetime
) -> list[DestinationLateness]:
    """Return the destinations with overdue messages, or with messages in the last minutes: the latest first, up to 20.

    :param conn_id: the store's name.
    :param late: what :func:`overdue` has returned.
    """
    waiting = {(one.deliver_conn_id or conn_id, one.destination): one for one in late}
    sent = _of_last_minutes(connection, tables, now)
    found = [
        DestinationLateness(
            conn_id=name,
            destination=destination,
            overdue=0 if (one := waiting.get((name, destination))) is None else one.messages,
            late_seconds=0.0 if one is None else (now - one.oldest).total_seconds(),
            dispatched=0 if (counts := sent.get((name, destination))) is None else counts.dispatched,
            p99_seconds=None if counts is None else p99(counts),
        )
        for name, destination in waiting.keys() | sent.keys()
    ]
    found.sort(key=lambda one: (-one.late_seconds, -(one.p99_seconds or 0), -one.dispatched, one.destination))
    return found[:_MOST_NAMED]


def p99(counts: HistoryCounts) -> float | None:
    """Return how late 99 of 100 messages were at most, by the bounds of the buckets; None: there is no message."""
    rest = counts.dispatched * 0.99
    for late, bound in zip(counts.late, (*LATE_BOUNDS, float("inf")), strict=True):
        rest -= late
        if rest <= 0 < counts.dispatched:
            return min(bound, counts.max_late)
    return None


def _of_last_minutes(connection: Connection, tables: Tables, now: datetime) -> Mapping[tuple[str, str], HistoryCounts]:
    history = tables.history
    begin = now.replace(second=0, microsecond=0) - timedelta(minutes=_MINUTES)
    sums = [func.sum(history.c[name]).label(name) for name in HISTORY_COUNTS]
    by = history.c.ConnId, history.c.Destination
    found = (
        select(*by, *sums, func.max(history.c.MaxLate).label("MaxLate"))
        .where(history.c.At >= begin, history.c.Seconds == MINUTE, history.c.Dispatched > 0)
        .group_by(*by)
    )
    return {(row.ConnId, row.Destination): HistoryCounts.of(row) for row in connection.execute(found)}
