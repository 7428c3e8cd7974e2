"""Rows into a table by PostgreSQL's COPY, at about half of what INSERT costs the server and the driver.

The lines are written here, in the text format that both drivers pass on as it is
(https://www.postgresql.org/docs/current/sql-copy.html#id-1.9.3.55.9.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from io import StringIO
from typing import Any

from sqlalchemy import Connection, Table
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import DBAPIError

#: COPY is no part of the common interface of Python's drivers: these two have it, each in its own way.
DRIVERS = ("psycopg", "psycopg2")
#: Characters that psycopg2 reads at a time.
_READ = 1 << 17

# not the driver's own, which doubles each percent sign for a statement with parameters
_NAMES = postgresql.dialect(paramstyle="named").identifier_preparer  # type: ignore[no-untyped-call]


def can_copy(connection: Connection) -> bool:
    """Return whether rows can be copied: on PostgreSQL, by a driver that is known."""
    return connection.dialect.name == "postgresql" and connection.dialect.driver in DRIVERS


def copy(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add rows in this transaction. All have the same columns.

    :raises sqlalchemy.exc.IntegrityError: one is there already; the transaction is to be rolled back.
    :raises sqlalchemy.exc.DBAPIError: any other error of the database.
    """
    names = list(rows[0])
    columns = ", ".join(_NAMES.format_column(table.c[name]) for name in names)
    statement = f"COPY {_NAMES.format_table(table)} ({columns}) FROM STDIN"
    text = lines(rows, names)
    driver: Any = connection.dialect.loaded_dbapi
    # what SQLAlchemy does for a statement of its own
    raw = connection.connection
    cursor: Any = raw.cursor()
    try:
        if connection.dialect.driver == "psycopg2":
            cursor.copy_expert(statement, StringIO(text), _READ)
        else:
            with cursor.copy(statement) as into:
                into.write(text)
    except driver.Error as error:
        lost = connection.dialect.is_disconnect(error, raw.dbapi_connection, cursor)
        if lost:
            connection.invalidate(error)
        raise DBAPIError.instance(
            statement, None, error, driver.Error, hide_parameters=True, connection_invalidated=lost
        ) from error
    finally:
        cursor.close()


def lines(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Return these columns of rows in the text format."""
    columns = [_column([row[name] for row in rows]) for name in names]
    return "\n".join(map("\t".join, zip(*columns, strict=True))) + "\n"


def _column(values: Sequence[Any]) -> Sequence[str]:
    first = values[0]
    if values.count(first) == len(values):
        return [_field(first)] * len(values)
    if None in values:
        return [_field(value) for value in values]
    if isinstance(first, str):
        # few columns have a character that has to be written otherwise
        together = "".join(values)
        return [_text(value) for value in values] if any(map(together.__contains__, _ESCAPES)) else values
    return [_field(value) for value in values]


def _field(value: str | bytes | int | datetime | None) -> str:
    if value is None:
        return "\\N"
    if isinstance(value, bytes):
        return f"\\\\x{value.hex()}"
    if isinstance(value, datetime):
        return value.isoformat()
    return _text(value) if isinstance(value, str) else str(value)


def _text(value: str) -> str:
    for character, written in _ESCAPES.items():
        value = value.replace(character, written)
    return value


#: The backslash comes first.
_ESCAPES: Mapping[str, str] = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"}
