"""Counts of rows that were checked by their columns: where they go, and when they are due."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa
import pyarrow.compute as pc

from airflow_delayed.message import from_microseconds

#: Where a moment that no row can have is put: far beyond the year 9999.
_NEVER = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Rows of which only this is looked at; see :class:`airflow_delayed.intake.checked.Checked`."""

    destinations: pa.Array | str
    due_us: pa.Array

    @property
    def size(self) -> int:
        """How many rows."""
        return len(self.due_us)

    @property
    def first_due(self) -> datetime:
        """When the first is due; there must be one."""
        return from_microseconds(pc.min(self.due_us).as_py())

    @property
    def last_due(self) -> datetime:
        """When the last is due; there must be one."""
        return from_microseconds(pc.max(self.due_us).as_py())

    def by_destination(self) -> dict[str, int]:
        """Count the rows of each destination."""
        if isinstance(self.destinations, str):
            return {self.destinations: self.size}
        return {entry["values"]: entry["counts"] for entry in pc.value_counts(self.destinations).to_pylist()}

    def parted(self, moment_us: int) -> tuple[Tally, Tally]:
        """Return the rows due up to a moment, in microseconds since 1970, and those due later."""
        later = pc.greater(self.due_us, min(moment_us, _NEVER))
        return self._where(pc.invert(later)), self._where(later)

    def _where(self, mask: pa.Array) -> Tally:
        destinations = self.destinations
        return Tally(
            destinations=destinations if isinstance(destinations, str) else destinations.filter(mask),
            due_us=self.due_us.filter(mask),
        )

    def total_us(self) -> int:
        """Add up all due times: microseconds since 1970."""
        # by their halves, since the sum of many is more than 64 bits hold
        high = pc.shift_right(self.due_us, 32)
        low = pc.bit_wise_and(self.due_us, (1 << 32) - 1)
        return int(pc.sum(high, min_count=0).as_py() << 32) + int(pc.sum(low, min_count=0).as_py())
