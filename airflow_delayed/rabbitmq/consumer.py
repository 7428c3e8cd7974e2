"""Consuming from one queue in an asyncio loop, through each loss of the connection; and a message's event payload."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import random
from typing import TYPE_CHECKING, Any

from pika.exceptions import AMQPError, ChannelClosedByBroker

from airflow_delayed.clock import next_sleep
from airflow_delayed.errors import InvalidMessage, TransportUnavailable
from airflow_delayed.message import body_fields, parse_moment
from airflow_delayed.rabbitmq.connection import AsyncConnection, describe_error, failed, host_name, in_turn, muted_pika
from airflow_delayed.rabbitmq.declare import ACCESS_REFUSED, NOT_FOUND
from airflow_delayed.rabbitmq.properties import DESTINATION, DUE_AT, text

if TYPE_CHECKING:
    from pika import BasicProperties
    from pika.channel import Channel
    from pika.connection import Connection, Parameters
    from pika.spec import Basic

log = logging.getLogger(__name__)

#: Bytes of the longest body that is kept; of a longer body only the size and a hash are kept.
KEPT_BODY = 1_048_576
#: Seconds between two rounds of tries to connect, at first and at most.
_FIRST_SLEEP, _LONGEST_SLEEP = 1.0, 30.0
#: Seconds after which a connection counts as good, and the sleeps start over.
_GOOD = 60.0
#: Seconds after which the same problem is logged again.
_LOG_AGAIN = 600.0
#: Seconds until a message that could not be handled is handed out again.
_AGAIN = 1.0
#: Seconds to wait for more messages of a batch, and bytes of bodies at which it is complete.
_TOGETHER = 0.1
_BATCH_BYTES = 1_048_576
#: Seconds to wait for the broker's farewell.
_CLOSING = 3.0
#: How many handled messages are remembered, in multiples of the prefetch.
_REMEMBERED = 10
#: Identifies a message that comes again: its id, and a hash of its body.
_Key = tuple[str, bytes]
#: Bytes of the longest name that a queue can have.
_LONGEST_NAME = 255


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message as the broker delivered it, not acknowledged yet.

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
        """Return a message, without its body if that is too long to be kept."""
        digest = hashlib.blake2b(body, digest_size=16).digest()
        return cls(tag, redelivered, properties, body if len(body) <= KEPT_BODY else None, len(body), digest)


class ConsumerConnection(AsyncConnection):
    """Logs in at a host, consumes from a queue, and ends with the connection, the channel or the queue. Never waits.

    :param prefetch: how many messages the broker delivers before one is acknowledged.
    """

    def __init__(self, host: Parameters, queue: str, prefetch: int) -> None:
        #: The messages in their order; the last entry is the reason why no more will come.
        self.inbox: asyncio.Queue[Arrival | str] = asyncio.Queue()
        self._queue = queue
        self._prefetch = prefetch
        self._channel: Channel | None = None
        super().__init__(host)
        self.ended.add_done_callback(lambda ended: self.inbox.put_nowait(ended.result()))

    def ack(self, tag: int) -> None:
        """Acknowledge a message; the broker may deliver it again if the connection is lost just now."""
        self._settle(lambda channel: channel.basic_ack(tag))

    def reject(self, tag: int) -> None:
        """Reject a message: it goes to the queue's dead-letter exchange, or is dropped if there is none."""
        self._settle(lambda channel: channel.basic_reject(tag, requeue=False))

    def _settle(self, settle: Callable[[Channel], None]) -> None:
        # the messages of a closed channel are back in the queue, so there is nothing to settle
        if self._channel is not None and not self.ended.done():
            with muted_pika(), contextlib.suppress(AMQPError):
                settle(self._channel)

    def _on_connected(self, connection: Connection) -> None:
        connection.channel(on_open_callback=self._on_channel)

    def _on_channel(self, channel: Channel) -> None:
        self._channel = channel
        channel.add_on_close_callback(self._on_channel_closed)
        channel.add_on_cancel_callback(lambda _: self._end(f"queue {self._queue!r} was deleted, or has lost its node"))
        channel.basic_qos(prefetch_count=self._prefetch)
        channel.basic_consume(self._queue, self._on_message, callback=lambda _: self._on_opened())

    def _on_message(self, _: Channel, method: Basic.Deliver, properties: BasicProperties, body: bytes) -> None:
        if not self.ended.done():
            self.inbox.put_nowait(Arrival.of(method.delivery_tag or 0, bool(method.redelivered), properties, body))

    def _on_channel_closed(self, _: Channel, reason: Exception) -> None:
        if not isinstance(reason, ChannelClosedByBroker):
            why = describe_error(reason)
        elif reason.reply_code == NOT_FOUND:
            why = (
                f"queue {self._queue!r} does not exist; declare it, or have TopologyInstallOperator make it as a"
                " destination (create_destinations=True)"
            )
        elif reason.reply_code == ACCESS_REFUSED:
            why = f"{reason.reply_text}; the user needs the right to read from queue {self._queue!r}"
        else:
            why = f"the broker closed the channel: {reason.reply_text}"
        self._end(why)
        self._close()


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    """A message that a consumer has handed out, and that has to be settled, by :meth:`Consumer.done` or another."""

    arrival: Arrival
    key: _Key | None
    connection: ConsumerConnection

    @property
    def properties(self) -> BasicProperties:
        """Its properties."""
        return self.arrival.properties

    @property
    def body(self) -> bytes | None:
        """Its body; None if that is longer than 1 MiB, for such bodies are not kept."""
        return self.arrival.body

    @property
    def size(self) -> int:
        """Bytes of its body."""
        return self.arrival.size

    @property
    def redelivered(self) -> bool:
        """Whether the broker had delivered it before."""
        return self.arrival.redelivered


class Consumer:
    """Hands out a queue's messages; each stays in the queue until it is :meth:`done`.

    A lost connection is opened again, at the first host that answers, without end. If a message was done and the broker
    could not get the acknowledgement, it delivers the message again: the consumer recognises it by its message id, and
    does not hand it out. The consumer of another process cannot.

    Of a body of more than 1 MiB only the size and a hash are kept when it arrives: all bodies together take at most
    ``prefetch`` MiB, however large the messages are.

    :param conn_id: names the connection in the log.
    :param hosts: returns the hosts to try; called before each round, so that a changed connection counts.
    :param prefetch: how many messages may be unsettled at most.
    :param chance: returns a number from 0 to less than 1, which shortens the sleeps between two rounds of tries.
    """

    def __init__(
        self,
        conn_id: str,
        queue: str,
        hosts: Callable[[], Awaitable[Sequence[Parameters]]],
        *,
        prefetch: int,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        chance: Callable[[], float] = random,
    ) -> None:
        self._conn_id = conn_id
        self._queue = queue
        self._hosts = hosts
        self._prefetch = prefetch
        self._monotonic = monotonic
        self._sleep = sleep
        self._chance = chance
        self._open: ConsumerConnection | None = None
        self._done: OrderedDict[_Key, None] = OrderedDict()
        self._logged: tuple[str, float] | None = None

    async def batches(self) -> AsyncIterator[list[ReceivedMessage]]:
        """Yield messages as they come, in batches, without end.

        A batch has at most ``prefetch`` messages, and is complete once their bodies have 1,048,576 bytes. Each message
        of a batch has to be settled before the next batch is asked for.
        """
        rounds = 0
        while True:
            connection = await self._connect()
            if connection is not None:
                log.info("connection %r: watching queue %r", self._conn_id, self._queue)
                self._logged = None
                since = self._monotonic()
                taken = False
                while isinstance(found := await connection.inbox.get(), Arrival):
                    taken = True
                    await self._sleep(_TOGETHER)
                    if batch := self._batch(connection, found):
                        yield batch
                if taken or self._monotonic() - since >= _GOOD:
                    rounds = 0
                self._log_problem(found)
                await connection.close(_CLOSING)
            rounds += 1
            await self._sleep(next_sleep(rounds, first=_FIRST_SLEEP, longest=_LONGEST_SLEEP, chance=self._chance))

    def done(self, delivery: ReceivedMessage) -> None:
        """Acknowledge a message; at once, or when the broker delivers it again after a lost connection."""
        if delivery.key is not None:
            self._done[delivery.key] = None
            while len(self._done) > _REMEMBERED * self._prefetch:
                self._done.popitem(last=False)
        delivery.connection.ack(delivery.arrival.tag)

    def reject(self, delivery: ReceivedMessage) -> None:
        """Reject a message for good: it goes to the queue's dead-letter exchange, or is dropped if there is none."""
        delivery.connection.reject(delivery.arrival.tag)

    def again(self, delivery: ReceivedMessage) -> None:
        """Hand a message out again, a second later.

        It is not returned to the queue: a quorum queue counts that, and lets a message go after the twentieth time.
        """
        found = replace(delivery.arrival, redelivered=True)
        # if the connection is lost by then, nothing reads that inbox, and the broker delivers the message again
        asyncio.get_running_loop().call_later(_AGAIN, delivery.connection.inbox.put_nowait, found)

    async def close(self) -> None:
        """Close the connection; messages that are not done go back to the queue."""
        if self._open is not None:
            await self._open.close(_CLOSING)

    async def _connect(self) -> ConsumerConnection | None:
        """Try each host once; return None if the queue can be consumed at none."""
        causes = []
        try:
            hosts = await self._hosts()
        except Exception as error:
            # no connection of that name, a certificate that cannot be read: somebody may repair it meanwhile
            self._log_problem(f"{type(error).__name__}: {error}")
            return None
        for host in in_turn(hosts):
            self._open = ConsumerConnection(host, self._queue, self._prefetch)
            try:
                await self._open.opened
                return self._open
            except TransportUnavailable as error:
                failed(hosts, host)
                causes.append(f"{host_name(host)}: {error}")
                await self._open.close(_CLOSING)
        self._log_problem("; ".join(causes))
        return None

    def _batch(self, connection: ConsumerConnection, found: Arrival | str) -> list[ReceivedMessage]:
        """Return a batch of a message and those behind it, without messages that were done before."""
        batch: list[ReceivedMessage] = []
        size = 0
        while isinstance(found, Arrival):
            delivery = self._take(connection, found)
            if delivery is not None:
                batch.append(delivery)
                size += delivery.size
            if connection.inbox.empty() or len(batch) >= self._prefetch or size >= _BATCH_BYTES:
                return batch
            found = connection.inbox.get_nowait()
        # the reason why no more will come; the next call reads it
        connection.inbox.put_nowait(found)
        return batch

    def _take(self, connection: ConsumerConnection, found: Arrival) -> ReceivedMessage | None:
        """Return the message to hand out; None if it was done before."""
        key = _key(found)
        # a message that the broker delivers for the first time is new, also if its sender had sent it before
        if found.redelivered and key in self._done:
            connection.ack(found.tag)
            return None
        return ReceivedMessage(found, key, connection)

    def _log_problem(self, problem: str) -> None:
        """Log a problem, and the same one again only after a while."""
        now = self._monotonic()
        if self._logged is None or self._logged[0] != problem or now - self._logged[1] >= _LOG_AGAIN:
            self._logged = problem, now
            log.warning("connection %r: cannot watch queue %r: %s. Still trying", self._conn_id, self._queue, problem)


def _key(found: Arrival) -> _Key | None:
    if not found.properties.message_id:
        return None
    return found.properties.message_id, found.digest


def event_payload(
    found: BasicProperties,
    body: bytes | None,
    *,
    redelivered: bool,
    body_limit: int | None = None,
    size: int | None = None,
) -> dict[str, Any]:
    """Return the payload of a message's event, which Airflow's database may hold and its UI may show, for JSON.

    ``message_id``; ``destination`` and ``due_at`` (ISO 8601 in UTC with microseconds) from the headers
    ``airflow-delayed-destination`` and ``airflow-delayed-due-at``, None where there is none; ``redelivered``: whether
    the broker had delivered the message before, so that there may be another event of it; ``body_bytes``: its size. No
    other header's value, for it may be a secret.

    :param body_limit: bytes; a body up to this size is included as ``body`` if it is text in UTF-8, else encoded as
        ``body_base64``. None: no body.
    :param size: bytes of the body; needed where the body itself is not kept.
    """
    headers: Mapping[str, Any] = found.headers or {}
    payload: dict[str, Any] = {
        "message_id": text(found.message_id or "") or None,
        "destination": _text(headers.get(DESTINATION)),
        "due_at": _moment(headers.get(DUE_AT)),
        "redelivered": redelivered,
        "body_bytes": len(body or b"") if size is None else size,
    }
    if body is not None and body_limit is not None and len(body) <= body_limit:
        payload.update(body_fields(body))
    return payload


def _text(value: object) -> str | None:
    # a longer one is the name of no queue
    return text(value) if isinstance(value, str) and 0 < len(value) <= _LONGEST_NAME else None


def _moment(value: object) -> str | None:
    try:
        return parse_moment(DUE_AT, value).isoformat(timespec="microseconds")
    except InvalidMessage:
        return None
