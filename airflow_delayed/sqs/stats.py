"""Figures of the queues: the depths that SQS reports, the counts and lateness of cycling, and its cost.

A message waits, delayed at first; is in flight when it was received; and is deleted, dead-lettered or, when its
retention has passed, expired. Retention counts from the send, also while a message is delayed, in flight, or in the
dead-letter queue of a standard queue. SQS counts its messages approximately. It does not count expired ones, and its
API has no age of a message that was not received; a receive would count against maxReceiveCount.

The cost of a delay counts the requests until a message has been sent to its destination. It leaves out the receive and
delete there, and receives without a message: a FifoCycleSensor that waits 20 s each time makes 4,320 a day. SQS
counts a message of over 64 KiB as one request for each 64 KiB begun.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date, timedelta
from typing import Any

from airflow_delayed.message import plain_span
from airflow_delayed.reports import LATEST, Counts, Finding, State
from airflow_delayed.sqs.queues import MAX_DELAY, resource

#: Messages in a full batch.
BATCH = 10
#: Requests of one message and round: receive, send and delete.
REQUESTS_A_ROUND = 3
#: Dollars from which on a send through delay queues is worth a line in the log.
WORTH_TELLING = 1.0
MILLION = 1_000_000
#: A message should have at least so long to be read when its delay is over.
TIME_TO_READ = timedelta(hours=1)
#: So many messages may wait for a moment without any being in flight.
UNREAD = 100
#: Bytes of payload that SQS bills as one request.
_CHUNK = 65_536


@dataclass(frozen=True, slots=True)
class Prices:
    """US dollars for a million requests. The free tier and the lower prices of large volumes are not modelled.

    The defaults are those of us-east-1 (https://aws.amazon.com/sqs/pricing/).

    :param standard: of requests to standard queues.
    :param fifo: of requests to FIFO queues.
    :param as_of: the day of these prices, which is printed beside amounts.
    """

    standard: float = 0.40
    fifo: float = 0.50
    as_of: date = date(2026, 11, 21)

    def cost(self, *, standard: int = 0, fifo: int = 0) -> Cost:
        """Return the cost of so many requests to standard and to FIFO queues."""
        dollars = (fifo * self.fifo + standard * self.standard) / MILLION
        return Cost(requests=fifo + standard, dollars=dollars, as_of=self.as_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Requests, and their price in US dollars.

    :param as_of: the day of the prices.
    """

    requests: int
    dollars: float
    as_of: date

    @property
    def amount(self) -> str:
        """The dollars as text."""
        if 0 < self.dollars < 0.0001:
            # not nothing
            return "under $0.0001"
        return f"${self.dollars:,.{2 if self.dollars >= 1 else 4}f}"

    def __str__(self) -> str:
        return f"{self.requests:,} requests ({self.amount} at prices of {self.as_of})"


#: Prices where nobody configured others.
DEFAULT_PRICES = Prices()


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

    def cost(self, prices: Prices) -> Cost:
        """Return the cost of the requests."""
        return prices.cost(standard=self.standard_requests, fifo=self.fifo_requests)

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

    def summary(self, prices: Prices) -> dict[str, Any]:
        """Return the result of a task: counts, seconds, US dollars and the day of their prices."""
        return {
            "requeued": self.requeued,
            "delivered": self.delivered,
            "failed": self.failed,
            "undeleted": self.undeleted,
            "to_error_queue": self.to_error_queue,
            "requests": self.requests,
            "cost_usd": round(self.cost(prices).dollars, 9),
            "prices_as_of": prices.as_of.isoformat(),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The cost of delaying messages, in several ways. None: that way is not possible.

    :param rounds: how often each message goes through its delay queue.
    :param direct: with DelaySeconds alone, in full batches; up to 900 s.
    :param fifo_formula: through the delay queue as NServiceBus's documentation counts: ``2 * (delay // 900)`` requests
        a message, which leaves out the deletes.
    :param fifo_single: the same as it is, one message a request: the first send, then receive, send and delete.
    :param fifo_batched: the same in full batches of 10, which is the least it can be.
    :param stored: stored in a SQL store, and sent once, in full batches, when the due time is near.
    """

    delay: timedelta
    messages: int
    rounds: int
    direct: Cost | None
    fifo_formula: Cost | None
    fifo_single: Cost | None
    fifo_batched: Cost | None
    stored: Cost


def rounds(delay_seconds: int) -> int:
    """Return how often a message goes through the delay queue: until 900 s or less are left."""
    return max(0, -(-delay_seconds // MAX_DELAY) - 1)


def estimate(delay: timedelta, messages: int = 1, *, prices: Prices = DEFAULT_PRICES) -> Estimate:
    """Return the cost of delaying so many messages by ``delay``.

    :raises ValueError: one of them is negative.
    """
    if delay < timedelta(0) or messages < 0:
        raise ValueError(f"delay={delay} and messages={messages:,} must not be negative")
    delay = plain_span("delay", delay)
    seconds = -(-delay // timedelta(seconds=1))
    if seconds <= MAX_DELAY:
        once = prices.cost(standard=_batches(messages))
        return Estimate(
            delay=delay,
            messages=messages,
            rounds=0,
            direct=once,
            fifo_formula=None,
            fifo_single=None,
            fifo_batched=None,
            stored=once,
        )
    times = rounds(seconds)
    return Estimate(
        delay=delay,
        messages=messages,
        rounds=times,
        direct=None,
        fifo_formula=prices.cost(fifo=2 * (seconds // MAX_DELAY) * messages),
        fifo_single=_through_fifo(messages, times, prices),
        fifo_batched=_through_fifo(_batches(messages), times, prices),
        stored=prices.cost(standard=_batches(messages)),
    )


def _through_fifo(batches: int, times: int, prices: Prices) -> Cost:
    # the first send is to the delay queue, and the last round's to the destination
    return prices.cost(fifo=batches * REQUESTS_A_ROUND * times, standard=batches)


def advice(messages: int, delays: timedelta, *, prices: Prices = DEFAULT_PRICES) -> str | None:
    """Return a line for the log about a send through delay queues; None if it costs little.

    :param messages: how many are due in over 900 s.
    :param delays: their delays, added up.
    """
    if not messages:
        return None
    average = delays / messages
    whole = estimate(average, messages, prices=prices)
    alone, batched, stored = whole.fifo_single, whole.fifo_batched, whole.stored
    if alone is None or batched is None or alone.dollars < WORTH_TELLING:
        return None
    return (
        f"{messages:,} messages, due in {average} on average, go through delay queues {whole.rounds:,} times:"
        f" {alone.requests:,} requests ({alone.amount}), or {batched.requests:,} ({batched.amount}) if every batch is"
        f" full. In a store (store_conn_id=) they would need {stored.requests:,} requests ({stored.amount}). Prices of"
        f" {prices.as_of}, without a free tier"
    )


def _batches(messages: int) -> int:
    return -(-messages // BATCH)
