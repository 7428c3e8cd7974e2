"""The tables of a store: where messages wait, and what is known of ids that no longer do.

The first six columns of the table of messages are those of NServiceBus's SqlServerDelayedMessageStore
(NServiceBus.Transport.Msmq 2.0.7, Sql/SqlConstants.cs), with their names and meaning; the others are ours:

============= ===================================================================================================
Id            the message id; at most 250 characters, compared byte by byte
Destination   the queue that receives it; at most 200 characters
State         the body
Time          when it is due, in UTC with microseconds
Headers       a JSON object of text by text, as UTF-8
RetryCount    how often handing it over failed
DeliverConnId the Airflow connection that delivers it; null: the destination is a queue table in this database
Tag           what a user cancels by; at most 250 characters
ExpiresAt     not handed over from this time on
Digest        16 bytes that stand for all that the message says (:func:`airflow_delayed.identity.content_digest`)
StoredAt      when it was stored, by the database's clock
NextTry       after a failure: not handed over before; null: at once
LastError     what went wrong last, without a body or a header's value
Run           the number of the task's run that stored it, in the table ``_runs``; null: none was named
ReplacedAt    when this took the place of another with the same id, by the database's clock; null: never
============= ===================================================================================================

Beside it, each named after it:

- ``_past``: an id that was handed over, cancelled or purged, for as long as it is remembered; no body. A dispatcher
  that is about to hand a message over puts its id here first, with a lease: while the message is still in its table,
  the row says who holds it until when; when the message has gone, that it was handed over. So a claim costs no
  write of the message itself.
- ``_failed``: messages that are not tried any more, or that expired; with all their content, until retried or purged.
- ``_audit``: who changed what, and when; no content.
- ``_runs``: which run of which task stored messages, so that these are found by it; in a task loop, which iteration;
  what its relative delays count from (Anchor) and, where each clear means other messages, in which turn.
- ``_dispatchers``: who dispatches, for which connections, and when it was last seen.
- ``_version``: which version of these tables is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    BindParameter,
    Column,
    ColumnElement,
    Dialect,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    bindparam,
    text,
)
from sqlalchemy.dialects import mssql, mysql, postgresql
from sqlalchemy.schema import SchemaItem
from sqlalchemy.sql.elements import quoted_name
from sqlalchemy.types import DateTime, TypeDecorator, TypeEngine

from airflow_delayed.message import UTC
from airflow_delayed.origin import MAX_NAME

TABLE = "delayed_messages"

MAX_ID = 250
MAX_DESTINATION = 200
MAX_TAG = 250
MAX_CONN_ID = 250
MAX_DISPATCHER = 64
#: A number and a UUID, with their names.
MAX_TURN = 100
MAX_ERROR = 1000
#: Bytes of a body: RabbitMQ's default before its release 4; other transports take less.
MAX_BODY = 128 * 1024 * 1024
#: Bytes of headers as JSON.
MAX_HEADERS = 16 * 1024 * 1024
#: PostgreSQL's longest name is 63 bytes; the names of the indexes begin with the table's.
MAX_TABLE_NAME = 50
#: A destination that is a table: PostgreSQL would cut a longer name.
MAX_QUEUE_NAME = 63


#: The names of the dialect: of a connection of type mysql it is always the first.
MYSQL = ("mysql", "mariadb")


class UtcTime(TypeDecorator[datetime]):
    """An aware time, kept to the microsecond: with a zone where the database has one, as bare UTC where it has none."""

    impl = DateTime
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """Choose the database's own type that keeps microseconds."""
        if dialect.name == "postgresql":
            return dialect.type_descriptor(postgresql.TIMESTAMP(timezone=True))
        if dialect.name in MYSQL:
            return dialect.type_descriptor(mysql.DATETIME(fsp=6))
        if dialect.name == "mssql":
            return dialect.type_descriptor(mssql.DATETIME2(precision=6))  # type: ignore[no-untyped-call]
        return dialect.type_descriptor(DateTime())

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Turn an aware time into what the database keeps."""
        if value is None:
            return None
        moment = value.astimezone(UTC)
        return moment if dialect.name == "postgresql" else moment.replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Turn what the database keeps into an aware time in UTC."""
        if value is None or value.tzinfo is UTC:
            return value
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def mysql_collation(dialect: Dialect) -> str:
    """Return what MySQL or MariaDB calls the order of bytes in which blanks at the end count."""
    # both are reached by the dialect mysql, which learns from the server what it is
    return "utf8mb4_nopad_bin" if getattr(dialect, "is_mariadb", False) else "utf8mb4_0900_bin"


class ByteText(TypeDecorator[str]):
    """Text that is compared byte by byte, whatever the database's own habit is.

    On MySQL and MariaDB, "_bin" alone would take a text and the same with blanks after it for one.
    """

    impl = String
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """Choose the database's own type."""
        length: int | None = self.impl_instance.length  # type: ignore[attr-defined]
        if dialect.name == "postgresql":
            return dialect.type_descriptor(postgresql.VARCHAR(length, collation="C"))
        if dialect.name in MYSQL:
            kind = mysql.VARCHAR(length, charset="utf8mb4", collation=mysql_collation(dialect))
            return dialect.type_descriptor(kind)
        if dialect.name == "mssql":
            return dialect.type_descriptor(mssql.NVARCHAR(length, collation="Latin1_General_100_BIN2"))
        return dialect.type_descriptor(String(length))


def text_column(length: int) -> TypeEngine[str]:
    """Return text of at most so many characters, compared byte by byte."""
    return ByteText(length)


def bytes_column(length: int | None = None) -> TypeEngine[bytes]:
    """Return bytes, of any length unless given; MySQL's plain BLOB would end at 64 KiB."""
    of_mssql = mssql.VARBINARY(length or "max")  # type: ignore[no-untyped-call]
    of_mysql = mysql.VARBINARY(length) if length else mysql.LONGBLOB()
    return LargeBinary(length).with_variant(of_mysql, "mysql", "mariadb").with_variant(of_mssql, "mssql")


#: SQLite counts up by itself only what it calls INTEGER, which has as many bits.
_NUMBER = BigInteger().with_variant(Integer(), "sqlite")


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

    def __iter__(self) -> Iterator[Table]:
        yield from (self.messages, self.past, self.failed, self.audit, self.dispatchers, self.runs, self.version)


def store_tables(name: str = TABLE, schema: str | None = None) -> Tables:
    """Return the tables, their names always quoted.

    :raises ValueError: the name is empty or longer than 50 bytes.
    """
    if not 0 < len(name.encode()) <= MAX_TABLE_NAME:
        raise ValueError(f"table {name!r}: the name must have 1 to {MAX_TABLE_NAME} bytes")

    def table(suffix: str, *items: SchemaItem) -> Table:
        return Table(f"{name}{suffix}", MetaData(), *items, schema=schema, quote=True, quote_schema=True)

    def index(suffix: str, *columns: str, **options: Any) -> Index:
        return Index(quoted_name(f"{name}{suffix}_{columns[0]}", quote=True), *columns, **options)

    def partial(suffix: str, *columns: str) -> Index:
        # most messages of some stores have none; MySQL and MariaDB index them nevertheless
        dialects = ("postgresql", "sqlite", "mssql")
        return index(suffix, *columns, **{f"{one}_where": text(f'"{columns[0]}" IS NOT NULL') for one in dialects})

    def indexes(suffix: str) -> Iterator[Index]:
        """What a list in order of due time is read by."""
        yield index(suffix, "Time")
        yield index(suffix, "Destination", "Time")
        yield partial(suffix, "Tag", "Time")
        yield partial(suffix, "Run", "Time")

    return Tables(
        messages=table("", *_message_columns(), *indexes(""), partial("", "NextTry")),
        past=table(
            "_past",
            _column("Id", text_column(MAX_ID), primary_key=True),
            _column("Destination", text_column(MAX_DESTINATION)),
            _column("Time", UtcTime()),
            _column("Digest", bytes_column(16)),
            _column("Outcome", text_column(20), nullable=False),
            _column("At", UtcTime(), nullable=False),
            _column("Dispatcher", text_column(MAX_DISPATCHER)),
            _column("ClaimedUntil", UtcTime()),
            index("_past", "At"),
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
            _column("Seq", _NUMBER, primary_key=True, autoincrement=True),
            _column("At", UtcTime(), nullable=False),
            _column("Who", text_column(250)),
            _column("Action", text_column(20), nullable=False),
            _column("Selection", Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb"), nullable=False),
            _column("Counts", Text(), nullable=False),
            index("_audit", "At"),
        ),
        dispatchers=table(
            "_dispatchers",
            _column("Id", text_column(MAX_DISPATCHER), primary_key=True),
            _column("ConnIds", Text(), nullable=False),
            _column("StartedAt", UtcTime(), nullable=False),
            _column("SeenAt", UtcTime(), nullable=False),
            _column("EndedAt", UtcTime()),
        ),
        runs=table(
            "_runs",
            _column("Seq", _NUMBER, primary_key=True, autoincrement=True),
            _column("DagId", text_column(MAX_NAME), nullable=False),
            _column("RunId", text_column(MAX_NAME), nullable=False),
            _column("TaskId", text_column(MAX_NAME), nullable=False),
            _column("MapIndex", Integer(), nullable=False),
            _column("Iteration", Integer()),
            _column("Turn", text_column(MAX_TURN)),
            _column("Anchor", UtcTime()),
            # the four names together are longer than an index of MariaDB may be
            _column("Digest", bytes_column(16), nullable=False),
            _column("At", UtcTime(), nullable=False),
            index("_runs", "Digest", unique=True),
            index("_runs", "DagId"),
            index("_runs", "At"),
        ),
        version=table(
            "_version",
            _column("Version", Integer(), primary_key=True, autoincrement=False),
            _column("At", UtcTime(), nullable=False),
        ),
    )


def value_of(column: ColumnElement[Any], name: str, value: Any) -> BindParameter[Any]:
    """Return what a column is compared with, as a parameter of this name: a statement then serves other values."""
    return bindparam(name, value, column.type)


def _message_columns() -> list[Column[Any]]:
    return [
        _column("Id", text_column(MAX_ID), primary_key=True),
        _column("Destination", text_column(MAX_DESTINATION), nullable=False),
        _column("State", bytes_column(), nullable=False),
        _column("Time", UtcTime(), nullable=False),
        _column("Headers", bytes_column(), nullable=False),
        _column("RetryCount", Integer(), nullable=False, server_default=text("0")),
        _column("DeliverConnId", text_column(MAX_CONN_ID)),
        _column("Tag", text_column(MAX_TAG)),
        _column("ExpiresAt", UtcTime()),
        _column("Digest", bytes_column(16)),
        _column("StoredAt", UtcTime()),
        _column("NextTry", UtcTime()),
        _column("LastError", text_column(MAX_ERROR)),
        _column("Run", _NUMBER),
        _column("ReplacedAt", UtcTime()),
    ]


def _column(name: str, kind: TypeEngine[Any], **options: Any) -> Column[Any]:
    return Column(name, kind, quote=True, **options)
