"""A dispatcher that stays: it sleeps exactly until the next message, or until it is told of an earlier one."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from threading import Event

from airflow_delayed.store.dispatch import HELD_SLEEP, Dispatcher
from airflow_delayed.store.report import DispatchReport
from airflow_delayed.store.waiting import Waiter

#: How long before it is handed over a message is claimed, where it is handed over when it is due.
AHEAD = timedelta(seconds=0.2)
#: At least so often a pass is made, which also says in the store that the dispatcher is there; in seconds.
PASS_EVERY = 60.0


class Stay:
    """Runs a dispatcher until a time, or until the store has nothing more for its connections.

    :param waiter: sleeps, and is told of earlier messages; it must be there before the first pass, so that none is
        missed. It is closed in the end.
    :param seconds: how long to stay; None: until there is nothing more.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        waiter: Waiter,
        seconds: float | None,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dispatcher = dispatcher
        self._waiter = waiter
        self._monotonic = monotonic
        self._end = None if seconds is None else monotonic() + seconds
        self._stop = Event()

    def run(self) -> DispatchReport | None:
        """Hand over and sleep until it is over, and close the dispatcher; None: it was stopped.

        :raises DispatchFailed: see :meth:`airflow_delayed.store.dispatch.Dispatcher.check`.
        :raises BreakerTripped: the store's own database failed for too long.
        :raises TopologyError: the store has no table.
        """
        try:
            while not self._stop.is_set():
                self._dispatcher.once(min(PASS_EVERY, self._left))
                if self._dispatcher.unavailable or not self._sleep():
                    break
            return None if self._stop.is_set() else self._dispatcher.finish()
        finally:
            self._dispatcher.close()
            self._waiter.close()

    def stop(self) -> None:
        """Claim nothing more, bring what is being sent to an end, free the rest, and end; from any thread."""
        self._stop.set()
        self._dispatcher.stop()
        self._waiter.wake()

    @property
    def _left(self) -> float:
        return PASS_EVERY if self._end is None else self._end - self._monotonic()

    def _sleep(self) -> bool:
        """Sleep until there may be something to hand over; False: it is over."""
        again = self._monotonic() + PASS_EVERY
        woken = False
        while not self._stop.is_set():
            due = self._dispatcher.next_due()
            if due is None and self._end is None:
                return False
            if self._end is not None and self._left <= 0:
                return False
            # what others hold is not asked for all the time; what is stored meanwhile may be due already
            if due is not None and (due <= timedelta(0) or (woken and due <= HELD_SLEEP)):
                return True
            most = min(self._waiter.longest, again - self._monotonic(), self._left)
            if due is not None and due.total_seconds() <= most:
                if not self._waiter.wait(due.total_seconds()):
                    return True
                woken = True
            else:
                woken = self._waiter.wait(max(0.0, most)) or self._waiter.longest < PASS_EVERY
                if self._monotonic() >= again:
                    return True
        return False
