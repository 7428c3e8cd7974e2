"""What cycling did, how late it was, and what it cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from airflow_delayed.sqs.cost import MILLION, PRICE_FIFO, PRICE_STANDARD

#: Bytes of payload that SQS bills as one request.
_CHUNK = 65_536


def billed(size: int) -> int:
    """Return as how many requests SQS bills one with so many bytes of payload: 64 KiB each, at least one."""
    return max(1, -(-size // _CHUNK))


@dataclass(slots=True)
class Counts:
    """What one pass did, or several together."""

    #: Sent back into the delay queue, for another 900 s.
    moved_back: int = 0
    #: Sent to the destination, with what was left of the delay.
    delivered: int = 0
    #: Could not be sent on; they are in the delay queue still, and are tried again. Counted each time.
    failed: int = 0
    #: Sent on, and could not be deleted from the delay queue: whoever receives them next may send them once more.
    undeleted: int = 0
    #: Sent to the error queue.
    set_aside: int = 0
    fifo_requests: int = 0
    standard_requests: int = 0
    #: Seconds: the longest that a received message had been in the delay queue.
    oldest: int = 0
    #: How late messages are delivered: tenths of a second, rounded up to two digits, and how many.
    late: Counter[int] = field(default_factory=Counter)
    latest_ms: int = 0

    @property
    def moved(self) -> int:
        """How many messages left the place in the delay queue where they were."""
        return self.moved_back + self.delivered + self.set_aside

    @property
    def is_quiet(self) -> bool:
        """Whether there was nothing to do."""
        return not (self.moved or self.failed or self.undeleted)

    @property
    def requests(self) -> int:
        """Requests, as SQS bills them."""
        return self.fifo_requests + self.standard_requests

    @property
    def dollars(self) -> float:
        """What they cost, in US dollars beyond the free tier."""
        return (self.fifo_requests * PRICE_FIFO + self.standard_requests * PRICE_STANDARD) / MILLION

    def note_late(self, milliseconds: int) -> None:
        """Count a message that is delivered so much after it was due."""
        self.latest_ms = max(self.latest_ms, milliseconds)
        self.late[_rounded(-(-milliseconds // 100))] += 1

    def later_than(self, limit: timedelta) -> int:
        """Return about how many messages were later than that."""
        most = _rounded(-(-limit // timedelta(milliseconds=100)))
        return sum(count for tenths, count in self.late.items() if tenths > most)

    def p99(self) -> float:
        """Return the seconds that 99 of 100 delivered messages were late at most, to two digits."""
        wanted = -(-self.late.total() * 99 // 100)
        for tenths in sorted(self.late):
            wanted -= self.late[tenths]
            if wanted <= 0:
                return tenths / 10
        return 0.0

    def add(self, other: Counts) -> None:
        """Add another pass."""
        self.moved_back += other.moved_back
        self.delivered += other.delivered
        self.failed += other.failed
        self.undeleted += other.undeleted
        self.set_aside += other.set_aside
        self.fifo_requests += other.fifo_requests
        self.standard_requests += other.standard_requests
        self.oldest = max(self.oldest, other.oldest)
        self.late += other.late
        self.latest_ms = max(self.latest_ms, other.latest_ms)

    def state(self) -> dict[str, Any]:
        """Return all of it as JSON can hold it; :meth:`restored` reads it back."""
        found = {name: getattr(self, name) for name in _NUMBERS}
        return {**found, "late": {str(tenths): count for tenths, count in self.late.items()}}

    @classmethod
    def restored(cls, state: object) -> Counts:
        """Read a state back, also one of another version, whose names this one does not know; None is nothing."""
        counts = cls()
        if isinstance(state, Mapping):
            for name in _NUMBERS:
                setattr(counts, name, int(state.get(name, 0)))
            counts.late = Counter({int(tenths): int(count) for tenths, count in state.get("late", {}).items()})
        return counts

    def summary(self) -> dict[str, Any]:
        """Return what a task returns: counts, seconds and US dollars."""
        return {
            "moved_back": self.moved_back,
            "delivered": self.delivered,
            "failed": self.failed,
            "undeleted": self.undeleted,
            "set_aside": self.set_aside,
            "requests": self.requests,
            "cost_usd": round(self.dollars, 9),
            "late_p99": self.p99(),
            "late_max": self.latest_ms / 1000,
            "oldest": self.oldest,
        }

    def __str__(self) -> str:
        text = (
            f"{self.moved_back:,} sent back for another round, {self.delivered:,} delivered, {self.failed:,} failed,"
            f" {self.undeleted:,} not deleted, {self.set_aside:,} set aside; {self.requests:,} requests,"
            f" ${self.dollars:.6f}"
        )
        if self.late:
            text += f"; late by {self.p99():.1f} s (99 of 100), {self.latest_ms / 1000:.1f} s at most"
        return text


_NUMBERS = (
    "moved_back",
    "delivered",
    "failed",
    "undeleted",
    "set_aside",
    "fifo_requests",
    "standard_requests",
    "oldest",
    "latest_ms",
)


def _rounded(tenths: int) -> int:
    """Round up to two digits, so that there are never many different ones."""
    unit = 1
    while tenths > 99 * unit:
        unit *= 10
    return -(-max(0, tenths) // unit) * unit
