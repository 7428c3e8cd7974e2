"""AMQP's encoding of a message's properties (AMQP 0-9-1, sections 4.2.5 and 4.2.6.1).

What pika itself does for each message, field by field, is half of a client's work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pika import BasicProperties
from pika.data import encode_table


class Encoded(BasicProperties):
    """Properties that are bytes already; pika asks for no more than these."""

    def __init__(self, encoded: bytes) -> None:
        # not super's: it would set fourteen fields that nobody reads
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
    """Return headers of any type as they stand in an AMQP table, without the table's length."""
    pieces: list[bytes] = []
    encode_table(pieces, given)
    return b"".join(pieces[1:])
