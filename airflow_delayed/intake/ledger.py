"""Which ids come more than once, found without keeping them all in memory.

Every row leaves a record of 40 bytes (its id, its content, its number) in one of 256 buckets by the first byte of the
id's hash; beyond a bound the buckets go to temporary files. Afterwards each bucket is read by itself, some records at a
time: what is kept of it are its different ids, so that it does not matter how many rows have one id.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from airflow_delayed.intake.private import private

_RECORD = 40
#: Records of a bucket in memory at a time.
_BLOCK = 4096
#: Numbers that share a piece of a bitmap.
_PIECE = 4096


class Numbers(Set[int]):
    """A set of numbers of rows that takes at most a bit or two of each row, and less where they are few."""

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
class Repeats:
    """What comes again.

    :param copies: numbers of rows whose id and content came before.
    :param conflicts: pairs of numbers of rows with one id and different content; the first few.
    """

    copies: Numbers = field(default_factory=Numbers)
    conflicts: list[tuple[int, int]] = field(default_factory=list)


class Ledger:
    """Takes an id, the digest of its content and its row's number. Close it to remove its files."""

    def __init__(self, *, memory: int = 4 * 1024 * 1024) -> None:
        self._buckets = [bytearray() for _ in range(256)]
        # so that nobody can choose ids that all fall into one bucket
        self._secret = os.urandom(16)
        self._held = 0
        self._memory = memory
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def add(self, message_id: str, digest: bytes, number: int) -> None:
        """Note one row; numbers ascend."""
        key = blake2b(message_id.encode(), digest_size=16, key=self._secret).digest()
        self._buckets[key[0]] += key + digest + number.to_bytes(8, "big")
        self._held += _RECORD
        if self._held > self._memory:
            self._spill()

    def _spill(self) -> None:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="delayed-ids-")
        for index, bucket in enumerate(self._buckets):
            with open(self._file(index), "ab", opener=private) as file:
                file.write(bucket)
            bucket.clear()
        self._held = 0

    def _file(self, index: int) -> Path:
        assert self._folder is not None
        return Path(self._folder.name, f"{index:02x}")

    def _records(self, index: int) -> Iterator[tuple[bytes, bytes, int]]:
        """Yield the ids, contents and numbers of a bucket, in the order of the numbers."""
        bucket = io.BytesIO(self._buckets[index])
        with bucket if self._folder is None else open(self._file(index), "rb") as first:
            for file in (first,) if first is bucket else (first, bucket):
                while block := file.read(_BLOCK * _RECORD):
                    for start in range(0, len(block), _RECORD):
                        record = block[start : start + _RECORD]
                        yield record[:16], record[16:32], int.from_bytes(record[32:], "big")

    def repeats(self, *, shown: int = 5) -> Repeats:
        """Return the rows that repeat an id; of equal rows the first stays."""
        found = Repeats()
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

    def close(self) -> None:
        """Remove the temporary files."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
