"""Figures that cost something, kept for a while. No web framework here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: Seconds that figures are kept at least.
KEPT = 5.0
#: Figures are kept for so many times as long as they took, so that the making of them takes a tenth of all time.
TIMES = 9


@dataclass(frozen=True, slots=True)
class _Entry:
    value: Any
    made_at: float
    good_until: float


class Kept:
    """Figures by name."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._entries: dict[str, _Entry] = {}
        self._turns: dict[str, int] = {}

    def turn(self, name: str) -> int:
        """Return how often figures have been forgotten."""
        return self._turns.get(name, 0)

    def find(self, name: str) -> tuple[Any, float] | None:
        """Return figures that are not too old, and their age in seconds."""
        entry = self._entries.get(name)
        now = self._monotonic()
        return None if entry is None or now >= entry.good_until else (entry.value, now - entry.made_at)

    def make(self, name: str, make: Callable[[], Any]) -> Any:
        """Make figures, keep them unless they are forgotten meanwhile, and return them."""
        turn = self.turn(name)
        began = self._monotonic()
        value = make()
        now = self._monotonic()
        if turn == self.turn(name):
            self._entries[name] = _Entry(value, now, now + max(KEPT, TIMES * (now - began)))
        return value

    def forget(self, name: str) -> None:
        """Have figures made anew for the next who asks."""
        self._turns[name] = self.turn(name) + 1
        self._entries.pop(name, None)
