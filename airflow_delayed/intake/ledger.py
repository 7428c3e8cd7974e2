"""Which ids come more than once, found without keeping them all in memory.

Every row leaves a record of 40 bytes (its id, its content, its number) in one of 256 buckets by the first byte of the
id; beyond a bound the buckets go to temporary files. Afterwards each bucket is sorted by itself.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from airflow_delayed.intake.private import private

_RECORD = 40


@dataclass(slots=True)
class Repeats:
    """What comes again.

    :param copies: numbers of rows whose id and content came before.
    :param conflicts: pairs of numbers of rows with one id and different content; the first few.
    """

    copies: set[int] = field(default_factory=set)
    conflicts: list[tuple[int, int]] = field(default_factory=list)


class Ledger:
    """Takes an id, the digest of its content and its row's number. Close it to remove its files."""

    def __init__(self, *, memory: int = 4 * 1024 * 1024) -> None:
        self._buckets = [bytearray() for _ in range(256)]
        self._held = 0
        self._memory = memory
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def add(self, message_id: str, digest: bytes, number: int) -> None:
        """Note one row."""
        key = blake2b(message_id.encode(), digest_size=16).digest()
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

    def _records(self) -> Iterator[list[bytes]]:
        for index, bucket in enumerate(self._buckets):
            data = bytes(bucket)
            if self._folder is not None:
                data = self._file(index).read_bytes() + data
            yield sorted(data[start : start + _RECORD] for start in range(0, len(data), _RECORD))

    def repeats(self, *, shown: int = 5) -> Repeats:
        """Return the rows that repeat an id; of equal rows the first stays."""
        found = Repeats()
        for records in self._records():
            start = 0
            for end in range(1, len(records) + 1):
                if end < len(records) and records[end][:16] == records[start][:16]:
                    continue
                if end - start > 1:
                    _judge(records[start:end], found, shown)
                start = end
        return found

    def close(self) -> None:
        """Remove the temporary files."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _judge(group: list[bytes], found: Repeats, shown: int) -> None:
    first_of: dict[bytes, int] = {}
    numbers = sorted((int.from_bytes(record[32:], "big"), record[16:32]) for record in group)
    for number, content in numbers:
        first_of.setdefault(content, number)
    if len(first_of) == 1:
        found.copies.update(number for number, _ in numbers[1:])
    elif len(found.conflicts) < shown:
        one, other, *_ = first_of.values()
        found.conflicts.append((one, other))
