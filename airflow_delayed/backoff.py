"""How long to sleep before something that failed is tried again."""

from __future__ import annotations

from collections.abc import Callable
from random import random

#: Doublings of a first sleep: more change nothing below any longest one, and would overflow.
_DOUBLINGS = 60


def next_sleep(failures: int, *, first: float, longest: float, chance: Callable[[], float] = random) -> float:
    """Return the seconds to sleep after so many failures in a row: doubled each time, up to half left out by chance.

    Without the part of chance, all that failed together would be tried together for ever.

    :param failures: 1 or more.
    :param chance: returns a number from 0 to less than 1.
    """
    full: float = min(longest, first * 2 ** max(0, min(failures - 1, _DOUBLINGS)))
    return full - full * chance() / 2


class Backoff:
    """The growing sleeps of one thing that fails and is tried again."""

    def __init__(self, first: float = 0.5, longest: float = 5.0) -> None:
        self._first = first
        self._longest = longest
        self._failures = 0

    def next(self) -> float:
        """Count a failure, and return the seconds to sleep."""
        self._failures += 1
        return next_sleep(self._failures, first=self._first, longest=self._longest)

    def reset(self) -> None:
        """Begin with the shortest sleep again: it worked."""
        self._failures = 0
