"""The dispatcher of a user's own store (:mod:`airflow_delayed.store.protocol`). No Airflow, no SQL here.

The rules are those of NServiceBus's DueDelayedMessagePoller.cs, except for four:

- A lost connection counts for the breaker, never for a message's retries.
- A message that fails is tried again in the next pass, so that it holds up no other.
- A message that is given up is first sent to the error destination and then removed: in the other order it could be
  lost.
- A message is sent up to ``lookahead`` before it is due, with the delay that remains.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Literal, TypeVar

from airflow_delayed.clock import Backoff
from airflow_delayed.delivery import Clock, Delivery
from airflow_delayed.errors import about, explained
from airflow_delayed.message import utcnow
from airflow_delayed.store.dispatch.attempt import (
    DeliveryResult,
    SendGuard,
    dead_letter,
    decide,
    deliver,
    error_copy,
)
from airflow_delayed.store.dispatch.limits import Breaker, RateBreaker
from airflow_delayed.store.dispatch.loop import PASS_EVERY, DispatchLoop, Sleep
from airflow_delayed.store.dispatch.report import BreakerTripped, DispatchCounter, DispatchFailed, DispatchReport
from airflow_delayed.store.dispatch.settle import BatchOutcome, Row, shortened
from airflow_delayed.store.policy import DispatchPolicy
from airflow_delayed.store.protocol import (
    LEASE,
    DelayedMessageStore,
    FetchesBatches,
    LeasedMessage,
    UnsupportedConsistency,
)

log = logging.getLogger(__name__)

#: The sleep after a failure (RepeatedFailuresOverTimeCircuitBreaker.cs, timeToWaitWhenArmed), in seconds.
_PAUSE = 1.0
#: Seconds after its fetch at which a message is not sent any more: its lease may end during the send.
USABLE_LEASE = LEASE.total_seconds() * 5 / 6

_Result = TypeVar("_Result")


class CustomDispatcher:
    """Dispatches the messages due within the lookahead, or within the transport's horizon if that is shorter.

    Its passes are those of a :class:`airflow_delayed.store.dispatch.loop.DispatchLoop`.

    :param store: not initialized yet; several dispatchers may use one store, each through its own object.
    :param policy: ``remember`` and ``claim_timeout`` have no effect, because the store makes the leases.
    :param clock: decides what is due; it should be right to a second on all machines that dispatch.
    :raises ValueError: ``max_rate`` is given.
    """

    def __init__(
        self,
        store: DelayedMessageStore,
        *,
        name: str,
        transport: Delivery,
        conn_id: str,
        policy: DispatchPolicy,
        set_up: bool = True,
        clock: Clock = utcnow,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if policy.max_rate is not None:
            raise ValueError("max_rate= is not kept by the dispatcher of a store of one's own; leave it out")
        self._store = store
        self._name = name
        self._transport = transport
        self._conn_id = conn_id
        self._policy = policy
        self._set_up = set_up
        self._clock = clock
        self._monotonic = monotonic
        self._sleep = sleep
        self.sleep = Sleep(PASS_EVERY, sleep)
        self._window = min(policy.farthest, transport.horizon)

        def breaker(what: str, limit: timedelta) -> Breaker:
            return Breaker(what, limit, monotonic, clock)

        self._writing = breaker(f"store {name!r}: writing", policy.time_to_trigger_store_circuit_breaker)
        self._fetching = breaker(f"store {name!r}: fetching", policy.time_to_trigger_fetch_circuit_breaker)
        self._sending = breaker(f"connection {conn_id!r}: dispatching", policy.time_to_trigger_dispatch_circuit_breaker)
        self._recovery = RateBreaker(
            f"store {name!r}: giving up messages", policy.maximum_recovery_failures_per_second, monotonic, clock
        )
        self._connection_lost = False
        #: With which error the connection failed for too long.
        self._cause: BaseException | None = None
        self._initialized = False
        self._backoff = Backoff()
        self._counter = DispatchCounter(conn_id)

    #: Nothing stops it from outside.
    stopped = False

    def run(self, until: Literal["empty"] | None = None) -> DispatchReport:
        """Dispatch until nothing more is due within the lookahead, or until the store is empty.

        :param until: "empty" goes on, with sleeps in between, until no message waits, or one is given up and stays.
        :raises DispatchFailed: messages were given up and stay in the store, or the connection failed for too long.
        :raises BreakerTripped: the store failed for too long; messages that were not dispatched are still in it.
        """
        self._counter = DispatchCounter(self._conn_id)
        self._initialized, self._cause = False, None
        report = DispatchLoop(self, until, monotonic=self._monotonic).run()
        assert report is not None
        return report

    def once(self, most: float | None = None) -> None:
        """Try each due message once."""
        if not self._initialized:
            self._try(self._fetching, lambda: self._store.initialize(self._name, "at_least_once"))
            if self._set_up:
                self._try(self._writing, self._store.set_up_infrastructure)
            self._initialized = True
        try:
            self._pass()
        except _ConnectionLost as lost:
            self._cause = lost.__cause__

    def next_due(self) -> timedelta | None:
        """Return the time until the next pass; None: nothing waits."""
        due = self._try(self._fetching, self._store.next_due)
        if due is None:
            return None
        wait = due - self._window - self._clock()
        # a message is due and was not sent: another dispatcher has its lease, or it failed
        return wait if wait > timedelta(0) else timedelta(seconds=self._backoff.next())

    @property
    def unavailable(self) -> bool:
        """Whether the connection has failed for too long, or a message is given up and stays."""
        return self._cause is not None or bool(self._counter.failures)

    def finish(self) -> DispatchReport:
        """Return the counts."""
        if self.unavailable:
            raise DispatchFailed(
                self._name,
                self._counter.report,
                self._counter.failures,
                {} if self._cause is None else {self._conn_id: str(self._sending)},
                kept="still in the store and will be tried again; an error_destination would take them",
            ) from self._cause
        return self._counter.report

    def close(self) -> None:
        """Close the transport."""
        self._transport.close()
        log.info("store %r: %s", self._name, self._counter.report)

    def _pass(self) -> None:
        again: list[LeasedMessage] = []
        try:
            while True:
                batch = self._try(self._fetching, self._fetch)
                if batch:
                    again += self._deliver_batch(batch)
                elif not self._connection_lost:
                    return
                elif self._sending.tripped:
                    raise _ConnectionLost
                else:
                    # messages that were fetched when the connection was lost come free when their leases end
                    self._sleep(min(_PAUSE, self._sending.remaining))
        finally:
            for leased in again:
                self._count_failure(leased)

    def _fetch(self) -> Sequence[LeasedMessage]:
        at = self._clock() + self._window
        if isinstance(self._store, FetchesBatches):
            return self._store.fetch_batch(at, self._policy.batch_size)
        leased = self._store.fetch_next_due(at)
        return [] if leased is None else [leased]

    def _deliver_batch(self, batch: Sequence[LeasedMessage]) -> list[LeasedMessage]:
        guard = _FetchGuard(self._clock, self._monotonic)
        leased = {one.message.message_id: one for one in batch}
        rest = [_row(one) for one in leased.values()]
        again: list[LeasedMessage] = []
        while rest and guard.may_send():
            result = deliver(self._transport, [leased[row["Id"]].message for row in rest], self._clock(), guard)
            (outcome,) = decide([rest], result, self._policy.number_of_retries, self._clock())
            error = self._dead_letter(outcome, leased, guard, result.connection_error)
            for row in outcome.expired:
                log.warning("message %s expired while it waited, and is removed", row["Id"])
            for row in [*outcome.removed, *outcome.expired]:
                self._remove(leased[row["Id"]])
            self._counter.count(outcome)
            again += [leased[planned.row["Id"]] for planned in outcome.retry]
            again += [leased[row["Id"]] for row, _ in outcome.failed]
            if result.confirmed:
                self._backoff.reset()
            rest = outcome.released
            self._note(error)
        return again

    def _dead_letter(
        self,
        outcome: BatchOutcome,
        leased: Mapping[str, LeasedMessage],
        guard: SendGuard,
        connection_error: Exception | None,
    ) -> Exception | None:
        destination = self._policy.error_destination
        if not outcome.failed or destination is None:
            return connection_error
        result = DeliveryResult(connection_error=connection_error)
        if connection_error is None:
            now = self._clock()
            copies = [
                error_copy(leased[row["Id"]].message, destination, shortened(reason), now)
                for row, reason in outcome.failed
            ]
            deliver(self._transport, copies, now, guard, result)
        if refused := dead_letter(outcome, result, destination):
            self._recovery.failure(next(iter(result.failures.values())).reason, refused)
        return result.connection_error

    def _note(self, error: Exception | None) -> None:
        """Note whether the connection works, or the error with which it failed."""
        self._connection_lost = error is not None
        if error is None:
            self._sending.success()
        elif self._sending.failure(explained(error)):
            raise _ConnectionLost from error
        else:
            log.warning("%s; it is tried again", about(self._conn_id, error))
            self._sleep(min(_PAUSE, self._sending.remaining))
        if self._recovery.tripped:
            raise BreakerTripped(str(self._recovery))

    def _remove(self, leased: LeasedMessage) -> None:
        if not self._try(self._writing, partial(self._store.remove, leased)):
            log.warning("message %s was removed meanwhile; it may have been sent twice", leased.message.message_id)

    def _count_failure(self, leased: LeasedMessage) -> None:
        """Try once to count a failure; if that fails too, the message can be fetched when its lease ends."""
        try:
            self._store.increment_failure_count(leased)
        except Exception as error:
            log.warning("store %r: a failure was not counted: %s", self._name, explained(error))
            if self._recovery.failure(explained(error)):
                raise BreakerTripped(str(self._recovery)) from error

    def _try(self, breaker: Breaker, work: Callable[[], _Result]) -> _Result:
        """Call the store again and again until it succeeds."""
        while True:
            try:
                result = work()
            except UnsupportedConsistency:
                raise
            except Exception as error:
                if breaker.failure(explained(error)):
                    raise BreakerTripped(str(breaker)) from error
                log.warning("store %r: %s; it is tried again", self._name, explained(error))
                self._sleep(min(_PAUSE, breaker.remaining))
            else:
                breaker.success()
                return result


def _row(leased: LeasedMessage) -> Row:
    return {"Id": leased.message.message_id, "Time": leased.message.due_at, "RetryCount": leased.failures}


class _ConnectionLost(Exception):
    """The connection has failed for too long; ``__cause__`` is its last error."""


class _FetchGuard:
    def __init__(self, clock: Clock, monotonic: Callable[[], float]) -> None:
        self.now = clock
        self._monotonic = monotonic
        self._began = monotonic()

    def hold(self, due_at: datetime) -> None:
        """Do not wait: a fetched message may be sent."""

    def may_send(self) -> bool:
        return self._monotonic() - self._began < USABLE_LEASE
