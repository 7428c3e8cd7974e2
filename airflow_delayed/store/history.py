"""What the dispatchers of a store did in the last days: counts and lateness, by minute, connection and destination.

A dispatcher counts in memory, and writes its own rows of the table ``_history`` with each sign of life, every 3 s and
at its end. So no row is shared, and the transactions that claim and settle are as they were. A dispatcher that is
killed loses the counts of at most its last 3 s; its messages are not affected. Minutes become hours after a day, and
are deleted after 14 days. Lateness is from the due time to the end of the send, and 0 for what was handed over ahead.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

from sqlalchemy import Connection, Engine, Row, and_, delete, func, insert, or_, select

from airflow_delayed.message import UTC
from airflow_delayed.store.database import IDS
from airflow_delayed.store.dialects import database_time, dialect_of
from airflow_delayed.store.schema import HISTORY_COUNTS, LATE_BUCKETS, Tables

if TYPE_CHECKING:
    from airflow_delayed.store.dispatch.settle import BatchOutcome

#: Seconds: the upper bounds of the buckets of lateness; the last bucket has no bound.
LATE_BOUNDS = (0.1, 0.25, 0.5, 1, 5, 15, 60, 300, 1800, 7200, 86400)
#: Buckets that count as on time: up to 5 s.
ON_TIME = 5
#: The most destinations of a connection that have rows of their own; the row of the others has an empty name.
_MOST_DESTINATIONS = 20
#: How long minutes are kept, and how long hours are.
MINUTES_KEPT, HISTORY_KEPT = timedelta(days=1), timedelta(days=14)
MINUTE, HOUR = 60, 3600
#: By the seconds before and after now that a timeline shows: the seconds of each of its steps.
STEPS: Mapping[int, int] = {3600: 60, 86_400: 3600, 604_800: 21_600}

assert len(LATE_BOUNDS) == LATE_BUCKETS - 1


@dataclass(slots=True)
class HistoryCounts:
    """The counts of one period; lateness in seconds."""

    dispatched: int = 0
    failed: int = 0
    expired: int = 0
    retried: int = 0
    late: list[int] = field(default_factory=lambda: [0] * LATE_BUCKETS)
    max_late: float = 0.0

    def merge(self, other: HistoryCounts) -> None:
        """Add the counts of another period, destination or dispatcher."""
        self.dispatched += other.dispatched
        self.failed += other.failed
        self.expired += other.expired
        self.retried += other.retried
        self.late = [ours + theirs for ours, theirs in zip(self.late, other.late, strict=True)]
        self.max_late = max(self.max_late, other.max_late)

    @property
    def on_time(self) -> int:
        """How many were dispatched at most 5 s after their due time."""
        return sum(self.late[:ON_TIME])

    def add_dispatched(self, dues: Sequence[datetime], at: datetime) -> None:
        """Count messages that were dispatched at a time.

        :param dues: their due times.
        """
        self.dispatched += len(dues)
        late, least = _lateness(min(dues), at), _lateness(max(dues), at)
        self.max_late = max(self.max_late, late)
        if bisect_left(LATE_BOUNDS, late) == bisect_left(LATE_BOUNDS, least):
            # most batches, which then cost nothing a message
            self.late[bisect_left(LATE_BOUNDS, late)] += len(dues)
            return
        for due in dues:
            self.late[bisect_left(LATE_BOUNDS, _lateness(due, at))] += 1

    def columns(self) -> dict[str, Any]:
        """Return the values of the table's columns."""
        numbers = (self.dispatched, self.failed, self.expired, self.retried, *self.late)
        return {**dict(zip(HISTORY_COUNTS, numbers, strict=True)), "MaxLate": self.max_late}

    @classmethod
    def of(cls, row: Any) -> HistoryCounts:
        """Return the counts of a row."""
        numbers = [int(getattr(row, name)) for name in HISTORY_COUNTS]
        dispatched, failed, expired, retried, *late = numbers
        return cls(dispatched, failed, expired, retried, late, float(row.MaxLate))


def _lateness(due: datetime, at: datetime) -> float:
    return max(0.0, (at - due).total_seconds())


class HistoryRecorder:
    """Counts the batches of one dispatcher; from any thread.

    :param clock: returns the database's time.
    """

    def __init__(self, clock: Callable[[], datetime]) -> None:
        self._clock = clock
        self._lock = Lock()
        #: By the beginning of the minute, the connection and the destination.
        self._minutes: dict[datetime, dict[tuple[str, str], HistoryCounts]] = {}
        #: The minute that is counted now; it does not go back with the database's clock.
        self._minute = datetime.min.replace(tzinfo=UTC)
        #: Minutes before this one are complete in the last write.
        self._complete_before = self._minute

    def add(self, conn_id: str, outcome: BatchOutcome) -> None:
        """Count a settled batch."""
        now = self._clock()
        with self._lock:
            self._minute = max(self._minute, now.replace(second=0, microsecond=0))
            minute = self._minutes.setdefault(self._minute, {})

            def counts(destination: str) -> HistoryCounts:
                name = conn_id, destination
                if name not in minute:
                    minute[name] = HistoryCounts()
                return minute[name]

            at = outcome.at or now
            dues: dict[str, list[datetime]] = defaultdict(list)
            for row in outcome.delivered:
                dues[row["Destination"]].append(row["Time"])
            for destination, times in dues.items():
                counts(destination).add_dispatched(times, at)
            for row in (*outcome.dead_lettered, *(row for row, _ in outcome.failed)):
                counts(row["Destination"]).failed += 1
            for row in outcome.expired:
                counts(row["Destination"]).expired += 1
            for planned in outcome.retry:
                counts(planned.row["Destination"]).retried += 1

    def write(self, connection: Connection, tables: Tables, dispatcher: str) -> None:
        """Write the counts of the minutes that may have changed, in place of those written before."""
        if not self._minutes:
            return
        with self._lock:
            self._complete_before = self._minute
            kept = {minute: _largest(counted) for minute, counted in self._minutes.items()}
        history = tables.history
        written = history.c.At.in_(kept), history.c.Seconds == MINUTE, history.c.Dispatcher == dispatcher
        connection.execute(delete(history).where(*written))
        _insert(connection, tables, dispatcher, MINUTE, kept)

    def forget_written(self) -> None:
        """Forget the minutes that the last write had whole, after it was committed."""
        with self._lock:
            for minute in [minute for minute in self._minutes if minute < self._complete_before]:
                del self._minutes[minute]


def _largest(counted: Mapping[tuple[str, str], HistoryCounts]) -> dict[tuple[str, str], HistoryCounts]:
    """Return the counts with at most 20 destinations of each connection by name."""
    kept: dict[tuple[str, str], HistoryCounts] = {}
    named: dict[str, int] = {}
    for (conn_id, destination), counts in sorted(counted.items(), key=lambda one: -one[1].dispatched):
        named[conn_id] = named.get(conn_id, 0) + 1
        name = destination if named[conn_id] <= _MOST_DESTINATIONS else ""
        kept.setdefault((conn_id, name), HistoryCounts()).merge(counts)
    return kept


def _insert(
    connection: Connection,
    tables: Tables,
    dispatcher: str,
    seconds: int,
    counted: Mapping[datetime, Mapping[tuple[str, str], HistoryCounts]],
) -> None:
    rows = [
        {
            "At": begin,
            "Seconds": seconds,
            "Dispatcher": dispatcher,
            "ConnId": conn_id,
            "Destination": destination,
            **counts.columns(),
        }
        for begin, by_name in counted.items()
        for (conn_id, destination), counts in by_name.items()
    ]
    if rows:
        connection.execute(insert(tables.history), rows)


def condense(connection: Connection, tables: Tables, dispatcher: str, now: datetime) -> int:
    """Make hours of minutes that are over a day old, and delete what is over 14 days old; return how many rows.

    Up to 1000 rows that no other dispatcher has locked. The hours are rows of this dispatcher.
    """
    history = tables.history
    hour = now.replace(minute=0, second=0, microsecond=0)
    oldest, minutes_from = hour - HISTORY_KEPT, hour - MINUTES_KEPT
    old = or_(history.c.At < oldest, and_(history.c.Seconds == MINUTE, history.c.At < minutes_from))
    found = select(history).where(old, history.c.At < minutes_from).order_by(history.c.At).limit(IDS)
    rows = connection.execute(found.with_for_update(skip_locked=True)).all()
    if not rows:
        return 0
    hours: dict[datetime, dict[tuple[str, str], HistoryCounts]] = {}
    for row in rows:
        if row.At >= oldest:
            begin = row.At.replace(minute=0)
            one = hours.setdefault(begin, {}).setdefault((row.ConnId, row.Destination), HistoryCounts())
            one.merge(HistoryCounts.of(row))
    own = history.c.At.in_(hours), history.c.Seconds == HOUR, history.c.Dispatcher == dispatcher
    for row in connection.execute(select(history).where(*own)) if hours else ():
        hours[row.At].setdefault((row.ConnId, row.Destination), HistoryCounts()).merge(HistoryCounts.of(row))
    _delete(connection, tables, rows)
    if hours:
        connection.execute(delete(history).where(*own))
        _insert(connection, tables, dispatcher, HOUR, {begin: _largest(counted) for begin, counted in hours.items()})
    return len(rows)


def _delete(connection: Connection, tables: Tables, rows: Sequence[Row[Any]]) -> None:
    history = tables.history
    key = [column for column in history.columns if column.primary_key]
    for begin in range(0, len(rows), 100):
        keys = [tuple(getattr(row, column.name) for column in key) for row in rows[begin : begin + 100]]
        same = or_(*(and_(*(column == value for column, value in zip(key, one, strict=True))) for one in keys))
        connection.execute(delete(history).where(same))


@dataclass(frozen=True, slots=True)
class PastStep:
    """What was done in one step of a timeline; ``by_destination`` counts what was dispatched."""

    begin: datetime
    counts: HistoryCounts
    by_destination: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class FutureStep:
    """What falls due in one step of a timeline; the present step counts from now."""

    begin: datetime
    messages: int
    by_destination: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Timeline:
    """The past and the future of a store around ``at``, in steps of so many seconds.

    ``destinations``: the 20 largest, the largest first; last the empty name for all others, if there are any.
    """

    at: datetime
    step_seconds: int
    destinations: Sequence[str]
    past: Sequence[PastStep]
    future: Sequence[FutureStep]


def timeline(engine: Engine, tables: Tables, seconds: int) -> Timeline:
    """Return what was dispatched in the last so many seconds, and what falls due in the next.

    It reads the rows that fall due within that time by an index.

    :raises ValueError: ``seconds`` is none of 3600, 86400 and 604800.
    """
    if seconds not in STEPS:
        raise ValueError(f"seconds={seconds} must be one of {', '.join(map(str, STEPS))}")
    step = STEPS[seconds]
    with dialect_of(engine).read_only(engine) as connection:
        now = database_time(connection)
        past = _past(connection, tables, now, seconds, step)
        future = _future(connection, tables, now, seconds, step)
    totals: dict[str, int] = {}
    for by_destination in (*(one.by_destination for one in past), *(one.by_destination for one in future)):
        for name, count in by_destination.items():
            totals[name] = totals.get(name, 0) + count
    names = sorted((name for name in totals if name), key=lambda name: (-totals[name], name))
    largest = names[:_MOST_DESTINATIONS]
    others = [""] if totals.keys() - set(largest) else []
    known = set(largest)
    return Timeline(
        now,
        step,
        [*largest, *others],
        [PastStep(one.begin, one.counts, _named(one.by_destination, known)) for one in past],
        [FutureStep(one.begin, one.messages, _named(one.by_destination, known)) for one in future],
    )


def _named(counted: Mapping[str, int], known: set[str]) -> dict[str, int]:
    named: dict[str, int] = {}
    for name, count in counted.items():
        key = name if name in known else ""
        named[key] = named.get(key, 0) + count
    return named


def _past(connection: Connection, tables: Tables, now: datetime, seconds: int, step: int) -> list[PastStep]:
    last = _floor(now, step)
    begins = [last - timedelta(seconds=step * number) for number in reversed(range(seconds // step + 1))]
    steps = {begin: PastStep(begin, HistoryCounts(), {}) for begin in begins}
    history = tables.history
    sums = [func.sum(history.c[name]).label(name) for name in HISTORY_COUNTS]
    found = (
        select(history.c.At, history.c.Destination, *sums, func.max(history.c.MaxLate).label("MaxLate"))
        .where(history.c.At >= begins[0])
        .group_by(history.c.At, history.c.Destination)
    )
    for row in connection.execute(found):
        one = steps.get(_floor(row.At, step))
        if one is not None:
            counts = HistoryCounts.of(row)
            one.counts.merge(counts)
            assert isinstance(one.by_destination, dict)
            one.by_destination[row.Destination] = one.by_destination.get(row.Destination, 0) + counts.dispatched
    return list(steps.values())


def _future(connection: Connection, tables: Tables, now: datetime, seconds: int, step: int) -> list[FutureStep]:
    first = _floor(now, step)
    begins = [first + timedelta(seconds=step * number) for number in range(seconds // step + 1)]
    counted: dict[datetime, dict[str, int]] = {begin: {} for begin in begins}
    table = tables.messages
    unit: Literal["minute", "hour"] = "minute" if step < HOUR else "hour"
    begin = dialect_of(connection).truncated(table.c.Time, unit).label("begin")
    end = begins[-1] + timedelta(seconds=step)
    found = (
        select(begin, table.c.Destination, func.count().label("many"))
        .where(table.c.Time > now, table.c.Time < end)
        .group_by(begin, table.c.Destination)
    )
    for row in connection.execute(found):
        one = counted[_floor(beginning(row.begin), step)]
        one[row.Destination] = one.get(row.Destination, 0) + int(row.many)
    return [FutureStep(begin, sum(one.values()), one) for begin, one in counted.items()]


def _floor(moment: datetime, step: int) -> datetime:
    since = int(moment.timestamp())
    return datetime.fromtimestamp(since - since % step, UTC)


def beginning(begin: datetime | str) -> datetime:
    """Return the time that :meth:`Dialect.truncated` returned."""
    if isinstance(begin, datetime):
        return begin
    return datetime.strptime(begin, "%Y-%m-%d %H:%M" if ":" in begin else "%Y-%m-%d %H").replace(tzinfo=UTC)


def per_minute(connection: Connection, tables: Tables, dispatchers: Iterable[str], now: datetime) -> dict[str, int]:
    """Return how many messages each of these dispatchers dispatched in the last full minute."""
    history = tables.history
    minute = now.replace(second=0, microsecond=0) - timedelta(minutes=1)
    names = list(dispatchers)
    found = (
        select(history.c.Dispatcher, func.sum(history.c.Dispatched))
        .where(history.c.At == minute, history.c.Seconds == MINUTE, history.c.Dispatcher.in_(names))
        .group_by(history.c.Dispatcher)
    )
    return dict.fromkeys(names, 0) | {name: int(count) for name, count in connection.execute(found)}
