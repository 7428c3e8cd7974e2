"""A message as it is received from a delay queue: when it was sent, how long it waits, and when it is due."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from airflow_delayed.message import microseconds
from airflow_delayed.sqs.entries import (
    DELAY_SECONDS,
    MAX_ATTRIBUTES,
    MAX_BYTES,
    MESSAGE_ID,
    attributes_size,
    due_of,
    string,
)
from airflow_delayed.sqs.hops import LONGEST_DELAY

if TYPE_CHECKING:
    from mypy_boto3_sqs.type_defs import MessageTypeDef

    from airflow_delayed.sqs.entries import Attributes

#: Milliseconds by which a due time may be before the end of the delay beside it: what a sender's clock may be off.
_AT_ODDS_MS = 3_600_000
_NUMBER = re.compile(r"[+-]?[0-9]{1,10}", re.ASCII)


def fill(body: str, attributes: Attributes, wanted: Mapping[str, str]) -> int:
    """Add what a message does not have and has room for, and return its size; it is sent on in any case."""
    size = len(body.encode()) + attributes_size(attributes)
    for name, text in wanted.items():
        if name in attributes or len(attributes) >= MAX_ATTRIBUTES:
            continue
        more = attributes_size({name: (value := string(text))})
        if size + more <= MAX_BYTES:
            attributes[name] = value
            size += more
    return size


def own_id(message: MessageTypeDef) -> dict[str, str]:
    """Return the attribute with the id that a message gets if it has none of its own."""
    # as NServiceBus does, so that duplicates have one id
    return {MESSAGE_ID: message["MessageId"]}


def sent_ms(message: MessageTypeDef) -> int:
    """Return when a message was sent into the queue, in milliseconds since 1970 by the broker."""
    return int(message["Attributes"]["SentTimestamp"])


def is_readable(message: MessageTypeDef) -> bool:
    """Return whether a message says when it is due, or how long it is to wait."""
    return delay_of(message) is not None or due_us_of(message) is not None


def due_us_of(message: MessageTypeDef) -> int | None:
    """Return when a message says that it is due, in microseconds since 1970; None if not, or if that cannot be."""
    due_at = due_of(message.get("MessageAttributes", {}))
    if due_at is None:
        return None
    due_us, sent, delay = microseconds(due_at), sent_ms(message), delay_of(message)
    if delay is not None and due_us // 1000 < sent + delay * 1000 - _AT_ODDS_MS:
        # of an earlier send: a consumer delayed the message once more, and copied all its attributes
        return None
    # what no delay leads to is no due time
    return due_us if due_us // 1_000_000 - sent // 1000 <= LONGEST_DELAY else None


def delay_of(message: MessageTypeDef) -> int | None:
    """Return the delay in a message's attribute, or None if it has none that can be read."""
    try:
        text = message["MessageAttributes"][DELAY_SECONDS]["StringValue"]
    except KeyError:
        return None
    if not _NUMBER.fullmatch(text) or abs(int(text)) > LONGEST_DELAY:
        return None
    return int(text)
