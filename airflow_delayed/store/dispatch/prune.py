"""Forgetting what is over: ids and runs after the policy's time, cancelled messages after their grace.

A dispatcher forgets at least as many ids as it dispatches, so that the table of remembered ids stops growing once the
oldest are old enough. This table has no partitions by day: PostgreSQL requires the day in each unique key of a
partitioned table, so an id would be unique within its day alone, and a late retry would store a new message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import datetime
from typing import Any

from sqlalchemy import Connection

from airflow_delayed.store import cancelled, remembered_ids, runs
from airflow_delayed.store.database import IDS
from airflow_delayed.store.dispatch.limits import Activity
from airflow_delayed.store.dispatch.repository import DispatchRepository
from airflow_delayed.store.schema import Tables

#: Seconds between two allowances, and how many ids each adds to those that the pass dispatches: for ids that no
#: dispatcher had, such as those of cancelled messages and of messages that were sent at once.
ALLOW_EVERY = 60.0
ALLOWANCE = 100 * IDS
#: The most transactions that forget runs of tasks, after each allowance.
RUN_TRANSACTIONS = 20
#: The most transactions that delete cancelled messages, each up to 1000, after each allowance.
BY_TIME_TRANSACTIONS = 100
#: Seconds until the next look at how many were dispatched.
_LOOK_EVERY = 1.0


class Pruner:
    """Forgets in transactions of at most 1000 rows, in a thread of its own.

    It goes on after the workers of a pass have ended, until it has caught up or a message is due, and then in the next
    pass.
    """

    def __init__(self, repository: DispatchRepository) -> None:
        self._repository = repository
        self._allowed_at: float | None = None
        #: How many ids may be forgotten now.
        self._left = 0

    def run(
        self, workers: Sequence[Future[Any]], dispatched: Callable[[], int], nothing_due: Callable[[], bool]
    ) -> int:
        """Forget as many ids as the pass dispatches, and the allowance; return how many."""
        forgotten = counted = 0
        self._allow()
        while not self._repository.stop.is_set():
            ended = not wait(workers, timeout=0).not_done
            before, counted = counted, dispatched()
            self._left += counted - before
            if self._left >= IDS and (not ended or nothing_due()):
                count = self._forget(remembered_ids.forget_old_ids)
                forgotten += count
                # fewer than a transaction may have: no more are old
                self._left = self._left - count if count == IDS else 0
            elif ended:
                break
            else:
                wait(workers, timeout=_LOOK_EVERY)
        return forgotten

    def _allow(self) -> None:
        now = self._repository.monotonic()
        if self._allowed_at is not None and now - self._allowed_at < ALLOW_EVERY:
            return
        self._allowed_at = now
        self._left += ALLOWANCE
        for _ in range(RUN_TRANSACTIONS):
            if self._forget(runs.forget) < runs.RUNS_FORGOTTEN:
                break
        for _ in range(BY_TIME_TRANSACTIONS):
            if self._forget(forget_cancelled) < IDS:
                break

    def _forget(self, forget: Callable[[Connection, Tables, datetime, datetime], int]) -> int:
        repository = self._repository
        return repository.writing(
            Activity.HOUSEKEEPING,
            lambda connection, now: forget(connection, repository.tables, now - repository.policy.remember, now),
        )


def forget_cancelled(connection: Connection, tables: Tables, before: datetime, now: datetime) -> int:
    """Delete up to 1000 cancelled messages that can be restored no longer; return how many."""
    return cancelled.forget(connection, tables, now)
