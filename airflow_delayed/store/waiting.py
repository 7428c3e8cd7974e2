"""How a dispatcher that stays waits until there is something to do."""

from __future__ import annotations

from threading import Event
from typing import Protocol

from sqlalchemy import Engine, Table

from airflow_delayed.errors import DelayedError
from airflow_delayed.store.listening import Listener
from airflow_delayed.store.schema import MYSQL

#: Where nothing tells of a message that is stored meanwhile: how often to look, in seconds. One search in an index
#: each time; a message that is stored less than this before it is due may be this late.
POLL = 1.0


class Waiter(Protocol):
    """Waits for one dispatcher. All but :meth:`wake` is for one thread."""

    @property
    def longest(self) -> float:
        """How long to wait at most before one looks again, in seconds."""
        ...

    def wait(self, seconds: float) -> bool:
        """Wait, and return whether it was cut short: there may be an earlier message, or :meth:`wake` was called."""
        ...

    def wake(self) -> None:
        """End the wait, or the next one if there is none now; from any thread."""
        ...

    def close(self) -> None:
        """Close what is open."""
        ...


class Poll:
    """Waits for no longer than a while.

    :param longest: in seconds.
    """

    def __init__(self, longest: float = POLL) -> None:
        self.longest = longest
        self._woken = Event()

    def wait(self, seconds: float) -> bool:
        """Wait until the time is over, or somebody wakes it."""
        woken = self._woken.wait(seconds)
        self._woken.clear()
        return woken

    def wake(self) -> None:
        """End the wait."""
        self._woken.set()

    def close(self) -> None:
        """Do nothing: nothing is open."""


def waiter_for(engine: Engine, table: Table, *, poll: float = POLL) -> Waiter:
    """Return what waits for messages of a store: PostgreSQL tells of earlier ones, in the others one looks.

    :param poll: how often to look, in seconds; on PostgreSQL while its notices do not come through.
    :raises DelayedError: a database that is not known.
    """
    name, driver = engine.dialect.name, engine.dialect.driver
    if name == "postgresql" and driver in ("psycopg", "psycopg2"):
        return Listener(engine, table, poll=poll)
    if name in ("postgresql", "sqlite", "mssql", *MYSQL):
        return Poll(poll)
    raise DelayedError(f"the store does not know how to wait for messages in {name}")
