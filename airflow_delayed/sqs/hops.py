"""Which way a message goes next: straight to its destination, or once more through the delay queue.

The rule is that of NServiceBus.AmazonSQS (MessageDispatcher.cs, DelayedMessagesPump.cs): 1,925 s go through the delay
queue as 1925, 900 s later as 1025, and 900 s after that to the destination with 125. Elapsed time is rounded down to
whole seconds, so that no wait is ever cut short; the fraction makes a message late by less than a second each time.
That adds up, to 26 minutes in 30 days; so a message that says when it is due is measured by that alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from airflow_delayed.errors import LimitExceeded
from airflow_delayed.sqs.queues import MAX_DELAY

#: Seconds: 68 years, the largest number that a .NET endpoint reads from the attribute.
LONGEST_DELAY = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Hop:
    """Where a message is sent next, with a delay in whole seconds.

    To the destination that is ``DelaySeconds`` of the request, 0 to 900; to the delay queue it is an attribute.
    """

    delay_seconds: int
    through_fifo: bool


def hop_of(delay_seconds: int) -> Hop:
    """Return the next hop of a message that is due in so many seconds; what is past is due now.

    :raises LimitExceeded: it is due in more than 68 years.
    """
    if delay_seconds > LONGEST_DELAY:
        raise LimitExceeded(
            "due_at", f"is {delay_seconds:,} s away, and a delay through SQS has at most {LONGEST_DELAY:,} s (68 years)"
        )
    return Hop(max(0, delay_seconds), delay_seconds > MAX_DELAY)


def remaining_seconds(
    delay_seconds: int, *, sent_ms: int, first_received_ms: int, receive_count: int, now_ms: int
) -> int:
    """Return what is left of a delay when a message comes back from the delay queue; 0 if nothing is.

    :param delay_seconds: what its attribute said when it was sent into the queue.
    :param sent_ms: milliseconds since 1970 by the broker (SentTimestamp), as is ``first_received_ms``
        (ApproximateFirstReceiveTimestamp).
    :param now_ms: the same by the client's clock, which counts only when the message was received before: its first
        receive may then be long ago.
    """
    received_ms = first_received_ms if receive_count <= 1 else now_ms
    # a client's clock behind the broker's must not make the delay longer than it was
    elapsed = max(0, received_ms - sent_ms) // 1000
    return max(0, delay_seconds - elapsed)


def seconds_until(due_us: int, now_ms: int) -> int:
    """Return the whole seconds until a message is due, rounded up; 0 if that is past.

    :param due_us: microseconds since 1970.
    :param now_ms: milliseconds since 1970 by the broker's clock, or what it has reached at least.
    """
    return max(0, -((now_ms * 1000 - due_us) // 1_000_000))
