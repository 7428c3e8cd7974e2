"""Arrow columns: whether their types are right, and what they hold as Python values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from airflow_delayed.errors import UnsupportedColumns
from airflow_delayed.intake.batch import COLUMNS, Batch
from airflow_delayed.intake.files import SourceFile
from airflow_delayed.intake.kinds import ceil_to_microseconds, is_binary, is_text
from airflow_delayed.intake.parts import entries
from airflow_delayed.intake.rows import MAX_HEADERS, TooManyHeaders

_SPARK_ADVICE = (
    "in the Spark job set spark.sql.parquet.outputTimestampType=TIMESTAMP_MICROS, or pass timezone= (timezone='UTC' for"
    " what Spark writes by default)"
)


def check_schema(schema: pa.Schema, origin: str, *, naive_ok: bool) -> None:
    """Check the types of the columns that mean something.

    :param naive_ok: a time zone is given for timestamps that have none.
    :raises UnsupportedColumns: a column is of a wrong type; the error names them all.
    """
    problems = []
    for column in schema:
        if column.name not in COLUMNS:
            continue
        if not _fits(column.name, column.type):
            problems.append(f"column {column.name} is {column.type}, and must be {COLUMNS[column.name]}")
        elif pa.types.is_timestamp(column.type) and column.type.tz is None and not naive_ok:
            problems.append(f"column {column.name} has no time zone ({column.type}); {_SPARK_ADVICE}")
    if problems:
        raise UnsupportedColumns(f"{origin}: {'; '.join(problems)}")


def _fits(name: str, kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    wanted = COLUMNS[name]
    if pa.types.is_null(kind):
        return True
    if wanted == "a timestamp":
        return bool(pa.types.is_timestamp(kind))
    if wanted == "a number":
        return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))
    if wanted == "a map of text to text":
        return pa.types.is_map(kind) and is_text(kind.key_type) and is_text(kind.item_type)
    return is_text(kind) or (wanted == "text or binary" and is_binary(kind))


def to_batch(records: pa.RecordBatch, file: SourceFile, first_row: int) -> Batch:
    """Return a record batch with the columns that the file's folders hold; as Python values when they are asked for."""
    columns = Columns(records, file.partition)
    return Batch(
        columns=columns,
        size=records.num_rows,
        origin=file.name,
        first_row=first_row,
        ids_given="message_id" in columns,
        records=records,
        partition=file.partition,
    )


class Columns(Mapping[str, Sequence[object]]):
    """A record batch's columns as Python values, each made when it is asked for first."""

    def __init__(self, records: pa.RecordBatch, partition: Mapping[str, str | None]) -> None:
        self._records = records
        self._partition = partition
        self._names = {name: index for index, name in enumerate(records.schema.names)}
        self._made: dict[str, Sequence[object]] = {}

    def __getitem__(self, name: str) -> Sequence[object]:
        if name not in self._made:
            if name in self._names:
                self._made[name] = _values(self._records.column(self._names[name]))
            else:
                self._made[name] = [self._partition[name]] * self._records.num_rows
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        # not Mapping's, which would make the values
        return name in self._names or name in self._partition

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._names, *self._partition]))

    def __len__(self) -> int:
        return len({*self._names, *self._partition})


def _values(column: pa.Array) -> list[object]:
    if pa.types.is_timestamp(column.type):
        if column.type.tz is not None:
            # the moment is the same, and no zone's name has to be known here
            column = column.cast(pa.timestamp(column.type.unit, tz="UTC"))
        if column.type.unit == "ns":
            column = ceil_to_microseconds(column)
    if pa.types.is_map(column.type) and len(column) and max(counts := _counts(column)) > MAX_HEADERS:
        # not even made, for there may be millions in one row
        return [
            TooManyHeaders(count) if count > MAX_HEADERS else one.as_py()
            for count, one in zip(counts, column, strict=True)
        ]
    try:
        values: list[object] = column.to_pylist()
    except (OverflowError, ValueError):
        values = [_value(value) for value in column]
    return values


def _value(value: pa.Scalar) -> object:
    try:
        return value.as_py()
    except (OverflowError, ValueError):
        # such as a time after the year 9999; its row says so
        return Unreadable(str(value.type))


def _counts(column: pa.MapArray) -> list[int]:
    _, _, offsets = entries(column)
    counts: list[int] = pc.subtract(offsets[1:], offsets[:-1]).to_pylist()
    return counts


class Unreadable:
    """Stands for a value that Python has nothing for."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __str__(self) -> str:
        return f"{self.kind} out of range"
