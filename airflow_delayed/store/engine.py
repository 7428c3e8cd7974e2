"""A store's engine: its preparation, its errors, repeated transactions, and the database's clock."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, text
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
from airflow_delayed.store.network import activity_of
from airflow_delayed.store.schema import Tables
from airflow_delayed.store.version import check_ready

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


def prepare(engine: Engine) -> Engine:
    """Make transactions mean the same on every database; call it once for an engine.

    On SQLite each transaction takes the write lock at its begin, unless its connection has the option
    ``read_only=True``; the driver would begin later, so that two transactions could read the same rows as due. On
    PostgreSQL times are read in UTC, because in another zone the year 9999 may become the year 10000, which Python
    does not have, and in ISO's form, the only one that drivers read. On MySQL and MariaDB the sql_mode is the store's
    own: a value that does not fit is an error, but a stored time such as 0000-00-00 can be moved to another table.
    Texts are sent in UTF-8. A host that falls silent is an error after some seconds, see
    :mod:`airflow_delayed.store.network`.

    :raises DelayedError: no store can be kept in such a database.
    """
    dialect_of(engine).prepare(engine)
    # its listeners come before those of the dialect, which execute the first statements of a connection
    activity_of(engine)
    return engine


def close_engine(engine: Engine) -> None:
    """Close idle connections now, and each connection in use when it returns to its pool."""
    # dispose() alone would leave those in a pool that nothing uses any more
    activity_of(engine).closing = True
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
    :raises sqlalchemy.exc.DBAPIError: any other error of the database.
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
