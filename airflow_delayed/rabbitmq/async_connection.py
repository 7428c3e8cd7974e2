"""A connection in an asyncio loop that is opened once and ends once, with the reason: of consumers and relays."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from pika.exceptions import AMQPError

from airflow_delayed.errors import TransportUnavailable
from airflow_delayed.rabbitmq.connection import describe_error, muted_pika
from airflow_delayed.rabbitmq.wire import DecodingAsyncioConnection

if TYPE_CHECKING:
    from pika.connection import Connection, Parameters


class AsyncConnection:
    """Logs in at a host, and ends with the connection. Never waits.

    A subclass opens its channels in :meth:`_on_connected`, calls :meth:`_on_opened` when messages can come, and
    :meth:`_end` with the reason when no more will come.
    """

    def __init__(self, host: Parameters) -> None:
        self._loop = asyncio.get_running_loop()
        #: Done when messages can come; fails with a TransportUnavailable that names the reason.
        self.opened: asyncio.Future[None] = self._loop.create_future()
        #: Done with the reason when no more will come.
        self.ended: asyncio.Future[str] = self._loop.create_future()
        self._host = host
        self._closed = self._loop.create_future()
        with muted_pika():
            self._connection = DecodingAsyncioConnection(
                host,
                on_open_callback=self._on_connected,
                on_open_error_callback=self._on_closed,
                on_close_callback=self._on_closed,
                custom_ioloop=self._loop,
            )

    async def close(self, seconds: float) -> None:
        """Close the connection, and wait so long for the broker's answer; unacknowledged messages go back."""
        self._end("closed")
        self._close()
        await asyncio.wait([self._closed], timeout=seconds)

    def _on_connected(self, connection: Connection) -> None:
        raise NotImplementedError

    def _on_opened(self) -> None:
        if not self.opened.done():
            self.opened.set_result(None)

    def _on_closed(self, _: Connection, reason: BaseException) -> None:
        if not self._closed.done():
            self._closed.set_result(None)
        self._end(describe_error(reason, self._host))

    def _end(self, why: str) -> None:
        if self.ended.done():
            return
        self.ended.set_result(why)
        if not self.opened.done():
            self.opened.set_exception(TransportUnavailable(why))
            # the task that opened it may have been cancelled, and then nothing reads this error
            self.opened.exception()

    def _close(self) -> None:
        with muted_pika(), contextlib.suppress(AMQPError):
            self._connection.close()
