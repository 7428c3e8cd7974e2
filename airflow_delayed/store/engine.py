"""A store's engine: its preparation, its watchdog, its errors, repeated transactions, and the database's clock."""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from threading import Lock, get_ident
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.exc import (
    DataError,
    DBAPIError,
    IntegrityError,
    InterfaceError,
    OperationalError,
    SQLAlchemyError,
    TimeoutError,
)

from airflow_delayed.clock import next_sleep
from airflow_delayed.errors import DelayedError, TransportUnavailable
from airflow_delayed.message import utcnow
from airflow_delayed.store.dialects import database_time, dialect_named, dialect_of
from airflow_delayed.store.network import ADVICE, LIBPQ_DRIVERS, limit_reads
from airflow_delayed.store.schema import Tables
from airflow_delayed.store.version import check_ready
from airflow_delayed.threads import Ticker

log = logging.getLogger(__name__)

#: Where MySQL quotes what a row holds: "Duplicate entry '...' for key 'k'".
_VALUE = re.compile(r"\b(entry|value:?) (?:['(].*[')](?= for (?:key|column|function)\b)|['(].*[')](?=\W*$))", re.DOTALL)
#: How long a transaction is repeated, in seconds.
CONFLICT_WAIT = 30.0
#: Tries after an IntegrityError, which a constraint that others gave the table raises each time.
INTEGRITY_TRIES = 5
#: The first and the longest sleep before a repetition, in seconds.
_FIRST_SLEEP, _LONGEST_SLEEP = 0.02, 0.2
#: Seconds after which a reader asks the database for its time again.
CARRIED = 60.0

T = TypeVar("T")


def engine_options(dialect_name: str) -> dict[str, Any]:
    """Return the arguments for ``create_engine``; error texts show no parameters, because these hold bodies."""
    return dialect_named(dialect_name).engine_options()


#: Seconds without an answer after which a dispatcher's transaction is logged, and after which its connection is ended.
REPORT_AFTER, END_AFTER = 10.0, 30.0


@dataclass(slots=True, eq=False)
class _Call:
    what: str
    since: float = field(default_factory=time.monotonic)
    logged: bool = False
    ended: bool = False


class Watchdog:
    """Logs dispatchers' transactions without an answer; ends their connections on PostgreSQL, as MySQL's drivers do."""

    def __init__(self, engine: Engine) -> None:
        #: By thread.
        self._calls: dict[int, _Call] = {}
        #: By connection of PostgreSQL, the thread that uses it; None: it is idle, or the pool tests it.
        self._users: WeakKeyDictionary[Any, int | None] = WeakKeyDictionary()
        self._lock = Lock()
        self._ticker: Ticker | None = None
        #: Whether each connection is closed when it returns to the pool.
        self.closing = False
        self._ends = engine.dialect.driver in LIBPQ_DRIVERS
        # never removed, which is an error for a thread inside the event; the first comes before the dialect's own
        event.listen(engine, "connect", self._taken, insert=True)
        event.listen(engine, "checkout", self._taken)
        event.listen(engine, "checkin", self._returned)
        for name in ("before_cursor_execute", "commit", "rollback"):
            event.listen(engine, name, self._alive)

    @contextmanager
    def watch(self, what: str) -> Iterator[None]:
        """Watch the transaction of the caller's thread; ``what`` names it in the log."""
        self._calls[get_ident()] = _Call(what)
        with self._lock:
            self._ticker = self._ticker or Ticker("delayed-watchdog", REPORT_AFTER / 5, self._check)
        try:
            yield
        finally:
            del self._calls[get_ident()]

    def unanswered(self) -> tuple[str, float] | None:
        """Return which transaction has had no answer for so long that it was logged, and for how many seconds."""
        calls = list(self._calls.values())
        return next(((call.what, time.monotonic() - call.since) for call in calls if call.logged), None)

    def close(self) -> None:
        """End the thread, unless another dispatcher's transaction needs it."""
        with self._lock:
            if self._ticker is not None and not self._calls:
                self._ticker.close()
                self._ticker = None

    def _taken(self, connection: Any, *_arguments: object) -> None:
        if self._ends:
            self._users[connection] = get_ident()
        self._alive()

    def _returned(self, connection: Any, record: Any) -> None:
        if self.closing:
            record.invalidate()
        elif self._ends and connection is not None:
            self._users[connection] = None

    def _alive(self, *_arguments: object) -> None:
        if call := self._calls.get(get_ident()):
            call.since, call.logged, call.ended = time.monotonic(), False, False

    def _check(self) -> None:
        for thread, call in list(self._calls.items()):
            silent = time.monotonic() - call.since
            if silent >= REPORT_AFTER and not call.logged:
                call.logged = True
                log.warning("%s has had no answer from the database for %.0f s; %s", call.what, silent, ADVICE)
            if silent >= END_AFTER and not call.ended:
                self._end(thread, call, silent)

    def _end(self, thread: int, call: _Call, silent: float) -> None:
        # after the shutdown the caller's thread goes on at once, and clears the call's marks
        ended = False
        connections = [connection for ref in self._users.keyrefs() if (connection := ref()) is not None]
        for connection in connections:
            # a connection that the pool tests may be this thread's
            if self._users.get(connection) in (thread, None):
                # each driver has its own error for a closed connection
                with suppress(Exception), closing(socket.socket(fileno=os.dup(connection.fileno()))) as opened:
                    call.ended = ended = True
                    opened.shutdown(socket.SHUT_RDWR)
        if ended:
            log.error("%s has had no answer for %.0f s; its connection was ended", call.what, silent)


_WATCHDOGS: WeakKeyDictionary[Engine, Watchdog] = WeakKeyDictionary()


def prepare(engine: Engine) -> Engine:
    """Make transactions mean the same on every database; call it once for an engine.

    On SQLite each transaction takes the write lock at its begin, unless its connection has the option
    ``read_only=True``. On PostgreSQL times are read in UTC and ISO's form. On MySQL and MariaDB the sql_mode is the
    store's own: a value that does not fit is an error. A host that falls silent is an error after some seconds, see
    :mod:`airflow_delayed.store.network`.

    :raises DelayedError: no store can be kept in such a database.
    """
    dialect_of(engine).prepare(engine)
    _WATCHDOGS[engine] = Watchdog(engine)
    return engine


def watched(engine: Engine) -> Watchdog:
    """Return the watchdog of a dispatcher's engine."""
    limit_reads(engine, END_AFTER)
    return _WATCHDOGS[engine]


def close_engine(engine: Engine) -> None:
    """Close idle connections now, and each connection in use when it returns to its pool."""
    # dispose() alone would leave those in a pool that nothing uses any more
    _WATCHDOGS[engine].closing = True
    engine.dispose()


@contextmanager
def database_errors(conn_id: str, engine: Engine, tables: Tables | None = None) -> Iterator[None]:
    """Turn the driver's errors into those of this package, which show no parameters and no rows.

    :param tables: those of a store; after an error their version is checked.
    :raises TransportUnavailable: the database cannot be reached, or is busy.
    :raises TopologyError: tables are given, and are missing or of another version.
    """
    driver = engine.dialect.loaded_dbapi
    try:
        yield
    # when SQLAlchemy returns a connection to the pool, it raises the driver's own error
    except (DBAPIError, TimeoutError, driver.Error) as error:
        reason = f"connection {conn_id!r}: {first_line(error)}"
        lost = (OperationalError, InterfaceError, TimeoutError, driver.OperationalError, driver.InterfaceError)
        away = isinstance(error, lost) and not (isinstance(error, DBAPIError) and refuses_row(engine, error))
        away = away or getattr(error, "connection_invalidated", False)
        if tables is not None:
            with suppress(DBAPIError, TimeoutError):
                check_ready(conn_id, engine, tables)
        raise (TransportUnavailable if away else DelayedError)(reason) from None


def first_line(error: Exception) -> str:
    """Return the first line of a driver's error, without values; further lines may quote a row."""
    cause = getattr(error, "orig", None) or error
    # MySQL's drivers raise a number and a text; as a string, the pair would quote the text
    reason = cause.args[1] if len(cause.args) == 2 and isinstance(cause.args[1], str) else str(cause)
    reason = _VALUE.sub(r"\1 ...", reason.strip())
    return reason.splitlines()[0] if reason else type(error).__name__


#: Milliseconds for which a statement waits for a lock, where the database can wait for less than a second.
_LOCK_WAIT = 500


class Overtaken(Exception):
    """Another transaction has changed the rows that this transaction has read."""


def retried(
    engine: Engine,
    work: Callable[[Connection], T],
    *,
    sleep: Callable[[float], None] = time.sleep,
    monotonic: Callable[[], float] = time.monotonic,
) -> T:
    """Do the work in a transaction that waits only briefly for locks (``Dialect.lock_limits``), and commit.

    After a conflict with other transactions it is rolled back and repeated, for up to half a minute.

    :raises TransportUnavailable: other transactions changed the same rows until the end.
    """
    end = monotonic() + CONFLICT_WAIT
    tries = 0
    while True:
        tries += 1
        try:
            with engine.begin() as connection, impatient(connection, _LOCK_WAIT):
                return work(connection)
        except Overtaken as error:
            if monotonic() >= end:
                raise TransportUnavailable(f"others keep changing the same messages: {error}; try again") from None
        except IntegrityError:
            # on MySQL: another transaction has just stored one of the ids
            if tries >= INTEGRITY_TRIES:
                raise
        except DBAPIError as error:
            if not in_the_way(engine, error) or monotonic() >= end:
                raise
        sleep(next_sleep(tries, first=_FIRST_SLEEP, longest=_LONGEST_SLEEP))


def in_the_way(engine: Engine, error: DBAPIError) -> bool:
    """Return whether the error is a deadlock or another conflict of transactions, so that a repetition may succeed."""
    return bool(_codes(error) & dialect_of(engine).contention_codes)


def is_locked(connection: Connection, error: DBAPIError) -> bool:
    """Return whether a statement has waited too long for a lock, so that its transaction may go on without it."""
    return bool(_codes(error) & dialect_of(connection).lock_timeout_codes)


def refuses_row(source: Connection | Engine, error: DBAPIError) -> bool:
    """Return whether a constraint, a trigger, an encoding or a length refuses a row, so that others may be taken."""
    return isinstance(error, IntegrityError | DataError) or bool(_codes(error) & dialect_of(source).refused_row_codes)


def _codes(error: DBAPIError) -> set[object]:
    cause = error.orig
    codes: set[object] = {getattr(cause, name, None) for name in ("sqlstate", "pgcode", "errno")}
    codes.update(getattr(cause, "args", ())[:1])
    return codes


@contextmanager
def impatient(connection: Connection, milliseconds: int) -> Iterator[None]:
    """Wait only briefly for locks within the block (``Dialect.lock_limits``); on PostgreSQL in its transaction."""
    begin, end = dialect_of(connection).lock_limits
    if begin:
        connection.execute(text(begin.format(milliseconds)))
    try:
        yield
    except BaseException:
        if end:
            # a lost connection has no limit to set back
            with suppress(SQLAlchemyError):
                connection.execute(text(end))
        raise
    if end:
        # not suppressed: the commit might not report that the connection is lost
        connection.execute(text(end))


class CarriedClock:
    """The database's clock, carried on by this machine's monotonic clock; before it is first set, this machine's clock.

    Calling it asks no database. It never runs ahead of the database, whose time is read before it is noted here.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._taken: tuple[datetime, float] | None = None

    def set(self, now: datetime) -> None:
        """Note the time that the database has just returned."""
        self._taken = (now, self._monotonic())

    def read(self, connection: Connection, *, longest: float = CARRIED) -> datetime:
        """Return the database's time; ask the database only if its last answer is older than so many seconds."""
        if self._taken is None or self._monotonic() - self._taken[1] > longest:
            self.set(database_time(connection))
        return self()

    def __call__(self) -> datetime:
        """Return the database's time now."""
        if self._taken is None:
            return utcnow()
        moment, noted = self._taken
        return moment + timedelta(seconds=self._monotonic() - noted)
