"""ParquetFiles: Parquet files as a source of rows, in batches that stay small when they are decoded."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from airflow_delayed.addresses import without_secrets
from airflow_delayed.errors import SourceError, UnsupportedColumns
from airflow_delayed.intake.arrow import entries, is_binary, is_text, plain_column, plain_type, to_batch
from airflow_delayed.intake.columns import (
    BATCH_BYTES,
    BATCH_ROWS,
    COLUMNS,
    ColumnRules,
    RowBatch,
    check_count,
    check_names,
    wrong_type,
)
from airflow_delayed.intake.files import MAX_RATIO, UNPACKED_IN_ANY_CASE, FileSource, SourceFile, opened
from airflow_delayed.intake.time_columns import (
    Meaning,
    TimeColumn,
    TimeColumnsOfFiles,
    of_old_calendar,
    time_columns,
    with_zones,
)

#: The longest footer that is read, in bytes: some 40,000 parts of columns (columns times row groups).
MAX_FOOTER = 8 * 1024 * 1024
_FOOTER_READ = 1 << 16
#: Bytes that are read at a time to find a column's dictionary.
_BUFFER = 1 << 16
#: Bytes that a header takes besides its texts.
_HEADER = 40
#: Encoding that stores a value as its difference from the one before.
_DELTA = "DELTA_BYTE_ARRAY"


class ParquetFiles(FileSource):
    """Parquet files, as Spark writes them."""

    def __init__(
        self,
        fs: Any,
        listing: Callable[[], list[SourceFile]],
        name: str,
        *,
        naive_ok: bool = False,
    ) -> None:
        super().__init__(fs, listing, name)
        self._naive_ok = naive_ok

    def batches(self, wanted: ColumnRules) -> Iterator[RowBatch]:
        """Yield the rows of each file, whose columns' types are checked first."""
        known = TimeColumnsOfFiles()
        for index, file in enumerate(self._files):
            with self._opened(file) as (handle, parquet):
                check_count(parquet.metadata.num_columns, file.name)
                names = {*parquet.schema_arrow.names, *file.partition}
                wanted.check(names, file.name)
                # ignored columns are not read at all
                used = [name for name in parquet.schema_arrow.names if wanted.uses(name)]
                check_names(used, file.name)
                times = time_columns(parquet, used)
                known.add(file.name, times)
                naive_ok = self._naive_ok or wanted.names.get("timezone") in names
                if not naive_ok and any(_lacks_zone(column) for column in times.values()):
                    self._compare(self._files[index + 1 :], wanted, known)
                read = pa.schema([column for column in parquet.schema_arrow if column.name in used])
                check_schema(read, file.name, times, wanted, naive_ok=naive_ok)
                first = 1
                # of all row groups at once pyarrow would hold the whole file
                for group in range(parquet.num_row_groups):
                    check_chunks(parquet.metadata, group, used)
                    check_growth(file, parquet.metadata, group, used)
                    rows = min(BATCH_ROWS, rows_within(BATCH_BYTES, parquet.metadata, group, used, handle))
                    batches = parquet.iter_batches(rows, row_groups=[group], columns=used)
                    for records in joined(map(decoded, batches), BATCH_ROWS, BATCH_BYTES):
                        for piece in pieces(with_zones(records, times), BATCH_BYTES):
                            yield _batch(piece, file, first, times)
                            first += piece.num_rows

    @contextmanager
    def _opened(self, file: SourceFile) -> Iterator[tuple[Any, pq.ParquetFile]]:
        try:
            with opened(self._fs, file) as handle:
                check_footer(file, handle)
                # Spark's INT96 as nanoseconds would wrap around in the year 2262
                yield handle, pq.ParquetFile(handle, coerce_int96_timestamp_unit="us")
        except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:
            # a column's name may be no text
            text = without_secrets(str(error), file.path)
            raise SourceError(f"{file.name} cannot be read as Parquet: {text}") from error

    def _compare(self, files: Sequence[SourceFile], wanted: ColumnRules, known: TimeColumnsOfFiles) -> None:
        """Compare a file that is refused for its times with those after it: no time zone mends files that disagree."""
        for file in files:
            with suppress(SourceError), self._opened(file) as (_, parquet):
                used = [name for name in parquet.schema_arrow.names if wanted.uses(name)]
                known.add(file.name, time_columns(parquet, used))


def _lacks_zone(column: TimeColumn) -> bool:
    return column.meaning is not Meaning.INSTANT


def _batch(records: pa.RecordBatch, file: SourceFile, first: int, times: Mapping[str, TimeColumn]) -> RowBatch:
    return replace(
        to_batch(records, file, first),
        broken=of_old_calendar(records, times),
        wall_clocks={name: column.because for name, column in times.items() if _lacks_zone(column)},
    )


def check_footer(file: SourceFile, handle: Any) -> None:
    """Check how long a file's footer is, before it is read."""
    handle.seek(0, os.SEEK_END)
    # as many bytes as pyarrow reads there first, so that a remote file system is asked once
    handle.seek(max(0, handle.tell() - _FOOTER_READ))
    length = int.from_bytes(handle.read(_FOOTER_READ)[-8:-4], "little")
    handle.seek(0)
    if length > MAX_FOOTER:
        raise SourceError(
            f"{file.name} has a footer of {length:,} bytes, and at most {MAX_FOOTER:,} are read: in memory it is up to"
            " 250 times as large. Write larger row groups, or fewer columns"
        )


def check_schema(
    schema: pa.Schema, origin: str, times: Mapping[str, TimeColumn], wanted: ColumnRules, *, naive_ok: bool
) -> None:
    """Check the types of the columns that are read. Those of a key are flat: what a list repeats has no bound."""
    problems = []
    for column in schema:
        names = wanted.meanings(column.name)
        if wrong := [name for name in names if not _fits(name, column.type)]:
            kind = str(column.type)
            problems += [wrong_type(column.name, kind, name, is_text=is_text(column.type)) for name in wrong]
        elif not names and pa.types.is_nested(plain_type(column.type)):
            problems.append(
                f"column {column.name} is {column.type}, which cannot be part of a key; use text, whole numbers, times"
                " or dates"
            )
        elif not naive_ok and column.name in times and _lacks_zone(times[column.name]):
            problems.append(times[column.name].no_zone)
    if problems:
        raise UnsupportedColumns(f"{origin}: {'; '.join(problems)}")


def _fits(name: str, kind: pa.DataType) -> bool:
    kind = plain_type(kind)
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


def check_chunks(metadata: pq.FileMetaData, group: int, names: Sequence[str]) -> None:
    """Check what a footer says of a row group's columns, by opening them on a file that gives nothing.

    pyarrow ends the process where ``RowGroupMetaData.column`` meets a contradiction; its reader raises an error.
    """
    with suppress(_Unread):
        file = pq.ParquetFile(_Nothing(), metadata=metadata, buffer_size=_BUFFER)
        next(file.iter_batches(1, row_groups=[group], columns=list(names)), None)


class _Unread(Exception):
    """The reader wants the first bytes."""


class _Nothing(io.RawIOBase):
    """A file of endless length whose content cannot be read."""

    def __init__(self) -> None:
        self._place = 0

    def readable(self) -> bool:
        """Return that it can be read, as a reader asks first."""
        return True

    def seekable(self) -> bool:
        """Return that it can be read anywhere."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to a place."""
        self._place = offset + (0, self._place, 1 << 62)[whence]
        return self._place

    def tell(self) -> int:
        """Return the place."""
        return self._place

    def read(self, size: int = -1, /) -> bytes:
        """Give nothing."""
        raise _Unread


def check_growth(file: SourceFile, metadata: pq.FileMetaData, group: int, names: Sequence[str]) -> None:
    """Check what a row group's columns unpack to, and how many headers it has, before any of it is unpacked."""
    for column in _columns(metadata, group, names):
        size, packed = column.total_uncompressed_size, column.total_compressed_size
        if size > max(UNPACKED_IN_ANY_CASE, MAX_RATIO * packed):
            raise SourceError(
                f"{file.name}: column {column.path_in_schema} unpacks from {packed:,} to {size:,} bytes in one row"
                f" group, and at most {MAX_RATIO} times its size is unpacked; write it with less compression or in"
                " smaller row groups, if its content is right"
            )
    packed = sum(column.total_compressed_size for column in _columns(metadata, group, names))
    count = _values_beyond_rows(metadata, group, names)
    if count * _HEADER > max(UNPACKED_IN_ANY_CASE, MAX_RATIO * packed):
        raise SourceError(
            f"{file.name}: one row group of {packed:,} bytes has {count:,} headers, which take at least"
            f" {count * _HEADER:,} bytes of memory, and at most {MAX_RATIO} times its size is unpacked; write"
            " smaller row groups, if its content is right"
        )


def rows_within(size: int, metadata: pq.FileMetaData, group: int, names: Sequence[str], handle: Any) -> int:
    """Return how many rows of a row group are about so many bytes at most, at least one.

    A row counts with the longest text of its column's dictionary, which is stored once.
    """
    rows = metadata.row_group(group)
    columns = _columns(metadata, group, names)
    stored = sum(column.total_uncompressed_size for column in columns)
    # each value of a row might be all that is stored
    if not rows.num_rows or stored * max((column.num_values for column in columns), default=1) <= size:
        return max(int(rows.num_rows), 1)
    width = (stored + _HEADER * _values_beyond_rows(metadata, group, names)) / rows.num_rows
    # whether they have a dictionary is what the footer says, and a footer may lie
    texts = {column.path_in_schema: column for column in columns if _may_share(column)}
    for path, longest in _longest(metadata, group, list(texts), names, handle):
        width += longest * max(1, texts[path].num_values / rows.num_rows)
    width += sum(_fixed_width(metadata, column) for column in columns)
    for column in columns:
        if _DELTA in column.encodings:
            width += column.total_uncompressed_size * max(1, column.num_values / rows.num_rows)
    return max(1, int(size / max(width, 1)))


def decoded(records: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch of plain columns."""
    return pa.RecordBatch.from_arrays([plain_column(column) for column in records.columns], records.schema.names)


def joined(batches: Iterable[pa.RecordBatch], rows: int, size: int) -> Iterator[pa.RecordBatch]:
    """Yield batches, small ones together, up to about so many rows and bytes."""
    waiting: list[pa.RecordBatch] = []
    have = weight = 0
    for records in batches:
        more = _weight(records)
        waiting.append(records)
        have += records.num_rows
        weight += more
        if have + records.num_rows > rows or weight + more > size:
            yield from _as_one(waiting)
            waiting, have, weight = [], 0, 0
    if waiting:
        yield from _as_one(waiting)


def _as_one(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    if len(batches) == 1:
        return batches
    together: list[pa.RecordBatch] = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return together


def pieces(records: pa.RecordBatch, size: int) -> Iterator[pa.RecordBatch]:
    """Yield a batch in parts of at most so many bytes, or of one row."""
    if records.num_rows < 2 or _weight(records) <= size:
        yield records
        return
    half = records.num_rows // 2
    yield from pieces(records.slice(0, half), size)
    yield from pieces(records.slice(half), size)


def _weight(records: pa.RecordBatch) -> int:
    """Return about how many bytes a batch takes, also as Python's values."""
    weight = int(records.nbytes)
    for column in records.columns:
        if pa.types.is_map(column.type):
            weight += _HEADER * len(entries(column)[0])
    return weight


def _values_beyond_rows(metadata: pq.FileMetaData, group: int, names: Sequence[str]) -> int:
    count = max((column.num_values for column in _columns(metadata, group, names)), default=0)
    return max(0, int(count) - int(metadata.row_group(group).num_rows))


def _columns(metadata: pq.FileMetaData, group: int, names: Sequence[str]) -> list[Any]:
    rows = metadata.row_group(group)
    every = (rows.column(index) for index in range(rows.num_columns))
    return [column for column in every if _name_of(column.path_in_schema, names) is not None]


def _name_of(path: str, names: Sequence[str]) -> str | None:
    return next((name for name in names if path == name or path.startswith(f"{name}.")), None)


def _may_share(column: Any) -> bool:
    # what differs from the value before cannot be read as a dictionary, and counts by itself
    differs = _DELTA in column.encodings and not column.has_dictionary_page
    return bool(column.physical_type == "BYTE_ARRAY" and not differs)


def _fixed_width(metadata: pq.FileMetaData, chunk: Any) -> int:
    if chunk.physical_type != "FIXED_LEN_BYTE_ARRAY":
        return 0
    leaves = (metadata.schema.column(index) for index in range(metadata.num_columns))
    return next(int(leaf.length) for leaf in leaves if leaf.path == chunk.path_in_schema)


def _longest(
    metadata: pq.FileMetaData, group: int, paths: list[str], names: Sequence[str], handle: Any
) -> Iterator[tuple[str, int]]:
    """Yield the length of the longest text in the dictionary of each column; only the group's first row is read."""
    if not paths:
        return
    file = pq.ParquetFile(handle, metadata=metadata, read_dictionary=paths, buffer_size=_BUFFER)
    for records in islice(file.iter_batches(1, row_groups=[group], columns=paths), 1):
        for path in paths:
            column = records.column(_name_of(path, names))
            if pa.types.is_map(column.type):
                column = column.keys if path.endswith(".key") else column.items
            if pa.types.is_dictionary(column.type):
                yield path, pc.max(pc.binary_length(column.dictionary)).as_py() or 0
