"""A destination that is a table in the store's own database, in the shape of NServiceBus's SQL transports.

PostgreSQL: NServiceBus.Transport.PostgreSql, PostgreSqlConstants.cs (CreateQueueText, SendText); SQL Server:
NServiceBus.Transport.SqlServer, SqlServerConstants.cs. SQLite and MySQL, which it does not serve, get PostgreSQL's
columns. Headers are one JSON object; the message's id is in it as ``NServiceBus.MessageId``, whatever the sender
put there. The row's Id is a uuid: the message's id itself if that is one in the usual form (lower case, with dashes),
otherwise one made from it, so that the same message is the same row. Expires is left empty: whether a message has
expired is decided before it is handed over.

A row is inserted in the transaction that removes the message from the store, so it is there exactly once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from uuid import UUID, uuid5

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    DateTime,
    Identity,
    Integer,
    MetaData,
    Table,
    Text,
    Uuid,
    insert,
    select,
)
from sqlalchemy.dialects import mssql, mysql
from sqlalchemy.exc import DBAPIError, OperationalError, ProgrammingError
from sqlalchemy.schema import SchemaItem
from sqlalchemy.types import TypeEngine

from airflow_delayed.delivery import State
from airflow_delayed.errors import LimitExceeded
from airflow_delayed.message import DelayedMessage
from airflow_delayed.store.claims import slices
from airflow_delayed.store.engine import first_line
from airflow_delayed.store.handover import Failure
from airflow_delayed.store.install import compare
from airflow_delayed.store.rows import check_queue_name
from airflow_delayed.store.schema import bytes_column

MESSAGE_ID = "NServiceBus.MessageId"

#: The namespace in which ids that are no uuids become some; changing it would make every message a new one.
_NAMESPACE = UUID("b1f6b5a6-6f0c-5d0f-9a63-1f2a7c0e4d11")


def row_id(message_id: str) -> UUID:
    """Return the Id of a message's row."""
    try:
        given = UUID(message_id)
    except ValueError:
        return uuid5(_NAMESPACE, message_id)
    # only one way of writing it stands for itself: otherwise two different ids would be one row
    return given if str(given) == message_id else uuid5(_NAMESPACE, message_id)


def queue_table(name: str, schema: str | None, dialect_name: str) -> Table:
    """Return the table of a destination; its columns have the keys id, headers, body, whatever their names."""
    if dialect_name == "mssql":
        columns = [
            _column("Id", mssql.UNIQUEIDENTIFIER(), key="id", nullable=False),
            _column("CorrelationId", mssql.VARCHAR(255)),
            _column("ReplyToAddress", mssql.VARCHAR(255)),
            _column("Recoverable", Boolean(create_constraint=False), nullable=False, default=True),
            _column("Expires", mssql.DATETIME()),
            _column("Headers", mssql.NVARCHAR(None), key="headers", nullable=False),
            _column("Body", bytes_column(), key="body"),
            _column("RowVersion", BigInteger(), Identity(), nullable=False),
        ]
    else:
        postgres = dialect_name == "postgresql"
        # a counter has to be the key on SQLite and MySQL; upstream's is a serial, which ends after 2^31 messages
        counter = BigInteger().with_variant(Integer(), "sqlite")
        columns = [
            _column("id", Uuid(), primary_key=postgres, unique=not postgres, nullable=False),
            _column("expires", DateTime()),
            _column("headers", Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb"), nullable=False),
            _column("body", bytes_column()),
            _column("seq", counter, Identity(), nullable=False, unique=True)
            if postgres
            else _column("seq", counter, primary_key=True, autoincrement=True),
        ]
    return Table(name, MetaData(), *columns, schema=schema, quote=True, quote_schema=True, sqlite_autoincrement=True)


def _column(name: str, kind: TypeEngine[Any], *items: SchemaItem, **options: Any) -> Column[Any]:
    return Column(name, kind, *items, quote=True, **options)


class QueueTables:
    """The queue tables of one database."""

    def __init__(self, schema: str | None = None) -> None:
        self._schema = schema
        self._tables: dict[str, Table | str] = {}

    def deliver(self, connection: Connection, messages: Sequence[DelayedMessage]) -> dict[str, Failure]:
        """Insert messages into their destinations, and return by id why some could not be.

        A row that is there already with the same content is the same message, delivered before.
        """
        failures: dict[str, Failure] = {}
        by_destination: dict[str, list[DelayedMessage]] = {}
        for message in messages:
            by_destination.setdefault(message.destination, []).append(message)
        for destination, group in by_destination.items():
            table = self._table(connection, destination)
            if isinstance(table, str):
                failures.update((message.message_id, Failure(table, final=True)) for message in group)
            else:
                failures.update(_insert(connection, table, group))
        return failures

    def _table(self, connection: Connection, destination: str) -> Table | str:
        """Return a destination's table, or what is wrong with it."""
        if destination not in self._tables:
            table = queue_table(destination, self._schema, connection.dialect.name)
            try:
                check_queue_name(destination)
                (finding, *_) = compare(connection, table, names_only=True)
            except (LimitExceeded, ProgrammingError) as error:
                # MariaDB has no tables whose names end with a blank, for one
                reason = first_line(error) if isinstance(error, ProgrammingError) else str(error)
                return f"there can be no table {destination!r}: {reason}"
            advice = "run TopologyInstallOperator with create_destinations=True"
            if finding.state is State.MISSING:
                self._tables[destination] = f"there is no table {destination!r}; {advice}"
            elif finding.argument:
                self._tables[destination] = f"table {destination!r} has no {finding.argument}: it is no queue table"
            else:
                self._tables[destination] = table
        return self._tables[destination]

    def look_again(self) -> None:
        """Forget which tables are missing, or are none of ours: they may be mended by now."""
        self._tables = {name: table for name, table in self._tables.items() if isinstance(table, Table)}


def _insert(connection: Connection, table: Table, messages: Sequence[DelayedMessage]) -> dict[str, Failure]:
    try:
        # a destination that refuses must not undo what the batch did for the others
        with connection.begin_nested():
            return _insert_new(connection, table, messages)
    except OperationalError:
        raise
    except DBAPIError as error:
        if error.connection_invalidated:
            raise
        return {message.message_id: Failure(f"table {table.name!r}: {first_line(error)}") for message in messages}


def _insert_new(connection: Connection, table: Table, messages: Sequence[DelayedMessage]) -> dict[str, Failure]:
    ids = {message.message_id: row_id(message.message_id) for message in messages}
    there = {}
    for some in slices(list(ids)):
        statement = select(table.c.id, table.c.headers, table.c.body).where(table.c.id.in_([ids[one] for one in some]))
        there.update({row.id: (row.headers, bytes(row.body or b"")) for row in connection.execute(statement)})
    new, failures = [], {}
    for message in messages:
        headers = {**message.headers, MESSAGE_ID: message.message_id}
        if (found := there.get(ids[message.message_id])) is None:
            content = json.dumps(headers, ensure_ascii=False, separators=(",", ":"))
            new.append({"id": ids[message.message_id], "headers": content, "body": message.body})
        elif found[1] != message.body or not _says(found[0], headers):
            reason = f"table {table.name!r} has this id with other content"
            failures[message.message_id] = Failure(reason, final=True)
    if new:
        connection.execute(insert(table), new)
    return failures


def _says(text: str, headers: dict[str, str]) -> bool:
    try:
        return bool(json.loads(text) == headers)
    except (ValueError, RecursionError):
        return False
