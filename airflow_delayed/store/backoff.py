"""How long to wait before something is tried again."""

from __future__ import annotations

from datetime import timedelta
from random import random

FIRST = timedelta(seconds=1)
LONGEST = timedelta(minutes=5)


def pause(failures: int, chance: float, *, first: timedelta = FIRST, longest: timedelta = LONGEST) -> timedelta:
    """Return the pause after so many failures in a row: doubled each time, and up to half of it left out by chance.

    Without the part of chance, all that failed together would be tried together for ever.

    :param failures: 1 or more.
    :param chance: from 0 to less than 1.
    """
    # more doublings than lead to the longest pause change nothing, and would overflow
    doublings = max(0, min(failures - 1, (longest // first).bit_length())) if first else 0
    full: timedelta = min(longest, first * 2**doublings)
    return full - full * chance / 2


class Pauses:
    """The growing pauses of one thing that fails and is tried again, in seconds."""

    def __init__(self, first: float = 0.5, longest: float = 5.0) -> None:
        self._first = timedelta(seconds=first)
        self._longest = timedelta(seconds=longest)
        self._failures = 0

    def next(self) -> float:
        """Return the next pause."""
        self._failures += 1
        return pause(self._failures, random(), first=self._first, longest=self._longest).total_seconds()  # noqa: S311 - nothing secret; so that those who wait do not come back together

    def over(self) -> None:
        """Begin with the shortest pause again: it worked."""
        self._failures = 0
