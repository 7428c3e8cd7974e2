"""What falls due, and when the last of it will be dispatched, at the speed that the dispatchers have shown.

The speed of a connection is the lowest of what was measured, of the ``max_rate`` of its dispatchers, and of the
destination's rate. It was measured while more was due than the dispatchers sent
(:attr:`airflow_delayed.store.history.HistoryCounts.full`). No Airflow here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import islice
from math import inf
from shlex import quote

from sqlalchemy import Connection, Engine, case, func, null, select

from airflow_delayed.delivery import Finding, State
from airflow_delayed.store import rates
from airflow_delayed.store.counts import DispatcherSeen, dispatchers
from airflow_delayed.store.dialects import database_time, dialect_of
from airflow_delayed.store.dispatch.report import lookaheads
from airflow_delayed.store.history import HISTORY_KEPT, MINUTE
from airflow_delayed.store.schema import Tables, UtcTime

#: What will be late by no more than this is not worth a forecast.
FORECAST_FROM = timedelta(minutes=1)
#: How far ahead a forecast looks, unless it is asked to look farther; and at most.
_AHEAD, FARTHEST = timedelta(days=1), timedelta(days=31)
#: So many minutes make a measured speed, and at most so many, the latest: a minute counts with a second or more in
#: which more was due than the dispatchers sent.
LEAST_MINUTES, MOST_MINUTES = 3, 10
LEAST_MS = 1000
#: The most rows that are read of either table: anybody with the right to INSERT can write more.
MOST_ROWS = 100_000
#: The most destinations whose rates are looked at.
MOST_RATES = 500
#: The least messages of a minute whose end is worth saying that it is not known.
_MANY = 10_000
#: The longest time that a backlog takes in a forecast; a rate that was written by hand may be very small.
_LONGEST = timedelta(days=365)


@dataclass(frozen=True, slots=True)
class Speed:
    """The messages a second that limit a connection or a destination.

    :param limit: what limits them: "measured", "max_rate" or "rate" (of the destination).
    :param measured_at: when they were measured last.
    """

    per_second: float
    limit: str
    measured_at: datetime | None = None

    def __str__(self) -> str:
        """Return the number and what it comes from."""
        number = f"{self.per_second:,.0f}" if self.per_second >= 10 else f"{self.per_second:g}"
        if self.measured_at is not None:
            return f"{number} a second, measured on {self.measured_at:%Y-%m-%d at %H:%M} UTC"
        return f"{number} a second, {'its rate' if self.limit == 'rate' else 'the max_rate of its dispatchers'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Messages that fall due faster than they are dispatched, or for which that is not known.

    :param conn_id: the connection that delivers them.
    :param destination: the destination whose rate limits them; None: all of the connection.
    :param speed: None: it is not known yet; nor is when they are dispatched.
    :param ends_at: when the last is dispatched, and from when on messages are dispatched in time again.
    :param late: how late the latest is, or for how much longer it waits if it was due before.
    """

    conn_id: str
    destination: str | None
    messages: int
    first_due: datetime
    last_due: datetime
    speed: Speed | None = None
    ends_at: datetime | None = None
    late: timedelta = timedelta(0)

    def __str__(self) -> str:
        """Return it as a sentence."""
        when = f"at {self.first_due:%Y-%m-%d %H:%M:%S} UTC"
        if self.last_due > self.first_due:
            end = "%H:%M:%S" if self.last_due.date() == self.first_due.date() else "%Y-%m-%d %H:%M:%S"
            when = f"from {self.first_due:%Y-%m-%d %H:%M:%S} to {self.last_due:{end}} UTC"
        to = f" to destination {self.destination!r}" if self.destination is not None else ""
        due = f"{self.messages:,} messages{to} for connection {self.conn_id!r} are due {when}"
        if self.speed is None or self.ends_at is None:
            return (
                f"{due}; when the last is dispatched is not known yet: there were no {LEAST_MINUTES} minutes in which"
                " more was due than its dispatchers sent"
            )
        return f"{due}; at {self.speed}, the last is dispatched at {self.ends_at:%Y-%m-%d %H:%M:%S} UTC"

    def finding(self, store: str) -> Finding:
        """Return the warning with its remedy; what is not known yet is unknown.

        :param store: the store's name.
        """
        resource = f"messages of store {store!r} for connection {self.conn_id!r}"
        if self.speed is None:
            return Finding(state=State.UNKNOWN, resource=resource, found=str(self), code="forecast")
        faster = {
            "rate": f"a higher rate: airflow delayed rates --store-conn-id {quote(store)}"
            f" {quote(self.destination or '')}=...",
            "max_rate": "a higher max_rate",
        }.get(self.speed.limit, "another dispatcher beside it")
        return Finding(
            state=State.WARNING,
            resource=resource,
            found=str(self),
            code="forecast",
            remedy=f"nothing, if they may be late; else spread= in their sends, or {faster}",
        )


@dataclass(frozen=True, slots=True)
class _Due:
    """What falls due within a minute, about evenly between the first and the last.

    :param destination: None: it has no rate.
    """

    deliver_conn_id: str | None
    destination: str | None
    rate: float
    first: datetime
    last: datetime
    messages: int

    def beside(self, other: _Due) -> _Due:
        """Return both together."""
        first, last = min(self.first, other.first), max(self.last, other.last)
        return replace(self, first=first, last=last, messages=self.messages + other.messages)


def forecasts(engine: Engine, tables: Tables, conn_id: str, until: datetime | None = None) -> list[Forecast]:
    """Return what will be more than a minute late, the first by due time first, and what is not known.

    It is as if each connection worked, and a dispatcher was at work. It reads all that falls due until then.

    :param conn_id: the store's name, which stands for its queue tables.
    :param until: look at what falls due until then, at most 31 days ahead; None: within a day.
    """
    with dialect_of(engine).read_only(engine) as connection:
        seen, now = dispatchers(connection, tables), database_time(connection)
        ahead = lookaheads(connection, tables, at_end=False)
        measured = _measured(connection, tables)
        due = _due(connection, tables, now + _AHEAD if until is None else min(until, now + FARTHEST))
    found: list[Forecast] = []
    for name, of_connection in _grouped(due, lambda one: one.deliver_conn_id).items():
        shown, window = conn_id if name is None else name, ahead.get(name, timedelta(0))
        known = filter(None, (measured.get(shown), _max_rate(seen, name)))
        speed = min(known, key=lambda one: one.per_second, default=None)
        minutes = _by_minute(of_connection)
        if speed is not None:
            found += _late(shown, None, minutes, speed, now, window)
        elif (peak := max(minutes, key=lambda one: one.messages)).messages >= _MANY:
            found.append(_forecast(shown, None, peak))
        for destination, rows in _grouped(of_connection, lambda one: one.destination).items():
            if destination is not None:
                found += _late(shown, destination, _by_minute(rows), Speed(rows[0].rate, "rate"), now, window)
    return sorted(found, key=lambda one: (one.first_due, one.conn_id, one.destination or ""))


def _grouped(rows: Iterable[_Due], key: Callable[[_Due], str | None]) -> dict[str | None, list[_Due]]:
    groups: dict[str | None, list[_Due]] = {}
    for one in rows:
        groups.setdefault(key(one), []).append(one)
    return groups


def _by_minute(rows: Iterable[_Due]) -> list[_Due]:
    """Return what falls due in each minute, whatever its destination."""
    minutes: dict[datetime, _Due] = {}
    for one in rows:
        minute = one.first.replace(second=0, microsecond=0)
        minutes[minute] = minutes[minute].beside(one) if minute in minutes else one
    return [minutes[minute] for minute in sorted(minutes)]


def _late(
    conn_id: str, destination: str | None, minutes: Iterable[_Due], speed: Speed, now: datetime, window: timedelta
) -> Iterator[Forecast]:
    """Yield each time in which messages wait for each other for more than a minute.

    :param window: how long before its due time a message is dispatched.
    """
    backlog: _Due | None = None
    free, late = now, timedelta(0)
    for one in minutes:
        begin, end = max(one.first - window, now), max(one.last - window, now)
        if backlog is not None and free <= begin:
            if late > FORECAST_FROM:
                yield _forecast(conn_id, destination, backlog, speed, free, late)
            backlog, late = None, timedelta(0)
        starts = max(free, begin)
        needs = timedelta(seconds=min(one.messages / speed.per_second, _LONGEST.total_seconds()))
        if starts + needs > end:
            free = min(starts + needs, now + _LONGEST)
            late = max(late, free - max(one.last, now))
            backlog = one if backlog is None else backlog.beside(one)
            continue
        # within this minute what waits is dispatched, beside what comes in
        if backlog is not None and late > FORECAST_FROM:
            waits = (starts - begin) / (1 - needs / (end - begin))
            yield _forecast(conn_id, destination, backlog, speed, begin + waits, late)
        backlog, free, late = None, end, timedelta(0)
    if backlog is not None and late > FORECAST_FROM:
        yield _forecast(conn_id, destination, backlog, speed, free, late)


def _forecast(
    conn_id: str,
    destination: str | None,
    due: _Due,
    speed: Speed | None = None,
    ends_at: datetime | None = None,
    late: timedelta = timedelta(0),
) -> Forecast:
    return Forecast(
        conn_id=conn_id,
        destination=destination,
        messages=due.messages,
        first_due=due.first,
        last_due=due.last,
        speed=speed,
        ends_at=ends_at,
        late=late,
    )


def _due(connection: Connection, tables: Tables, until: datetime) -> list[_Due]:
    """Count what falls due by connection and minute, and by destination where that has a rate."""
    table = tables.messages
    limits = {one.destination: one.per_second for one in islice(rates.read(connection, tables), MOST_RATES)}
    minute = dialect_of(connection).truncated(table.c.Time, "minute").label("minute")
    limited = case((table.c.Destination.in_(list(limits)), table.c.Destination)) if limits else null()
    by = table.c.DeliverConnId, limited.label("limited"), minute
    first, last = (of(table.c.Time, type_=UtcTime()) for of in (func.min, func.max))
    counted = (
        select(*by, func.count().label("many"), first.label("first"), last.label("last"))
        .where(table.c.Time <= until)
        .group_by(table.c.DeliverConnId, *(["limited"] if limits else []), minute)
        .limit(MOST_ROWS)
    )
    return [
        _Due(row.DeliverConnId, row.limited, limits.get(row.limited, inf), row.first, row.last, int(row.many))
        for row in connection.execute(counted)
    ]


def _measured(connection: Connection, tables: Tables) -> dict[str, Speed]:
    """Return the measured speed of each connection, of all its dispatchers together, where there is one."""
    history = tables.history
    full, took = func.sum(history.c.Full).label("full"), func.sum(history.c.FullMs).label("took")
    by = history.c.At, history.c.Seconds, history.c.Dispatcher, history.c.ConnId
    written = (
        select(history.c.At, history.c.ConnId, full, took)
        .where(history.c.FullMs > 0, history.c.At >= database_time(connection) - HISTORY_KEPT)
        .group_by(*by)
        .order_by(history.c.At.desc())
        .limit(MOST_ROWS)
    )
    periods: dict[str, dict[datetime, tuple[int, int]]] = {}
    for row in connection.execute(written):
        of_connection = periods.setdefault(row.ConnId, {})
        counted, longest = of_connection.get(row.At, (0, 0))
        # dispatchers side by side share their time
        of_connection[row.At] = counted + int(row.full), max(longest, int(row.took))
    found = {}
    for conn_id, by_time in periods.items():
        minutes, messages, ms = 0.0, 0, 0
        latest: datetime | None = None
        for at, (counted, took_ms) in by_time.items():
            if took_ms < LEAST_MS or minutes >= MOST_MINUTES:
                continue
            latest = latest or at
            # an hour's row has many minutes
            minutes, messages, ms = minutes + max(1.0, took_ms / (1000 * MINUTE)), messages + counted, ms + took_ms
        if minutes >= LEAST_MINUTES and messages > 0:
            found[conn_id] = Speed(1000 * messages / ms, "measured", latest)
    return found


def _max_rate(seen: Sequence[DispatcherSeen], deliver_conn_id: str | None) -> Speed | None:
    """Return what the dispatchers at work may send together, or what the last one may; None: they have no limit."""
    serving = [one for one in seen if deliver_conn_id in one.conn_ids]
    limits = [one.max_rate for one in serving if one.at_work] or [one.max_rate for one in serving[:1]]
    known = [limit for limit in limits if limit is not None and limit > 0]
    return Speed(sum(known), "max_rate") if known and len(known) == len(limits) else None
