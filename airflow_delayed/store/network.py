"""How long a store's database may be silent: timeouts of its connections.

Without timeouts a host that drops packets, or whose power fails, leaves a client waiting for ever: no reset ever comes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Dialect, Engine, event
from sqlalchemy.engine import ExceptionContext

#: Seconds to connect to one host, its greeting included.
CONNECT_SECONDS = 10
#: Seconds after which the server ends a transaction in which nothing is asked: a process that stands still in one keeps
#: its rows locked, so that no other dispatcher can send them.
IDLE_SECONDS = 30

#: libpq's parameters beside connect_timeout; an extra of the connection overrides each. A host is asked whether it is
#: alive after 10 s without a packet; what was sent must be acknowledged within 15 s.
_LIBPQ: Mapping[str, Any] = {
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 3,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}
LIBPQ_DRIVERS = ("psycopg", "psycopg2")
_MYSQL_DRIVERS = ("mysqldb", "mysqlconnector")
#: Seconds for which MySQL's drivers wait for an answer, unless :func:`limit_reads` sets others: somewhat more than the
#: server lets a statement wait for a lock (innodb_lock_wait_timeout).
_READ_SECONDS = 60
#: These seconds, by the dialect of each engine: the event that connects has no engine.
_READ_LIMITS: WeakKeyDictionary[Dialect, float] = WeakKeyDictionary()
#: What mysql-connector-python raises then without its C extension.
_TIMEOUT_ERRORS = ("ReadTimeoutError", "WriteTimeoutError")
#: The key of the first host and port in ``Connection.info``.
_ADDRESS = "airflow_delayed.address"


def limit_silence(engine: Engine) -> None:
    """Let the driver give up a silent host; of several hosts of libpq choose the writable one."""
    event.listen(engine, "do_connect", set_limits)
    if engine.dialect.driver in _MYSQL_DRIVERS:
        _READ_LIMITS[engine.dialect] = _READ_SECONDS
        event.listen(engine, "handle_error", _give_up)


def limit_reads(engine: Engine, seconds: float) -> None:
    """Let MySQL's drivers wait so long for an answer; idle connections are closed, for new ones alone have it."""
    if _READ_LIMITS.get(engine.dialect, seconds) != seconds:
        _READ_LIMITS[engine.dialect] = seconds
        engine.dispose()


def set_limits(dialect: Dialect, record: Any, _arguments: object, parameters: dict[str, Any]) -> None:
    """Add the limits that the driver's parameters lack; a listener of SQLAlchemy's event ``do_connect``."""
    if dialect.driver in LIBPQ_DRIVERS:
        _libpq(record, parameters)
    elif dialect.driver in _MYSQL_DRIVERS:
        _mysql(dialect, parameters)


def _libpq(record: Any, parameters: dict[str, Any]) -> None:
    for name, value in {"connect_timeout": CONNECT_SECONDS, **_LIBPQ}.items():
        parameters.setdefault(name, value)
    hosts = str(parameters.get("host") or "").split(",")
    if len(hosts) > 1:
        parameters.setdefault("target_session_attrs", "read-write")
    if record is not None:
        record.info[_ADDRESS] = hosts[0] or None, int(str(parameters.get("port") or 0).split(",")[0] or 0) or None


def _mysql(dialect: Dialect, parameters: dict[str, Any]) -> None:
    # mysql-connector-python takes two names for it
    if "connection_timeout" not in parameters:
        parameters.setdefault("connect_timeout", CONNECT_SECONDS)
    # it has the others from 9.2 on
    constants = getattr(dialect.loaded_dbapi, "constants", None)
    known = dialect.driver == "mysqldb" or "read_timeout" in getattr(constants, "DEFAULT_CONFIGURATION", ())
    if known and (seconds := _READ_LIMITS.get(dialect)) is not None:
        parameters.setdefault("read_timeout", math.ceil(seconds))
        parameters.setdefault("write_timeout", math.ceil(seconds))


def _give_up(context: ExceptionContext) -> None:
    # the driver leaves the connection open: an answer that comes late would be taken for the next statement's
    if type(context.original_exception).__name__ in _TIMEOUT_ERRORS:
        context.is_disconnect = True


def first_address(connection: Connection) -> tuple[str | None, int | None]:
    """Return host and port of a connection, of several hosts the first; None: the driver's default."""
    url = connection.engine.url
    address: tuple[str | None, int | None] = connection.info.get(_ADDRESS, (url.host, url.port))
    return address


#: Where to look for the cause.
ADVICE = (
    "look among the database's sessions for a holder of locks (pg_stat_activity, SHOW PROCESSLIST), and whether the"
    " server is frozen or its disk is full or hangs; if others get answers, whether the dispatcher's own machine stands"
    " still"
)
