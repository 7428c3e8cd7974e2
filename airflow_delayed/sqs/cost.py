"""What a delay costs on SQS, by arithmetic alone.

Counted are requests until a message has been handed to its destination, not its receive and delete there, and not the
receives that find nothing: a FifoCycleSensor that waits 20 s each time makes 4,320 a day. SQS counts a message of over
64 KiB as one request for each 64 KiB begun.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, timedelta

from airflow_delayed.sqs.queues import MAX_DELAY

#: Dollars for a million requests, us-east-1, beyond the free tier; https://aws.amazon.com/sqs/pricing/
PRICE_STANDARD = 0.40
PRICE_FIFO = 0.50
PRICES_AS_OF = date(2026, 11, 21)
#: Messages in a full batch.
BATCH = 10
#: Receive, send and delete: what one message and round takes.
REQUESTS_A_ROUND = 3
#: Dollars from which on a send through delay queues is worth a line in the log.
WORTH_TELLING = 1.0

MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class Cost:
    """Requests, and dollars at the prices above."""

    requests: int
    dollars: float

    def __str__(self) -> str:
        dollars = f"${self.dollars:,.{2 if self.dollars >= 1 else 4}f}"
        # not nothing
        return f"{self.requests:,} requests, {'under $0.0001' if 0 < self.dollars < 0.0001 else dollars}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What delaying messages costs, one way and another. None: it cannot be done that way.

    :param rounds: how often each message goes through its delay queue.
    :param direct: with DelaySeconds alone, in full batches; up to 900 s.
    :param fifo_formula: through the delay queue as NServiceBus's documentation counts: ``2 * (delay // 900)`` requests
        a message, which leaves out the deletes.
    :param fifo_single: the same as it is, one message a request: the first send, then receive, send and delete.
    :param fifo_batched: the same in full batches of 10, which is the least it can be.
    :param held: held in a store, and sent once, in full batches, when it is near.
    """

    delay: timedelta
    messages: int
    rounds: int
    direct: Cost | None
    fifo_formula: Cost | None
    fifo_single: Cost | None
    fifo_batched: Cost | None
    held: Cost


def rounds(delay_seconds: int) -> int:
    """Return how often a message goes through the delay queue: until 900 s or less are left."""
    return max(0, -(-delay_seconds // MAX_DELAY) - 1)


def estimate(delay: timedelta, messages: int = 1) -> Estimate:
    """Return what it costs to delay so many messages by ``delay``.

    :raises ValueError: one of them is negative.
    """
    if delay < timedelta(0) or messages < 0:
        raise ValueError(f"delay={delay} and messages={messages:,} must not be negative")
    seconds = -(-delay // timedelta(seconds=1))
    if seconds <= MAX_DELAY:
        once = _cost(standard=_batches(messages))
        return Estimate(
            delay=delay,
            messages=messages,
            rounds=0,
            direct=once,
            fifo_formula=None,
            fifo_single=None,
            fifo_batched=None,
            held=once,
        )
    times = rounds(seconds)
    return Estimate(
        delay=delay,
        messages=messages,
        rounds=times,
        direct=None,
        fifo_formula=_cost(fifo=2 * (seconds // MAX_DELAY) * messages),
        fifo_single=_through_fifo(messages, times),
        fifo_batched=_through_fifo(_batches(messages), times),
        held=_cost(standard=_batches(messages)),
    )


def _through_fifo(batches: int, times: int) -> Cost:
    # the first send is to the delay queue, and the last round's to the destination
    return _cost(fifo=batches * REQUESTS_A_ROUND * times, standard=batches)


def advice(messages: int, delays: timedelta) -> str | None:
    """Return what to say of a send through delay queues; None if it costs too little to speak of.

    :param messages: how many are due in over 900 s.
    :param delays: their delays, added up.
    """
    if not messages:
        return None
    average = delays / messages
    whole = estimate(average, messages)
    if whole.fifo_single is None or whole.fifo_single.dollars < WORTH_TELLING:
        return None
    return (
        f"{messages:,} messages, due in {average} on average, go through delay queues {whole.rounds:,} times:"
        f" {whole.fifo_single}, or {whole.fifo_batched} if every batch is full. In a store (store_conn_id=) they would"
        f" wait for {whole.held}"
    )


def _batches(messages: int) -> int:
    return -(-messages // BATCH)


def _cost(*, fifo: int = 0, standard: int = 0) -> Cost:
    return Cost(fifo + standard, (fifo * PRICE_FIFO + standard * PRICE_STANDARD) / MILLION)
