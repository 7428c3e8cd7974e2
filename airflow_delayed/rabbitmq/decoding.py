"""Reading a message's properties as they came (AMQP 0-9-1, sections 4.2.5 and 4.2.6.1), whatever they hold.

pika decodes all of them when a frame arrives, and loses the connection over a value that Python cannot hold, such as a
time in the year 584,554,051,223. Here a frame is only cut into its fields. A header is decoded when somebody asks for
it, and one that cannot be decoded is None. What is published again are the bytes that came.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Iterator, Mapping, Set
from typing import Any

from pika import BasicProperties, spec
from pika.adapters.asyncio_connection import AsyncioConnection
from pika.adapters.select_connection import SelectConnection
from pika.data import decode_value
from pika.frame import Header

from airflow_delayed.rabbitmq.encoding import Encoded, headers

#: Each property's bit, name and size in bytes, as they follow each other in a frame; a text and the table have their
#: length before them.
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
#: The size of a value in a table by its type. The others have their length before them.
_SIZES = {"t": 1, "b": 1, "B": 1, "U": 2, "u": 2, "s": 2, "I": 4, "i": 4, "L": 8, "l": 8}
_SIZES |= {"f": 4, "d": 8, "D": 5, "T": 8, "V": 0}
_LONG = "SxAF"
_FRAME, _HEADER = struct.Struct(">BHI"), struct.Struct(">HHQ")


def text(value: str | bytes) -> str:
    """Return a short string as text: what is not UTF-8 in it, and NUL, which databases refuse, becomes ``\\x..``."""
    decoded = value if isinstance(value, str) else value.decode(errors="backslashreplace")
    return decoded.replace("\0", "\\x00")


class Received(BasicProperties):
    """The properties of a message as they came. To make them raises nothing, and all of their texts are text."""

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
                self.headers = Headers(field[4:])
                self.problem = self.headers.problem
            else:
                setattr(self, name, text(field[1:]) if size is None else int.from_bytes(field, "big"))

    @classmethod
    def of(cls, properties: BasicProperties) -> Received:
        """Return properties as they would come."""
        return properties if isinstance(properties, cls) else cls(b"".join(properties.encode()))

    def encode(self) -> list[bytes]:
        """Return them as they came."""
        return [self._raw]

    def again(
        self, *, without: Set[str] = frozenset(), added: Mapping[str, Any], user: str | None, expires: bool = True
    ) -> Encoded:
        """Return them for a user to publish; what stays is byte for byte what it was.

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
        kept = self.headers.encode(without | added.keys()) if isinstance(self.headers, Headers) else b""
        table = kept + headers(added)
        fields["headers"] = len(table).to_bytes(4, "big") + table
        flags = sum(flag for flag, name, _ in _FIELDS if name in fields)
        return Encoded(flags.to_bytes(2, "big") + b"".join(fields[name] for _, name, _ in _FIELDS if name in fields))


class Headers(Mapping[str, Any]):
    """Headers, each decoded as pika does when it is asked for; None if it cannot be decoded."""

    def __init__(self, table: bytes) -> None:
        #: Why they cannot be read in full; None if they can.
        self.problem: str | None = None
        #: Names and values as they came; of several of one name the last one counts.
        self._entries: list[tuple[str, bytes, bytes]] = []
        self._values: dict[str, bytes] = {}
        at = 0
        try:
            while at < len(table):
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
            # nested deeper than Python's stack, a time beyond the year 9999, an infinite number and what else there is
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


class _Decoding:
    """A connection of pika's whose header frames have :class:`Received` properties."""

    _frame_buffer: bytes

    def _read_frame(self) -> Any:
        data = self._frame_buffer
        if data[:1] == bytes((spec.FRAME_HEADER,)) and len(data) >= _FRAME.size + _HEADER.size:
            _, channel, size = _FRAME.unpack_from(data)
            end = _FRAME.size + size
            if len(data) > end and data[end] == spec.FRAME_END and size >= _HEADER.size:
                _, _, body_size = _HEADER.unpack_from(data, _FRAME.size)
                return end + 1, Header(channel, body_size, Received(data[_FRAME.size + _HEADER.size : end]))
        # all else, and what is incomplete or no frame
        pika: Any = super()
        return pika._read_frame()


class DecodingSelectConnection(_Decoding, SelectConnection):
    """pika's connection for its own loop, and inside of its blocking connection."""


class DecodingAsyncioConnection(_Decoding, AsyncioConnection):
    """pika's connection for an asyncio loop."""
