"""Which messages a claim takes next: destinations take turns, and each keeps its rate.

Usually there is one cursor, and the messages of all destinations are claimed in the order of due time. Nothing is
claimed for a destination that takes no messages at present, such as a full queue, until it is tried again. Two kinds of
destinations have cursors of their own, and the cursors take turns:

- A destination with a rate (:mod:`airflow_delayed.store.rates`). Its messages are claimed as far as its bucket has
  tokens, and when they are due, never ahead: the transport would deliver what it got ahead at its due time, at any
  rate.
- A destination whose messages are due, and wait behind a backlog of others. A dispatcher that claims messages which
  are late by seconds, as many as it may, looks for such destinations every second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from sqlalchemy import Connection, select

from airflow_delayed.store import rates
from airflow_delayed.store.dispatch import claim
from airflow_delayed.store.dispatch.claim import ClaimCursor
from airflow_delayed.store.dispatch.settle import Row
from airflow_delayed.store.rates import DestinationRate
from airflow_delayed.store.schema import Tables

#: By how much the messages of a claim are late, when destinations that wait behind them get turns.
LATE = timedelta(seconds=5)
#: Seconds between two looks for destinations that wait behind a backlog; at least ten times as long as a look took.
LOOK_EVERY = 1.0
#: The most destinations of one look, which takes a query for each; the next look goes on behind them.
MOST_DESTINATIONS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimTurns:
    """The cursors of one connection, between two claims.

    :param cursors: the one whose turn is next comes first. One of them has no destination: it takes all messages except
        those of destinations with a rate.
    :param throttled: destinations with a rate had due messages and no tokens at the last claim.
    :param resting: destinations that take no messages at present, and until when none is claimed for them.
    :param only: no other destinations than these; None: any.
    :param looked_up_to: the last look for waiting destinations ended with this one.
    :param look_at: when to look again, by the monotonic clock.
    """

    cursors: Sequence[ClaimCursor]
    throttled: bool = False
    resting: Mapping[str, datetime] = field(default_factory=dict)
    only: Sequence[str] | None = None
    looked_up_to: str = ""
    look_at: float = 0.0

    @classmethod
    def of_connection(cls, deliver_conn_id: str | None, window: timedelta) -> ClaimTurns:
        """Return the turns before the first claim.

        :param deliver_conn_id: the connection; None: the queue tables of the store's own database.
        :param window: how long before its due time a message is claimed.
        """
        return cls(cursors=(ClaimCursor(deliver_conn_id, window),))

    @property
    def main(self) -> ClaimCursor:
        """The cursor of all destinations without a rate."""
        return next(cursor for cursor in self.cursors if cursor.destination is None)

    def limited(self, limits: Sequence[DestinationRate], now: datetime) -> ClaimTurns:
        """Return the turns with a cursor for each destination that has a rate, and for no other but the waiting.

        Destinations that rest at that time have none.
        """
        rest = {name for name, until in self.resting.items() if until > now}
        limited = {limit.destination: limit for limit in limits if limit.destination not in rest}
        if self.only is not None:
            limited = {name: limit for name, limit in limited.items() if name in self.only}
        main, names = self.main, sorted(limited.keys() | rest)
        there = {one.destination for one in self.cursors}
        if list(main.excluded) == names and main.only == self.only and limited.keys() <= there and not rest & there:
            return self
        kept = [one for one in self.cursors if one.destination not in {None, *names, *main.excluded}]
        own = [_limited(main, limit) for limit in limited.values()]
        every = replace(main, excluded=names, only=self.only, since=None, passed="", untouched=False)
        return replace(self, cursors=(*own, *kept, every))


def _limited(main: ClaimCursor, limit: DestinationRate) -> ClaimCursor:
    return ClaimCursor(main.deliver_conn_id, timedelta(0), limit.destination, furthest=main.furthest)


class ClaimRound:
    """The turns of one transaction: ask for the :meth:`next` cursor, claim, and report what was :meth:`served`.

    :param limits: all rates.
    :param now: the database's time, of this transaction.
    """

    def __init__(
        self,
        connection: Connection,
        tables: Tables,
        turns: ClaimTurns,
        limits: Sequence[DestinationRate],
        now: datetime,
        *,
        database_time: Callable[[Connection], datetime],
        monotonic: Callable[[], float],
    ) -> None:
        self._connection = connection
        self._tables = tables
        self._turns = turns.limited(limits, now)
        self._limits = {limit.destination: limit for limit in limits}
        #: The time by which messages are due, and a later one by which tokens are there.
        self._began = self._now = now
        self._monotonic = monotonic
        self._waiting = deque(self._turns.cursors)
        self._ended: list[ClaimCursor] = []
        self._buckets: dict[str, DestinationRate] = {}
        self._taken: dict[str, int] = {}
        if limits:
            self._lock_buckets(database_time)

    def _lock_buckets(self, database_time: Callable[[Connection], datetime]) -> None:
        due = [one for one in self._limits.values() if one.first_due is not None and one.first_due <= self._now]
        self._buckets = rates.lock(self._connection, self._tables, due, self._now)
        if self._buckets:
            # read after the locks, so that it is later than what others wrote before
            self._now = database_time(self._connection)
        for name, bucket in self._buckets.items():
            if bucket.empty_at > self._now:
                # the clock was set back
                self._buckets[name] = replace(bucket, empty_at=self._now)
                self._taken[name] = 0

    def next(self, most: int) -> tuple[ClaimCursor, int] | None:
        """Return the cursor whose turn it is, and how many messages it may claim, at least one; None: none may."""
        while self._waiting:
            cursor = self._waiting[0]
            allowed = min(most, self._tokens(cursor))
            if allowed:
                return cursor, allowed
            self._ended.append(self._waiting.popleft())
        return None

    def served(self, cursor: ClaimCursor, rows: Sequence[Row], wanted: int, *, from_oldest: bool) -> None:
        """Note what the cursor has claimed whose turn it was.

        :param cursor: as it is after the claim.
        :param wanted: how many messages it might claim.
        :param from_oldest: it began with the oldest message.
        """
        self._waiting.popleft()
        name, full = cursor.destination, len(rows) == wanted
        if name in self._limits:
            assert name is not None
            self._taken[name] = self._taken.get(name, 0) + len(rows)
        elif rows and len(self._turns.cursors) > 1:
            self._waiting = deque(other.beside(cursor) for other in self._waiting)
            self._ended = [other.beside(cursor) for other in self._ended]
        if full:
            self._waiting.append(cursor)
            if name is None:
                self._look_for_waiting(cursor, rows)
        elif name is None and self._is_throttled:
            # each claim from the oldest on would read all throttled messages: the next one does, a second later
            self._ended.append(replace(cursor, since=self._began + cursor.window, passed="", untouched=False))
        elif not rows and not from_oldest:
            # there may be older ones
            self._waiting.append(cursor)
        elif name is None or name in self._limits:
            self._ended.append(cursor)

    def end(self) -> ClaimTurns:
        """Write the buckets, and return the turns for the next transaction, if this one is committed."""
        for name, count in self._taken.items():
            self._limits[name] = self._buckets[name].taken(count, self._now) if count else self._buckets[name]
            rates.write(self._connection, self._tables, self._limits[name])
        cursors = (*self._waiting, *self._ended)
        return replace(self._turns, cursors=cursors, throttled=self._is_throttled)

    def _tokens(self, cursor: ClaimCursor) -> int:
        name = cursor.destination
        if name is None or name not in self._limits:
            return _NO_LIMIT
        bucket = self._buckets.get(name)
        return bucket.tokens(self._now) - self._taken.get(name, 0) if bucket else 0

    @property
    def _is_throttled(self) -> bool:
        return any(limit.is_throttled(self._now) for limit in self._limits.values())

    def _look_for_waiting(self, main: ClaimCursor, rows: Sequence[Row]) -> None:
        """Give cursors to destinations that wait behind late messages, if these were as many as might be claimed."""
        began = self._monotonic()
        if began < self._turns.look_at or not rows or rows[-1]["Time"] > self._began - LATE:
            return
        served = {row["Destination"] for row in rows} | {one.destination for one in self._turns.cursors}
        after = self._turns.looked_up_to
        if main.only is not None:
            return
        names, after = late_destinations(self._connection, self._tables, self._now, after, {*served, *main.excluded})
        begin = replace(main, since=None, passed="", untouched=False, excluded=())
        self._waiting.extendleft(replace(begin, destination=name) for name in reversed(names))
        took = self._monotonic() - began
        look_at = began + took + max(LOOK_EVERY, 10 * took)
        cursors = (*self._turns.cursors, *self._waiting)
        self._turns = replace(self._turns, cursors=cursors, looked_up_to=after, look_at=look_at)


#: More than any claim takes.
_NO_LIMIT = 2**31


def late_destinations(
    connection: Connection, tables: Tables, now: datetime, after: str, served: Collection[str | None]
) -> tuple[list[str], str]:
    """Return destinations that have due messages, and the place from which the next look goes on.

    It reads one index entry for each destination, however many messages there are.

    :param after: the place of the last look; "" is the beginning.
    :param served: destinations to leave out.
    """
    table = tables.messages
    names: list[str] = []
    for _ in range(MOST_DESTINATIONS):
        first = select(table.c.Destination, table.c.Time).where(table.c.Destination > after)
        ordered = first.order_by(table.c.Destination, table.c.Time).limit(1)
        row = connection.execute(ordered).first()
        # another program may have written a name that is behind itself
        if row is None or row.Destination == after:
            return names, ""
        after = row.Destination
        if row.Time <= now and after not in served:
            names.append(after)
    return names, after


def next_claim(
    connection: Connection, tables: Tables, turns: ClaimTurns, limits: Sequence[DestinationRate], now: datetime
) -> datetime | None:
    """Return when a message of a connection may be claimed next; None: there is no message."""
    turns = turns.limited(limits, now)
    moments = [claim.next_entry(connection, tables, turns.main, now)]
    moments += [until for until in turns.resting.values() if until > now]
    for limit in limits:
        if turns.resting.get(limit.destination, now) > now:
            continue
        if turns.only is not None and limit.destination not in turns.only:
            continue
        first = limit.first_due
        if first is not None and first <= now:
            # it may be an attempt that failed, and is tried again later
            first = claim.next_entry(connection, tables, _limited(turns.main, limit), now)
        if first is not None:
            moments.append(max(first, limit.ready_at))
    return min((moment for moment in moments if moment is not None), default=None)
