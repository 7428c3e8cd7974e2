"""Claimed batches, and the thread that renews their leases."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock

from airflow_delayed.errors import DelayedError
from airflow_delayed.store.dispatch.settle import BatchOutcome, Row
from airflow_delayed.threads import Ticker

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class ClaimedBatch:
    """Claimed rows, leased by this dispatcher until a deadline unless their lease is renewed.

    A :class:`airflow_delayed.store.dispatch.worker.ConnectionWorker` sends in one thread, and settles and claims in a
    second one; while the second one has nothing to do, the first may settle and claim too, and it settles what it has
    sent while a claim takes long. Which thread writes a field:

    - ``rows``, ``holder``: the thread that claims, before another thread has the batch. (The thread that
      settles removes ``ctid`` from rows that were moved, under ``lock``.)
    - ``outcome``: the thread that sends, before the batch is settled.
    - ``deadline``, ``lease_lost``: the thread of the :class:`LeaseRenewer`, under ``lock``. The thread that sends
      reads them without it, and looks again every :data:`airflow_delayed.store.dispatch.worker.CHECK_SECONDS`.
    - ``doubt``, ``finished``: the thread that settles, under ``lock``. Others read ``finished`` without it.

    :param holder: the name under which the rows are leased, of this claim alone: the same dispatcher may claim a row
        again whose lease has ended.
    :param deadline: by this machine's monotonic clock.
    """

    rows: Sequence[Row]
    holder: str
    deadline: float
    #: For renewing the lease and for settling, so that the two do not meet in the database.
    lock: Lock = field(default_factory=Lock)
    #: The lease of a row has ended: another dispatcher may have claimed it, or a change removed it.
    lease_lost: bool = False
    #: Settling failed, or was committed and the database's answer was lost.
    doubt: bool = False
    #: The outcomes of the rows; None: none of them was tried.
    outcome: BatchOutcome | None = None
    #: The batch is settled, or its leases are left to end: nothing is done with it any more.
    finished: bool = False

    @property
    def ids(self) -> list[str]:
        """The messages' ids."""
        return [row["Id"] for row in self.rows]


class LeaseRenewer:
    """Renews the leases of batches in one thread, each after a third of its time, however long a send takes.

    :param renew: renews the leases of one batch, and moves its deadline.
    :param lease: the length of a lease, in seconds.
    """

    def __init__(self, renew: Callable[[ClaimedBatch], None], lease: float, monotonic: Callable[[], float]) -> None:
        self._renew = renew
        self._lease = lease
        self._monotonic = monotonic
        self._batches: list[ClaimedBatch] = []
        self._lock = Lock()
        self._ticker: Ticker | None = None

    def add(self, batch: ClaimedBatch) -> None:
        """Renew a batch from now on, until it is finished."""
        with self._lock:
            self._batches = [other for other in self._batches if not other.finished]
            self._batches.append(batch)
            if self._ticker is None:
                self._ticker = Ticker("delayed-leases", self._lease / 15, self.renew)

    @property
    def rows(self) -> int:
        """How many rows are leased."""
        with self._lock:
            return sum(len(batch.rows) for batch in self._batches if not batch.finished)

    def renew(self) -> None:
        """Renew the batches that need it now, except a batch that is being settled: it would hold up the others."""
        with self._lock:
            batches = list(self._batches)
        for batch in batches:
            if not batch.lock.acquire(blocking=False):
                continue
            try:
                ends = batch.deadline - self._monotonic() <= self._lease * 2 / 3
                if ends and not batch.finished and not batch.lease_lost:
                    self._renew(batch)
            except DelayedError as error:
                # sending stops before the lease ends; until then renewing is tried again
                log.warning("the lease of %s messages could not be renewed: %s", len(batch.rows), error)
            finally:
                batch.lock.release()

    def close(self) -> None:
        """End the thread, and wait for it."""
        ticker = self._ticker
        if ticker is not None:
            ticker.close()
        with self._lock:
            self._ticker = None
            self._batches = []
