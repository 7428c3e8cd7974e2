"""Sending into a store: an engine and its tables, where messages wait for a dispatcher. No Airflow here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING

from sqlalchemy import delete, select
from sqlalchemy.exc import SQLAlchemyError

import airflow_delayed.store.alchemy  # noqa: F401
from airflow_delayed import lineage
from airflow_delayed.delivery import BatchBounds, DelayStore, Finding, SendReport, TemporaryQueue, TopologyReport
from airflow_delayed.identity import Origin
from airflow_delayed.lineage import Dataset
from airflow_delayed.message import DelayedMessage
from airflow_delayed.store import filters, queries, setup
from airflow_delayed.store.database import Dialect
from airflow_delayed.store.dialects import database_time, dialect_of
from airflow_delayed.store.dispatch import report as dispatch_report
from airflow_delayed.store.engine import close_engine, database_errors, engine_options, first_line, prepare, retried
from airflow_delayed.store.enqueue import conflicting, enqueue, known, note_sent
from airflow_delayed.store.health import StoreCondition, condition
from airflow_delayed.store.network import first_address
from airflow_delayed.store.policy import OnConflict, check_on_conflict
from airflow_delayed.store.queue_replies import QueueTableReplies
from airflow_delayed.store.records import check_limits, check_queue_name, count_rows, within_bounds
from airflow_delayed.store.schema import TABLE, queue_table, store_tables
from airflow_delayed.store.version import check_ready, problem, recorded_version

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine, Table

__all__ = ["StoreTransport", "engine_options", "prepare"]


class StoreTransport(DelayStore):
    """Messages in the tables of one database.

    :param conn_id: names the connection in errors.
    :param engine: makes the engine, prepared by :func:`airflow_delayed.store.engine.prepare`; called when one is
        first needed.
    :param deliver_conn_id: the connection that delivers in the end. Without it, or if it is ``conn_id``, each
        destination is a queue table in the same database.
    :param table: the name of the table of messages.
    :param schema: of the tables; by default the connection's own.
    :param on_conflict: what ``send`` does with an id that is known with other content.
    :param origin: the run of the task whose messages ``send`` stores.
    :param until_due: no dispatcher takes the messages that ``send`` stores before they are due, however far it looks
        ahead; until then they can be cancelled.
    """

    def __init__(
        self,
        conn_id: str,
        engine: Callable[[], Engine],
        deliver_conn_id: str | None = None,
        *,
        table: str = TABLE,
        schema: str | None = None,
        on_conflict: OnConflict = "error",
        origin: Origin | None = None,
        until_due: bool = False,
    ) -> None:
        super().__init__()
        self.conn_id = conn_id
        self.deliver_conn_id = None if deliver_conn_id == conn_id else deliver_conn_id
        self.schema = schema
        self.tables = store_tables(table, schema)
        self.table: Table = self.tables.messages
        self.on_conflict = check_on_conflict(on_conflict)
        self.origin = origin
        self.until_due = until_due
        self._new_engine = engine
        self._checked = False

    @cached_property
    def engine(self) -> Engine:
        """The connection's engine."""
        return self._new_engine()

    @property
    def dialect(self) -> Dialect:
        """What differs by database."""
        return dialect_of(self.engine)

    @property
    def horizon(self) -> timedelta:
        """Zero: the store delivers no message before its due time."""
        return timedelta(0)

    def install(
        self,
        destinations: Iterable[str],
        *,
        create_destinations: bool = False,
        upgrade: bool = False,
        dry_run: bool = False,
    ) -> TopologyReport:
        """Create missing tables, and the queue tables of these destinations if this database delivers.

        :param upgrade: bring tables of an older version to this release's, with their rows, while senders and
            dispatchers are at work.

        :raises TopologyError: a table exists and differs, or a queue table is missing and may not be created.
        :raises LimitExceeded: a destination's name is longer than a table's may be.
        """
        names = self._queue_names(destinations)
        with database_errors(self.conn_id, self.engine):
            if not dry_run:
                self.dialect.allow_readers(self.engine)
            report = setup.install(
                self.engine,
                self.tables,
                names,
                conn_id=self.conn_id,
                create_queues=create_destinations,
                upgrade=upgrade,
                dry_run=dry_run,
                environment=self.host_environment(),
            )
        if not dry_run and (error := problem(self.conn_id, report)):
            raise error
        return report

    def verify(self, destinations: Iterable[str], *, max_delay: timedelta | None = None) -> TopologyReport:
        """Compare the tables, and the queue tables of these destinations if this database delivers.

        The report also has the findings of :meth:`health`, if the tables are there.
        """
        names = self._queue_names(destinations)
        with database_errors(self.conn_id, self.engine):
            report = setup.verify(self.engine, self.tables, names, conn_id=self.conn_id)
        lacks_tables = any(finding.destination is None for finding in report.problems)
        return report if lacks_tables else TopologyReport((*report.findings, *self.health()))

    def health(self) -> Sequence[Finding]:
        """Return what keeps messages from being dispatched in time, such as that no dispatcher is at work.

        Nothing if all is well. The codes are ``no-dispatcher``, ``dispatcher-fails``, ``connection-fails``,
        ``destination-refuses``, ``destination-missing``, ``canary``, ``lease-too-short``, ``overdue``, ``throttled``,
        ``failed``, ``no-service``, ``paused``, ``pause-ends``, ``environment``, ``store-ahead`` and
        ``clock-difference``.

        :raises TopologyError: a table is missing.
        """
        return self.condition().findings

    def condition(self) -> StoreCondition:
        """Return the findings of :meth:`health`, and how late the messages of each destination are.

        :raises TopologyError: a table is missing.
        """
        with self._ready():
            return condition(self.engine, self.tables, self.conn_id, self.host_environment())

    def host_environment(self) -> str | None:
        """Return the name of the environment that dispatchers here belong to; None: they do not compare."""
        return None

    def destinations(self) -> Mapping[str, Sequence[str]]:
        """Return the destinations of messages that wait or have failed, by the connection that delivers them.

        The store's own connection stands for its queue tables. At most 10,000 waiting messages, the first by due time,
        and 10,000 failed ones are looked at.
        """
        with self._ready():
            found = queries.destinations(self.engine, self.tables)
        return {self.conn_id if name is None else name: some for name, some in found.items()}

    def fits(self, extremes: BatchBounds, now: datetime) -> bool:
        """Return whether :meth:`check` passes all messages within these bounds; False where that is not sure."""
        return within_bounds(extremes, queue_tables=self.deliver_conn_id is None)

    def check(self, message: DelayedMessage, now: datetime) -> None:
        """Check a message against the columns: destination 200 characters (63 bytes for a queue table), tag 250.

        :raises LimitExceeded: one is longer.
        """
        check_limits(message)
        if self.deliver_conn_id is None:
            check_queue_name(message.destination)

    def send(self, messages: Iterable[DelayedMessage]) -> SendReport:
        """Store messages, in transactions of 2500; the same message again is counted as a duplicate.

        An id is also known after its message was dispatched or cancelled, for as long as the store remembers it.

        :raises MessageConflict: an id is known with other content and ``on_conflict`` is "error"; nothing of its 2500
            was stored.
        :raises LimitExceeded: a message does not fit; nothing of its 2500 was stored.
        :raises TopologyError: the table is missing.
        """

        def checked() -> Iterator[DelayedMessage]:
            for message in messages:
                self.check(message, message.due_at)
                yield message

        with self._ready():
            return enqueue(
                self.engine,
                self.tables,
                # enqueue checks all other limits
                checked() if self.deliver_conn_id is None else messages,
                self.deliver_conn_id,
                on_conflict=self.on_conflict,
                origin=self.origin,
                until_due=self.until_due,
            )

    def conflicting(self, digests: Mapping[str, bytes]) -> Sequence[str]:
        """Return the ids for which ``send`` would raise MessageConflict; none unless ``on_conflict`` is "error".

        :param digests: by id, see :func:`airflow_delayed.identity.digest_of`.
        """
        if self.on_conflict != "error":
            return []
        with self._ready(), self._reading() as connection:
            return conflicting(connection, self.tables, digests, self.deliver_conn_id)

    def known(self, ids: Sequence[str]) -> set[str]:
        """Return the ids whose messages wait or have failed, and ids that are remembered."""
        with self._ready(), self._reading() as connection:
            return known(connection, self.tables, ids)

    def note_sent(self, messages: Sequence[DelayedMessage]) -> None:
        """Remember messages, without their content, that another transport has confirmed and that never waited here.

        A later ``send`` of them is a duplicate or a conflict, as after a dispatch; and they are listed and counted by
        tag, connection and run as dispatched messages.

        :raises TopologyError: the table is missing.
        """
        with self._ready():
            note_sent(self.engine, self.tables, messages, self.deliver_conn_id, origin=self.origin)

    def anchor(self, turn: str | None) -> datetime | None:
        """Return the time that ``keep_anchor`` stored for this turn of :attr:`origin`; None: no time.

        :raises TopologyError: the table is missing.
        """
        with self._reading() as connection:
            self._check_version()
            return filters.run_anchor(connection, self.tables, self._own_origin, turn)

    def keep_anchor(self, turn: str | None, anchor: datetime) -> None:
        """Store the time from which the relative delays of :attr:`origin` count, for as long as ids are remembered.

        :param turn: identifies the tries between two clears of the task, where each clear makes new messages.
        :raises TopologyError: the table is missing.
        """
        with self._ready():
            origin = self._own_origin
            retried(
                self.engine, lambda connection: filters.keep_run_anchor(connection, self.tables, origin, turn, anchor)
            )

    def count(self) -> int:
        """Return how many messages wait or are being dispatched, for all connections.

        Expired messages count until a dispatcher moves them to the failed ones; failed ones do not count.
        See :meth:`airflow_delayed.store.api.Store.counts` for all of them.
        """
        with self._reading() as connection:
            return count_rows(connection, self.table)

    def now(self) -> datetime:
        """Return the database's time."""
        with (
            database_errors(self.conn_id, self.engine),
            self.engine.connect().execution_options(read_only=True) as connection,
        ):
            return database_time(connection)

    def last_seen(self) -> datetime | None:
        """Return when a dispatcher was last at work for ``deliver_conn_id``; None: not within about a day."""
        with self._reading() as connection:
            return dispatch_report.last_seen(connection, self.tables, self.deliver_conn_id)

    def dataset(self, destination: str) -> Dataset:
        """Return OpenLineage's name of a queue table of this database; of several hosts it names the first."""
        with database_errors(self.conn_id, self.engine), self.engine.connect() as connection:
            # a connection's default schema is known once it is open
            schema, url = self.schema or self.engine.dialect.default_schema_name, self.engine.url
            host, port = first_address(connection)
        return lineage.table(url.get_backend_name(), host, port, url.database, schema, destination)

    def temporary_queue(self, name: str, seconds: float) -> AbstractContextManager[TemporaryQueue]:
        """Return a block with a queue table of its own in this database."""
        check_queue_name(name)
        return _temporary_queue(self.conn_id, self.engine, self.schema, name)

    def replies(self, queue: str) -> QueueTableReplies:
        """Return a queue table of this database in which tasks wait for replies."""
        return QueueTableReplies(self.conn_id, self.engine, queue, schema=self.schema)

    def own_dataset(self) -> Dataset:
        """Return OpenLineage's name of the store's own table."""
        return self.dataset(self.table.name)

    def limit_statements(self, seconds: int) -> None:
        """Let the database end statements that take longer, where it can; call it once, before any other use."""
        self.dialect.limit_statements(self.engine, seconds)

    def describe_server(self) -> str:
        """Connect, look for the store's tables, and return the server's name and version.

        :raises TopologyError: the tables are missing, or those of another release.
        """
        with database_errors(self.conn_id, self.engine):
            with self.engine.connect().execution_options(read_only=True) as connection:
                name = self.dialect.server_name(connection)
            check_ready(self.conn_id, self.engine, self.tables)
            with self.engine.connect().execution_options(read_only=True) as connection:
                version = recorded_version(connection, self.tables)
        return f"Connected to {name}; the tables are of version {version.number if version else 'unknown'}"

    def close(self) -> None:
        """Close all connections."""
        if "engine" in self.__dict__:
            close_engine(self.engine)
            del self.engine
        self._checked = False

    @contextmanager
    def _ready(self) -> Iterator[None]:
        """Check the version of the tables, and raise the database's errors as those of this package."""
        with database_errors(self.conn_id, self.engine, self.tables):
            self._check_version()
            yield

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with (
            database_errors(self.conn_id, self.engine, self.tables),
            self.engine.connect().execution_options(read_only=True) as connection,
        ):
            yield connection

    @property
    def _own_origin(self) -> Origin:
        if self.origin is None:
            raise ValueError("this hook has no origin: pass origin=Origin(dag_id=..., run_id=..., task_id=...)")
        return self.origin

    def _check_version(self) -> None:
        """Check the version of the tables, once."""
        if not self._checked:
            check_ready(self.conn_id, self.engine, self.tables)
            self._checked = True

    def _queue_names(self, destinations: Iterable[str]) -> Sequence[str]:
        names = list(dict.fromkeys(destinations)) if self.deliver_conn_id is None else ()
        for name in names:
            check_queue_name(name)
        return names


#: Seconds between two looks.
_INTERVAL = 0.1


class _TemporaryQueueTable(TemporaryQueue):
    """A queue table of its own; it is dropped whatever is on its way to it."""

    def __init__(self, conn_id: str, engine: Engine, table: Table) -> None:
        super().__init__(table.name)
        self._conn_id = conn_id
        self._engine = engine
        self._table = table

    def arrives(self, seconds: float) -> bool:
        """Look for a row, ten times a second."""
        deadline = time.monotonic() + seconds
        while True:
            with database_errors(self._conn_id, self._engine), self._engine.begin() as connection:
                first = connection.execute(select(self._table.c.seq).limit(1)).scalar_one_or_none()
                if first is not None:
                    connection.execute(delete(self._table).where(self._table.c.seq == first))
                    return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(_INTERVAL, left))

    def end(self) -> None:
        """Drop the table."""
        try:
            self._table.drop(self._engine, checkfirst=True)
        except SQLAlchemyError as error:
            self.remains = f"table {self.name} stays, and has to be dropped by hand: {first_line(error)}"


@contextmanager
def _temporary_queue(conn_id: str, engine: Engine, schema: str | None, name: str) -> Iterator[TemporaryQueue]:
    """Make a queue table for the block."""
    table = queue_table(name, schema, dialect_of(engine))
    with database_errors(conn_id, engine):
        table.create(engine)
    queue = _TemporaryQueueTable(conn_id, engine, table)
    try:
        yield queue
    finally:
        queue.end()
