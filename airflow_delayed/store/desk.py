"""A dispatcher's work in the database: claim, renew, settle, each in a short transaction of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import count
from threading import Event
from typing import TypeVar

from sqlalchemy import Connection, Engine

from airflow_delayed.errors import DelayedError, TopologyError
from airflow_delayed.store import claiming, leases, settling
from airflow_delayed.store.backoff import Pauses
from airflow_delayed.store.batch import Batch
from airflow_delayed.store.breaker import Breaker, RateBreaker
from airflow_delayed.store.clock import CarriedClock
from airflow_delayed.store.engine import database_errors
from airflow_delayed.store.keeper import Keeper
from airflow_delayed.store.policy import DispatchPolicy
from airflow_delayed.store.report import BreakerTripped
from airflow_delayed.store.schema import Tables
from airflow_delayed.store.settling import Verdict
from airflow_delayed.store.tally import Meter

log = logging.getLogger(__name__)

T = TypeVar("T")

#: How long the index is not looked through from its beginning, while there is more than can be claimed at once; in
#: seconds, or ten times as long as that took.
LOOK_AGAIN = 1.0


@dataclass(slots=True)
class Place:
    """Up to where the messages of one connection were claimed."""

    since: datetime | None = None
    look_again: float = 0.0


class Desk:
    """Works for one dispatcher; may be used by several threads.

    :param conn_id: names the store in errors.
    :param dispatcher: begins the name under which each batch is held.
    :param clock: is set by the database's at each claim.
    :param sleep: waits between tries; in seconds.
    :param stop: set when no more is to be claimed and no failure waited for.
    :param meter: is told what became of each batch.
    """

    def __init__(
        self,
        engine: Engine,
        tables: Tables,
        *,
        conn_id: str,
        dispatcher: str,
        policy: DispatchPolicy,
        clock: CarriedClock,
        database_time: Callable[[Connection], datetime],
        sleep: Callable[[float], object],
        monotonic: Callable[[], float],
        stop: Event,
        meter: Meter | None = None,
    ) -> None:
        self.tables = tables
        self.dispatcher = dispatcher
        self.policy = policy
        self.clock = clock
        self.sleep = sleep
        self.monotonic = monotonic
        self.stop = stop
        self.meter = meter
        #: By the monotonic clock; nothing more is claimed then.
        self.claim_until: float | None = None
        self._engine = engine
        self._claims = count(1)
        self._conn_id = conn_id
        self._database_time = database_time
        self._lease = policy.claim_timeout

        def breaker(what: str, limit: timedelta) -> Breaker:
            return Breaker(f"store {conn_id!r}: {what}", limit, monotonic, clock)

        self._store_breaker = breaker(
            "writing down what became of messages", policy.time_to_trigger_store_circuit_breaker
        )
        self._fetch_breaker = breaker("claiming messages", policy.time_to_trigger_fetch_circuit_breaker)
        self.recovery_breaker = RateBreaker(
            f"store {conn_id!r}: noting failures, or sending to the error destination,",
            policy.maximum_recovery_failures_per_second,
            monotonic,
            clock,
        )
        self.keeper = Keeper(self._renew, self._lease.total_seconds(), monotonic)

    @property
    def may_claim(self) -> bool:
        """Whether more may be claimed in this pass."""
        return not self.stop.is_set() and (self.claim_until is None or self.monotonic() < self.claim_until)

    def claim(self, deliver_conn_id: str | None, window: timedelta, limit: int, place: Place) -> Batch | None:
        """Claim messages that are due within the window; None: there is none.

        :raises BreakerTripped: it has failed for too long.
        :raises TopologyError: the store has no table.
        """
        return self.persist(self._fetch_breaker, lambda: self._claim(deliver_conn_id, window, limit, place))

    def _claim(self, deliver_conn_id: str | None, window: timedelta, limit: int, place: Place) -> Batch | None:
        while True:
            began = self.monotonic()
            since = place.since if began < place.look_again else None
            holder = f"{self.dispatcher}.{next(self._claims)}"
            with self.transaction() as connection:
                now = self.now(connection)
                rows = claiming.claim(
                    connection,
                    self.tables,
                    claiming.Wanted(deliver_conn_id=deliver_conn_id, due_by=now + window, since=since, limit=limit),
                    now=now,
                    dispatcher=holder,
                    until=now + self._lease,
                )
            if since is None:
                ended = self.monotonic()
                place.look_again = ended + max(LOOK_AGAIN, 10 * (ended - began))
            place.since = rows[-1]["Time"] if len(rows) == limit else None
            if rows:
                batch = Batch(rows, holder, began + self._lease.total_seconds())
                self.keeper.add(batch)
                return batch
            if since is None:
                return None

    def settle(self, batches: Sequence[Batch]) -> None:
        """Write down what became of batches, each by its verdict, in one transaction: fewer commits, fewer waits.

        :raises BreakerTripped: it has failed for too long. The messages come free when their leases end.
        """
        if not batches:
            return

        def failed(reason: str) -> None:
            if any(batch.verdict is not None and (batch.verdict.again or batch.verdict.failed) for batch in batches):
                self.recovery_breaker.failure(reason)

        self.persist(self._store_breaker, lambda: self._settle(batches), failed)

    def try_to_settle(self, batches: Sequence[Batch]) -> None:
        """Write down what became of batches, if it can be done at once; those without a verdict were not tried."""
        try:
            with database_errors(self._conn_id, self._engine):
                self._settle(batches)
        except DelayedError as error:
            rows = sum(len(batch.rows) for batch in batches)
            log.warning("%s messages come free when their leases end: %s", f"{rows:,}", error)
        finally:
            for batch in batches:
                batch.closed = True

    def _settle(self, batches: Sequence[Batch]) -> None:
        with ExitStack() as locks:
            for batch in batches:
                locks.enter_context(batch.lock)
            try:
                self._write(batches)
            except settling.RowsMoved:
                for row in (row for batch in batches for row in batch.rows):
                    row.pop("ctid", None)
                self._write(batches)
            for batch in batches:
                batch.closed = True

    def _write(self, batches: Sequence[Batch]) -> None:
        with self.transaction() as connection:
            now = self._database_time(connection)
            for batch in batches:
                verdict = batch.verdict or Verdict(untried=list(batch.rows))
                if batch.lost or self.monotonic() >= batch.deadline:
                    verdict = verdict.only(leases.kept(connection, self.tables, batch.rows, batch.holder))
                settling.settle(connection, self.tables, verdict, batch.holder, now)

    def _renew(self, batch: Batch) -> None:
        began = self.monotonic()
        with database_errors(self._conn_id, self._engine), self.transaction() as connection:
            now = self._database_time(connection)
            until = now + self._lease
            renewed = leases.renew(connection, self.tables, batch.ids, batch.holder, until, now)
        if renewed < len(batch.rows):
            batch.lost = True
        else:
            batch.deadline = began + self._lease.total_seconds()

    def transaction(self) -> AbstractContextManager[Connection]:
        """Begin a transaction."""
        return self._engine.begin()

    def now(self, connection: Connection) -> datetime:
        """Return the database's time, and set the clock by it."""
        now = self._database_time(connection)
        self.clock.set(now)
        return now

    def reading(self, work: Callable[[Connection, datetime], T]) -> T:
        """Read something; tried again as a claim is."""

        def read() -> T:
            with self._engine.connect().execution_options(read_only=True) as connection:
                return work(connection, self.now(connection))

        return self.persist(self._fetch_breaker, read)

    def writing(self, work: Callable[[Connection, datetime], T]) -> T:
        """Write something in one transaction; tried again until the breaker of writing trips."""

        def write() -> T:
            with self.transaction() as connection:
                return work(connection, self.now(connection))

        return self.persist(self._store_breaker, write)

    def try_to_write(self, work: Callable[[Connection, datetime], object]) -> None:
        """Write something, if it can be done at once."""
        try:
            with database_errors(self._conn_id, self._engine), self.transaction() as connection:
                work(connection, self.now(connection))
        except DelayedError as error:
            log.warning("%s", error)

    def persist(self, breaker: Breaker, work: Callable[[], T], failed: Callable[[str], object] | None = None) -> T:
        """Do some work, and do it again after growing pauses until its breaker trips.

        :param failed: is told each failure.
        :raises BreakerTripped: it has failed for too long.
        """
        pauses = Pauses()
        while True:
            try:
                with database_errors(self._conn_id, self._engine, self.tables.messages):
                    done = work()
            except TopologyError:
                raise
            except DelayedError as error:
                if failed is not None:
                    failed(str(error))
                if breaker.failure(str(error)) or self.stop.is_set():
                    raise BreakerTripped(str(breaker)) from error
                log.warning("%s; it is tried again", error)
                self.sleep(min(pauses.next(), breaker.remaining))
            else:
                breaker.success()
                return done
