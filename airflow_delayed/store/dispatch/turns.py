"""Which messages a claim takes next: destinations take turns.

Usually there is one cursor, the main one, and the messages of all destinations are claimed in the order of due time.
Nothing is claimed for a destination that rests: it takes no messages at present, such as a full queue. However many
wait for it, they hardly slow down the claims of others: while one rests, the main cursor seldom begins with the oldest
message. These destinations have cursors of their own, and the cursors take turns:

- A destination whose messages are late, and wait behind a backlog of others, or before the place where the main cursor
  is. The dispatcher looks for such destinations every second.
- A destination that has rested, and is tried again, with :data:`TRIED` messages. If there is none, it is forgotten.

A destination that is paused (:mod:`airflow_delayed.store.pauses`) rests; for a connection that is paused nothing is
claimed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from sqlalchemy import Connection, select

from airflow_delayed.message import UTC
from airflow_delayed.store.dispatch import claim
from airflow_delayed.store.dispatch.claim import ClaimCursor
from airflow_delayed.store.dispatch.settle import Row
from airflow_delayed.store.pauses import Pause
from airflow_delayed.store.schema import Tables

#: By how much the messages of a claim are late, when destinations that wait behind them get turns.
_LATE = timedelta(seconds=5)
#: Seconds between two looks for destinations that wait behind a backlog; at least ten times as long as a look took.
_LOOK_EVERY = 1.0
#: The most destinations of one look, which takes a query for each; the next look goes on behind them.
_MOST_DESTINATIONS = 100
#: Until when a destination rests that is paused.
NEVER = datetime.max.replace(tzinfo=UTC)
#: The most messages with which a destination is tried again that has rested, and the most such destinations at a time.
TRIED, MOST_TRIED = 10, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimTurns:
    """The cursors of one connection, between two claims.

    :param cursors: the one whose turn is next comes first. One of them, the main one, has no destination: it takes all
        messages except those of destinations that rest or are tried again.
    :param resting: destinations that take no messages at present, and until when none is claimed for them.
    :param idle: destinations that were to be tried again, and have no message.
    :param looked_up_to: the last look for waiting destinations ended with this one.
    :param look_at: when to look again, by the monotonic clock.
    :param paused: the connection is paused.
    """

    cursors: Sequence[ClaimCursor]
    resting: Mapping[str, datetime] = field(default_factory=dict)
    idle: Collection[str] = ()
    looked_up_to: str = ""
    look_at: float = 0.0
    paused: bool = False

    @classmethod
    def of_connection(cls, deliver_conn_id: str | None, window: timedelta) -> ClaimTurns:
        """Return the turns before the first claim."""
        return cls(cursors=(ClaimCursor(deliver_conn_id, window),))

    @property
    def main(self) -> ClaimCursor:
        """The cursor of all destinations."""
        return next(cursor for cursor in self.cursors if cursor.destination is None)

    def at(self, now: datetime) -> ClaimTurns:
        """Return the turns with a cursor for each destination that has one of its own, and for no other but the late.

        Destinations that rest at that time have none.
        """
        rest = {name for name, until in self.resting.items() if until > now}
        # some at a time: each takes a part of what a transaction claims
        tried = sorted(self.resting.keys() - rest)[:MOST_TRIED]
        main, excluded = self.main, sorted(self.resting)
        there = {one.destination for one in self.cursors} - {None}
        if list(main.excluded) == excluded and there.issuperset(tried) and not there & rest:
            return self
        cursors = [_own(main, name) for name in tried]
        cursors += [one for one in self.cursors if one.destination not in {None, *tried, *rest, *main.excluded}]
        if not set(main.excluded).issubset(excluded):
            main = from_oldest(main)
        return replace(self, cursors=(*cursors, replace(main, excluded=excluded)))

    def pausing(self, pauses: Sequence[Pause]) -> ClaimTurns:
        """Return the turns without what is paused at present."""
        paused = any(one.is_of_connection(self.main.deliver_conn_id) for one in pauses)
        names = [one.wanted.destination for one in pauses if one.wanted.destination is not None]
        if not names and paused == self.paused:
            return self
        # what was stored during a pause may be due before the place of a cursor
        cursors = self.cursors if paused == self.paused else [from_oldest(cursor) for cursor in self.cursors]
        resting = {**self.resting, **dict.fromkeys(names, NEVER)}
        return replace(self, cursors=cursors, paused=paused, resting=resting)

    @property
    def skips(self) -> bool:
        """Whether a claim from the oldest message on would read messages that wait for their destination.

        What was due before is then looked for every second, or seldom.
        """
        return bool(self.resting)

    def caught_up(self, now: datetime) -> datetime:
        """Return the due time with which the main cursor goes on that has claimed all that was due."""
        return now + self.main.window - _LATE


def from_oldest(cursor: ClaimCursor) -> ClaimCursor:
    """Return the cursor as it begins with the oldest message."""
    return replace(cursor, since=None, passed="", untouched=False)


def _own(main: ClaimCursor, destination: str) -> ClaimCursor:
    return ClaimCursor(main.deliver_conn_id, main.window, destination, furthest=main.furthest)


class ClaimRound:
    """The turns of one transaction: ask for the :meth:`next` cursor, claim, and report what was :meth:`served`."""

    def __init__(
        self,
        connection: Connection,
        tables: Tables,
        turns: ClaimTurns,
        now: datetime,
        *,
        monotonic: Callable[[], float],
    ) -> None:
        self._connection = connection
        self._tables = tables
        self._turns = turns.at(now)
        self._now = now
        self._monotonic = monotonic
        self._waiting = deque(self._turns.cursors)
        self._ended: list[ClaimCursor] = []
        self._idle: set[str] = set()
        if turns.resting:
            self._look_for_late(now - _LATE)

    def next(self, most: int) -> tuple[ClaimCursor, int] | None:
        """Return the cursor whose turn it is, and how many messages it may claim; None: none may."""
        if not self._waiting or self._turns.paused:
            return None
        cursor = self._waiting[0]
        return cursor, min(most, TRIED) if cursor.destination in self._turns.resting else most

    def served(self, cursor: ClaimCursor, rows: Sequence[Row], wanted: int, *, from_oldest: bool) -> None:
        """Note what the cursor has claimed whose turn it was.

        :param from_oldest: it began with the oldest message.
        """
        self._waiting.popleft()
        name, full = cursor.destination, len(rows) == wanted
        if rows and len(self._turns.cursors) > 1:
            self._waiting = deque(other.beside(cursor) for other in self._waiting)
            self._ended = [other.beside(cursor) for other in self._ended]
        if name is not None and name in self._turns.resting:
            if not rows:
                self._idle.add(name)
        elif full:
            self._waiting.append(cursor)
            if name is None and rows and rows[-1]["Time"] <= self._now - _LATE:
                self._look_for_late(self._now, {row["Destination"] for row in rows})
        elif name is None and self._turns.skips:
            # each claim from the oldest on would read all messages that rest
            since = self._turns.caught_up(self._now)
            self._ended.append(replace(cursor, since=since, passed="", untouched=False))
        elif not rows and not from_oldest:
            # there may be older ones
            self._waiting.append(cursor)
        elif name is None:
            self._ended.append(cursor)

    def end(self) -> ClaimTurns:
        """Return the turns for the next transaction, if this one is committed."""
        return replace(self._turns, cursors=(*self._waiting, *self._ended), idle=self._idle)

    def _look_for_late(self, due_by: datetime, served: Collection[str] = ()) -> None:
        """Give cursors to destinations that have messages due by a time, and whose turn the main cursor delays."""
        began = self._monotonic()
        if began < self._turns.look_at:
            return
        main = self._turns.main
        others = {*served, *main.excluded, *(one.destination for one in self._turns.cursors)}
        names, after = late_destinations(self._connection, self._tables, due_by, self._turns.looked_up_to, others)
        self._waiting.extendleft(_own(main, name) for name in reversed(names))
        took = self._monotonic() - began
        look_at = began + took + max(_LOOK_EVERY, 10 * took)
        cursors = (*self._turns.cursors, *self._waiting)
        self._turns = replace(self._turns, cursors=cursors, looked_up_to=after, look_at=look_at)


def late_destinations(
    connection: Connection, tables: Tables, due_by: datetime, after: str, served: Collection[str | None]
) -> tuple[list[str], str]:
    """Return destinations that have messages due by a time, and the place from which the next look goes on.

    It reads one index entry for each destination, however many messages there are.

    :param after: the place of the last look; "" is the beginning.
    :param served: destinations to leave out.
    """
    table = tables.messages
    names: list[str] = []
    for _ in range(_MOST_DESTINATIONS):
        first = select(table.c.Destination, table.c.Time).where(table.c.Destination > after)
        ordered = first.order_by(table.c.Destination, table.c.Time).limit(1)
        row = connection.execute(ordered).first()
        # another program may have written a name that is behind itself
        if row is None or row.Destination == after:
            return names, ""
        after = row.Destination
        if row.Time <= due_by and after not in served:
            names.append(after)
    return names, after


def next_claim(connection: Connection, tables: Tables, turns: ClaimTurns, now: datetime) -> datetime | None:
    """Return when a message of a connection may be claimed next; None: there is no message."""
    turns = turns.at(now)
    soon = now + timedelta(seconds=_LOOK_EVERY)
    if turns.paused:
        return soon
    moments: list[datetime | None] = [until for until in turns.resting.values() if until > now]
    # messages that were due before are looked for every second; what is skipped may be all that falls due later
    since, until = (turns.caught_up(now), soon) if turns.skips else (None, None)
    first = claim.next_entry(connection, tables, turns.main, now, since, until)
    moments += [first, soon if since else None]
    return min(filter(None, moments), default=None)
