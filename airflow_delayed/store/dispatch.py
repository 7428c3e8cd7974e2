"""Handing over what is due, through the connection of each row. No Airflow here.

A batch is claimed in one short transaction, which notes in the table ``_past`` who holds it until when; sent, with no
transaction open; and settled in another one, which deletes what was confirmed, and claims what comes next. Whoever is
killed in between leaves the rows where they are, free again when their lease ends, so each message is handed over at
least once. Into a queue table of the same database it goes exactly once: there all is one transaction.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from datetime import datetime, timedelta
from threading import Event
from typing import Any, Literal

from sqlalchemy import Column, ColumnElement, Connection, Engine, and_, or_, select

from airflow_delayed.delivery import Clock, Delivery, with_defaults
from airflow_delayed.store import claiming, claims, heartbeat, runs
from airflow_delayed.store.clock import CarriedClock
from airflow_delayed.store.desk import Desk
from airflow_delayed.store.handover import explained
from airflow_delayed.store.lane import Lane
from airflow_delayed.store.memory import forget_old
from airflow_delayed.store.policy import DispatchPolicy
from airflow_delayed.store.rate import TokenBucket
from airflow_delayed.store.report import DispatchFailed, DispatchReport
from airflow_delayed.store.schema import Tables
from airflow_delayed.store.settling import FAILED
from airflow_delayed.store.table_lane import TableLane
from airflow_delayed.store.tally import KEPT_REASONS, Meter

log = logging.getLogger(__name__)

#: The longest sleep until the next look, so that a message stored meanwhile and due earlier is seen; in seconds.
LONGEST_SLEEP = 10.0
#: The sleep when rows are due and others hold them.
HELD_SLEEP = timedelta(seconds=0.5)
SHORTEST_SLEEP = 0.01
#: How often it is written down that the dispatcher is at work, and told how far it is; in seconds.
HEARTBEAT = 10.0
#: How often old ids are forgotten, in seconds, and how many transactions that may take each time.
FORGET_EVERY = 60.0
FORGET_MOST = 20


class Dispatcher:
    """Hands over what is due within the lookahead, or within the transport's horizon if that is shorter.

    :meth:`run` does all of it. Who would rather sleep elsewhere calls :meth:`once` for one pass, :meth:`next_due` for
    how long to sleep, :meth:`finish` in the end, and :meth:`close` whatever happens; from any one thread at a time.
    :meth:`stop` may be called from any other. It has threads of its own, two for each connection and one for the
    leases; each is joined when it is closed.

    :param conn_id: the store's name; on the list ``deliver_conn_ids`` it means its own queue tables.
    :param transports: makes the transport of a connection, given its name and the clock to go by.
    :param deliver_conn_ids: the only connections that it delivers through; rows of others are left, and counted.
    :param schema: where the queue tables are.
    :param database_time: reads the database's clock, which alone decides what is due, held and expired.
    :param ahead: how long before it is handed over a message is claimed, to be there at the millisecond; for those that
        are handed over when they are due, and not long before. While it is held it can not be cancelled.
    :param sleep: takes seconds; by default a sleep that ends when the dispatcher is closed.
    :param meter: is told the connection and what became of each batch, from threads of the dispatcher.
    :param policy: the parameters of :class:`airflow_delayed.store.policy.DispatchPolicy`.
    :raises ValueError: a parameter cannot be, no connection is given, or "exactly_once" is asked of another connection
        than the store's own.
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
        ahead: timedelta = timedelta(0),
        database_time: Callable[[Connection], datetime] = claims.database_time,
        sleep: Callable[[float], object] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        meter: Meter | None = None,
        **policy: Any,
    ) -> None:
        self.policy = DispatchPolicy(**policy)
        check_connections(conn_id, deliver_conn_ids, self.policy.consistency)
        #: Unlike that of any other run, on whatever machine.
        self.id = secrets.token_hex(8)
        #: Counts of all passes.
        self.report = DispatchReport()
        self._tables = tables
        self._conn_id = conn_id
        self._transports = transports
        self._deliver_conn_ids = list(dict.fromkeys(deliver_conn_ids))
        self._schema = schema
        self._ahead = ahead
        self._monotonic = monotonic
        self._stop = Event()
        self._sleep = sleep or self._stop.wait
        self._clock = CarriedClock(monotonic)
        self._desk = Desk(
            engine,
            tables,
            conn_id=conn_id,
            dispatcher=self.id,
            policy=self.policy,
            clock=self._clock,
            database_time=database_time,
            sleep=self._sleep,
            monotonic=monotonic,
            stop=self._stop,
            meter=meter,
        )
        self._lanes: list[Lane | TableLane] | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._failures: dict[str, str] = {}
        self._unavailable: dict[str, tuple[str, BaseException | None]] = {}
        self._seen: float | None = None
        self._forgot: float | None = None
        #: When the last pass began that found nothing.
        self._idle: datetime | None = None

    def run(self, until: timedelta | Literal["empty"] | None = None) -> DispatchReport:
        """Hand over until nothing more is due within the lookahead, or until no row is left, or for a time; and close.

        :param until: "empty" goes on, sleeping in between, until the store has no row of the listed connections, which
            takes as long as messages wait for their next try; a timedelta goes on for that long.
        :raises DispatchFailed: messages were given up, or a connection failed until its breaker tripped. Then the run
            ends early; what was due on the other connections was handed over before.
        :raises BreakerTripped: the store's own database failed for too long.
        :raises TopologyError: the store has no table.
        """
        end = self._monotonic() + until.total_seconds() if isinstance(until, timedelta) else None
        try:
            self.once(None if end is None else end - self._monotonic())
            while until is not None and not self._unavailable:
                due = self.next_due()
                if due is None and end is None:
                    break
                seconds = LONGEST_SLEEP if due is None else min(LONGEST_SLEEP, due.total_seconds())
                if end is not None:
                    left = end - self._monotonic()
                    # what is due at this very moment is no end
                    if left <= 0:
                        break
                    seconds = min(seconds, left)
                self._sleep(max(SHORTEST_SLEEP, seconds))
                self.once(None if end is None else end - self._monotonic())
            return self.finish()
        finally:
            self.close()

    def once(self, most: float | None = None) -> DispatchReport:
        """Hand over what is due within the lookahead by now, on all connections side by side, and return the counts.

        It waits for a connection that fails, in growing pauses, until its breaker trips; others go on meanwhile.

        :param most: after so many seconds no more is claimed, even if more falls due all the time.
        :raises BreakerTripped: the store's own database failed for too long.
        :raises TopologyError: the store has no table.
        """
        lanes = [lane for lane in self._open() if lane.unavailable is None]
        assert self._threads is not None
        self._desk.claim_until = None if most is None else self._monotonic() + most
        began = self._clock()
        self._heartbeat()
        report = DispatchReport(forgotten=self._forget())
        running: list[Future[None]] = []
        try:
            for lane in lanes:
                # in the caller's context, so that it logs where the caller does
                running.append(self._threads.submit(copy_context().run, lane.run, self._threads))
            while wait(running, timeout=HEARTBEAT).not_done:
                self._heartbeat()
                counts = [lane.tally.report.dispatched for lane in lanes]
                log.info(
                    "store %r: %s messages handed over so far",
                    self._conn_id,
                    f"{self.report.dispatched + sum(counts):,}",
                )
        except BaseException:
            # what is being sent is brought to an end, and settled
            self._stop.set()
            wait(running)
            raise
        finally:
            for lane in lanes:
                counted, failures = lane.tally.take()
                report.merge(counted)
                self._failures.update(list(failures.items())[: KEPT_REASONS - len(self._failures)])
                if lane.unavailable is not None:
                    self._unavailable[lane.conn_id] = lane.unavailable, lane.cause
            self.report.merge(report)
        for one in running:
            one.result()
        found = report.dispatched or report.retried or report.failed or report.expired
        self._idle = None if found else began
        return report

    def next_due(self) -> timedelta | None:
        """Return how long to sleep until the next pass, by the database's clock; None: there are no messages.

        Not zero if all that is due is held by others: half a second then. A message that is stored meanwhile may be
        due earlier.
        """

        def look(connection: Connection, now: datetime) -> timedelta | None:
            moments = [
                claiming.next_entry(connection, self._tables, lane.deliver_conn_id, now, lane.reach)
                for lane in self._open()
                if lane.unavailable is None
            ]
            first = min((moment for moment in moments if moment is not None), default=None)
            if first is None:
                return None
            # the pass has seen it, and not got it
            held = self._idle is not None and first <= self._idle
            return max(first - now, HELD_SLEEP if held else timedelta(0))

        return self._desk.reading(look)

    def resume(self, report: DispatchReport, failures: Mapping[str, str]) -> None:
        """Count what an earlier dispatcher of the same run did as this one's."""
        self.report.merge(report)
        self._failures.update(failures)

    def take_up(self, since: datetime) -> None:
        """Count as this run's what was given up for its connections since a moment: by its earlier tries, that is.

        What other dispatchers of the same connections gave up meanwhile is counted too, for nothing tells it apart.

        :param since: when the run's first try began, by the database's clock.
        """
        table = self._tables.failed

        def look(connection: Connection, now: datetime) -> dict[str, str]:
            given_up = select(table.c.Id, table.c.LastError).where(
                table.c.Reason == FAILED, table.c.FailedAt >= since, self._delivered_here(table.c.DeliverConnId)
            )
            return {row.Id: row.LastError or "given up" for row in connection.execute(given_up)}

        found = self._desk.reading(look)
        self.report.failed = max(self.report.failed, len(found))
        self._failures.update(list(found.items())[: KEPT_REASONS - len(self._failures)])

    @property
    def failures(self) -> Mapping[str, str]:
        """A reason by message id for those that were given up, the first thousand of them."""
        return self._failures

    @property
    def unavailable(self) -> bool:
        """Whether a connection failed until its breaker tripped."""
        return bool(self._unavailable)

    def finish(self) -> DispatchReport:
        """Count what is left for others, and return all counts.

        :raises DispatchFailed: see :meth:`check`.
        """
        self.report.left = self._desk.reading(self._count_left)
        self.check()
        return self.report

    def stop(self) -> None:
        """Claim nothing more, bring what is being sent to an end, and free the rest; from any thread."""
        self._stop.set()

    def windows(self) -> dict[str, timedelta]:
        """Return how long before its due time a message is handed over, by connection: its transport may do less."""
        return {lane.conn_id: lane.window for lane in self._open()}

    def check(self) -> None:
        """Raise what went wrong since the beginning.

        :raises DispatchFailed: messages were given up, or connections failed until their breakers tripped.
        """
        if self.report.failed or self._unavailable:
            unavailable = {conn_id: reason for conn_id, (reason, _) in self._unavailable.items()}
            cause = next((cause for _, cause in self._unavailable.values() if cause is not None), None)
            raise DispatchFailed(self._conn_id, self.report, self._failures, unavailable) from cause

    def close(self) -> None:
        """End what is under way, say goodbye in the store, close the transports, and join all threads."""
        self._stop.set()
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        self._desk.keeper.close()
        for lane in self._lanes or ():
            lane.close()
        if self._seen is not None:
            log.info("store %r: %s", self._conn_id, self.report)
            self._desk.try_to_write(
                lambda connection, now: heartbeat.seen(
                    connection, self._tables, self.id, self._delivers(), now, ended=True
                )
            )
            self._seen = None

    def _open(self) -> list[Lane | TableLane]:
        if self._lanes is None:
            rate = self.policy.max_rate
            bucket = None if rate is None else TokenBucket(rate, self._monotonic)
            self._lanes = []
            for conn_id in self._deliver_conn_ids:
                try:
                    self._lanes.append(self._lane(conn_id, bucket))
                except Exception as error:
                    # one that is not defined, or of a type that nothing serves, holds up no other
                    self._unavailable[conn_id] = explained(error), error
                    log.error("connection %r cannot be used: %s", conn_id, explained(error))
            self._threads = ThreadPoolExecutor(max(1, 2 * len(self._lanes)), "delayed-dispatch")
        return self._lanes

    def _lane(self, conn_id: str, bucket: TokenBucket | None) -> Lane | TableLane:
        if conn_id == self._conn_id:
            return TableLane(self._desk, conn_id, self._schema, bucket)
        transport = with_defaults(self._transports(conn_id, self._clock))
        window = min(self.policy.lookahead, transport.horizon)
        return Lane(self._desk, conn_id, transport, window, bucket, self._ahead)

    def _delivers(self) -> list[str | None]:
        return [None if conn_id == self._conn_id else conn_id for conn_id in self._deliver_conn_ids]

    def _heartbeat(self) -> None:
        now = self._monotonic()
        if self._seen is None or now - self._seen >= HEARTBEAT:
            self._desk.writing(
                lambda connection, moment: heartbeat.seen(connection, self._tables, self.id, self._delivers(), moment)
            )
            self._seen = now

    def _forget(self) -> int:
        """Forget what was remembered for long enough, in several short transactions."""
        began, forgotten = self._monotonic(), 0
        if self._forgot is not None and began - self._forgot < FORGET_EVERY:
            return 0
        self._forgot = began
        for _ in range(FORGET_MOST):
            count = self._desk.writing(
                lambda connection, now: forget_old(connection, self._tables, now - self.policy.remember, now)
            )
            forgotten += count
            if count < claims.IDS:
                break
        for _ in range(FORGET_MOST):
            count = self._desk.writing(
                lambda connection, now: runs.forget_old(connection, self._tables, now - self.policy.remember, now)
            )
            if count < runs.FORGOTTEN:
                break
        return forgotten

    def _count_left(self, connection: Connection, now: datetime) -> int:
        table = self._tables.messages
        column = table.c.DeliverConnId
        names = [name for name in self._delivers() if name is not None]
        if None in self._delivers():
            theirs = and_(column.is_not(None), column.not_in(names))
        else:
            theirs = or_(column.is_(None), column.not_in(names))
        return claims.count(connection, table, table.c.Time <= now + self.policy.lookahead, theirs)

    def _delivered_here(self, column: Column[Any]) -> ColumnElement[bool]:
        names = [name for name in self._delivers() if name is not None]
        listed = column.in_(names)
        return or_(column.is_(None), listed) if None in self._delivers() else listed


def check_connections(conn_id: str, deliver_conn_ids: Sequence[str], consistency: str) -> None:
    """Check who is to deliver.

    :raises ValueError: nobody is, or "exactly_once" is asked of another connection than the store's own.
    """
    if not deliver_conn_ids:
        raise ValueError("deliver_conn_ids is empty: name the connections that may deliver")
    others = [name for name in deliver_conn_ids if name != conn_id]
    if consistency == "exactly_once" and others:
        raise ValueError(
            f"consistency='exactly_once' cannot be kept through {', '.join(map(repr, others))}: only queue tables in"
            f" the store's own database have it (deliver_conn_ids={[conn_id]!r}); otherwise choose 'at_least_once', and"
            " let receivers recognise a message's id"
        )
