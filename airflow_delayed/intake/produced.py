"""Rows that a query or a function gives one by one, in Arrow record batches for their spool."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from airflow_delayed.errors import InvalidMessage
from airflow_delayed.intake.columns import BATCH_BYTES, BATCH_ROWS, NULL_ID, ColumnRules, row_of
from airflow_delayed.intake.typed import Broken, plain, to_records
from airflow_delayed.message import DelayedMessage

#: Bytes of values in memory at a time: as arrays and as a file's bytes they are there twice more.
_CHUNK_BYTES = BATCH_BYTES // 8
#: Bytes that a value takes besides its text.
_VALUE = 50
#: Different sets of field names that are remembered; a row with keys of its own may have any.
_MOST_SHAPES = 1000
_Problem = tuple[str, str]


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
    first, size = 1, 0
    rows: list[Mapping[str, Any]] = []
    broken: Broken = {}
    for entry in entries:
        row, problem = shapes.read(entry)
        if problem:
            broken[len(rows)] = problem
        rows.append(row)
        size += _weight(row)
        if len(rows) == BATCH_ROWS or size > _CHUNK_BYTES:
            yield from _batches(rows, broken, first)
            first += len(rows)
            rows, broken, size = [], {}, 0
    if rows:
        yield from _batches(rows, broken, first)


def _batches(rows: list[Mapping[str, Any]], broken: Broken, first: int) -> Iterator[ProducedBatch]:
    names = list({name: None for row in rows for name in row}) or ["value"]
    values = [tuple(map(row.get, names)) for row in rows]
    for records, problems in to_records(names, values, broken):
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
        self._known: dict[tuple[object, ...], tuple[_Problem | None, list[str]]] = {}

    def read(self, entry: object) -> tuple[Mapping[str, Any], _Problem | None]:
        """Return the fields of one entry that are read, and its problem."""
        row = row_of(entry) if isinstance(entry, DelayedMessage) else entry
        if not isinstance(row, Mapping):
            return {}, ("message", f"must be a dictionary or a DelayedMessage, not {type(entry).__name__}")
        problem, used = self._shape(row)
        if problem is None and "message_id" in row and row["message_id"] is None:
            problem = "message_id", NULL_ID
        values = {}
        for name in used:
            try:
                values[name] = plain(name, row[name])
            except InvalidMessage as error:
                problem = problem or (name, error.problem)
        return values, problem

    def _shape(self, row: Mapping[Any, object]) -> tuple[_Problem | None, list[str]]:
        names = tuple(row)
        shape = self._known.get(names)
        if shape is None:
            problem = self._wanted.problem(dict.fromkeys(names, ""))
            used = [name for name in names if isinstance(name, str) and self._wanted.uses(name)]
            if len(self._known) == _MOST_SHAPES:
                self._known.clear()
            shape = self._known[names] = problem, used
        return shape
