"""Handing over what a store of one's own holds (:mod:`airflow_delayed.store.protocol`). No Airflow, no SQL here.

The rules are those of NServiceBus's DueDelayedMessagePoller.cs, but for four: a lost connection counts for the breaker
and never for a message's retries; a message that fails is tried again in the next pass, so that it holds up no other;
one that is given up is sent to the error destination first and removed then, for the other way round it could be lost;
and a message goes out up to ``lookahead`` before it is due, with the delay that remains.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Literal, TypeVar

from airflow_delayed.backoff import Backoff
from airflow_delayed.delivery import Clock, Delivery
from airflow_delayed.message import utcnow
from airflow_delayed.store.breaker import Breaker, RateBreaker
from airflow_delayed.store.error_copy import error_copy
from airflow_delayed.store.handover import explained, hand_over
from airflow_delayed.store.policy import DispatchPolicy
from airflow_delayed.store.protocol import (
    LEASE,
    DelayedMessageStore,
    FetchesBatches,
    HeldMessage,
    UnsupportedConsistency,
)
from airflow_delayed.store.report import BreakerTripped, DispatchFailed, DispatchReport

log = logging.getLogger(__name__)

#: The longest sleep until the next look (DueDelayedMessagePoller.cs, MaxSleepDuration), and that after a failure
#: (RepeatedFailuresOverTimeCircuitBreaker.cs, timeToWaitWhenArmed); in seconds.
LONGEST_SLEEP = 60.0
PAUSE = 1.0
#: A message is not sent any more when it has been held for so long: its lease may end meanwhile.
HELD = LEASE.total_seconds() * 5 / 6
#: An error names so many messages.
SHOWN_FAILURES = 1000

_Result = TypeVar("_Result")


class CustomDispatcher:
    """Hands over what is due within the lookahead, or within the transport's horizon if that is shorter.

    :param store: not initialized yet; several dispatchers may use one store, each by an object of its own.
    :param name: given to the store, which may call its tables after it.
    :param transport: delivers; closed after each run.
    :param conn_id: its connection, for the report.
    :param policy: ``max_rate``, ``remember`` and ``claim_timeout`` mean nothing here: leases are the store's affair.
    :param set_up: make the store's infrastructure where it is missing.
    :param clock: decides what is due; of all machines that dispatch it should be right to a second.
    :raises UnsupportedConsistency: ``exactly_once``, for a message is sent in no transaction of the store's.
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
        if policy.consistency != "at_least_once":
            raise UnsupportedConsistency(
                f"consistency={policy.consistency!r}: a store of one's own hands over at_least_once, for it and the"
                " broker share no transaction; ids make duplicates known"
            )
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
        self._window = min(policy.lookahead, transport.horizon)

        def breaker(what: str, limit: timedelta) -> Breaker:
            return Breaker(what, limit, monotonic, clock)

        self._writing = breaker(f"store {name!r}: writing", policy.time_to_trigger_store_circuit_breaker)
        self._fetching = breaker(f"store {name!r}: fetching", policy.time_to_trigger_fetch_circuit_breaker)
        self._sending = breaker(
            f"connection {conn_id!r}: handing over", policy.time_to_trigger_dispatch_circuit_breaker
        )
        self._recovery = RateBreaker(
            f"store {name!r}: giving up messages", policy.maximum_recovery_failures_per_second, monotonic, clock
        )
        self._lost = False
        self._backoff = Backoff()
        self._report = DispatchReport()
        self._failures: dict[str, str] = {}

    def run(self, until: Literal["empty"] | None = None) -> DispatchReport:
        """Hand over until nothing more is due within the lookahead, or until the store is empty.

        :param until: "empty" goes on, sleeping in between, until nothing waits, or a message is given up and stays.
        :raises DispatchFailed: messages were given up and are still there, or the connection failed for too long.
        :raises BreakerTripped: the store failed for too long; what is not handed over is still in it.
        """
        self._report, self._failures = DispatchReport(), {}
        unavailable: dict[str, str] = {}
        cause: BaseException | None = None
        try:
            self._try(self._fetching, lambda: self._store.initialize(self._name, self._policy.consistency))
            if self._set_up:
                self._try(self._writing, self._store.set_up_infrastructure)
            self._pass()
            while until == "empty" and not self._failures and (seconds := self._until_next()) is not None:
                self._sleep(seconds)
                self._pass()
        except _ConnectionLost as lost:
            unavailable[self._conn_id], cause = str(self._sending), lost.__cause__
        finally:
            self._transport.close()
            log.info("store %r: %s", self._name, self._report)
        if self._failures or unavailable:
            raise DispatchFailed(
                self._name,
                self._report,
                self._failures,
                unavailable,
                kept="still in the store and will be tried again; an error_destination would take them",
            ) from cause
        return self._report

    def _pass(self) -> None:
        """Try each message once that is due."""
        again: list[HeldMessage] = []
        try:
            while True:
                batch = self._try(self._fetching, self._fetch)
                if batch:
                    again += self._hand_over(batch)
                elif not self._lost:
                    return
                elif self._sending.tripped:
                    raise _ConnectionLost
                else:
                    # what was held when the connection was lost is free again some time
                    self._sleep(min(PAUSE, self._sending.remaining))
        finally:
            for held in again:
                self._count_failure(held)

    def _fetch(self) -> Sequence[HeldMessage]:
        at = self._clock() + self._window
        if isinstance(self._store, FetchesBatches):
            return self._store.fetch_batch(at, self._policy.batch_size)
        held = self._store.fetch_next_due(at)
        return [] if held is None else [held]

    def _hand_over(self, batch: Sequence[HeldMessage]) -> list[HeldMessage]:
        """Send a batch, and return those of which a failure is to be counted."""
        gate = _Gate(self._clock, self._monotonic)
        waiting = {held.message.message_id: held for held in batch}
        again: list[HeldMessage] = []
        while waiting and gate.may_send():
            done = hand_over(self._transport, [held.message for held in waiting.values()], self._clock(), gate)
            for name in done.confirmed:
                held = waiting.pop(name)
                self._remove(held)
                self._report.add(self._conn_id, held.message)
            for name in done.expired:
                log.warning("message %s expired while it waited, and is removed", name)
                self._remove(waiting.pop(name))
                self._report.expired += 1
            lost = done.lost
            for name, failure in done.failures.items():
                held = waiting.pop(name)
                if not failure.final and held.failures < self._policy.number_of_retries:
                    self._report.retried += 1
                    again.append(held)
                elif (error_lost := self._give_up(held, failure.reason, again)) is not None:
                    waiting[name], lost = held, error_lost
            if done.confirmed:
                self._backoff.reset()
            self._note(lost)
        return again

    def _give_up(self, held: HeldMessage, reason: str, again: list[HeldMessage]) -> Exception | None:
        """Send a message to the error destination, or leave it; return the connection's failure if there was one."""
        name, destination = held.message.message_id, self._policy.error_destination
        if destination is not None:
            copy = error_copy(held.message, destination, reason, self._clock())
            done = hand_over(self._transport, [copy], self._clock())
            if done.confirmed:
                self._remove(held)
                self._report.error_destination += 1
                return None
            if done.lost is not None:
                return done.lost
            reason = f"{reason}; error destination {destination!r}: {done.failures[name].reason}"
            self._recovery.failure(reason)
        if len(self._failures) < SHOWN_FAILURES:
            self._failures[name] = reason
        self._report.failed += 1
        again.append(held)
        return None

    def _note(self, lost: Exception | None) -> None:
        """Note whether the connection works.

        :raises _ConnectionLost: it has not for too long.
        :raises BreakerTripped: giving up messages has failed too often.
        """
        self._lost = lost is not None
        if lost is None:
            self._sending.success()
        elif self._sending.failure(explained(lost)):
            raise _ConnectionLost from lost
        else:
            log.warning("connection %r: %s; it is tried again", self._conn_id, explained(lost))
            self._sleep(min(PAUSE, self._sending.remaining))
        if self._recovery.tripped:
            raise BreakerTripped(str(self._recovery))

    def _remove(self, held: HeldMessage) -> None:
        if not self._try(self._writing, partial(self._store.remove, held)):
            log.warning("message %s was removed meanwhile; it may have been sent twice", held.message.message_id)

    def _count_failure(self, held: HeldMessage) -> None:
        """Count a failure, once: if that fails too, the message is free when its lease ends."""
        try:
            self._store.increment_failure_count(held)
        except Exception as error:
            log.warning("store %r: a failure was not counted: %s", self._name, explained(error))
            if self._recovery.failure(explained(error)):
                raise BreakerTripped(str(self._recovery)) from error

    def _try(self, breaker: Breaker, work: Callable[[], _Result]) -> _Result:
        """Do what the store is to do until it does.

        :raises BreakerTripped: it has not for too long.
        """
        while True:
            try:
                result = work()
            except UnsupportedConsistency:
                raise
            except Exception as error:
                if breaker.failure(explained(error)):
                    raise BreakerTripped(str(breaker)) from error
                log.warning("store %r: %s; it is tried again", self._name, explained(error))
                self._sleep(min(PAUSE, breaker.remaining))
            else:
                breaker.success()
                return result

    def _until_next(self) -> float | None:
        """Return the seconds to sleep before the next pass, or None if nothing waits."""
        due = self._try(self._fetching, self._store.next_due)
        if due is None:
            return None
        wait = (due - self._window - self._clock()).total_seconds()
        # due, and yet not handed over: somebody holds it, or it failed
        return min(LONGEST_SLEEP, wait) if wait > 0 else self._backoff.next()


class _ConnectionLost(Exception):
    """The connection has failed for too long; its cause is what it said last."""


class _Gate:
    """Lets a message pass until its lease could end."""

    def __init__(self, clock: Clock, monotonic: Callable[[], float]) -> None:
        self.now = clock
        self._monotonic = monotonic
        self._began = monotonic()

    def hold(self, due_at: datetime) -> None:
        """Nothing is given to a transport before its time here."""

    def may_send(self) -> bool:
        return self._monotonic() - self._began < HELD
