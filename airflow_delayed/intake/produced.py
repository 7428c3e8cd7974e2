"""Rows that a query, a function or a text file gives one by one, in Arrow record batches.

A column whose values are of one type is an array. Where types differ, the rows are parted until they do not. A value
that no array can hold is a problem of its row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from numbers import Integral, Real
from types import NoneType
from typing import Any
from uuid import UUID

import pyarrow as pa

from airflow_delayed.errors import InvalidMessage
from airflow_delayed.intake.columns import BATCH_BYTES, BATCH_ROWS, COLUMNS, ColumnRules, label, row_of
from airflow_delayed.intake.rows import TOO_DEEP, body_of, headers_of, is_deep
from airflow_delayed.message import DelayedMessage, parse_time

_Problem = tuple[str, str]
#: By index: the column of a row that cannot be sent, and the problem.
Broken = dict[int, _Problem]

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
    """Return a column as an array; None if its values have several types, or a type that no array has."""
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
    names: Sequence[str], rows: Sequence[Sequence[Any]], broken: Broken, wanted: ColumnRules
) -> Iterator[tuple[pa.RecordBatch, Broken]]:
    """Yield rows as record batches, each with the rows in it that cannot be sent; without any columns there is none.

    :param rows: their values, as :func:`plain` returns them, in the order of the names.
    """
    columns = list(zip(*rows, strict=True))
    arrays = [typed(column) for column in columns]
    if len(rows) > 1 and any(array is None for array in arrays):
        half = len(rows) // 2
        before = {at: problem for at, problem in broken.items() if at < half}
        yield from to_records(names, rows[:half], before, wanted)
        after = {at - half: problem for at, problem in broken.items() if at >= half}
        yield from to_records(names, rows[half:], after, wanted)
        return
    for index, array in enumerate(arrays):
        if array is None:
            broken.setdefault(0, _problem(names[index], columns[index][0], wanted))
            arrays[index] = pa.nulls(1)
    yield pa.RecordBatch.from_arrays(arrays, list(names)), broken


def _problem(column: str, value: object, wanted: ColumnRules) -> _Problem:
    kind = type(value).__name__
    names = wanted.meanings(column)
    if not names:
        return column, f"{kind} cannot be part of a key; use text, whole numbers, times or dates"
    if isinstance(value, dict | datetime | str):
        return wanted.label(names[0]), f"must be {COLUMNS[names[0]]}, and has a value that is not"
    return wanted.label(names[0]), f"must be {COLUMNS[names[0]]}, not {kind}"


#: Bytes of values in memory at a time: as arrays and as a file's bytes they are there twice more.
_CHUNK_BYTES = BATCH_BYTES // 8
#: Bytes that a value takes besides its text.
_VALUE = 50
#: Different sets of field names that are remembered; a row with keys of its own may have any.
_MOST_SHAPES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducedBatch:
    """Consecutive rows.

    :param first_row: the number of the first row, counted from 1.
    :param broken: rows that cannot be sent, by index.
    """

    records: pa.RecordBatch = field(repr=False)
    first_row: int
    broken: Broken


def produced(entries: Iterable[object], wanted: ColumnRules) -> Iterator[ProducedBatch]:
    """Yield entries, each a dictionary or a DelayedMessage, in batches; one that is wrong is a problem of its own."""
    shapes = _Shapes(wanted)
    unseen = wanted.renamed()
    first, size = 1, 0
    rows: list[Mapping[str, Any]] = []
    broken: Broken = {}
    for entry in entries:
        row, problem = shapes.read(entry)
        unseen.difference_update(row)
        if problem:
            broken[len(rows)] = problem
        rows.append(row)
        size += _weight(row)
        if len(rows) == BATCH_ROWS or size > _CHUNK_BYTES:
            yield from _batches(rows, broken, first, wanted)
            first += len(rows)
            rows, broken, size = [], {}, 0
    if rows:
        yield from _batches(rows, broken, first, wanted)
    if rows or first > 1:
        wanted.check_renamed(unseen, "its rows")


def _batches(rows: list[Mapping[str, Any]], broken: Broken, first: int, wanted: ColumnRules) -> Iterator[ProducedBatch]:
    names = list({name: None for row in rows for name in row}) or ["value"]
    values = [tuple(map(row.get, names)) for row in rows]
    for records, problems in to_records(names, values, broken, wanted):
        yield ProducedBatch(records=records, first_row=first, broken=problems)
        first += records.num_rows


def _weight(row: Mapping[str, Any]) -> int:
    weight = _VALUE * len(row)
    for value in row.values():
        kind = type(value)
        if kind is str or kind is bytes:
            weight += len(value)
        elif kind is dict:
            weight += 2 * _VALUE * len(value) + _text_of(value)
    return weight


def _text_of(headers: dict[Any, Any]) -> int:
    try:
        return sum(map(len, headers.values()))
    except TypeError:
        # one that is no text makes the row a problem
        return 0


class _Shapes:
    """Reads rows; what their field names say is judged once for all rows with the same."""

    def __init__(self, wanted: ColumnRules) -> None:
        self._wanted = wanted
        self._known: dict[tuple[object, ...], tuple[_Problem | None, list[tuple[str, str]]]] = {}

    def read(self, entry: object) -> tuple[Mapping[str, Any], _Problem | None]:
        """Return the fields of one entry that are read, and its problem."""
        row = row_of(entry) if isinstance(entry, DelayedMessage) else entry
        if not isinstance(row, Mapping):
            return {}, ("message", f"must be a dictionary or a DelayedMessage, not {type(entry).__name__}")
        problem, used = self._shape(row)
        problem = problem or self._wanted.id_problem(row)
        values = {}
        for source, name in used:
            try:
                values[source] = plain(name, row[source])
            except InvalidMessage as error:
                problem = problem or (label(name, source), error.problem)
        return values, problem

    def _shape(self, row: Mapping[Any, object]) -> tuple[_Problem | None, list[tuple[str, str]]]:
        """Return the problem of rows with these names, and the names that are read, each with ours."""
        names = tuple(row)
        shape = self._known.get(names)
        if shape is None:
            problem = self._wanted.problem(dict.fromkeys(names, ""))
            used = [(name, self._meaning(name)) for name in names if isinstance(name, str) and self._wanted.uses(name)]
            if len(self._known) == _MOST_SHAPES:
                self._known.clear()
            shape = self._known[names] = problem, used
        return shape

    def _meaning(self, column: str) -> str:
        """Return what a column is read as: a body becomes bytes only if it is nothing else."""
        names = self._wanted.meanings(column)
        others = [name for name in names if name not in _BODIES]
        return others[0] if others else column if not names or column in self._wanted.id_columns else names[0]
