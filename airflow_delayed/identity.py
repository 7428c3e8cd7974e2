"""Message ids that stay the same when a job runs again and its rows come back in another order.

One hash is used by the operator, by Spark and by the store: BLAKE2b of 16 bytes over parts, each led by a letter for
its type and its length in 8 bytes, so that no two different messages run into one text. Ids are 32 hexadecimal
characters. The position of a row is never a part of it. An origin is the identity of one run of a task.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import date, datetime
from decimal import Decimal
from hashlib import blake2b
from itertools import islice, permutations, product
from math import isfinite
from numbers import Integral
from operator import attrgetter
from struct import Struct
from typing import Any
from uuid import UUID

from airflow_delayed.criteria import UNSET, passed
from airflow_delayed.errors import InvalidMessage, NaiveTime
from airflow_delayed.fields import FIELD_NAMES, FIELDS
from airflow_delayed.message import UTC, DelayedMessage, check_text, microseconds, parse_moment

#: How the tags of DelayedNotifier's messages begin.
NOTIFIER = "notifier:"

_CONTENT = b"delayed content1"
_KEY = b"delayed key 1"
_SPREAD = b"delayed spread 1"

#: Digits of a whole number in a key: as many as Python writes by default.
MAX_DIGITS = 4300
_TOO_LONG = 10**MAX_DIGITS
#: Where the first digit of a fraction may be, after the point.
_SMALLEST = 1_000_000

_HEAD = Struct(">cQ").pack
_optional = attrgetter(*FIELD_NAMES)
_MARKS = tuple(field.mark for field in FIELDS)


def _part(kind: bytes, value: bytes) -> bytes:
    return _HEAD(kind, len(value)) + value


def _text(value: str) -> bytes:
    return _part(b"s", value.encode())


def scope_of(*parts: str | int) -> bytes:
    """Return the scope of content ids, which differs from run to run: DAG, run, task and map index as bytes."""
    return b"".join(_text(str(part)) for part in parts)


def content_digest(
    destination: str,
    due_us: int,
    headers: Mapping[str, str],
    body: bytes,
    optional: Iterable[object] = (),
    scope: bytes = b"",
) -> bytes:
    """Return a digest of 16 bytes over all fields of a message; the order of its headers does not count.

    :param optional: the values of :data:`airflow_delayed.fields.FIELDS`; all None unless given.
    :raises InvalidMessage: one of these has another type.
    """
    # _text and _part written out, since a job has millions of messages
    to, due, count = destination.encode(), b"%d" % due_us, b"%d" % len(headers)
    parts = [scope, _HEAD(b"s", len(to)), to, _HEAD(b"t", len(due)), due, _HEAD(b"b", len(body)), body]
    parts += _HEAD(b"n", len(count)), count
    for name in sorted(headers):
        parts += _text(name), _text(headers[name])
    for mark, value in zip(_MARKS, optional):  # noqa: B905 - a keyword takes a third of the call's time
        if value is not None:
            parts += mark, _text(value) if type(value) is str else _key_part("optional", value)
    return blake2b(b"".join(parts), digest_size=16, person=_CONTENT).digest()


def digest_of(message: DelayedMessage) -> bytes:
    """Return a digest of 16 bytes over all fields of a message but its id."""
    return content_digest(
        message.destination,
        microseconds(message.due_at),
        message.headers,
        message.body,
        _optional(message),
    )


def key_id(columns: Sequence[str], values: Sequence[object]) -> str:
    """Return the id of a row's key: the names of its columns and their values.

    Whole numbers count alike whatever their width (a decimal or a float without a fraction as well), and times by the
    moment that they name. It has no run: the same key in the next night's run is the same message again.

    :raises InvalidMessage: a value is null or not a number, or of a type that has no fixed form.
    """
    parts: list[bytes] = []
    for column, value in zip(columns, values, strict=True):
        parts += _text(column), _key_part(column, value)
    return blake2b(b"".join(parts), digest_size=16, person=_KEY).hexdigest()


def spread_offset(message_id: str, span_us: int) -> int:
    """Return how long after its time a message is due within a span, in microseconds: evenly, by a hash of its id."""
    digest = blake2b(message_id.encode(), digest_size=8, person=_SPREAD).digest()
    return int.from_bytes(digest, "big") * span_us >> 64


def spread_id(content: bytes, span_us: int) -> str:
    """Return the id of a message that is spread within a span, made from the :func:`content_digest` before that."""
    return blake2b(b"%s%d" % (content, span_us), digest_size=16, person=_SPREAD).hexdigest()


def _key_part(column: str, value: object) -> bytes:  # noqa: C901 - one line a type
    if isinstance(value, str):
        check_text(column, value)
        return _text(value)
    if isinstance(value, bool):
        return _part(b"o", b"1" if value else b"0")
    if isinstance(value, Integral):  # numpy's too
        return _whole(column, int(value))
    if isinstance(value, bytes):
        return _part(b"b", value)
    if isinstance(value, datetime):
        if value.utcoffset() is None:
            raise NaiveTime(column, value)
        try:
            return _part(b"t", b"%d" % microseconds(value.astimezone(UTC)))
        except OverflowError:
            raise InvalidMessage(column, f"{value} lies outside the years 1 to 9999 in UTC") from None
    if isinstance(value, date):
        return _part(b"d", value.isoformat().encode())
    if isinstance(value, Decimal) and value.is_finite():
        return _decimal(column, value)
    if isinstance(value, float) and isfinite(value):
        # a column of whole numbers becomes one of floats as soon as one of them is null
        return _part(b"i", b"%d" % int(value)) if value.is_integer() else _part(b"f", float.__repr__(value).encode())
    if isinstance(value, UUID):
        return _text(str(value))
    if value is None:
        raise InvalidMessage(column, "is null, and a key with a hole in it does not identify a message")
    raise InvalidMessage(
        column, f"{type(value).__name__} cannot be part of a key; use text, whole numbers, times or dates"
    )


def _whole(column: str, value: int) -> bytes:
    if not -_TOO_LONG < value < _TOO_LONG:
        raise InvalidMessage(column, f"has more than {MAX_DIGITS:,} digits, and cannot be part of a key; use text")
    return _part(b"i", b"%d" % value)


def _decimal(column: str, value: Decimal) -> bytes:
    # by its digits alone: arithmetic would round to the caller's context
    if not value:
        return _whole(column, 0)
    if not -_SMALLEST <= value.adjusted() < MAX_DIGITS:
        raise InvalidMessage(column, f"has more than {MAX_DIGITS:,} digits, and cannot be part of a key; use text")
    text = format(value, "f")
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return _part(b"m", text.encode()) if "." in text else _whole(column, int(text))


#: The most ids that are computed of a key as a person types it; and its most columns that may be in any order.
MAX_TYPED, _ANY_ORDER = 512, 4
_PAIR = re.compile(r'([^\s=,"]+)=("[^"]*"|[^"].*?)(?=[\s,]+[^\s=,"]+=|[\s,]*$)')
_NUMBER = re.compile(r"[+-]?\d{1,60}(\.\d{1,60})?(e[+-]?\d{1,3})?", re.IGNORECASE)


def typed_key_ids(text: str) -> list[str]:
    """Return the ids that a row may have by its key, as a person types it: ``order_id=1001, line=2``.

    Who types it knows neither the types of the columns nor their order. So a value is taken for each type that may be
    written like that, in quotation marks for text alone; and up to four columns are taken in each order. At most
    ``MAX_TYPED`` ids, the most likely first; none if the text is no key.
    """
    if _PAIR.sub("", text).strip(" ,"):
        return []
    pairs = [(name, list(_readings(value))) for name, value in _PAIR.findall(text)]
    orders = permutations(pairs) if len(pairs) <= _ANY_ORDER else [pairs]
    keys = (
        ([name for name, _ in order], values) for order in orders for values in product(*(each for _, each in order))
    )
    found: dict[str, None] = {}
    for names, values in islice(keys, MAX_TYPED if pairs else 0):
        with suppress(InvalidMessage):
            found[key_id(names, values)] = None
    return list(found)


def _readings(text: str) -> Iterator[object]:
    """Yield the values that may be written like this; of several that make the same part of a key, the first."""
    if text.startswith('"'):
        yield text[1:-1]
        return
    if _NUMBER.fullmatch(text):
        number = Decimal(text)
        yield number
        if number != number.to_integral_value():
            yield float(text)
    elif text.lower() in ("true", "false"):
        yield text.lower() == "true"
    with suppress(ValueError):
        yield date.fromisoformat(text)
    with suppress(InvalidMessage):
        yield parse_moment("time", text)
    yield text


# The same for many rows at once; the parts are joined by airflow_delayed.intake.arrow.


def text_part(value: str) -> bytes:
    """Return a text as a part of the hashed bytes."""
    return _text(value)


def headers_part(headers: Mapping[str, str]) -> bytes:
    """Return headers as a part of the hashed bytes: their number, then each in the order of the names."""
    pairs = [_text(name) + _text(headers[name]) for name in sorted(headers)]
    return _part(b"n", b"%d" % len(headers)) + b"".join(pairs)


def content_digests(tails: Iterable[bytes], scope: bytes = b"") -> list[bytes]:
    """Return the :func:`content_digest` of messages whose parts after the scope are joined already."""
    return _digests(tails, blake2b(scope, digest_size=16, person=_CONTENT))


def key_digests(keys: Iterable[bytes]) -> list[bytes]:
    """Return the bytes of :func:`key_id`, of keys whose parts are joined already."""
    return _digests(keys, blake2b(digest_size=16, person=_KEY))


def _digests(texts: Iterable[bytes], begun: Any) -> list[bytes]:
    digests = []
    for text in texts:
        # a copy is made in half the time of a new one with these parameters
        one = begun.copy()
        one.update(text)
        digests.append(one.digest())
    return digests


#: Longest name that Airflow allows, in characters.
MAX_NAME = 250
_ORIGIN = b"delayed origin 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The run of a task that a message comes from; all tries of it are one.

    :param task_id: empty for a message about the DAG's run itself.
    :param map_index: -1 for a task that is not mapped.
    :param iteration: of a task loop, counted from 1; None outside of loops.
    :raises ValueError: another name is empty, or one has over 250 characters.
    """

    dag_id: str
    run_id: str
    task_id: str
    map_index: int = -1
    iteration: int | None = None

    def __post_init__(self) -> None:
        for name in ("dag_id", "run_id", "task_id"):
            value = getattr(self, name)
            if not (name == "task_id" or value) or len(value) > MAX_NAME or "\0" in value:
                raise ValueError(f"{name} must have 1 to {MAX_NAME} characters, none of them null")

    @property
    def parts(self) -> tuple[str | int, ...]:
        """The parts that identify the run. The iteration counts only inside a loop."""
        parts: tuple[str | int, ...] = (self.dag_id, self.run_id, self.task_id, self.map_index)
        return parts if self.iteration is None else (*parts, f"iteration {self.iteration}")

    @property
    def digest(self) -> bytes:
        """A digest of 16 bytes."""
        return blake2b(scope_of(*self.parts), digest_size=16, person=_ORIGIN).digest()

    def to_json(self) -> dict[str, str | int]:
        """Return the fields by name, without an iteration that it does not have."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class SentBy:
    """A filter of runs of tasks: all those of a DAG, or only those with the given names.

    :raises NullCriterion: a parameter was passed and is None; a parameter that was not passed is None afterwards.
    """

    dag_id: str
    run_id: str | None = UNSET  # type: ignore[assignment]
    task_id: str | None = UNSET  # type: ignore[assignment]
    map_index: int | None = UNSET  # type: ignore[assignment]

    def __post_init__(self) -> None:
        names = [field.name for field in fields(self)]
        criteria = passed(**{name: getattr(self, name) for name in names})
        for name in names:
            object.__setattr__(self, name, criteria.get(name))
