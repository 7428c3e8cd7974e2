"""What a message says: its headers, and the beginning of its body. Only who may see that is to be given it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, LargeBinary, Table, case, cast, func, select

from airflow_delayed.errors import DelayedError, InvalidMessage
from airflow_delayed.message import check_text
from airflow_delayed.store.rows import headers_of
from airflow_delayed.store.schema import MYSQL, Tables

#: Headers of more bytes are not read.
MAX_HEADERS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a message that is in the store says."""

    #: None: they have over a million bytes, or are no JSON object of text.
    headers: Mapping[str, str] | None
    #: No longer than was asked for.
    body: bytes
    #: Bytes of the whole body.
    body_bytes: int

    def __repr__(self) -> str:
        # so that neither comes into a log
        return f"Content({len(self.headers or ())} headers, body_bytes={self.body_bytes})"


def content(engine: Engine, tables: Tables, message_id: str, *, body_limit: int) -> Content | None:
    """Return what a message says; None: it is not in the store.

    :param body_limit: read no more bytes of the body.
    :raises DelayedError: a database whose functions are not known.
    """
    # it may go from one table to the other between two looks
    for _ in range(2):
        for table in (tables.messages, tables.failed):
            with engine.connect().execution_options(read_only=True) as connection:
                if found := _read(connection, table, message_id, body_limit):
                    return found
    return None


def _read(connection: Connection, table: Table, message_id: str, body_limit: int) -> Content | None:
    name = connection.dialect.name
    statement = select(
        length(table.c.Headers, name).label("headers_bytes"),
        beginning(table.c.Headers, MAX_HEADERS, name).label("headers"),
        length(table.c.State, name).label("body_bytes"),
        beginning(table.c.State, body_limit, name).label("body"),
    ).where(table.c.Id == message_id)
    row = connection.execute(statement).one_or_none()
    if row is None:
        return None
    whole = row.headers_bytes <= MAX_HEADERS
    return Content(
        # SQLite has null for the beginning of nothing
        headers=_headers(bytes(row.headers or b"")) if whole else None,
        body=bytes(row.body or b""),
        body_bytes=int(row.body_bytes),
    )


def _headers(data: bytes) -> Mapping[str, str] | None:
    try:
        found = headers_of(data)
        for text in (*found, *found.values()):
            if not isinstance(text, str):
                return None
            check_text("headers", text)
    except InvalidMessage:
        return None
    return found


def length(column: ColumnElement[bytes], dialect_name: str) -> ColumnElement[Any]:
    """Return the SQL for how many bytes there are."""
    if dialect_name == "mssql":
        return func.datalength(column)
    _check(dialect_name)
    if dialect_name == "sqlite":
        # of text, which SQLite keeps in any column, it would count the characters before the first null
        return case((func.typeof(column) == "blob", func.length(column)), else_=func.length(cast(column, LargeBinary)))
    return func.length(column)


def beginning(column: ColumnElement[Any], limit: int, dialect_name: str) -> ColumnElement[Any]:
    """Return the SQL for the first bytes, or for the first characters of text."""
    if dialect_name == "mssql":
        return func.substring(column, 1, limit, type_=column.type)
    _check(dialect_name)
    return func.substr(column, 1, limit, type_=column.type)


def _check(dialect_name: str) -> None:
    if dialect_name not in ("postgresql", "sqlite", *MYSQL):
        raise DelayedError(f"the store does not know how to read a part of a message in {dialect_name}")
