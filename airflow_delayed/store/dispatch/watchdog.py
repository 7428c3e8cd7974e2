"""The watchdog of a dispatcher: it logs calls of the database that get no answer, and ends them.

TCP notices a host that is gone (:mod:`airflow_delayed.store.network`). It does not notice a server that is frozen, or
whose disk hangs, or where another session holds a lock: the kernel of such a host still answers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from datetime import timedelta
from threading import Event, Lock, Thread, get_ident

from sqlalchemy import Engine

from airflow_delayed.message import utcnow
from airflow_delayed.store.network import DatabaseCall, activity_of, shut_down

log = logging.getLogger(__name__)

#: Seconds without an answer after which a call is logged.
REPORT_AFTER = 10.0
#: Seconds without an answer after which its connection is ended, or a lease's length if that is shorter: what is
#: claimed or settled later than that counts for nothing.
END_AFTER = 30.0
#: But not earlier: on a busy machine an answer may take this long.
LEAST = 5.0
#: Where to look for the cause.
ADVICE = (
    "look among the database's sessions for a holder of locks (pg_stat_activity, SHOW PROCESSLIST), and whether the"
    " server is frozen or its disk is full or hangs; if others get answers, whether the dispatcher's own machine stands"
    " still"
)


class Ticker:
    """Calls something again and again in a thread, which logs where the thread that makes it does.

    :param every: the seconds between two calls.
    """

    def __init__(self, name: str, every: float, work: Callable[[], object]) -> None:
        self._every = every
        self._work = work
        self._stop = Event()
        self._thread = Thread(target=copy_context().run, args=(self._run,), name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and wait for it."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            self._work()


class Watchdog:
    """Watches the transactions of one dispatcher, in one thread, which the first of them starts.

    :param conn_id: names the store in the log.
    :param lease: the length of a lease, in seconds.
    """

    def __init__(self, conn_id: str, engine: Engine, lease: float) -> None:
        self._conn_id = conn_id
        self._activity = activity_of(engine)
        self._end_after = min(END_AFTER, max(LEAST, lease))
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

    def unanswered(self) -> str | None:
        """Return which transaction has had no answer for so long that it was logged; None: all have."""
        for call in list(self._calls.values()):
            if call.logged:
                return f"{call.what} has had no answer from the database for {self._silent(call):.0f} s"
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
