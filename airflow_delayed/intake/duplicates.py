"""Detection of ids that occur more than once, within a bounded memory.

A :class:`DuplicateFilter` takes every id, with eight bytes each, and finds the hashes that come more than once. Two ids
may have one hash, so a :class:`DuplicateIndex` takes the rows with these hashes, and tells copies from conflicts.
Either spreads its entries over 256 buckets, which go to temporary files beyond a bound and are read one by one.
"""

from __future__ import annotations

import io
import os
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

from airflow_delayed.intake.files import private

_BUCKETS = 256
_RECORD = 40
#: Records of a bucket in memory at a time.
_BLOCK = 4096
#: Numbers that share a piece of a bitmap.
_PIECE = 4096
_MEMORY = 4 * 1024 * 1024
_Bucket = TypeVar("_Bucket", "array[int]", bytearray)


class _Buckets(Generic[_Bucket]):
    """Buckets of entries, in memory or in temporary files. Close it to remove its files."""

    def __init__(self, buckets: list[_Bucket], most: int) -> None:
        self._buckets: list[_Bucket] = buckets
        self._most = most
        self._count = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def _note(self, count: int) -> None:
        self._count += count
        if self._count > self._most:
            self._spill()

    def _spill(self) -> None:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="delayed-ids-")
        for index, bucket in enumerate(self._buckets):
            with open(self._file(index), "ab", opener=private) as file:
                file.write(bucket)
            del bucket[:]
        self._count = 0

    def _file(self, index: int) -> Path:
        assert self._folder is not None
        return Path(self._folder.name, f"{index:02x}")

    def close(self) -> None:
        """Remove the temporary files."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class DuplicateFilter(_Buckets["array[int]"]):
    """Takes ids, and finds the hashes that come more than once.

    Ids are kept as Python's own hashes of texts: 64 bits that differ from process to process.
    """

    def __init__(self, *, memory: int = _MEMORY) -> None:
        super().__init__([array("q") for _ in range(_BUCKETS)], memory // 8)
        self._take = [bucket.append for bucket in self._buckets]

    def add(self, ids: Iterable[str]) -> None:
        """Take some ids."""
        take = self._take
        count = 0
        for count, value in enumerate(map(hash, ids), 1):  # noqa: B007 - how many there were
            take[value & 255](value)
        self._note(count)

    def repeated(self) -> set[int]:
        """Return the hashes that came more than once; see :func:`hash`."""
        found: set[int] = set()
        for values in self._values():
            if len(set(values)) < len(values):
                found.update(value for value, count in Counter(values).items() if count > 1)
        return found

    def _values(self) -> Iterator[array[int]]:
        for index, bucket in enumerate(self._buckets):
            if self._folder is None:
                yield bucket
            else:
                yield array("q", self._file(index).read_bytes()) + bucket


class RowNumbers(Set[int]):
    """A set of row numbers that takes a bit or two of memory per row at most, and less where they are few."""

    def __init__(self) -> None:
        self._pieces: dict[int, bytearray] = {}
        self._count = 0

    def add(self, number: int) -> None:
        """Add a number that is not in it."""
        piece, bit = divmod(number, _PIECE)
        self._pieces.setdefault(piece, bytearray(_PIECE // 8))[bit >> 3] |= 1 << (bit & 7)
        self._count += 1

    def __contains__(self, number: object) -> bool:
        if not isinstance(number, int):
            return False
        piece, bit = divmod(number, _PIECE)
        return piece in self._pieces and bool(self._pieces[piece][bit >> 3] & 1 << (bit & 7))

    def __iter__(self) -> Iterator[int]:
        for piece in sorted(self._pieces):
            yield from (number for number in range(piece * _PIECE, (piece + 1) * _PIECE) if number in self)

    def __len__(self) -> int:
        return self._count


@dataclass(slots=True)
class Duplicates:
    """Rows with an id that came before."""

    copies: RowNumbers = field(default_factory=RowNumbers)
    conflicts: list[tuple[int, int]] = field(default_factory=list)


class DuplicateIndex(_Buckets[bytearray]):
    """Takes an id, the digest of its content and its row's number, and finds copies and conflicts.

    A bucket is read some records at a time, and only its different ids are kept.
    """

    def __init__(self, *, memory: int = _MEMORY) -> None:
        super().__init__([bytearray() for _ in range(_BUCKETS)], memory)
        # so that nobody can choose ids that all fall into one bucket
        self._secret = os.urandom(16)

    def add(self, message_id: str, digest: bytes, number: int) -> None:
        """Take one row; numbers ascend."""
        key = blake2b(message_id.encode(), digest_size=16, key=self._secret).digest()
        self._buckets[key[0]] += key + digest + number.to_bytes(8, "big")
        self._note(_RECORD)

    def duplicates(self, *, shown: int = 5) -> Duplicates:
        """Return the rows that repeat an id; of equal rows the first is none of them."""
        found = Duplicates()
        for index in range(len(self._buckets)):
            firsts: dict[bytes, tuple[bytes, int]] = {}
            conflicts: dict[bytes, tuple[int, int]] = {}
            for key, content, number in self._records(index):
                known, first = firsts.setdefault(key, (content, number))
                if known != content:
                    conflicts.setdefault(key, (first, number))
            for key, _, number in self._records(index):
                if key not in conflicts and number != firsts[key][1]:
                    found.copies.add(number)
            found.conflicts = sorted([*found.conflicts, *conflicts.values()])[:shown]
        return found

    def _records(self, index: int) -> Iterator[tuple[bytes, bytes, int]]:
        """Yield the ids, contents and numbers of a bucket, in the order of the numbers."""
        if self._folder is not None:
            with open(self._file(index), "rb") as file:
                yield from _records_of(file)
        yield from _records_of(io.BytesIO(self._buckets[index]))


def _records_of(file: BinaryIO) -> Iterator[tuple[bytes, bytes, int]]:
    while block := file.read(_BLOCK * _RECORD):
        for start in range(0, len(block), _RECORD):
            record = block[start : start + _RECORD]
            yield record[:16], record[16:32], int.from_bytes(record[32:], "big")
