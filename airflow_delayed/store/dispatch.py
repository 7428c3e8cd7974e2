"""Handing over what is due, through the connection of each row. No Airflow here.

One transaction a batch: claim rows, send them, remove those that were confirmed, commit. Whoever is killed in between
leaves the rows where they were, so each message is handed over at least once; into a queue table of the same database
exactly once. Rows are locked while they are sent: dispatchers side by side pass over each other's. (On SQLite the
whole database is locked for other writers, and a second dispatcher waits.)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal

from sqlalchemy import ColumnElement, Connection, Engine, Table, and_, or_
from sqlalchemy.exc import SQLAlchemyError

from airflow_delayed.delivery import Clock, DelayedDelivery
from airflow_delayed.errors import DelayedError, InvalidMessage
from airflow_delayed.message import DelayedMessage
from airflow_delayed.store import claims
from airflow_delayed.store.clock import CarriedClock
from airflow_delayed.store.engine import database_errors
from airflow_delayed.store.handover import Handover, hand_over
from airflow_delayed.store.queue_table import QueueTables
from airflow_delayed.store.report import DispatchFailed, DispatchReport
from airflow_delayed.store.rows import to_message

log = logging.getLogger(__name__)

#: A run gives up on a connection after so many failed messages: each later claim has to leave them out by name.
MAX_FAILURES = 1000
#: The longest sleep until the next look, so that a message stored meanwhile and due earlier is seen; in seconds.
LONGEST_SLEEP = 10.0
#: The sleep when rows are due and others hold them; in seconds.
HELD_SLEEP = 0.5
SHORTEST_SLEEP = 0.01
#: How often progress is logged; in seconds.
PROGRESS = 10.0


@dataclass(slots=True)
class _Route:
    """One connection on the dispatcher's list. ``transport`` is None for the queue tables of the store's database."""

    conn_id: str
    deliver_conn_id: str | None
    transport: DelayedDelivery | None
    window: timedelta
    failures: dict[str, str] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    unavailable: str | None = None
    cause: Exception | None = None

    def break_off(self, error: Exception) -> None:
        """Leave the connection alone for the rest of the run."""
        # the texts of others may show what must not be in a log; the traceback has the type
        self.unavailable = str(error) if isinstance(error, DelayedError) else type(error).__name__
        self.cause = error
        log.warning("connection %r is not available: %s", self.conn_id, self.unavailable)

    def wanted(self, table: Table, now: datetime) -> ColumnElement[bool]:
        """Return the condition for the rows that this run may still hand over."""
        return and_(claims.waiting(table, self.deliver_conn_id, now), claims.without(table, self.failures, self.closed))


class Dispatcher:
    """Hands over what is due within the lookahead, or within the transport's horizon if that is shorter.

    :param conn_id: the store's name; on the list ``deliver_conn_ids`` it means its own queue tables.
    :param transports: makes the transport of a connection, given its name and the clock to go by.
    :param deliver_conn_ids: the only connections that it delivers through; rows of others are left, and counted.
    :param lookahead: how long before its due time a message is handed over.
    :param batch_size: rows a transaction, for each connection.
    :param schema: where the queue tables are.
    :param database_time: reads the database's clock, which alone decides what is due.
    :raises ValueError: the lookahead is negative, the batch size not positive, or no connection is given.
    """

    def __init__(
        self,
        engine: Engine,
        table: Table,
        *,
        conn_id: str,
        transports: Callable[[str, Clock], DelayedDelivery],
        deliver_conn_ids: Sequence[str],
        lookahead: timedelta,
        batch_size: int = 500,
        schema: str | None = None,
        database_time: Callable[[Connection], datetime] = claims.database_time,
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        if lookahead < timedelta(0):
            raise ValueError(f"lookahead={lookahead} is negative: messages would be handed over after their due time")
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be 1 or more")
        if not deliver_conn_ids:
            raise ValueError("deliver_conn_ids is empty: name the connections that may deliver")
        self._engine = engine
        self._table = table
        self._conn_id = conn_id
        self._transports = transports
        self._deliver_conn_ids = list(dict.fromkeys(deliver_conn_ids))
        self._lookahead = lookahead
        self._batch_size = batch_size
        self._queue_tables = QueueTables(schema)
        self._database_time = database_time
        self._sleep = sleep
        self._monotonic = monotonic
        self._clock = CarriedClock(monotonic)
        self._logged = monotonic()

    def run(self, until: Literal["empty"] | None = None) -> DispatchReport:
        """Hand over until nothing more is due within the lookahead, or until no row is left.

        :param until: "empty" goes on, sleeping in between, until the store has no row of the listed connections except
            those that have expired or failed in this run.
        :raises DispatchFailed: not everything could be handed over; what could was, before this is raised.
        :raises TransportUnavailable: the store's own database cannot be reached; what was committed before stays so.
        :raises TopologyError: the store has no table.
        """
        report = DispatchReport()
        routes: list[_Route] = []
        try:
            for conn_id in self._deliver_conn_ids:
                routes.append(self._route(conn_id))
            with database_errors(self._conn_id, self._engine, self._table):
                self._pass(routes, report)
                while until == "empty" and (seconds := self._until_next(routes)) is not None:
                    self._sleep(seconds)
                    self._pass(routes, report)
                self._count_rest(routes, report)
        finally:
            for route in routes:
                if route.transport is not None:
                    route.transport.close()
            report.failed = sum(len(route.failures) for route in routes)
            log.info("store %r: %s", self._conn_id, report.summary())
        if any(route.failures or route.unavailable for route in routes):
            failures = {name: reason for route in routes for name, reason in route.failures.items()}
            unavailable = {route.conn_id: route.unavailable for route in routes if route.unavailable}
            cause = next((route.cause for route in routes if route.cause), None)
            raise DispatchFailed(self._conn_id, report, failures, unavailable) from cause
        return report

    def _route(self, conn_id: str) -> _Route:
        if conn_id == self._conn_id:
            return _Route(conn_id, None, None, timedelta(0))
        transport = self._transports(conn_id, self._clock)
        return _Route(conn_id, conn_id, transport, min(self._lookahead, transport.horizon))

    def _pass(self, routes: Sequence[_Route], report: DispatchReport) -> None:
        """One batch of each connection in turn, so that a long backlog of one does not hold up the others."""
        active = [route for route in routes if not route.unavailable]
        while active:
            active = [route for route in active if self._batch(route, report) and not route.unavailable]

    def _batch(self, route: _Route, report: DispatchReport) -> int:
        """Hand over one batch, and return how many rows it had."""
        try:
            with self._engine.begin() as connection:
                now = self._database_time(connection)
                self._clock.set(now)
                until = now + route.window
                rows = claims.claim(connection, self._table, route.wanted(self._table, now), until, self._batch_size)
                done = Handover()
                messages = []
                for row in rows:
                    try:
                        messages.append(to_message(row))
                    except InvalidMessage as error:
                        done.failures[row["Id"]] = str(error)
                self._deliver(connection, route, messages, now, done)
                claims.remove(connection, self._table, [message.message_id for message in done.confirmed])
                claims.count_failure(connection, self._table, list(done.failures))
        except SQLAlchemyError:
            raise  # the store's own database
        except Exception as error:
            route.break_off(error)  # rolled back: no row has changed
            return 0
        for message in done.confirmed:
            report.add(route.conn_id, message)
        route.failures.update(done.failures)
        route.closed |= done.closed
        if done.lost is not None:
            route.break_off(done.lost)
        if len(route.failures) >= MAX_FAILURES and not route.unavailable:
            route.unavailable = f"{len(route.failures):,} messages failed, and the others were not tried in this run"
        self._progress(report)
        return len(rows)

    def _deliver(
        self,
        connection: Connection,
        route: _Route,
        messages: list[DelayedMessage],
        now: datetime,
        done: Handover,
    ) -> None:
        if not messages:
            return
        if route.transport is None:
            done.failures.update(self._queue_tables.deliver(connection, messages))
            done.confirmed = [message for message in messages if message.message_id not in done.failures]
        else:
            # what a lost connection leaves neither confirmed nor failed stays as it is, RetryCount too
            done.merge(hand_over(route.transport, messages, now))

    def _until_next(self, routes: Sequence[_Route]) -> float | None:
        """Return the seconds to sleep before the next pass, or None if nothing is left to hand over."""
        waits = []
        with self._engine.connect().execution_options(read_only=True) as connection:
            now = self._database_time(connection)
            for route in routes:
                if route.unavailable:
                    continue
                due = claims.next_due(connection, self._table, route.wanted(self._table, now))
                if due is not None:
                    wait = (due - route.window - now).total_seconds()
                    waits.append(wait if wait > 0 else HELD_SLEEP)
        return max(SHORTEST_SLEEP, min(LONGEST_SLEEP, *waits)) if waits else None

    def _count_rest(self, routes: Sequence[_Route], report: DispatchReport) -> None:
        column = self._table.c.DeliverConnId
        names = [route.deliver_conn_id for route in routes if route.deliver_conn_id is not None]
        if len(names) < len(routes):
            ours, theirs = or_(column.is_(None), column.in_(names)), and_(column.is_not(None), column.not_in(names))
        else:
            ours, theirs = column.in_(names), or_(column.is_(None), column.not_in(names))
        with self._engine.connect().execution_options(read_only=True) as connection:
            now = self._database_time(connection)
            # no message expires before it is due, so the index on Time serves both
            expired = (self._table.c.Time <= now, self._table.c.ExpiresAt <= now, ours)
            report.expired = claims.count(connection, self._table, *expired)
            report.left = claims.count(connection, self._table, self._table.c.Time <= now + self._lookahead, theirs)

    def _progress(self, report: DispatchReport) -> None:
        now = self._monotonic()
        if now - self._logged >= PROGRESS:
            self._logged = now
            log.info("store %r: %s messages handed over so far", self._conn_id, f"{report.dispatched:,}")
