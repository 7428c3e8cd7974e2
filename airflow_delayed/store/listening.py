"""On PostgreSQL, waiting for the notice of an earlier message, see :mod:`airflow_delayed.store.notice`."""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sqlalchemy import Connection, Engine, Table, func, select
from sqlalchemy.exc import SQLAlchemyError

from airflow_delayed.backoff import Backoff
from airflow_delayed.store import notice

log = logging.getLogger(__name__)

#: How long one waits for a notice before one looks nevertheless, and tries whether notices still come; in seconds.
SAFETY = 60.0
#: Within how many seconds a notice must come that one gave oneself.
PROOF = 5.0


class Listener:
    """Waits with a connection of its own that LISTENs, by the driver that the engine has: psycopg2 or psycopg 3.

    It trusts only what it has tried: it gives itself a notice, and until that has come, ``longest`` is short. So it is
    when the connection is lost, when it goes silently, and for ever behind a pooler that gives each transaction another
    connection. It connects again after growing pauses.

    :param table: the store's table of messages.
    :param poll: how long to wait at most while notices do not come through; in seconds.
    :param safety: how long at most while they do.
    """

    def __init__(
        self,
        engine: Engine,
        table: Table,
        *,
        poll: float,
        safety: float = SAFETY,
        proof: float = PROOF,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._table = table
        self._poll = poll
        self._safety = safety
        self._proof = proof
        self._monotonic = monotonic
        self._backoff = Backoff(first=1.0, longest=SAFETY)
        self._connection: Connection | None = None
        self._driver: Any = None
        self._channel = ""
        self._again = monotonic()
        #: When a notice came last; None: none on this connection.
        self._heard: float | None = None
        #: When one was given that has not come yet.
        self._asked: float | None = None
        self._told = False
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._open()

    @property
    def longest(self) -> float:
        """How long to wait at most before one looks again, in seconds."""
        return self._safety if self._heard is not None and self._asked is None else self._poll

    def wait(self, seconds: float) -> bool:
        """Wait, and return whether it was cut short, or notices may have been missed."""
        deadline = self._monotonic() + seconds
        if self._maintain():
            return True
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
        # it is closed, or there are so many that the wait ends anyway
        with suppress(OSError):
            self._waker.send(b"w")

    def close(self) -> None:
        """Close the connection."""
        self._drop()
        self._woken.close()
        self._waker.close()

    def _maintain(self) -> bool:
        """Connect where that is needed, try whether notices come, and return whether some may have been missed."""
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
            self._connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            self._driver = self._connection.connection.driver_connection
            self._connection.detach()
            self._channel = notice.channel(self._connection, self._table)
            quoted = self._connection.dialect.identifier_preparer.quote_identifier(self._channel)
            self._connection.exec_driver_sql(f"LISTEN {quoted}")
        except SQLAlchemyError as error:
            self._lost(type(error).__name__)
            return False
        self._heard = None
        self._ask()
        return True

    def _ask(self) -> None:
        """Give a notice, by another connection: a pooler could give back one's own by the same."""
        self._asked = self._monotonic()
        try:
            with self._engine.begin() as connection:
                connection.execute(select(func.pg_notify(self._channel, "")))
        except SQLAlchemyError as error:
            self._lost(type(error).__name__)

    def _read(self) -> None:
        try:
            heard = _notices(self._engine.dialect.driver, self._driver)
        except Exception as error:
            # each driver has errors of its own
            self._lost(type(error).__name__)
            return
        if heard:
            self._heard, self._asked, self._told = self._monotonic(), None, False
            self._backoff.reset()

    def _lost(self, why: str) -> None:
        self._drop()
        self._heard = self._asked = None
        pause = self._backoff.next()
        self._again = self._monotonic() + pause
        if not self._told:
            self._told = True
            log.warning(
                "no notices of messages come from the database (%s; a pooler must give LISTEN a connection of its own);"
                " looked for every %g s until they do",
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
    """Take the notices that have arrived, and return how many."""
    if driver == "psycopg2":
        connection.poll()
        count = len(connection.notifies)
        connection.notifies.clear()
        return count
    return sum(1 for _ in connection.notifies(timeout=0))
