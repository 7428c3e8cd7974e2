"""A dispatcher's work in the database: settle and claim, and renew, each in a short transaction of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import count
from math import inf
from threading import Event
from typing import TypeVar

from sqlalchemy import Connection, Engine

from airflow_delayed.backoff import Backoff
from airflow_delayed.errors import DelayedError, TopologyError
from airflow_delayed.store import claiming, leases, settling
from airflow_delayed.store.batch import Batch
from airflow_delayed.store.breaker import Breaker, RateBreaker
from airflow_delayed.store.clock import CarriedClock
from airflow_delayed.store.engine import database_errors
from airflow_delayed.store.keeper import Keeper
from airflow_delayed.store.place import Place
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
#: After another dispatcher has claimed the same messages, how long it is thought to be there; in seconds.
OTHERS_STAY = 10.0


@dataclass(frozen=True, slots=True)
class Claim:
    """What a dispatcher would like to claim: what is due within the window, from a place on."""

    deliver_conn_id: str | None
    window: timedelta
    limit: int
    place: Place


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
        #: By the monotonic clock; until then another dispatcher is thought to claim beside this one.
        self._others_until = -inf
        #: That settling and claiming failed together is told once; it may come often where many dispatch.
        self._told = False

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

    def claim(self, wanted: Claim, sent: Sequence[Batch] = ()) -> list[Batch]:
        """Settle what was sent, and claim messages, in one transaction, which saves a commit and its wait.

        If that fails, each is done for itself.

        :return: batches of the policy's size, together no more than wanted; none: there is nothing.
        :raises BreakerTripped: one of them has failed for too long.
        :raises TopologyError: the store has no table.
        """
        if sent:
            try:
                with database_errors(self._conn_id, self._engine):
                    claimed = self._settle(sent, wanted)
            except DelayedError as error:
                # which of the two failed, and for how long, is told by each
                level = logging.DEBUG if self._told else logging.WARNING
                log.log(level, "%s; settling and claiming are tried again, each for itself", error)
                self._told = True
            else:
                self._store_breaker.success()
                self._fetch_breaker.success()
                return claimed
            self.settle(sent)
        return self.persist(self._fetch_breaker, lambda: self._settle((), wanted))

    def settle(self, batches: Sequence[Batch]) -> None:
        """Write down what became of batches, each by its verdict, in one transaction: fewer commits, fewer waits.

        :raises BreakerTripped: it has failed for too long. The messages come free when their leases end.
        """
        if batches:
            self.persist(
                self._store_breaker,
                lambda: self._settle(batches),
                lambda reason: self._not_settled(batches, reason),
            )

    def _not_settled(self, batches: Sequence[Batch], reason: str) -> None:
        if any(batch.verdict is not None and (batch.verdict.again or batch.verdict.failed) for batch in batches):
            self.recovery_breaker.failure(reason)

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

    def _settle(self, batches: Sequence[Batch], wanted: Claim | None = None) -> list[Batch]:
        with ExitStack() as locks:
            for batch in batches:
                locks.enter_context(batch.lock)
            while True:
                try:
                    claimed = self._write(batches, wanted)
                except settling.RowsMoved:
                    for row in (row for batch in batches for row in batch.rows):
                        row.pop("ctid", None)
                except claiming.NotAlone:
                    self._others_until = self.monotonic() + OTHERS_STAY
                except BaseException:
                    for batch in batches:
                        batch.doubt = True
                    raise
                else:
                    break
            for batch in batches:
                batch.closed = True
        for batch in claimed:
            self.keeper.add(batch)
        return claimed

    def _write(self, batches: Sequence[Batch], wanted: Claim | None) -> list[Batch]:
        """Settle and claim in one transaction."""
        began = self.monotonic()
        with self.transaction() as connection:
            now = self.now(connection)
            for batch in batches:
                verdict = batch.verdict or Verdict(untried=list(batch.rows))
                if batch.doubt or batch.lost or self.monotonic() >= batch.deadline:
                    # of what was settled before nothing is held any more
                    verdict = verdict.only(leases.kept(connection, self.tables, batch.rows, batch.holder))
                settling.settle(connection, self.tables, verdict, batch.holder, now)
            if wanted is None:
                return []
            place = replace(wanted.place)
            claimed = self._claim(connection, now, wanted, place, began + self._lease.total_seconds())
        wanted.place.become(place)
        return claimed

    def _claim(
        self, connection: Connection, now: datetime, wanted: Claim, place: Place, deadline: float
    ) -> list[Batch]:
        claimed: list[Batch] = []
        left, size = wanted.limit, 0
        while left > 0 and size < claiming.MOST_BYTES and self.may_claim:
            began = self.monotonic()
            since = place.since if began < place.look_again else None
            limit = min(left, self.policy.batch_size)
            holder = f"{self.dispatcher}.{next(self._claims)}"
            rows = claiming.claim(
                connection,
                self.tables,
                claiming.Wanted(
                    deliver_conn_id=wanted.deliver_conn_id,
                    due_by=now + wanted.window,
                    limit=limit,
                    most_bytes=claiming.MOST_BYTES - size,
                    since=since,
                    alone=since is not None and place.untouched and began >= self._others_until,
                    passed=place.passed,
                ),
                now=now,
                dispatcher=holder,
                until=now + self._lease,
            )
            if since is None:
                ended = self.monotonic()
                place.look_again = ended + max(LOOK_AGAIN, 10 * (ended - began))
            place.went_on(rows, limit)
            if rows:
                claimed.append(Batch(rows, holder, deadline))
                left -= len(rows)
                size += sum(map(claiming.size_of, rows))
            if len(rows) < limit and (rows or since is None):
                break
        return claimed

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
        backoff = Backoff()
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
                self.sleep(min(backoff.next(), breaker.remaining))
            else:
                breaker.success()
                return done
