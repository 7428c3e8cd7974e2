"""AMQP properties that a broker accepts and a client may stumble over, byte by byte: crafted ones and random ones."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from random import Random

from pika import BasicProperties

#: The order in which properties stand in a frame, with the bit that says that one is there.
_FIELDS = (
    ("content_type", BasicProperties.FLAG_CONTENT_TYPE),
    ("content_encoding", BasicProperties.FLAG_CONTENT_ENCODING),
    ("headers", BasicProperties.FLAG_HEADERS),
    ("delivery_mode", BasicProperties.FLAG_DELIVERY_MODE),
    ("priority", BasicProperties.FLAG_PRIORITY),
    ("correlation_id", BasicProperties.FLAG_CORRELATION_ID),
    ("reply_to", BasicProperties.FLAG_REPLY_TO),
    ("expiration", BasicProperties.FLAG_EXPIRATION),
    ("message_id", BasicProperties.FLAG_MESSAGE_ID),
    ("timestamp", BasicProperties.FLAG_TIMESTAMP),
    ("type", BasicProperties.FLAG_TYPE),
    ("user_id", BasicProperties.FLAG_USER_ID),
    ("app_id", BasicProperties.FLAG_APP_ID),
    ("cluster_id", BasicProperties.FLAG_CLUSTER_ID),
)


class Raw(BasicProperties):
    """Properties that are written as these bytes, and the inside of the table in them."""

    def __init__(self, raw: bytes, headers: bytes | None = None) -> None:
        super().__init__()
        self.raw = raw
        self.table = headers

    def encode(self) -> list[bytes]:
        return [self.raw]


def short(text: bytes) -> bytes:
    return bytes([len(text)]) + text


def long(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


def raw(headers: bytes | None = None, **fields: bytes) -> Raw:
    """Return properties of encoded fields, and of the inside of a table."""
    if headers is not None:
        fields["headers"] = long(headers)
    flags = sum(bit for name, bit in _FIELDS if name in fields)
    return Raw(flags.to_bytes(2, "big") + b"".join(fields[name] for name, _ in _FIELDS if name in fields), headers)


def table(headers: Mapping[str, bytes]) -> bytes:
    """Return the inside of a table of values that are encoded, each with its type before it."""
    return b"".join(short(name.encode()) + value for name, value in headers.items())


def nested(depth: int, kind: bytes = b"F") -> bytes:
    """Return a table in a table in a table, or an array in an array in an array."""
    value = b"V"
    for _ in range(depth):
        value = kind + long((b"\x01a" if kind == b"F" else b"") + value)
    return value


def whole_frame() -> Raw:
    """Return properties that leave no room in their frame."""
    room = 131_072 - 8 - 12 - 2 - 4 - len(table({"large": b"x" + long(b"")}))
    return raw(table({"large": b"x" + long(b"\xff" * room)}))


_LATE = b"T" + b"\xff" * 8
#: Each of these ended a connection of pika's, or a program that trusted it.
CRAFTED: dict[str, Raw] = {
    "a time beyond all calendars": raw(table({"when": _LATE})),
    "a time in milliseconds": raw(table({"when": b"T" + struct.pack(">Q", 1_764_288_318_000_000)})),
    "tables in tables": raw(table({"deep": nested(3000)})),
    "arrays in arrays": raw(table({"deep": nested(3000, b"A")})),
    "a float": raw(table({"f": b"f" + struct.pack(">f", 1.5)})),
    "a negative zero": raw(table({"d": b"d" + struct.pack(">d", -0.0)})),
    "a double beyond 64 bits": raw(table({"much": b"d" + struct.pack(">d", 1e19)})),
    "a tiny decimal": raw(table({"small": b"D\xff" + struct.pack(">i", -1)})),
    "a name that is not UTF-8": raw(short(b"\xff\xfe") + b"V"),
    "the same name twice": raw(short(b"a") + b"t\x01" + short(b"a") + _LATE),
    "no name": raw(short(b"") + _LATE),
    "text that is not UTF-8": raw(table({"text": b"S" + long(b"\xff\x00\n")})),
    "ids that are not UTF-8": raw(
        message_id=short(b"\xff\xfe\n\x00"), correlation_id=short(b"\x80"), type=short(b"\xc3"), app_id=short(b"\xff")
    ),
    "an id of two lines": raw(message_id=short(b"a\n[2026-01-01] ERROR - forged")),
    "a sent time beyond all calendars": raw(timestamp=b"\xff" * 8),
    "deaths beyond all calendars": raw(
        table({"x-death": b"A" + long(b"F" + long(table({"queue": b"S" + long(b"q"), "time": _LATE})))})
    ),
    "deaths of tables for names": raw(
        table({"x-death": b"A" + long(b"F" + long(table({"queue": b"F" + long(b""), "count": b"S" + long(b"1")})))})
    ),
    "deaths that are none": raw(table({"x-death": b"S" + long(b"often")})),
    "our own headers of other types": raw(
        table(
            {
                "airflow-delayed-due-at": _LATE,
                "airflow-delayed-destination": b"A" + long(b""),
                "airflow-delayed-routing-key": b"x" + long(b"\xff"),
                "NServiceBus.Transport.RabbitMQ.DelayInSeconds": b"F" + long(b""),
                "task": b"V",
                "eta": nested(3000),
            }
        )
    ),
    "our own headers out of range": raw(
        table(
            {
                "airflow-delayed-due-at": b"S" + long(b"0001-01-01T00:00:00+23:59"),
                "airflow-delayed-destination": b"S" + long(b"x" * 60_000),
            }
        )
    ),
}
#: Brokers that look into a table refuse these: no number of Erlang's is infinite.
INFINITE: dict[str, Raw] = {
    "an infinite double": raw(table({"far": b"d" + struct.pack(">d", float("inf"))})),
    "a double that is no number": raw(table({"none": b"d" + struct.pack(">d", float("nan"))})),
    "an infinite float": raw(table({"far": b"f" + struct.pack(">f", float("-inf"))})),
}

_FIXED = {b"t": 1, b"b": 1, b"B": 1, b"u": 2, b"s": 2, b"I": 4, b"i": 4, b"l": 8, b"T": 8, b"D": 5, b"V": 0}


def random(chance: Random) -> Raw:
    """Return properties at random that are well formed: a broker closes the connection of who sends others."""
    fields = {
        name: short(chance.randbytes(chance.choice([0, 1, 8, 255])))
        for name in ("content_type", "content_encoding", "correlation_id", "reply_to", "message_id", "type", "app_id")
        if chance.random() < 0.3
    }
    if chance.random() < 0.5:
        fields["timestamp"] = chance.choice([chance.randbytes(8), b"\xff" * 8])
    if chance.random() < 0.5:
        fields["delivery_mode"] = chance.choice([b"\x01", b"\x02"])
    if chance.random() < 0.2:
        fields["priority"] = chance.randbytes(1)
    return raw(_random_table(chance, depth=0) if chance.random() < 0.9 else None, **fields)


_NAMES = (
    b"airflow-delayed-due-at",
    b"airflow-delayed-destination",
    b"airflow-delayed-routing-key",
    b"NServiceBus.Transport.RabbitMQ.DelayInSeconds",
    b"NServiceBus.TimeSent",
    b"x-death",
    b"task",
    b"eta",
    b"queue",
    b"reason",
    b"time",
    b"count",
)
_TEXTS = (b"9999-12-31T23:59:59.999999-23:59", b"2030-01-01T00:00:00Z", b"", b"\x00", b"\n", b"\xff", b"expired")


def _random_table(chance: Random, depth: int) -> bytes:
    return b"".join(
        short(chance.choice([*_NAMES, chance.randbytes(chance.randrange(20))])) + _random_value(chance, depth + 1)
        for _ in range(chance.randrange(6))
    )


def _random_value(chance: Random, depth: int) -> bytes:
    kind = chance.choice([*_FIXED, b"d", b"f", b"S", b"x", *((b"F", b"A") if depth < 6 else ())])
    if kind in (b"d", b"f"):
        return kind + struct.pack(b">" + kind, chance.choice([0.0, 1.5, 1e19, 1e-30, chance.uniform(-1e38, 1e38)]))
    if kind in (b"S", b"x"):
        return kind + long(chance.choice([*_TEXTS, chance.randbytes(chance.randrange(30))]))
    if kind == b"F":
        # now and then deeper than a program's stack
        return nested(chance.randrange(1200)) if chance.random() < 0.02 else kind + long(_random_table(chance, depth))
    if kind == b"A":
        return kind + long(b"".join(_random_value(chance, depth + 1) for _ in range(chance.randrange(4))))
    size = _FIXED[kind]
    return kind + (b"\x01"[:size] if kind == b"t" else chance.choice([chance.randbytes(size), b"\xff" * size]))
