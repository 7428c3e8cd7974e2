"""CsvFiles: files of comma-separated values as a source of rows."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from io import BufferedReader
from typing import Any

import pyarrow as pa
import pyarrow.csv as pcsv

from airflow_delayed.addresses import without_secrets
from airflow_delayed.errors import InvalidMessage, SourceError, short
from airflow_delayed.fields import FIELD_MOMENTS
from airflow_delayed.intake.arrow import ArrowColumns, to_batch
from airflow_delayed.intake.columns import BATCH_ROWS, ColumnRules, RowBatch, check_names
from airflow_delayed.intake.files import MAX_LINE, FileSource, SourceFile, unpacked
from airflow_delayed.intake.produced import headers_of_text, typed

#: The longest line of columns' names, in bytes: as Python's objects it is thirty times as large.
MAX_FIRST_LINE = 1024 * 1024
_TIMES = ("due_at", *FIELD_MOMENTS)
_NUMBERS = ("delay_seconds", "spread_seconds")
#: Columns that are read value by value.
_READ = (*_NUMBERS, "headers")


class CsvFiles(FileSource):
    """Files of comma-separated values in UTF-8, whose first line names the columns (RFC 4180).

    An empty field is null, and ``""`` an empty text. ``headers`` are a JSON object, ``delay_seconds`` and
    ``spread_seconds`` numbers and times ISO 8601; all else is text, the values of ``id_columns`` too. Rows are counted
    after the first line.
    """

    def batches(self, wanted: ColumnRules) -> Iterator[RowBatch]:
        """Yield the rows of each file, whose columns' names are checked first."""
        for file in self._files:
            with unpacked(self._fs, file) as stream:
                names = _names(stream, file)
                wanted.check({*names, *file.partition}, file.name)
                used = [name for name in names if wanted.uses(name)]
                first = 1
                for records in _records(stream, file, names):
                    yield _batch(records.select(used), file, first)
                    first += records.num_rows


def _names(stream: BufferedReader[Any], file: SourceFile) -> list[str]:
    line = stream.readline(MAX_FIRST_LINE + 1)
    if len(line) > MAX_FIRST_LINE:
        raise SourceError(
            f"the first line of {file.name} has more than {MAX_FIRST_LINE:,} bytes, the longest that is read; the first"
            " line of a CSV file names its columns"
        )
    names = next(csv.reader([line.decode("utf-8-sig", errors="replace")]), [])
    if not names:
        raise SourceError(f"{file.name} is empty; the first line of a CSV file names its columns")
    check_names(names, file.name)
    return names


def _records(stream: BufferedReader[Any], file: SourceFile, names: list[str]) -> Iterator[pa.RecordBatch]:
    """Yield the rows as text, some at a time."""
    if not stream.peek(1):
        return
    try:
        # a row must fit into one block
        reading = pcsv.ReadOptions(column_names=names, block_size=MAX_LINE, use_threads=False)
        values = pcsv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()),
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        )
        with pcsv.open_csv(stream, reading, pcsv.ParseOptions(newlines_in_values=True), values) as reader:
            for records in reader:
                for start in range(0, records.num_rows, BATCH_ROWS):
                    yield records.slice(start, BATCH_ROWS)
    except pa.ArrowException as error:
        text = without_secrets(str(error), file.path)
        raise SourceError(
            f"{file.name} cannot be read as CSV: {text}. Its rows are in UTF-8, each of at most {MAX_LINE:,} bytes,"
            " with a field for each column"
        ) from error


def _batch(records: pa.RecordBatch, file: SourceFile, first: int) -> RowBatch:
    """Return text as a batch whose times, delays and headers are read; by Arrow alone, where it can."""
    broken: dict[int, tuple[str, str]] = {}
    arrays: dict[str, Any] = dict(zip(records.schema.names, records.columns, strict=True))
    for name in arrays.keys() & {*_TIMES}:
        arrays[name] = _moments(arrays[name])
    others = {name: _read(name, arrays[name].to_pylist(), broken) for name in _READ if name in arrays}
    made = {name: array for name, values in others.items() if (array := typed(values)) is not None}
    arrays |= made
    whole = pa.RecordBatch.from_arrays(list(arrays.values()), list(arrays))
    batch = to_batch(whole, file, first)
    if not broken and len(made) == len(others):
        return batch
    columns = {**ArrowColumns(whole, file.partition), **others}
    return RowBatch(
        columns=columns,
        size=batch.size,
        origin=batch.origin,
        first_row=first,
        broken=broken,
        is_table=True,
    )


def _moments(texts: pa.Array) -> pa.Array:
    """Return times that all have an offset; otherwise the texts, which are read row by row."""
    try:
        return texts.cast(pa.timestamp("us", tz="UTC"))
    except pa.ArrowInvalid:
        return texts


def _read(name: str, texts: list[str | None], broken: dict[int, tuple[str, str]]) -> list[object]:
    """Return the values of a column; a text that is none is a problem of its row, and None."""
    values: list[object] = []
    for index, text in enumerate(texts):
        value: object = text
        try:
            value = None if text is None else _number(name, text) if name in _NUMBERS else headers_of_text(text)
        except InvalidMessage as error:
            broken.setdefault(index, (error.column, error.problem))
        values.append(value)
    return values


def _number(column: str, text: str) -> int | Decimal:
    try:
        value = Decimal(text)
        return int(text) if value.is_finite() and text.isdecimal() else value
    except (InvalidOperation, ValueError):
        raise InvalidMessage(column, f"{short(text)} is not a number of seconds") from None
