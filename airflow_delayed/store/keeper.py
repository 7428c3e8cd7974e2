"""Holding what is being sent: one thread renews the leases of a dispatcher, however long its brokers take."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Event, Lock, Thread

from airflow_delayed.errors import DelayedError
from airflow_delayed.store.batch import Batch

log = logging.getLogger(__name__)


class Keeper:
    """Renews the leases of batches when a third of their time has passed.

    :param renew: renews one batch, and moves its deadline.
    :param lease: how long a lease is; in seconds.
    """

    def __init__(self, renew: Callable[[Batch], None], lease: float, monotonic: Callable[[], float]) -> None:
        self._renew = renew
        self._lease = lease
        self._monotonic = monotonic
        self._batches: list[Batch] = []
        self._lock = Lock()
        self._stop = Event()
        self._thread: Thread | None = None

    def add(self, batch: Batch) -> None:
        """Keep a batch from now on, until it is closed."""
        with self._lock:
            self._batches = [one for one in self._batches if not one.closed]
            self._batches.append(batch)
            if self._thread is None:
                self._stop.clear()
                self._thread = Thread(target=self._run, name="delayed-leases", daemon=True)
                self._thread.start()

    def renew(self) -> None:
        """Renew what needs it now, but for what is being settled: that would hold up the others."""
        with self._lock:
            batches = list(self._batches)
        for batch in batches:
            if not batch.lock.acquire(blocking=False):
                continue
            try:
                if not batch.closed and not batch.lost and batch.deadline - self._monotonic() <= self._lease * 2 / 3:
                    self._renew(batch)
            except DelayedError as error:
                # sending stops by itself when the lease ends; until then it is tried again
                log.warning("the lease of %s messages could not be renewed: %s", len(batch.rows), error)
            finally:
                batch.lock.release()

    def _run(self) -> None:
        while not self._stop.wait(self._lease / 15):
            self.renew()

    def close(self) -> None:
        """End the thread, and wait for it."""
        self._stop.set()
        thread = self._thread
        if thread is not None:
            thread.join()
        with self._lock:
            self._thread = None
            self._batches = []
