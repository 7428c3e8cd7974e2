"""The AMQP properties of a message: how they are written, and how they are read as they came.

The encoding is that of AMQP 0-9-1, sections 4.2.5 and 4.2.6.1. To encode properties field by field for each message, as
pika does, is half of a client's work; so they are written as bytes here.

pika decodes all properties when a frame arrives, and loses the connection over a value that Python cannot hold, such as
a time in the year 584,554,051,223. So received properties are only cut into their fields. A header is decoded when
somebody reads it, and is None if that fails. A message that is published again keeps the bytes that came. The
connections in :mod:`airflow_delayed.rabbitmq.wire` hand such properties out.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Set
from datetime import datetime
from typing import Any, Protocol

from pika import BasicProperties
from pika.data import decode_value, encode_table

from airflow_delayed.celery import TASK_ID, is_task
from airflow_delayed.message import DelayedMessage, traced_headers
from airflow_delayed.nservicebus import DELIVER_AT, nservicebus_time
from airflow_delayed.rabbitmq.topology import (
    CONTENT_TYPE,
    NSERVICEBUS_DELAY,
    NSERVICEBUS_NON_PERSISTENT,
    NSERVICEBUS_TIME_SENT,
    HeaderStyle,
    nservicebus_properties,
)

#: Header with the absolute due time, ISO 8601 in UTC with microseconds: no message arrives before it.
DUE_AT = "airflow-delayed-due-at"
#: Header with the destination, by which a message that waits or was unroutable still shows where it is to go.
DESTINATION = "airflow-delayed-destination"
#: The content type of a message that has none.
BYTES = "application/octet-stream"
#: Headers the broker writes when it dead-letters; a copy of them in a new message would look like a cycle to it.
BROKERS_OWN = frozenset(
    ["x-death", *(f"x-{which}-death-{what}" for which in ("first", "last") for what in ("exchange", "queue", "reason"))]
)


class EncodedProperties(BasicProperties):
    """Properties that are bytes already; to publish them, pika needs no more than these."""

    def __init__(self, encoded: bytes) -> None:
        # super's would set fourteen fields that nobody reads
        self._encoded = encoded

    def encode(self) -> list[bytes]:
        """Return the properties as AMQP has them."""
        return [self._encoded]


def short(text: str) -> bytes:
    """Return a short string: a property or the name of a header, of at most 255 bytes in UTF-8."""
    data = text.encode()
    return bytes((len(data),)) + data


def header(name: str, value: str) -> bytes:
    """Return a header that is text."""
    data = value.encode()
    return b"%bS%b%b" % (short(name), len(data).to_bytes(4, "big"), data)


def number(name: str, value: int) -> bytes:
    """Return a header that is an int32."""
    return b"%bI%b" % (short(name), value.to_bytes(4, "big", signed=True))


def headers(given: Mapping[str, Any]) -> bytes:
    """Return headers of any type as an AMQP table has them, without the table's length."""
    pieces: list[bytes] = []
    encode_table(pieces, given)
    return b"".join(pieces[1:])


class PropertiesWriter(Protocol):
    """Writes the AMQP properties of a message; :class:`MessagePropertiesWriter` does so for users' messages."""

    def properties(
        self, message: DelayedMessage, now: datetime, delay_seconds: int, level: str | None = None
    ) -> BasicProperties:
        """Return the properties with which a message is published."""
        ...


class MessagePropertiesWriter:
    """Writes a message's id, its headers without those of an earlier way through a broker, and those of this package.

    :param style: ``plain``, or ``nservicebus`` for the headers that NServiceBus.RabbitMQ's endpoints and tools read.
    """

    def __init__(self, style: HeaderStyle) -> None:
        self._style = style
        #: The headers that name each destination and level, encoded.
        self._addresses: dict[tuple[str, str | None], bytes] = {}

    def properties(
        self, message: DelayedMessage, now: datetime, delay_seconds: int, level: str | None = None
    ) -> BasicProperties:
        """Return a message's AMQP properties.

        :param now: when it is sent, in UTC.
        :param delay_seconds: the delay from then on.
        :param level: the queue of a level that it enters directly. RabbitMQ takes the header ``BCC``, an array, for
            further routing keys, removes it, and goes on to route by all of them; none matches a binding of the levels
            but the delay's own.
        """
        if self._style == "nservicebus":
            return EncodedProperties(self._nservicebus(message, now, delay_seconds, level))
        return EncodedProperties(self._plain(message, now, level))

    def _plain(self, message: DelayedMessage, now: datetime, level: str | None) -> bytes:
        given = message.headers
        task_id = header(TASK_ID, message.message_id) if given and is_task(given) and TASK_ID not in given else b""
        return b"".join(
            (
                _PLAIN_FLAGS,
                short(given[CONTENT_TYPE]) if given and CONTENT_TYPE in given else _BYTES,
                self._table(message, level, more=task_id),
                _PERSISTENT,
                short(message.message_id),
                int(now.timestamp()).to_bytes(8, "big"),
            )
        )

    def _nservicebus(self, message: DelayedMessage, now: datetime, delay_seconds: int, level: str | None) -> bytes:
        # The time sent of a delayed message is that of this publish, even if its headers have another: NServiceBus's
        # tools add the delay to it, and a message that is passed on would come early otherwise.
        given = message.headers
        due = _DELIVER_AT + nservicebus_time(message.due_at).encode()
        if delay_seconds > 0:
            due += number(NSERVICEBUS_DELAY, delay_seconds)
        if delay_seconds > 0 or NSERVICEBUS_TIME_SENT not in given:
            time_sent = _TIME_SENT + nservicebus_time(now).encode()
            table = self._table(message, level, _REPLACED, due + time_sent)
        else:
            table = self._table(message, level, _REMOVED, due)
        found = nservicebus_properties(given)
        flags = _NSERVICEBUS_FLAGS
        for name in found:
            flags |= _FLAG_OF[name]
        return b"".join(
            (
                flags.to_bytes(2, "big"),
                short(found.get("content_type", given.get(CONTENT_TYPE, BYTES))),
                table,
                _TRANSIENT if NSERVICEBUS_NON_PERSISTENT in given else _PERSISTENT,
                *(short(found[name]) for name in ("correlation_id", "reply_to") if name in found),
                short(message.message_id),
                short(found["type"]) if "type" in found else b"",
            )
        )

    def _table(
        self, message: DelayedMessage, level: str | None, left_out: Container[str] = (), more: bytes = b""
    ) -> bytes:
        """Return all headers: the message's own without those left out, this package's, and more that are encoded."""
        address = self._addresses.get((message.destination, level))
        if address is None:
            address = headers({DESTINATION: message.destination, **({"BCC": [level]} if level else {})})
            self._addresses[message.destination, level] = address
        given = traced_headers(message, nservicebus=self._style == "nservicebus")
        own = (
            b"".join(
                header(name, value) for name, value in given.items() if name not in _NOT_COPIED and name not in left_out
            )
            if given
            else b""
        )
        table = b"".join((own, _DUE_AT, message.due_at.isoformat(timespec="microseconds").encode(), address, more))
        return len(table).to_bytes(4, "big") + table


_NOT_COPIED = {*BROKERS_OWN, DUE_AT, DESTINATION}
#: Headers that NServiceBus does not send on, or not as they were.
_REMOVED = {NSERVICEBUS_NON_PERSISTENT, NSERVICEBUS_DELAY, DELIVER_AT}
_REPLACED = {*_REMOVED, NSERVICEBUS_TIME_SENT}
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
_NSERVICEBUS_LENGTH = len("2026-01-31 08:30:00:000000 Z")
_DELIVER_AT, _TIME_SENT = (
    header(name, "x" * _NSERVICEBUS_LENGTH)[:-_NSERVICEBUS_LENGTH] for name in (DELIVER_AT, NSERVICEBUS_TIME_SENT)
)
#: Each property's bit, name and size in bytes, in the order of a frame; None: its length stands before it.
_FIELDS = (
    (BasicProperties.FLAG_CONTENT_TYPE, "content_type", None),
    (BasicProperties.FLAG_CONTENT_ENCODING, "content_encoding", None),
    (BasicProperties.FLAG_HEADERS, "headers", None),
    (BasicProperties.FLAG_DELIVERY_MODE, "delivery_mode", 1),
    (BasicProperties.FLAG_PRIORITY, "priority", 1),
    (BasicProperties.FLAG_CORRELATION_ID, "correlation_id", None),
    (BasicProperties.FLAG_REPLY_TO, "reply_to", None),
    (BasicProperties.FLAG_EXPIRATION, "expiration", None),
    (BasicProperties.FLAG_MESSAGE_ID, "message_id", None),
    (BasicProperties.FLAG_TIMESTAMP, "timestamp", 8),
    (BasicProperties.FLAG_TYPE, "type", None),
    (BasicProperties.FLAG_USER_ID, "user_id", None),
    (BasicProperties.FLAG_APP_ID, "app_id", None),
    (BasicProperties.FLAG_CLUSTER_ID, "cluster_id", None),
)
_KNOWN = sum(flag for flag, _, _ in _FIELDS)
#: The size of a value in a table by its type. A value of another type has its length before it.
_SIZES = {"t": 1, "b": 1, "B": 1, "U": 2, "u": 2, "s": 2, "I": 4, "i": 4, "L": 8, "l": 8}
_SIZES |= {"f": 4, "d": 8, "D": 5, "T": 8, "V": 0}
_LONG = "SxAF"


def text(value: str | bytes) -> str:
    """Return a short string as text: what is not UTF-8 in it, and NUL, which databases refuse, becomes ``\\x..``."""
    decoded = value if isinstance(value, str) else value.decode(errors="backslashreplace")
    return decoded.replace("\0", "\\x00")


class ReceivedProperties(BasicProperties):
    """The properties of a message as they came. The constructor raises nothing, and each text in them is text."""

    def __init__(self, raw: bytes) -> None:
        super().__init__()
        #: Why they cannot be read in full; None if they can.
        self.problem: str | None = None
        self._raw = raw
        self._fields: dict[str, bytes] = {}
        try:
            self._fields.update(_fields(raw))
        except ValueError as error:
            self.problem = f"its properties cannot be read: {error}"
        for _, name, size in _FIELDS:
            field = self._fields.get(name)
            if field is None:
                continue
            if name == "headers":
                self.headers = ReceivedHeaders(field[4:])
                self.problem = self.headers.problem
            else:
                setattr(self, name, text(field[1:]) if size is None else int.from_bytes(field, "big"))

    @classmethod
    def of(cls, properties: BasicProperties) -> ReceivedProperties:
        """Return properties as they would come."""
        return properties if isinstance(properties, cls) else cls(b"".join(properties.encode()))

    def encode(self) -> list[bytes]:
        """Return them as they came."""
        return [self._raw]

    def again(
        self, *, without: Set[str] = frozenset(), added: Mapping[str, Any], user: str | None, expires: bool = True
    ) -> EncodedProperties:
        """Return them for a user to publish; each field that stays has the bytes that came.

        ``user_id`` stays if it is that user's, since the broker refuses another.

        :param without: names of headers to leave out.
        :param added: headers to add, in place of those of the same name.
        :param expires: keep ``expiration``.
        """
        fields = dict(self._fields)
        if self.user_id != user:
            fields.pop("user_id", None)
        if not expires:
            fields.pop("expiration", None)
        kept = self.headers.encode(without | added.keys()) if isinstance(self.headers, ReceivedHeaders) else b""
        table = kept + headers(added)
        fields["headers"] = len(table).to_bytes(4, "big") + table
        flags = sum(flag for flag, name, _ in _FIELDS if name in fields)
        return EncodedProperties(
            flags.to_bytes(2, "big") + b"".join(fields[name] for _, name, _ in _FIELDS if name in fields)
        )


#: Headers of a received message that are read; a frame has room for 65,000, which cost fifty times one as long.
MAX_HEADERS = 2000


class ReceivedHeaders(Mapping[str, Any]):
    """Headers, each decoded when it is read, as pika does it; None if it cannot be decoded."""

    def __init__(self, table: bytes) -> None:
        #: Why they cannot be read in full; None if they can.
        self.problem: str | None = None
        #: Names and values as they came; of several with one name the last counts.
        self._entries: list[tuple[str, bytes, bytes]] = []
        self._values: dict[str, bytes] = {}
        at = 0
        try:
            while at < len(table):
                if len(self._entries) == MAX_HEADERS:
                    raise ValueError(f"there are more than {MAX_HEADERS:,}")
                after, end = _short_end(table, at), 0
                end = _value_end(table, after)
                name = text(table[at + 1 : after])
                self._entries.append((name, table[at:after], table[after:end]))
                self._values[name] = table[after:end]
                at = end
        except ValueError as error:
            self.problem = f"its headers cannot be read: {error}"
            self._unread = table[at:]
        else:
            self._unread = b""

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        try:
            return decode_value(value, 0)[0]
        except Exception:
            # nested deeper than Python's stack, a time beyond the year 9999, an infinite number, and so on
            return None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def encode(self, without: Container[str]) -> bytes:
        """Return the inside of the table without headers of these names."""
        kept = (name + value for text, name, value in self._entries if text not in without)
        return b"".join((*kept, self._unread))


def _fields(raw: bytes) -> Iterator[tuple[str, bytes]]:
    flags = int.from_bytes(raw[:2], "big")
    if flags & ~_KNOWN:
        raise ValueError(f"unknown flags {flags & ~_KNOWN:#x}")
    at = 2
    for flag, name, size in _FIELDS:
        if flags & flag:
            end = at + size if size else _long_end(raw, at) if name == "headers" else _short_end(raw, at)
            _check_end(raw, end)
            yield name, raw[at:end]
            at = end


def _value_end(table: bytes, at: int) -> int:
    kind = chr(table[at]) if at < len(table) else ""
    if kind and kind in _LONG:
        return _long_end(table, at + 1)
    if kind not in _SIZES:
        raise ValueError(f"one is of the unknown type {kind!r}")
    return _check_end(table, at + 1 + _SIZES[kind])


def _short_end(data: bytes, at: int) -> int:
    return _check_end(data, _check_end(data, at + 1) + data[at])


def _long_end(data: bytes, at: int) -> int:
    return _check_end(data, _check_end(data, at + 4) + int.from_bytes(data[at : at + 4], "big"))


def _check_end(data: bytes, end: int) -> int:
    if end > len(data):
        raise ValueError("one is cut off")
    return end
