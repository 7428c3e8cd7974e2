"""Time that a test moves, for a dispatcher and its database."""

from __future__ import annotations

import threading
from datetime import timedelta


class Time:
    """Time that passes only while somebody sleeps."""

    def __init__(self, hook) -> None:
        self.start = hook.now()
        self.seconds = 0.0
        self.naps: list[float] = []
        self.lock = threading.Lock()

    def sleep(self, seconds: float) -> None:
        with self.lock:
            self.naps.append(seconds)
            self.seconds += seconds

    def options(self) -> dict[str, object]:
        return {
            "sleep": self.sleep,
            "monotonic": lambda: self.seconds,
            "database_time": lambda connection: self.start + timedelta(seconds=self.seconds),
        }
