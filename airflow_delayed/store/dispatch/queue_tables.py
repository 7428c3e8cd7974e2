"""A destination that is a table in the store's own database, in the shape of NServiceBus's SQL transports.

PostgreSQL: NServiceBus.Transport.PostgreSql, PostgreSqlConstants.cs (CreateQueueText, SendText). SQLite and MySQL,
which NServiceBus does not serve, get the same columns. Headers are one JSON object; its ``NServiceBus.MessageId`` is
always the message's id. The row's Id is a UUID: the message's id if that is a UUID in the usual form (lower case, with
dashes), otherwise a UUID made from it, so that the same message is the same row. Expires is empty: a message that has
expired is not delivered.

A row is inserted in the transaction that removes the message from the store, so it is there exactly once. A row that
its table refuses is found by inserting ever smaller parts of its group, so that the rows beside it are delivered.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from uuid import UUID, uuid5

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Table,
    case,
    insert,
    null,
    select,
)
from sqlalchemy.exc import DBAPIError, ProgrammingError

from airflow_delayed.delivery import State
from airflow_delayed.errors import LimitExceeded
from airflow_delayed.message import TRACE_HEADERS, DelayedMessage, traced_headers
from airflow_delayed.store.database import slices
from airflow_delayed.store.dialects import dialect_of
from airflow_delayed.store.dispatch.attempt import Failure
from airflow_delayed.store.engine import first_line, impatient, is_locked, refuses_row
from airflow_delayed.store.records import check_queue_name
from airflow_delayed.store.schema import queue_table
from airflow_delayed.store.setup import compare

MESSAGE_ID = "NServiceBus.MessageId"
#: Bytes of the longest headers that are read of a row: who may insert rows writes JSON that takes 27 times its size of
#: memory. RabbitMQ takes headers of twice that, SQS less.
LONGEST_HEADERS = 65_536
#: Milliseconds that an insert waits for a locked table, where the database can wait for less than a second: the
#: messages of other tables wait with it.
_LOCK_WAIT = 50

#: The namespace of UUIDs made from other ids; with another namespace each message would become a new one.
_NAMESPACE = UUID("b1f6b5a6-6f0c-5d0f-9a63-1f2a7c0e4d11")


def row_id(message_id: str) -> UUID:
    """Return the Id of a message's row."""
    try:
        given = UUID(message_id)
    except ValueError:
        return uuid5(_NAMESPACE, message_id)
    # only the usual form: otherwise two ids that write the same UUID differently would be one row
    return given if str(given) == message_id else uuid5(_NAMESPACE, message_id)


def bounded(connection: Connection, column: Column[Any], limit: int) -> ColumnElement[Any]:
    """Return a column of a queue table, NULL where it is longer than a limit in bytes: others insert rows too."""
    return case((dialect_of(connection).length(column) <= limit, column), else_=null())


class QueueTables:
    """The queue tables of one database."""

    def __init__(self, schema: str | None = None) -> None:
        self._schema = schema
        self._tables: dict[str, Table | str] = {}

    def deliver(self, connection: Connection, messages: Sequence[DelayedMessage]) -> dict[str, Failure]:
        """Insert messages into their destinations, and return the failures by id.

        A row that is there with the same content is the same message, delivered before.
        """
        failures: dict[str, Failure] = {}
        by_destination: dict[str, list[DelayedMessage]] = {}
        for message in messages:
            by_destination.setdefault(message.destination, []).append(message)
        if messages:
            dialect_of(connection).check_at_once(connection)
            with impatient(connection, _LOCK_WAIT):
                for destination, group in by_destination.items():
                    failures.update(self._deliver_to(connection, destination, group))
        return failures

    def _deliver_to(
        self, connection: Connection, destination: str, messages: Sequence[DelayedMessage]
    ) -> dict[str, Failure]:
        # a savepoint: a destination that fails must not undo the deliveries to others
        savepoint = connection.begin_nested()
        try:
            failures = self._insert(connection, destination, messages)
        except DBAPIError as error:
            if error.connection_invalidated:
                raise
            # fails too if the transaction is lost, as by a deadlock on MySQL
            savepoint.rollback()
            if refuses_row(connection, error):
                return self._deliver_parts(connection, destination, messages, error)
            reason = f"table {destination!r} is locked by another transaction."
            if not is_locked(connection, error):
                reason = f"table {destination!r}: {first_line(error)}."
                # it may have been dropped or changed
                self._tables.pop(destination, None)
            return {message.message_id: Failure(reason, refused=True) for message in messages}
        savepoint.commit()
        return failures

    def _deliver_parts(
        self, connection: Connection, destination: str, messages: Sequence[DelayedMessage], error: DBAPIError
    ) -> dict[str, Failure]:
        if len(messages) == 1:
            return {messages[0].message_id: Failure(f"table {destination!r}: {first_line(error)}")}
        middle = len(messages) // 2
        failures = self._deliver_to(connection, destination, messages[:middle])
        refusal = next((failure for failure in failures.values() if failure.refused), None)
        if refusal is None:
            return failures | self._deliver_to(connection, destination, messages[middle:])
        # the table takes nothing at present, and each further try might wait for a lock
        return failures | {message.message_id: refusal for message in messages[middle:]}

    def _insert(
        self, connection: Connection, destination: str, messages: Sequence[DelayedMessage]
    ) -> dict[str, Failure]:
        table = self.table(connection, destination)
        if isinstance(table, str):
            return {message.message_id: Failure(table, final=True) for message in messages}
        return _insert_new(connection, table, messages)

    def table(self, connection: Connection, destination: str) -> Table | str:
        """Return a destination's table, or the reason why it has none."""
        if destination not in self._tables:
            table = queue_table(destination, self._schema, dialect_of(connection))
            try:
                check_queue_name(destination)
                findings = compare(connection, table, names_only=True)
            except (LimitExceeded, ProgrammingError) as error:
                # MariaDB has no tables whose names end with a blank, for one
                reason = first_line(error) if isinstance(error, ProgrammingError) else str(error)
                return f"there can be no table {destination!r}: {reason}"
            advice = "run TopologyInstallOperator with create_destinations=True"
            # a column of another type is a warning: messages may go through
            lacking = [each.argument for each in findings if each.state is State.DIFFERS]
            if findings[0].state is State.MISSING:
                self._tables[destination] = f"there is no table {destination!r}; {advice}"
            elif lacking:
                self._tables[destination] = f"table {destination!r} has no {lacking[0]}: it is no queue table"
            else:
                self._tables[destination] = table
        return self._tables[destination]

    def look_again(self) -> None:
        """Check tables again that were missing or had wrong columns."""
        self._tables = {name: table for name, table in self._tables.items() if isinstance(table, Table)}


def _insert_new(connection: Connection, table: Table, messages: Sequence[DelayedMessage]) -> dict[str, Failure]:
    ids = {message.message_id: row_id(message.message_id) for message in messages}
    contents = {
        message.message_id: json.dumps(
            {**traced_headers(message), MESSAGE_ID: message.message_id}, ensure_ascii=False, separators=(",", ":")
        )
        for message in messages
    }
    # an earlier try may have had another trace; what is much longer is not the same message
    longest = max(len(content.encode()) for content in contents.values()) + LONGEST_HEADERS
    headers = bounded(connection, table.c.headers, longest).label("headers")
    body = bounded(connection, table.c.body, max(len(message.body) for message in messages)).label("body")
    there = {}
    for some in slices(list(ids)):
        statement = select(table.c.id, headers, body).where(table.c.id.in_([ids[one] for one in some]))
        there.update({row.id: (row.headers, bytes(row.body or b"")) for row in connection.execute(statement)})
    new, failures = [], {}
    for message in messages:
        if (found := there.get(ids[message.message_id])) is None:
            row = {"id": ids[message.message_id], "headers": contents[message.message_id], "body": message.body}
            new.append(row)
        elif found[1] != message.body or not _says(found[0], {**message.headers, MESSAGE_ID: message.message_id}):
            reason = f"table {table.name!r} has this id with other content"
            failures[message.message_id] = Failure(reason, final=True)
    if new:
        connection.execute(insert(table), new)
    return failures


def _says(text: str | None, headers: dict[str, str]) -> bool:
    try:
        there = json.loads(text or "")
        # an earlier try may have had another trace
        return {name: there[name] for name in there if name in headers or name not in TRACE_HEADERS} == headers
    except (ValueError, RecursionError, TypeError):
        return False
