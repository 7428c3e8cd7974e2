"""Writing a message's AMQP properties, in the style of its topology."""

from __future__ import annotations

from collections.abc import Container
from datetime import datetime
from typing import Protocol

from pika import BasicProperties

from airflow_delayed.message import DelayedMessage
from airflow_delayed.rabbitmq import nservicebus
from airflow_delayed.rabbitmq.encoding import Encoded, header, headers, number, short
from airflow_delayed.rabbitmq.properties import BROKERS_OWN, BYTES, CONTENT_TYPE, DESTINATION, DUE_AT
from airflow_delayed.rabbitmq.topology import Headers


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
        if self._style == "nservicebus":
            return Encoded(self._nservicebus(message, now, delay_seconds, level))
        return Encoded(self._plain(message, now, level))

    def _plain(self, message: DelayedMessage, now: datetime, level: str | None) -> bytes:
        given = message.headers
        return b"".join(
            (
                _PLAIN_FLAGS,
                short(given[CONTENT_TYPE]) if given and CONTENT_TYPE in given else _BYTES,
                self._table(message, level),
                _PERSISTENT,
                short(message.message_id),
                int(now.timestamp()).to_bytes(8, "big"),
            )
        )

    def _nservicebus(self, message: DelayedMessage, now: datetime, delay_seconds: int, level: str | None) -> bytes:
        # The time sent of a delayed message is that of this publish, even if its headers have another: NServiceBus's
        # tools add the delay to it, and a message that is passed on would else come early.
        given = message.headers
        if delay_seconds > 0:
            time_sent = header(nservicebus.TIME_SENT, nservicebus.wire_time(now))
            table = self._table(message, level, _REPLACED, number(nservicebus.DELAY, delay_seconds) + time_sent)
        elif nservicebus.TIME_SENT in given:
            table = self._table(message, level, _REMOVED)
        else:
            time_sent = header(nservicebus.TIME_SENT, nservicebus.wire_time(now))
            table = self._table(message, level, _REMOVED, time_sent)
        found = nservicebus.amqp_properties(given)
        flags = _NSERVICEBUS_FLAGS
        for name in found:
            flags |= _FLAG_OF[name]
        return b"".join(
            (
                flags.to_bytes(2, "big"),
                short(found.get("content_type", given.get(CONTENT_TYPE, BYTES))),
                table,
                _TRANSIENT if nservicebus.NON_PERSISTENT in given else _PERSISTENT,
                *(short(found[name]) for name in ("correlation_id", "reply_to") if name in found),
                short(message.message_id),
                short(found["type"]) if "type" in found else b"",
            )
        )

    def _table(
        self, message: DelayedMessage, level: str | None, left_out: Container[str] = (), more: bytes = b""
    ) -> bytes:
        """Return all headers: the message's own but those left out, ours, and more that are encoded."""
        known = self._known.get((message.destination, level))
        if known is None:
            known = headers({DESTINATION: message.destination, **({"BCC": [level]} if level else {})})
            self._known[message.destination, level] = known
        given = message.headers
        own = (
            b"".join(
                header(name, value) for name, value in given.items() if name not in _NOT_COPIED and name not in left_out
            )
            if given
            else b""
        )
        table = b"".join((own, _DUE_AT, message.due_at.isoformat(timespec="microseconds").encode(), known, more))
        return len(table).to_bytes(4, "big") + table


_NOT_COPIED = {*BROKERS_OWN, DUE_AT, DESTINATION}
#: What NServiceBus does not send on, or not as it was.
_REMOVED = {nservicebus.NON_PERSISTENT, nservicebus.DELAY}
_REPLACED = {*_REMOVED, nservicebus.TIME_SENT}

_NSERVICEBUS_FLAGS = (
    BasicProperties.FLAG_CONTENT_TYPE
    | BasicProperties.FLAG_HEADERS
    | BasicProperties.FLAG_DELIVERY_MODE
    | BasicProperties.FLAG_MESSAGE_ID
)
_PLAIN_FLAGS = (_NSERVICEBUS_FLAGS | BasicProperties.FLAG_TIMESTAMP).to_bytes(2, "big")
_FLAG_OF = {
    "content_type": BasicProperties.FLAG_CONTENT_TYPE,
    "correlation_id": BasicProperties.FLAG_CORRELATION_ID,
    "reply_to": BasicProperties.FLAG_REPLY_TO,
    "type": BasicProperties.FLAG_TYPE,
}
_PERSISTENT, _TRANSIENT = b"\x02", b"\x01"
_BYTES = short(BYTES)
#: A time in UTC with microseconds always has this many characters.
_TIME_LENGTH = len("2026-01-31T08:30:00.000000+00:00")
_DUE_AT = header(DUE_AT, "x" * _TIME_LENGTH)[:-_TIME_LENGTH]
