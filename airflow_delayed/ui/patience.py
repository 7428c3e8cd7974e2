"""Asking databases and brokers that may not answer, for a few seconds and no longer. No web framework here.

Each question has a thread of its own, and who waits for the answer has none: so a connection that hangs takes no thread
in which the api-server answers its other users.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Lock, Thread
from typing import Any, TypeVar

T = TypeVar("T")

#: Questions that one connection is asked at once.
AT_ONCE = 4
#: Requests that wait for one connection at once; others are refused.
WAITING = 8


class TooSlow(Exception):
    """There was no answer in time."""


class Busy(Exception):
    """Too many requests wait for the connection already."""


@dataclass(frozen=True, slots=True)
class _Question:
    #: Nobody waits for the answer longer than until this moment.
    end: float
    shared: str | None
    #: What was found, or the error; never an exception of the future itself, which asyncio reports if nobody waits.
    answer: Future[tuple[Any, BaseException | None]]


class _Connection:
    """The questions of one connection."""

    def __init__(self) -> None:
        self.running: list[_Question] = []
        self.waiting = 0


class Patience:
    """Asks in threads of its own; its methods may be called from any event loop.

    :param at_once: so many questions for each connection; a question without an answer in time counts until it ends.
    :param waiting: so many requests wait for one connection at most.
    """

    def __init__(
        self, at_once: int = AT_ONCE, waiting: int = WAITING, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._at_once = at_once
        self._waiting = waiting
        self._monotonic = monotonic
        self._lock = Lock()
        self._connections: dict[str, _Connection] = {}

    async def ask(self, connection_id: str, work: Callable[[], T], *, seconds: float, shared: str | None = None) -> T:
        """Return what ``work`` returns, or raise what it raises.

        :param shared: the name of a question that need not be asked twice at once: who comes second waits for the same
            answer.
        :raises TooSlow: it takes longer; it goes on nevertheless.
        :raises Busy: too many requests wait for the connection, or nothing that it was asked before has an answer.
        """
        end = self._monotonic() + seconds
        with self._lock:
            connection = self._connections.setdefault(connection_id, _Connection())
            if connection.waiting >= self._waiting:
                raise Busy(
                    f"{connection.waiting} requests wait for connection {connection_id!r} already; try again in some"
                    " seconds"
                )
            connection.waiting += 1
        try:
            while True:
                with self._lock:
                    question = self._question(connection_id, connection, work, end, shared)
                    running = [one.answer for one in connection.running]
                if question is not None:
                    break
                if not await self._first_of(running, end):
                    raise _full(connection_id, self._at_once)
            if not await self._first_of([question.answer], end):
                raise TooSlow(
                    f"connection {connection_id!r} did not answer within {seconds:g} seconds; look whether it can be"
                    " reached. It may still be at work, so look at the figures before you try again"
                )
            found, error = question.answer.result()
            if error is not None:
                raise error
            answer: T = found
            return answer
        finally:
            with self._lock:
                connection.waiting -= 1

    async def _first_of(self, answers: list[Future[Any]], end: float) -> bool:
        """Return whether there is one of these answers before the end."""
        left = max(end - self._monotonic(), 0)
        # the answers stay as they are when this is cancelled: asyncio.wait cancels nothing
        done, _ = await asyncio.wait(
            [asyncio.wrap_future(answer) for answer in answers], timeout=left, return_when=asyncio.FIRST_COMPLETED
        )
        return bool(done)

    def _question(
        self, connection_id: str, connection: _Connection, work: Callable[[], Any], end: float, shared: str | None
    ) -> _Question | None:
        """Return the question whose answer is waited for; None: there is no place for it yet.

        :raises Busy: those before it hang, so it would only hang too.
        """
        now = self._monotonic()
        for same in connection.running:
            if shared is not None and same.shared == shared:
                if same.end > now:
                    return same
                raise Busy(f"connection {connection_id!r} has not answered yet; look whether it can be reached")
        if len(connection.running) < self._at_once:
            question = _Question(end, shared, Future())
            question.answer.set_running_or_notify_cancel()
            connection.running.append(question)
            context = contextvars.copy_context()
            # a daemon, so that the server can end while it hangs
            thread = Thread(
                target=self._answer, args=(connection, question, context, work), name="delayed-deliveries", daemon=True
            )
            thread.start()
            return question
        if end <= now or all(one.end <= now for one in connection.running):
            raise _full(connection_id, self._at_once)
        return None

    def _answer(
        self, connection: _Connection, question: _Question, context: contextvars.Context, work: Callable[[], Any]
    ) -> None:
        found, error = None, None
        try:
            found = context.run(work)
        except BaseException as raised:
            error = raised
        with self._lock:
            connection.running.remove(question)
        question.answer.set_result((found, error))


def _full(connection_id: str, at_once: int) -> Busy:
    return Busy(
        f"connection {connection_id!r} has {at_once} questions to answer already, and does not answer; look whether it"
        " can be reached, and try again"
    )
