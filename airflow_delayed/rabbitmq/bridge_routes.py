"""What a bridge publishes for each message: the exchanges and queues on its way, and how ``x-delay`` is read.

    services --> exchange --> .intake --> bridge --> delay levels --> .due --> bridge --> target --> consumers' queues

A message is taken from the quorum queue ``delayed.bridge.<exchange>.intake``, waits in the delay levels, and comes to
``delayed.bridge.<exchange>.due``. From there it is published with its key, properties and headers to the target: the
exchange to which the consumers' queues are bound. The target is another exchange than the services', or each message
would come back to the bridge. A message that cannot go on is parked in ``delayed.bridge.<exchange>.parked``.

The bridge may publish more than the users whose messages it takes. Others may write to its queues, and to the levels;
so a message that comes back to the bridge goes on only with an :class:`Envelope` that the bridge itself has signed.

The semantics of the header are those of rabbitmq_delayed_message_exchange (rabbit_delayed_message_utils.erl and
rabbit_exchange_type_delayed_message.erl, version 4.2.0), but where docs/rabbitmq/leaving-the-plugin.md says otherwise.
No network here.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from pika import BasicProperties

from airflow_delayed.errors import InvalidMessage, LimitExceeded
from airflow_delayed.message import UTC, delay_seconds, parse_moment
from airflow_delayed.rabbitmq import declare
from airflow_delayed.rabbitmq.declare import Binding, Declaration, Exchange, Queue
from airflow_delayed.rabbitmq.properties import (
    DELIVERY_COUNT,
    DESTINATION,
    DUE_AT,
    PARKED_FROM,
    PARKED_REASON,
    EncodedProperties,
    ReceivedProperties,
)
from airflow_delayed.rabbitmq.relay import Publication, TakenMessage
from airflow_delayed.rabbitmq.topology import MAX_HEADERS_BYTES, Topology

#: The header with the delay in milliseconds; the plugin delivers a delayed message with it negated.
X_DELAY = "x-delay"
#: Header of a message on its way, or parked: a table with its routing key and its properties, encoded as they came, and
#: the bridge's signature.
BRIDGED = "airflow-delayed-bridged"
#: Characters of the shortest key for signatures.
_SHORTEST_SECRET = 32
#: A type of exchange that can be bound for every routing key, and the key that does so.
TYPES = {"topic": "#", "fanout": ""}
#: Returns that a queue counts before it lets a message go: each end of a bridge returns what is unconfirmed. Without
#: it RabbitMQ 4 lets a message go after the twentieth.
_RETURNS = 1_000_000
#: Characters of a reason that a parked message has as a header.
_REASON = 1000
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")


def read_delay(headers: Mapping[str, Any] | None) -> int:
    """Return the delay of a message in milliseconds; 0 if it is to be delivered at once.

    As the plugin reads it: any integer, text that is one, or a floating-point number without its fraction. A header
    that is missing, zero or negative means at once.

    :raises InvalidMessage: it is something else; the plugin delivers such a message at once.
    """
    if headers is None or X_DELAY not in headers:
        return 0
    value = headers[X_DELAY]
    if isinstance(value, bytes):
        value = value.decode("ascii", errors="replace")
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        # its value may be a secret
        raise InvalidMessage(X_DELAY, "it is not a whole number of milliseconds")
    return max(0, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """The routing key and the properties of a message that a bridge took from its intake, as they came.

    :param properties: encoded.
    :param due_at: when its delay is over, as the header of its way has it; None: it stated no delay that can be read.
    """

    key: str | bytes
    properties: bytes
    due_at: str | None

    @classmethod
    def of(cls, taken: TakenMessage, due_at: str | None) -> Envelope:
        """Return the envelope of a message from the intake."""
        return cls(key=taken.key, properties=b"".join(taken.properties.encode()), due_at=due_at)

    @classmethod
    def received(cls, headers: Mapping[str, Any], body: bytes, secrets: Sequence[str], bridge: str) -> Envelope:
        """Return the envelope that a message carries.

        :param bridge: which bridge has to have signed it: messages of another one are foreign.
        :raises InvalidMessage: it has none, or none of these secrets has signed it with this body and due time.
        """
        table, due_at = headers.get(BRIDGED), headers.get(DUE_AT)
        key, properties, signature = (
            (table.get(name) for name in ("key", "properties", "signature")) if isinstance(table, dict) else [None] * 3
        )
        if not isinstance(key, str | bytes) or not isinstance(properties, bytes) or not isinstance(signature, bytes):
            raise InvalidMessage(BRIDGED, "it came by another way than through this bridge")
        envelope = cls(key=key, properties=properties, due_at=due_at if isinstance(due_at, str) else None)
        signatures = (envelope.signature(body, secret, bridge) for secret in secrets)
        if not any(hmac.compare_digest(signature, own) for own in signatures):
            raise InvalidMessage(
                BRIDGED,
                "this bridge has not signed it; if it did with a key that is no longer in [delayed] bridge_keys, add"
                " that key at the end of the list",
            )
        return envelope

    def signature(self, body: bytes, secret: str, bridge: str) -> bytes:
        """Return the HMAC-SHA256 over all that the bridge relies on, each part with its length before it."""
        key = self.key.encode() if isinstance(self.key, str) else self.key
        due_at = b"" if self.due_at is None else self.due_at.encode()
        made = hmac.new(secret.encode(), digestmod="sha256")
        for part in (BRIDGED.encode(), bridge.encode(), key, self.properties, due_at, body):
            made.update(len(part).to_bytes(8, "big"))
            made.update(part)
        return made.digest()

    def headers(self, body: bytes, secret: str, bridge: str) -> dict[str, Any]:
        """Return the headers that carry it, signed."""
        signature = self.signature(body, secret, bridge)
        table = {"key": self.key, "properties": self.properties, "signature": signature}
        return {BRIDGED: table, **({} if self.due_at is None else {DUE_AT: self.due_at})}


@dataclass(frozen=True, slots=True)
class BridgeRoutes:
    """The exchanges and queues of one bridge, and what it publishes for each message.

    :param exchange: to which the services publish.
    :param target: the exchange to which the consumers' queues are bound.
    :param secrets: keys for the signatures of envelopes, of 32 characters and more: the first signs, all verify.
    :param type: of ``exchange``: ``topic`` or ``fanout``; the target's own type decides which queues get a message.
    :raises ValueError: the two are one, the type has no binding for every key, the topology is conventional, or there
        is no secret, or a short one.
    :raises LimitExceeded: the exchange's name is too long, or has an empty word.
    """

    exchange: str
    target: str
    topology: Topology
    secrets: Sequence[str] = field(repr=False)
    type: str = "topic"

    def __post_init__(self) -> None:
        if not self.secrets or any(len(secret) < _SHORTEST_SECRET for secret in self.secrets):
            raise ValueError(
                f"a bridge needs a key of {_SHORTEST_SECRET} characters or more in [delayed] bridge_keys, the same for"
                " all bridges of an exchange: it signs the messages on their way, so that nobody else sends through the"
                ' bridge. Make one with: python -c "import secrets; print(secrets.token_urlsafe(32))"'
            )
        if not self.exchange or not self.target:
            raise ValueError("a bridge needs the name of an exchange and of a target; the default exchange is neither")
        if self.exchange == self.target:
            raise ValueError(
                f"exchange and target are both {self.exchange!r}: each message would come back to the bridge; use"
                " another exchange for the services or for the consumers"
            )
        if self.type not in TYPES:
            raise ValueError(
                f"type {self.type!r} has no binding for every routing key; use topic or fanout. The target may be of"
                " any type, and it is the target that routes to the consumers"
            )
        if self.topology.routing != "direct":
            raise ValueError("a bridge needs a topology with direct routing: routing='direct', or topology='delayed'")
        self.topology.check_current()
        self.topology.check_destination(self.due)

    @property
    def intake(self) -> str:
        """The queue with what the services published."""
        return f"delayed.bridge.{self.exchange}.intake"

    @property
    def due(self) -> str:
        """The queue with the messages whose delay is over."""
        return f"delayed.bridge.{self.exchange}.due"

    @property
    def parked(self) -> str:
        """The queue with the messages that could not go on."""
        return f"delayed.bridge.{self.exchange}.parked"

    def parts(self) -> Iterator[Declaration]:
        """Yield the parts that a bridge needs, in an order in which each may be made."""
        yield from declare.plan(self.topology)
        yield Queue(self.parked, {"x-queue-type": "quorum"})
        arguments: dict[str, str | int] = {
            "x-queue-type": "quorum",
            "x-delivery-limit": _RETURNS,
            # what expires while no bridge runs
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": self.parked,
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        }
        intake, due = Queue(self.intake, arguments), Queue(self.due, arguments)
        services = Exchange(self.exchange, self.type)
        yield from (due, Binding(Exchange(self.topology.delivery_exchange, "topic"), due, self._due_key))
        yield from (intake, services, Binding(services, intake, TYPES[self.type]))
        yield Exchange(self.target, "topic", destination=True)

    @property
    def _due_key(self) -> str:
        return self.topology.binding_key(self.due)

    def publication(self, taken: TakenMessage, refused: str | None, now: datetime, user: str | None) -> Publication:
        """Return what to publish for a message from the intake or from the queue of due messages.

        :param refused: why it cannot go on.
        :param user: the name of the logged-in user; ``user_id`` of another user is removed, for the broker refuses it.
        """
        try:
            if refused:
                return self._park(taken, refused, now)
            if taken.properties.problem:
                return self._park(taken, taken.properties.problem, now)
            if taken.queue == self.due:
                return self._from_due(taken, now, user)
            return self._from_intake(taken, now, user)
        except (InvalidMessage, LimitExceeded) as error:
            return self._park(taken, str(error), now)

    def _from_intake(self, taken: TakenMessage, now: datetime, user: str | None) -> Publication:
        milliseconds = read_delay(taken.properties.headers)
        self.topology.digits.check_delay(milliseconds // 1000)
        if not milliseconds:
            return Publication(self.target, taken.key, _restored(taken.properties, user))
        due_at = now + timedelta(milliseconds=milliseconds)
        return self._delayed(taken, Envelope.of(taken, _text(due_at)), due_at, now)

    def _from_due(self, taken: TakenMessage, now: datetime, user: str | None) -> Publication:
        envelope = self.envelope(taken)
        if envelope.due_at is not None and (due_at := parse_moment(DUE_AT, envelope.due_at)) > now:
            # a node whose clock is ahead has let it go
            return self._delayed(taken, envelope, due_at, now)
        original = ReceivedProperties(envelope.properties)
        if original.problem:
            # redriven; the broker would close the connection
            raise InvalidMessage("properties", original.problem)
        return Publication(self.target, envelope.key, _restored(original, user))

    def envelope(self, taken: TakenMessage) -> Envelope:
        """Return the envelope of a message that comes back to the bridge.

        :raises InvalidMessage: this bridge has not signed it.
        """
        return Envelope.received(taken.properties.headers or {}, taken.body, self.secrets, self.exchange)

    def _signed(self, envelope: Envelope, taken: TakenMessage) -> dict[str, Any]:
        return envelope.headers(taken.body, self.secrets[0], self.exchange)

    def _delayed(self, taken: TakenMessage, envelope: Envelope, due_at: datetime, now: datetime) -> Publication:
        delay = max(1, delay_seconds(due_at, now))
        address = self.topology.address(self.due, delay, default_exchange=False, direct=False)
        properties = _encoded(taken, {DESTINATION: self.due, **self._signed(envelope, taken)})
        if (size := len(properties.encode()[0])) > MAX_HEADERS_BYTES:
            raise LimitExceeded("headers", f"its properties take {size:,} bytes on their way, of {MAX_HEADERS_BYTES:,}")
        return Publication(address.exchange, address.key, properties)

    def _park(self, taken: TakenMessage, reason: str, now: datetime) -> Publication:
        short = {PARKED_REASON: reason[:_REASON], PARKED_FROM: taken.queue}
        if taken.queue == self.intake:
            # redriven, it waits for the rest of its delay
            headers = self._signed(Envelope.of(taken, _due_text(taken, now)), taken)
        else:
            try:
                headers = self._signed(self.envelope(taken), taken)
            except InvalidMessage:
                # nothing of a foreign message is believed, nor signed: it is kept to be looked at
                headers = {BRIDGED: {"key": taken.key, "properties": b"".join(taken.properties.encode())}}
        properties = _encoded(taken, {**headers, **short})
        if len(properties.encode()[0]) > MAX_HEADERS_BYTES:
            # they fill a frame, and leave no room for the reason
            properties = _encoded(taken, short)
        return Publication("", self.parked, properties, parked=reason)


def _text(due_at: datetime) -> str:
    return due_at.isoformat(timespec="microseconds")


def _due_text(taken: TakenMessage, now: datetime) -> str | None:
    """Return when a message from the intake is due, whatever it states."""
    try:
        return _text(now + timedelta(milliseconds=read_delay(taken.properties.headers)))
    except InvalidMessage:
        return None
    except OverflowError:
        return _text(datetime.max.replace(tzinfo=UTC))


def _encoded(taken: TakenMessage, headers: Mapping[str, Any]) -> EncodedProperties:
    found = taken.properties.message_id
    # an id that was made readable may be too long for the property
    message_id = found if found and len(found.encode()) <= 255 else None
    properties = BasicProperties(headers=dict(headers), delivery_mode=2, message_id=message_id)
    return EncodedProperties(b"".join(properties.encode()))


def _restored(original: ReceivedProperties, user: str | None) -> BasicProperties:
    """Return a message's properties as they came, with the delay negated if there was one, as by the plugin."""
    try:
        delay = read_delay(original.headers)
    except InvalidMessage:
        # somebody has redriven it from the queue of parked messages
        delay = 0
    if original.headers is None and original.user_id in (None, user):
        return original
    return original.again(without={DELIVERY_COUNT}, added={X_DELAY: -delay} if delay else {}, user=user)
