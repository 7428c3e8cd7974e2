"""The loop of a dispatcher: passes, with sleeps in between. No database here."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from math import inf
from threading import Event
from typing import Literal, Protocol

from airflow_delayed.store.dispatch.report import DispatchReport

#: The sleep when other dispatchers have leases of all due messages.
LEASED_SLEEP = timedelta(seconds=0.5)
#: The longest time between two passes, in seconds.
PASS_EVERY = 60.0
#: Seconds after which a store is asked again for its next message, by one search in an index. A message that is stored
#: less than this before it is due may be so late.
POLL = 1.0


class Sleep:
    """Sleeps between two passes. Only :meth:`wake` may be called from another thread.

    :param longest: the longest sleep until the store is asked again, in seconds.
    :param sleep: sleeps in place of the machine's clock; takes seconds.
    """

    def __init__(self, longest: float = POLL, sleep: Callable[[float], object] | None = None) -> None:
        self.longest = longest
        self._sleep = sleep
        self._woken = Event()

    def wait(self, seconds: float) -> bool:
        """Sleep until the time is over, or :meth:`wake` is called, and return whether it was."""
        if self._sleep is not None:
            self._sleep(seconds)
        woken = self._woken.wait(seconds if self._sleep is None else 0)
        self._woken.clear()
        return woken

    def wake(self) -> None:
        """End the sleep, or the next one if nobody sleeps now."""
        self._woken.set()


class Passes(Protocol):
    """A dispatcher, as its :class:`DispatchLoop` sees it."""

    @property
    def stopped(self) -> bool:
        """Whether it was stopped from outside."""
        ...

    @property
    def unavailable(self) -> bool:
        """Whether something failed that ends the run after a pass."""
        ...

    def once(self, most: float | None) -> object:
        """Make one pass, and claim nothing more after so many seconds."""
        ...

    def next_due(self) -> timedelta | None:
        """Return the time until a message may be due; None: there is no message."""
        ...

    @property
    def sleep(self) -> Sleep:
        """What sleeps until then."""
        ...

    def finish(self) -> DispatchReport:
        """Return the counts, or raise the failures."""
        ...

    def close(self) -> None:
        """End all threads, and close what is open."""
        ...


class DispatchLoop:
    """Makes the passes of a dispatcher, and sleeps in between until a message may be due: one loop for all ways to run.

    :param until: None: until all is dispatched that was due; "empty": until the store has no message; a number: for so
        many seconds, ``math.inf`` until it is stopped.
    """

    def __init__(
        self,
        dispatcher: Passes,
        until: float | Literal["empty"] | None,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dispatcher = dispatcher
        self._until = until
        self._monotonic = monotonic
        self._end = monotonic() + until if isinstance(until, float | int) else inf
        self._sleep = dispatcher.sleep

    def run(self) -> DispatchReport | None:
        """Dispatch and sleep until the end, close the dispatcher, and return the counts; None: it was stopped.

        :raises DispatchFailed: see :meth:`Dispatcher.check`.
        :raises BreakerTripped: the store's own database failed for too long.
        :raises TopologyError: the store has no table.
        """
        dispatcher = self._dispatcher
        try:
            while not dispatcher.stopped:
                dispatcher.once(None if self._until is None else min(PASS_EVERY, self._left))
                if dispatcher.unavailable or not self._until_due():
                    break
            return None if dispatcher.stopped else dispatcher.finish()
        finally:
            dispatcher.close()

    @property
    def _left(self) -> float:
        return self._end - self._monotonic()

    def _until_due(self) -> bool:
        """Sleep until a message may be due; False: the loop is over."""
        if self._until is None:
            return False
        again = self._monotonic() + PASS_EVERY
        woken = False
        while not self._dispatcher.stopped:
            due = self._dispatcher.next_due()
            # a message that is due now does not end the run before its time
            if self._left <= 0 or (due is None and self._until == "empty"):
                return False
            # rows leased by others are not claimed again at once, unless an earlier message may have been stored
            if due is not None and (due <= timedelta(0) or (woken and due <= LEASED_SLEEP)):
                return True
            most = min(self._sleep.longest, again - self._monotonic(), self._left)
            if due is not None and due.total_seconds() <= most:
                if not self._sleep.wait(due.total_seconds()):
                    return True
                woken = True
            else:
                woken = self._sleep.wait(max(0.0, most)) or self._sleep.longest < PASS_EVERY
                if self._monotonic() >= again:
                    return True
        return False
