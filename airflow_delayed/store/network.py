"""How long a store's database may be silent: timeouts of its connections, and the watchdog of a dispatcher's calls.

Without timeouts a host that drops packets, or whose power fails, leaves a client waiting for ever: no reset ever comes.
TCP does not notice a server that is frozen, or whose disk hangs, or where another session holds a lock: the kernel of
such a host still answers. So the :class:`Watchdog` logs calls that get no answer, and ends them.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Lock, get_ident
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Dialect, Engine, event

from airflow_delayed.message import utcnow
from airflow_delayed.threads import Ticker

log = logging.getLogger(__name__)

#: Seconds to connect to one host, its greeting included.
CONNECT_SECONDS = 10
#: Seconds without a packet until a host is asked whether it is alive, and between two such questions.
KEEPALIVE_IDLE, KEEPALIVE_INTERVAL = 10, 3
#: How many of these questions may stay without an answer.
KEEPALIVE_COUNT = 3
#: Seconds for which a host need not acknowledge what was sent.
ACKNOWLEDGE_SECONDS = 15
#: Seconds after which the server ends a transaction in which nothing is asked: a process that stands still in one keeps
#: its rows locked, so that no other dispatcher can send them.
IDLE_SECONDS = 30

#: libpq's parameters beside connect_timeout; an extra of the connection overrides each.
_LIBPQ: Mapping[str, Any] = {
    "keepalives": 1,
    "keepalives_idle": KEEPALIVE_IDLE,
    "keepalives_interval": KEEPALIVE_INTERVAL,
    "keepalives_count": KEEPALIVE_COUNT,
    "tcp_user_timeout": ACKNOWLEDGE_SECONDS * 1000,
}
_LIBPQ_DRIVERS = ("psycopg", "psycopg2")
_MYSQL_DRIVERS = ("mysqldb", "mysqlconnector")
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


def limit_silence(engine: Engine) -> None:
    """Let the driver give up a silent host; of several hosts of libpq choose the writable one."""
    event.listen(engine, "do_connect", set_limits)
    if engine.dialect.driver in _MYSQL_DRIVERS:
        event.listen(engine, "connect", _keep_alive)


def set_limits(dialect: Dialect, record: Any, _arguments: object, parameters: dict[str, Any]) -> None:
    """Add the limits that the driver's parameters lack; a listener of SQLAlchemy's event ``do_connect``."""
    if dialect.driver in _LIBPQ_DRIVERS:
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
    if dialect.driver == "mysqlconnector":
        # its C extension hides the socket, so that nothing could end a silent connection
        parameters.setdefault("use_pure", True)


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


#: The socket's descriptor of a connection of psycopg, psycopg2 and mysqlclient; of mysql-connector-python.
_DESCRIPTORS: Sequence[Callable[[Any], int]] = (
    lambda connection: connection.fileno(),
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


#: Seconds without an answer after which a call is logged.
REPORT_AFTER = 10.0
#: Seconds without an answer after which its connection is ended, or a lease's length if that is shorter: what is
#: claimed or settled later than that counts for nothing.
END_AFTER = 30.0
#: But not earlier: on a busy machine an answer may take this long.
LEAST_WAIT = 5.0
#: Where to look for the cause.
ADVICE = (
    "look among the database's sessions for a holder of locks (pg_stat_activity, SHOW PROCESSLIST), and whether the"
    " server is frozen or its disk is full or hangs; if others get answers, whether the dispatcher's own machine stands"
    " still"
)


class Watchdog:
    """Watches the transactions of one dispatcher, in one thread, which the first of them starts.

    :param conn_id: names the store in the log.
    :param lease: the length of a lease, in seconds.
    """

    def __init__(self, conn_id: str, engine: Engine, lease: float) -> None:
        self._conn_id = conn_id
        self._activity = activity_of(engine)
        self._end_after = min(END_AFTER, max(LEAST_WAIT, lease))
        self._report_after = min(REPORT_AFTER, self._end_after / 2)
        #: This dispatcher's, by thread.
        self._calls: dict[int, DatabaseCall] = {}
        self._lock = Lock()
        self._ticker: Ticker | None = None

    @contextmanager
    def watch(self, what: str) -> Iterator[None]:
        """Watch the transaction of the caller's thread.

        :param what: names it in the log, such as "claiming messages".
        """
        self._start()
        thread = get_ident()
        self._calls[thread] = self._activity.calls[thread] = DatabaseCall(what)
        try:
            yield
        finally:
            self._calls.pop(thread, None)
            self._activity.calls.pop(thread, None)

    def unanswered(self) -> tuple[str, float] | None:
        """Return which transaction has had no answer for so long that it was logged, and for how many seconds."""
        for call in list(self._calls.values()):
            if call.logged:
                return f"{call.what} has had no answer from the database", self._silent(call)
        return None

    def close(self) -> None:
        """End the thread."""
        with self._lock:
            ticker, self._ticker = self._ticker, None
        if ticker is not None:
            ticker.close()

    def _start(self) -> None:
        with self._lock:
            if self._ticker is None:
                self._ticker = Ticker("delayed-watchdog", self._report_after / 5, self._check)

    def _check(self) -> None:
        for call in list(self._calls.values()):
            silent = self._silent(call)
            if silent >= self._report_after and not call.logged:
                call.logged = True
                log.warning(
                    "store %r: %s has had no answer from the database for %.0f s, since %s UTC; %s; its connection is"
                    " ended after %.0f s",
                    self._conn_id,
                    call.what,
                    silent,
                    f"{utcnow() - timedelta(seconds=silent):%Y-%m-%d %H:%M:%S}",
                    ADVICE,
                    self._end_after,
                )
            if silent >= self._end_after and not call.ended:
                call.ended = True
                self._end(call)

    def _end(self, call: DatabaseCall) -> None:
        sockets = list(self._activity.pooled.values()) if call.socket is None else [call.socket]
        for descriptor in sockets:
            shut_down(descriptor)
        if sockets:
            log.error(
                "store %r: %s has had no answer from the database for %.0f s; its connection was ended",
                self._conn_id,
                call.what,
                self._end_after,
            )

    @staticmethod
    def _silent(call: DatabaseCall) -> float:
        return time.monotonic() - call.since
