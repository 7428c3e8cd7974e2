"""What was dispatched and what falls due around now, step by step: the page's chart. No Airflow here.

The past is counted from the remembered ids, of which each look reads up to a million. Lateness is from the due time to
the claim, and 0 for what was handed over ahead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from sqlalchemy import ColumnElement, Connection, Engine, case, func, or_, select

from airflow_delayed.message import UTC
from airflow_delayed.store.dialects import database_time, dialect_of
from airflow_delayed.store.remembered_ids import SENT
from airflow_delayed.store.schema import Tables

#: By the seconds before and after now that a timeline shows: the seconds of each of its steps.
STEPS: Mapping[int, int] = {3600: 60, 86_400: 3600}
#: What was dispatched no later than this counts as on time.
ON_TIME = timedelta(seconds=5)
#: The most remembered ids that are counted, the newest.
MOST_COUNTED = 1_000_000


@dataclass(frozen=True, slots=True)
class PastStep:
    """What was dispatched in one step of a timeline; ``late`` of them more than 5 s after the due time."""

    begin: datetime
    dispatched: int = 0
    late: int = 0
    max_late_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class FutureStep:
    """How many messages fall due in one step of a timeline; the present step counts from now."""

    begin: datetime
    messages: int = 0


@dataclass(frozen=True, slots=True)
class Timeline:
    """The past and the future of a store around ``at``, in steps of so many seconds.

    ``past_is_cut``: more than a million ids have left the store within that time; the older ones are not counted.
    """

    at: datetime
    step_seconds: int
    past: Sequence[PastStep]
    past_is_cut: bool
    future: Sequence[FutureStep]


def timeline(engine: Engine, tables: Tables, seconds: int) -> Timeline:
    """Return what was dispatched in the last so many seconds, and what falls due in the next, by indexes."""
    if seconds not in STEPS:
        raise ValueError(f"seconds={seconds} must be one of {', '.join(map(str, STEPS))}")
    step = STEPS[seconds]
    with dialect_of(engine).read_only(engine) as connection:
        now = database_time(connection)
        present = datetime.fromtimestamp(int(now.timestamp()) // step * step, UTC)
        begins = [present + timedelta(seconds=step * number) for number in range(-seconds // step, seconds // step + 1)]
        since, is_cut = newest_since(connection, tables, begins[0], MOST_COUNTED)
        past = _past(connection, tables, now, since, step)
        future = _future(connection, tables, now, begins[-1] + timedelta(seconds=step), step)
    return Timeline(
        at=now,
        step_seconds=step,
        past=[past.get(begin, PastStep(begin)) for begin in begins if begin <= present],
        past_is_cut=is_cut,
        future=[FutureStep(begin, future.get(begin, 0)) for begin in begins if begin >= present],
    )


def newest_since(connection: Connection, tables: Tables, since: datetime, most: int) -> tuple[datetime, bool]:
    """Return from when on there are at most so many remembered ids and leases, and whether that is after ``since``."""
    at = tables.past.c.At
    behind = select(at).where(at >= since).order_by(at.desc()).offset(most).limit(1)
    oldest: datetime | None = connection.execute(behind).scalar()
    return (since, False) if oldest is None else (oldest + timedelta(microseconds=1), True)


def sent(tables: Tables, now: datetime) -> list[ColumnElement[bool]]:
    """Return the conditions for remembered ids of messages that were sent: without leases in force."""
    past, messages = tables.past, tables.messages
    # not a join, for which a database may read all messages
    waiting = select(messages.c.Id).where(messages.c.Id == past.c.Id).correlate(past).scalar_subquery()
    settled = or_(past.c.ClaimedUntil.is_(None), past.c.ClaimedUntil <= now, waiting.is_(None))
    return [past.c.Outcome.in_(SENT), past.c.Time.is_not(None), settled]


def _past(
    connection: Connection, tables: Tables, now: datetime, since: datetime, step: int
) -> dict[datetime, PastStep]:
    past, dialect = tables.past, dialect_of(connection)
    begin, late = dialect.truncated(past.c.At, _unit(step)).label("begin"), dialect.seconds(past.c.Time, past.c.At)
    found = (
        select(
            begin,
            func.count().label("dispatched"),
            func.sum(case((late > ON_TIME.total_seconds(), 1), else_=0)).label("late"),
            func.max(late).label("latest"),
        )
        .where(past.c.At >= since, *sent(tables, now))
        .group_by(begin)
    )
    steps = (
        PastStep(beginning(row.begin), int(row.dispatched), int(row.late), max(0.0, float(row.latest)))
        for row in connection.execute(found)
    )
    return {one.begin: one for one in steps}


def _future(connection: Connection, tables: Tables, now: datetime, end: datetime, step: int) -> dict[datetime, int]:
    due = tables.messages.c.Time
    begin = dialect_of(connection).truncated(due, _unit(step)).label("begin")
    found = select(begin, func.count().label("many")).where(due > now, due < end).group_by(begin)
    return {beginning(row.begin): int(row.many) for row in connection.execute(found)}


def _unit(step: int) -> Literal["minute", "hour"]:
    return "minute" if step == STEPS[3600] else "hour"


def beginning(begin: datetime | str) -> datetime:
    """Return the time that :meth:`Dialect.truncated` returned."""
    if isinstance(begin, datetime):
        return begin
    return datetime.strptime(begin, "%Y-%m-%d %H:%M" if ":" in begin else "%Y-%m-%d %H").replace(tzinfo=UTC)
