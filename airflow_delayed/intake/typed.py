"""Arrow arrays of Python's values, for rows that come from a cursor, a function or a text file.

A column whose values are of one type is an array. Where types differ, the rows are parted until they do not. A value
that no array can hold is a problem of its row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from numbers import Integral, Real
from types import NoneType
from typing import Any
from uuid import UUID

import pyarrow as pa

from airflow_delayed.errors import InvalidMessage
from airflow_delayed.intake.columns import COLUMNS
from airflow_delayed.intake.rows import TOO_DEEP, body_of, headers_of, is_deep
from airflow_delayed.message import parse_time

#: By index: the column of a row that cannot be sent, and the problem.
Broken = dict[int, tuple[str, str]]

_MAP = pa.map_(pa.string(), pa.string())
_TYPES: Mapping[type, pa.DataType | None] = {
    str: pa.string(),
    bytes: pa.binary(),
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    date: pa.date32(),
    # its digits and scale are those of the values
    Decimal: None,
}
_EXACT = {*_TYPES, NoneType, dict, datetime}
_BODIES = ("value", "body")


def typed(values: Sequence[Any]) -> pa.Array | None:
    """Return a column as an array; None if its values have several types, or one that no array has."""
    kinds = {*map(type, values)} - {NoneType}
    if not kinds:
        return pa.nulls(len(values))
    kind = kinds.pop()
    if kinds:
        return None
    try:
        if kind is datetime:
            return _moments(values)
        if kind is dict:
            return pa.array([None if value is None else list(value.items()) for value in values], _MAP)
        if kind is int:
            return _whole(values)
        return pa.array(values, _TYPES[kind])
    except (pa.ArrowException, KeyError, TypeError, ValueError, OverflowError):
        return None


def _moments(values: Sequence[datetime | None]) -> pa.Array | None:
    aware = {value.utcoffset() is not None for value in values if value is not None}
    if len(aware) > 1:
        return None
    # what begins or ends outside the years 1 to 9999 in UTC is no array's
    return pa.array(values, pa.timestamp("us", tz="UTC" if aware.pop() else None))


def _whole(values: Sequence[int | None]) -> pa.Array:
    try:
        return pa.array(values, pa.int64())
    except (OverflowError, pa.ArrowInvalid):
        # an id counts alike as a decimal
        return pa.array([None if value is None else Decimal(value) for value in values])


def plain(name: str, value: Any) -> Any:
    """Return a row's value as one of a few types: a body as bytes, another library's number or time as Python's own.

    :raises InvalidMessage: it cannot be what its column has.
    """
    if name in _BODIES and value is not None:
        return body_of(bytes(value) if isinstance(value, memoryview | bytearray) else value)
    if name == "headers" and isinstance(value, str):
        # databases without a type for JSON have it as text
        return headers_of_text(value)
    if type(value) in _EXACT:
        return value
    if isinstance(value, datetime):
        return parse_time(name, value)
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, memoryview | bytearray):
        return bytes(value)
    if name == "headers":
        return dict(headers_of(value))
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def headers_of_text(text: str) -> dict[str, Any]:
    """Return headers that are written as a JSON object.

    :raises InvalidMessage: the text is something else.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidMessage("headers", f"are not JSON: {error}") from None
    if is_deep(text, value):
        raise InvalidMessage("headers", TOO_DEEP)
    if not isinstance(value, dict):
        raise InvalidMessage("headers", f"must be a JSON object, not {type(value).__name__}")
    return value


def to_records(
    names: Sequence[str], rows: Sequence[Sequence[Any]], broken: Broken
) -> Iterator[tuple[pa.RecordBatch, Broken]]:
    """Yield rows as record batches, each with the rows in it that cannot be sent; without any columns there is none.

    :param rows: their values, as :func:`plain` returns them, in the order of the names.
    """
    columns = list(zip(*rows, strict=True))
    arrays = [typed(column) for column in columns]
    if len(rows) > 1 and any(array is None for array in arrays):
        half = len(rows) // 2
        yield from to_records(names, rows[:half], {at: problem for at, problem in broken.items() if at < half})
        after = {at - half: problem for at, problem in broken.items() if at >= half}
        yield from to_records(names, rows[half:], after)
        return
    for index, array in enumerate(arrays):
        if array is None:
            broken.setdefault(0, (names[index], _problem(names[index], columns[index][0])))
            arrays[index] = pa.nulls(1)
    yield pa.RecordBatch.from_arrays(arrays, list(names)), broken


def _problem(name: str, value: object) -> str:
    kind = type(value).__name__
    if name not in COLUMNS:
        return f"{kind} cannot be part of a key; use text, whole numbers, times or dates"
    if isinstance(value, dict | datetime | str):
        return f"must be {COLUMNS[name]}, and has a value that is not"
    return f"must be {COLUMNS[name]}, not {kind}"
