"""The tables of a store: messages, what becomes of them, and who works on them.

The first six columns of the table of messages are those of NServiceBus's SqlServerDelayedMessageStore
(NServiceBus.Transport.Msmq 2.0.7, Sql/SqlConstants.cs), with their names and meaning:

============= ===================================================================================================
Id            the message id; at most 250 characters, compared byte by byte
Destination   the queue that receives it; at most 200 characters
State         the body
Time          the due time, in UTC with microseconds
Headers       a JSON object of text by text, as UTF-8; under the empty name an object with the headers of its trace
RetryCount    the number of failed attempts
DeliverConnId the Airflow connection that delivers it; null: the destination is a queue table in this database
Tag           a label by which a user finds and cancels messages; at most 250 characters
ExpiresAt     it is not delivered from this time on
Digest        a hash of the content, 16 bytes (:func:`airflow_delayed.identity.content_digest`)
StoredAt      when it was stored, by the database's clock
NextTry       after a failure: the earliest time of the next attempt; null: at once
LastError     the last failure, without a body or a header's value
Run           the number of the task's run that stored it, in the table ``_runs``; null: unknown
ReplacedAt    when it replaced another message of the same id, by the database's clock; null: never
============= ===================================================================================================

The names of the other tables begin with the name of the table of messages:

- ``_past``: leases and remembered ids; no body. A dispatcher that claims a message writes its id here, with a lease.
  While the message is in its table, the row is the lease: which dispatcher, until when. Afterwards the row means that
  the message was dispatched, by its Outcome to its destination or, given up, to the error destination. So a claim
  writes to no message. Ids of cancelled, purged and erased messages stay here. Tag, Run and DeliverConnId are those of
  the message, to find it when it has left the store. Rows whose Id begins with a blank are marks, which a transaction
  locks, and no messages.
- ``_failed``: messages that were given up or expired, with all their content, until they are retried or purged.
- ``_cancelled``: cancelled messages with all their content, for as long as the cancel can be taken back: up to Until.
  Reason and FailedAt are those of a message that had failed; null: it waited. Dispatchers, and the next cancel or
  restore, delete the rows whose time is over.
- ``_audit``: each change, with its user and time; no content.
- ``_runs``: the runs of tasks that stored messages, to find messages by them; in a task loop, the iteration; the moment
  from which relative delays count (Anchor) and, where each clear makes new messages, the turn.
- ``_dispatchers``: the dispatchers, their connections, when each was last seen, when it last finished a piece of work
  (WorkedAt), what it cannot do (Troubles, JSON; null: nothing), its host, the DAG whose task it is (DagId, null: no
  task), and how many seconds before its due time it takes a message for each broker, and whether it stays (Reaches).
- ``_pauses``: the destinations that no dispatcher sends to until the row is deleted, and the connections (Destination
  null; both null: the queue tables). Seq is that of its row in ``_audit``, which has who did it and why.
- ``_version``: one row with the version of these tables, since when (At), and the oldest version whose release can use
  them (UsableFrom).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import (
    CheckConstraint,
    Column,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    literal_column,
    text,
)
from sqlalchemy import Dialect as SqlDialect
from sqlalchemy.schema import SchemaItem
from sqlalchemy.sql.elements import quoted_name
from sqlalchemy.types import DateTime, TypeDecorator, TypeEngine

from airflow_delayed.fields import FIELDS, MAX_TAG, MessageField
from airflow_delayed.identity import MAX_NAME
from airflow_delayed.message import UTC
from airflow_delayed.store.database import LONG_TEXT, NUMBER, PARTIAL_INDEXES, SHORT_TEXT, Dialect, bytes_type
from airflow_delayed.store.dialects import dialect_for
from airflow_delayed.store.policy import MAX_DESTINATION

TABLE = "delayed_messages"

MAX_ID = 250
MAX_CONN_ID = 250
MAX_DISPATCHER = 64
#: A turn is a number and a UUID, with their names.
MAX_TURN = 100
MAX_ERROR = 1000
#: Bytes of a body: the default limit of RabbitMQ before its release 4; other transports have lower limits.
MAX_BODY = 128 * 1024 * 1024
#: Bytes of headers as JSON.
MAX_HEADER_BYTES = 16 * 1024 * 1024
#: PostgreSQL's longest name is 63 bytes; the names of the indexes begin with the table's.
MAX_TABLE_NAME = 50

#: The states of messages that have left the store and are listed: values of the column Outcome.
LEFT = ("dispatched", "cancelled")

#: The version of the tables. A release that adds tables or columns raises it by one.
VERSION = 1
#: The oldest version whose release can use these tables: it writes each column that must have a value, and moves
#: messages without losing what it does not know.
USABLE_FROM = 1


class UtcTime(TypeDecorator[datetime]):
    """An aware time with microseconds: stored with a zone where the database has such a type, else in UTC."""

    impl = DateTime
    cache_ok = True

    def load_dialect_impl(self, dialect: SqlDialect) -> TypeEngine[Any]:
        """Choose the database's own type that keeps microseconds."""
        return dialect.type_descriptor(dialect_for(dialect).time_type())

    def process_bind_param(self, value: datetime | None, dialect: SqlDialect) -> datetime | None:
        """Return an aware time in the form of the database."""
        if value is None:
            return None
        moment = value.astimezone(UTC)
        return moment if dialect_for(dialect).keeps_zone else moment.replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: SqlDialect) -> datetime | None:
        """Return a time of the database as an aware time in UTC."""
        if value is None or value.tzinfo is UTC:
            return value
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class ByteText(TypeDecorator[str]):
    """Text that is compared byte by byte on every database."""

    impl = String
    cache_ok = True

    def load_dialect_impl(self, dialect: SqlDialect) -> TypeEngine[Any]:
        """Choose the database's own type."""
        length: int | None = self.impl_instance.length  # type: ignore[attr-defined]
        return dialect.type_descriptor(dialect_for(dialect).text_type(length, dialect))


def text_column(length: int) -> TypeEngine[str]:
    """Return the type of text of at most so many characters, compared byte by byte."""
    return ByteText(length)


#: The tables that have messages with their content.
Where = Literal["messages", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class Tables:
    """All tables of one store."""

    messages: Table
    past: Table
    failed: Table
    audit: Table
    dispatchers: Table
    version: Table
    runs: Table
    cancelled: Table
    pauses: Table

    def of(self, where: Where) -> Table:
        """Return a table of messages."""
        return {"messages": self.messages, "failed": self.failed, "cancelled": self.cancelled}[where]

    def __iter__(self) -> Iterator[Table]:
        yield from (self.messages, self.past, self.failed, self.audit, self.dispatchers, self.runs)
        yield from (self.cancelled, self.pauses, self.version)


def store_tables(name: str = TABLE, schema: str | None = None) -> Tables:
    """Return the tables, their names always quoted."""
    if not 0 < len(name.encode()) <= MAX_TABLE_NAME:
        raise ValueError(f"table {name!r}: the name must have 1 to {MAX_TABLE_NAME} bytes")

    def table(suffix: str, *items: SchemaItem) -> Table:
        return Table(f"{name}{suffix}", MetaData(), *items, schema=schema, quote=True, quote_schema=True)

    def index(suffix: str, *columns: str, **options: Any) -> Index:
        return Index(quoted_name(f"{name}{suffix}_{columns[0]}", quote=True), *columns, **options)

    def partial(suffix: str, *columns: str) -> Index:
        # in many stores most messages have no value
        given = text(f'"{columns[0]}" IS NOT NULL')
        return index(suffix, *columns, **{f"{name}_where": given for name in PARTIAL_INDEXES})

    def indexes(suffix: str) -> Iterator[Index]:
        """Yield the indexes for lists in the order of due time."""
        yield index(suffix, "Time")
        yield index(suffix, "Destination", "Time")
        yield partial(suffix, "Tag", "Time")
        yield partial(suffix, "Run", "Time")

    columns = _message_columns()
    return Tables(
        messages=table("", *columns, _finite(name, columns), *indexes(""), partial("", "NextTry")),
        past=table(
            "_past",
            _column("Id", text_column(MAX_ID), primary_key=True),
            _column("Destination", text_column(MAX_DESTINATION)),
            _column("Time", UtcTime()),
            _column("Digest", bytes_type(16)),
            _column("Outcome", text_column(20), nullable=False),
            _column("At", UtcTime(), nullable=False),
            _column("Dispatcher", text_column(MAX_DISPATCHER)),
            _column("ClaimedUntil", UtcTime()),
            _column("Tag", text_column(MAX_TAG)),
            _column("Run", NUMBER),
            _column("DeliverConnId", text_column(MAX_CONN_ID)),
            index("_past", "At"),
            partial("_past", "Tag", "At"),
            partial("_past", "Run", "At"),
        ),
        failed=table(
            "_failed",
            *_message_columns(),
            _column("Reason", text_column(20), nullable=False),
            _column("FailedAt", UtcTime(), nullable=False),
            *indexes("_failed"),
        ),
        audit=table(
            "_audit",
            _column("Seq", NUMBER, primary_key=True, autoincrement=True),
            _column("At", UtcTime(), nullable=False),
            _column("Who", text_column(250)),
            _column("Action", text_column(20), nullable=False),
            _column("Selection", LONG_TEXT, nullable=False),
            _column("Counts", SHORT_TEXT, nullable=False),
            index("_audit", "At"),
        ),
        dispatchers=table(
            "_dispatchers",
            _column("Id", text_column(MAX_DISPATCHER), primary_key=True),
            _column("ConnIds", SHORT_TEXT, nullable=False),
            _column("StartedAt", UtcTime(), nullable=False),
            _column("SeenAt", UtcTime(), nullable=False),
            _column("EndedAt", UtcTime()),
            _column("WorkedAt", UtcTime()),
            _column("Troubles", SHORT_TEXT),
            _column("Host", text_column(MAX_NAME)),
            _column("DagId", text_column(MAX_NAME)),
            _column("Reaches", SHORT_TEXT),
        ),
        runs=table(
            "_runs",
            _column("Seq", NUMBER, primary_key=True, autoincrement=True),
            _column("DagId", text_column(MAX_NAME), nullable=False),
            _column("RunId", text_column(MAX_NAME), nullable=False),
            _column("TaskId", text_column(MAX_NAME), nullable=False),
            _column("MapIndex", Integer(), nullable=False),
            _column("Iteration", Integer()),
            _column("Turn", text_column(MAX_TURN)),
            _column("Anchor", UtcTime()),
            # the four names together are too long for an index of MariaDB
            _column("Digest", bytes_type(16), nullable=False),
            _column("At", UtcTime(), nullable=False),
            index("_runs", "Digest", unique=True),
            index("_runs", "DagId"),
            index("_runs", "At"),
        ),
        cancelled=table(
            "_cancelled",
            *_message_columns(),
            _column("Reason", text_column(20)),
            _column("FailedAt", UtcTime()),
            _column("Until", UtcTime(), nullable=False),
            index("_cancelled", "Time"),
            partial("_cancelled", "Run", "Time"),
            index("_cancelled", "Until"),
        ),
        pauses=table(
            "_pauses",
            _column("Seq", NUMBER, primary_key=True, autoincrement=False),
            _column("Destination", text_column(MAX_DESTINATION)),
            _column("DeliverConnId", text_column(MAX_CONN_ID)),
            _column("At", UtcTime(), nullable=False),
        ),
        version=table(
            "_version",
            _column("Version", Integer(), primary_key=True, autoincrement=False),
            _column("At", UtcTime(), nullable=False),
            _column("UsableFrom", Integer(), nullable=False),
        ),
    )


def queue_table(name: str, schema: str | None, dialect: Dialect) -> Table:
    """Return the table of a destination; its columns are those of :meth:`Dialect.queue_columns`."""
    columns = dialect.queue_columns()
    return Table(name, MetaData(), *columns, schema=schema, quote=True, quote_schema=True, sqlite_autoincrement=True)


def _message_columns() -> list[Column[Any]]:
    return [
        _column("Id", text_column(MAX_ID), primary_key=True),
        _column("Destination", text_column(MAX_DESTINATION), nullable=False),
        _column("State", bytes_type(), nullable=False),
        _column("Time", UtcTime(), nullable=False),
        _column("Headers", bytes_type(), nullable=False),
        _column("RetryCount", Integer(), nullable=False, server_default=text("0")),
        _column("DeliverConnId", text_column(MAX_CONN_ID)),
        *(_column(one.column, _field_type(one)) for one in FIELDS),
        _column("Digest", bytes_type(16)),
        _column("StoredAt", UtcTime()),
        _column("NextTry", UtcTime()),
        _column("LastError", text_column(MAX_ERROR)),
        _column("Run", NUMBER),
        _column("ReplacedAt", UtcTime()),
    ]


def _finite(name: str, columns: Sequence[Column[Any]]) -> CheckConstraint:
    [due] = (column for column in columns if column.name == "Time")
    years = due.between(literal_column("'0001-01-01 00:00:00'"), literal_column("'9999-12-31 23:59:59.999999'"))
    return CheckConstraint(years, name=quoted_name(f"{name}_Time_check", quote=True))


def _field_type(field: MessageField) -> TypeEngine[Any]:
    types: Mapping[type, TypeEngine[Any]] = {str: text_column(field.length), int: NUMBER, datetime: UtcTime()}
    return types[field.type]


def _column(name: str, kind: TypeEngine[Any], **options: Any) -> Column[Any]:
    return Column(name, kind, quote=True, **options)
