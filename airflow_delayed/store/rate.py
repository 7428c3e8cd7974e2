"""A limit to how many messages a second are handed over."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

#: What may be sent at once after a pause: this many seconds' worth.
BURST_SECONDS = 1.0


class TokenBucket:
    """Gives out at most ``per_second`` a second, over any stretch of time, and one second's worth at once.

    May be used by several threads.

    :param per_second: more than 0.
    """

    def __init__(self, per_second: float, monotonic: Callable[[], float]) -> None:
        self._rate = per_second
        self._most = max(1.0, per_second * BURST_SECONDS)
        self._monotonic = monotonic
        self._lock = Lock()
        self._level = self._most
        self._at = monotonic()

    def take(self, wanted: int) -> int:
        """Take as many as there are, up to ``wanted``; none when there is not a whole one."""
        with self._lock:
            now = self._monotonic()
            self._level = min(self._most, self._level + max(0.0, now - self._at) * self._rate)
            self._at = now
            taken = min(wanted, int(self._level))
            self._level -= taken
            return taken

    def give_back(self, unused: int) -> None:
        """Give back what was taken and not used."""
        with self._lock:
            self._level = min(self._most, self._level + unused)

    def wait(self, wanted: int) -> float:
        """Return the seconds until there are ``wanted``, or as many as there can be at once."""
        with self._lock:
            level = self._level + max(0.0, self._monotonic() - self._at) * self._rate
            return max(0.0, (min(wanted, self._most) - level) / self._rate)
