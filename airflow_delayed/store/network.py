"""How long a store's database may be silent: timeouts of its connections, and what is known of each to end it.

Without them a host that drops packets, or whose power fails, leaves a client waiting for ever: no reset ever comes.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from threading import Lock, get_ident
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Dialect, Engine, event

#: Seconds to connect to one host, its greeting included.
CONNECT_SECONDS = 10
#: Seconds without a packet until a host is asked whether it is alive, and between two such questions.
KEEPALIVE_IDLE, KEEPALIVE_INTERVAL = 10, 3
#: How many of these questions may stay without an answer.
KEEPALIVE_COUNT = 3
#: Seconds for which a host need not acknowledge what was sent.
ACKNOWLEDGE_SECONDS = 15

#: libpq's parameters beside connect_timeout; an extra of the connection overrides each.
_LIBPQ: Mapping[str, Any] = {
    "keepalives": 1,
    "keepalives_idle": KEEPALIVE_IDLE,
    "keepalives_interval": KEEPALIVE_INTERVAL,
    "keepalives_count": KEEPALIVE_COUNT,
    "tcp_user_timeout": ACKNOWLEDGE_SECONDS * 1000,
}
_LIBPQ_DRIVERS = ("psycopg", "psycopg2")
_MYSQL_DRIVERS = ("mysqldb", "pymysql", "mysqlconnector")
#: The same for MySQL's drivers, which take socket options in no other way; not every system has all of them.
_SOCKET_OPTIONS = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (
            ("TCP_KEEPIDLE", KEEPALIVE_IDLE),
            ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL),
            ("TCP_KEEPCNT", KEEPALIVE_COUNT),
            ("TCP_USER_TIMEOUT", ACKNOWLEDGE_SECONDS * 1000),
        )
        if hasattr(socket, name)
    ),
]
#: The key of the first host and port in ``Connection.info``.
_ADDRESS = "airflow_delayed.address"


def limit_libpq(engine: Engine) -> None:
    """Let libpq give up a silent host; of several hosts choose the writable one."""
    if engine.dialect.driver in _LIBPQ_DRIVERS:
        event.listen(engine, "do_connect", _libpq)


def limit_mysql(engine: Engine) -> None:
    """Let a driver of MySQL give up a silent host."""
    if engine.dialect.driver in _MYSQL_DRIVERS:
        event.listen(engine, "do_connect", _mysql)
        if engine.dialect.driver == "pymysql":
            event.listen(engine, "do_connect", _pymysql)
        event.listen(engine, "connect", _keep_alive)


def _libpq(_dialect: object, record: Any, _arguments: object, parameters: dict[str, Any]) -> None:
    for name, value in {"connect_timeout": CONNECT_SECONDS, **_LIBPQ}.items():
        parameters.setdefault(name, value)
    hosts = str(parameters.get("host") or "").split(",")
    if len(hosts) > 1:
        parameters.setdefault("target_session_attrs", "read-write")
    if record is not None:
        record.info[_ADDRESS] = hosts[0] or None, int(str(parameters.get("port") or 0).split(",")[0] or 0) or None


def _mysql(dialect: Dialect, _record: object, _arguments: object, parameters: dict[str, Any]) -> None:
    # mysql-connector-python takes two names for it
    if "connection_timeout" not in parameters:
        parameters.setdefault("connect_timeout", CONNECT_SECONDS)
    if dialect.driver == "mysqlconnector":
        # its C extension hides the socket, so that nothing could end a silent connection
        parameters.setdefault("use_pure", True)


def _pymysql(dialect: Dialect, _record: object, arguments: Sequence[Any], parameters: dict[str, Any]) -> Any:
    """Connect, and limit the greeting and the login too: PyMySQL's own limit ends with TCP's part of it."""
    if "read_timeout" in parameters:
        return None
    connection = dialect.connect(*arguments, **parameters, read_timeout=parameters["connect_timeout"])
    connection._read_timeout = None
    return connection


def _keep_alive(connection: Any, _record: object) -> None:
    if (descriptor := descriptor_of(connection)) is None:
        return
    with closing(socket.socket(fileno=os.dup(descriptor))) as opened:
        for level, option, value in _SOCKET_OPTIONS:
            # a Unix socket has none of those of TCP
            with suppress(OSError):
                opened.setsockopt(level, option, value)


def first_address(connection: Connection) -> tuple[str | None, int | None]:
    """Return host and port of a connection, of several hosts the first; None: the driver's default."""
    url = connection.engine.url
    address: tuple[str | None, int | None] = connection.info.get(_ADDRESS, (url.host, url.port))
    return address


def shut_down(descriptor: int) -> None:
    """End a connection from another thread, by its socket: the driver's call raises an error."""
    # it may have been closed meanwhile
    with suppress(OSError), closing(socket.socket(fileno=os.dup(descriptor))) as opened:
        opened.shutdown(socket.SHUT_RDWR)


#: The socket's descriptor of a connection of psycopg, psycopg2 and mysqlclient; of pymysql; of mysql-connector-python.
_DESCRIPTORS: Sequence[Callable[[Any], int]] = (
    lambda connection: connection.fileno(),
    lambda connection: connection._sock.fileno(),
    lambda connection: connection._socket.sock.fileno(),
)


def descriptor_of(connection: Any) -> int | None:
    """Return the descriptor of the socket of a driver's connection; None: SQLite, a closed one, or another driver."""
    for descriptor in _DESCRIPTORS:
        # each driver raises its own errors
        with suppress(Exception):
            number = descriptor(connection)
            return number if number >= 0 else None
    return None


@dataclass(slots=True, eq=False)
class DatabaseCall:
    """A transaction of one thread.

    :param since: when its last statement began, by the monotonic clock.
    :param socket: the descriptor of its connection; None: it has no connection yet, or one that is tested before it is
        used, or the driver has no socket.
    """

    what: str
    since: float = field(default_factory=time.monotonic)
    socket: int | None = None
    logged: bool = False
    ended: bool = False


class EngineActivity:
    """What an engine's connections do, for all that use the engine, in whatever threads.

    Its listeners are there from the engine's first use to its end: SQLAlchemy raises an error in a thread that is
    inside an event while another one adds or removes a listener.
    """

    def __init__(self, engine: Engine) -> None:
        #: By thread.
        self.calls: dict[int, DatabaseCall] = {}
        #: The sockets of the connections in the pool, also of a connection while it is tested before its use.
        self.pooled: dict[int, int] = {}
        #: Whether each connection is closed when it returns to the pool.
        self.closing = False
        # a new connection is known before the first statement, which the dialect executes in this event
        event.listen(engine, "connect", self._connected, insert=True)
        event.listen(engine, "checkout", self._taken)
        event.listen(engine, "checkin", self._returned)
        event.listen(engine, "close", self._closed)
        for name in ("before_cursor_execute", "commit", "rollback"):
            event.listen(engine, name, self._alive)

    # a socket is looked up by the thread that uses its connection: mysqlclient refuses others

    def _connected(self, connection: Any, _record: object) -> None:
        if call := self.calls.get(get_ident()):
            call.socket = descriptor_of(connection)
            self._alive()

    def _taken(self, connection: Any, _record: object, _proxy: object) -> None:
        self.pooled.pop(id(connection), None)
        self._connected(connection, None)

    def _returned(self, connection: Any, record: Any) -> None:
        if self.closing:
            record.invalidate()
        elif (descriptor := descriptor_of(connection)) is not None:
            self.pooled[id(connection)] = descriptor
        self._let_go()

    def _closed(self, connection: Any, _record: object) -> None:
        # its number may soon be another socket's
        self.pooled.pop(id(connection), None)
        self._let_go()

    def _let_go(self) -> None:
        if call := self.calls.get(get_ident()):
            call.socket = None

    def _alive(self, *_arguments: object) -> None:
        """Note that the last statement was answered, and the next one begins."""
        if call := self.calls.get(get_ident()):
            call.since = time.monotonic()
            call.logged = call.ended = False


_ACTIVITIES: WeakKeyDictionary[Engine, EngineActivity] = WeakKeyDictionary()
_LOCK = Lock()


def activity_of(engine: Engine) -> EngineActivity:
    """Return the activity of an engine; its first call comes before the engine's first connection."""
    with _LOCK:
        if (activity := _ACTIVITIES.get(engine)) is None:
            activity = _ACTIVITIES[engine] = EngineActivity(engine)
        return activity
