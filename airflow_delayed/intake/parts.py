"""What :mod:`airflow_delayed.identity` hashes of each row, joined for many rows at once."""

from __future__ import annotations

import sys
from array import array
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from airflow_delayed.identity import headers_part, text_part

_BINARY = pa.large_binary()


def constant(content: bytes) -> pa.Scalar:
    """Return what all rows have alike."""
    return pa.scalar(content, _BINARY)


def join(*pieces: Any) -> pa.Array:
    """Join the pieces of each row; null if one of them is."""
    return pc.binary_join_element_wise(*pieces, constant(b""))


def part(kind: bytes, values: pa.Array) -> tuple[Any, ...]:
    """Return the pieces of one part: the letter of its type, its length in 8 bytes, and itself."""
    content = values.cast(_BINARY)
    return constant(kind), _big_endian(pc.binary_length(content)), content


def text_parts(codes: pa.DictionaryArray, after: bytes = b"") -> pa.Array:
    """Return the parts of texts of which few differ, with something behind each."""
    parts = [text_part(text) + after for text in codes.dictionary.to_pylist()]
    return pa.array(parts, _BINARY).take(codes.indices)


def number_part(kind: bytes, values: pa.Array) -> tuple[Any, ...]:
    """Return the pieces of a part that is a whole number."""
    return part(kind, values.cast(pa.string()))


def _big_endian(lengths: pa.Array) -> pa.Array:
    # of what is null the length does not matter, for its join is null
    lengths = lengths.cast(pa.int64())
    whole = array("q")
    whole.frombytes(memoryview(lengths.buffers()[1])[8 * lengths.offset : 8 * (lengths.offset + len(lengths))])
    if sys.byteorder == "little":
        whole.byteswap()
    return pa.Array.from_buffers(pa.binary(8), len(whole), [None, pa.py_buffer(whole)]).cast(_BINARY)


def entries(headers: pa.MapArray) -> tuple[pa.Array, pa.Array, pa.Array]:
    """Return names, values, and where those of each row begin and end; of a slice its own and no others."""
    offsets = headers.offsets
    first, last = offsets[0].as_py(), offsets[-1].as_py()
    names, values = (child.slice(first, last - first) for child in (headers.keys, headers.items))
    return names, values, pc.subtract(offsets, offsets[0])


def header_parts(headers: pa.MapArray) -> tuple[Any, ...] | None:
    """Return the pieces of each row's headers: how many, then names and values in the order of the names.

    :return: None if a row has a name twice.
    """
    names, values, offsets = entries(headers)
    offsets = offsets.cast(pa.int64())
    codes = names.dictionary_encode()
    # the letter of the value's type stands behind the name
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
