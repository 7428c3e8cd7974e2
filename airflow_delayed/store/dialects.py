"""The dialects: all that differs by database, one class for each; no other module reads a dialect's name."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Delete,
    Engine,
    Float,
    Identity,
    Index,
    LargeBinary,
    Select,
    String,
    Table,
    Update,
    Uuid,
    case,
    cast,
    delete,
    event,
    extract,
    func,
    insert,
    literal_column,
    select,
    text,
    tuple_,
)
from sqlalchemy import Dialect as SqlDialect
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.schema import CreateIndex, DropIndex
from sqlalchemy.types import TypeEngine

from airflow_delayed.errors import DelayedError
from airflow_delayed.store import bulk, network
from airflow_delayed.store.database import NUMBER, Dialect, Row, TimeUnit

#: How long SQLite waits for another writer: a dispatcher holds the database while one batch is sent.
SQLITE_BUSY_SECONDS = 60
#: Characters of a time as text, cut after its hour or minute.
LENGTHS: Mapping[TimeUnit, int] = {"hour": 13, "minute": 16}
#: MySQL's hint to find rows by the primary key, and its quoting of names.
_KEY, _QUOTE = "FORCE INDEX (PRIMARY)", mysql.dialect().identifier_preparer

_INVALID_INDEXES = text("""
SELECT c.relname FROM pg_index, pg_class c WHERE c.oid = indexrelid AND indrelid = to_regclass(:name) AND NOT indisvalid
""")


#: What a transaction sets for itself: behind a pooler, a setting of the session would reach other programs. A process
#: that stands still is ended, unless it is earlier by another limit; and nothing is compiled, which takes ten times as
#: long as a claim, and would begin because of a wrong estimate of the claim's cost.
_OF_THE_TRANSACTION = """SELECT set_config('jit', 'off', true), set_config('idle_in_transaction_session_timeout',
    (1000 * extract(epoch FROM LEAST(interval '{} s',
        NULLIF(current_setting('idle_in_transaction_session_timeout')::interval, interval '0'))))::int::text, true)"""
_LIMITED = ", set_config('statement_timeout', '{}s', true)"
#: Seconds after which MySQL's drivers end a statement that the server has not ended.
_GRACE = 5
#: The engine's option with the seconds after which the database ends a statement.
_STATEMENT_SECONDS = "statement_seconds"


class PostgreSQL(Dialect):
    """PostgreSQL, by psycopg, psycopg2 or another driver."""

    keeps_zone = True
    locks_rows = True
    lock_limits = ("SET LOCAL lock_timeout = '{0}ms'", None)
    contention_codes = frozenset({"40P01", "55P03", "40001"})
    lock_timeout_codes = frozenset({"55P03"})
    # a limit such as an index's, WITH CHECK OPTION, RAISE and ASSERT, and the codes that triggers take for their own
    refused_row_codes = frozenset(
        {"54000", "54001", "44000", "P0000", "P0001", "P0002", "P0003", "P0004", "45000", "09000", "27000", "38000"}
    )
    claims_at_once = reads_by_run = True
    readable_times = "SET LOCAL DateStyle = 'ISO'; SET LOCAL IntervalStyle = 'postgres'"
    # not now(), which stands still during a transaction
    _clock = "SELECT clock_timestamp()"

    def engine_options(self) -> dict[str, Any]:
        """Return the arguments with the character set: a role or database may have another one for its sessions."""
        return {**super().engine_options(), "connect_args": {"client_encoding": "utf8"}}

    def prepare(self, engine: Engine) -> None:
        """Set timeouts and the session."""
        network.limit_silence(engine)
        event.listen(engine, "connect", self._connected, insert=True)
        event.listen(engine, "begin", self._begun)

    @staticmethod
    def _connected(connection: Any, _record: object) -> None:
        if hasattr(connection, "prepare_threshold"):
            # psycopg prepares no statement: a pooler may give the next transaction a session that does not have it; and
            # a plan made while a table was empty would read all of the grown table for each row of a claim
            connection.prepare_threshold = None
        with connection.cursor() as cursor:
            # a pooler knows which client has set these three
            cursor.execute("SET TIME ZONE 'UTC'; SET DateStyle = 'ISO, MDY'; SET standard_conforming_strings = on")
        connection.commit()

    @staticmethod
    def _begun(connection: Connection) -> None:
        options = connection.get_execution_options()
        limit = options.get(_STATEMENT_SECONDS)
        if options.get("isolation_level") == "AUTOCOMMIT" or (options.get("read_only") and limit is None):
            return
        settings = _OF_THE_TRANSACTION.format(network.IDLE_SECONDS)
        connection.exec_driver_sql(settings + (_LIMITED.format(limit) if limit else ""))

    def check_encoding(self, connection: Connection) -> None:
        """Refuse all encodings but UTF-8; SQL_ASCII is none, so that two clients could read one text as two."""
        name, encoding = connection.exec_driver_sql("SELECT current_database(), getdatabaseencoding()").one()
        if encoding != "UTF8":
            raise DelayedError(
                f"database {name!r} has the encoding {encoding}, which cannot hold all texts; make another one (CREATE"
                " DATABASE delayed ENCODING 'UTF8' TEMPLATE template0), and name it as the connection's schema"
            )

    def limit_statements(self, engine: Engine, seconds: int) -> None:
        """Let the database end each statement that takes longer, in each transaction."""
        engine.update_execution_options(**{_STATEMENT_SECONDS: seconds})

    def read_only(self, engine: Engine) -> Connection:
        """Return a connection without transactions, whose begin and end take as long as a page."""
        if _STATEMENT_SECONDS in engine.get_execution_options():
            return super().read_only(engine)
        return engine.connect().execution_options(isolation_level="AUTOCOMMIT")

    def go_by_indexes(self, connection: Connection) -> None:
        """Make sorting and reading a whole table costly, which a table never analyzed would see at each claim."""
        connection.exec_driver_sql(
            "SELECT set_config('enable_sort', 'off', true), set_config('enable_seqscan', 'off', true)"
        )

    def join_by_hash(self, connection: Connection) -> None:
        """Make nested loops costly: a table that was never analyzed passes for one of few due messages."""
        connection.exec_driver_sql("SET LOCAL enable_nestloop = off")

    def time_type(self) -> TypeEngine[Any]:
        """Return the type that keeps a zone."""
        return postgresql.TIMESTAMP(timezone=True)

    def text_type(self, length: int | None, dialect: SqlDialect) -> TypeEngine[Any]:
        """Return a type with the collation of bytes."""
        return postgresql.VARCHAR(length, collation="C")

    def queue_columns(self) -> list[Column[Any]]:
        """Return NServiceBus's own columns; its counter is a serial, which ends after 2^31 messages."""
        return [
            Column("id", Uuid(), primary_key=True, unique=False, nullable=False, quote=True),
            *self._queue_content(),
            Column("seq", NUMBER, Identity(), nullable=False, unique=True, quote=True),
        ]

    def among(self, column: ColumnElement[str], ids: Sequence[str]) -> ColumnElement[bool]:
        """Return a condition with all ids as one parameter."""
        # not "= any(..)", for which a table that was never analyzed is read from end to end
        return column.in_(select(func.unnest(bulk.array_column(ids, bulk.plain(column.type)))))

    def delete_rows(self, key: Column[Any], values: Sequence[Any]) -> Delete:
        """Return the statement with all values as one parameter."""
        return delete(key.table).where(self.among(key, values))

    def portions(self, ids: Sequence[str]) -> Iterator[Sequence[str]]:
        """Return all ids at once."""
        if ids:
            yield ids

    def length(self, column: ColumnElement[bytes]) -> ColumnElement[Any]:
        """Return the SQL for the number of bytes."""
        return func.length(column)

    def beginning(self, column: ColumnElement[Any], limit: int) -> ColumnElement[Any]:
        """Return the SQL for the first bytes or characters."""
        return func.substr(column, 1, limit, type_=column.type)

    def truncated(self, column: ColumnElement[datetime], unit: TimeUnit) -> ColumnElement[Any]:
        """Return the SQL for the hour or minute of a time."""
        return func.date_trunc(unit, column, type_=column.type)

    def seconds(self, first: ColumnElement[datetime], last: ColumnElement[datetime]) -> ColumnElement[Any]:
        """Return the SQL for the seconds from one time to another."""
        return extract("epoch", last - first)

    def behind(
        self, due: ColumnElement[datetime], message_id: ColumnElement[str], place: Sequence[ColumnElement[Any]]
    ) -> list[ColumnElement[bool]]:
        """Return one comparison of pairs; for the longer form the wrong index would be read."""
        return [tuple_(due, message_id) > tuple_(*place)]

    def invalid_indexes(self, connection: Connection, table: Table) -> set[str]:
        """Return the indexes that are being made, or that an interrupted CREATE INDEX CONCURRENTLY left."""
        full = connection.dialect.identifier_preparer.format_table(table)
        return set(connection.execute(_INVALID_INDEXES, {"name": full}).scalars())

    def for_indexes(self, engine: Engine) -> Engine:
        """Return the engine without transactions: CREATE INDEX CONCURRENTLY is refused in one."""
        return engine.execution_options(isolation_level="AUTOCOMMIT")

    def create_index(self, connection: Connection, index: Index) -> None:
        """Create an index, and lock no writer out; an invalid one of this name is left of an interrupted attempt."""
        for change in (DropIndex(index, if_exists=True), CreateIndex(index, if_not_exists=True)):
            statement = str(change.compile(dialect=connection.dialect)).replace("INDEX", "INDEX CONCURRENTLY", 1)
            connection.exec_driver_sql(statement)

    def check_at_once(self, connection: Connection) -> None:
        """Check deferred constraints and triggers at once."""
        connection.execute(text("SET CONSTRAINTS ALL IMMEDIATE"))

    def insert_all(self, connection: Connection, table: Table, rows: Sequence[Row]) -> None:
        """Insert by COPY where the driver has it, else as arrays."""
        if connection.dialect.driver in bulk.COPY_DRIVERS:
            bulk.copy(connection, table, rows)
            return
        for portion in bulk.array_portions(rows):
            connection.execute(bulk.insert_arrays(table, portion))

    def insert_new(self, connection: Connection, table: Table, rows: Sequence[Row]) -> set[str]:
        """Insert as arrays the rows whose ids are not there."""
        new: set[str] = set()
        for portion in bulk.array_portions(rows):
            statement = bulk.insert_arrays(table, portion).on_conflict_do_nothing(index_elements=[table.c.Id])
            new.update(connection.execute(statement.returning(table.c.Id)).scalars())
        return new

    def upsert(self, connection: Connection, table: Table, rows: Sequence[Row], common: Row) -> None:
        """Insert or replace rows as arrays."""
        own = list(rows[0])
        source = bulk.as_table(table, own, rows)
        fixed = [cast(common[name], table.c[name].type) for name in common]
        names = [*own, *common]
        given = postgresql.insert(table).from_select(names, select(*(source.c[name] for name in own), *fixed))
        replaced = {name: given.excluded[name] for name in names if name != "Id"}
        connection.execute(given.on_conflict_do_update(index_elements=[table.c.Id], set_=replaced))


class MySQL(Dialect):
    """MySQL and MariaDB. SQLAlchemy's dialect mysql serves both, and learns from the server which of them it is."""

    locks_rows = True
    # they take whole seconds, at least one
    _waits = "SET SESSION innodb_lock_wait_timeout = {0}, lock_wait_timeout = {0}"
    lock_limits = (_waits.format(1), _waits.format("DEFAULT"))
    contention_codes = frozenset({1213, 1205})
    lock_timeout_codes = frozenset({1205})
    # mysqlclient raises OperationalError for what it does not know, as for a server that is away
    refused_row_codes = frozenset(
        {
            *(3819, 4025, 1364, 1369, 1526, 1748),  # CHECK, no default, WITH CHECK OPTION, no partition
            *(1642, 1643, 1644),  # SIGNAL
            *(1300, 1366, 1977, 3854, 3988),  # a character that the column's encoding lacks
            *(3140, 3141, 3144, 3146, 3147, 3148, 3150, 3151, 3156, 3157),  # no JSON, or too deep
            *(1118, 1264, 1265, 1292, 1301, 1406, 1411, 1690),  # too long, out of range
        }
    )
    locks_examined_rows = True
    indexes_within = True
    _clock = "SELECT UTC_TIMESTAMP(6)"
    # only MariaDB reads the first comment, and only MySQL from 5.7.8 on the second
    _limit = (
        "SET @delayed_limit = 1 /*M! , SESSION max_statement_time = {seconds} */"
        " /*!50708 , SESSION max_execution_time = {milliseconds} */"
    )

    def engine_options(self) -> dict[str, Any]:
        """Return the arguments with the character set: the server's may be Latin 1, or have three bytes a character."""
        return {**super().engine_options(), "connect_args": {"charset": "utf8mb4"}}

    def prepare(self, engine: Engine) -> None:
        """Set timeouts and the session."""
        network.limit_silence(engine)
        # before SQLAlchemy looks at the first connection's sql_mode
        event.listen(engine, "connect", self._connected, insert=True)

    @staticmethod
    def _connected(connection: Any, _record: object) -> None:
        cursor = connection.cursor()
        # only MariaDB reads the comment: MySQL has no such limit
        cursor.execute(
            "SET SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', SESSION sql_safe_updates = 0,"
            " SESSION sql_auto_is_null = 0, SESSION sql_select_limit = 18446744073709551615,"
            " SESSION completion_type = 'NO_CHAIN', SESSION default_storage_engine = 'InnoDB'"
            f" /*M! , SESSION idle_transaction_timeout = {network.IDLE_SECONDS} */"
        )
        cursor.close()

    def limit_statements(self, engine: Engine, seconds: int) -> None:
        """Let the driver too end each statement, some seconds later: a silent server cannot."""
        network.limit_reads(engine, seconds + _GRACE)
        super().limit_statements(engine, seconds)

    def _server(self, connection: Connection) -> str:
        return "mariadb" if getattr(connection.dialect, "is_mariadb", False) else self.name

    def time_type(self) -> TypeEngine[Any]:
        """Return a type with microseconds; a plain DATETIME has whole seconds."""
        return mysql.DATETIME(fsp=6)

    def text_type(self, length: int | None, dialect: SqlDialect) -> TypeEngine[Any]:
        """Return a type whose collation counts blanks at the end; "_bin" alone does not."""
        collation = "utf8mb4_nopad_bin" if getattr(dialect, "is_mariadb", False) else "utf8mb4_0900_bin"
        return mysql.VARCHAR(length, charset="utf8mb4", collation=collation)

    def length(self, column: ColumnElement[bytes]) -> ColumnElement[Any]:
        """Return the SQL for the number of bytes."""
        return func.length(column)

    def beginning(self, column: ColumnElement[Any], limit: int) -> ColumnElement[Any]:
        """Return the SQL for the first bytes or characters."""
        return func.substr(column, 1, limit, type_=column.type)

    def truncated(self, column: ColumnElement[datetime], unit: TimeUnit) -> ColumnElement[Any]:
        """Return the SQL for the hour or minute of a time, as text."""
        form: ColumnElement[str] = literal_column("'%Y-%m-%d %H'" if unit == "hour" else "'%Y-%m-%d %H:%i'")
        return func.date_format(column, form, type_=String())

    def seconds(self, first: ColumnElement[datetime], last: ColumnElement[datetime]) -> ColumnElement[Any]:
        """Return the SQL for the seconds from one time to another."""
        microseconds = func.timestampdiff(literal_column("MICROSECOND"), first, last, type_=Float())
        return microseconds / 1_000_000

    def create_index(self, connection: Connection, index: Index) -> None:
        """Create an index, and lock no writer out."""
        statement = CreateIndex(index).compile(dialect=connection.dialect)
        connection.exec_driver_sql(f"{statement} ALGORITHM=INPLACE LOCK=NONE")

    def by_key(self, statement: Select[Any], table: Table) -> Select[Any]:
        """Return the query with a hint: a small table would be read, and each row of it locked or waited for."""
        return statement.with_hint(table, _KEY)

    def by_time(self, statement: Select[Any], table: Table, columns: Sequence[str]) -> Select[Any]:
        """Return the query with a hint: a table that was never analyzed would be read and sorted."""
        name = next(str(index.name) for index in table.indexes if [one.name for one in index.columns] == [*columns])
        return statement.with_hint(table, f"FORCE INDEX ({_QUOTE.quote_identifier(name)})")

    def delete_rows(self, key: Column[Any], values: Sequence[Any]) -> Delete:
        """Return the statement that uses the key, as :meth:`by_key`."""
        return bulk.DeleteByKey(key.table).where(key.in_(values))

    def update_rows(self, table: Table, ids: Sequence[str]) -> Update:
        """Return the statement with a hint, as :meth:`by_key`."""
        return super().update_rows(table, ids).with_hint(_KEY)

    def insert_all(self, connection: Connection, table: Table, rows: Sequence[Row]) -> None:
        """Insert in statements that are short enough for the server."""
        for piece in bulk.packet_portions(connection, rows):
            connection.execute(insert(table), piece)

    def _upsert(self, table: Table, names: Sequence[str]) -> Any:
        values = mysql.insert(table)
        return values.on_duplicate_key_update({name: values.inserted[name] for name in names})


class SQLite(Dialect):
    """A SQLite file: one transaction writes at a time, and waits for another by the driver."""

    is_file = True
    _clock = "SELECT strftime('%Y-%m-%d %H:%M:%f000', 'now')"

    def engine_options(self) -> dict[str, Any]:
        """Return the arguments with the longest wait for another writer."""
        return {"hide_parameters": True, "connect_args": {"timeout": SQLITE_BUSY_SECONDS}}

    def prepare(self, engine: Engine) -> None:
        """Begin transactions at once, as servers do."""
        event.listen(engine, "connect", self._connected)
        event.listen(engine, "begin", self._begun)

    def snapshot(self, engine: Engine) -> Connection:
        """Return a connection that only reads; each of SQLite's transactions is a snapshot."""
        return engine.connect().execution_options(read_only=True)

    @staticmethod
    def _connected(connection: Any, _record: object) -> None:
        connection.isolation_level = None

    @staticmethod
    def _begun(connection: Connection) -> None:
        read_only = connection.get_execution_options().get("read_only")
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")

    def allow_readers(self, engine: Engine) -> None:
        """Set the write-ahead log; the file remembers it."""
        connection = engine.raw_connection()
        try:
            for pause in (0.01, 0.1, 1, None):
                try:
                    connection.cursor().execute("PRAGMA journal_mode=WAL")
                    return
                except sqlite3.OperationalError:
                    # of two connections that set it at once, SQLite refuses one immediately, whatever its timeout
                    if pause is None:
                        raise
                    time.sleep(pause)
        finally:
            connection.close()

    def limit_statements(self, engine: Engine, seconds: int) -> None:
        """Do nothing: SQLite has no such limit."""

    def length(self, column: ColumnElement[bytes]) -> ColumnElement[Any]:
        """Return the SQL for the number of bytes, also of text."""
        # any column of SQLite can hold text, of which length() counts the characters before the first null
        as_bytes = func.length(cast(column, LargeBinary))
        return case((func.typeof(column) == "blob", func.length(column)), else_=as_bytes)

    def beginning(self, column: ColumnElement[Any], limit: int) -> ColumnElement[Any]:
        """Return the SQL for the first bytes or characters; null for an empty value."""
        return func.substr(column, 1, limit, type_=column.type)

    def truncated(self, column: ColumnElement[datetime], unit: TimeUnit) -> ColumnElement[Any]:
        """Return the SQL for the hour or minute of a time, as text."""
        return func.substr(column, 1, LENGTHS[unit], type_=String())

    def seconds(self, first: ColumnElement[datetime], last: ColumnElement[datetime]) -> ColumnElement[Any]:
        """Return the SQL for the seconds from one time to another."""
        return (func.julianday(last, type_=Float()) - func.julianday(first, type_=Float())) * 86_400

    def insert_new(self, connection: Connection, table: Table, rows: Sequence[Row]) -> set[str]:
        """Insert the rows whose ids are not there."""
        unless = sqlite.insert(table).on_conflict_do_nothing(index_elements=[table.c.Id]).returning(table.c.Id)
        return set(connection.execute(unless, list(rows)).scalars())

    def _upsert(self, table: Table, names: Sequence[str]) -> Any:
        given = sqlite.insert(table)
        replaced = {name: given.excluded[name] for name in names}
        return given.on_conflict_do_update(index_elements=[table.c.Id], set_=replaced)


_DIALECTS: Mapping[str, Dialect] = {
    "postgresql": PostgreSQL("postgresql"),
    "mysql": MySQL("mysql"),
    "mariadb": MySQL("mariadb"),
    "sqlite": SQLite("sqlite"),
}


def dialect_named(name: str) -> Dialect:
    """Return the dialect of SQLAlchemy's name."""
    return _DIALECTS.get(name) or Dialect(name)


def dialect_of(source: Connection | Engine) -> Dialect:
    """Return the dialect of a connection or an engine."""
    return dialect_for(source.dialect)


def dialect_for(dialect: SqlDialect) -> Dialect:
    """Return the dialect for SQLAlchemy's; called for each time in a row."""
    return _DIALECTS.get(dialect.name) or Dialect(dialect.name)


def database_time(connection: Connection) -> datetime:
    """Return the database's time, see :meth:`Dialect.time`."""
    return dialect_of(connection).time(connection)
