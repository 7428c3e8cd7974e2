"""Drivers that read values which Python's types cannot represent, so that one row never breaks a query.

A program with the right to INSERT can write values that this package never writes: PostgreSQL stores the times
``infinity`` and ``44 BC``, MariaDB stores ``0000-00-00``, SQLite stores any value in any column. For some of these a
driver raises an error when rows are fetched, and the query returns no row at all. Here such a value is replaced: a time
by a :class:`NoTime`, bytes that are no text by a text that no message may have as its id.

The drivers of MySQL are named here too, as Airflow's hook has them in the extra ``client``.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import DateTime, Dialect, Engine, Integer, LargeBinary, String, event
from sqlalchemy.dialects import mysql, sqlite

from airflow_delayed.errors import InputError
from airflow_delayed.message import MICROSECOND, UTC

#: The beginning of a text that replaces bytes. Its blank makes it an id that no message may have.
NO_TEXT = "not text: "
#: The code of the type DATETIME in MySQL's protocol.
_DATETIME = 12
_MICROSECONDS = (datetime.max - datetime.min) // MICROSECOND + 1


class MysqlClient(NamedTuple):
    """A driver of MySQL: its dialect, its module, and the extras that ask it for TLS, with an example."""

    dialect: str
    module: str
    tls: str
    example: str


#: By the extra ``client``.
_MYSQL_CLIENTS: Mapping[str, MysqlClient] = {
    "mysqlclient": MysqlClient("mysql+mysqldb", "MySQLdb", r"ssl|ssl_mode", '"ssl": {"ca": "/path/ca.pem"}'),
    "mysql-connector-python": MysqlClient(
        "mysql+mysqlconnector", "mysql.connector", r"ssl_\w+", '"ssl_ca": "/path/ca.pem"'
    ),
}
#: How a name begins that asks for TLS somewhere.
_ASKS_FOR_TLS = re.compile(
    r"(use_?|require_?)?(ssl|tls)|(ca|cert|key)_?(file|path|cert)|ca$|cert|verify", re.IGNORECASE
)


def mysql_client(conn_id: str, extra: Mapping[str, Any]) -> MysqlClient:
    """Return the driver that a connection names.

    :raises InputError: Airflow's hook has no such client; or the driver would ignore an extra that asks for TLS, and
        login and bodies would be sent in the clear.
    """
    name = extra.get("client") or "mysqlclient"
    if name not in _MYSQL_CLIENTS:
        choices = ", ".join(_MYSQL_CLIENTS)
        raise InputError(f"connection {conn_id!r}: the extra client={name!r} is none of {choices}")
    client = _MYSQL_CLIENTS[name]
    for key, value in extra.items():
        if value and _ASKS_FOR_TLS.match(key) and not re.fullmatch(client.tls, key):
            raise InputError(
                f"connection {conn_id!r}: {name} ignores the extra {key!r}, and would connect without it; write for"
                f" instance {client.example}"
            )
    return client


class NoTime(datetime):
    """Replaces a time that Python cannot represent, by the nearest one in the database's order of times."""


#: Before and after all times that Python can represent.
FIRST = NoTime(1, 1, 1, tzinfo=UTC)
LAST = NoTime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)


def tolerate_postgresql(engine: Engine) -> None:
    """Make PostgreSQL's driver replace values instead of raising errors; call it once for an engine."""
    event.listen(engine, "connect", _psycopg2 if engine.dialect.driver == "psycopg2" else _psycopg)


def tolerate_sqlite(engine: Engine) -> None:
    """Do the same on SQLite."""
    event.listen(engine, "connect", _sqlite)
    kinds = {DateTime: _SqliteTime, String: _SqliteText, Integer: _SqliteInteger, LargeBinary: _SqliteBytes}
    engine.dialect.colspecs = {**engine.dialect.colspecs, **kinds}


def tolerate_mysql(engine: Engine) -> None:
    """Do the same on MySQL and MariaDB."""
    if listener := _MYSQL.get(engine.dialect.driver):
        event.listen(engine, "connect", listener)
    engine.dialect.colspecs = {**engine.dialect.colspecs, mysql.DATETIME: _MysqlTime}


def _nearest(text: str) -> datetime:
    """Return the NoTime for PostgreSQL's text of a time."""
    return FIRST if text.startswith("-") or text.endswith("BC") else LAST


def _psycopg(connection: Any, _record: object) -> None:
    from psycopg import DataError
    from psycopg.adapt import Loader
    from psycopg.pq import Format

    def tolerant(name: str) -> type[Loader]:
        oid = connection.adapters.types[name].oid
        plain = connection.adapters.get_loader(oid, Format.TEXT)

        class Tolerant(Loader):
            def __init__(self, oid: int, context: Any = None) -> None:
                super().__init__(oid, context)
                self._load = plain(oid, context).load

            def load(self, data: Any) -> Any:
                try:
                    return self._load(data)
                except DataError:
                    return _nearest(bytes(data).decode())

        return Tolerant

    for name in ("timestamptz", "timestamp", "date"):
        connection.adapters.register_loader(name, tolerant(name))


def _psycopg2(connection: Any, _record: object) -> None:
    from psycopg2 import extensions  # type: ignore[import-untyped]

    def tolerant(plain: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def load(value: str | None, cursor: Any) -> Any:
            # the driver would return an ordinary time for an infinite one
            if value is not None and value.endswith("infinity"):
                return _nearest(value)
            try:
                return plain(value, cursor)
            except ValueError:
                return _nearest(str(value))

        return load

    for plain in (extensions.PYDATETIMETZ, extensions.PYDATETIME, extensions.PYDATE):
        made = extensions.new_type(plain.values, f"TOLERANT_{plain.name}", tolerant(plain))
        extensions.register_type(made, connection)


def _sqlite(connection: Any, _record: object) -> None:
    connection.text_factory = _as_text


def _mysqldb(connection: Any, _record: object) -> None:
    plain = connection.converter[_DATETIME]
    connection.converter[_DATETIME] = lambda value: plain(value) or value


def _mysqlconnector(connection: Any, _record: object) -> None:
    class Tolerant(type(connection.converter)):  # type: ignore[misc]
        def _datetime_to_python(self, value: bytes, dsc: Any = None) -> Any:
            return super()._datetime_to_python(value, dsc) or bytes(value).decode()

    connection.converter_class = Tolerant


_MYSQL = {"mysqldb": _mysqldb, "mysqlconnector": _mysqlconnector}


def _as_text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return f"{NO_TEXT}x'{data.hex()}'"


def raw_of(text: str) -> bytes | None:
    """Return the bytes that a text with :data:`NO_TEXT` replaces; None: it is another text."""
    if not text.startswith(f"{NO_TEXT}x'"):
        return None
    try:
        return bytes.fromhex(text[len(NO_TEXT) + 2 : -1])
    except ValueError:
        return None


def _time_of(value: object) -> datetime:
    """Return the NoTime for a value that is no time, by its place in SQLite's or MySQL's order."""
    if not isinstance(value, str):
        return FIRST if isinstance(value, int | float) else LAST
    place = bisect_left(range(_MICROSECONDS), value, key=lambda number: _moment(number).isoformat(" ", "microseconds"))
    moment = _moment(min(place, _MICROSECONDS - 1))
    return NoTime.combine(moment.date(), moment.time(), UTC)


def _moment(number: int) -> datetime:
    return datetime.min + timedelta(microseconds=number)


class _SqliteTime(sqlite.DATETIME):
    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], Any]:
        """Read times, and replace other values."""
        plain: Any = super().result_processor(dialect, coltype)

        def process(value: Any) -> datetime | None:
            try:
                found: datetime | None = plain(value)
            except (ValueError, TypeError):
                return _time_of(value)
            # this package writes times without a zone
            return found if found is None or found.tzinfo is None else _time_of(value)

        return process


class _SqliteText(String):
    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], Any]:
        """Return numbers and bytes as text."""

        def process(value: Any) -> str | None:
            if value is None or isinstance(value, str):
                return value
            return f"{NO_TEXT}x'{value.hex()}'" if isinstance(value, bytes) else str(value)

        return process


class _SqliteInteger(Integer):
    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], Any]:
        """Return 0 for any other value."""

        def process(value: Any) -> int | None:
            return value if value is None or isinstance(value, int) else 0

        return process


class _SqliteBytes(LargeBinary):
    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], Any]:
        """Return text as UTF-8, and numbers as they are printed."""

        def process(value: Any) -> bytes | None:
            return value if value is None or isinstance(value, bytes) else str(value).encode()

        return process


class _MysqlTime(mysql.DATETIME):
    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], Any]:
        """Replace times that the driver returns as text."""

        def process(value: Any) -> datetime | None:
            return _time_of(value) if isinstance(value, str) else value

        return process
