"""What every engine of the store needs, whoever made it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from sqlalchemy import Connection, Engine, Table, event
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, TimeoutError

from airflow_delayed.errors import DelayedError, TransportUnavailable
from airflow_delayed.store.drivers import tolerate
from airflow_delayed.store.schema import MYSQL, Tables
from airflow_delayed.store.versions import check_ready

#: Where MySQL and SQL Server quote what a row holds: "Duplicate entry '...' for key 'k'", "The ... value is (...).".
_VALUE = re.compile(
    r"\b(entry|value:?|value is) (?:['(].*[')](?= for (?:key|column|function)\b)|['(].*[')](?=\W*$))", re.DOTALL
)
#: How long SQLite waits for another writer: a dispatcher holds the database while one batch is sent.
SQLITE_BUSY_SECONDS = 60

#: What is within the first mark is read by MariaDB only, and what is within the second by MySQL from 5.7.8 on.
_MYSQL_LIMIT = (
    "SET @delayed_limit = 1 /*M! , SESSION max_statement_time = {seconds} */"
    " /*!50708 , SESSION max_execution_time = {milliseconds} */"
)
_LIMITS = {
    "postgresql": "SET statement_timeout = {milliseconds}",
    **dict.fromkeys(MYSQL, _MYSQL_LIMIT),
    "mssql": "SET LOCK_TIMEOUT {milliseconds}",
}


def engine_options(dialect_name: str) -> dict[str, Any]:
    """Return arguments for ``create_engine``: no parameters in error texts, for they hold bodies."""
    if dialect_name == "sqlite":
        return {"hide_parameters": True, "connect_args": {"timeout": SQLITE_BUSY_SECONDS}}
    options = {"hide_parameters": True, "pool_pre_ping": True, "isolation_level": "READ COMMITTED"}
    if dialect_name in MYSQL:
        # what a server takes for granted may be three bytes a character, or Latin 1
        return {**options, "connect_args": {"charset": "utf8mb4"}}
    return options


def prepare(engine: Engine) -> Engine:
    """Make transactions mean the same on every database; call it once for an engine.

    On SQLite each transaction takes the write lock at its begin, unless its connection has the option
    ``read_only=True``; the driver's own habit is to begin late, so that two could read the same rows as due. On
    PostgreSQL times are read in UTC, for the year 9999 in another zone can be one that Python does not have. On MySQL
    and MariaDB a value that does not fit is an error, however lenient the server's own sql_mode is; but a time such as
    0000-00-00 that is there already can be moved to another table. Values that Python cannot hold spoil no query, see
    :mod:`airflow_delayed.store.drivers`.
    """
    tolerate(engine)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _sqlite_connect)
        event.listen(engine, "begin", _sqlite_begin)
    elif engine.dialect.name == "postgresql":
        event.listen(engine, "connect", _postgres_connect)
    elif engine.dialect.name in MYSQL:
        event.listen(engine, "connect", _mysql_connect)
    return engine


def _sqlite_connect(connection: Any, _record: object) -> None:
    connection.isolation_level = None


def _sqlite_begin(connection: Connection) -> None:
    read_only = connection.get_execution_options().get("read_only")
    connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")


def _postgres_connect(connection: Any, _record: object) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET TIME ZONE 'UTC'")
        # a plan kept from when a table was empty would read the whole of it for each row of a claim, as it grows
        cursor.execute("SET plan_cache_mode = force_custom_plan")
        # compiling a claim takes ten times as long as the claim, and a wrong guess at its cost is enough for it
        cursor.execute("SET jit = off")
    connection.commit()


def _mysql_connect(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    lenient = "REPLACE(REPLACE(@@sql_mode, 'NO_ZERO_IN_DATE', ''), 'NO_ZERO_DATE', '')"
    cursor.execute(f"SET SESSION sql_mode = CONCAT({lenient}, ',STRICT_ALL_TABLES')")
    cursor.close()


def looking(engine: Engine) -> Connection:
    """Return a connection that only reads, each statement what is committed when it begins.

    On PostgreSQL it has no transaction: to begin and end one takes as long as to read a page.
    """
    if engine.dialect.name == "postgresql":
        return engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    return engine.connect().execution_options(read_only=True)


def limit_statements(engine: Engine, seconds: int) -> None:
    """Have the database end each statement that takes longer, for those who no longer wait for it.

    SQLite has no such limit, MySQL has it for SELECT only, and SQL Server for waiting on locks.

    :raises DelayedError: a database that is not known.
    """
    name = engine.dialect.name
    if name == "sqlite":
        return
    if name not in _LIMITS:
        raise DelayedError(f"the store does not know how to limit statements in {name}")
    statement = _LIMITS[name].format(seconds=seconds, milliseconds=seconds * 1000)

    def limit(connection: Any, _record: object) -> None:
        cursor = connection.cursor()
        cursor.execute(statement)
        cursor.close()
        connection.commit()

    event.listen(engine, "connect", limit)


@contextmanager
def database_errors(conn_id: str, engine: Engine, tables: Tables | Table | None = None) -> Iterator[None]:
    """Turn the driver's errors into ours, which show no parameters and no rows.

    :param tables: those of a store, or its table of messages.
    :raises TransportUnavailable: the database cannot be reached, or is busy.
    :raises TopologyError: tables are given, and are not there or of another version.
    """
    driver = engine.dialect.loaded_dbapi
    try:
        yield
    # SQLAlchemy passes on the driver's own error where it gives a connection back
    except (DBAPIError, TimeoutError, driver.Error) as error:
        said = f"connection {conn_id!r}: {first_line(error)}"
        lost = (OperationalError, InterfaceError, TimeoutError, driver.OperationalError, driver.InterfaceError)
        away = isinstance(error, lost) or getattr(error, "connection_invalidated", False)
        if tables is not None:
            with suppress(DBAPIError, TimeoutError):
                check_ready(conn_id, engine, tables)
        raise (TransportUnavailable if away else DelayedError)(said) from None


def first_line(error: Exception) -> str:
    """Return the first line of what a driver says, without values; further lines may quote a row."""
    cause = getattr(error, "orig", None) or error
    # the drivers of MySQL give number and text; the tuple of both would be quoted
    said = cause.args[1] if len(cause.args) == 2 and isinstance(cause.args[1], str) else str(cause)
    said = _VALUE.sub(r"\1 ...", said.strip())
    return said.splitlines()[0] if said else type(error).__name__
