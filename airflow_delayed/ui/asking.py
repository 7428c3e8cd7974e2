"""Asking the connections: hooks that are kept for a while, with a time limit, and figures that are kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import TypeVar

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.store.engine import limit_statements
from airflow_delayed.ui.kept import Kept
from airflow_delayed.ui.patience import Patience

T = TypeVar("T")

#: Seconds that a user waits for figures and lists, and for changes.
READING = 5.0
CHANGING = 30.0
#: Seconds after which a database gives up by itself what nobody waits for any more.
LIMIT = 30
#: Seconds after which a connection is read from Airflow anew: its password may have changed.
FRESH = 60.0


@dataclass(slots=True)
class _Open:
    hook: DelayedStoreHook
    since: float


class Asking:
    """What the routes share.

    :param reading: seconds that a user waits for figures and lists.
    """

    def __init__(self, *, reading: float = READING, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._reading = reading
        self._monotonic = monotonic
        self._patience = Patience()
        self._kept = Kept(monotonic)
        self._lock = Lock()
        self._open: dict[str, _Open] = {}

    async def connection(self, connection_id: str, work: Callable[[], T], *, seconds: float | None = None) -> T:
        """Return what ``work`` returns, which asks that connection.

        :raises TooSlow: it does not, in time.
        :raises Busy: it is asked too much already.
        """
        return await self._patience.ask(connection_id, work, seconds=seconds or self._reading)

    async def store(
        self, connection_id: str, work: Callable[[DelayedStoreHook], T], *, seconds: float | None = None
    ) -> T:
        """Return what ``work`` returns of a store."""
        return await self.connection(connection_id, lambda: work(self._hook(connection_id)), seconds=seconds)

    async def figures(self, connection_id: str, name: str, make: Callable[[], T]) -> tuple[T, float]:
        """Return figures and their age in seconds; they are made anew when they are some seconds old."""
        if found := self._kept.find(name):
            return found
        made = await self._patience.ask(
            connection_id,
            lambda: self._kept.make(name, make),
            seconds=self._reading,
            shared=f"{name} {self._kept.turn(name)}",
        )
        return made, 0.0

    async def store_figures(self, connection_id: str, make: Callable[[DelayedStoreHook], T]) -> tuple[T, float]:
        """Return figures of a store and their age in seconds."""
        return await self.figures(connection_id, f"store {connection_id}", lambda: make(self._hook(connection_id)))

    def changed(self, name: str) -> None:
        """Have figures made anew."""
        self._kept.forget(name)

    def _hook(self, connection_id: str) -> DelayedStoreHook:
        with self._lock:
            found = self._open.get(connection_id)
            if found is not None and self._monotonic() - found.since < FRESH:
                return found.hook
        # looked up outside of the lock: a secrets backend may be slow. Who was second is dropped
        hook = DelayedStoreHook(connection_id)
        limit_statements(hook.engine, LIMIT)
        with self._lock:
            old, self._open[connection_id] = self._open.get(connection_id), _Open(hook, self._monotonic())
        if old is not None:
            # connections that are in use are closed when they are given back
            old.hook.engine.dispose()
        return hook

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            hooks, self._open = [one.hook for one in self._open.values()], {}
        for hook in hooks:
            hook.engine.dispose()
