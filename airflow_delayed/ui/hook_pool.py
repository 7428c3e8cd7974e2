"""The hooks of the page's connections, called with a deadline, and a cache of their figures.

A database or broker may hang. Each call has a thread of its own, which its request awaits: a connection that hangs
takes no thread from the api-server's other requests.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime
from threading import Lock
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request

from airflow_delayed.errors import TransportUnavailable
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.message import utcnow
from airflow_delayed.store.api import close_engine
from airflow_delayed.threads import start_thread

T = TypeVar("T")

#: Seconds that a request waits for figures and lists.
READ_SECONDS = 5.0
#: Seconds that a request waits for a change.
CHANGE_SECONDS = 30.0
#: Seconds after which the database itself ends a statement that no request waits for any more.
STATEMENT_SECONDS = 30
#: Seconds after which a connection is read from Airflow again: its password may have changed.
HOOK_SECONDS = 10.0
#: Calls of one connection at once.
CALLS = 4
#: Requests that wait for one connection at once; further ones are refused.
WAITING = 8
#: Seconds from the beginning of figures until they are asked again, at least; figures that took t seconds are kept for
#: 10 t, so that computing them takes at most a tenth of the time; and at most, since they must stay true.
CACHE_SECONDS, CACHE_FACTOR, CACHE_LONGEST = 5.0, 10, 15.0
#: Seconds that others wait for figures that may take long.
SLOW_SECONDS = 0.5
_KEPT = CACHE_SECONDS, CACHE_LONGEST


class TooSlow(Exception):
    """A connection did not answer in time."""


class Busy(Exception):
    """Too many requests wait for the connection already."""


@dataclass(slots=True)
class _OpenHook:
    hook: DelayedStoreHook
    since: float


class HookPool:
    """Calls the connections for all routes of the app."""

    def __init__(self, *, seconds: float = READ_SECONDS, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._monotonic = monotonic
        self._bulkhead = Bulkhead()
        self._cache = FiguresCache(monotonic)
        self._lock = Lock()
        self._open: dict[str, _OpenHook] = {}
        self._since: dict[Hashable, datetime] = {}

    async def call(self, connection_id: str, work: Callable[[], T], *, seconds: float | None = None) -> T:
        """Run ``work``, which uses that connection, and return its result."""
        return await self._bulkhead.call(connection_id, work, seconds=seconds or self._seconds)

    async def call_store(
        self, connection_id: str, work: Callable[[DelayedStoreHook], T], *, seconds: float | None = None
    ) -> T:
        """Run ``work`` with a store's hook, and return its result."""
        return await self.call(connection_id, lambda: self._with_hook(connection_id, work), seconds=seconds)

    async def figures(
        self, connection_id: str, name: str, make: Callable[[], T], *, kept: tuple[float, float] = _KEPT
    ) -> tuple[T, float]:
        """Return figures from the cache, or computed now, with their age in seconds, from the beginning of the call."""
        if cached := self._cache.get(name):
            return cached
        began = self._monotonic()
        made = await self._bulkhead.call(
            connection_id,
            lambda: self._cache.compute(name, make, kept),
            seconds=self._seconds,
            shared=f"{name} {self._cache.generation(name)}",
        )
        return made, self._monotonic() - began

    async def store_figures(
        self,
        connection_id: str,
        make: Callable[[DelayedStoreHook], T],
        *,
        name: str = "store",
    ) -> tuple[T, float]:
        """Return figures of a store and their age in seconds."""
        return await self.figures(
            connection_id, f"{name} {connection_id}", lambda: self._with_hook(connection_id, make)
        )

    async def slow_figures(
        self, connection_id: str, name: str, make: Callable[[], T], *, kept: tuple[float, float]
    ) -> T | None:
        """Return figures that may take long, and must hold up no others.

        If there are no new ones within half a second: the last ones, or None if these are older than twice ``kept``.
        Ask a connection that has just answered: a connection that hangs would keep one more call.
        """
        asked = self.figures(connection_id, name, make, kept=kept)
        try:
            found, _ = await asyncio.wait_for(asked, SLOW_SECONDS)
        except Exception:
            last = self.last_figures(name)
            return None if last is None or last[1] > 2 * kept[1] else last[0]
        return found

    def cached(self, name: str, make: Callable[[], T]) -> T:
        """Return figures from the cache, or computed now; for work that a call does already."""
        found = self._cache.get(name)
        figures: T = self._cache.compute(name, make) if found is None else found[0]
        return figures

    def last_figures(self, name: str) -> tuple[Any, float] | None:
        """Return figures and their age in seconds, however old they are; None: there are none since the last change."""
        return self._cache.get(name, expired=True)

    def invalidate(self, name: str) -> None:
        """Drop figures from the cache."""
        self._cache.invalidate(name)

    def invalidate_store(self, connection_id: str) -> None:
        """Drop what a change of a store's messages may have changed."""
        for name in ("store", "health", "lookahead"):
            self.invalidate(f"{name} {connection_id}")

    def since(self, condition: Hashable, holds: bool) -> datetime | None:
        """Note whether a condition holds now, and return since when this api-server has seen it; None: it does not."""
        if holds:
            return self._since.setdefault(condition, utcnow())
        self._since.pop(condition, None)
        return None

    def _with_hook(self, connection_id: str, work: Callable[[DelayedStoreHook], T]) -> T:
        """Run work with a store's hook; after an error of the connection, the next call reads it from Airflow again."""
        hook = self._hook(connection_id)
        try:
            return work(hook)
        except TransportUnavailable:
            with self._lock:
                opened = self._open.get(connection_id)
                if opened is not None and opened.hook is hook:
                    opened.since = -math.inf
            raise

    def _hook(self, connection_id: str) -> DelayedStoreHook:
        with self._lock:
            opened = self._open.get(connection_id)
            if opened is not None and self._monotonic() - opened.since < HOOK_SECONDS:
                return opened.hook
        # outside of the lock, because a secrets backend may be slow; of two that are made at once the first is dropped
        hook = DelayedStoreHook(connection_id)
        hook.limit_statements(STATEMENT_SECONDS)
        with self._lock:
            old, self._open[connection_id] = self._open.get(connection_id), _OpenHook(hook, self._monotonic())
        if old is not None:
            close_engine(old.hook.engine)
        return hook

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            hooks, self._open = [opened.hook for opened in self._open.values()], {}
        for hook in hooks:
            close_engine(hook.engine)


async def _pool(request: Request) -> HookPool:
    pool: HookPool = request.app.state.hook_pool
    return pool


#: The app's pool; a parameter of a route.
HookPoolDep = Annotated[HookPool, Depends(_pool)]


@dataclass(frozen=True, slots=True)
class _Call:
    #: No request waits for the answer longer than until this moment.
    end: float
    shared: str | None
    #: The result, or the error, which is no exception of the future: asyncio logs those if no request waits any more.
    answer: Future[tuple[Any, BaseException | None]]


class _ConnectionCalls:
    def __init__(self) -> None:
        self.running: list[_Call] = []
        self.waiting = 0


class Bulkhead:
    """Calls connections in threads of its own, so many at once; its methods may be called from any event loop.

    :param calls: the limit for each connection; a call that has no answer in time counts until it ends.
    :param waiting: so many requests wait for one connection at most.
    """

    def __init__(
        self, calls: int = CALLS, waiting: int = WAITING, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._calls = calls
        self._waiting = waiting
        self._monotonic = monotonic
        self._lock = Lock()
        self._connections: dict[str, _ConnectionCalls] = {}

    async def call(self, connection_id: str, work: Callable[[], T], *, seconds: float, shared: str | None = None) -> T:
        """Run ``work``, and return its result or raise its error.

        :param shared: the name of a call that need not run twice at once: the second request waits for the answer of
            the first.
        :raises TooSlow: it takes longer; it goes on nevertheless.
        :raises Busy: too many requests wait for the connection, or all its calls hang.
        """
        end = self._monotonic() + seconds
        with self._lock:
            connection = self._connections.setdefault(connection_id, _ConnectionCalls())
            if connection.waiting >= self._waiting:
                raise Busy(
                    f"{connection.waiting} requests wait for connection {connection_id!r} already; try again in some"
                    " seconds"
                )
            connection.waiting += 1
        try:
            while True:
                with self._lock:
                    call = self._start(connection_id, connection, work, end, shared)
                    running = [other.answer for other in connection.running]
                if call is not None:
                    break
                if not await self._first_of(running, end):
                    raise _full(connection_id, self._calls)
            if not await self._first_of([call.answer], end):
                raise TooSlow(
                    f"connection {connection_id!r} did not answer within {seconds:g} seconds; look whether it can be"
                    " reached. It may still be at work, so look at the figures before you try again"
                )
            result, error = call.answer.result()
            if error is not None:
                raise error
            answer: T = result
            return answer
        finally:
            with self._lock:
                connection.waiting -= 1

    async def _first_of(self, answers: list[Future[Any]], end: float) -> bool:
        seconds = max(end - self._monotonic(), 0)
        # the answers stay as they are when this is cancelled: asyncio.wait cancels nothing
        done, _ = await asyncio.wait(
            [asyncio.wrap_future(answer) for answer in answers], timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
        return bool(done)

    def _start(
        self, connection_id: str, connection: _ConnectionCalls, work: Callable[[], Any], end: float, shared: str | None
    ) -> _Call | None:
        """Return the call to wait for, which is started or shared; None: the limit of calls is reached."""
        now = self._monotonic()
        for same in connection.running:
            if shared is not None and same.shared == shared:
                if same.end > now:
                    return same
                raise Busy(f"connection {connection_id!r} has not answered yet; look whether it can be reached")
        if len(connection.running) < self._calls:
            call = _Call(end, shared, Future())
            call.answer.set_running_or_notify_cancel()
            connection.running.append(call)
            # a daemon, so that the server can end while it hangs
            start_thread(lambda: self._run(connection, call, work), "delayed-deliveries")
            return call
        if end <= now or all(other.end <= now for other in connection.running):
            raise _full(connection_id, self._calls)
        return None

    def _run(self, connection: _ConnectionCalls, call: _Call, work: Callable[[], Any]) -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:
            error = raised
        with self._lock:
            connection.running.remove(call)
        call.answer.set_result((result, error))


def _full(connection_id: str, calls: int) -> Busy:
    return Busy(
        f"connection {connection_id!r} has {calls} calls that did not answer; look whether it"
        " can be reached, and try again"
    )


@dataclass(frozen=True, slots=True)
class _Entry:
    value: Any
    made_at: float
    expires_at: float


class FiguresCache:
    """Figures by name, each with a time to live that depends on how long they took, and counts from their beginning.

    Figures of a call that a connection has kept for longer than they live, because it hung, are old at once.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._entries: dict[str, _Entry] = {}
        self._generations: dict[str, int] = {}

    def generation(self, name: str) -> int:
        """Return how often figures have been invalidated."""
        return self._generations.get(name, 0)

    def get(self, name: str, *, expired: bool = False) -> tuple[Any, float] | None:
        """Return figures and their age in seconds; None: there are none, or they have expired."""
        entry = self._entries.get(name)
        now = self._monotonic()
        return (
            None if entry is None or (now >= entry.expires_at and not expired) else (entry.value, now - entry.made_at)
        )

    def compute(self, name: str, make: Callable[[], Any], kept: tuple[float, float] = _KEPT) -> Any:
        """Compute figures and return them; they are cached unless they are invalidated meanwhile."""
        generation = self.generation(name)
        began = self._monotonic()
        value = make()
        took = self._monotonic() - began
        if generation == self.generation(name):
            least, most = kept
            self._entries[name] = _Entry(value, began, began + min(most, max(least, CACHE_FACTOR * took)))
        return value

    def invalidate(self, name: str) -> None:
        """Drop figures; figures that are being computed are not cached either."""
        self._generations[name] = self.generation(name) + 1
        self._entries.pop(name, None)
