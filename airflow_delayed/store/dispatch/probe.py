"""Looks of a dispatcher at a connection through which nothing is due: whether it works, before messages wait for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime

from airflow_delayed.delivery import Delivery
from airflow_delayed.errors import TransportUnavailable, explained
from airflow_delayed.store.dispatch.report import Trouble, TroubleKind
from airflow_delayed.threads import Ticker

log = logging.getLogger(__name__)

#: Seconds between two looks.
PROBE_EVERY = 5.0
#: Seconds without an answer after which a connection does not work.
_SILENT_AFTER = 5.0


class ConnectionProbe:
    """Looks every 5 s whether a connection works, in a thread of its own, until it is closed.

    A dispatcher opens a connection when it has something to send, which may be hours away. The probe has a transport of
    its own, which it makes again after an error, with what Airflow has of the connection then.

    :param make_transport: returns a transport of the connection.
    :param clock: returns the database's time.
    """

    def __init__(self, conn_id: str, make_transport: Callable[[], Delivery], clock: Callable[[], datetime]) -> None:
        self._conn_id = conn_id
        self._make_transport = make_transport
        self._clock = clock
        self._transport: Delivery | None = None
        #: When the look began that has no answer yet.
        self._began: datetime | None = None
        #: Since when it does not work, and why.
        self._failure: tuple[datetime, str] | None = None
        self._closed = False
        self._ticker = Ticker("delayed-probe", PROBE_EVERY, self._look)

    def trouble(self, now: datetime) -> Trouble | None:
        """Return that the connection does not work, by the last look; None: it works. From any thread."""
        failure, began = self._failure, self._began
        if failure is None and began is not None and (now - began).total_seconds() > _SILENT_AFTER:
            failure = began, "no answer in time"
        if failure is None:
            return None
        return Trouble(kind=TroubleKind.CONNECTION, conn_id=self._conn_id, since=failure[0], reason=failure[1])

    def stop(self) -> None:
        """Begin no more looks."""
        self._ticker.stop()

    def close(self, seconds: float = 1.0) -> None:
        """End the looks, and close the connection; if it hangs for so many seconds, it is closed when it answers."""
        self._closed = True
        self._ticker.close(seconds)
        if self._began is None:
            self._close_transport()

    def _look(self) -> None:
        self._began = began = self._clock()
        try:
            was_open = self._transport is not None
            try:
                self._ask()
            except TransportUnavailable:
                if not was_open:
                    raise
                # the broker was restarted since the last look, or something between closed an idle connection
                self._close_transport()
                self._ask()
            self._failure = None
        except Exception as error:
            reason = explained(error).removeprefix(f"connection {self._conn_id!r}: ")
            log.debug("connection %r does not work: %s", self._conn_id, reason)
            self._failure = (began if self._failure is None else self._failure[0]), reason
            self._close_transport()
        finally:
            self._began = None
            if self._closed:
                self._close_transport()

    def _ask(self) -> None:
        if self._transport is None:
            self._transport = self._make_transport()
        self._transport.probe()

    def _close_transport(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            with suppress(Exception):
                transport.close()
