"""Waking a dispatcher that waits until the next message.

PostgreSQL notifies it (:class:`Listener`); on the other databases it polls every second (:class:`Poller`).
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import datetime
from hashlib import blake2b
from threading import Event
from typing import Any, Protocol

from sqlalchemy import Connection, Engine, Table, bindparam, exists, func, or_, select
from sqlalchemy.exc import SQLAlchemyError

from airflow_delayed.clock import Backoff
from airflow_delayed.message import microseconds
from airflow_delayed.store.dialects import dialect_of
from airflow_delayed.store.schema import UtcTime

log = logging.getLogger(__name__)

#: The most rows, the earliest first, that are searched for a message for which a dispatcher wakes anyway.
_FRONT = 100


def channel(connection: Connection, table: Table) -> str:
    """Return the name of the channel to LISTEN on for a store's table, of 40 bytes.

    A table without a schema is in the connection's own, so that it has one channel with or without the schema's name.
    """
    schema = table.schema or connection.dialect.default_schema_name or ""
    return "delayed_" + blake2b(f"{schema}\0{table.name}".encode(), digest_size=16).hexdigest()


def announce(connection: Connection, table: Table, earliest: datetime, deliver_conn_ids: Sequence[str | None]) -> None:
    """Notify dispatchers, within the transaction, if no message of these connections is due before ``earliest``.

    The payload is ``earliest`` in microseconds since 1970. Call it at most once a transaction, after the rows are
    inserted. On any other database than PostgreSQL it does nothing.
    """
    if not dialect_of(connection).notifies:
        return
    moment = bindparam("earliest", earliest, UtcTime())
    front = (
        select(table.c.DeliverConnId, table.c.NextTry)
        .where(table.c.Time < moment)
        .order_by(table.c.Time)
        .limit(_FRONT)
        .subquery()
    )
    # no dispatcher wakes for a message that waits for a retry, or that another connection delivers
    ours = or_(*(front.c.DeliverConnId.is_not_distinct_from(name) for name in dict.fromkeys(deliver_conn_ids)))
    awake = exists().where(ours, or_(front.c.NextTry.is_(None), front.c.NextTry < moment))
    connection.execute(select(func.pg_notify(channel(connection, table), str(microseconds(earliest)))).where(~awake))


#: The longest wait for a notification, in seconds; then the store is polled and the connection tested. So a silent
#: connection is logged after at most 8 s, and a frozen server, by the watchdog of this test, after 15 s.
SAFETY = 3.0
#: Seconds within which a test notification must come back.
PROOF = 5.0
#: The longest pause before a lost connection is opened again, in seconds.
LONGEST_PAUSE = 60.0
#: Returns the context in which a transaction is watched; its argument names the transaction in the log.
Watch = Callable[[str], AbstractContextManager[Any]]


class Listener:
    """Waits on a connection of its own that LISTENs, by the engine's driver: psycopg2 or psycopg 3.

    It tests this connection by a notification to itself. ``longest`` is short until the test has come back, so also
    while the connection is lost without a sign, and always behind a pooler that gives each transaction another
    connection. A lost connection is opened again after growing pauses.

    :param table: the store's table of messages, or a queue table.
    :param watch: watches what waits for the database's answer: opening the connection, and sending the test.
    :param poll: the longest wait while notifications do not arrive; in seconds.
    :param safety: the longest wait while they do; in seconds.
    :param proof: seconds within which a test must come back.
    """

    def __init__(
        self,
        engine: Engine,
        table: Table,
        *,
        watch: Watch,
        poll: float,
        safety: float = SAFETY,
        proof: float = PROOF,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._table = table
        self._watch = watch
        self._poll = poll
        self._safety = safety
        self._proof = proof
        self._monotonic = monotonic
        self._backoff = Backoff(first=1.0, longest=LONGEST_PAUSE)
        self._connection: Connection | None = None
        self._driver: Any = None
        self._channel = ""
        self._again = monotonic()
        #: When the last notification came, by the monotonic clock; None: none came on this connection.
        self._heard: float | None = None
        #: When the test was sent, by the monotonic clock; None: it has come back.
        self._asked: float | None = None
        self._warned = False
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._open()

    @property
    def longest(self) -> float:
        """The longest wait until the store is polled again, in seconds."""
        return self._safety if self._heard is not None and self._asked is None else self._poll

    def wait(self, seconds: float) -> bool:
        """Wait, and return whether it ended early, or notifications may have been missed."""
        if self._maintain():
            return True
        # a test that has just been sent may not come back
        deadline = self._monotonic() + min(seconds, self.longest)
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            if self._connection is not None:
                selector.register(self._driver, selectors.EVENT_READ)
            ready = [key.fileobj for key, _ in selector.select(max(0.0, deadline - self._monotonic()))]
        for one in ready:
            if one is self._woken:
                self._woken.recv(4096)
            else:
                self._read()
        return bool(ready)

    def wake(self) -> None:
        """End the wait, or the next one; from any thread."""
        # the socket is closed, or so full that the wait ends anyway
        with suppress(OSError):
            self._waker.send(b"w")

    def close(self) -> None:
        """Close the connection."""
        self._drop()
        self._woken.close()
        self._waker.close()

    def _maintain(self) -> bool:
        """Connect and test if needed, and return whether notifications may have been missed."""
        now = self._monotonic()
        if self._connection is None:
            return now >= self._again and self._open()
        if self._asked is not None and now - self._asked >= self._proof:
            self._lost("the notice that was given for a trial has not come")
            return True
        if self._asked is None and self._heard is not None and now - self._heard >= self._safety:
            self._ask()
        return self._connection is None

    def _open(self) -> bool:
        try:
            self._listen()
        except SQLAlchemyError as error:
            self._lost(type(error).__name__)
            return False
        self._heard = None
        self._ask()
        return True

    def _listen(self) -> None:
        with self._watch("listening for messages"):
            self._connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            self._driver = self._connection.connection.driver_connection
            self._connection.detach()
            self._channel = channel(self._connection, self._table)
            quoted = self._connection.dialect.identifier_preparer.quote_identifier(self._channel)
            self._connection.exec_driver_sql(f"LISTEN {quoted}")

    def _ask(self) -> None:
        """Send the test by another connection: behind a pooler it could come back if sent by the same connection."""
        self._asked = self._monotonic()
        try:
            with self._watch("testing whether notices of messages come"), self._engine.begin() as connection:
                connection.execute(select(func.pg_notify(self._channel, "")))
        except SQLAlchemyError as error:
            self._lost(type(error).__name__)

    def _read(self) -> None:
        try:
            heard = _notices(self._engine.dialect.driver, self._driver)
        except Exception as error:
            # each driver has its own errors
            self._lost(type(error).__name__)
            return
        if heard:
            self._heard, self._asked, self._warned = self._monotonic(), None, False
            self._backoff.reset()

    def _lost(self, why: str) -> None:
        self._drop()
        self._heard = self._asked = None
        pause = self._backoff.next()
        self._again = self._monotonic() + pause
        if not self._warned:
            self._warned = True
            log.warning(
                "no notices of messages come from the database (%s; a pooler must give LISTEN a connection of its own);"
                " polled every %g s until then",
                why,
                self._poll,
            )

    def _drop(self) -> None:
        if self._connection is not None:
            try:
                self._connection.close()
            except Exception as error:
                log.debug("closing: %s", type(error).__name__)
            self._connection = None


def _notices(driver: str, connection: Any) -> int:
    """Take the notifications that have arrived, and return how many."""
    if driver == "psycopg2":
        connection.poll()
        count = len(connection.notifies)
        connection.notifies.clear()
        return count
    return sum(1 for _ in connection.notifies(timeout=0))


#: Seconds between two polls where the database sends no notifications. A poll is one search in an index; a message
#: that is stored less than this before it is due may be so late.
POLL = 1.0


class Waiter(Protocol):
    """Waits for one dispatcher. Only :meth:`wake` may be called from another thread."""

    @property
    def longest(self) -> float:
        """The longest wait until the store is polled again, in seconds."""
        ...

    def wait(self, seconds: float) -> bool:
        """Wait, and return whether it ended early: there may be an earlier message, or :meth:`wake` was called."""
        ...

    def wake(self) -> None:
        """End the wait, or the next one if nobody waits now; from any thread."""
        ...

    def close(self) -> None:
        """Close what is open."""
        ...


class Poller:
    """Waits, for a database without notifications.

    :param longest: the longest wait until the store is polled again, in seconds.
    :param sleep: waits in place of the machine's clock; takes seconds.
    """

    def __init__(self, longest: float = POLL, sleep: Callable[[float], object] | None = None) -> None:
        self.longest = longest
        self._sleep = sleep
        self._woken = Event()

    def wait(self, seconds: float) -> bool:
        """Wait until the time is over, or :meth:`wake` is called."""
        if self._sleep is not None:
            self._sleep(seconds)
        woken = self._woken.wait(seconds if self._sleep is None else 0)
        self._woken.clear()
        return woken

    def wake(self) -> None:
        """End the wait."""
        self._woken.set()

    def close(self) -> None:
        """Do nothing: nothing is open."""


def waiter_for(engine: Engine, table: Table, watch: Watch) -> Waiter:
    """Return the waiter of a table: on PostgreSQL a :class:`Listener`, otherwise a :class:`Poller`.

    :param watch: see :class:`Listener`.
    """
    if dialect_of(engine).listens(engine.dialect.driver):
        return Listener(engine, table, watch=watch, poll=POLL, safety=SAFETY)
    return Poller()
