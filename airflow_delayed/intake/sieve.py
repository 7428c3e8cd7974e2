"""Which ids may come more than once, found with eight bytes a row and a bounded memory.

Ids are noted as Python's own hashes of texts, 64 bits that differ from process to process, in 256 buckets by their last
byte; beyond a bound the buckets go to temporary files. Two ids may have one hash: whether they are alike is told by
:mod:`airflow_delayed.intake.ledger`, to which only what is found here has to be given.
"""

from __future__ import annotations

import tempfile
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from airflow_delayed.intake.private import private

_BUCKETS = 256


class Sieve:
    """Takes ids. Close it to remove its files."""

    def __init__(self, *, memory: int = 4 * 1024 * 1024) -> None:
        self._buckets = [array("q") for _ in range(_BUCKETS)]
        self._take = [bucket.append for bucket in self._buckets]
        self._held = 0
        self._most = memory // 8
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def add(self, ids: Iterable[str]) -> None:
        """Note some ids."""
        take = self._take
        count = 0
        for count, value in enumerate(map(hash, ids), 1):  # noqa: B007 - how many there were
            take[value & 255](value)
        self._held += count
        if self._held > self._most:
            self._spill()

    def _spill(self) -> None:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="delayed-ids-")
        for index, bucket in enumerate(self._buckets):
            with open(self._file(index), "ab", opener=private) as file:
                bucket.tofile(file)
            del bucket[:]
        self._held = 0

    def _file(self, index: int) -> Path:
        assert self._folder is not None
        return Path(self._folder.name, f"{index:02x}")

    def _values(self) -> Iterator[array[int]]:
        for index, bucket in enumerate(self._buckets):
            if self._folder is None:
                yield bucket
            else:
                yield array("q", self._file(index).read_bytes()) + bucket

    def again(self) -> set[int]:
        """Return the hashes that came more than once; see :func:`hash`."""
        found: set[int] = set()
        for values in self._values():
            if len(set(values)) < len(values):
                found.update(value for value, count in Counter(values).items() if count > 1)
        return found

    def close(self) -> None:
        """Remove the temporary files."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
