"""Time that a test moves, for dispatchers and their database."""

from __future__ import annotations

import threading
from datetime import datetime, timedelta
from unittest import mock


class Time:
    """Time that passes only while somebody sleeps, for dispatchers and, in this process, for their database.

    Whatever is stamped with the database's time has the dispatchers' time then, however slow the machine is. It stops
    when the fixture ``store`` ends.
    """

    def __init__(self, hook) -> None:
        self.start = hook.now()
        self.seconds = 0.0
        self.naps: list[float] = []
        self.lock = threading.Lock()
        mock.patch("airflow_delayed.store.database.Dialect.time", self._of_database).start()

    def now(self) -> datetime:
        return self.start + timedelta(seconds=self.seconds)

    def _of_database(self, connection: object) -> datetime:
        return self.now()

    def sleep(self, seconds: float) -> None:
        with self.lock:
            self.naps.append(seconds)
            self.seconds += seconds

    def options(self) -> dict[str, object]:
        return {
            "sleep": self.sleep,
            "monotonic": lambda: self.seconds,
            "database_time": lambda connection: self.now(),
        }


def stop() -> None:
    """Give databases their own time again."""
    mock.patch.stopall()
