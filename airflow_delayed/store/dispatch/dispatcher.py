"""The dispatcher: it sends due messages through the connection of each row. No Airflow here.

One short transaction claims a batch: it writes leases, with dispatcher and end, to the table ``_past``. The batch is
sent with no transaction open. Another transaction settles it: it deletes the confirmed messages, and claims the next
batch. If a dispatcher is killed in between, the rows stay, and other dispatchers may claim them when the leases end:
each message is dispatched at least once. Into a queue table of the same database it is delivered exactly once, because
claim, delivery and removal are one transaction.
"""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from datetime import datetime, timedelta
from math import inf
from threading import Event
from typing import Any, Literal

from sqlalchemy import Connection, Engine

from airflow_delayed.delivery import Clock, Delivery, with_defaults
from airflow_delayed.errors import DelayedError, explained
from airflow_delayed.identity import MAX_NAME
from airflow_delayed.store.dialects import database_time
from airflow_delayed.store.dispatch import claim, settle
from airflow_delayed.store.dispatch.limits import Activity, RateLimit
from airflow_delayed.store.dispatch.loop import LEASED_SLEEP, POLL, DispatchLoop, Sleep
from airflow_delayed.store.dispatch.prune import Pruner
from airflow_delayed.store.dispatch.report import (
    HEARTBEAT,
    KEPT_REASONS,
    DispatchCounter,
    DispatchFailed,
    DispatchReport,
    Meter,
    Trouble,
    record_heartbeat,
    staying,
)
from airflow_delayed.store.dispatch.repository import DispatchRepository
from airflow_delayed.store.dispatch.worker import SILENCE, ConnectionWorker, QueueTableWorker
from airflow_delayed.store.engine import CarriedClock
from airflow_delayed.store.overview import count_overdue
from airflow_delayed.store.policy import DispatchPolicy, check_connections
from airflow_delayed.store.schema import Tables
from airflow_delayed.threads import Ticker, relaxed_gc

log = logging.getLogger(__name__)

#: Heartbeats from one log line of the counts to the next: 9 s.
_LOGGED_EVERY = 3
#: A message is overdue that has been due for longer than this, and a dispatcher stalled that has dispatched nothing for
#: longer than that, in seconds, though messages have been due for as long.
OVERDUE, STALLED = timedelta(seconds=10), 60.0
#: Overdue messages that are counted for the log.
_MOST_OVERDUE = 10_000
#: How long before it is sent a message is claimed, for a connection that gets messages when they are due.
CLAIMED_AHEAD = timedelta(seconds=0.2)
#: Seconds that a pass waits for a worker after the first has ended: what is due on the others need not wait for it.
BESIDE = 0.01
#: Seconds from one look at a connection that is kept open to the next, and for which the end waits for one that hangs.
SERVICE_EVERY, SERVICE_ENDS = 1.0, 2.0


class Dispatcher:
    """Dispatches the messages due within the lookahead, or within the transport's horizon if that is shorter.

    With ``lookahead="auto"`` a dispatcher that stays sends a message when it is due, where it arrives sooner so
    (:attr:`airflow_delayed.delivery.Delivery.sooner_when_due`). A dispatcher that ends sends ahead, or, beside another
    one that stays, when messages are due. Between the end of a staying one and the next, messages are late.

    :meth:`run` does everything. A caller with its own sleep calls :meth:`once` for each pass, :meth:`next_due` for the
    length of the sleep, :meth:`finish` at the end, and :meth:`close` in any case; from one thread at a time.
    :meth:`stop` may be called from any thread. A dispatcher has two threads for each connection, one more if it
    stays, which keeps the connection open and looks at it each second, and one each for the leases, the signs of life,
    the watchdog and forgetting old ids; :meth:`close` joins them.

    :param conn_id: the store's name; on the list ``deliver_conn_ids`` it means its own queue tables.
    :param transports: returns the transport for the name of a connection and the clock that the transport uses.
    :param deliver_conn_ids: the only connections that it delivers through; it counts the messages of others.
    :param database_time: reads the database's clock, which alone decides what is due, leased and expired.
    :param stays: it goes on until messages are due, and so claims a message that it sends when it is due a moment
        before, to send it to the millisecond. A claimed message cannot be cancelled.
    :param sleep: takes seconds; by default a sleep that ends when the dispatcher is closed.
    :param meter: gets the connection and the outcome of each batch, from threads of the dispatcher.
    :param rate: limits the messages a second together with other dispatchers of this process, instead of ``max_rate``.
    :param policy: the parameters of :class:`airflow_delayed.store.policy.DispatchPolicy`.
    :raises ValueError: a parameter is out of range, or the list has no connection.
    """

    def __init__(
        self,
        engine: Engine,
        tables: Tables,
        *,
        conn_id: str,
        transports: Callable[[str, Clock], Delivery],
        deliver_conn_ids: Sequence[str],
        schema: str | None = None,
        stays: bool = False,
        database_time: Callable[[Connection], datetime] = database_time,
        sleep: Callable[[float], object] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        meter: Meter | None = None,
        rate: RateLimit | None = None,
        dag_id: str | None = None,
        **policy: Any,
    ) -> None:
        self.policy = DispatchPolicy(**policy)
        check_connections(deliver_conn_ids)
        #: Unique among all runs on all machines.
        self.id = secrets.token_hex(8)
        #: Counts of all passes.
        self.report = DispatchReport()
        self._tables = tables
        self._conn_id = conn_id
        self._transports = transports
        self._deliver_conn_ids = list(dict.fromkeys(deliver_conn_ids))
        #: The same in the form of the column DeliverConnId: None for the queue tables of the store's own database.
        self._delivers = [None if name == conn_id else name for name in self._deliver_conn_ids]
        self._schema = schema
        self._stays = stays
        #: Whether it goes on however long a connection fails.
        self._until_stopped = False
        self._ended = False
        #: Connections for which another dispatcher stays, so that this one sends nothing ahead.
        self.beside: set[str] = set()
        self._monotonic = monotonic
        self._runs_in = {"host": socket.gethostname()[:MAX_NAME], "dag_id": dag_id}
        self._stop = Event()
        self.sleep = Sleep(POLL, sleep)
        self._clock = CarriedClock(monotonic)
        self._meters = [meter] if meter else []
        self._repository = DispatchRepository(
            engine,
            tables,
            conn_id=conn_id,
            dispatcher=self.id,
            policy=self.policy,
            clock=self._clock,
            database_time=database_time,
            sleep=sleep or self._stop.wait,
            monotonic=monotonic,
            stop=self._stop,
            rate=rate,
        )
        self._workers: list[ConnectionWorker | QueueTableWorker] | None = None
        #: Of a dispatcher that stays: they keep connections open, and look at them.
        self._tickers: list[Ticker] = []
        self._threads: ThreadPoolExecutor | None = None
        #: What is at work, in this pass or since an earlier one.
        self._running: dict[ConnectionWorker | QueueTableWorker, Future[Any]] = {}
        #: When the last pass began.
        self._began = datetime.min
        self._failures: dict[str, str] = {}
        self._unavailable: dict[str, tuple[str, BaseException | None]] = {}
        #: Writes signs of life, and logs progress, also while a pass waits for the database.
        self._heartbeat: Ticker | None = None
        self._logged = 0
        self._heartbeats = 0
        #: Messages that were dispatched, at the last heartbeat, and when there were fewer.
        self._dispatched = 0
        self._dispatched_at = monotonic()
        #: Whether a message has been due for a minute, and what fails with how many overdue; at the last heartbeat.
        self._has_stale = False
        self._failing = ""
        self._passing = False
        self._pruner = Pruner(self._repository)
        #: When the last pass began, by the database's clock, if it moved no message.
        self._idle: datetime | None = None

    def run(self, until: timedelta | Literal["empty", "stopped"] | None = None) -> DispatchReport:
        """Dispatch until nothing more is due within the lookahead, or until no row is left, or for a time; and close.

        :param until: "empty" goes on, with sleeps in between, until the store has no message of the listed connections,
            retries included; a timedelta goes on for that long; "stopped" until :meth:`stop`, which ends any run, and
            however long a connection fails: whenever its breaker trips, Airflow is asked for the connection again.
        :raises DispatchFailed: messages were given up, or a connection failed until its breaker tripped. Then the run
            ends early, after it has dispatched what was due on the other connections.
        :raises BreakerTripped: the store's own database failed for too long.
        :raises TopologyError: the store has no table.
        """
        self._until_stopped = until == "stopped"
        seconds = until.total_seconds() if isinstance(until, timedelta) else inf if until == "stopped" else until
        loop = DispatchLoop(self, seconds, monotonic=self._monotonic)
        return loop.run() or self.report

    @relaxed_gc()
    def once(self, most: float | None = None) -> DispatchReport:
        """Make one pass: dispatch what is due within the lookahead, on all connections side by side; return the counts.

        A connection that fails is tried again after growing pauses until its breaker trips; the others go on meanwhile.

        :param most: claim nothing more after so many seconds, even if messages keep falling due.
        :raises BreakerTripped: the store's own database failed for too long.
        :raises TopologyError: the store has no table.
        """
        workers = [worker for worker in self._open() if worker.unavailable is None]
        assert self._threads is not None
        self._repository.begin_pass(most)
        self._began = self._clock()
        self._begin_heartbeat()
        for worker in workers:
            if worker not in self._running:
                # in the caller's context, so that it logs where the caller does
                run = self._threads.submit(copy_context().run, worker.run, self._threads)
                self._running[worker] = run
        return self._reap(workers, together=not self._stays)

    def _reap(self, workers: Sequence[ConnectionWorker | QueueTableWorker], *, together: bool) -> DispatchReport:
        """Wait for workers, and return what those have done that have ended.

        :param together: wait for all; False: a worker that takes much longer goes on beside the next passes.
        """
        assert self._threads is not None
        report, ended = DispatchReport(), Future[None]()
        running = [self._running[worker] for worker in workers if worker in self._running]
        try:
            self._passing = True
            counters = [worker.counter.report for worker in workers]
            pruning = self._threads.submit(
                copy_context().run,
                self._pruner.run,
                [ended],
                lambda: sum(counter.dispatched for counter in counters),
                self._nothing_due,
            )
            try:
                if not together:
                    wait(running, return_when=FIRST_COMPLETED)
                wait(running, timeout=None if together else BESIDE)
            finally:
                ended.set_result(None)
            report.forgotten = pruning.result()
        except BaseException:
            # the workers end what they are sending, and settle it
            self._stop.set()
            wait(running)
            raise
        finally:
            self._passing = False
            futures = self._count(report)
        for future in futures:
            future.result()
        moved = report.dispatched or report.retried or report.failed or report.expired
        self._idle = None if moved else self._began
        return report

    def _count(self, report: DispatchReport) -> list[Future[Any]]:
        finished = [worker for worker in self._running if not self._at_work(worker)]
        for worker in finished:
            counted, failures = worker.counter.take()
            report.merge(counted)
            self._failures.update(list(failures.items())[: KEPT_REASONS - len(self._failures)])
            if worker.unavailable is not None and not self._renews(worker):
                self._unavailable[worker.conn_id] = worker.unavailable, worker.cause
                log.error("%s", worker.unavailable)
        self.report.merge(report)
        return [self._running.pop(worker) for worker in finished]

    def _renews(self, worker: ConnectionWorker | QueueTableWorker) -> bool:
        """Give a worker another transport whose connection has failed for too long, unless the run may end for it."""
        if not self._until_stopped or not isinstance(worker, ConnectionWorker):
            return False
        try:
            worker.renew(self._transport(worker.conn_id))
        except Exception as error:
            # the connection is not defined any more, or of an unknown type
            worker.unavailable, worker.cause = explained(error), error
            return False
        return True

    def _at_work(self, worker: ConnectionWorker | QueueTableWorker) -> bool:
        return worker in self._running and not self._running[worker].done()

    def next_due(self) -> timedelta | None:
        """Return how long to sleep until the next pass, by the database's clock; None: there are no messages.

        Half a second if others have leases of all due messages. A message that is stored meanwhile may be due earlier.
        """

        def look(connection: Connection, now: datetime) -> timedelta | None:
            workers = [one for one in self._open() if one.unavailable is None]
            idle = [one for one in workers if not self._at_work(one)]
            moments = [self._repository.next_claim(connection, now, worker.turns) for worker in idle]
            if len(idle) < len(workers):
                # to learn that they have ended
                moments.append(now + LEASED_SLEEP)
            first = min((moment for moment in moments if moment is not None), default=None)
            if first is None:
                return None
            # the last pass could not claim it
            leased = self._idle is not None and first <= self._idle
            return max(first - now, LEASED_SLEEP if leased else timedelta(0))

        return self._repository.reading(look)

    def resume(self, report: DispatchReport, failures: Mapping[str, str]) -> None:
        """Add the counts of an earlier dispatcher of the same run."""
        self.report.merge(report)
        self._failures.update(failures)

    def take_up(self, since: datetime) -> None:
        """Count the messages that earlier tries of this run gave up.

        Messages that other dispatchers of the same connections gave up meanwhile are counted too: rows do not tell.
        """
        reasons = self._repository.reading(
            lambda connection, now: settle.given_up(connection, self._tables, self._delivers, since)
        )
        self.report.failed = max(self.report.failed, len(reasons))
        self._failures.update(list(reasons.items())[: KEPT_REASONS - len(self._failures)])

    @property
    def failures(self) -> Mapping[str, str]:
        """The reason by id of messages that were given up; the first thousand."""
        return self._failures

    @property
    def unavailable(self) -> bool:
        """Whether a connection failed until its breaker tripped."""
        return bool(self._unavailable)

    @property
    def repository(self) -> DispatchRepository:
        """Its work in the database: when it last claimed, and how many messages it has leased; from any thread."""
        return self._repository

    @property
    def stalled(self) -> bool:
        """Whether it has dispatched nothing for a minute of messages that have been due for as long; any thread."""
        return self._has_stale and self._monotonic() - self._dispatched_at > STALLED

    def finish(self) -> DispatchReport:
        """Count the messages of other connections, and return all counts."""
        if self._running:
            self._reap(list(self._running), together=True)
        self.report.left_to_others = self._repository.reading(
            lambda connection, now: claim.count_others(
                connection, self._tables, self._delivers, now + self.policy.farthest
            )
        )
        self.check()
        return self.report

    def stop(self) -> None:
        """Claim nothing more, end what is being sent, release the rest, and end the run; from any thread."""
        self._stop.set()
        self.sleep.wake()

    @property
    def stopped(self) -> bool:
        """Whether :meth:`stop` or :meth:`close` was called."""
        return self._stop.is_set()

    def windows(self) -> dict[str, timedelta]:
        """Return by connection how long before its due time a message is dispatched: lookahead or horizon."""
        return {worker.conn_id: worker.window for worker in self._open()}

    def check(self) -> None:
        """Raise the failures since the beginning.

        :raises DispatchFailed: messages were given up, or connections failed until their breakers tripped.
        """
        if self.report.failed or self._unavailable:
            unavailable = {conn_id: reason for conn_id, (reason, _) in self._unavailable.items()}
            cause = next((cause for _, cause in self._unavailable.values() if cause is not None), None)
            raise DispatchFailed(self._conn_id, self.report, self._failures, unavailable) from cause

    def close(self) -> None:
        """End what is being sent, join all threads, close the transports, and write the end to the store."""
        self._stop.set()
        for ticker in self._tickers:
            ticker.stop()
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
            self._count(DispatchReport())
        ends = time.monotonic() + SERVICE_ENDS
        for ticker in self._tickers:
            ticker.close(max(0.0, ends - time.monotonic()))
        for worker in self._workers or ():
            worker.close()
        if self._heartbeat is not None:
            self._heartbeat.close()
            log.info("store %r: %s", self._conn_id, self.report)
            self._ended = True
            self._repository.try_to_write(self._record_heartbeat)
            self._heartbeat = None
        self._repository.close()

    def _open(self) -> list[ConnectionWorker | QueueTableWorker]:
        if self._workers is None:
            self._workers = []
            for conn_id in self._deliver_conn_ids:
                try:
                    self._workers.append(self._worker(conn_id))
                except Exception as error:
                    # an undefined connection, or one of an unknown type, does not hold up the others
                    self._unavailable[conn_id] = explained(error), error
                    log.error("connection %r cannot be used: %s", conn_id, explained(error))
            self._threads = ThreadPoolExecutor(2 * len(self._workers) + 1, "delayed-dispatch")
        for worker in [one for one in self._workers if isinstance(one, ConnectionWorker)]:
            if not self._at_work(worker):
                worker.refresh()
        return self._workers

    def _worker(self, conn_id: str) -> ConnectionWorker | QueueTableWorker:
        counter = DispatchCounter(conn_id, *self._meters)
        if conn_id == self._conn_id:
            return QueueTableWorker(self._repository, counter, self._schema)
        transport = self._transport(conn_id)
        ahead, window = CLAIMED_AHEAD if self._stays else timedelta(0), self._window(conn_id, transport)
        worker = ConnectionWorker(self._repository, counter, transport, window, ahead)
        if self._stays:
            worker.keep_open()
            self._tickers.append(Ticker("delayed-connection", SERVICE_EVERY, worker.service))
        return worker

    def _transport(self, conn_id: str) -> Delivery:
        transport = with_defaults(self._transports(conn_id, self._clock))
        transport.patient = False
        if self._stays:
            # a dispatcher that ends would leave the messages to its next run, though a broker hangs for a moment only
            transport.silence = SILENCE
        return transport

    def _window(self, conn_id: str, transport: Delivery) -> timedelta:
        """Return how far ahead the messages of a connection are dispatched."""
        lookahead = self.policy.lookahead
        horizon = getattr(transport, "horizon", None)
        if horizon is None and lookahead == "auto":
            raise DelayedError(
                f"connection {conn_id!r}: {type(transport).__name__} has no horizon, so lookahead='auto' does not know"
                " how long it can delay a message; give the class a horizon (zero: it delays none), or the dispatcher a"
                " lookahead of a fixed time"
            )
        farthest = self.policy.farthest if horizon is None else min(self.policy.farthest, horizon)
        if lookahead != "auto" or not transport.sooner_when_due:
            return farthest
        if self._stays:
            return timedelta(0)
        if conn_id in self._repository.reading(lambda connection, now: staying(connection, self._tables, now)):
            self.beside.add(conn_id)
            return timedelta(0)
        return farthest

    def _nothing_due(self) -> bool:
        due = self.next_due()
        return due is None or due > timedelta(0)

    def _begin_heartbeat(self) -> None:
        if self._heartbeat is None:
            self._repository.writing(Activity.HOUSEKEEPING, self._record_heartbeat)
            self._heartbeat = Ticker("delayed-heartbeat", HEARTBEAT, self._beat)

    def _beat(self) -> None:
        dispatched = self.report.dispatched + sum(one.counter.report.dispatched for one in self._workers or ())
        if dispatched != self._dispatched:
            self._dispatched, self._dispatched_at = dispatched, self._monotonic()
        if self._repository.try_to_write(self._record_heartbeat):
            # by itself: messages that cannot be read keep no heartbeat from being written
            self._repository.try_to_read(self._note_overdue)
        self._heartbeats += 1
        if self._heartbeats % _LOGGED_EVERY == 0:
            if self._passing or dispatched != self._logged or self._failing:
                level = logging.WARNING if self._failing else logging.INFO
                count = f"{dispatched:,}"
                log.log(level, "store %r: %s messages dispatched so far%s", self._conn_id, count, self._failing)
            self._logged = dispatched

    def _troubles(self, now: datetime) -> list[Trouble]:
        """Return what it cannot do now: of the database first, then of connections, then of destinations."""
        found = [trouble for worker in self._workers or () for trouble in worker.troubles(now)]
        return self._repository.troubles() + sorted(found, key=lambda one: (one.destination is not None, one.since))

    def _record_heartbeat(self, connection: Connection, now: datetime) -> None:
        state: dict[str, Any] = {
            "worked_at": self._repository.worked_at,
            "troubles": self._troubles(now),
            **self._runs_in,
        }
        workers = [one for one in self._workers or () if isinstance(one, ConnectionWorker)]
        state["lookaheads"] = {one.conn_id: one.lookahead for one in workers}
        state |= {"stays": self._stays, "ended": self._ended}
        record_heartbeat(connection, self._tables, self.id, self._delivers, now, **state)

    def _note_overdue(self, connection: Connection, now: datetime) -> None:
        stale = timedelta(seconds=STALLED)
        self._has_stale = self._count_overdue(connection, now, stale, 1) > 0
        names = {one.destination or one.conn_id or self._conn_id: one.since for one in reversed(self._troubles(now))}
        parts = [f"{name} fails since {since:%H:%M:%S} UTC" for name, since in names.items()]
        if parts:
            overdue = self._count_overdue(connection, now, OVERDUE, _MOST_OVERDUE)
            parts.insert(0, f"{overdue:,}{' or more' if overdue == _MOST_OVERDUE else ''} overdue")
        self._failing = "".join(f", {part}" for part in parts)

    def _count_overdue(self, connection: Connection, now: datetime, late: timedelta, limit: int) -> int:
        return count_overdue(connection, self._tables, self._delivers, now, late, limit)
