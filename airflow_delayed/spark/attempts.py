"""What attempts at partitions say of themselves while they send, so that what failed ones had sent is known.

Spark tells the driver of the attempt that succeeded, and of no other. Where a folder is given that executors and driver
share, each attempt leaves a file there, written anew every ten seconds and when the attempt fails; one that is killed
leaves what it last wrote.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from airflow_delayed.spark.counts import Counts, total
from airflow_delayed.spark.places import Place

#: Seconds between two files of an attempt.
EVERY = 10.0


class Attempt:
    """The file of one attempt.

    :param name: of the attempt, unlike that of any other.
    """

    def __init__(self, folder: Place, name: str, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._file = folder.child(f"{name}.json")
        self._monotonic = monotonic
        self._next: float | None = None

    def going(self, counts: Counts) -> None:
        """Write the counts if the last time is long ago."""
        now = self._monotonic()
        if self._next is None or now >= self._next:
            self._next = now + EVERY
            self._write(counts, failed=False)

    def failed(self, counts: Counts) -> None:
        """Write the counts of an attempt that ends without success."""
        self._write(counts, failed=True)

    def _write(self, counts: Counts, *, failed: bool) -> None:
        self._file.write({"failed": failed, **counts.to_json()})


class Silent:
    """An attempt that has no place to tell anything."""

    def going(self, counts: Counts) -> None:
        """Do nothing."""

    def failed(self, counts: Counts) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class Lost:
    """What attempts without success had sent.

    :param attempts: how many of them left a file.
    :param exact: whether each told its end; else one was killed, and its counts are the least that it may have sent.
    """

    attempts: int
    counts: Counts
    exact: bool


def lost(folder: Place, successful: Collection[str]) -> Lost:
    """Read what attempts left behind but the successful ones."""
    found = []
    for file in folder.children():
        if file.url.rpartition("/")[2].removesuffix(".json") not in successful:
            found.append(file.read())
    return Lost(len(found), total(map(Counts.from_json, found)), all(one["failed"] for one in found))
