"""Asking databases and brokers that may not answer, for a few seconds and no longer. No web framework here.

What hangs keeps a thread of its own, and never one of those in which the api-server answers its other users.
"""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable
from functools import partial
from threading import Condition, Thread
from typing import Any, TypeVar

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

    def __init__(self, at_once: int = AT_ONCE, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._at_once = at_once
        self._monotonic = monotonic
        self._changed = Condition()
        self._running: dict[str, list[_Question]] = {}

    def ask(self, connection_id: str, work: Callable[[], T], *, seconds: float, shared: str | None = None) -> T:
        """Return what ``work`` returns, or raise what it raises.

        :param shared: the name of a question that need not be asked twice at once: who comes second waits for the same
            answer.
        :raises TooSlow: it takes longer; it goes on nevertheless.
        :raises Busy: the connection is asked too much already; this was not asked.
        """
        end = self._monotonic() + seconds
        question = self._question(connection_id, work, end, shared)
        if not question.wait(end - self._monotonic()):
            raise TooSlow(
                f"connection {connection_id!r} did not answer within {seconds:g} seconds; look whether it can be"
                " reached. It may still be at work, so look at the figures before you try again"
            )
        found: T = question.result()
        return found

    def _question(self, connection_id: str, work: Callable[[], Any], end: float, shared: str | None) -> _Question:
        with self._changed:
            running = self._running.setdefault(connection_id, [])
            while True:
                if shared is not None and (same := [one for one in running if one.shared == shared]):
                    if same[0].end > self._monotonic():
                        return same[0]
                    # who waits for what hangs would only hang too
                    raise Busy(f"connection {connection_id!r} has not answered yet; look whether it can be reached")
                if len(running) < self._at_once:
                    question = _Question(work, end, shared, partial(self._ended, running))
                    running.append(question)
                    question.start()
                    return question
                now = self._monotonic()
                # who waits behind those that hang would only hang too
                if all(one.end <= now for one in running) or not self._changed.wait(end - now):
                    raise Busy(
                        f"connection {connection_id!r} has {self._at_once} questions to answer already, and does not"
                        " answer; look whether it can be reached, and try again"
                    )

    def _ended(self, running: list[_Question], question: _Question) -> None:
        with self._changed:
            running.remove(question)
            self._changed.notify_all()


class _Question(Thread):
    """One question; a daemon, so that the server can end while it hangs."""

    def __init__(
        self, work: Callable[[], Any], end: float, shared: str | None, ended: Callable[[_Question], None]
    ) -> None:
        super().__init__(name="delayed-deliveries", daemon=True)
        self.end = end
        self.shared = shared
        self._work = work
        self._ended = ended
        self._context = contextvars.copy_context()
        self._found: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Ask."""
        try:
            self._found = self._context.run(self._work)
        except BaseException as error:
            self._error = error
        finally:
            self._ended(self)

    def wait(self, seconds: float) -> bool:
        """Return whether there was an answer in time."""
        self.join(max(seconds, 0))
        return not self.is_alive()

    def result(self) -> Any:
        """Return the answer, or raise it."""
        if self._error is not None:
            raise self._error
        return self._found
