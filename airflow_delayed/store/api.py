"""A store: an engine and its tables. Messages wait here until a dispatcher hands them over. No Airflow here."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING

from airflow_delayed import lineage
from airflow_delayed.delivery import DelayStore, SendReport, TopologyReport
from airflow_delayed.extremes import Extremes
from airflow_delayed.lineage import Dataset
from airflow_delayed.message import DelayedMessage
from airflow_delayed.origin import Origin
from airflow_delayed.store import claims, heartbeat, runs, setup, storing
from airflow_delayed.store.bounds import within_bounds
from airflow_delayed.store.conflicts import OnConflict, check_on_conflict
from airflow_delayed.store.contention import retried
from airflow_delayed.store.engine import database_errors
from airflow_delayed.store.placing import conflicting, known
from airflow_delayed.store.rows import check_limits, check_queue_name
from airflow_delayed.store.schema import TABLE, store_tables
from airflow_delayed.store.versions import check_ready, problem

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine, Table


class Store(DelayStore):
    """Messages in the tables of one database.

    :param conn_id: names the connection in errors.
    :param engine: makes the engine, prepared by :func:`airflow_delayed.store.engine.prepare`; called when one is
        first needed.
    :param deliver_conn_id: the connection that delivers in the end. Without it, or if it is ``conn_id``, each
        destination is a queue table in the same database.
    :param table: the name of the table of messages.
    :param schema: of the tables; by default the connection's own.
    :param on_conflict: what ``send`` does with an id that is known with other content.
    :param origin: the run of a task that ``send`` stores for.
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
    ) -> None:
        super().__init__()
        self.conn_id = conn_id
        self.deliver_conn_id = None if deliver_conn_id == conn_id else deliver_conn_id
        self.schema = schema
        self.tables = store_tables(table, schema)
        self.table: Table = self.tables.messages
        self.on_conflict = check_on_conflict(on_conflict)
        self.origin = origin
        self._new_engine = engine
        self._checked = False

    @cached_property
    def engine(self) -> Engine:
        """The connection's engine."""
        return self._new_engine()

    @property
    def horizon(self) -> timedelta:
        """Zero: the store itself delivers nothing ahead."""
        return timedelta(0)

    def install(
        self, destinations: Iterable[str], *, create_destinations: bool = False, dry_run: bool = False
    ) -> TopologyReport:
        """Make the tables, and the queue tables of these destinations if this database delivers.

        Tables of an older release are brought up to this one's, with their rows.

        :raises TopologyError: a table is there and differs, or a queue table is missing and not to be made.
        :raises LimitExceeded: a destination's name is longer than a table's may be.
        """
        names = self._queue_names(destinations)
        with database_errors(self.conn_id, self.engine):
            if self.engine.dialect.name == "sqlite" and not dry_run:
                self._write_ahead()
            report = setup.install(
                self.engine,
                self.tables,
                names,
                schema=self.schema,
                create_queues=create_destinations,
                dry_run=dry_run,
            )
        if not dry_run and (error := problem(self.conn_id, report)):
            raise error
        return report

    def verify(self, destinations: Iterable[str], *, max_delay: timedelta | None = None) -> TopologyReport:
        """Compare the tables, and the queue tables of these destinations if this database delivers."""
        names = self._queue_names(destinations)
        with database_errors(self.conn_id, self.engine):
            return setup.look(self.engine, self.tables, names, schema=self.schema)

    def fits(self, extremes: Extremes, now: datetime) -> bool:
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

        An id is known also after its message was handed over or cancelled, for as long as the dispatcher remembers it.

        :raises MessageConflict: an id is known with other content and ``on_conflict`` is "error"; nothing of its 2500
            was stored.
        :raises LimitExceeded: a message does not fit; nothing of its 2500 was stored.
        :raises TopologyError: the table is missing.
        """

        def checked() -> Iterator[DelayedMessage]:
            for message in messages:
                self.check(message, message.due_at)
                yield message

        with database_errors(self.conn_id, self.engine, self.tables):
            self._check_version()
            return storing.store(
                self.engine,
                self.tables,
                # what else there is to check is checked there
                checked() if self.deliver_conn_id is None else messages,
                self.deliver_conn_id,
                on_conflict=self.on_conflict,
                origin=self.origin,
            )

    def conflicting(self, digests: Mapping[str, bytes]) -> Sequence[str]:
        """Return the ids for which ``send`` would raise MessageConflict; none unless ``on_conflict`` is "error".

        :param digests: by id, see :func:`airflow_delayed.identity.digest_of`.
        """
        if self.on_conflict != "error":
            return []
        with self._reading() as connection:
            self._check_version()
            return conflicting(connection, self.tables, digests, self.deliver_conn_id)

    def known(self, ids: Sequence[str]) -> set[str]:
        """Return the ids that wait, have failed, or are remembered to have been handed over or cancelled."""
        with self._reading() as connection:
            self._check_version()
            return known(connection, self.tables, ids)

    def note_sent(self, messages: Sequence[DelayedMessage]) -> None:
        """Remember messages, without their content, that their transport has confirmed and that never waited here.

        To ``send`` them after that is a duplicate or a conflict, as if a dispatcher had handed them over.

        :raises TopologyError: the table is missing.
        """
        with database_errors(self.conn_id, self.engine, self.tables):
            self._check_version()
            storing.note_sent(self.engine, self.tables, messages)

    def anchor(self, turn: str | None) -> datetime | None:
        """Return what ``keep_anchor`` has kept for this turn of :attr:`origin`; None if nothing.

        :raises TopologyError: the table is missing.
        """
        with self._reading() as connection:
            self._check_version()
            return runs.anchor(connection, self.tables, self._own_origin, turn)

    def keep_anchor(self, turn: str | None, anchor: datetime) -> None:
        """Keep what the relative delays of :attr:`origin` count from, for as long as ids are remembered.

        :param turn: where each clear of the task means other messages, what its tries have in common.
        :raises TopologyError: the table is missing.
        """
        with database_errors(self.conn_id, self.engine, self.tables):
            self._check_version()
            origin = self._own_origin
            retried(self.engine, lambda connection: runs.keep_anchor(connection, self.tables, origin, turn, anchor))

    def count(self) -> int:
        """Return how many messages wait or are being handed over, whoever delivers them.

        Those count too that have expired and that no dispatcher has moved to the failed ones yet; the failed ones do
        not. See :meth:`counts` for all of them.
        """
        with self._reading() as connection:
            return claims.count(connection, self.table)

    def now(self) -> datetime:
        """Return the database's time."""
        with (
            database_errors(self.conn_id, self.engine),
            self.engine.connect().execution_options(read_only=True) as connection,
        ):
            return claims.database_time(connection)

    def last_seen(self) -> datetime | None:
        """Return when a dispatcher was last at work for ``deliver_conn_id``; None: not within about a day."""
        with self._reading() as connection:
            return heartbeat.last_seen(connection, self.tables, self.deliver_conn_id)

    def dataset(self, destination: str) -> Dataset:
        """Return OpenLineage's name of a queue table of this database."""
        with database_errors(self.conn_id, self.engine), self.engine.connect():
            # which schema is the connection's own is known only then
            dialect, url = self.engine.dialect, self.engine.url
        schema = self.schema or dialect.default_schema_name
        return lineage.table(dialect.name, url.host, url.port, url.database, schema, destination)

    def own_dataset(self) -> Dataset:
        """Return OpenLineage's name of the store's own table."""
        return self.dataset(self.table.name)

    def close(self) -> None:
        """Close all connections."""
        if "engine" in self.__dict__:
            self.engine.dispose()
            del self.engine
            self.__dict__.pop("_operations", None)
        self._checked = False

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
        """Check once that the tables are of this release."""
        if not self._checked:
            check_ready(self.conn_id, self.engine, self.tables)
            self._checked = True

    def _queue_names(self, destinations: Iterable[str]) -> Sequence[str]:
        names = list(dict.fromkeys(destinations)) if self.deliver_conn_id is None else ()
        for name in names:
            check_queue_name(name)
        return names

    def _write_ahead(self) -> None:
        """Let readers of an SQLite file go on while one writes; the file remembers it."""
        connection = self.engine.raw_connection()
        try:
            for pause in (0.01, 0.1, 1, None):
                try:
                    connection.cursor().execute("PRAGMA journal_mode=WAL")
                    return
                except sqlite3.OperationalError:
                    # of two that set it at once SQLite refuses one right away, whatever its timeout
                    if pause is None:
                        raise
                    time.sleep(pause)
        finally:
            connection.close()
