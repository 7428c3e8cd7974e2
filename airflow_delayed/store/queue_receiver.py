"""Receiving from a queue table: rows are locked in one transaction, which deletes them when they have been handled.

Also a queue table that is there for one block, in which somebody watches for one message.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime
from threading import Event
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, Table, case, delete, null, select
from sqlalchemy.exc import SQLAlchemyError

from airflow_delayed.delivery import TemporaryQueue
from airflow_delayed.errors import DelayedError, one_line
from airflow_delayed.message import UTC
from airflow_delayed.store.database import slices
from airflow_delayed.store.dialects import database_time, dialect_of
from airflow_delayed.store.dispatch.queue_tables import LONGEST_HEADERS, MESSAGE_ID, QueueTables, bounded
from airflow_delayed.store.drivers import NoTime
from airflow_delayed.store.engine import close_engine, database_errors, first_line
from airflow_delayed.store.notify import Waiter, waiter_for
from airflow_delayed.store.records import check_queue_name
from airflow_delayed.store.schema import MAX_ID, queue_table

log = logging.getLogger(__name__)

#: Bytes of headers and wanted bodies at which a batch is complete.
_BATCH_BYTES = 4 * 1024 * 1024
#: Seconds between two looks at a temporary queue.
_LOOK_AGAIN = 0.1


@dataclass(frozen=True, slots=True)
class QueueRow:
    """A row of a queue table.

    :param message_id: None if its headers have none, or are longer than 64 KiB.
    :param size: bytes of its body.
    :param body: None if it is not wanted, or is longer than wanted.
    """

    message_id: str | None
    size: int
    body: bytes | None = None


class QueueTableReceiver:
    """Hands out the rows of a queue table in the order of their insertion, and deletes those that are :meth:`done`.

    The rows stay locked in an open transaction meanwhile, and other receivers skip them. If the process dies, the
    database frees them. If the connection is lost before rows that are done could be deleted, the next call of
    :meth:`receive` deletes them first. SQLite has no such locks: a table there may have one receiver.

    It has one connection to the database, and on PostgreSQL another one that LISTENs; behind a pooler in transaction
    mode, where no notification comes, it polls every second. One thread may use it; :meth:`stop` is for any.

    :param conn_id: names the connection in errors.
    :param engine: prepared by :func:`airflow_delayed.store.engine.prepare`; this has it alone.
    :param queue: the name of the table.
    :param schema: of the table; by default the connection's own.
    :param body_limit: bytes of the longest body that is read; None: no body.
    """

    def __init__(
        self, conn_id: str, engine: Engine, queue: str, *, schema: str | None = None, body_limit: int | None = None
    ) -> None:
        self._conn_id = conn_id
        self._engine = engine
        self._queue = queue
        self._schema = schema
        self._body_limit = body_limit
        self._table: Table | None = None
        self._waiter: Waiter | None = None
        self._transaction: Connection | None = None
        #: The rows that were handed out; and those that are done, but are not deleted yet.
        self._received: Sequence[int] = ()
        self._undeleted: Sequence[int] = ()
        self._stopped = Event()

    @property
    def all_deleted(self) -> bool:
        """Whether all rows that are done could be deleted."""
        return not self._undeleted

    def receive(self, limit: int) -> list[QueueRow]:
        """Return the next rows, once there are any; none after :meth:`stop`.

        A batch is complete when its headers and wanted bodies have 4 MiB. Rows that have expired are deleted instead.

        :param limit: at most so many.
        :raises DelayedError: there is no such table, or it lacks a column.
        :raises TransportUnavailable: the database cannot be reached.
        """
        self.again()
        with database_errors(self._conn_id, self._engine):
            table = self._checked()
            if self._waiter is None:
                self._waiter = waiter_for(self._engine, table, nullcontext)
                log.info("connection %r: receiving from queue table %r", self._conn_id, self._queue)
            while not self._stopped.is_set():
                self._delete_done()
                if rows := self._take(table, limit):
                    return rows
                self._waiter.wait(self._waiter.longest)
        return []

    def done(self) -> None:
        """Delete the rows that :meth:`receive` returned last; where that fails, its next call does it."""
        self._undeleted, self._received = self._received, ()
        try:
            self._delete_done()
        # each driver has its own errors, beside those of SQLAlchemy
        except Exception as error:
            log.warning(
                "connection %r: %s rows of table %r are handled and not deleted yet, which is tried again: %s",
                self._conn_id,
                f"{len(self._undeleted):,}",
                self._queue,
                type(error).__name__,
            )

    def again(self) -> None:
        """Free the rows that :meth:`receive` returned last, to be received again."""
        self._received = ()
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            # of a connection that is lost there is nothing to free
            with suppress(Exception):
                transaction.close()

    def stop(self) -> None:
        """End :meth:`receive`; from any thread."""
        self._stopped.set()
        if self._waiter is not None:
            self._waiter.wake()

    def close(self) -> None:
        """Free what is not done, and close all connections."""
        with database_errors(self._conn_id, self._engine):
            try:
                self.again()
                self._delete_done()
            finally:
                if self._waiter is not None:
                    self._waiter.close()
                close_engine(self._engine)

    def _checked(self) -> Table:
        if self._table is None:
            self._table = checked_table(self._conn_id, self._engine, self._queue, self._schema)
        return self._table

    def _delete_done(self) -> None:
        """Delete in the transaction that has locked the rows; in a new one after it was lost, and on SQLite."""
        transaction, self._transaction = self._transaction, None
        if self._undeleted:
            with transaction or self._engine.connect() as connection:
                table = self._checked()
                for portion in slices(self._undeleted):
                    connection.execute(dialect_of(connection).delete_rows(table.c.seq, portion))
                connection.commit()
            self._undeleted = ()

    def _take(self, table: Table, limit: int) -> list[QueueRow]:
        dialect = dialect_of(self._engine)
        connection = self._engine.connect().execution_options(read_only=not dialect.locks_rows)
        try:
            numbers, expired = self._lock(connection, table, limit)
            rows = [row for portion in slices(numbers) for row in self._read(connection, table, portion)]
        except BaseException:
            connection.close()
            raise
        self._received = [*numbers, *expired]
        if dialect.locks_rows and self._received:
            self._transaction = connection
        else:
            connection.close()
        if expired:
            log.info("table %r: %s rows have expired, and are deleted", self._queue, f"{len(expired):,}")
        if not rows:
            self.done()
        return rows

    def _lock(self, connection: Connection, table: Table, limit: int) -> tuple[list[int], list[int]]:
        """Lock the next rows, and return the numbers of those of one batch, and of those that have expired."""
        dialect = dialect_of(connection)
        sizes = dialect.length(table.c.headers), dialect.length(table.c.body)
        first = select(table.c.seq, table.c.expires, *sizes).order_by(table.c.seq).limit(limit)
        found = connection.execute(first.with_for_update(skip_locked=True)).all()
        numbers: list[int] = []
        expired: list[int] = []
        size = 0
        now = database_time(connection) if any(row[1] is not None for row in found) else None
        for number, expires, headers, body in found:
            if now is not None and _has_expired(expires, now):
                expired.append(number)
                continue
            size += min(headers or 0, LONGEST_HEADERS) + (body if self._wants(body) else 0)
            if numbers and size > _BATCH_BYTES:
                break
            numbers.append(number)
        return numbers, expired

    def _read(self, connection: Connection, table: Table, numbers: Sequence[int]) -> list[QueueRow]:
        size = dialect_of(connection).length(table.c.body)
        columns: list[ColumnElement[Any]] = [bounded(connection, table.c.headers, LONGEST_HEADERS), size]
        if self._body_limit is not None:
            columns.append(case((size <= self._body_limit, table.c.body), else_=null()))
        found = select(*columns).where(table.c.seq.in_(numbers)).order_by(table.c.seq)
        return [
            QueueRow(_message_id(headers), length or 0, as_bytes(rest[0]) if rest else None)
            for headers, length, *rest in connection.execute(found)
        ]

    def _wants(self, size: int | None) -> bool:
        return self._body_limit is not None and size is not None and size <= self._body_limit


def checked_table(conn_id: str, engine: Engine, queue: str, schema: str | None) -> Table:
    """Return a queue table.

    :raises DelayedError: there is no such table, or it lacks a column.
    """
    check_queue_name(queue)
    with engine.connect().execution_options(read_only=True) as connection:
        found = QueueTables(schema).table(connection, queue)
    if isinstance(found, str):
        raise DelayedError(f"connection {conn_id!r}: {found}")
    return found


def _has_expired(expires: datetime | None, now: datetime) -> bool:
    # what cannot be read never expires
    if expires is None or isinstance(expires, NoTime):
        return False
    return (expires.replace(tzinfo=UTC) if expires.tzinfo is None else expires) <= now


def as_bytes(body: Any) -> bytes | None:
    """Return a column of a queue table as bytes."""
    # another program may have written text
    return body.encode(errors="surrogateescape") if isinstance(body, str) else None if body is None else bytes(body)


def _message_id(headers: str | None) -> str | None:
    try:
        found = json.loads(headers or "")[MESSAGE_ID]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    # a longer one is no id; and an event's database may hold neither a null nor half a character
    return one_line(found) if isinstance(found, str) and 0 < len(found) <= MAX_ID else None


class TemporaryQueueTable(TemporaryQueue):
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
            time.sleep(min(_LOOK_AGAIN, left))

    def end(self) -> None:
        """Drop the table."""
        try:
            self._table.drop(self._engine, checkfirst=True)
        except SQLAlchemyError as error:
            self.remains = f"table {self.name} stays, and has to be dropped by hand: {first_line(error)}"


@contextmanager
def temporary_queue_table(conn_id: str, engine: Engine, schema: str | None, name: str) -> Iterator[TemporaryQueue]:
    """Make a queue table for the block."""
    table = queue_table(name, schema, dialect_of(engine))
    with database_errors(conn_id, engine):
        table.create(engine)
    queue = TemporaryQueueTable(conn_id, engine, table)
    try:
        yield queue
    finally:
        queue.end()
