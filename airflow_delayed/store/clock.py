"""The database's time, asked for once and carried on by this machine's monotonic clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timedelta

from airflow_delayed.message import utcnow


class CarriedClock:
    """A clock that transports can call as often as they like; before it is first set it is this machine's.

    It never runs ahead of the database's: the time is taken there before it is noted here.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._taken: tuple[datetime, float] | None = None

    def set(self, now: datetime) -> None:
        """Note what the database's clock just said."""
        self._taken = (now, self._monotonic())

    def __call__(self) -> datetime:
        """Return the database's time now."""
        if self._taken is None:
            return utcnow()
        moment, noted = self._taken
        return moment + timedelta(seconds=self._monotonic() - noted)
