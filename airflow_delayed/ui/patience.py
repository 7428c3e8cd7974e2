"""Asking databases and brokers that may not answer, for a few seconds and no longer. No web framework here.

What hangs keeps a thread of its own, and never one of those in which the api-server answers its other users.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from threading import BoundedSemaphore, Lock, Thread
from typing import Generic, TypeVar

T = TypeVar("T")

#: Questions that one connection is asked at once.
AT_ONCE = 4


class TooSlow(Exception):
    """There was no answer in time."""


class Busy(Exception):
    """Too many questions wait for an answer already."""


class Patience:
    """Asks in threads of its own.

    :param at_once: so many questions for each connection; what has no answer in time counts until it ends.
    """

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._lock = Lock()
        self._places: dict[str, BoundedSemaphore] = {}

    def ask(self, connection_id: str, work: Callable[[], T], *, seconds: float) -> T:
        """Return what ``work`` returns, or raise what it raises.

        :raises TooSlow: it takes longer; it goes on nevertheless.
        :raises Busy: the connection is asked too much already; this was not asked.
        """
        with self._lock:
            places = self._places.setdefault(connection_id, BoundedSemaphore(self._at_once))
        if not places.acquire(blocking=False):
            raise Busy(
                f"connection {connection_id!r} has {self._at_once} questions to answer already, and does not answer;"
                " look whether it can be reached, and try again"
            )
        question = _Question(work, places)
        question.start()
        return question.answer(connection_id, seconds)


class _Question(Thread, Generic[T]):
    """One question; a daemon, so that the server can end while it hangs."""

    def __init__(self, work: Callable[[], T], places: BoundedSemaphore) -> None:
        super().__init__(name="delayed-deliveries", daemon=True)
        self._work = work
        self._places = places
        self._context = contextvars.copy_context()
        self._result: T | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._result = self._context.run(self._work)
        except BaseException as error:
            self._error = error
        finally:
            self._places.release()

    def answer(self, connection_id: str, seconds: float) -> T:
        self.join(seconds)
        if self.is_alive():
            raise TooSlow(
                f"connection {connection_id!r} did not answer within {seconds:g} seconds; look whether it can be"
                " reached, and try again"
            )
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]
