"""Threads that keep no process from ending, and Python's garbage collector while many messages pass through it.

A thread does one piece of work (:func:`in_thread`), or the same again and again (:class:`Ticker`). Each logs where its
caller does, because it has the caller's context.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import copy_context
from threading import Event, Lock, Thread
from typing import TypeVar

T = TypeVar("T")


def start_thread(work: Callable[[], object], name: str, *, daemon: bool = True, inherit: bool = True) -> Thread:
    """Begin work in a thread; an error in it is Python's to report.

    :param daemon: the process may end before the work does.
    :param inherit: copy the caller's context; a thread that outlives its caller's work should not keep it.
    """
    target = copy_context().run if inherit else _call
    thread = Thread(target=target, args=(work,), name=name, daemon=daemon)
    thread.start()
    return thread


def in_thread(work: Callable[[], T], name: str = "delayed-store", *, daemon: bool = True) -> Future[T]:
    """Begin work in a thread, and return its future result or error."""
    answer: Future[T] = Future()
    answer.set_running_or_notify_cancel()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:
            answer.set_exception(error)

    start_thread(run, name, daemon=daemon)
    return answer


class Ticker:
    """Does work again and again in a thread.

    :param every: the seconds before each call, the first one too.
    """

    def __init__(self, name: str, every: float, work: Callable[[], object]) -> None:
        self._every = every
        self._work = work
        self._stop = Event()
        self._thread = start_thread(self._run, name)

    def stop(self) -> None:
        """Begin no more work."""
        self._stop.set()

    def close(self, seconds: float | None = None) -> None:
        """End the thread, and wait for it.

        :param seconds: wait no longer for work that is being done; None: wait for its end.
        """
        self.stop()
        self._thread.join(seconds)

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            self._work()


def _call(work: Callable[[], object]) -> None:
    work()


#: A threshold above the number of objects that the messages of a chunk, or of a dispatcher's claims, keep alive.
_ALIVE = 25_000
_lock = Lock()
_senders = 0
_before = (0, 0, 0)


@contextmanager
def relaxed_gc() -> Iterator[None]:
    """Raise the threshold of Python's garbage collector, so that it does not run while a chunk's messages are alive.

    Otherwise, every few thousand messages, the collector scans all objects of the process. With Airflow loaded that
    costs more than reading the rows, and some 3 % of a dispatcher's own CPU. The threshold is the process's: the first
    of several senders and dispatchers raises it, and the last restores it.
    """
    global _senders, _before
    with _lock:
        _senders += 1
        if _senders == 1:
            first, second, third = _before = gc.get_threshold()
            if 0 < first < _ALIVE:
                gc.set_threshold(_ALIVE, second, third)
    try:
        yield
    finally:
        with _lock:
            _senders -= 1
            if _senders == 0:
                gc.set_threshold(*_before)
