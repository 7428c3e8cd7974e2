"""RowReader: row by row, any batch becomes messages and problems. Pure: no file, no network, no clock."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import repeat
from math import inf
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

from airflow_delayed.clock import Shift, resolve, zone
from airflow_delayed.errors import InputError, InvalidMessage, NaiveTime, short
from airflow_delayed.fields import FIELD_MOMENTS, FIELD_NAMES
from airflow_delayed.identity import content_digest, key_id, spread_id, spread_offset
from airflow_delayed.intake.columns import (
    MAX_HEADERS,
    NULL_ID,
    RowBatch,
    RowRules,
    TooManyHeaders,
    label,
    names_of,
)
from airflow_delayed.message import (
    MICROSECOND,
    DelayedMessage,
    check_text,
    delay_of,
    due_after,
    microseconds,
    parse_time,
    utc,
)

if TYPE_CHECKING:
    from airflow_delayed.intake.columnar import ColumnarReader, ColumnarRows


#: How deep lists and dictionaries may be nested. Python's recursion limit depends on how deep the caller already is, so
#: without a limit of ours the same row could pass the preflight and fail in the send.
MAX_DEPTH = 200
TOO_DEEP = f"has lists or dictionaries nested more than {MAX_DEPTH} deep; send it as text, or make it flatter"


@dataclass(frozen=True, slots=True)
class Problem:
    """A row that cannot be sent, and why."""

    place: str
    column: str
    problem: str
    row: Mapping[str, object] = field(repr=False)

    def __str__(self) -> str:
        return f"{self.place}, column {self.column}: {self.problem}"


@dataclass(slots=True)
class Shifts:
    """How many local times daylight saving moved (gap) or made ambiguous (fold)."""

    gaps: int = 0
    folds: int = 0


class RowReader:
    """Turns batches into messages; a row that breaks a rule becomes a Problem, and the next row goes on.

    A batch of Arrow's that has nothing wrong and nothing unusual is read by its columns, several times as fast.
    """

    def __init__(self, rules: RowRules) -> None:
        self.rules = rules
        self.shifts = Shifts()
        self._checks: ColumnarReader | None = None
        self._for_all = {name: rules.optional.get(name) for name in FIELD_NAMES}
        self._names = names_of(rules.columns)

    def read(self, batch: RowBatch) -> Iterator[DelayedMessage | Problem]:
        """Yield, for each row in its order, a message or a problem."""
        checked = self.check(batch)
        if checked is None:
            yield from self.by_row(batch)
        else:
            yield from checked.messages()

    def check(self, batch: RowBatch) -> ColumnarRows | None:
        """Return a batch's rows checked by their columns; None if they have to be read one by one."""
        if batch.records is None:
            return None
        if self._checks is None:
            from airflow_delayed.intake.columnar import ColumnarReader

            self._checks = ColumnarReader(self.rules)
        return self._checks.check(batch)

    def by_row(self, batch: RowBatch) -> Iterator[DelayedMessage | Problem]:
        """Yield the same as :meth:`read`, without its fast path by columns."""
        columns, names = batch.columns, self._names

        def column(name: str) -> Iterator[Any]:
            return batch.values(names[name]) if name in names else repeat(None, batch.size)

        keys: Any = repeat(None, batch.size)
        if self.rules.id_columns:
            keys = zip(*map(batch.values, self.rules.id_columns), strict=True)
        ids_given = batch.is_table and names.get("message_id") in columns
        rows = zip(
            column("value"),
            column("body"),
            column("destination"),
            column("due_at"),
            column("delay_seconds"),
            column("spread_seconds"),
            column("headers"),
            column("message_id"),
            zip(*map(column, FIELD_NAMES), strict=True),
            column("timezone"),
            keys,
            strict=True,
        )
        broken = batch.broken
        for index, row in enumerate(rows):
            value, body, destination, due, delay, spread, headers, message_id, optional, where, key = row
            if broken and index in broken:
                yield Problem(batch.place(index), *broken[index], batch.row(index))
                continue
            try:
                if message_id is None and ids_given:
                    raise InvalidMessage("message_id", NULL_ID)
                content = body if value is None else value
                yield self._message(content, destination, due, delay, spread, headers, message_id, optional, where, key)
            except InvalidMessage as error:
                name = error.column
                if name == "body" and "value" in names and (value is not None or names.get("body") not in columns):
                    name = "value"
                yield Problem(batch.place(index), label(name, names.get(name, name)), error.problem, batch.row(index))

    def _message(
        self,
        value: object,
        destination: Any,
        due: object,
        delay: object,
        spread: object,
        headers: object,
        message_id: Any,
        optional: tuple[object, ...],
        where: object,
        key: tuple[object, ...] | None,
    ) -> DelayedMessage:
        rules = self.rules
        if value is None:
            raise InvalidMessage("body", "is null; an empty message is an empty text")
        body = body_of(value)
        destination = rules.destination if destination is None else destination
        if destination is None or destination == "":
            raise InvalidMessage("destination", "is null or empty; fill it, or give destination=")
        due_at = self._due(due, delay, where)
        span = rules.spread if spread is None else _span(spread)
        all_headers = {**rules.headers, **headers_of(headers)} if headers is not None else rules.headers
        fields = self._optional(optional, where)
        if key is not None:
            message_id = key_id(rules.id_columns, self._key(key, where))
        elif message_id is None:
            message_id = rules.message_id
        if message_id is None:
            try:
                digest = content_digest(
                    destination,
                    microseconds(due_at),
                    all_headers,
                    body,
                    fields.values(),
                    rules.scope,
                )
                message_id = spread_id(digest, span // MICROSECOND) if span else digest.hex()
            except (AttributeError, TypeError, UnicodeEncodeError, InvalidMessage):
                # no id can be made of a field of a wrong type; DelayedMessage refuses the row and names the field
                message_id = "-"
        message = DelayedMessage(
            destination=destination,
            body=body,
            due_at=due_at,
            message_id=message_id,
            headers=all_headers,
            **fields,
        )
        return message if not span else _moved(message, span, "spread" if spread is None else "spread_seconds")

    def _optional(self, values: tuple[object, ...], where: object) -> dict[str, Any]:
        if all(value is None for value in values):
            return self._for_all
        found = self._for_all.copy()
        for name, value in zip(FIELD_NAMES, values, strict=True):
            if value is not None:
                found[name] = self._moment(name, value, where) if name in FIELD_MOMENTS else value
        return found

    def _due(self, due: object, delay: object, where: object) -> datetime:
        if delay is not None:
            if due is not None:
                raise InvalidMessage("delay_seconds", "is given, and due_at too; one of them must be null")
            span = delay_of(_seconds(delay, "delay_seconds"), "delay_seconds")
            return due_after(self.rules.anchor, span, "delay_seconds")
        if due is not None:
            return self._moment("due_at", due, where)
        if self.rules.due_at is not None:
            return self.rules.due_at
        raise InvalidMessage("due_at", "is null; fill it (or delay_seconds), or give due_at= or delay=")

    def _moment(self, column: str, value: object, where: object) -> datetime:
        """Return a time in UTC; ``where`` is the row's own ``timezone``."""
        moment = parse_time(column, value)
        if moment.utcoffset() is not None:
            return utc(column, moment)
        local = self.rules.zone if where is None else _zone(where)
        if local is None:
            raise NaiveTime(column, moment)
        resolved, shift = resolve(column, moment, local)
        self.shifts.gaps += shift is Shift.GAP
        self.shifts.folds += shift is Shift.FOLD
        return resolved

    def _key(self, key: tuple[object, ...], where: object) -> tuple[object, ...]:
        if not any(isinstance(value, datetime) and value.utcoffset() is None for value in key):
            return key
        local = self.rules.zone if where is None else _zone(where)
        if local is None:
            return key
        return tuple(
            resolve(name, value, local)[0] if isinstance(value, datetime) and value.utcoffset() is None else value
            for name, value in zip(self.rules.id_columns, key, strict=True)
        )


def _zone(name: object) -> ZoneInfo:
    try:
        return zone(name)  # type: ignore[arg-type]
    except (InputError, TypeError):
        raise InvalidMessage(
            "timezone", f"{short(name)} is not an IANA time zone; write it as 'Europe/Berlin' or 'UTC'"
        ) from None


def _span(spread: object) -> timedelta:
    try:
        return delay_of(_seconds(spread, "spread_seconds"), "spread_seconds")
    except InvalidMessage as error:
        problem = error.problem.removesuffix("; a message cannot be sent into the past")
        raise InvalidMessage("spread_seconds", problem) from None


def _moved(message: DelayedMessage, span: timedelta, column: str) -> DelayedMessage:
    end = due_after(message.due_at, span, column)
    if message.expires_at is not None and message.expires_at < end:
        raise InvalidMessage(column, f"ends at {end}, and the message expires before that, at {message.expires_at}")
    offset = spread_offset(message.message_id, span // MICROSECOND) * MICROSECOND
    return replace(message, due_at=message.due_at + offset)


def _seconds(delay: object, column: str) -> int | float | str:
    if isinstance(delay, Integral) and not isinstance(delay, bool):
        return int(delay)
    if isinstance(delay, Real) and not isinstance(delay, bool):
        try:
            return float(delay)
        except OverflowError:
            return inf
    if isinstance(delay, Decimal):
        return str(delay)
    raise InvalidMessage(column, f"must be a number, not {type(delay).__name__}")


def body_of(value: object) -> bytes:
    """Return a body: bytes as they are, text in UTF-8, lists and dictionaries as JSON."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        check_text("body", value)
        return value.encode()
    if isinstance(value, dict | list):
        try:
            text = write_json(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        except RecursionError:
            raise InvalidMessage("body", TOO_DEEP) from None
        except (TypeError, ValueError) as error:
            raise InvalidMessage("body", f"cannot be written as JSON: {error}") from None
        if is_deep(text, value):
            raise InvalidMessage("body", TOO_DEEP)
        check_text("body", text)
        return text.encode()
    raise InvalidMessage("body", f"must be text, bytes, or a list or dictionary for JSON, not {type(value).__name__}")


@dataclass(frozen=True, slots=True)
class Number:
    """A number in a JSON text that would be written otherwise as a float: 1.10, or one of more digits."""

    text: str


def _number(text: str) -> float | Number:
    value = float(text)
    return value if repr(value) == text else Number(text)


def read_json(text: str | bytes) -> Any:
    """Return the value of a JSON text; in an object's fields numbers are kept as they are written."""
    value = json.loads(text, parse_float=_number)
    if isinstance(value, Number):
        return float(value.text)
    return value


def write_json(value: object, **options: Any) -> str:
    """Return ``json.dumps(value, **options)``, with numbers as they were written."""
    try:
        return json.dumps(value, **options)
    except TypeError:
        # a Number is the one type that json does not know and that has a place here
        comma, colon = options.get("separators", (", ", ": "))
        return _with_numbers(value, json.JSONEncoder(**options).encode, comma, colon)


def _with_numbers(value: object, encode: Callable[[object], str], comma: str, colon: str) -> str:
    if isinstance(value, Number):
        return value.text
    if isinstance(value, list):
        return f"[{comma.join(_with_numbers(one, encode, comma, colon) for one in value)}]"
    if isinstance(value, dict):
        pairs = (encode(name) + colon + _with_numbers(one, encode, comma, colon) for name, one in value.items())
        return f"{{{comma.join(pairs)}}}"
    return encode(value)


def is_deep(text: str, value: object) -> bool:
    """Return whether a value is nested too deep; ``text`` is the same value as JSON."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return False
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for one in level for child in _children(one)]
        if not level:
            return False
    return any(isinstance(one, dict | list | tuple) for one in level)


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def headers_of(value: object) -> Mapping[str, str]:
    """Return headers from a dictionary, or from the pairs that Arrow makes of a map."""
    if isinstance(value, Mapping | list) and len(value) > MAX_HEADERS:
        value = TooManyHeaders(len(value))
    if isinstance(value, TooManyHeaders):
        raise InvalidMessage(
            "headers", f"has {value}, and a row may have {MAX_HEADERS:,} at most; send them in the body"
        )
    if isinstance(value, Mapping):
        return value
    if isinstance(value, list):
        try:
            return dict(value)
        except (TypeError, ValueError):
            pass
    raise InvalidMessage("headers", f"must be a map of text to text, not {type(value).__name__}")
