"""Limits of a dispatcher: two circuit breakers, and the rate of its process.

While a broker is away, the worker of its connection tries again after growing pauses until its :class:`Breaker` trips,
after 30 s by default. Then the run gives up that connection, dispatches what is due on the others, and fails. The
messages stay in the store, with no failure counted against them, and the next run tries again.

The breakers are those of NServiceBus's MSMQ transport. Source: NServiceBus.Transport.Msmq, DelayedDelivery:
RepeatedFailuresOverTimeCircuitBreaker, FailureRateCircuitBreaker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import datetime, timedelta
from enum import Enum
from threading import Lock

from airflow_delayed.store.policy import DispatchPolicy

#: The time over which the rate of failures is taken; in seconds.
RATE_WINDOW = 30.0
#: A claim waits for the tokens of so many seconds, at least for one token: a claim for each token would cost too much.
PORTION_SECONDS = 0.1


class Activity(Enum):
    """What a dispatcher does in the store's database; each has a breaker of its own, because one may fail alone."""

    CLAIM = "claiming messages"
    SETTLE = "writing down what became of messages"
    DELIVER = "delivering into queue tables"
    HOUSEKEEPING = "writing the dispatcher's sign of life and forgetting old ids"

    def limit(self, policy: DispatchPolicy) -> timedelta:
        """Return how long it may fail until the run ends."""
        if self is Activity.CLAIM:
            return policy.time_to_trigger_fetch_circuit_breaker
        return policy.time_to_trigger_store_circuit_breaker


class Breaker:
    """Trips when something has failed for longer than ``time_to_trigger``, with no success in between.

    The first failure after a success starts the time. May be used by several threads.

    :param what: the operation, for the text.
    :param monotonic: returns seconds, which decide.
    :param clock: returns the time, for the text.
    """

    def __init__(
        self, what: str, time_to_trigger: timedelta, monotonic: Callable[[], float], clock: Callable[[], datetime]
    ) -> None:
        self._what = what
        self._limit = time_to_trigger
        self._monotonic = monotonic
        self._clock = clock
        self._lock = Lock()
        self._since: tuple[float, datetime] | None = None
        self._last = ""

    def success(self) -> None:
        """Note a success."""
        self._since = None

    def restart(self) -> None:
        """Let the time until it trips begin now; it has failed since as long as before."""
        if self._since is not None:
            self._since = self._monotonic(), self._since[1]

    def failure(self, reason: str) -> bool:
        """Note a failure, and return whether the breaker has tripped."""
        with self._lock:
            if self._since is None:
                self._since = self._monotonic(), self._clock()
            self._last = reason
        return self.tripped

    @property
    def failing_since(self) -> datetime | None:
        """When the operation failed first, with no success since; None: it works."""
        since = self._since
        return None if since is None else since[1]

    @property
    def last(self) -> str:
        """The reason of the last failure."""
        return self._last

    @property
    def tripped(self) -> bool:
        """Whether the operation has failed for too long."""
        since = self._since
        return since is not None and self._monotonic() - since[0] >= self._limit.total_seconds()

    @property
    def remaining(self) -> float:
        """The seconds until it trips, without a success before."""
        since = self._since
        limit = self._limit.total_seconds()
        return limit if since is None else max(0.0, limit - (self._monotonic() - since[0]))

    def __str__(self) -> str:
        since = self._since
        when = f"since {since[1]:%Y-%m-%d %H:%M:%S} UTC" if since else "not now"
        return f"{self._what} has failed {when} (limit {self._limit.total_seconds():g} s), last with: {self._last}"


class RateBreaker:
    """Trips when there are more failures than ``maximum_per_second`` a second, over 30 seconds.

    May be used by several threads.
    """

    def __init__(
        self,
        what: str,
        maximum_per_second: float,
        monotonic: Callable[[], float],
        clock: Callable[[], datetime],
    ) -> None:
        self._what = what
        self._rate = maximum_per_second
        self._most = maximum_per_second * RATE_WINDOW
        self._monotonic = monotonic
        self._clock = clock
        self._lock = Lock()
        self._failures: deque[tuple[float, int]] = deque()
        self._since: datetime | None = None
        self._last = ""

    def failure(self, reason: str, count: int = 1) -> bool:
        """Note failures, and return whether there were too many. A tripped breaker stays tripped."""
        with self._lock:
            now = self._monotonic()
            self._failures.append((now, count))
            while now - self._failures[0][0] > RATE_WINDOW:
                self._failures.popleft()
            self._last = reason
            if self._since is None and sum(number for _, number in self._failures) > self._most:
                self._since = self._clock()
            return self._since is not None

    @property
    def tripped(self) -> bool:
        """Whether there were too many."""
        return self._since is not None

    def __str__(self) -> str:
        when = f" by {self._since:%Y-%m-%d %H:%M:%S} UTC" if self._since else ""
        return f"{self._what} has failed more often than {self._rate:g} times a second{when}, last with: {self._last}"


class RateLimit:
    """Limits the messages that this process claims to ``per_second`` a second; those of one second may go at once.

    A token bucket, full at its beginning. May be used by several threads.

    :param per_second: more than 0; None: no limit.
    """

    def __init__(self, per_second: float | None, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._lock = Lock()
        self._rate = per_second
        if per_second is not None:
            self._most, self._portion = max(1.0, per_second), max(1.0, per_second * PORTION_SECONDS)
            #: When the bucket was empty: what has come in since then is there.
            self._empty_at = monotonic() - self._most / per_second

    def take(self, most: int) -> int:
        """Take up to so many tokens; 0: wait first."""
        with self._lock:
            if self._rate is None:
                return most
            now = self._monotonic()
            # after a wait for one token a little less may have come in, by the rounding of times
            level = min(self._most, (now - self._empty_at) * self._rate + 1e-6)
            taken = min(most, int(level)) if level >= self._portion else 0
            if taken:
                self._empty_at = now - (level - taken) / self._rate
            return taken

    def give_back(self, unused: int) -> None:
        """Give back tokens that were not used."""
        with self._lock:
            if self._rate is not None:
                self._empty_at -= unused / self._rate

    @property
    def limits(self) -> bool:
        """Whether there is a limit."""
        return self._rate is not None

    @property
    def wait(self) -> float:
        """The seconds until tokens can be taken."""
        with self._lock:
            if self._rate is None:
                return 0.0
            return max(0.0, self._empty_at + self._portion / self._rate - self._monotonic())
