"""Workers: each dispatches the messages of one connection.

A :class:`ConnectionWorker` sends in one thread, while a second one settles the batches sent before and claims the next.
So broker and database do not wait for each other, and no transaction is open during a send. A slow or lost connection
does not hold up the others, and a slow claim no settlement. A :class:`QueueTableWorker` claims, delivers and removes in
one transaction of the store's own database.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, wait
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from math import inf
from threading import Event, Lock

from sqlalchemy import Connection

from airflow_delayed.clock import Backoff, next_sleep
from airflow_delayed.delivery import Delivery
from airflow_delayed.errors import about, explained
from airflow_delayed.message import UTC, DelayedMessage
from airflow_delayed.store.dispatch.attempt import (
    DeliveryResult,
    SendGuard,
    dead_letter,
    decide,
    decode_rows,
    deliver,
    error_copies,
)
from airflow_delayed.store.dispatch.limits import Activity, Breaker
from airflow_delayed.store.dispatch.queue_tables import QueueTables
from airflow_delayed.store.dispatch.renewal import ClaimedBatch
from airflow_delayed.store.dispatch.report import (
    MOST_TROUBLES,
    BreakerTripped,
    DispatchCounter,
    Trouble,
    TroubleKind,
)
from airflow_delayed.store.dispatch.repository import DispatchRepository
from airflow_delayed.store.dispatch.settle import BatchOutcome, Row
from airflow_delayed.store.dispatch.turns import ClaimTurns

log = logging.getLogger(__name__)


#: The seconds that one send should take, and the most batches of one send. A transport may be slow to begin, so
#: a fast one gets several batches at a time; not many, because nothing is confirmed before the end of the send.
SEND_SECONDS = 0.25
MOST_BATCHES = 10
#: If the window is shorter than this, the dispatcher waits itself: it claims messages ahead and sends each when it is
#: due, so a late send is a late delivery. With a longer window it sends early, and the transport delays the rest.
EXACT_BELOW = timedelta(seconds=1)
#: How long before its time a transport gets a message, so that it can connect first.
CONNECT = timedelta(milliseconds=50)
#: Messages due at most this far apart go in one send. A transport may write a message only after it has asked for the
#: next one, so a later message would delay it.
CLOSE = timedelta(milliseconds=20)
#: Nothing is sent when less than this part of its lease is left.
MARGIN = 1 / 6
#: Seconds until a destination that takes no messages is tried again, at first and at most; and at most if there are
#: so many of them that no more than ten are tried in a second.
FIRST_REST, LONGEST_REST, LONGEST_OF_MANY = 1.0, 10.0, 60.0
_TRIED_A_SECOND = 10
#: Seconds without a message for a missing destination, after which it is no trouble of the present any more.
MISSING_FOR = 15.0
#: Seconds after which a destination that confirms nothing takes no messages at present. Each try of it holds up others
#: for as long.
SILENCE = 1.0
#: Seconds between two checks of the leases during a send; a lease is renewed long before it ends.
CHECK_SECONDS = 0.05
#: Seconds of a look at a connection without an answer, after which it does not work; and from one look whether a run
#: that waits for it is to end to the next.
_SILENT_AFTER, _STEP = 5.0, 0.5
#: Seconds of a claim, after which what was sent meanwhile is settled beside it: the claim may pass over a million
#: messages of a destination that is paused.
SLOW_CLAIM = 0.5


class _LeaseGuard:
    """Lets a message pass when its time has come, while its lease is safe and the dispatcher is not stopped.

    :param window: how long before its due time a message may be sent.
    """

    def __init__(self, batches: Sequence[ClaimedBatch], repository: DispatchRepository, window: timedelta) -> None:
        self._batches = batches
        self._repository = repository
        self._window = window
        self._margin = repository.policy.claim_timeout.total_seconds() * MARGIN
        #: By the monotonic clock; the leases are not checked again until then.
        self._sure_until = -inf
        #: Messages that are due by then may be sent.
        self._passes = datetime.min.replace(tzinfo=UTC)
        self.now = repository.clock

    def hold(self, due_at: datetime) -> None:
        if due_at <= self._passes:
            return
        while self.may_send():
            self._passes = self.now() + self._window
            if due_at <= self._passes:
                return
            self._repository.sleep((due_at - self._passes).total_seconds())

    def may_send(self) -> bool:
        if self._repository.stop.is_set():
            return False
        now = self._repository.monotonic()
        # called before each message, so the batches are not checked every time
        if now >= self._sure_until:
            ends = min((batch.deadline for batch in self._batches), default=now) - self._margin
            if now >= ends or any(batch.lease_lost for batch in self._batches):
                return False
            self._sure_until = min(ends, now + CHECK_SECONDS)
        return True


@dataclass(frozen=True, slots=True)
class _Rest:
    """A destination that takes no messages at present."""

    until: datetime
    refusals: int
    reason: str
    since: datetime


@dataclass(frozen=True, slots=True)
class _Missing:
    """A destination that is not there; its messages are given up."""

    reason: str
    since: datetime
    last: datetime


class _Resting:
    """Destinations that take no messages: what is for them waits in the store, and holds up no other."""

    def __init__(self, conn_id: str) -> None:
        self._conn_id = conn_id
        self._rests: dict[str, _Rest] = {}
        self._missing: dict[str, _Missing] = {}

    def until(self) -> dict[str, datetime]:
        return {name: rest.until for name, rest in self._rests.items()}

    def reasons(self, now: datetime) -> dict[str, str]:
        return {name: rest.reason for name, rest in self._rests.items() if rest.until > now}

    def forget(self, names: Iterable[str]) -> None:
        for name in names:
            self._rests.pop(name, None)

    def troubles(self, conn_id: str | None, now: datetime) -> list[Trouble]:
        """Return destinations that take no messages or are missing, the first of them first; from any thread."""
        missing = [one for one in list(self._missing.items()) if (now - one[1].last).total_seconds() < MISSING_FOR]
        found: list[tuple[TroubleKind, str, _Rest | _Missing]]
        found = [(TroubleKind.REFUSED, *one) for one in list(self._rests.items())]
        found += [(TroubleKind.MISSING, *one) for one in missing]
        found.sort(key=lambda one: one[2].since)
        return [
            Trouble(kind=kind, conn_id=conn_id, destination=name, since=one.since, reason=one.reason)
            for kind, name, one in found[:MOST_TROUBLES]
        ]

    def note(self, rows: Sequence[Row], result: DeliveryResult, now: datetime) -> None:
        """Let destinations rest that refused messages, each time longer, until one is confirmed."""
        if self._rests or self._missing:
            confirmed = set(result.confirmed)
            for name in {row["Destination"] for row in rows if row["Id"] in confirmed}:
                self._missing.pop(name, None)
                if name not in result.refusing and self._rests.pop(name, None) is not None:
                    log.warning("connection %r: destination %r takes messages again", self._conn_id, name)
        for name, reason in result.closed_destinations.items():
            known = self._missing.get(name)
            self._missing[name] = _Missing(reason, now if known is None else known.since, now)
        for name, reason in result.refusing.items():
            before = self._rests.get(name)
            refusals = 1 if before is None else before.refusals + 1
            longest = min(LONGEST_OF_MANY, max(LONGEST_REST, len(self._rests) / _TRIED_A_SECOND))
            # not by chance: destinations that hang are tried together, for each such send takes SILENCE
            pause = next_sleep(refusals, first=FIRST_REST, longest=longest, chance=lambda: 0)
            until = now + timedelta(seconds=pause)
            self._rests[name] = _Rest(until, refusals, reason, now if before is None else before.since)
            if before is None:
                log.warning(
                    "connection %r: destination %r takes no messages: %s Its messages wait in the store, are tried"
                    " again after 1 s, later every 10 s, and use up no retries; other destinations go on",
                    self._conn_id,
                    name,
                    reason,
                )


def _troubles(conn_id: str | None, resting: _Resting, counter: DispatchCounter, now: datetime) -> list[Trouble]:
    found, failing = resting.troubles(conn_id, now), counter.failing(conn_id, now)
    for one in found:
        failing.pop(one.destination or "", None)
    return [*found, *failing.values()][:MOST_TROUBLES]


class ConnectionWorker:
    """Dispatches the messages of one connection.

    :param window: how long before its due time a message is dispatched.
    :param ahead: how long before it is dispatched a message may be claimed; it is leased until then.
    """

    def __init__(
        self,
        repository: DispatchRepository,
        counter: DispatchCounter,
        transport: Delivery,
        window: timedelta,
        ahead: timedelta = timedelta(0),
    ) -> None:
        self.conn_id = conn_id = counter.conn_id
        self.counter = counter
        self.window = window
        self._ahead = ahead if window < EXACT_BELOW else timedelta(0)
        #: For the heartbeat: a message that is claimed cannot be cancelled any more.
        self.lookahead = window + self._ahead
        #: Where the next claim begins; written by whichever thread claims, read by the dispatcher between two passes.
        self.turns = ClaimTurns.of_connection(conn_id, self.lookahead)
        #: When the last claim began, if it took all that was due; None: there may be more. By the monotonic clock.
        self._caught_up: float | None = None
        #: Why nothing more is dispatched in this run; None: the connection works.
        self.unavailable: str | None = None
        self.cause: BaseException | None = None
        self._repository = repository
        self._policy = repository.policy
        self._transport = transport
        self._backoff = Backoff()
        #: The reason of the connection's failure that was logged last; empty: it works.
        self._logged = ""
        self._send_size = repository.policy.batch_size
        #: Batches that are claimed and not finished.
        self._open: list[ClaimedBatch] = []
        #: Destinations that could not receive in this pass, and why.
        self._closed_destinations: dict[str, str] = {}
        #: Destinations that take no messages at present: their messages wait in the store, and cost nobody else time.
        self._resting = _Resting(conn_id)
        #: Held by a run, or by a look at the connection between two runs.
        self._in_use = Lock()
        #: Of a dispatcher that stays: what keeps the connection open between two runs.
        self._kept_open: ExitStack | None = None
        self._closed = False
        #: Since when the connection does not work between two runs, and why; when the look began that has no answer.
        self._lost: tuple[datetime, str] | None = None
        self._looks_since: datetime | None = None
        limit = repository.policy.time_to_trigger_dispatch_circuit_breaker
        self._breaker = Breaker(f"connection {conn_id!r}: dispatching", limit, repository.monotonic, repository.clock)

    def troubles(self, now: datetime) -> list[Trouble]:
        """Return what it cannot do now: send anything, or to some destinations; from any thread."""
        since, reason, looks_since = self._breaker.failing_since, self._breaker.last, self._looks_since
        if since is None and self._lost is not None:
            since, reason = self._lost
        elif since is None and looks_since is not None and (now - looks_since).total_seconds() > _SILENT_AFTER:
            since, reason = looks_since, "no answer in time"
        if since is None:
            return _troubles(self.conn_id, self._resting, self.counter, now)
        return [Trouble(kind=TroubleKind.CONNECTION, conn_id=self.conn_id, since=since, reason=reason)]

    def keep_open(self) -> None:
        """Keep the connection open between two runs too; then :meth:`service` has to be called."""
        self._kept_open = ExitStack()
        self._kept_open.enter_context(self._transport.kept_open())

    def service(self) -> None:
        """Keep the connection open, and note whether it works, unless a run uses it; from a thread of its own."""
        if self.unavailable is not None or not self._in_use.acquire(blocking=False):
            return
        began = self._looks_since = self._repository.clock()
        try:
            self._transport.service()
        except Exception as error:
            self._lost = (began if self._lost is None else self._lost[0]), self._log_failure(error)
        else:
            if self._lost is not None:
                self._log_success()
        finally:
            self._looks_since = None
            self._in_use.release()
            if self._closed:
                self.close()

    def renew(self, transport: Delivery) -> None:
        """Go on after the breaker has tripped, over another transport, with what Airflow has of the connection now."""
        self._close_transport()
        self._transport = transport
        if self._kept_open is not None:
            self.keep_open()
        self._breaker.restart()
        self.unavailable, self.cause = None, None

    def run(self, threads: Executor) -> None:
        """Dispatch what is due, until there is nothing more, or the breaker trips."""
        while not self._in_use.acquire(timeout=_STEP):
            if self._repository.stop.is_set():
                return
        self._closed_destinations.clear()
        try:
            with self._transport.kept_open() if self._kept_open is None else nullcontext():
                self._run(threads)
        except BaseException:
            unsettled = [batch for batch in self._open if not batch.finished]
            if self._repository.try_to_settle(unsettled):
                self._count(unsettled)
            raise
        finally:
            self._open.clear()
            self.refresh()
            self._in_use.release()

    def refresh(self) -> None:
        """Exclude destinations that rest from the next claim, between two runs."""
        self.turns = self._with_rests()

    def close(self) -> None:
        """Close the transport; if a look at it hangs, when that ends."""
        self._closed = True
        if self._in_use.acquire(blocking=False):
            self._close_transport()
            self._in_use.release()

    def _close_transport(self) -> None:
        if self._kept_open is not None:
            self._kept_open.close()
        self._transport.close()

    def _run(self, threads: Executor) -> None:
        idle = Event()
        idle.set()
        sent: list[ClaimedBatch] = []
        settled = False
        claimed = self._settle_and_claim([], idle)
        # what is settled may let others be claimed
        while claimed or sent or settled:
            idle.clear()
            following = threads.submit(self._settle_and_claim, sent, idle)
            try:
                error = self._send(claimed)
                idle.set()
                if wait([following], SLOW_CLAIM).not_done:
                    # nobody would settle it before the claim has ended
                    self._repository.settle(claimed)
            finally:
                idle.set()
                wait([following])
                self._count([batch for batch in claimed if batch.finished])
            settled = any(batch.finished for batch in claimed)
            sent, claimed = [batch for batch in claimed if not batch.finished], following.result()
            if self._repository.recovery_breaker.tripped:
                self._settle(sent)
                raise BreakerTripped(str(self._repository.recovery_breaker))
            if error is None:
                continue
            # nothing is sent through this connection for a while, so the rows are released for other dispatchers
            self._settle([*sent, *claimed])
            if self._breaker.failure(self._log_failure(error)):
                self.unavailable, self.cause = str(self._breaker), error
            if self.unavailable or self._repository.stop.is_set():
                return
            self._repository.sleep(min(self._backoff.next(), self._breaker.remaining))
            settled, sent, claimed = False, [], self._settle_and_claim([], idle)

    def _log_failure(self, error: Exception) -> str:
        reason = explained(error).removeprefix(f"connection {self.conn_id!r}: ")
        if reason != self._logged:
            self._logged = reason
            log.warning("%s; it is tried again, and that it works again is logged", about(self.conn_id, error))
        return reason

    def _log_success(self) -> None:
        self._lost = None
        if self._logged:
            self._logged = ""
            log.warning("connection %r works again", self.conn_id)

    # -- settling and claiming -----------------------------------------------------------------------------------------

    def _settle_and_claim(self, sent: Sequence[ClaimedBatch], idle: Event) -> list[ClaimedBatch]:
        """Settle the batches that were sent, and claim the next, in one transaction unless the claim has to wait."""
        waits = (self._ahead and self._caught_up is not None) or self._repository.rate.limits
        if waits or self._repository.pauses.known:
            # a claim may have to wait, or pass over many paused messages, and settling does not wait with it
            self._settle(sent)
            sent = ()
        if self._ahead and self._caught_up is not None:
            # early enough to claim the next messages before they are due, late enough that a claim takes several
            idle.wait(max(0.0, self._caught_up + self._ahead.total_seconds() / 2 - self._repository.monotonic()))
        self._caught_up = None
        limit = self._repository.allowed(self._send_size)
        if not limit:
            self._settle(sent)
            return []
        began = self._repository.monotonic()
        try:
            claimed, self.turns = self._repository.settle_and_claim(sent, self._with_rests(), limit)
            self._resting.forget(self.turns.idle)
        finally:
            self._count([batch for batch in sent if batch.finished])
        self._open += claimed
        rows = sum(len(batch.rows) for batch in claimed)
        self._repository.rate.give_back(limit - rows)
        if rows < limit:
            self._caught_up = began
        return claimed

    def _settle(self, batches: Sequence[ClaimedBatch]) -> None:
        self._repository.settle(batches)
        self._count(batches)

    def _count(self, settled: Sequence[ClaimedBatch]) -> None:
        for batch in settled:
            if batch.outcome is not None:
                self.counter.add(batch.outcome)
        if settled:
            self._open = [batch for batch in self._open if not batch.finished]

    # -- sending -------------------------------------------------------------------------------------------------------

    def _send(self, batches: Sequence[ClaimedBatch]) -> Exception | None:
        if not batches:
            return None
        repository = self._repository
        guard = _LeaseGuard(batches, repository, self.window)
        result = DeliveryResult()
        for rows in self._in_time([row for batch in batches for row in batch.rows], guard):
            now = repository.clock()
            refused = self._policy.refused(row["Destination"] for row in rows)
            closed = {**self._closed_destinations, **result.closed_destinations, **refused}
            messages = decode_rows(rows, closed, now, result, {**self._resting.reasons(now), **result.refusing})
            began = repository.monotonic()
            deliver(self._transport, messages, now, guard, result)
            # a send that waits for due times says nothing of the transport's speed
            if not result.stopped and (not self._ahead or rows[-1]["Time"] <= now):
                self._adapt(repository.monotonic() - began)
            if result.ended:
                break
        self._closed_destinations.update(result.closed_destinations)
        if result.confirmed or (result.answered and result.connection_error is None):
            self._log_success()
            self._breaker.success()
            self._backoff.reset()
        error, error_destination = result.connection_error, self._policy.error_destination
        now = repository.clock()
        self._resting.note([row for batch in batches for row in batch.rows], result, now)
        retries, rests = self._policy.number_of_retries, self._resting.until()
        outcomes = decide([batch.rows for batch in batches], result, retries, now, rests=rests)
        for batch, outcome in zip(batches, outcomes, strict=True):
            batch.outcome = outcome
        for outcome in outcomes:
            if outcome.failed and error_destination is not None:
                error = self._dead_letter(outcome, error_destination, guard, error)
        return error

    def _with_rests(self) -> ClaimTurns:
        return replace(self.turns, resting=self._resting.until())

    def _adapt(self, took: float) -> None:
        least = self._policy.batch_size
        if took > SEND_SECONDS:
            size = self._send_size // 2
        else:
            size = self._send_size * (4 if took < SEND_SECONDS / 4 else 2 if took < SEND_SECONDS / 2 else 1)
        self._send_size = max(least, min(MOST_BATCHES * least, size))

    def _in_time(self, rows: Sequence[Row], guard: SendGuard) -> Iterator[Sequence[Row]]:
        """Yield rows shortly before they may be sent; rows due close to each other come together."""
        if not self._ahead:
            yield rows
            return
        rest = sorted(rows, key=lambda row: row["Time"])
        while rest and guard.may_send():
            end = self._repository.clock() + self.window
            left = rest[0]["Time"] - (end + CONNECT)
            if left > timedelta(0):
                self._repository.sleep(left.total_seconds())
                continue
            count, last = 0, end
            while count < len(rest) and rest[count]["Time"] <= last + CLOSE:
                last = max(last, rest[count]["Time"])
                count += 1
            count = max(count, 1)
            yield rest[:count]
            rest = rest[count:]

    def _dead_letter(
        self, outcome: BatchOutcome, error_destination: str, guard: SendGuard, error: Exception | None
    ) -> Exception | None:
        result = DeliveryResult(connection_error=error)
        if error is None:
            now = self._repository.clock()
            deliver(self._transport, error_copies(outcome, error_destination, now), now, guard, result)
        refused = dead_letter(outcome, result, error_destination)
        if refused:
            self._repository.recovery_breaker.failure(next(iter(result.failures.values())).reason, refused)
        return result.connection_error


class QueueTableWorker:
    """Delivers into queue tables, each message exactly once, and when it is due, never ahead."""

    def __init__(self, repository: DispatchRepository, counter: DispatchCounter, schema: str | None) -> None:
        self.conn_id = counter.conn_id
        self.counter = counter
        self.window = timedelta(0)
        self.turns = ClaimTurns.of_connection(None, self.window)
        self.unavailable: str | None = None
        self.cause: BaseException | None = None
        self._repository = repository
        self._policy = repository.policy
        self._queues = QueueTables(schema)
        self._resting = _Resting(self.conn_id)

    def run(self, threads: Executor) -> None:
        """Deliver what is due, until nothing more is due."""
        self._queues.look_again()
        while limit := self._repository.allowed(self._policy.batch_size):
            outcome, refused, self.turns = self._repository.writing(Activity.DELIVER, partial(self._move, limit))
            rows = outcome.count
            self._repository.rate.give_back(limit - rows)
            self.counter.add(outcome)
            breaker = self._repository.recovery_breaker
            if refused and breaker.failure(outcome.failed[0][1], refused):
                raise BreakerTripped(str(breaker))
            if not rows:
                return

    def close(self) -> None:
        """Do nothing: the connections are the store's."""

    def troubles(self, now: datetime) -> list[Trouble]:
        """Return queue tables that take no messages; of their database the repository knows whether it fails."""
        return _troubles(None, self._resting, self.counter, now)

    def _move(self, limit: int, connection: Connection, now: datetime) -> tuple[BatchOutcome, int, ClaimTurns]:
        repository = self._repository
        turns = replace(self.turns, resting=self._resting.until())
        rows, turns = repository.lock_due(connection, turns, limit, now)
        if rows:
            # on MySQL and MariaDB the claim may have waited, so that messages have expired
            now = repository.now(connection)
        result = DeliveryResult()
        closed = self._policy.refused(row["Destination"] for row in rows)
        self._deliver(connection, decode_rows(rows, closed, now, result), result)
        self._resting.note(rows, result, now)
        self._resting.forget(turns.idle)
        turns = replace(turns, resting=self._resting.until())
        (outcome,) = decide([rows], result, self._policy.number_of_retries, now, rests=turns.resting)
        refused, error_destination = 0, self._policy.error_destination
        if outcome.failed and error_destination is not None:
            copied = DeliveryResult()
            self._deliver(connection, error_copies(outcome, error_destination, now), copied)
            refused = dead_letter(outcome, copied, error_destination)
        repository.write_delivered(connection, outcome, now)
        return outcome, refused, turns

    def _deliver(self, connection: Connection, messages: Sequence[DelayedMessage], result: DeliveryResult) -> None:
        failures = self._queues.deliver(connection, messages)
        result.failures.update(failures)
        for message in messages:
            failure = failures.get(message.message_id)
            if failure is not None and failure.refused:
                result.refusing[message.destination] = failure.reason
        result.confirmed += [message.message_id for message in messages if message.message_id not in failures]
