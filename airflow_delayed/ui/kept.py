"""Figures that cost something, kept for a while and made once for all who ask. No web framework here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import Generic, TypeVar

T = TypeVar("T")

#: Seconds that figures are kept at least.
KEPT = 5.0
#: Figures are kept for so many times as long as they took, so that the making of them takes a tenth of all time.
TIMES = 9


@dataclass(slots=True)
class _Entry(Generic[T]):
    lock: Lock = field(default_factory=Lock)
    value: T | None = None
    made_at: float = 0.0
    good_until: float = float("-inf")


class Kept(Generic[T]):
    """Figures by name."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = Lock()
        self._entries: dict[str, _Entry[T]] = {}

    def get(self, name: str, make: Callable[[], T]) -> tuple[T, float]:
        """Return the figures and their age in seconds. Who asks while they are made waits for them."""
        with self._lock:
            entry = self._entries.setdefault(name, _Entry())
        with entry.lock:
            began = self._monotonic()
            if entry.value is None or began >= entry.good_until:
                entry.value = make()
                entry.made_at = self._monotonic()
                entry.good_until = entry.made_at + max(KEPT, TIMES * (entry.made_at - began))
            return entry.value, self._monotonic() - entry.made_at

    def forget(self, name: str) -> None:
        """Have figures made anew for the next who asks."""
        with self._lock:
            self._entries.pop(name, None)
