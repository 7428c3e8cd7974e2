"""How long a send has been without a confirm, over all of its connections, and when that is too long. No network."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from math import ceil

from airflow_delayed.rabbitmq.backlog import FEW, Entry, Unconfirmed

#: Times as long as one destination alone, the whole connection may confirm nothing.
ALL_SILENT = 5
#: Seconds without a confirm until the first warning; each further one comes after twice as many.
FIRST_WARNING = 10.0
#: Seconds between two looks at the time, at most.
_INTERVAL = 0.5
#: How many hosts share the time: with more, none of them would have long enough.
_HOSTS = 3


class ConfirmTimeout(Exception):
    """A host has confirmed nothing for its share of the connection's ``confirm_timeout``."""


class QuorumLost(ConfirmTimeout):
    """No confirm will come soon, from any host: queues have lost their quorum, or the nodes that they need hang."""


class SilentDestination(Exception):
    """A destination that confirms nothing blocks the connection, and is given up; the others need a new one."""


class SilenceWatch:
    """Finds destinations that have confirmed nothing for a while, by looks at regular intervals.

    It counts looks, not seconds, because a source of messages may keep a session from reading confirms between two.

    :param seconds: how long a destination may confirm nothing.
    :param interval: seconds between two looks.
    """

    def __init__(self, seconds: float, interval: float) -> None:
        self.seconds = seconds
        self._looks = max(1, ceil(seconds / interval))
        self._now = 0
        #: By look, the last delivery tag then, and how many were settled.
        self._marks: deque[tuple[int, int]] = deque(maxlen=ALL_SILENT * self._looks + 1)
        #: By destination, the look before which it last confirmed or refused a message.
        self._answered: dict[str, int] = {}
        #: By destination whose first message is awaited, the first look that saw it.
        self._introduced_at: dict[str, int] = {}

    def answered(self, destination: str) -> None:
        """Note that a destination confirmed or refused a message."""
        self._answered[destination] = self._now

    def look(
        self, unconfirmed: Unconfirmed, introduced: Collection[str], *, blocked: bool
    ) -> tuple[Collection[str], bool]:
        """Return destinations that are silent for too long, and whether they block the whole connection.

        If nothing at all is confirmed, the broker may wait for one destination before it reads the messages of others.
        Only after five times as long those count as silent whose messages it has surely read, for a broker that is
        busy with its disk confirms nothing for seconds, and messages that are given up then arrive twice.

        :param introduced: destinations whose first message is awaited.
        :param blocked: the broker's alarm blocks the connection.
        """
        self._now += 1
        self._marks.append((unconfirmed.last, unconfirmed.settled))
        if blocked:
            self._marks.clear()
            self._introduced_at.clear()
            return (), False
        self._introduced_at = {name: self._introduced_at.get(name, self._now) for name in introduced}
        if slow := {name for name, since in self._introduced_at.items() if self._now - since >= self._looks}:
            return slow, False
        if len(self._marks) <= self._looks:
            return (), False
        last, settled = self._marks[-1 - self._looks]
        late = unconfirmed.up_to(last)
        if late and settled == unconfirmed.settled:
            if len(self._marks) < self._marks.maxlen or self._marks[0][1] != settled:  # type: ignore[operator]
                return (), False
            return _read(unconfirmed.up_to(self._marks[0][0])), True
        since = self._now - self._looks
        destinations = {entry.message.destination for entry in late if entry.at_once}
        return {name for name in destinations if self._answered.get(name, since - 1) < since}, False


def _read(entries: Sequence[Entry]) -> set[str]:
    """Return the destinations of the messages that the broker has read: it stops when one has enough of them."""
    counts: Counter[str] = Counter()
    for entry in entries:
        if not entry.at_once:
            break
        counts[entry.message.destination] += 1
        if counts[entry.message.destination] > FEW:
            break
    return set(counts)


class ConfirmTimer:
    """Counts the seconds since the last confirm, or since the oldest unconfirmed message if that is later.

    A binding that was made, and any other answer that a session waits for count as a confirm. So does a refusal, for
    the host answers; the session counts by ``elapsed`` how long a message is refused. The timer stands still while the
    broker's alarm blocks the connection. Most of a long pause between two looks does not count: the source of the
    messages then kept the session from reading answers.

    :param timeout: seconds without a confirm until the send ends.
    :param hosts: how many hosts there are. Each may take its share of the timeout, since another host may be healthy.
    """

    def __init__(self, timeout: float, hosts: int, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.timeout = timeout
        #: Seconds without a confirm until the next host is tried.
        self.host_timeout = timeout / min(hosts, _HOSTS)
        #: Seconds without a confirm until a send ends whose queues are known to have no quorum.
        self.patience = min(FIRST_WARNING, timeout / 2)
        #: Seconds between two calls of :meth:`advance`.
        self.interval = min(_INTERVAL, timeout / 10)
        #: Seconds without a confirm.
        self.silent = 0.0
        #: Seconds since the send began, with or without confirms.
        self.elapsed = 0.0
        self._silent_before = 0.0
        self._warning = FIRST_WARNING
        self._answers = 0
        self._monotonic = monotonic
        self._looked_at = monotonic()

    @property
    def over(self) -> bool:
        """Whether the send has to end."""
        return self.silent >= self.timeout

    @property
    def host_over(self) -> bool:
        """Whether this connection has to end."""
        return self.over or self.silent - self._silent_before >= self.host_timeout

    def connect(self, answers: int) -> None:
        """Begin with a connection; what it awaits was awaited before.

        :param answers: how many the connection has had until now.
        """
        self._answers = answers
        self._silent_before = self.silent
        self._looked_at = self._monotonic()

    def advance(self, answers: int, *, awaits: bool, blocked: bool) -> None:
        """Count the time since the last call.

        :param answers: how many answers the connection has had, of any number: only that it changes counts.
        :param awaits: whether the connection awaits an answer.
        :param blocked: whether the broker's alarm blocks the connection.
        """
        now = self._monotonic()
        seconds, self._looked_at = now - self._looked_at, now
        if not blocked:
            self.add(min(seconds, self.timeout / 10))
        if not awaits or answers != self._answers:
            self._answers = answers
            self.silent = self._silent_before = 0.0

    def add(self, seconds: float) -> None:
        """Count a pause before a connection."""
        self.silent += seconds
        self.elapsed += seconds

    def warns(self, seconds: float) -> bool:
        """Return whether it is time for a warning: after 10 s at most, and then after 20, 40, ...

        :param seconds: without a confirm of one message, or of all; called at each look.
        """
        before = 2 * self.interval
        if seconds < FIRST_WARNING - before:
            self._warning = FIRST_WARNING
        if seconds < self._warning - before:
            return False
        self._warning *= 2
        return True
