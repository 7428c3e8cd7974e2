"""A delay topology as one value: the digits and names of its exchanges and queues, their arguments and bindings.

Each topology has levels as :mod:`airflow_delayed.rabbitmq.levels` describes; planning, comparing, installing and
sending work on any. Below are the headers that NServiceBus.RabbitMQ reads, the AMQP properties that it makes of them
(BasicPropertiesExtensions.cs), and the limits that a message has to keep; all without a network.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Literal, NamedTuple, get_args

from airflow_delayed.delivery import BatchBounds
from airflow_delayed.errors import LimitExceeded
from airflow_delayed.message import DelayedMessage
from airflow_delayed.rabbitmq.levels import BITS, HEX, DelayDigits

#: What a destination is: a queue, or (NServiceBus's conventional routing) a fanout exchange before a queue of its name.
Routing = Literal["direct", "conventional"]
#: Which headers state the delay: those of this package alone, or NServiceBus's too.
HeaderStyle = Literal["plain", "nservicebus"]
_QUORUM = {"x-queue-type": "quorum", "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}
_CLASSIC = {"x-queue-mode": "lazy"}


class PublishAddress(NamedTuple):
    """Where a message is published: exchange, routing key, and the queue of a level that it enters directly, if any."""

    exchange: str
    key: str
    level: str | None = None

    @property
    def target(self) -> str:
        """The queue or the exchange, for people."""
        return f"exchange {self.exchange}" if self.exchange else f"queue {self.level or self.key}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The names, queue arguments, bindings and headers of one delay topology.

    :param name: by which a user chooses it.
    :param level_prefix: the names of all exchanges and queues of the levels begin with it.
    :param level_digits: how many digits the number in a level's name has at least: the number of the level, or its
        seconds where others do not declare the topology.
    :param delivery_exchange: topic exchange behind the last digit, to which destinations are bound.
    :param digits: how keys and levels write a delay.
    :param quorum: whether the levels are quorum queues with at-least-once dead-lettering. A due message whose
        destination is full, and rejects it, then stays at the head of its level, with all messages behind it, until the
        destination takes it; in classic queues it is lost.
    :param shared: whether NServiceBus or Celery declares the topology too, as it is here. An exchange reads one digit,
        and passes a message whose digit is 0 to the exchange of the next position; a destination also gets the delayed
        messages for every name that ends in a dot and its own; and a message that no binding takes stays at the head of
        its level, unless a policy leads it elsewhere. In this package's own topology an exchange reads all digits from
        its position on, because a broker takes most of its time for exchanges behind exchanges; bindings are exact, an
        alternate exchange takes unroutable messages, and a sender may enter a level's queue directly.
    """

    name: str
    level_prefix: str
    level_digits: int
    delivery_exchange: str
    digits: DelayDigits = BITS
    quorum: bool = True
    shared: bool = True
    routing: Routing = "direct"
    headers: HeaderStyle = "plain"

    def level_name(self, level: int) -> str:
        """Return the name of a level's queue."""
        number = f"{level}" if self.shared else self.digits.text(self.digits.wait(level))
        return f"{self.level_prefix}{number:0>{self.level_digits}}"

    def level_names(self, top_position: int | None = None) -> dict[str, int]:
        """Return the levels by the names of their queues, the shortest wait first.

        :param top_position: the highest position wanted; -1 for none, None for all.
        """
        top = self.top_position if top_position is None else top_position
        return {self.level_name(level): level for level in self.digits.levels if self.digits.position(level) <= top}

    @property
    def top_position(self) -> int:
        """The position of the first digit. No level dead-letters to its exchange, which has senders' messages alone."""
        return self.digits.count - 1

    def exchange_name(self, position: int) -> str:
        """Return the name of the exchange that reads the digit at a position; below all, of the delivery exchange."""
        if position < 0:
            return self.delivery_exchange
        if self.shared:
            return self.level_name(position)
        return f"{self.level_prefix}{'entry' if position == self.top_position else f'last-{position + 1}'}"

    @property
    def unroutable_queue(self) -> str:
        """The fanout exchange and queue for what is unroutable, named as the delivery exchange is.

        In a shared topology a policy leads there, and only an install with ``unroutable_policy`` makes both.
        """
        return f"{self.delivery_exchange.removesuffix('delivery')}unroutable"

    def queue_arguments(self, level: int) -> dict[str, str | int]:
        """Return the arguments of a level's queue; its time to live, in milliseconds, is what makes the delay.

        There is no dead-letter routing key: a message keeps its own.
        """
        return {
            **(_QUORUM if self.quorum else _CLASSIC),
            "x-message-ttl": self.digits.wait(level) * 1000,
            "x-dead-letter-exchange": self.exchange_name(self.digits.position(level) - 1),
        }

    def address(
        self, destination: str, delay_seconds: int, *, default_exchange: bool = True, direct: bool = True
    ) -> PublishAddress:
        """Return where to publish a message.

        A message that is due goes straight to its destination: a delivery exchange with an alternate exchange would not
        return a message whose queue does not exist. The default exchange leads into a level's queue, with the queue's
        name as a second routing key; the first key is that of the delay, as on any other way.

        :param default_exchange: whether the user may write to the default exchange.
        :param direct: whether the destination takes a direct entry (where the topology has it).
        :raises LimitExceeded: the delay or the destination is beyond its limit.
        """
        key = self.digits.routing_key(delay_seconds, destination)
        if delay_seconds <= 0 and self.routing == "conventional":
            return PublishAddress(destination, "")
        if delay_seconds <= 0 and default_exchange:
            return PublishAddress("", destination)
        level = self.digits.entry_level(delay_seconds)
        if self.shared:
            return PublishAddress(self.exchange_name(self.digits.position(level)), key)
        if default_exchange and direct:
            return PublishAddress("", key, self.level_name(level))
        return PublishAddress(self.exchange_name(self.top_position), key)

    def check_destination(self, destination: str) -> None:
        """Check that a destination can be one of this topology.

        :raises LimitExceeded: it is too long for a routing key, has an empty word, a word that is ``*`` or ``#``, is
            a part of the topology itself, or would get messages for another destination.
        """
        self.digits.check_destination(destination)
        if destination in (self.unroutable_queue, self.delivery_exchange) or destination.startswith(self.level_prefix):
            raise LimitExceeded(
                "destination", f"{destination!r} is a part of the delay levels themselves; choose another"
            )
        if other := self.copied(destination):
            raise LimitExceeded(
                "destination",
                f"{destination!r} has the form of a delay's routing key, so that it would get messages for {other!r} at"
                " once; choose another",
            )

    def copied(self, queue: str) -> str | None:
        """Return the destination whose messages a queue gets at once, for its name is their routing key; None: none."""
        key = None if self.shared else self.digits.split_key(queue)
        return key[1] if key else None

    def binding_key(self, destination: str) -> str:
        """Return the key that binds a destination to the delivery exchange, for any delay.

        :raises LimitExceeded: the destination is beyond its limit.
        """
        self.check_destination(destination)
        return self.binding_prefix + destination

    @property
    def binding_prefix(self) -> str:
        """What stands before the destination in the key of its binding."""
        return "#." if self.shared else "*." * self.digits.count

    def leaks(self, destinations: Iterable[str]) -> tuple[tuple[str, str], ...]:
        """Return each pair of destinations of which the first also gets delayed messages for the second.

        ``Sales`` gets all for ``Acme.Sales``. A name that begins like a delay's digits leaks the other way: ``0.Sales``
        gets those for ``Sales`` whose last digit is 0.
        """
        if not self.shared:
            return ()
        pairs = permutations(dict.fromkeys(destinations), 2)
        return tuple((one, other) for one, other in pairs if other.endswith("." + one) or self._is_delay_of(one, other))

    def _is_delay_of(self, one: str, other: str) -> bool:
        head = one.removesuffix("." + other)
        words = head.split(".")
        return head != one and len(words) <= self.digits.count and all(map(self.digits.is_digit, words))

    @property
    def pattern(self) -> str:
        """A pattern for the names of its parts, as RabbitMQ's permissions have them."""
        others = (self.delivery_exchange, self.unroutable_queue)
        names = [self.level_prefix, *(name for name in others if not name.startswith(self.level_prefix))]
        return f"^({'|'.join(name.replace('.', '[.]') for name in names)})"


#: This package's own, the default. ``delayed.hex.0000f00`` keeps a message for f00 seconds, which is 3840;
#: ``delayed.hex.last-2`` reads the last two digits, ``delayed.hex.entry`` all.
DELAYED = Topology(
    name="delayed",
    level_prefix="delayed.hex.",
    level_digits=7,
    delivery_exchange="delayed.hex.delivery",
    digits=HEX,
    shared=False,
)
#: NServiceBus.RabbitMQ 7 and later (DelayInfrastructure.cs).
NSERVICEBUS = Topology(
    name="nservicebus",
    level_prefix="nsb.v2.delay-level-",
    level_digits=2,
    delivery_exchange="nsb.v2.delay-delivery",
    routing="conventional",
    headers="nservicebus",
)
#: NServiceBus.RabbitMQ 4.3 to 6: classic queues, which can lose messages at a fail-over.
NSERVICEBUS_V1 = replace(
    NSERVICEBUS,
    name="nservicebus-v1",
    level_prefix="nsb.delay-level-",
    delivery_exchange="nsb.delay-delivery",
    quorum=False,
)
#: Celery's native delayed delivery (kombu's native_delayed_delivery.py), as it declares it with quorum queues.
CELERY = Topology(
    name="celery",
    level_prefix="celery_delayed_",
    level_digits=1,
    delivery_exchange="celery_delayed_delivery",
)

TOPOLOGIES: Mapping[str, Topology] = {
    topology.name: topology for topology in (DELAYED, NSERVICEBUS, NSERVICEBUS_V1, CELERY)
}


def topology_of(choice: Topology | str, routing: str | None = None) -> Topology:
    """Return the topology a user chose.

    :param choice: the value itself or its name.
    :param routing: ``conventional`` (the default) or ``direct``, as the NServiceBus endpoints have it.
    :raises ValueError: there is none of that name, or it has no such routing.
    """
    if isinstance(choice, str):
        if choice == "x-delayed-message":
            raise ValueError(
                "x-delayed-message is the exchange type of a plugin: no client can read what waits inside such an"
                " exchange; keep it until its messages_delayed is 0"
            )
        if choice not in TOPOLOGIES:
            raise ValueError(f"topology {choice!r} is unknown; use one of {', '.join(TOPOLOGIES)}")
        choice = TOPOLOGIES[choice]
    if routing in (None, "", choice.routing):
        return choice
    if choice.headers == "nservicebus":
        for each in get_args(Routing):
            if routing == each:
                return replace(choice, routing=each)
    raise ValueError(
        f"topology {choice.name!r} has no routing {routing!r}; 'conventional' and 'direct' are NServiceBus's, the"
        " others have 'direct' alone"
    )


#: Header with the delay in seconds, an int32. With the time it was sent it tells NServiceBus's tools
#: ``delays migrate`` and ``delays transfer`` when a message is due; they do not move a message that lacks either.
NSERVICEBUS_DELAY = "NServiceBus.Transport.RabbitMQ.DelayInSeconds"
NSERVICEBUS_TIME_SENT = "NServiceBus.TimeSent"
#: How long a message may wait to be received, as a .NET TimeSpan. NServiceBus makes the AMQP expiration of the
#: dispatch property of that name, never of the header, and refuses it for a delayed message; so on a message that is
#: due the header here goes along as any other.
NSERVICEBUS_TIME_TO_BE_RECEIVED = "NServiceBus.TimeToBeReceived"
#: A message with this header, whatever its value, may be lost when the broker restarts; the header itself is not sent.
NSERVICEBUS_NON_PERSISTENT = "NServiceBus.Transport.RabbitMQ.UseNonPersistentDelivery"

_PROPERTIES = {
    "content_type": "NServiceBus.ContentType",
    "correlation_id": "NServiceBus.CorrelationId",
    "reply_to": "NServiceBus.ReplyToAddress",
    "type": "NServiceBus.EnclosedMessageTypes",
}


def nservicebus_properties(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the AMQP properties that headers become, such as ``content_type``; the headers stay too.

    The type is the first of the enclosed types: all up to the first comma.
    """
    found = {name: headers[header] for name, header in _PROPERTIES.items() if header in headers}
    if "type" in found:
        found["type"] = found["type"].partition(",")[0]
    return found


#: Header of the message that becomes the AMQP content type.
CONTENT_TYPE = "content-type"
#: Headers that RabbitMQ takes for further routing keys; as text it refuses them and closes the channel.
_ROUTING = frozenset(["CC", "BCC"])
#: Headers, in lower case, by which a message would ask to be dropped while it waits.
_EXPIRING = frozenset(["expiration", NSERVICEBUS_TIME_TO_BE_RECEIVED.lower()])
_SHORT_STRING = 255
#: Of a header, beside its name and its text: the lengths of both, and the type.
_HEADER_BYTES = 1 + 4 + 1
#: What all headers may take in AMQP's encoding. They and the other properties have to fit into one frame of 131,072
#: bytes, as brokers propose; for a larger one the broker closes the connection.
MAX_HEADERS_BYTES = 126_976


def check_headers(message: DelayedMessage, style: HeaderStyle = "plain", delay_seconds: int = 0) -> None:
    """Check a message's headers against AMQP's limits.

    :raises LimitExceeded: a name, or a value that becomes an AMQP property (the content type; NServiceBus's have four),
        has over 255 UTF-8 bytes; all of them take over 126,976 bytes; a name is CC or BCC; or with a delay,
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
        found.update(nservicebus_properties(message.headers))
    for name, value in found.items():
        if len(value.encode()) > _SHORT_STRING:
            raise LimitExceeded("headers", f"the {name} they give has more than {_SHORT_STRING} bytes in UTF-8")


def _size(headers: Mapping[str, str]) -> int:
    return sum(len(name.encode()) + len(value.encode()) + _HEADER_BYTES for name, value in headers.items())


def check_message(message: DelayedMessage, delay_seconds: int, topology: Topology) -> None:
    """Check a message against all limits of this transport.

    :raises LimitExceeded: its delay, destination or headers are beyond one.
    """
    topology.digits.check_delay(delay_seconds)
    topology.check_destination(message.destination)
    check_headers(message, topology.headers, delay_seconds)


def fits(bounds: BatchBounds, delay_seconds: int, topology: Topology) -> bool:
    """Return whether messages within these bounds pass :func:`check_message`; False where that is not sure.

    :param delay_seconds: the longest one.
    """
    names = dict.fromkeys(bounds.header_names, "")
    longest_name = max((len(name.encode()) for name in names), default=0)
    most = bounds.most_headers * (longest_name + bounds.longest_value + _HEADER_BYTES)
    if bounds.longest_value > _SHORT_STRING or most > MAX_HEADERS_BYTES:
        return False
    try:
        for destination in bounds.destinations:
            message = DelayedMessage(
                destination=destination, body=b"", due_at=bounds.last_due, message_id="-", headers=names
            )
            check_message(message, delay_seconds, topology)
    except LimitExceeded:
        return False
    return True
