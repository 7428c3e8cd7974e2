"""Messages that a dispatcher holds for a while."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from threading import Lock

from airflow_delayed.store.settling import Row, Verdict

#: How long a batch may be lost without being noticed; in seconds. A lease is renewed long before it ends.
LOOK_SECONDS = 0.05


@dataclass(slots=True, eq=False)
class Batch:
    """Claimed rows, held until ``deadline`` by this machine's monotonic clock unless their lease is renewed."""

    rows: Sequence[Row]
    #: Under which name they are held, unlike that of any other claim: the same dispatcher may claim a row anew whose
    #: lease has ended.
    holder: str
    deadline: float
    #: Kept while the lease is renewed or given up, so that the two do not meet in the database.
    lock: Lock = field(default_factory=Lock)
    #: Others may have taken some of the rows.
    lost: bool = False
    #: Writing down the verdict failed, and yet it may be there: the database's answer to a commit can be lost.
    doubt: bool = False
    #: What becomes of the rows, as soon as that is known.
    verdict: Verdict | None = None
    #: The rows are held no longer.
    closed: bool = False

    @property
    def ids(self) -> list[str]:
        """The messages' ids."""
        return [row["Id"] for row in self.rows]


class Held:
    """Says whether a dispatcher surely still holds the batches that it is sending.

    :param margin: seconds before the end of a lease in which nothing more is sent.
    """

    def __init__(self, batches: Sequence[Batch], margin: float, monotonic: Callable[[], float]) -> None:
        self._batches = batches
        self._margin = margin
        self._monotonic = monotonic
        self._sure_until = -inf

    def __bool__(self) -> bool:
        now = self._monotonic()
        # asked before each message, so it is not looked at each batch every time
        if now >= self._sure_until:
            ends = min((batch.deadline for batch in self._batches), default=now) - self._margin
            if now >= ends or any(batch.lost for batch in self._batches):
                return False
            self._sure_until = min(ends, now + LOOK_SECONDS)
        return True
