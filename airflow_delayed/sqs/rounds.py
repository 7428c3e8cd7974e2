"""Cycling the delay queues of one or more destinations until they are empty, or until some time."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Protocol

from airflow_delayed.delivery import Clock
from airflow_delayed.errors import AccessDenied, InvalidMessage, RetentionAtRisk, TopologyError
from airflow_delayed.message import delay_seconds, parse_moment
from airflow_delayed.sqs.counts import Counts

#: What ``until`` says when it is not a time.
EMPTY = "empty"
#: Seconds of sending on after which it is the next destination's turn, and after which a round ends, although more is
#: visible: a queue to which messages come without end must not keep others waiting, nor a sensor from its timeout.
TURN = 10.0
LONGEST_ROUND = 300.0
#: Seconds between two lines of the log on what was done meanwhile.
PROGRESS = 600.0

log = logging.getLogger(__name__)


def never() -> bool:
    """Do not stop."""
    return False


class Cycler(Protocol):
    """What SqsDelayHook offers for this."""

    conn_id: str

    @property
    def clock(self) -> Clock:
        """What is taken for the present."""

    def cycle(
        self, destination: str, wait_seconds: int = 0, *, error_queue: str | None = None, stop: Callable[[], bool] = ...
    ) -> Counts:
        """Send on what is visible."""

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


class Rounds:
    """One task's cycling.

    :param end: None to go on until the queues are empty.
    :param wait_seconds: of each round; shared among the destinations.
    :param looks: how many rounds in a row must find nothing, since SQS counts only approximately.
    :param max_late: a message delivered later than that is a warning.
    :param counts: of what was done before.
    :param monotonic: seconds from some moment.
    :param meter: is told what each look at a queue did.
    :raises ValueError: there are no destinations.
    """

    def __init__(
        self,
        hook: Cycler,
        destinations: Sequence[str],
        *,
        end: datetime | None,
        wait_seconds: int,
        looks: int,
        error_queue: str | None = None,
        max_late: timedelta | None = None,
        counts: Counts | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        meter: Callable[[Counts], object] | None = None,
    ) -> None:
        self._hook = hook
        self._destinations = list(dict.fromkeys(destinations))
        if not self._destinations:
            # that nothing is left in no queue would pass for a success
            raise ValueError("destination is empty; name one queue at least")
        self.end = end
        self._wait = wait_seconds
        self._looks = looks
        self._error_queue = error_queue
        self._max_late = max_late
        self._retention: dict[str, int] = {}
        self.counts = counts or Counts()
        self._monotonic = monotonic
        self._meter = meter
        self._is_first = True
        #: What the log does not have yet, by destination, and when it was told last.
        self._untold: dict[str, Counts] = {}
        self._told_at: float | None = None

    def go(self, stop: Callable[[], bool] = never, *, once: bool = False) -> bool:
        """Do one round, or all that is needed to be sure that nothing is left; return whether this was the last.

        :param once: only one round, which cannot find out that the queues are empty.
        :raises TopologyError: a queue does not exist. The other destinations had their turn.
        :raises AccessDenied: the role may not do something with a queue. The other destinations had their turn.
        :raises RetentionAtRisk: messages have waited for too long. What could be sent on was.
        :raises TransportUnavailable: SQS cannot be reached or refuses the connection. Nothing is lost.
        """
        if self.end is not None:
            # a task that starts when its time is over does one whole round all the same; one whose time was over while
            # it made its connection has a turn
            first, self._is_first = self._is_first, False
            least = self._monotonic() + (TURN if first else 0)
            late = self._is_over()
            self._round(stop if late else lambda: stop() or (self._is_over() and self._monotonic() >= least))
            return self._is_over()
        if once:
            self._round(stop)
            return False
        return all(not stop() and self._round(stop) for _ in range(self._looks))

    def tell(self) -> None:
        """Log what was done in all."""
        self._tell_progress(at_once=True)
        log.info("delay queues of %s: %s", ", ".join(self._destinations), self.counts)

    def _round(self, stop: Callable[[], bool]) -> bool:
        """Return whether there was nothing to do, and nothing is waiting."""
        problem: Exception | None = None
        quiet = True
        began = self._monotonic()
        left = deque(self._destinations)
        while left:
            name = left.popleft()
            try:
                nothing, drained = self._turn(name, stop)
            except (TopologyError, AccessDenied, RetentionAtRisk) as error:
                # of one queue; the others are not to wait for it
                problem = problem or error
                continue
            quiet = nothing and quiet
            if not drained and not stop() and self._monotonic() - began < LONGEST_ROUND:
                left.append(name)
        self._tell_progress()
        if problem:
            raise problem
        return quiet

    def _turn(self, name: str, stop: Callable[[], bool]) -> tuple[bool, bool]:
        """Return whether there was nothing to do and nothing is waiting, and whether all that was visible is gone."""
        wait = self._wait_now()
        ends = self._monotonic() + wait + (TURN if len(self._destinations) > 1 else LONGEST_ROUND)

        def is_over() -> bool:
            return self._monotonic() >= ends

        found = self._hook.cycle(name, wait, error_queue=self._error_queue, stop=lambda: stop() or is_over())
        self.counts.add(found)
        if not found.is_quiet:
            self._untold.setdefault(name, Counts()).add(found)
            if self._meter is not None:
                self._meter(found)
        self._check_age(name, found.oldest)
        if not found.is_quiet:
            # SQS counts late, so a pass that moved something proves nothing yet
            return False, not is_over()
        if self.end is not None:
            return True, True
        self.counts.fifo_requests += 1
        return self._hook.waiting(name) == 0, True

    def _tell_progress(self, *, at_once: bool = False) -> None:
        """Log what was done since the last time, the first at once and then every ten minutes."""
        now = self._monotonic()
        if not self._untold or not (at_once or self._told_at is None or now - self._told_at >= PROGRESS):
            return
        for name, counts in self._untold.items():
            log.info("delay queue of %s: %s", name, counts)
            if self._max_late is not None and (late := counts.later_than(self._max_late)):
                log.warning("%s messages to %s were later than %s", f"{late:,}", name, self._max_late)
        self._untold.clear()
        self._told_at = now

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
