"""The base class of the dialects: all that differs by database, with the behaviour that most databases share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import Any, ClassVar, Literal, TypeVar

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    DateTime,
    Delete,
    Engine,
    Float,
    Index,
    Integer,
    LargeBinary,
    Select,
    String,
    Table,
    Text,
    Update,
    Uuid,
    and_,
    delete,
    event,
    insert,
    or_,
    select,
    text,
    update,
)
from sqlalchemy import Dialect as SqlDialect
from sqlalchemy.dialects import mysql, postgresql
from sqlalchemy.types import TypeEngine

from airflow_delayed.errors import DelayedError
from airflow_delayed.message import UTC
from airflow_delayed.store import network
from airflow_delayed.store.drivers import MysqlClient, mysql_client

#: Ids in one statement.
IDS = 1000
#: The databases whose indexes can leave out rows; MySQL and MariaDB index all.
PARTIAL_INDEXES = ("postgresql", "sqlite")
#: The type of a counter. SQLite counts up by itself only an INTEGER, which has as many bits.
NUMBER = BigInteger().with_variant(Integer(), "sqlite")
_MYSQL_DOUBLE = mysql.DOUBLE(asdecimal=False)
#: A number with a fraction, of 53 bits; by the names that databases give back.
FRACTION = (
    Float().with_variant(postgresql.DOUBLE_PRECISION(), "postgresql").with_variant(_MYSQL_DOUBLE, "mysql", "mariadb")
)
#: Text of any length; of a table's or server's own character set it could lack letters.
LONG_TEXT = Text().with_variant(mysql.LONGTEXT(charset="utf8mb4"), "mysql", "mariadb")
#: The same; on MySQL and MariaDB of 64 KiB.
SHORT_TEXT = Text().with_variant(mysql.TEXT(charset="utf8mb4"), "mysql", "mariadb")

#: The name of each database in texts, by SQLAlchemy's name.
KNOWN = {
    "postgresql": "PostgreSQL",
    "mysql": "MySQL",
    "mariadb": "MariaDB",
    "sqlite": "SQLite",
}

Row = Mapping[str, Any]
TimeUnit = Literal["hour", "minute"]
T = TypeVar("T")


class Dialect:
    """A database; a subclass overrides what differs. Statements can be shown for a database without a subclass."""

    #: Whether a column of times keeps a zone.
    keeps_zone: ClassVar[bool] = False
    #: Whether a query can lock single rows.
    locks_rows: ClassVar[bool] = False
    #: The statements that limit a transaction's wait for locks to the milliseconds ``{0}``, and that end this limit.
    lock_limits: ClassVar[tuple[str | None, str | None]] = (None, None)
    #: The driver's codes of a deadlock, a lock timeout, and a serialization failure.
    contention_codes: ClassVar[frozenset[object]] = frozenset()
    #: Those of them that mean that a statement has waited too long for a lock; the rest of its transaction stands.
    lock_timeout_codes: ClassVar[frozenset[object]] = frozenset()
    #: The driver's codes of a row that a constraint, a trigger, an encoding or a length refuses, where its class of
    #: errors does not say so.
    refused_row_codes: ClassVar[frozenset[object]] = frozenset()
    #: Whether a claim is one statement, which returns the place of each row (PostgreSQL's ``ctid``), and so is the
    #: removal of messages whose ids are remembered.
    claims_at_once: ClassVar[bool] = False
    #: Whether a query that locks by an index also locks the rows that it only examines, until the transaction ends.
    locks_examined_rows: ClassVar[bool] = False
    #: Whether a database is a file, which only machines that share its disk can read.
    is_file: ClassVar[bool] = False
    #: Whether a page of several runs is read run by run.
    reads_by_run: ClassVar[bool] = False
    #: Whether CREATE INDEX lacks ``IF NOT EXISTS``, so that an install's script has the indexes within CREATE TABLE.
    indexes_within: ClassVar[bool] = False
    #: Statements after which a transaction's times have the only form that the drivers read; empty: they have it.
    readable_times: ClassVar[str] = ""
    #: SQL for the time.
    _clock: ClassVar[str] = ""
    #: The statement that limits the time of each later statement of a connection.
    _limit: ClassVar[str] = ""

    def __init__(self, name: str) -> None:
        self.name = name

    def check_known(self) -> None:
        """Check that a store can be kept in this database."""
        if self.name not in KNOWN:
            raise DelayedError(f"no store can be kept in {self.name}; use one of {', '.join(KNOWN.values())}")

    # connections

    def engine_options(self) -> dict[str, Any]:
        """Return the arguments for ``create_engine``; error texts show no parameters, because these hold bodies."""
        return {"hide_parameters": True, "pool_pre_ping": True, "isolation_level": "READ COMMITTED"}

    def prepare(self, engine: Engine) -> None:
        """Make transactions and values mean the same as on other databases, see the store's ``prepare``."""
        self.check_known()

    def client(self, conn_id: str, extra: Mapping[str, Any]) -> MysqlClient:
        """Return the driver that a connection's extra names, on MySQL and MariaDB."""
        return mysql_client(conn_id, extra)

    def set_limits(self, dialect: SqlDialect, record: Any, parameters: dict[str, Any]) -> None:
        """Add the limits that a driver's parameters lack, before it connects."""
        network.set_limits(dialect, record, (), parameters)

    def check_encoding(self, connection: Connection) -> None:
        """Raise DelayedError with the remedy if the database cannot hold all texts."""

    def allow_readers(self, engine: Engine) -> None:
        """Let readers go on while another connection writes; on all but SQLite they always do."""

    def snapshot(self, engine: Engine) -> Connection:
        """Return a connection all of whose statements see the database as it was at the first of them."""
        return engine.connect().execution_options(isolation_level="REPEATABLE READ")

    def read_only(self, engine: Engine) -> Connection:
        """Return a connection that only reads; each statement sees what was committed before it."""
        return engine.connect().execution_options(read_only=True)

    def limit_statements(self, engine: Engine, seconds: int) -> None:
        """End each statement that takes longer; SQLite has no such limit, and MySQL has it for SELECT only."""
        statement = self._limit.format(seconds=seconds, milliseconds=seconds * 1000)

        def limit(connection: Any, _record: object) -> None:
            cursor = connection.cursor()
            cursor.execute(statement)
            cursor.close()
            connection.commit()

        event.listen(engine, "connect", limit)

    def server_name(self, connection: Connection) -> str:
        """Return the server's name and version, such as "PostgreSQL 15.4"."""
        version = getattr(connection.dialect, "server_version_info", None) or ()
        return " ".join([KNOWN[self._server(connection)], *([".".join(map(str, version[:3]))] if version else [])])

    def _server(self, connection: Connection) -> str:
        return self.name

    def time(self, connection: Connection) -> datetime:
        """Return the database's time in UTC, in one round trip. SQLite's has milliseconds."""
        now = connection.execute(text(self._clock)).scalar_one()
        moment: datetime = datetime.fromisoformat(now) if isinstance(now, str) else now
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)

    @property
    def clock_sql(self) -> str:
        """An expression for the time, as the type of :meth:`time_type` keeps it."""
        return f"({self._clock})"

    # columns

    def time_type(self) -> TypeEngine[Any]:
        """Return the type of a time with microseconds."""
        return DateTime()

    def text_type(self, length: int | None, dialect: SqlDialect) -> TypeEngine[Any]:
        """Return the type of a text that is compared byte by byte."""
        return String(length)

    def queue_columns(self) -> list[Column[Any]]:
        """Return the columns of a queue table, their keys id, expires, headers, body and seq whatever their names."""
        # on SQLite and MySQL a counter must be the primary key
        return [
            Column("id", Uuid(), primary_key=False, unique=True, nullable=False, quote=True),
            *self._queue_content(),
            Column("seq", NUMBER, primary_key=True, autoincrement=True, quote=True),
        ]

    def _queue_content(self) -> list[Column[Any]]:
        return [
            Column("expires", DateTime(), quote=True),
            Column("headers", LONG_TEXT, nullable=False, quote=True),
            Column("body", bytes_type(), quote=True),
        ]

    # statements

    def among(self, column: ColumnElement[str], ids: Sequence[str]) -> ColumnElement[bool]:
        """Return the condition that a column has one of these texts, one portion of :meth:`portions`."""
        return column.in_(ids)

    def portions(self, ids: Sequence[str]) -> Iterator[Sequence[str]]:
        """Cut ids into portions for :meth:`among`."""
        return slices(ids)

    def length(self, column: ColumnElement[bytes]) -> ColumnElement[Any]:
        """Return the SQL for the number of bytes."""
        raise NotImplementedError

    def beginning(self, column: ColumnElement[Any], limit: int) -> ColumnElement[Any]:
        """Return the SQL for the first bytes, or for the first characters of text."""
        raise NotImplementedError

    def truncated(self, column: ColumnElement[datetime], unit: TimeUnit) -> ColumnElement[Any]:
        """Return the SQL for the hour or minute of a time in UTC: a time, or the text ``2030-01-31 09[:30]``."""
        raise NotImplementedError

    def seconds(self, first: ColumnElement[datetime], last: ColumnElement[datetime]) -> ColumnElement[Any]:
        """Return the SQL for the seconds from one time to another."""
        raise NotImplementedError

    def behind(
        self, due: ColumnElement[datetime], message_id: ColumnElement[str], place: Sequence[ColumnElement[Any]]
    ) -> list[ColumnElement[bool]]:
        """Return the conditions for rows behind a due time and an id, ``place``, in that order."""
        after_due, after_id = place
        # the first lets the index on the due time be used
        return [due >= after_due, or_(due > after_due, and_(due == after_due, message_id > after_id))]

    def invalid_indexes(self, connection: Connection, table: Table) -> set[str]:
        """Return the names of indexes that are there and not in use."""
        return set()

    def for_indexes(self, engine: Engine) -> Engine:
        """Return the engine that creates indexes."""
        return engine

    def create_index(self, connection: Connection, index: Index) -> None:
        """Create an index of a table that has rows, beside readers and writers where the database can."""
        index.create(connection)

    def check_at_once(self, connection: Connection) -> None:
        """Let each statement of the transaction check its rows: at the commit nobody could tell which is wrong."""

    def by_key(self, statement: Select[Any], table: Table) -> Select[Any]:
        """Return a query that finds its rows by their key, and so locks no other row."""
        return statement

    def go_by_indexes(self, connection: Connection) -> None:
        """Let the transaction's statements read messages in the order of an index, rather than read all."""

    def join_by_hash(self, connection: Connection) -> None:
        """Let the rest of the transaction, which only claims, compare no row with each other row."""

    def by_time(self, statement: Select[Any], table: Table, columns: Sequence[str]) -> Select[Any]:
        """Return a query that reads messages in the order of the index on these columns."""
        return statement

    def delete_rows(self, key: Column[Any], values: Sequence[Any]) -> Delete:
        """Return the statement that deletes the rows of these values of a table's key, and locks no other row."""
        return delete(key.table).where(key.in_(values))

    def update_rows(self, table: Table, ids: Sequence[str]) -> Update:
        """Return the statement, still without values, that updates the rows of these ids, and locks no other row."""
        return update(table).where(table.c.Id.in_(ids))

    def insert_all(self, connection: Connection, table: Table, rows: Sequence[Row]) -> None:
        """Insert rows whose ids are not there yet, else IntegrityError; half the time of :meth:`insert_new`."""
        connection.execute(insert(table), list(rows))

    def insert_new(self, connection: Connection, table: Table, rows: Sequence[Row]) -> set[str]:
        """Insert the rows whose ids are not there yet, each once in ``rows``, and return their ids."""
        there: set[str] = set()
        for portion in slices([row["Id"] for row in rows]):
            there.update(connection.execute(select(table.c.Id).where(table.c.Id.in_(portion))).scalars())
        missing = [row for row in rows if row["Id"] not in there]
        if missing:
            self.insert_all(connection, table, missing)
        return {row["Id"] for row in missing}

    def upsert(self, connection: Connection, table: Table, rows: Sequence[Row], common: Row) -> None:
        """Insert rows, and replace those of the same ids; ``common``: further columns, the same in each row."""
        statement = self._upsert(table, [name for name in (*rows[0], *common) if name != "Id"])
        connection.execute(statement, [{**row, **common} for row in rows])

    def _upsert(self, table: Table, names: Sequence[str]) -> Any:
        raise NotImplementedError


def bytes_type(length: int | None = None) -> TypeEngine[bytes]:
    """Return the type of bytes, by default of any length; MySQL's plain BLOB ends at 64 KiB."""
    of_mysql = mysql.VARBINARY(length) if length else mysql.LONGBLOB()
    return LargeBinary(length).with_variant(of_mysql, "mysql", "mariadb")


def slices(ids: Sequence[T]) -> Iterator[list[T]]:
    """Cut ids, or numbers, into pieces that fit into one statement."""
    rest = iter(ids)
    while some := list(islice(rest, IDS)):
        yield some
