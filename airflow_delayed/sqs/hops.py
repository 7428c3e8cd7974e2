"""The next hop of a message: straight to its destination, or once more through the delay queue.

The rule is that of NServiceBus.AmazonSQS (MessageDispatcher.cs, DelayedMessagesPump.cs): 1,925 s go through the delay
queue as 1925, 900 s later as 1025, and 900 s after that to the destination with 125. Elapsed time is rounded down to
whole seconds, so that no wait is ever cut short; the fraction makes a message late by less than a second each time.
That adds up, to 26 minutes in 30 days; so a message that says when it is due is measured by that alone.

The times of a message received from a delay queue are when it was sent, its delay, and its due time. They are compared
with the broker's time of its first receive (``ApproximateFirstReceiveTimestamp``), or on a later receive with this
machine's, as NServiceBus does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_delayed.errors import InvalidMessage, LimitExceeded
from airflow_delayed.message import microseconds
from airflow_delayed.nservicebus import DELIVER_AT, parse_nservicebus_time
from airflow_delayed.sqs.entries import DELAY_SECONDS, HEADERS, decode, due_of
from airflow_delayed.sqs.queues import MAX_DELAY

if TYPE_CHECKING:
    from mypy_boto3_sqs.type_defs import MessageTypeDef


#: Seconds: 68 years, the largest number that a .NET endpoint reads from the attribute.
LONGEST_DELAY = 2**31 - 1
#: Milliseconds by which a due time may be before the end of the delay beside it: senders' clocks may be off by that.
_AT_ODDS_MS = 3_600_000
_NUMBER = re.compile(r"[+-]?[0-9]{1,10}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Hop:
    """The queue that a message is sent to next, and its delay in whole seconds.

    To the destination the delay is ``DelaySeconds`` of the request, 0 to 900; to the delay queue it is an attribute.
    """

    delay_seconds: int
    through_fifo: bool


def hop_of(delay_seconds: int) -> Hop:
    """Return the next hop of a message that is due in so many seconds; a time that has passed is due now.

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
    """Return the rest of a delay when a message comes back from the delay queue; 0 if nothing is left.

    :param delay_seconds: the value of its attribute.
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
    """Return the whole seconds until a message is due, rounded up; 0 if it is overdue.

    :param due_us: microseconds since 1970.
    :param now_ms: milliseconds since 1970.
    """
    return max(0, -((now_ms * 1000 - due_us) // 1_000_000))


def sent_ms(message: MessageTypeDef) -> int:
    """Return when a message was sent into the delay queue, in milliseconds since 1970 by the broker."""
    return int(message["Attributes"]["SentTimestamp"])


def is_readable(message: MessageTypeDef) -> bool:
    """Return whether a message has a due time or a delay."""
    return delay_of(message) is not None or due_us_of(message) is not None


def due_us_of(message: MessageTypeDef) -> int | None:
    """Return the due time that a message states, in microseconds since 1970; None if there is no plausible one."""
    due_at, sent, delay = due_of(message.get("MessageAttributes", {})), sent_ms(message), delay_of(message)
    if due_at is None:
        return None if delay is None else _endpoints_due_us(message, sent + delay * 1000)
    due_us = microseconds(due_at)
    if delay is not None and due_us // 1000 < sent + delay * 1000 - _AT_ODDS_MS:
        # of an earlier send: a consumer delayed the message once more, and copied all its attributes
        return None
    # no delay is that long
    return due_us if due_us // 1_000_000 - sent // 1000 <= LONGEST_DELAY else None


def _endpoints_due_us(message: MessageTypeDef, rounded_ms: int) -> int | None:
    """Return the due time in the headers of an NServiceBus endpoint's message, in microseconds since 1970.

    The delay beside it is rounded up to the second. So a time that is not within the second before the end of the delay
    is of another clock, of an earlier delivery, or of an earlier round.

    :param rounded_ms: when the delay ends, in milliseconds since 1970.
    """
    attributes = message.get("MessageAttributes", {})
    beside = attributes[HEADERS].get("StringValue", "") if HEADERS in attributes else ""
    # most messages need not be parsed to know it
    if DELIVER_AT not in beside and DELIVER_AT not in message.get("Body", ""):
        return None
    try:
        due_at = parse_nservicebus_time(decode(message).headers.get(DELIVER_AT))
    except InvalidMessage:
        return None
    due_us = None if due_at is None else microseconds(due_at)
    return due_us if due_us is not None and 0 <= rounded_ms * 1000 - due_us < 1_000_000 else None


def delay_of(message: MessageTypeDef) -> int | None:
    """Return the delay in a message's attribute, or None if it has no readable one."""
    try:
        text = message["MessageAttributes"][DELAY_SECONDS]["StringValue"]
    except KeyError:
        return None
    if not _NUMBER.fullmatch(text) or abs(int(text)) > LONGEST_DELAY:
        return None
    return int(text)
