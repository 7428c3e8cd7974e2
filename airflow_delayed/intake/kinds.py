"""Columns of Arrow as texts, bytes, times and delays, each checked as a whole."""

from __future__ import annotations

from datetime import datetime
from importlib.util import find_spec
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from airflow_delayed import message
from airflow_delayed.message import EPOCH, MICROSECOND, UTC

NUMPY = find_spec("numpy") is not None
#: The first and the last microsecond that Python has a time for.
_FIRST = message.microseconds(datetime.min.replace(tzinfo=UTC))
_LAST = message.microseconds(datetime.max.replace(tzinfo=UTC))
#: Longest delay in seconds that is reckoned here, 285 years: its microseconds are exact in floating point.
_LONGEST = 9_000_000_000


class Unusual(Exception):
    """A column has something that is to be looked at row by row."""


def is_text(kind: pa.DataType) -> bool:
    """Return whether a type is text."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_binary(kind: pa.DataType) -> bool:
    """Return whether a type is bytes."""
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


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
        return column
    column = texts(column)
    return column.cast(pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary())


def none_empty(column: pa.Array) -> None:
    """Raise Unusual if a text is empty."""
    if pc.min(pc.binary_length(column)).as_py() == 0:
        raise Unusual


def content(column: pa.Array) -> bytes:
    """Return all bytes of a column of text, one behind the other; there must be one row."""
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
    # what is no number is not within these bounds either
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
