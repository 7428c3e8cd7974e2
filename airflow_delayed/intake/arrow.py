"""Arrow arrays: which types a column may have, the values in Python, and the bytes for the hash of an id."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from importlib.util import find_spec
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from airflow_delayed import message
from airflow_delayed.identity import headers_part, text_part
from airflow_delayed.intake.columns import MAX_HEADERS, RowBatch, TooManyHeaders
from airflow_delayed.intake.files import SourceFile
from airflow_delayed.message import EPOCH, MICROSECOND, UTC

NUMPY = find_spec("numpy") is not None
#: The first and the last microsecond that Python has a time for.
_FIRST = message.microseconds(datetime.min.replace(tzinfo=UTC))
_LAST = message.microseconds(datetime.max.replace(tzinfo=UTC))
#: Longest delay in seconds that is reckoned here, 285 years: its microseconds are exact in floating point.
_LONGEST = 9_000_000_000
#: Arrow's name for the type whose values are UUIDs.
_UUID = "arrow.uuid"


class Unusual(Exception):
    """A column has a value that only the reader of single rows handles."""


def is_text(kind: pa.DataType) -> bool:
    """Return whether a type is text."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_binary(kind: pa.DataType) -> bool:
    """Return whether a type is bytes."""
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type that :func:`plain_column` makes of a type."""
    if isinstance(kind, pa.BaseExtensionType):
        return pa.string() if kind.extension_name == _UUID else plain_type(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if pa.types.is_map(kind):
        return pa.map_(plain_type(kind.key_type), plain_type(kind.item_type))
    if pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_binary_view(kind):
        return pa.binary()
    return kind


def plain_column(column: pa.Array) -> pa.Array:
    """Return a column with a value of its own in each row, so that it weighs what it takes.

    Texts are strings and bytes are binary, whatever type holds them. Bytes of a fixed size stay so: a copy would take
    as much memory again.
    """
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        if kind.extension_name == _UUID:
            return pa.array([value and str(value) for value in column.to_pylist()], pa.string())
        return plain_column(column.storage)
    if pa.types.is_dictionary(kind):
        return plain_column(column.dictionary_decode())
    if pa.types.is_map(kind):
        return _plain_map(column)
    wanted = plain_type(kind)
    return column if wanted == kind else column.cast(wanted)


def _plain_map(column: pa.MapArray) -> pa.MapArray:
    names, values = plain_column(column.keys), plain_column(column.items)
    if (names.type, values.type) == (column.type.key_type, column.type.item_type):
        return column
    kind = pa.map_(names.type, values.type)
    pairs = pa.StructArray.from_arrays([names, values], fields=[kind.key_field, kind.item_field])
    return pa.Array.from_buffers(kind, len(column), column.buffers()[:2], column.null_count, column.offset, [pairs])


def texts(column: pa.Array) -> pa.Array:
    """Return a column of text in UTF-8, or raise Unusual or ArrowInvalid."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if not is_text(column.type):
        raise Unusual
    column.validate(full=True)
    return column


def contents(column: pa.Array) -> pa.Array:
    """Return a column of text or bytes as bytes, or raise Unusual or ArrowInvalid."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if is_binary(column.type):
        return column.cast(pa.binary()) if pa.types.is_fixed_size_binary(column.type) else column
    column = texts(column)
    return column.cast(pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary())


def none_empty(column: pa.Array) -> None:
    """Raise Unusual if a text is empty."""
    if pc.min(pc.binary_length(column)).as_py() == 0:
        raise Unusual


def content(column: pa.Array) -> bytes:
    """Return all bytes of a column of text, one after the other; there must be one row."""
    _, offsets, data = column.buffers()
    bounds = memoryview(offsets).cast("q" if pa.types.is_large_string(column.type) else "i")
    start, end = bounds[column.offset], bounds[column.offset + len(column)]
    return bytes(memoryview(data)[start:end]) if end > start else b""


def microseconds(column: pa.Array, *, naive_is_utc: bool) -> pa.Array:
    """Return a column of times as microseconds since 1970, or raise Unusual or ArrowInvalid."""
    kind = column.type
    if not pa.types.is_timestamp(kind) or (kind.tz is None and not naive_is_utc):
        raise Unusual
    if kind.unit == "ns":
        column = ceil_to_microseconds(column)
    found = column.cast(pa.timestamp("us", tz=kind.tz)).cast(pa.int64())
    in_calendar(found)
    return found


def moments(values: pa.Array) -> list[datetime]:
    """Return the UTC times of microseconds since 1970, without nulls."""
    # NumPy makes the spans in a third of the time; pyarrow may be there without it
    if NUMPY:
        spans = values.view(pa.duration("us")).to_numpy().tolist()
    else:
        spans = map(MICROSECOND.__mul__, values.to_pylist())
    return list(map(EPOCH.__add__, spans))


def in_calendar(moments: pa.Array) -> None:
    """Raise Unusual if microseconds since 1970 lie outside the years 1 to 9999."""
    bounds = pc.min_max(moments).as_py()
    if bounds["min"] is not None and not _FIRST <= bounds["min"] <= bounds["max"] <= _LAST:
        raise Unusual


def delays(column: pa.Array) -> pa.Array:
    """Return a column of seconds as microseconds, fractions rounded up, or raise Unusual or ArrowInvalid."""
    kind = column.type
    whole = pa.types.is_integer(kind)
    if not whole and not (pa.types.is_float32(kind) or pa.types.is_float64(kind)):
        raise Unusual
    seconds = column.cast(pa.int64() if whole else pa.float64())
    # a NaN is not within these bounds either
    if pc.all(pc.and_(pc.greater_equal(seconds, 0), pc.less_equal(seconds, _LONGEST))).as_py() is False:
        raise Unusual
    if whole:
        return pc.multiply(seconds, 1_000_000)
    floor = pc.multiply(seconds, 1e6).cast(pa.int64(), safe=False)
    # as message.delay_of does it, in the same floating point
    short = pc.less(pc.divide(floor.cast(pa.float64()), 1e6), seconds)
    return pc.add(floor, short.cast(pa.int64()))


def ceil_to_microseconds(column: pa.Array) -> Any:
    """Never early: nanoseconds beyond a microsecond count as a whole one."""
    whole = pa.timestamp("us", tz=column.type.tz)
    floor = column.cast(whole, safe=False)
    exact = pc.equal(floor.cast(column.type), column)
    return pc.if_else(exact, floor, pc.add(floor.cast(pa.int64()), 1).cast(whole))


_BINARY = pa.large_binary()


def constant(content: bytes) -> pa.Scalar:
    """Return a piece that is the same for all rows."""
    return pa.scalar(content, _BINARY)


def join(*pieces: Any) -> pa.Array:
    """Join the pieces of each row; null if one of them is."""
    return pc.binary_join_element_wise(*pieces, constant(b""))


def part(kind: bytes, values: pa.Array) -> tuple[Any, ...]:
    """Return the pieces of one part: the letter of its type, its length in 8 bytes, and itself."""
    content = values.cast(_BINARY)
    return constant(kind), _big_endian(pc.binary_length(content)), content


def text_parts(codes: pa.DictionaryArray, after: bytes = b"") -> pa.Array:
    """Return the parts of texts of which few differ, with something after each."""
    parts = [text_part(text) + after for text in codes.dictionary.to_pylist()]
    return pa.array(parts, _BINARY).take(codes.indices)


def number_part(kind: bytes, values: pa.Array) -> tuple[Any, ...]:
    """Return the pieces of a part that is a whole number."""
    return part(kind, values.cast(pa.string()))


def _big_endian(lengths: pa.Array) -> pa.Array:
    # the length of a null does not matter, for its join is null
    lengths = lengths.cast(pa.int64())
    whole = array("q")
    whole.frombytes(memoryview(lengths.buffers()[1])[8 * lengths.offset : 8 * (lengths.offset + len(lengths))])
    if sys.byteorder == "little":
        whole.byteswap()
    return pa.Array.from_buffers(pa.binary(8), len(whole), [None, pa.py_buffer(whole)]).cast(_BINARY)


def entries(headers: pa.MapArray) -> tuple[pa.Array, pa.Array, pa.Array]:
    """Return a map column's names and values, and where each row's begin and end; of a slice only its own rows'."""
    offsets = headers.offsets
    first, last = offsets[0].as_py(), offsets[-1].as_py()
    names, values = (child.slice(first, last - first) for child in (headers.keys, headers.items))
    return names, values, pc.subtract(offsets, offsets[0])


def header_parts(headers: pa.MapArray) -> tuple[Any, ...] | None:
    """Return how many headers each row has, and names and values ordered by name; None: a row has a name twice."""
    names, values, offsets = entries(headers)
    offsets = offsets.cast(pa.int64())
    codes = names.dictionary_encode()
    # the letter of the value's type stands after the name
    pairs = join(text_parts(codes, after=b"s"), *part(b"s", values)[1:])
    known = codes.dictionary.to_pylist()
    rank = {name: place for place, name in enumerate(sorted(known))}
    ranks = pa.array([rank[name] for name in known], pa.int64()).take(codes.indices)
    rows = pc.list_parent_indices(pa.LargeListArray.from_arrays(offsets, names))
    places = pc.add(pc.multiply(rows, len(known)), ranks)
    if not _ascending(places):
        order = pc.array_sort_indices(places)
        if not _ascending(places.take(order)):
            return None
        pairs = pairs.take(order)
    together = pc.binary_join(pa.LargeListArray.from_arrays(offsets, pairs), constant(b""))
    pieces = *number_part(b"n", pc.subtract(offsets[1:], offsets[:-1])), together
    if not headers.null_count:
        return pieces
    # a null may have entries all the same
    return (pc.if_else(headers.is_valid(), join(*pieces), constant(headers_part({}))),)


def _ascending(values: pa.Array) -> bool:
    return len(values) < 2 or bool(pc.all(pc.less(values[:-1], values[1:])).as_py())


def to_batch(records: pa.RecordBatch, file: SourceFile, first_row: int) -> RowBatch:
    """Return a record batch with the columns that the file's folders hold; as Python values when they are asked for."""
    columns = ArrowColumns(records, file.partition)
    return RowBatch(
        columns=columns,
        size=records.num_rows,
        origin=file.name,
        first_row=first_row,
        is_table=True,
        records=records,
        partition=file.partition,
    )


class ArrowColumns(Mapping[str, Sequence[object]]):
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
        # such as a time after the year 9999; the row's problem names it
        return Unreadable(str(value.type))


def _counts(column: pa.MapArray) -> list[int]:
    _, _, offsets = entries(column)
    counts: list[int] = pc.subtract(offsets[1:], offsets[:-1]).to_pylist()
    return counts


class Unreadable:
    """A value that Python has no type for."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __str__(self) -> str:
        return f"{self.kind} out of range"
