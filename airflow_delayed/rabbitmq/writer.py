"""Writing a message's AMQP properties, in the style of its topology."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Protocol

from pika import BasicProperties
from pika.data import encode_table

from airflow_delayed.message import DelayedMessage
from airflow_delayed.rabbitmq import nservicebus
from airflow_delayed.rabbitmq.properties import BROKERS_OWN, BYTES, CONTENT_TYPE, DESTINATION, DUE_AT
from airflow_delayed.rabbitmq.topology import Headers


class Encoded(BasicProperties):
    """Properties that are bytes already; pika asks for no more than these.

    What pika itself does for each message, field by field, is half of the client's work.
    """

    def __init__(self, encoded: bytes) -> None:
        # not super's: it would set fourteen fields that nobody reads
        self._encoded = encoded

    def encode(self) -> list[bytes]:
        """Return the properties as AMQP has them."""
        return [self._encoded]


class PropertiesWriter(Protocol):
    """Writes the AMQP properties of a message; :class:`Writer` for messages that users make."""

    def properties(
        self, message: DelayedMessage, now: datetime, delay_seconds: int, level: str | None = None
    ) -> BasicProperties:
        """Return the properties with which a message is published."""
        ...


class Writer:
    """Writes properties: the message's id and headers without those of an earlier way through a broker, and ours.

    :param style: ``plain``, or ``nservicebus`` for what NServiceBus.RabbitMQ's endpoints and tools read.
    """

    def __init__(self, style: Headers) -> None:
        self._style = style
        #: Of each destination and level the headers that tell them.
        self._known: dict[tuple[str, str | None], bytes] = {}

    def properties(
        self, message: DelayedMessage, now: datetime, delay_seconds: int, level: str | None = None
    ) -> BasicProperties:
        """Return a message's AMQP properties.

        :param now: when it is sent, in UTC.
        :param delay_seconds: what remains from then.
        :param level: the queue of a level that it enters directly. RabbitMQ takes the header ``BCC``, an array, for
            further routing keys, removes it, and goes on to route by all of them; none matches a binding of the levels
            but the delay's own.
        """
        headers: dict[str, Any] = {}
        content_type = BYTES
        if message.headers:
            headers = {name: value for name, value in message.headers.items() if name not in _NOT_COPIED}
            content_type = message.headers.get(CONTENT_TYPE, BYTES)
        if self._style == "nservicebus":
            headers[DUE_AT] = _time(message.due_at)
            headers[DESTINATION] = message.destination
            if level:
                headers["BCC"] = [level]
            return _nservicebus(message, headers, content_type, now, delay_seconds)
        return Encoded(self._plain(message, headers, content_type, int(now.timestamp()), level))

    def _plain(
        self, message: DelayedMessage, headers: dict[str, Any], content_type: str, sent_at: int, level: str | None
    ) -> bytes:
        given = _table(headers) if headers else b""
        known = self._known.get((message.destination, level))
        if known is None:
            known = _table({DESTINATION: message.destination, **({"BCC": [level]} if level else {})})
            self._known[message.destination, level] = known
        kind, message_id = content_type.encode(), message.message_id.encode()
        return b"".join(
            (
                _FLAGS,
                bytes((len(kind),)),
                kind,
                (len(given) + len(_DUE_AT) + _TIME_LENGTH + len(known)).to_bytes(4, "big"),
                given,
                _DUE_AT,
                _time(message.due_at).encode(),
                known,
                _PERSISTENT,
                bytes((len(message_id),)),
                message_id,
                sent_at.to_bytes(8, "big"),
            )
        )


def _time(moment: datetime) -> str:
    return moment.isoformat(timespec="microseconds")


def _table(headers: dict[str, Any]) -> bytes:
    """Return headers as they stand in an AMQP table, without the table's length."""
    pieces: list[bytes] = []
    encode_table(pieces, headers)
    return b"".join(pieces[1:])


_NOT_COPIED = {*BROKERS_OWN, DUE_AT, DESTINATION}
_FLAGS = (
    BasicProperties.FLAG_CONTENT_TYPE
    | BasicProperties.FLAG_HEADERS
    | BasicProperties.FLAG_DELIVERY_MODE
    | BasicProperties.FLAG_MESSAGE_ID
    | BasicProperties.FLAG_TIMESTAMP
).to_bytes(2, "big")
_PERSISTENT = b"\x02"
#: A time in UTC with microseconds always has this many characters.
_TIME_LENGTH = len("2026-01-31T08:30:00.000000+00:00")
_DUE_AT = _table({DUE_AT: "x" * _TIME_LENGTH})[:-_TIME_LENGTH]


def _nservicebus(
    message: DelayedMessage, headers: dict[str, Any], content_type: str, now: datetime, delay_seconds: int
) -> BasicProperties:
    # The time sent of a delayed message is that of this publish, even if its headers have another: NServiceBus's tools
    # add the delay to it, and a message that is passed on would else come early.
    persistent = headers.pop(nservicebus.NON_PERSISTENT, None) is None
    headers.pop(nservicebus.DELAY, None)
    if delay_seconds > 0:
        # pika writes a whole number that fits as int32
        headers[nservicebus.DELAY] = delay_seconds
        headers[nservicebus.TIME_SENT] = nservicebus.wire_time(now)
    else:
        headers.setdefault(nservicebus.TIME_SENT, nservicebus.wire_time(now))
    given: dict[str, Any] = {"content_type": content_type, **nservicebus.amqp_properties(message.headers)}
    return BasicProperties(
        message_id=message.message_id, delivery_mode=2 if persistent else 1, headers=headers, **given
    )
