"""When to stop trying, as in NServiceBus's MSMQ transport: by the time that nothing has worked, or by a rate.

Source: NServiceBus.Transport.Msmq, DelayedDelivery: RepeatedFailuresOverTimeCircuitBreaker, FailureRateCircuitBreaker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import datetime, timedelta
from threading import Lock

#: Over which the rate of failures is taken; in seconds.
RATE_WINDOW = 30.0


class Breaker:
    """Trips when something has failed for longer than ``time_to_trigger``, with no success in between.

    The first failure after a success starts the time. May be used by several threads.

    :param what: what fails, for its text.
    :param monotonic: seconds, for the time that passes.
    :param clock: the time of day, for its text.
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
        """Note that it works."""
        self._since = None

    def failure(self, reason: str) -> bool:
        """Note that it failed, and return whether that was once too often."""
        with self._lock:
            if self._since is None:
                self._since = self._monotonic(), self._clock()
            self._last = reason
        return self.tripped

    @property
    def tripped(self) -> bool:
        """Whether it has failed for too long."""
        since = self._since
        return since is not None and self._monotonic() - since[0] >= self._limit.total_seconds()

    @property
    def remaining(self) -> float:
        """Return the seconds until it trips, if nothing works by then."""
        since = self._since
        limit = self._limit.total_seconds()
        return limit if since is None else max(0.0, limit - (self._monotonic() - since[0]))

    def __str__(self) -> str:
        since = self._since
        when = f"since {since[1]:%Y-%m-%d %H:%M:%S} UTC" if since else "not now"
        return f"{self._what} has failed {when} (limit {self._limit.total_seconds():g} s), last with: {self._last}"


class RateBreaker:
    """Trips when failures come faster than so many a second, over 30 seconds: more than 30 times as many in that time.

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
        """Note failures, and return whether they were too many. Once tripped it stays so."""
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
