"""One connection that consumes from one queue, in a running asyncio loop; nothing here waits."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pika.exceptions import AMQPError, ChannelClosedByBroker

from airflow_delayed.errors import TransportUnavailable
from airflow_delayed.rabbitmq.connection import explain
from airflow_delayed.rabbitmq.decoding import DecodingAsyncioConnection
from airflow_delayed.rabbitmq.quiet import quiet

if TYPE_CHECKING:
    from pika import BasicProperties
    from pika.channel import Channel
    from pika.connection import Connection, Parameters
    from pika.frame import Method
    from pika.spec import Basic

#: Bytes of the longest body that is kept; of a longer one only its size and hash are.
KEPT_BODY = 1_048_576
_NOT_FOUND, _REFUSED = 404, 403


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message as the broker handed it over, not acknowledged yet.

    :param body: None if it is longer than :data:`KEPT_BODY`.
    """

    tag: int
    redelivered: bool
    properties: BasicProperties
    body: bytes | None
    size: int
    digest: bytes

    @classmethod
    def of(cls, tag: int, redelivered: bool, properties: BasicProperties, body: bytes) -> Arrival:
        """Return a message without a body that is too long to be kept."""
        digest = hashlib.blake2b(body, digest_size=16).digest()
        return cls(tag, redelivered, properties, body if len(body) <= KEPT_BODY else None, len(body), digest)


class Link:
    """Logs in at a host, consumes from a queue, and ends with the connection, the channel or the queue.

    :param prefetch: the broker hands over no more than so many messages that are not acknowledged.
    """

    def __init__(self, host: Parameters, queue: str, prefetch: int) -> None:
        loop = asyncio.get_running_loop()
        #: Done when messages can come; fails with a TransportUnavailable that says why they cannot.
        self.opened: asyncio.Future[None] = loop.create_future()
        #: What has arrived, in order; the last is the reason why there will be no more.
        self.inbox: asyncio.Queue[Arrival | str] = asyncio.Queue()
        self._host = host
        self._queue = queue
        self._prefetch = prefetch
        self._channel: Channel | None = None
        self._ended = False
        self._gone = loop.create_future()
        with quiet():
            self._connection = DecodingAsyncioConnection(
                host,
                on_open_callback=self._on_connected,
                on_open_error_callback=self._on_closed,
                on_close_callback=self._on_closed,
                custom_ioloop=loop,
            )

    def ack(self, tag: int) -> None:
        """Have the broker forget a message; it may hand it over again if the connection is lost just now."""
        self._settle(lambda channel: channel.basic_ack(tag))

    def reject(self, tag: int) -> None:
        """Have the broker give a message to the queue's dead-letter exchange, or drop it if there is none."""
        self._settle(lambda channel: channel.basic_reject(tag, requeue=False))

    async def close(self, seconds: float) -> None:
        """Close the connection, and wait for the broker's answer so long; what is not acknowledged goes back."""
        self._end("closed")
        self._close()
        await asyncio.wait([self._gone], timeout=seconds)

    def _settle(self, tell: Callable[[Channel], None]) -> None:
        # on a channel that is gone there is nothing to settle: what it had goes back to the queue
        if self._channel is not None and not self._ended:
            with quiet(), contextlib.suppress(AMQPError):
                tell(self._channel)

    def _on_connected(self, connection: Connection) -> None:
        connection.channel(on_open_callback=self._on_channel)

    def _on_channel(self, channel: Channel) -> None:
        self._channel = channel
        channel.add_on_close_callback(self._on_channel_closed)
        channel.add_on_cancel_callback(lambda _: self._end(f"queue {self._queue!r} was deleted, or has lost its node"))
        channel.basic_qos(prefetch_count=self._prefetch)
        channel.basic_consume(self._queue, self._on_message, callback=self._on_consuming)

    def _on_consuming(self, _: Method[Basic.ConsumeOk]) -> None:
        if not self.opened.done():
            self.opened.set_result(None)

    def _on_message(self, _: Channel, method: Basic.Deliver, properties: BasicProperties, body: bytes) -> None:
        if not self._ended:
            self.inbox.put_nowait(Arrival.of(method.delivery_tag or 0, bool(method.redelivered), properties, body))

    def _on_channel_closed(self, _: Channel, reason: Exception) -> None:
        if not isinstance(reason, ChannelClosedByBroker):
            why = explain(reason)
        elif reason.reply_code == _NOT_FOUND:
            why = (
                f"queue {self._queue!r} does not exist; declare it, or have TopologyInstallOperator make it as a"
                " destination (create_destinations=True)"
            )
        elif reason.reply_code == _REFUSED:
            why = f"{reason.reply_text}; the user needs the right to read from queue {self._queue!r}"
        else:
            why = f"the broker closed the channel: {reason.reply_text}"
        self._end(why)
        self._close()

    def _on_closed(self, _: Connection, reason: BaseException) -> None:
        if not self._gone.done():
            self._gone.set_result(None)
        self._end(explain(reason, self._host))

    def _end(self, why: str) -> None:
        if self._ended:
            return
        self._ended = True
        self.inbox.put_nowait(why)
        if not self.opened.done():
            self.opened.set_exception(TransportUnavailable(why))
            # whoever opened it may have been cancelled, and then nobody asks
            self.opened.exception()

    def _close(self) -> None:
        with quiet(), contextlib.suppress(AMQPError):
            self._connection.close()
