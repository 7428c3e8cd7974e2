"""How far a dispatcher has come in the messages of one connection, which it claims oldest due first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime

from airflow_delayed.store.settling import Row

#: More messages of one due time than that are looked up instead of named.
MOST_PASSED = 1000


@dataclass(slots=True)
class Place:
    """Up to where messages were claimed."""

    #: The due time of the last; None: there was nothing more.
    since: datetime | None = None
    #: By the monotonic clock: when to begin with the oldest again.
    look_again: float = 0.0
    #: The ids that were claimed last of those that are due at ``since``.
    passed: Sequence[str] = ()
    #: The latest due time that was claimed.
    furthest: datetime | None = None
    #: Whether of the messages that are due at ``since`` or later none but ``passed`` was claimed.
    untouched: bool = False

    def went_on(self, rows: Sequence[Row], limit: int) -> None:
        """Note what was claimed from here on, of at most so many."""
        last = rows[-1]["Time"] if rows else None
        before, self.furthest = self.furthest, max(filter(None, (last, self.furthest)), default=None)
        if last is None or len(rows) < limit:
            self.since, self.passed, self.untouched = None, (), False
            return
        ids = [row["Id"] for row in rows if row["Time"] == last]
        if last == self.since:
            self.passed = [*self.passed, *ids]
        else:
            # up to the furthest, this dispatcher itself may hold messages
            self.since, self.passed, self.untouched = last, ids, before is None or last > before
        self.untouched &= len(self.passed) <= MOST_PASSED

    def become(self, other: Place) -> None:
        """Be where another is."""
        for one in fields(self):
            setattr(self, one.name, getattr(other, one.name))
