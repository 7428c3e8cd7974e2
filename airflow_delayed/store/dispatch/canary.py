"""Canaries: two messages a minute that a dispatcher sends to itself, to see how late a broker really delivers.

The first is published when it is due, the second waits in delay levels. Both go to a temporary queue, which no healthy
round leaves behind. What is lost may still arrive when the broker is repaired; so the queue then stays, with its name,
for the next rounds, and after the dispatcher's end until the broker deletes it. Without the queue such a message would
be unroutable, and could block its level.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from contextlib import closing
from datetime import datetime, timedelta
from threading import Event

from airflow_delayed.delivery import Clock, Delivery, TemporaryQueue
from airflow_delayed.errors import explained
from airflow_delayed.message import DelayedMessage
from airflow_delayed.store.dispatch.report import Trouble, TroubleKind
from airflow_delayed.store.dispatch.settle import BatchOutcome
from airflow_delayed.store.lateness import LATE_AFTER
from airflow_delayed.threads import Ticker

log = logging.getLogger(__name__)

#: Seconds before each round. A healthy one takes as long as its second message, so that there is one a minute.
ROUND_EVERY = 45.0
#: The delay of the second message: 11 in hexadecimal digits, so that it passes two levels on each topology.
DELAY = timedelta(seconds=17)
#: How long after its due time a message is waited for, and nothing else is sent.
_GIVE_UP = timedelta(seconds=30)
#: Seconds for which the queue is wanted: in a level without a leader, a message waits until there is one again.
_WANTED = 540.0
#: Seconds between two looks whether the dispatcher ends.
_LOOK = 1.0
#: What comes so long before it is due is of an earlier round; a carried clock may go back by less.
_EARLY = timedelta(seconds=1)
_PREFIX = "airflow-delayed-canary-"
#: The destinations of both in the history.
WHEN_DUE, IN_LEVELS = "canary, published when due", "canary, through the levels"


class Canary:
    """Sends and reads the canaries of one connection, in a thread of its own.

    :param transport: returns a transport for one round.
    :param stop: is set when the dispatcher ends.
    :param arrived: gets the connection and the outcome for each message that has arrived.
    """

    def __init__(
        self,
        conn_id: str,
        transport: Callable[[], Delivery],
        clock: Clock,
        stop: Event,
        arrived: Callable[[str, BatchOutcome], object],
    ) -> None:
        self._conn_id = conn_id
        self._transport = transport
        self._clock = clock
        self._stop = stop
        self._arrived = arrived
        self._queue = f"{_PREFIX}{secrets.token_hex(6)}"
        #: The message that is awaited now: its destination in the history, and when it is due.
        self._awaited: tuple[str, datetime] | None = None
        #: How many messages of earlier rounds have not arrived.
        self._missing = 0
        #: Why the last round failed, and since when they do.
        self._problem: str | None = None
        self._since: datetime | None = None
        #: Whether the log has why no message can be sent.
        self._warned = False
        self._thread: Ticker | None = None

    def start(self) -> None:
        """Begin in a thread."""
        self._thread = Ticker("delayed-canary", ROUND_EVERY, self.round)

    def stop(self) -> None:
        """Begin no more rounds."""
        if self._thread is not None:
            self._thread.stop()

    def close(self, seconds: float) -> None:
        """End the thread, unless the broker keeps it for so many seconds; then it ends later, by itself."""
        if self._thread is not None:
            self._thread.close(seconds)

    def trouble(self, now: datetime) -> Trouble | None:
        """Return what the broker has not delivered in time, also while the connection hangs; from any thread."""
        awaited, problem, since = self._awaited, self._problem, self._since
        if awaited is not None and now - awaited[1] > LATE_AFTER:
            problem = problem or _text(*awaited, "has not arrived")
            since = since or awaited[1]
        if problem is None or since is None:
            return None
        return Trouble(kind=TroubleKind.CANARY, conn_id=self._conn_id, since=since, reason=problem)

    def round(self) -> None:
        """Send both messages, one after the other, and wait for each."""
        in_time = False
        try:
            with closing(self._transport()) as transport, transport.temporary_queue(self._queue, _WANTED) as queue:
                queue.awaited = self._missing > 0
                # an error of the second is an error of the round
                in_time = self._send(transport, queue, WHEN_DUE, timedelta(0)) and self._send(
                    transport, queue, IN_LEVELS, DELAY
                )
        except Exception as error:
            if self._awaited is not None:
                self._fail(*self._awaited, f"cannot be sent and read: {explained(error)}")
            elif not self._warned:
                # the broker is away, which the probe reports, or the user has no right on the queue
                log.warning("connection %r: canaries cannot be sent: %s", self._conn_id, explained(error))
                self._warned = True
        self._awaited = None
        if in_time:
            self._problem = self._since = None
            self._warned = False

    def _send(self, transport: Delivery, queue: TemporaryQueue, name: str, delay: timedelta) -> bool:
        """Send a message and wait for it; return whether it came in time. False also if the dispatcher ends."""
        if self._stop.is_set():
            return False
        due = self._clock() + delay
        self._awaited = name, due
        queue.awaited = True
        self._missing += 1
        message = DelayedMessage(
            destination=queue.name, body=b"canary", due_at=due, message_id=f"canary-{secrets.token_hex(8)}"
        )
        transport.send([message])
        while (left := due + _GIVE_UP - self._clock()) > timedelta(0):
            if queue.arrives(min(left.total_seconds(), _LOOK)):
                self._missing = max(0, self._missing - 1)
                if (now := self._clock()) > due - _EARLY:
                    break
            if self._stop.is_set():
                return False
        else:
            self._fail(name, due, "has not arrived")
            return False
        self._awaited = None
        queue.awaited = self._missing > 0
        self._arrived(self._conn_id, BatchOutcome(delivered=[{"Destination": name, "Time": due}], at=now))
        if now - due > LATE_AFTER:
            self._fail(name, due, f"was {(now - due).total_seconds():.1f} s late")
            return False
        return True

    def _fail(self, name: str, due: datetime, what: str) -> None:
        self._since = self._since or due
        self._problem = _text(name, due, what)


def _text(name: str, due: datetime, what: str) -> str:
    way = "published when due" if name == WHEN_DUE else "through the delay levels"
    return f"a message {way}, at {due:%Y-%m-%d %H:%M:%S} UTC, {what}"
