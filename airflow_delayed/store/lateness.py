"""How late messages are, by destination: what waits, and what was dispatched in the last minutes. No Airflow here.

It is the one truth of the page's verdict and counters, of ``airflow delayed doctor`` and of the metrics. A message that
is past its due time by more than :data:`LATE_AFTER` is overdue, also while a dispatcher has leased it or tries it again
later: nobody has received it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import ceil

from sqlalchemy import Connection, case, func, or_, select

from airflow_delayed.store.dialects import dialect_of
from airflow_delayed.store.pauses import Pause, not_paused
from airflow_delayed.store.schema import Tables
from airflow_delayed.store.timeline import newest_since, sent

#: A message that has not been dispatched for longer than this after its due time is overdue.
LATE_AFTER = timedelta(seconds=10)
#: The most overdue messages that are counted; further ones make a count "at least".
MOST_OVERDUE = 10_000
#: What was dispatched within this time counts as the present, of the ids that left the store last.
_LATELY, _MOST_SENT = timedelta(minutes=2), 10_000
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
    #: Of the last 10,000 ids of all destinations.
    dispatched: int = 0
    #: Of 100 dispatched messages 99 were at most so late. None: none was dispatched.
    p99_seconds: float | None = None


def overdue(
    connection: Connection, tables: Tables, now: datetime, paused: Sequence[Pause] = ()
) -> list[OverdueMessages]:
    """Count the overdue messages by connection and destination, without expired and paused ones, the most first."""
    table = tables.messages
    alive = or_(table.c.ExpiresAt.is_(None), table.c.ExpiresAt > now)
    first = (
        select(table.c.DeliverConnId, table.c.Destination, table.c.Time, table.c.NextTry)
        .where(table.c.Time <= now - LATE_AFTER, alive, *not_paused(tables, paused))
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
    """Return the destinations with overdue messages, or with messages in the last minutes: the 20 latest, in order."""
    waiting = {(one.deliver_conn_id or conn_id, one.destination): one for one in late}
    lately = _of_last_minutes(connection, tables, conn_id, now)
    found = [
        DestinationLateness(
            conn_id=name,
            destination=destination,
            overdue=0 if (one := waiting.get((name, destination))) is None else one.messages,
            late_seconds=0.0 if one is None else (now - one.oldest).total_seconds(),
            dispatched=len(of_it := lately.get((name, destination), ())),
            p99_seconds=p99(of_it) if of_it else None,
        )
        for name, destination in waiting.keys() | lately.keys()
    ]
    found.sort(key=lambda one: (-one.late_seconds, -(one.p99_seconds or 0), -one.dispatched, one.destination))
    return found[:_MOST_NAMED]


def p99(late: Sequence[float]) -> float:
    """Return how late 99 of 100 messages were at most, in seconds; ``late`` is in order, and has at least one."""
    return late[ceil(len(late) * 0.99) - 1]


def _of_last_minutes(
    connection: Connection, tables: Tables, conn_id: str, now: datetime
) -> Mapping[tuple[str, str], Sequence[float]]:
    past = tables.past
    since, _ = newest_since(connection, tables, now - _LATELY, _MOST_SENT)
    late = dialect_of(connection).seconds(past.c.Time, past.c.At).label("late")
    found = select(past.c.DeliverConnId, past.c.Destination, late).where(past.c.At >= since, *sent(tables, now))
    by: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in connection.execute(found.order_by(late)):
        by[row.DeliverConnId or conn_id, row.Destination].append(max(0.0, float(row.late)))
    return by
