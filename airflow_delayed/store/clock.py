"""The database's time, asked for once and carried on by this machine's monotonic clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timedelta

from sqlalchemy import Connection

from airflow_delayed.message import utcnow
from airflow_delayed.store.claims import database_time

#: Seconds that a time is carried on for those who only look.
CARRIED = 60.0


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

    def read(self, connection: Connection, *, longest: float = CARRIED) -> datetime:
        """Return the database's time, and ask for it only after so many seconds."""
        if self._taken is None or self._monotonic() - self._taken[1] > longest:
            self.set(database_time(connection))
        return self()

    def __call__(self) -> datetime:
        """Return the database's time now."""
        if self._taken is None:
            return utcnow()
        moment, noted = self._taken
        return moment + timedelta(seconds=self._monotonic() - noted)
