"""Calls of a store by notifiers: a limit of seconds, of threads, and for a store that does not answer, of patience.

Airflow ends the process of a DAG's callbacks after 50 seconds, and in the triggerer all missed deadlines share one
event loop. So the notifiers of a process ask a store in at most four threads, over one engine, and each waits for at
most 10 seconds. Once a store has not answered, the next ones fail at once; after half a minute one asks it again.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar, cast

from airflow_delayed import delivery, metrics
from airflow_delayed.errors import DelayedError, TransportUnavailable, explained
from airflow_delayed.threads import in_thread

if TYPE_CHECKING:
    from airflow_delayed.hooks.store import DelayedStoreHook

log = logging.getLogger(__name__)

T = TypeVar("T")
Work = Callable[["DelayedStoreHook"], Any]

#: Seconds that a notifier waits for the store at most.
CALL_SECONDS = 10.0
#: Seconds for which a store that did not answer is not asked again.
SILENCE = 30.0
#: Seconds until the second try, after a connection failed.
RETRY_PAUSE = 2.0
#: Threads for each store.
THREADS = 4


def _promised() -> Future[Any]:
    """Return a future that a cancelled waiter does not cancel."""
    made: Future[Any] = Future()
    made.set_running_or_notify_cancel()
    return made


@dataclass(eq=False, slots=True)
class _Call:
    work: Work
    #: The connections that Airflow looks up before the seconds count.
    conn_ids: Sequence[str]
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    begun: Future[Any] = field(default_factory=_promised)
    answer: Future[Any] = field(default_factory=_promised)
    is_dropped: bool = False


@dataclass(eq=False, slots=True)
class _SharedHook:
    hook: DelayedStoreHook
    users: int = 0


class StoreCalls:
    """The calls of one store by this process. Its methods may be called from any thread and event loop.

    :param conn_id: the store's connection.
    """

    def __init__(
        self,
        conn_id: str,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._conn_id = conn_id
        self._monotonic = monotonic
        self._sleep = sleep
        self._lock = Lock()
        self._waiting: deque[_Call] = deque()
        self._threads = 0
        self._silent_since: float | None = None
        self._asking_again = False
        #: Calls that had no answer, since the last answer.
        self._dropped = 0
        self._hook_lock = Lock()
        self._shared: _SharedHook | None = None

    def call(self, work: Callable[[DelayedStoreHook], T], conn_ids: Sequence[str] = ()) -> T:
        """Do work in the store, and return its result.

        :param conn_ids: the connections that it needs; to find them takes no part of the seconds: the DAG processor
            makes an API of its own for the first one, which took 20 seconds on a busy machine.
        :raises DelayedError: the store did not answer in time, or not a moment ago.
        """
        one = self._submit(work, conn_ids)
        one.begun.result()
        wait([one.answer], CALL_SECONDS)
        return cast("T", self._result(one))

    async def call_async(self, work: Callable[[DelayedStoreHook], T], conn_ids: Sequence[str] = ()) -> T:
        """Do work in the store as :meth:`call`, without holding the event loop."""
        one = self._submit(work, conn_ids)
        await asyncio.wrap_future(one.begun)
        answer = asyncio.wrap_future(one.answer)
        # else asyncio would log that nobody asked for an error that came too late
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait([answer], timeout=CALL_SECONDS)
        return cast("T", self._result(one))

    def _submit(self, work: Work, conn_ids: Sequence[str]) -> _Call:
        one = _Call(work, conn_ids)
        with self._lock:
            if self._silent_since is not None:
                over = self._silent_since + SILENCE <= self._monotonic()
                if not over or self._asking_again or self._threads >= THREADS:
                    raise self._drop(one)
                self._asking_again = True
            if self._threads >= THREADS:
                self._waiting.append(one)
                return one
            self._threads += 1
        in_thread(lambda: self._work_off(one))
        return one

    def _work_off(self, one: _Call) -> None:
        """Make a call, and the calls that wait for a thread."""
        while True:
            one.context.run(self._make, one)
            with self._lock:
                if not self._waiting:
                    self._threads -= 1
                    return
                one = self._waiting.popleft()

    def _make(self, one: _Call) -> None:
        try:
            for conn_id in one.conn_ids:
                delivery.type_of(conn_id)
        except BaseException as error:
            with self._lock:
                self._asking_again = False
            one.begun.set_exception(error)
            return
        one.begun.set_result(None)
        try:
            answer = self._tried(one.work)
        except TransportUnavailable as error:
            self._no_answer(one, explained(error))
            one.answer.set_exception(error)
        except BaseException as error:
            # the store has answered, if only by an error
            self._answered()
            one.answer.set_exception(error)
        else:
            self._answered()
            one.answer.set_result(answer)

    def _tried(self, work: Work) -> Any:
        """Do work, and once more if a connection fails and there is time."""
        end = self._monotonic() + CALL_SECONDS
        with self._shared_hook() as hook:
            try:
                return work(hook)
            except TransportUnavailable as error:
                if self._monotonic() + RETRY_PAUSE >= end:
                    raise
                log.info("%s; trying once more", explained(error))
            self._sleep(RETRY_PAUSE)
            return work(hook)

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        """Let the calls within the block share one connection, whether or not they follow each other at once."""
        with self._shared_hook():
            yield

    @contextmanager
    def _shared_hook(self) -> Iterator[DelayedStoreHook]:
        """Yield the hook of all calls that are at work; the last of them closes it."""
        from airflow_delayed.hooks.store import DelayedStoreHook

        with self._hook_lock:
            if self._shared is None:
                hook = DelayedStoreHook(self._conn_id)
                # made here, for several threads would make several
                _ = hook.engine
                self._shared = _SharedHook(hook)
            shared = self._shared
            shared.users += 1
        try:
            yield shared.hook
        finally:
            with self._hook_lock:
                shared.users -= 1
                is_unused = not shared.users
                if is_unused and self._shared is shared:
                    self._shared = None
            if is_unused:
                shared.hook.close()

    def _result(self, one: _Call) -> Any:
        from airflow_delayed.hooks.store import result_of

        if not one.answer.done():
            self._no_answer(one, f"connection {self._conn_id!r} did not answer within {CALL_SECONDS:g} seconds")
        return result_of(one.answer, CALL_SECONDS, self._conn_id)

    def _answered(self) -> None:
        with self._lock:
            dropped, self._dropped = self._dropped, 0
            self._silent_since, self._asking_again = None, False
        if dropped:
            log.warning(
                "store %r answers again; %d callbacks of notifiers of this process had no answer and were dropped",
                self._conn_id,
                dropped,
            )

    def _no_answer(self, one: _Call, reason: str) -> None:
        """Drop a call, and the calls that wait for a thread."""
        with self._lock:
            if one.is_dropped:
                return
            self._silent_since, self._asking_again = self._monotonic(), False
            self._drop(one)
            waiting = [(other, self._drop(other)) for other in self._waiting]
            self._waiting.clear()
        # the next call makes one, for the connection may be another then; without its lock, for which an event loop
        # would wait
        self._shared = None
        log.info("%s; no notifier of this process asks it again for %g seconds", reason, SILENCE)
        for other, error in waiting:
            other.begun.set_exception(error)

    def _drop(self, one: _Call) -> DelayedError:
        """Count a call that the store does not answer, and return the error for it."""
        one.is_dropped = True
        self._dropped += 1
        with suppress(Exception):
            # what counts may be misconfigured, and no callback waits for that
            metrics.count_dropped(self._conn_id)
        return DelayedError(
            f"connection {self._conn_id!r} did not answer an earlier notifier of this process, and is not asked again"
            f" before {SILENCE:g} seconds are over; {self._dropped} callbacks were dropped for that reason. Look"
            " whether the store's database can be reached"
        )


_calls: dict[str, StoreCalls] = {}
#: What a fork has from its parent. It neither uses nor closes that, for the connections are the parent's.
_inherited: list[object] = []


def calls_of(conn_id: str) -> StoreCalls:
    """Return the calls of a store, the same for all notifiers of this process."""
    return _calls.setdefault(conn_id, StoreCalls(conn_id))


def _begin_in_fork() -> None:
    _inherited.append(dict(_calls))
    _calls.clear()


os.register_at_fork(after_in_child=_begin_in_fork)
