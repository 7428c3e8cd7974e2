"""ParquetFiles: Parquet files as a source of rows, in batches that stay small when they are decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from airflow_delayed.addresses import without_secrets
from airflow_delayed.errors import SourceError
from airflow_delayed.intake.arrow import check_schema, entries, to_batch
from airflow_delayed.intake.columns import BATCH_BYTES, BATCH_ROWS, ColumnRules, RowBatch
from airflow_delayed.intake.files import MAX_RATIO, UNPACKED_IN_ANY_CASE, FileSource, SourceFile, opened

#: Bytes that are read at a time to find a column's dictionary.
_BUFFER = 1 << 16
#: Bytes that a header takes besides its texts.
_HEADER = 40
#: Encoding that stores a value as its difference from the one before.
_DELTA = "DELTA_BYTE_ARRAY"


class ParquetFiles(FileSource):
    """Parquet files, as Spark writes them.

    :param naive_ok: a time zone is given for timestamps that have none.
    """

    def __init__(self, fs: Any, listing: Callable[[], list[SourceFile]], name: str, *, naive_ok: bool = False) -> None:
        super().__init__(fs, listing, name)
        self._naive_ok = naive_ok

    def batches(self, wanted: ColumnRules) -> Iterator[RowBatch]:
        """Yield the rows of each file, whose columns' types are checked first."""
        for file in self._files:
            try:
                with opened(self._fs, file) as handle:
                    # Spark's INT96 as nanoseconds would wrap around in the year 2262
                    parquet = pq.ParquetFile(handle, coerce_int96_timestamp_unit="us")
                    names = {*parquet.schema_arrow.names, *file.partition}
                    wanted.check(names, file.name)
                    check_schema(parquet.schema_arrow, file.name, naive_ok=self._naive_ok or "timezone" in names)
                    # ignored columns are not read at all
                    used = [name for name in parquet.schema_arrow.names if wanted.uses(name)]
                    first = 1
                    # of all row groups at once pyarrow would hold the whole file
                    for group in range(parquet.num_row_groups):
                        check_growth(file, parquet.metadata, group, used)
                        rows = min(BATCH_ROWS, rows_within(BATCH_BYTES, parquet.metadata, group, used, handle))
                        batches = parquet.iter_batches(rows, row_groups=[group], columns=used)
                        for records in joined(batches, BATCH_ROWS, BATCH_BYTES):
                            for piece in pieces(records, BATCH_BYTES):
                                yield to_batch(piece, file, first)
                                first += piece.num_rows
            except (pa.ArrowException, OSError, EOFError) as error:
                text = without_secrets(str(error), file.path)
                raise SourceError(f"{file.name} cannot be read as Parquet: {text}") from error


def check_growth(file: SourceFile, metadata: pq.FileMetaData, group: int, names: Sequence[str]) -> None:
    """Check what a row group's columns unpack to, and how many headers it has, before any of it is unpacked.

    :raises SourceError: it is far more than their size.
    """
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

    A text that many rows share is stored once, in the dictionary of its column: by the size of the file alone a row may
    be a thousandth of what it becomes. So a row counts with the longest text of the dictionary.
    """
    rows = metadata.row_group(group)
    columns = _columns(metadata, group, names)
    stored = sum(column.total_uncompressed_size for column in columns)
    # each value of a row might be all that is stored
    if not rows.num_rows or stored * max((column.num_values for column in columns), default=1) <= size:
        return max(int(rows.num_rows), 1)
    width = (stored + _HEADER * _values_beyond_rows(metadata, group, names)) / rows.num_rows
    shared = {column.path_in_schema: column for column in columns if _may_grow(column)}
    for path, longest in _longest(metadata, group, list(shared), names, handle):
        width += longest * shared[path].num_values / rows.num_rows
    for column in columns:
        if _DELTA in column.encodings:
            width += column.total_uncompressed_size * column.num_values / rows.num_rows
    return max(1, int(size / max(width, 1)))


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
    """Return how many values a row group's longest column has beyond one a row, as a map or list may."""
    count = max((column.num_values for column in _columns(metadata, group, names)), default=0)
    return max(0, int(count) - int(metadata.row_group(group).num_rows))


def _columns(metadata: pq.FileMetaData, group: int, names: Sequence[str]) -> list[Any]:
    rows = metadata.row_group(group)
    every = (rows.column(index) for index in range(rows.num_columns))
    return [column for column in every if _name_of(column.path_in_schema, names) is not None]


def _name_of(path: str, names: Sequence[str]) -> str | None:
    return next((name for name in names if path == name or path.startswith(f"{name}.")), None)


def _may_grow(column: Any) -> bool:
    return bool(column.physical_type == "BYTE_ARRAY" and column.has_dictionary_page)


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
