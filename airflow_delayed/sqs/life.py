"""Where messages are in their life, as far as SQS tells it, and whether some could expire unread.

A message waits, delayed at first; is in flight when it was received; and is deleted, dead-lettered or, when its
retention has passed, expired. Retention counts from the send, also while a message is delayed, in flight, or in the
dead-letter queue of a standard queue. SQS counts what it has, approximately; it neither counts what has expired, nor
tells in its own API how old a message is before it is received, and a receive would count against maxReceiveCount.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from airflow_delayed.sqs.queues import MAX_DELAY

#: A message should have at least so long to be read when its delay is over.
TIME_TO_READ = timedelta(hours=1)
#: So many messages may wait for a moment without any being in flight.
UNREAD = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One queue. Counts are SQS's, and approximate.

    :param waiting: could be received now.
    :param delayed: are not visible yet, for the first time.
    :param in_flight: were received, and neither deleted nor visible again.
    :param retention: how long a message is kept from its send on.
    :param oldest: the age of the oldest message; None: SQS does not tell it (CloudWatch does, as
        ApproximateAgeOfOldestMessage).
    """

    queue: str
    waiting: int
    delayed: int
    in_flight: int
    retention: timedelta
    visibility_timeout: timedelta
    oldest: timedelta | None = None

    @property
    def total(self) -> int:
        """All that the queue holds."""
        return self.waiting + self.delayed + self.in_flight


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """The queues that messages to one destination pass through; None: there is no such queue.

    :param max_receive_count: how often a message is received before it is dead-lettered; None: as often as it likes.
    """

    destination: Stage
    delay_queue: Stage | None
    dead_letter_queue: Stage | None
    max_receive_count: int | None

    @property
    def dead_lettered(self) -> int:
        """How many messages the dead-letter queue holds; those of other queues too if they share it."""
        return self.dead_letter_queue.total if self.dead_letter_queue else 0

    @property
    def expired(self) -> None:
        """None: SQS does not count what it has dropped."""
        return None


def stage(queue: str, found: Mapping[str, str]) -> Stage:
    """Return a queue's stage from its attributes."""

    def number(name: str) -> int:
        return int(found.get(name, 0))

    return Stage(
        queue=queue,
        waiting=number("ApproximateNumberOfMessages"),
        delayed=number("ApproximateNumberOfMessagesDelayed"),
        in_flight=number("ApproximateNumberOfMessagesNotVisible"),
        retention=timedelta(seconds=number("MessageRetentionPeriod")),
        visibility_timeout=timedelta(seconds=number("VisibilityTimeout")),
    )


def expiry_risk(destination: Stage, delay: timedelta = timedelta(seconds=MAX_DELAY)) -> str | None:
    """Return why a message that is sent now, with up to this delay, could expire unread; None: nothing says so.

    It is told when less than an hour is left to read a message; when 100 or more wait and none is being read; and when
    what waits takes longer than the retention even though each message in flight is done within its visibility timeout,
    which is the slowest that a consumer in health can be.
    """
    left = destination.retention - delay
    kept = f"kept for {destination.retention} from its send, of which its delay takes up to {delay}"
    if left < TIME_TO_READ:
        return f"a message is {kept}: {max(left, timedelta(0))} are left to read it"
    waiting, in_flight = destination.waiting, destination.in_flight
    if in_flight == 0:
        if waiting < UNREAD:
            return None
        return f"{waiting:,} messages wait and none is being read; a message is {kept}, and is lost if not read by then"
    slowest = waiting / in_flight * destination.visibility_timeout.total_seconds()
    if slowest <= left.total_seconds():
        return None
    return (
        f"{waiting:,} messages wait and {in_flight:,} are in flight, which can take up to {slowest / 86_400:,.1f} days;"
        f" a message is {kept}, and is lost if not read by then"
    )
