"""Figures of the queues: the depths that SQS reports, the counts and lateness of cycling, and its requests.

A message waits, delayed at first; is in flight when it was received; and is deleted, dead-lettered or, when its
retention has passed, expired. Retention counts from the send, also while a message is delayed, in flight, or in the
dead-letter queue of a standard queue. SQS counts its messages approximately. It does not count expired ones, and its
API has no age of a message that was not received; a receive would count against maxReceiveCount.

The requests of a delay are those until a message has been sent to its destination. They leave out the receive and
delete there, and receives without a message: a FifoCycleSensor that waits 20 s each time makes 4,320 a day. SQS
counts a message of over 64 KiB as one request for each 64 KiB begun.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from airflow_delayed.message import plain_span
from airflow_delayed.reports import LATEST, Counts, Finding, State
from airflow_delayed.sqs.queues import MAX_DELAY, resource

#: Messages in a full batch.
BATCH = 10
#: Requests of one message and round: receive, send and delete.
REQUESTS_A_ROUND = 3
#: Requests from which on a send through delay queues is worth a line in the log.
WORTH_TELLING = 1_000_000
#: A message should have at least so long to be read when its delay is over.
TIME_TO_READ = timedelta(hours=1)
#: So many messages may wait for a moment without any being in flight.
UNREAD = 100
#: Bytes of payload that SQS bills as one request.
_CHUNK = 65_536


def billed(size: int) -> int:
    """Return as how many requests SQS bills one with so many bytes of payload: 64 KiB each, at least one."""
    return max(1, -(-size // _CHUNK))


@dataclass(slots=True)
class CycleCounts(Counts):
    """The counts of one pass through a delay queue, or of several."""

    #: Sent back into the delay queue, for another 900 s.
    requeued: int = 0
    #: Sent to the destination, with what was left of the delay.
    delivered: int = 0
    #: Could not be sent on; they are in the delay queue still, and are tried again. Counted each time.
    failed: int = 0
    #: Sent on, and could not be deleted from the delay queue: whoever receives them next may send them once more.
    undeleted: int = 0
    #: Sent to the error queue.
    to_error_queue: int = 0
    fifo_requests: int = 0
    standard_requests: int = 0
    #: Seconds: the longest that a received message had been in the delay queue.
    oldest_seconds: int = field(default=0, metadata=LATEST)
    #: How late messages are delivered: tenths of a second, rounded up to two digits and written as JSON writes keys,
    #: and how many messages.
    late: dict[str, int] = field(default_factory=dict)
    latest_ms: int = field(default=0, metadata=LATEST)

    @property
    def moved(self) -> int:
        """How many messages left the place in the delay queue where they were."""
        return self.requeued + self.delivered + self.to_error_queue

    @property
    def is_quiet(self) -> bool:
        """Whether there was nothing to do."""
        return not (self.moved or self.failed or self.undeleted)

    @property
    def requests(self) -> int:
        """Requests, as SQS bills them."""
        return self.fifo_requests + self.standard_requests

    def note_late(self, milliseconds: int) -> None:
        """Count a message that is delivered so many milliseconds after it was due."""
        self.latest_ms = max(self.latest_ms, milliseconds)
        tenths = str(_rounded(-(-milliseconds // 100)))
        self.late[tenths] = self.late.get(tenths, 0) + 1

    def later_than(self, limit: timedelta) -> int:
        """Return about how many messages were later than that."""
        most = _rounded(-(-limit // timedelta(milliseconds=100)))
        return sum(count for tenths, count in self.late.items() if int(tenths) > most)

    def p99(self) -> float:
        """Return the seconds that 99 of 100 delivered messages were late at most, to two digits."""
        wanted = -(-sum(self.late.values()) * 99 // 100)
        for tenths in sorted(self.late, key=int):
            wanted -= self.late[tenths]
            if wanted <= 0:
                return int(tenths) / 10
        return 0.0

    def summary(self) -> dict[str, Any]:
        """Return the result of a task: counts and seconds."""
        return {
            "requeued": self.requeued,
            "delivered": self.delivered,
            "failed": self.failed,
            "undeleted": self.undeleted,
            "to_error_queue": self.to_error_queue,
            "requests": self.requests,
            "late_p99": self.p99(),
            "late_max": self.latest_ms / 1000,
            "oldest_seconds": self.oldest_seconds,
        }

    def __str__(self) -> str:
        text = (
            f"{self.requeued:,} sent back for another round, {self.delivered:,} delivered, {self.failed:,} failed,"
            f" {self.undeleted:,} not deleted, {self.to_error_queue:,} sent to the error queue;"
            f" {self.requests:,} requests"
        )
        if self.late:
            text += f"; late by {self.p99():.1f} s (99 of 100), {self.latest_ms / 1000:.1f} s at most"
        return text


def _rounded(tenths: int) -> int:
    """Round up to two digits, so that there are never many different ones."""
    unit = 1
    while tenths > 99 * unit:
        unit *= 10
    return -(-max(0, tenths) // unit) * unit


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueDepth:
    """The messages in one queue. Counts are SQS's, and approximate.

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
        """All messages in the queue."""
        return self.waiting + self.delayed + self.in_flight


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueDepths:
    """The queues that messages to one destination pass through; None: there is no such queue.

    :param max_receive_count: how often a message is received before it is dead-lettered; None: without limit.
    """

    destination: QueueDepth
    delay_queue: QueueDepth | None
    dead_letter_queue: QueueDepth | None
    max_receive_count: int | None

    @property
    def dead_lettered(self) -> int:
        """Messages in the dead-letter queue; also messages of other queues that share it."""
        return self.dead_letter_queue.total if self.dead_letter_queue else 0

    @property
    def expired(self) -> None:
        """None: SQS does not count what it has dropped."""
        return None


def depth_of(queue: str, found: Mapping[str, str]) -> QueueDepth:
    """Return a queue's depth from its attributes."""

    def number(name: str) -> int:
        return int(found.get(name, 0))

    return QueueDepth(
        queue=queue,
        waiting=number("ApproximateNumberOfMessages"),
        delayed=number("ApproximateNumberOfMessagesDelayed"),
        in_flight=number("ApproximateNumberOfMessagesNotVisible"),
        retention=timedelta(seconds=number("MessageRetentionPeriod")),
        visibility_timeout=timedelta(seconds=number("VisibilityTimeout")),
    )


def expiry_risk(destination: QueueDepth) -> str | None:
    """Return why a message that is sent now, with the longest delay, could expire unread; None: nothing says so.

    There is a risk when less than an hour is left to read a message; when 100 or more wait and none is being read; and
    when the messages that wait take longer than the retention although each message in flight is done within its
    visibility timeout, the slowest pace of a healthy consumer.
    """
    delay = timedelta(seconds=MAX_DELAY)
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


def depth_findings(depths: QueueDepths) -> Iterator[Finding]:
    """Report dead letters, and a destination whose messages could expire unread."""
    dead = depths.dead_letter_queue
    if dead is not None and dead.waiting:
        yield Finding(
            state=State.WARNING,
            resource=resource(dead.queue),
            found=f"{dead.waiting:,} dead letters: messages that their consumer received again and again, and never"
            " deleted",
            code="dead-letters",
            remedy="when the consumer is repaired, move them back: on the page, or by SqsDelayHook.redrive",
        )
    if risk := expiry_risk(depths.destination):
        yield Finding(
            state=State.WARNING,
            resource=resource(depths.destination.queue),
            found=risk,
            code="could-expire",
            remedy="start more consumers, or raise the queue's retention",
        )


def rounds(delay_seconds: int) -> int:
    """Return how often a message goes through the delay queue: until 900 s or less are left."""
    return max(0, -(-delay_seconds // MAX_DELAY) - 1)


def estimate(delay: timedelta, *, price: float) -> float:
    """Return what a message costs in the delay queue for so long, as NServiceBus's documentation counts.

    That is two requests for each 900 s, a receive and a send. With the delete, and without batches, there are three.

    :raises ValueError: the delay is negative.
    """
    seconds = _seconds(delay)
    return 0.0 if seconds <= MAX_DELAY else 2 * (seconds // MAX_DELAY) * price


def advice(messages: int, delays: timedelta) -> str | None:
    """Return a line for the log about a send through delay queues; None if it takes few requests."""
    if not messages:
        return None
    average = delays / messages
    times = rounds(_seconds(average))
    alone = messages * (REQUESTS_A_ROUND * times + 1)
    if alone < WORTH_TELLING:
        return None
    batches = -(-messages // BATCH)
    return (
        f"{messages:,} messages, due in {average} on average, go through delay queues {times:,} times: {alone:,}"
        f" requests, or {batches * (REQUESTS_A_ROUND * times + 1):,} if every batch is full. In a store"
        f" (store_conn_id=) they would need {batches:,} requests"
    )


def _seconds(delay: timedelta) -> int:
    if delay < timedelta(0):
        raise ValueError(f"delay={delay} must not be negative")
    return -(-plain_span("delay", delay) // timedelta(seconds=1))
