"""SqlSource: the rows of a query."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID

from airflow_delayed.errors import MissingExtra, SourceError, TransportUnavailable
from airflow_delayed.intake.columns import check_names, check_renames
from airflow_delayed.intake.rows import is_deep, read_json
from airflow_delayed.intake.sources import Source
from airflow_delayed.intake.spool import Spool, SpooledSource
from airflow_delayed.sources.templated import TemplatedSource, rendered_text

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from airflow_delayed.intake.columns import ColumnRules

#: Rows that are fetched from a cursor first, and at most at a time,
_FIRST_ROWS, _MOST_ROWS = 256, 8192
#: and about how many bytes of them.
_FETCHED_BYTES = 8 * 1024 * 1024


class QueryFile(str):
    """The name of a file with a query: rendering a task's templates puts the query in its place."""

    __slots__ = ()


class SqlSource(TemplatedSource):
    """The rows of a query, read through a server-side cursor where the driver has one.

    The query runs once in a try, since it could give other rows when it runs again: they are spooled on the worker's
    disk (``[delayed] spool_folder``), and deleted when the task has succeeded or was refused. A retry
    on the same worker reads the spool; on another worker the query runs again, and the log says so. What it writes is
    rolled back. ``headers`` may be JSON, also as text.

    :param sql: the query, or the name of a ``.sql`` file beside the DAG (or in its ``template_searchpath``).
    :param conn_id: any SQL connection of Airflow.
    :param parameters: values for the driver's placeholders; never shown.
    :param columns: see DelayedSendOperator.
    """

    template_fields = ("sql", "conn_id", "parameters")

    def __init__(
        self,
        sql: str,
        conn_id: str,
        *,
        parameters: Mapping[str, Any] | Sequence[Any] | None = None,
        columns: Mapping[str, str] | None = None,
    ) -> None:
        check_renames(columns)
        self.sql = QueryFile(sql) if isinstance(sql, str) and sql.endswith(".sql") else sql
        self.conn_id = conn_id
        self.parameters = parameters
        self.columns = columns

    def open(self, spool: Spool, *, naive_ok: bool) -> Source:
        """Return the rows of the query, which runs when they are read first."""
        conn_id = rendered_text("conn_id", self.conn_id)
        query = _Query(rendered_text("sql", self.sql), conn_id, _placeholders(self.parameters))
        return SpooledSource(query.name, repr(vars(query)).encode(), query.rows, spool)

    def serialize(self) -> dict[str, Any]:
        """Return query and connection."""
        return {"source": "SqlSource", "sql": self.sql, "conn_id": self.conn_id}


class _Query:
    def __init__(self, sql: str, conn_id: str, parameters: dict[str, Any] | tuple[Any, ...] | None) -> None:
        self.sql = sql
        self.conn_id = conn_id
        self.parameters = parameters

    @property
    def name(self) -> str:
        return f"the query on connection {self.conn_id!r}"

    def rows(self, wanted: ColumnRules) -> Iterator[dict[str, Any]]:
        """Run it, and yield its rows."""
        from sqlalchemy.exc import InterfaceError, OperationalError, SQLAlchemyError

        from airflow_delayed.store.api import dialect_named, first_line

        engine = _engine(self.conn_id)
        driver = engine.dialect.loaded_dbapi
        try:
            with engine.connect() as connection:
                _keep_numbers(engine.driver, connection.connection.driver_connection)
                if readable := dialect_named(engine.dialect.name).readable_times:
                    connection.exec_driver_sql(readable)
                streamed = connection.execution_options(stream_results=True, no_parameters=self.parameters is None)
                yield from self._fetched(streamed.exec_driver_sql(self.sql, self.parameters), wanted)
        except (SQLAlchemyError, driver.Error) as error:
            lost = (OperationalError, InterfaceError, driver.OperationalError, driver.InterfaceError)
            kind = TransportUnavailable if isinstance(error, lost) else SourceError
            raise kind(f"{self.name} failed: {first_line(error)}. Nothing was sent") from None
        finally:
            engine.dispose()

    def _fetched(self, found: Any, wanted: ColumnRules) -> Iterator[dict[str, Any]]:
        if not found.returns_rows:
            raise SourceError(f"{self.name} gives no rows at all; write it as a SELECT")
        names = list(found.keys())
        check_names(names, self.name)
        wanted.check(names, self.name)
        headers = wanted.names.get("headers")
        size = _FIRST_ROWS
        while rows := found.fetchmany(size):
            for row in rows:
                yield {
                    name: _headers(value) if name == headers else _plain(value)
                    for name, value in zip(names, row, strict=True)
                }
            weight = sum(len(value) for row in rows for value in row if isinstance(value, str | bytes | memoryview))
            size = max(1, min(_MOST_ROWS, 2 * size, _FETCHED_BYTES * len(rows) // max(weight, 1)))


def _plain(value: Any) -> Any:
    if isinstance(value, memoryview):
        return bytes(value)
    return str(value) if isinstance(value, UUID) else value


def _headers(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return value if is_deep(value, found) else found


def _keep_numbers(driver: str, connection: Any) -> None:
    """Have PostgreSQL's drivers read JSON with its numbers as they are written; other databases give it as text."""
    if driver == "psycopg2":
        from psycopg2.extras import register_default_json, register_default_jsonb  # type: ignore[import-untyped]

        register_default_json(connection, loads=read_json)
        register_default_jsonb(connection, loads=read_json)
    elif driver == "psycopg":
        from psycopg.types.json import set_json_loads

        set_json_loads(read_json, connection)


def _engine(conn_id: str) -> Engine:
    from airflow.providers.common.sql.hooks.sql import DbApiHook
    from airflow.sdk import BaseHook
    from sqlalchemy.exc import SQLAlchemyError

    from airflow_delayed.compat import AirflowException
    from airflow_delayed.hooks.store import engine_by, hook_of

    try:
        connection = BaseHook.get_connection(conn_id)
        hook = hook_of(connection)
        if not isinstance(hook, DbApiHook):
            problem = "no installed provider knows" if hook is None else "is no SQL database"
            raise SourceError(
                f"connection {conn_id!r} of SqlSource is of type {connection.conn_type!r}, which {problem}; name one of"
                f" a database{', or install its provider' if hook is None else ''}"
            )
        # an error's text shows no parameters
        return engine_by(hook, hide_parameters=True)
    except MissingExtra as error:
        raise SourceError(f"{error}, or name another connection") from None
    except (ValueError, AirflowException, SQLAlchemyError, ImportError, NotImplementedError) as error:
        raise SourceError(
            f"connection {conn_id!r} of SqlSource cannot be used: {error}; define it with a type whose provider is"
            " installed, or name another one"
        ) from None


def _placeholders(parameters: object) -> dict[str, Any] | tuple[Any, ...] | None:
    if isinstance(parameters, Mapping):
        return dict(parameters) or None
    if parameters is None or (isinstance(parameters, Sequence) and not isinstance(parameters, str | bytes)):
        # a list would be several sets of parameters
        return tuple(parameters or ()) or None
    raise SourceError(f"parameters= of SqlSource must be a list or a dictionary, not {type(parameters).__name__}")
