"""The table in which messages wait.

Its first six columns are those of NServiceBus's SqlServerDelayedMessageStore (NServiceBus.Transport.Msmq 2.0.7,
Sql/SqlConstants.cs), with their names and meaning; the others are ours:

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
============= ===================================================================================================
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Column, Dialect, Index, Integer, LargeBinary, MetaData, String, Table, text
from sqlalchemy.dialects import mssql, mysql, postgresql
from sqlalchemy.sql.elements import quoted_name
from sqlalchemy.types import DateTime, TypeDecorator, TypeEngine

from airflow_delayed.message import UTC

TABLE = "delayed_messages"

MAX_ID = 250
MAX_DESTINATION = 200
MAX_TAG = 250
MAX_CONN_ID = 250
#: PostgreSQL's longest name is 63 bytes; the names of the indexes begin with the table's.
MAX_TABLE_NAME = 50
#: A destination that is a table: PostgreSQL would cut a longer name.
MAX_QUEUE_NAME = 63


class UtcTime(TypeDecorator[datetime]):
    """An aware time, kept to the microsecond: with a zone where the database has one, as bare UTC where it has none."""

    impl = DateTime
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """Choose the database's own type that keeps microseconds."""
        if dialect.name == "postgresql":
            return dialect.type_descriptor(postgresql.TIMESTAMP(timezone=True))
        if dialect.name in ("mysql", "mariadb"):
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
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def text_column(length: int) -> TypeEngine[str]:
    """Return text that is compared byte by byte, whatever the database's own habit is."""
    return (
        String(length)
        .with_variant(postgresql.VARCHAR(length, collation="C"), "postgresql")
        .with_variant(mysql.VARCHAR(length, charset="utf8mb4", collation="utf8mb4_bin"), "mysql", "mariadb")
        .with_variant(mssql.NVARCHAR(length, collation="Latin1_General_100_BIN2"), "mssql")
    )


def bytes_column(length: int | None = None) -> TypeEngine[bytes]:
    """Return bytes, of any length unless given; MySQL's plain BLOB would end at 64 KiB."""
    of_mssql = mssql.VARBINARY(length or "max")  # type: ignore[no-untyped-call]
    of_mysql = mysql.VARBINARY(length) if length else mysql.LONGBLOB()
    return LargeBinary(length).with_variant(of_mysql, "mysql", "mariadb").with_variant(of_mssql, "mssql")


def messages_table(name: str = TABLE, schema: str | None = None) -> Table:
    """Return the table, its names always quoted.

    :raises ValueError: the name is empty or longer than 50 bytes.
    """
    if not 0 < len(name.encode()) <= MAX_TABLE_NAME:
        raise ValueError(f"table {name!r}: the name must have 1 to {MAX_TABLE_NAME} bytes")
    return Table(
        name,
        MetaData(),
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
        Index(quoted_name(f"{name}_Time", quote=True), "Time"),
        Index(quoted_name(f"{name}_Tag", quote=True), "Tag"),
        schema=schema,
        quote=True,
        quote_schema=True,
    )


def _column(name: str, kind: TypeEngine[Any], **options: Any) -> Column[Any]:
    return Column(name, kind, quote=True, **options)
