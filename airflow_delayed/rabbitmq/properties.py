"""Where a message is published, the headers that are ours, and the limits that AMQP sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from airflow_delayed.errors import LimitExceeded
from airflow_delayed.extremes import Extremes
from airflow_delayed.message import DelayedMessage
from airflow_delayed.rabbitmq import levels, nservicebus
from airflow_delayed.rabbitmq.topology import Headers, Topology

#: Header with the absolute due time, ISO 8601 in UTC with microseconds: what "never early" is measured against.
DUE_AT = "airflow-delayed-due-at"
#: Header with the destination, which a message that waits or was unroutable could else lose from view.
DESTINATION = "airflow-delayed-destination"
#: Headers of a message that was set aside, or put back: why, the queue it came from, and the routing key it had.
SET_ASIDE = SET_ASIDE_REASON, SET_ASIDE_FROM = ("airflow-delayed-set-aside-reason", "airflow-delayed-set-aside-from")
ORIGINAL_KEY = "airflow-delayed-routing-key"
#: Header of the message that becomes the AMQP content type.
CONTENT_TYPE = "content-type"
#: The content type of a message that has none.
BYTES = "application/octet-stream"

#: Headers the broker writes when it dead-letters; a copy of them in a new message would look like a cycle to it.
BROKERS_OWN = frozenset(
    ["x-death", *(f"x-{which}-death-{what}" for which in ("first", "last") for what in ("exchange", "queue", "reason"))]
)
#: Headers that RabbitMQ takes for further routing keys; as text it refuses them and closes the channel.
_ROUTING = frozenset(["CC", "BCC"])
#: Headers, in lower case, by which a message would ask to be dropped while it waits.
_EXPIRING = frozenset(["expiration", nservicebus.TIME_TO_BE_RECEIVED.lower()])
_SHORT_STRING = 255
#: Of a header, beside its name and its text: the lengths of both, and the type.
_HEADER_BYTES = 1 + 4 + 1
#: What all headers may take in AMQP's encoding. They and the other properties have to fit into one frame of 131,072
#: bytes, as brokers propose; for a larger one the broker closes the connection.
MAX_HEADERS_BYTES = 126_976


def check_headers(message: DelayedMessage, style: Headers = "plain", delay_seconds: int = 0) -> None:
    """Check a message's headers against AMQP's limits.

    :raises LimitExceeded: a name, or the value of one that becomes an AMQP property (the content type; NServiceBus's
        have four), has over 255 UTF-8 bytes; all of them take over 126,976 bytes; a name is CC or BCC; or with a delay,
        one is ``expiration`` (in any case) or ``NServiceBus.TimeToBeReceived``, which NServiceBus refuses too.
    """
    if not message.headers:
        return
    characters = 0
    for name, value in message.headers.items():
        characters += len(name) + len(value) + _HEADER_BYTES
        if len(name.encode()) > _SHORT_STRING:
            raise LimitExceeded("headers", f"a name has more than {_SHORT_STRING} bytes in UTF-8: {name[:40]!r}...")
        if name in _ROUTING:
            raise LimitExceeded("headers", f"{name!r} is read by RabbitMQ itself as further destinations; rename it")
        if delay_seconds > 0 and name.lower() in _EXPIRING:
            raise LimitExceeded(
                "headers",
                f"{name!r}: postponed delivery of messages with a time to be received is not supported, since it would"
                " pass in a delay level already; remove it, or give expires_at and let the message wait in a store"
                " (store_conn_id=...)",
            )
    # of four bytes each at most, so that few are counted exactly
    if 4 * characters > MAX_HEADERS_BYTES and (size := _size(message.headers)) > MAX_HEADERS_BYTES:
        raise LimitExceeded(
            "headers", f"they take {size:,} bytes, of at most {MAX_HEADERS_BYTES:,}; put what is large into the body"
        )
    found = {"content_type": message.headers.get(CONTENT_TYPE, "")}
    if style == "nservicebus":
        found.update(nservicebus.amqp_properties(message.headers))
    for name, value in found.items():
        if len(value.encode()) > _SHORT_STRING:
            raise LimitExceeded("headers", f"the {name} they give has more than {_SHORT_STRING} bytes in UTF-8")


def _size(headers: Mapping[str, str]) -> int:
    return sum(len(name.encode()) + len(value.encode()) + _HEADER_BYTES for name, value in headers.items())


def check(message: DelayedMessage, delay_seconds: int, topology: Topology) -> None:
    """Check a message against all limits of this transport.

    :raises LimitExceeded: its delay, destination or headers are beyond one.
    """
    levels.check_delay(delay_seconds)
    topology.check_destination(message.destination)
    check_headers(message, topology.headers, delay_seconds)


def fits(extremes: Extremes, delay_seconds: int, topology: Topology) -> bool:
    """Return whether messages within these bounds pass :func:`check`; False where that is not sure.

    :param delay_seconds: the longest one.
    """
    names = dict.fromkeys(extremes.header_names, "")
    longest_name = max((len(name.encode()) for name in names), default=0)
    most = extremes.most_headers * (longest_name + extremes.longest_value + _HEADER_BYTES)
    if extremes.longest_value > _SHORT_STRING or most > MAX_HEADERS_BYTES:
        return False
    try:
        for destination in extremes.destinations:
            message = DelayedMessage(
                destination=destination, body=b"", due_at=extremes.last_due, message_id="-", headers=names
            )
            check(message, delay_seconds, topology)
    except LimitExceeded:
        return False
    return True


class Address(NamedTuple):
    """Where a message is published: exchange, routing key, and the queue of a level that it enters directly, if any."""

    exchange: str
    key: str
    level: str | None = None


def address(
    topology: Topology, destination: str, delay_seconds: int, *, default_exchange: bool = True, direct: bool = True
) -> Address:
    """Return where to publish a message.

    What is due goes straight to its destination: a delivery exchange that has an alternate one would not return a
    message whose queue is gone. Into a level's queue leads the default exchange with the queue's name as a second
    routing key; the first one is the delay's, as on any other way.

    :param default_exchange: whether the user may write to the default exchange.
    :param direct: whether the destination takes a direct entry (where the topology has it).
    :raises LimitExceeded: the delay or the destination is beyond its limit.
    """
    key = levels.routing_key(delay_seconds, destination)
    if delay_seconds <= 0 and topology.routing == "conventional":
        return Address(destination, "")
    if delay_seconds <= 0 and default_exchange:
        return Address("", destination)
    if topology.entry == "direct" and default_exchange and direct:
        return Address("", key, topology.level_name(levels.entry_level(delay_seconds)))
    return Address(topology.entry_exchange(delay_seconds), key)
