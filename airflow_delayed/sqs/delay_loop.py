"""The loop of a task: it cycles the delay queues of its destinations until they are empty, or until a time."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, Protocol

from airflow_delayed.delivery import Clock
from airflow_delayed.errors import AccessDenied, InvalidMessage, RetentionAtRisk, TopologyError
from airflow_delayed.message import delay_seconds, parse_moment
from airflow_delayed.sqs.stats import CycleCounts, Prices

#: The value of ``until`` that is no time.
EMPTY = "empty"
#: Seconds after which the next destination has its turn, although more is visible in this one's queue.
TURN = 10.0
#: Seconds after which a round ends although messages are visible, so that a sensor reaches its timeout.
LONGEST_ROUND = 300.0
#: Seconds between two lines of the log on the progress.
PROGRESS = 600.0

log = logging.getLogger(__name__)


def never() -> bool:
    """Do not stop."""
    return False


class CyclingHook(Protocol):
    """The methods of SqsDelayHook that the loop calls."""

    conn_id: str
    prices: Prices

    @property
    def clock(self) -> Clock:
        """The present."""

    def cycle(
        self, destination: str, wait_seconds: int = 0, *, error_queue: str | None = None, stop: Callable[[], bool] = ...
    ) -> CycleCounts:
        """Send on the visible messages."""

    def waiting(self, destination: str) -> int:
        """Return how many messages there are."""

    def retention(self, destination: str) -> int:
        """Return the seconds after which a message is forgotten."""


def end_of(until: datetime | timedelta | str, began: datetime) -> datetime | None:
    """Return when to end, or None for "empty".

    :param began: what a timedelta counts from.
    :raises ValueError: it is neither "empty", nor an aware time, ISO 8601 text with an offset, or a timedelta that is
        not negative.
    """
    if until == EMPTY:
        return None
    if isinstance(until, timedelta):
        if until < timedelta(0):
            raise ValueError(f"until={until} is negative")
        return began + until
    try:
        return parse_moment("until", until)
    except InvalidMessage as error:
        raise ValueError(
            f"until={until!r} must be 'empty', a timedelta, or a time with an offset such as 2026-01-31T09:30:00+01:00"
            f" ({error.problem})"
        ) from None


class DelayQueueLoop:
    """One task's passes through the delay queues of its destinations.

    :param end: None to go on until the queues are empty.
    :param wait_seconds: of each round; shared among the destinations.
    :param looks: how many rounds in a row must be without a message, since SQS counts only approximately.
    :param max_late: a message delivered later than that is a warning.
    :param counts: of earlier passes.
    :param monotonic: seconds from some moment.
    :param meter: called with the counts of each pass that moved something.
    :raises ValueError: there are no destinations.
    """

    def __init__(
        self,
        hook: CyclingHook,
        destinations: Sequence[str],
        *,
        end: datetime | None,
        wait_seconds: int,
        looks: int,
        error_queue: str | None = None,
        max_late: timedelta | None = None,
        counts: CycleCounts | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        meter: Callable[[CycleCounts], object] | None = None,
    ) -> None:
        self._hook = hook
        self._destinations = list(dict.fromkeys(destinations))
        if not self._destinations:
            # a task without a queue would succeed
            raise ValueError("destination is empty; name one queue at least")
        self.end = end
        self._wait = wait_seconds
        self._looks = looks
        self._error_queue = error_queue
        self._max_late = max_late
        self._retention: dict[str, int] = {}
        self.counts = counts or CycleCounts()
        self._monotonic = monotonic
        self._meter = meter
        self._is_first = True
        #: Counts that are not logged yet, by destination, and when they were logged last.
        self._unlogged: dict[str, CycleCounts] = {}
        self._logged_at: float | None = None

    def go(self, stop: Callable[[], bool] = never, *, once: bool = False) -> bool:
        """Do one round, or without an end as many as show that the queues are empty; return whether the task is done.

        :param once: only one round, which cannot show that the queues are empty.
        :raises TopologyError: a queue does not exist. The other destinations had their turn.
        :raises AccessDenied: the role may not do something with a queue. The other destinations had their turn.
        :raises RetentionAtRisk: messages have waited for too long. What could be sent on was.
        :raises TransportUnavailable: SQS cannot be reached or refuses the connection. Nothing is lost.
        """
        if self.end is not None:
            # a task that starts after its end does one whole round; if the end passes in the first round, that has at
            # least TURN seconds
            first, self._is_first = self._is_first, False
            least = self._monotonic() + (TURN if first else 0)
            late = self._is_over()
            self._round(stop if late else lambda: stop() or (self._is_over() and self._monotonic() >= least))
            return self._is_over()
        if once:
            self._round(stop)
            return False
        return all(not stop() and self._round(stop) for _ in range(self._looks))

    def log_counts(self) -> None:
        """Log the counts of the whole task, and the cost of its requests."""
        self._log_progress(at_once=True)
        cost = self.counts.cost(self._hook.prices)
        text = "delay queues of %s: %s; the requests cost $%.6f at prices of %s"
        log.info(text, ", ".join(self._destinations), self.counts, cost.dollars, cost.as_of)

    def summary(self) -> dict[str, Any]:
        """Return the result of the whole task: counts, seconds, US dollars and the day of their prices."""
        return self.counts.summary(self._hook.prices)

    def _round(self, stop: Callable[[], bool]) -> bool:
        """Return whether nothing was to do, and nothing waits."""
        problem: Exception | None = None
        quiet = True
        began = self._monotonic()
        left = deque(self._destinations)
        while left:
            name = left.popleft()
            try:
                nothing, drained = self._turn(name, stop)
            except (TopologyError, AccessDenied, RetentionAtRisk) as error:
                # of one queue, for which the others do not wait
                problem = problem or error
                continue
            quiet = nothing and quiet
            if not drained and not stop() and self._monotonic() - began < LONGEST_ROUND:
                left.append(name)
        self._log_progress()
        if problem:
            raise problem
        return quiet

    def _turn(self, name: str, stop: Callable[[], bool]) -> tuple[bool, bool]:
        """Return whether nothing was to do and nothing waits, and whether all visible messages were sent on."""
        wait = self._wait_now()
        ends = self._monotonic() + wait + (TURN if len(self._destinations) > 1 else LONGEST_ROUND)

        def is_over() -> bool:
            return self._monotonic() >= ends

        found = self._hook.cycle(name, wait, error_queue=self._error_queue, stop=lambda: stop() or is_over())
        self.counts.merge(found)
        if not found.is_quiet:
            self._unlogged.setdefault(name, CycleCounts()).merge(found)
            if self._meter is not None:
                self._meter(found)
        self._check_age(name, found.oldest_seconds)
        if not found.is_quiet:
            # SQS counts late, so a pass that moved something proves nothing yet
            return False, not is_over()
        if self.end is not None:
            return True, True
        self.counts.fifo_requests += 1
        return self._hook.waiting(name) == 0, True

    def _log_progress(self, *, at_once: bool = False) -> None:
        """Log the counts since the last line, the first at once and then every ten minutes."""
        now = self._monotonic()
        if not self._unlogged or not (at_once or self._logged_at is None or now - self._logged_at >= PROGRESS):
            return
        for name, counts in self._unlogged.items():
            log.info("delay queue of %s: %s", name, counts)
            if self._max_late is not None and (late := counts.later_than(self._max_late)):
                log.warning("%s messages to %s were later than %s", f"{late:,}", name, self._max_late)
        self._unlogged.clear()
        self._logged_at = now

    def _wait_now(self) -> int:
        wait = -(-self._wait // max(1, len(self._destinations)))
        return wait if self.end is None else min(wait, delay_seconds(self.end, self._hook.clock()))

    def _is_over(self) -> bool:
        return self.end is not None and self._hook.clock() >= self.end

    def _check_age(self, name: str, oldest: int) -> None:
        if not oldest:
            return
        if name not in self._retention:
            self.counts.fifo_requests += 1
            self._retention[name] = self._hook.retention(name)
        if oldest * 2 > self._retention[name]:
            raise RetentionAtRisk(self._hook.conn_id, f"the delay queue of {name}", oldest, self._retention[name])
