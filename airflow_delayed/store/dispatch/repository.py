"""All work of a dispatcher in the store's database: claim, renew and settle, each in a short transaction."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import count
from math import inf
from threading import Event
from typing import TypeVar

from sqlalchemy import Connection, Engine

from airflow_delayed.clock import Backoff
from airflow_delayed.errors import DelayedError, TopologyError
from airflow_delayed.store import remembered_ids
from airflow_delayed.store.dialects import dialect_of
from airflow_delayed.store.dispatch import claim, settle
from airflow_delayed.store.dispatch.limits import Activity, Breaker, RateBreaker, RateLimit
from airflow_delayed.store.dispatch.renewal import ClaimedBatch, LeaseRenewer
from airflow_delayed.store.dispatch.report import BreakerTripped, Trouble, TroubleKind
from airflow_delayed.store.dispatch.settle import BatchOutcome, Row
from airflow_delayed.store.dispatch.turns import ClaimRound, ClaimTurns, next_claim
from airflow_delayed.store.engine import CarriedClock, database_errors, watched
from airflow_delayed.store.pauses import PauseReader
from airflow_delayed.store.policy import DispatchPolicy
from airflow_delayed.store.schema import Tables

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds between two claims that begin with the oldest message, while claims find all they may take; at least so many
#: times as long as such a claim took; and while destinations rest, whose messages each such claim reads.
RESTART_AFTER = 1.0
_PAUSE, RESTING_PAUSE = 10, 200
#: Seconds between two questions to the database while nothing may be claimed.
_ASK_EVERY = 10.0
#: Seconds for which a dispatcher reports that it lost leases.
LOSS_REPORTED = 600.0
#: Seconds for which another dispatcher is expected beside this one, after it has claimed the same messages.
OTHERS_STAY = 10.0


#: For a transaction that claims nothing.
_NO_TURNS = ClaimTurns(cursors=())


class DispatchRepository:
    """The SQL of one dispatcher; several threads may use it.

    :param dispatcher: the beginning of the name under which each batch is leased.
    :param clock: set to the database's time at each claim.
    :param stop: when it is set, nothing more is claimed, and a failure is not tried again.
    :param rate: limits the messages a second together with other dispatchers; None: the policy's ``max_rate`` does.
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
        rate: RateLimit | None = None,
    ) -> None:
        self.tables = tables
        self.policy = policy
        self.clock = clock
        self.sleep = sleep
        self.monotonic = monotonic
        self.stop = stop
        self.rate = rate or RateLimit(policy.max_rate, monotonic)
        self.dispatcher = dispatcher
        self._engine = engine
        #: When claiming last worked, whether or not there was a message; by the monotonic clock.
        self.claimed_at: float | None = None
        #: When the database last did anything that was asked for; by the monotonic clock.
        self.answered_at: float | None = None
        #: By the monotonic clock; nothing more is claimed then.
        self._claim_until: float | None = None
        self._claims = count(1)
        self._conn_id = conn_id
        self._database_time = database_time
        self._lease = policy.claim_timeout
        #: By the monotonic clock; until then another dispatcher is expected beside this one.
        self._others_until = -inf
        #: Settling and claiming together has failed; only the first time is a warning, because it may happen often
        #: beside many other dispatchers.
        self._warned = False

        self._breakers = {
            activity: Breaker(f"store {conn_id!r}: {activity.value}", activity.limit(policy), monotonic, clock)
            for activity in Activity
        }
        #: The last loss of leases, for the sign of life, and until when it is reported.
        self._leases_lost: Trouble | None = None
        self._lost_until = -inf
        #: When this dispatcher last claimed, settled or delivered messages, by the database's clock.
        self.worked_at: datetime | None = None
        self.recovery_breaker = RateBreaker(
            f"store {conn_id!r}: noting failures, or sending to the error destination,",
            policy.maximum_recovery_failures_per_second,
            monotonic,
            clock,
        )
        self.pauses = PauseReader(tables, monotonic)
        self._renewer = LeaseRenewer(self._renew, self._lease.total_seconds(), monotonic)
        self._watchdog = watched(engine)

    def close(self) -> None:
        """End the renewal of leases, and the watchdog."""
        self._renewer.close()
        self._watchdog.close()

    def troubles(self) -> list[Trouble]:
        """Return what fails now in the database, at most one trouble."""
        for breaker in self._breakers.values():
            if (since := breaker.failing_since) is not None:
                return [Trouble(kind=TroubleKind.DATABASE, since=since, reason=str(breaker))]
        if (unanswered := self._watchdog.unanswered()) is not None:
            what, seconds = unanswered
            reason = f"{what} has had no answer from the database"
            since = self.clock() - timedelta(seconds=seconds)
            return [Trouble(kind=TroubleKind.DATABASE, since=since, reason=reason)]
        if self._leases_lost is not None and self.monotonic() < self._lost_until:
            return [self._leases_lost]
        return []

    @contextmanager
    def _answered(self, what: str, tables: Tables | None = None) -> Iterator[None]:
        """Turn the driver's errors into those of this package, and an answer that never comes into such an error."""
        with (
            self._watchdog.watch(f"store {self._conn_id!r}: {what}"),
            database_errors(self._conn_id, self._engine, tables),
        ):
            yield

    @property
    def in_flight(self) -> int:
        """How many messages this dispatcher has leased; from any thread."""
        return self._renewer.rows

    def begin_pass(self, longest: float | None) -> None:
        """Allow claims, for at most so many seconds."""
        self._claim_until = None if longest is None else self.monotonic() + longest

    @property
    def may_claim(self) -> bool:
        """Whether more may be claimed in this pass."""
        over = self._claim_until is not None and self.monotonic() >= self._claim_until
        return not (over or self.stop.is_set())

    def allowed(self, most: int) -> int:
        """Wait until the process's rate lets at least one message be claimed, and take its tokens, up to ``most``.

        It asks the database every 10 s meanwhile. So :attr:`claimed_at` and :attr:`answered_at` show that the
        dispatcher works, however slow its rate is.

        :return: how many messages may be claimed; 0: the pass is over.
        """
        while self.may_claim:
            if taken := self.rate.take(most):
                return taken
            if self.claimed_at is None or self.monotonic() - self.claimed_at >= _ASK_EVERY:
                self.reading(lambda connection, now: None)
            left = inf if self._claim_until is None else self._claim_until - self.monotonic()
            self.sleep(max(0.0, min(self.rate.wait, left, _ASK_EVERY)))
        return 0

    def settle_and_claim(
        self, sent: Sequence[ClaimedBatch], turns: ClaimTurns, limit: int
    ) -> tuple[list[ClaimedBatch], ClaimTurns]:
        """Settle batches that were sent, and claim messages, in one transaction, which saves a commit and its wait.

        If that fails, each is done in a transaction of its own.

        :return: batches of the policy's size, none if nothing is due; and the turns for the next claim.
        """
        if sent:
            try:
                with self._answered(f"{Activity.SETTLE.value} and {Activity.CLAIM.value}"):
                    claimed = self._transact(sent, turns, limit)
            except DelayedError as error:
                # which of the two failed, and for how long, is logged by each
                level = logging.DEBUG if self._warned else logging.WARNING
                log.log(level, "%s; settling and claiming are tried again, each for itself", error)
                self._warned = True
            else:
                self._succeeded(Activity.SETTLE)
                self._succeeded(Activity.CLAIM)
                return claimed
            self.settle(sent)
        return self._persist(Activity.CLAIM, lambda: self._transact((), turns, limit))

    def settle(self, batches: Sequence[ClaimedBatch]) -> None:
        """Write the outcomes of batches, in one transaction for all, which saves commits and their waits."""
        if batches:
            self._persist(
                Activity.SETTLE,
                lambda: self._transact(batches),
                lambda reason: self._not_settled(batches, reason),
            )

    def _not_settled(self, batches: Sequence[ClaimedBatch], reason: str) -> None:
        if any(batch.outcome is not None and (batch.outcome.retry or batch.outcome.failed) for batch in batches):
            self.recovery_breaker.failure(reason)

    def try_to_settle(self, batches: Sequence[ClaimedBatch]) -> bool:
        """Try once to write the outcomes of batches, and return whether they are written.

        A batch without an outcome was not tried, and is released.
        """
        try:
            with self._answered(Activity.SETTLE.value):
                self._transact(batches)
        except DelayedError as error:
            rows = sum(len(batch.rows) for batch in batches)
            log.warning("%s messages come free when their leases end: %s", f"{rows:,}", error)
            return False
        else:
            return True
        finally:
            for batch in batches:
                with batch.lock:
                    batch.finished = True

    def _transact(
        self, batches: Sequence[ClaimedBatch], turns: ClaimTurns = _NO_TURNS, limit: int = 0
    ) -> tuple[list[ClaimedBatch], ClaimTurns]:
        """Settle and claim in one transaction; repeat it if rows were moved, or another dispatcher claims too."""
        with ExitStack() as locks:
            for batch in batches:
                locks.enter_context(batch.lock)
            while True:
                try:
                    claimed, turns_after = self._settle_then_claim(batches, turns, limit)
                except settle.RowsMoved:
                    for row in (row for batch in batches for row in batch.rows):
                        row.pop("ctid", None)
                except claim.NotAlone:
                    self._others_until = self.monotonic() + OTHERS_STAY
                except BaseException:
                    for batch in batches:
                        batch.doubt = True
                    raise
                else:
                    break
            for batch in batches:
                batch.finished = True
        self._note_lost_leases(batches)
        for batch in claimed:
            self._renewer.add(batch)
        return claimed, turns_after

    def _note_lost_leases(self, batches: Sequence[ClaimedBatch]) -> None:
        now = self.monotonic()
        lost = sum(len(batch.rows) for batch in batches if batch.lease_lost or now >= batch.deadline)
        if lost:
            reason = (
                f"leases of {lost:,} messages ended before they were sent and settled; claim_timeout is"
                f" {self._lease.total_seconds():g} s"
            )
            self._leases_lost = Trouble(kind=TroubleKind.LEASES, since=self.clock(), reason=reason)
            self._lost_until = now + LOSS_REPORTED
            log.warning("store %r: %s; others may have sent them too: raise it", self._conn_id, reason)

    def _settle_then_claim(
        self, batches: Sequence[ClaimedBatch], turns: ClaimTurns, limit: int
    ) -> tuple[list[ClaimedBatch], ClaimTurns]:
        began = self.monotonic()
        with self._engine.begin() as connection:
            dialect_of(connection).go_by_indexes(connection)
            now = self.now(connection)
            outcomes: dict[str, BatchOutcome] = {}
            for batch in batches:
                outcome = batch.outcome or BatchOutcome(released=list(batch.rows))
                if batch.doubt or batch.lease_lost or self.monotonic() >= batch.deadline:
                    # messages that were settled before have no lease any more
                    outcome = outcome.only(
                        remembered_ids.still_claimed(connection, self.tables, batch.rows, batch.holder)
                    )
                outcomes[batch.holder] = outcome
            settle.write_outcomes(connection, self.tables, outcomes, now)
            if not limit:
                return [], turns
            return self._claim_batches(connection, now, turns, limit, began + self._lease.total_seconds())

    def _claim_batches(
        self, connection: Connection, now: datetime, turns: ClaimTurns, limit: int, deadline: float
    ) -> tuple[list[ClaimedBatch], ClaimTurns]:
        claimed: list[ClaimedBatch] = []
        left, size = limit, 0
        joins = False
        turns = turns.pausing(self.pauses.read(connection))
        round_ = ClaimRound(connection, self.tables, turns, now, monotonic=self.monotonic)
        while left > 0 and size < claim.MOST_BYTES and self.may_claim:
            if (turn := round_.next(min(left, self.policy.batch_size))) is None:
                break
            cursor, wanted = turn
            began = self.monotonic()
            since = cursor.since if began < cursor.restart_at else None
            alone = since is not None and cursor.untouched and began >= self._others_until
            if not alone and not joins:
                joins = True
                dialect_of(connection).join_by_hash(connection)
            holder = f"{self.dispatcher}.{next(self._claims)}"
            rows = claim.claim_due(
                connection,
                self.tables,
                claim.ClaimRequest(
                    deliver_conn_id=cursor.deliver_conn_id,
                    destination=cursor.destination,
                    excluded=cursor.excluded,
                    due_by=now + cursor.window,
                    limit=wanted,
                    most_bytes=claim.MOST_BYTES - size,
                    since=since,
                    alone=alone,
                    passed="" if since is None else cursor.passed,
                ),
                now=now,
                dispatcher=holder,
                until=now + self._lease,
            )
            if since is None:
                ended = self.monotonic()
                pause = (ended - began) * (RESTING_PAUSE if turns.resting else _PAUSE)
                cursor = replace(cursor, restart_at=ended + max(RESTART_AFTER, pause))
            round_.served(cursor.advance(rows, wanted), rows, wanted, from_oldest=since is None)
            if rows:
                claimed.append(ClaimedBatch(rows, holder, deadline))
                left -= len(rows)
                size += sum(map(claim.size_of, rows))
        return claimed, round_.end()

    def next_claim(self, connection: Connection, now: datetime, turns: ClaimTurns) -> datetime | None:
        """Return when a message of a connection may be claimed next; None: there is no message."""
        return next_claim(connection, self.tables, turns.pausing(self.pauses.read(connection)), now)

    def _renew(self, batch: ClaimedBatch) -> None:
        began = self.monotonic()
        with self._answered("renewing leases"), self._engine.begin() as connection:
            now = self._database_time(connection)
            until = now + self._lease
            renewed = remembered_ids.renew(connection, self.tables, batch.ids, batch.holder, until, now)
        if renewed < len(batch.rows):
            batch.lease_lost = True
        else:
            batch.deadline = began + self._lease.total_seconds()

    # -- for queue tables, in the caller's transaction -----------------------------------------------------------------

    def lock_due(
        self, connection: Connection, turns: ClaimTurns, limit: int, now: datetime
    ) -> tuple[list[Row], ClaimTurns]:
        """Lock due messages for queue tables until the transaction's end; return them, and the turns for the next."""
        rows: dict[str, Row] = {}
        dialect_of(connection).go_by_indexes(connection)
        turns = turns.pausing(self.pauses.read(connection))
        round_ = ClaimRound(connection, self.tables, turns, now, monotonic=self.monotonic)
        while len(rows) < limit and (turn := round_.next(limit - len(rows))):
            cursor, wanted = turn
            request = claim.ClaimRequest(
                deliver_conn_id=None,
                destination=cursor.destination,
                excluded=cursor.excluded,
                due_by=now,
                limit=wanted,
            )
            locked = claim.lock_due(connection, self.tables, request, now)
            # a row that this transaction has locked before is locked again, and is no reason for another turn
            new = [row for row in locked if row["Id"] not in rows]
            round_.served(cursor, new, wanted, from_oldest=True)
            rows.update((row["Id"], row) for row in new)
        self.claimed_at = self.monotonic()
        return list(rows.values()), round_.end()

    def write_delivered(self, connection: Connection, outcome: BatchOutcome, now: datetime) -> None:
        """Write the outcomes of messages that this transaction has locked and delivered."""
        settle.write_delivered(connection, self.tables, outcome, self.dispatcher, now)

    # -- anything else -------------------------------------------------------------------------------------------------

    def now(self, connection: Connection) -> datetime:
        """Return the database's time, and set the clock by it."""
        now = self._database_time(connection)
        self.clock.set(now)
        return now

    def reading(self, work: Callable[[Connection, datetime], T]) -> T:
        """Return the result of a reading transaction; tried again until the limit for claims."""

        def read() -> T:
            with self._engine.connect().execution_options(read_only=True) as connection:
                return work(connection, self.now(connection))

        return self._persist(Activity.CLAIM, read)

    def writing(self, activity: Activity, work: Callable[[Connection, datetime], T]) -> T:
        """Return the result of a writing transaction; tried again until its breaker trips."""

        def write() -> T:
            with self._engine.begin() as connection:
                return work(connection, self.now(connection))

        return self._persist(activity, write)

    def try_to_write(self, work: Callable[[Connection, datetime], object]) -> bool:
        """Try a writing transaction once, and return whether it was committed; a failure is only logged."""
        try:
            with self._answered(Activity.HOUSEKEEPING.value), self._engine.begin() as connection:
                work(connection, self.now(connection))
        except DelayedError as error:
            log.warning("the dispatcher's sign of life could not be written: %s", error)
            return False
        return True

    def try_to_read(self, work: Callable[[Connection, datetime], object]) -> None:
        """Try a reading transaction once; claims log and count what fails of the database."""
        with (
            suppress(DelayedError),
            self._answered(Activity.HOUSEKEEPING.value),
            self._engine.connect().execution_options(read_only=True) as connection,
        ):
            work(connection, self.now(connection))

    def _persist(self, activity: Activity, work: Callable[[], T], failed: Callable[[str], object] | None = None) -> T:
        """Do the work until it succeeds, with growing pauses, or until its breaker trips."""
        backoff = Backoff()
        breaker = self._breakers[activity]
        while True:
            try:
                with self._answered(activity.value, self.tables):
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
                self._succeeded(activity)
                return done

    def _succeeded(self, activity: Activity) -> None:
        self._breakers[activity].success()
        self.answered_at = self.monotonic()
        if activity is Activity.CLAIM:
            self.claimed_at = self.answered_at
        if activity is not Activity.HOUSEKEEPING:
            self.worked_at = self.clock()
