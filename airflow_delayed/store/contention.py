"""Short transactions that are made anew while others are in the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError

from airflow_delayed.backoff import next_sleep
from airflow_delayed.errors import TransportUnavailable

#: For how long a transaction is made anew, in seconds.
PATIENCE = 30.0
#: How often after an error that may as well be a rule of the table that others made.
TRIES = 5
#: Seconds before a transaction is made a second time, and at most.
_FIRST_SLEEP, _LONGEST_SLEEP = 0.02, 0.2

#: What a transaction waits for a lock at most, and what puts an end to that; MySQL counts whole seconds.
_LIMITS = {
    "postgresql": ("SET LOCAL lock_timeout = '500ms'", None),
    "sqlite": (None, None),
    "mysql": ("SET SESSION innodb_lock_wait_timeout = 1", "SET SESSION innodb_lock_wait_timeout = DEFAULT"),
    "mariadb": ("SET SESSION innodb_lock_wait_timeout = 1", "SET SESSION innodb_lock_wait_timeout = DEFAULT"),
    "mssql": ("SET LOCK_TIMEOUT 500", "SET LOCK_TIMEOUT -1"),
}
#: A deadlock, a lock not had in time, a snapshot overtaken; SQLite's lock is waited for by its driver.
_IN_THE_WAY: dict[str, set[object]] = {
    "postgresql": {"40P01", "55P03", "40001"},
    "mysql": {1213, 1205},
    "mariadb": {1213, 1205},
    "mssql": {1205, 1222, "40001"},
}

T = TypeVar("T")


class Overtaken(Exception):
    """What this transaction has read is not so any more."""


def retried(
    engine: Engine,
    work: Callable[[Connection], T],
    *,
    sleep: Callable[[float], None] = time.sleep,
    monotonic: Callable[[], float] = time.monotonic,
) -> T:
    """Do the work in a transaction that waits for no lock longer than half a second, and commit.

    Where others are in the way it is rolled back and made anew, for up to half a minute.

    :raises TransportUnavailable: they were, until the end.
    :raises sqlalchemy.exc.DBAPIError: any other error of the database.
    """
    end = monotonic() + PATIENCE
    tries = 0
    while True:
        tries += 1
        try:
            with engine.begin() as connection, _impatient(connection):
                return work(connection)
        except Overtaken as error:
            if monotonic() >= end:
                raise TransportUnavailable(f"others keep changing the same messages: {error}; try again") from None
        except IntegrityError:
            # where an insert does not pass over what is there: another transaction has stored one of the ids just now
            if tries >= TRIES:
                raise
        except DBAPIError as error:
            if not in_the_way(engine, error) or monotonic() >= end:
                raise
        sleep(next_sleep(tries, first=_FIRST_SLEEP, longest=_LONGEST_SLEEP))


def in_the_way(engine: Engine, error: DBAPIError) -> bool:
    """Return whether the error says only that others were in the way, so that the same may succeed if done anew."""
    cause = error.orig
    codes: set[object] = {getattr(cause, name, None) for name in ("sqlstate", "pgcode", "errno")}
    codes.update(getattr(cause, "args", ())[:1])
    return bool(codes & _IN_THE_WAY.get(engine.dialect.name, set()))


@contextmanager
def _impatient(connection: Connection) -> Iterator[None]:
    begin, end = _LIMITS[connection.dialect.name]
    if begin:
        connection.execute(text(begin))
    try:
        yield
    except BaseException:
        if end:
            # after a lost connection there is nothing to be set back
            with suppress(SQLAlchemyError):
                connection.execute(text(end))
        raise
    if end:
        # if the connection is lost here, the commit would not tell so
        connection.execute(text(end))
