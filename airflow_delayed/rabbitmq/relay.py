"""Relaying on one connection: take messages from queues, publish each somewhere else, acknowledge after the confirm.

A message that is taken stays in its queue until the broker has confirmed what was published for it. So a relay that is
killed at any moment loses nothing, and what it had published and not acknowledged is published again by the next one.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from pika.exceptions import (
    ChannelClosedByBroker,
    ChannelWrongStateError,
    ConnectionClosedByBroker,
    ConnectionWrongStateError,
)

from airflow_delayed.clock import next_sleep
from airflow_delayed.rabbitmq.connection import AsyncConnection, describe_error
from airflow_delayed.rabbitmq.declare import ACCESS_REFUSED, NOT_FOUND, PRECONDITION_FAILED
from airflow_delayed.rabbitmq.properties import DELIVERY_COUNT, ReceivedProperties
from airflow_delayed.rabbitmq.wire import WriteMessage, message_writer

if TYPE_CHECKING:
    from pika import BasicProperties
    from pika.channel import Channel
    from pika.connection import Connection, Parameters
    from pika.frame import Method
    from pika.spec import Basic

#: Messages that may be published and not confirmed at a time, and that each queue delivers before one is acknowledged.
#: After kill -9 at most so many of each queue are published twice.
RELAY_WINDOW = 100
#: How often a message that the broker refuses (basic.nack) is published before it is parked.
_TRIES = 5
#: The reply code of a broker that ends a connection for reasons of its own, such as its own end.
_CONNECTION_FORCED = 320
#: Seconds before a message that the broker refused is published again, at first and at most.
_FIRST_SLEEP, _LONGEST_SLEEP = 0.5, 30.0


@dataclass(frozen=True, slots=True)
class TakenMessage:
    """A message that was taken from a queue and is not acknowledged there.

    :param key: its routing key; bytes if that is not UTF-8.
    """

    queue: str
    tag: int
    key: str | bytes
    properties: ReceivedProperties
    body: bytes

    def digest(self) -> bytes:
        """Return what is the same when the queue delivers the message again."""
        again = self.properties.again(without={DELIVERY_COUNT}, added={}, user=None)
        key = self.key.encode() if isinstance(self.key, str) else self.key
        parts = (self.queue.encode(), key, *again.encode(), self.body)
        return sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()


@dataclass(frozen=True, slots=True)
class Publication:
    """What is published for a message that was taken.

    :param parked: the reason, if it goes to the queue of parked messages.
    """

    exchange: str
    key: Any
    properties: BasicProperties
    parked: str | None = None


#: Returns what to publish for a message; with a reason, what parks it.
Route = Callable[[TakenMessage, str | None], Publication]


@dataclass(slots=True)
class _Unconfirmed:
    taken: TakenMessage
    publication: Publication
    refusals: int = 0
    returned: str | None = None


@dataclass(slots=True)
class BrokerRefusals:
    """The messages for which the broker closed a whole connection; kept from one connection to the next.

    The broker does not name such a message. So after such an end messages are published one by one until it ends again
    with an unconfirmed message: that message is rejected when it is delivered again.
    """

    #: How many messages to publish one by one.
    one_by_one: int = 0
    digests: set[bytes] = field(default_factory=set)

    def note(self, reason: BaseException, unconfirmed: Sequence[TakenMessage]) -> None:
        """Note why a connection ended, and the messages that were published on it and not confirmed."""
        if isinstance(reason, ConnectionClosedByBroker) and reason.reply_code != _CONNECTION_FORCED and unconfirmed:
            # what each queue delivers again comes first
            self.one_by_one = 2 * RELAY_WINDOW
            if len(unconfirmed) == 1:
                self.digests.add(unconfirmed[0].digest())


class Relay(AsyncConnection):
    """Consumes from queues of one host, and publishes what ``route`` answers, until the connection ends. Never waits.

    The queues dead-letter what is rejected: a message for which nothing can be published, whatever the reason.

    :param refusals: of earlier connections.
    :param on_confirm: called with each message that was acknowledged, or rejected, and its publication.
    """

    def __init__(
        self,
        host: Parameters,
        queues: Sequence[str],
        route: Route,
        on_confirm: Callable[[TakenMessage, Publication], None],
        refusals: BrokerRefusals,
    ) -> None:
        #: The broker's reason why it takes no messages, from the start of its alarm to the end.
        self.blocked: str | None = None
        self._queues = queues
        self._route = route
        self._on_confirmed = on_confirm
        self._refusals = refusals
        self._window = 1 if refusals.one_by_one else RELAY_WINDOW
        self._pending: deque[TakenMessage] = deque()
        self._unconfirmed: dict[int, _Unconfirmed] = {}
        self._last = 0
        #: How many messages the broker refused that wait for their next try.
        self._refused = 0
        self._settled_at = 0.0
        self._stopped = False
        self._consumer: Channel | None = None
        self._publisher: Channel | None = None
        self._write: WriteMessage
        super().__init__(host)

    def stalled(self) -> tuple[int, float]:
        """Return how many messages are taken and not acknowledged, and the seconds since the last acknowledgement."""
        count = len(self._pending) + len(self._unconfirmed) + self._refused
        return count, time.monotonic() - self._settled_at if count else 0.0

    async def drain(self, seconds: float) -> None:
        """Publish no more messages, and wait so long for confirms; what is unconfirmed then stays in its queue."""
        self._stopped = True
        deadline = time.monotonic() + seconds
        while self._unconfirmed and not self.ended.done() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    # opening and closing

    def _on_connected(self, connection: Connection) -> None:
        connection.add_on_connection_blocked_callback(self._on_blocked)
        connection.add_on_connection_unblocked_callback(self._on_unblocked)
        connection.channel(on_open_callback=self._on_consumer)

    def _on_consumer(self, channel: Channel) -> None:
        self._consumer = channel
        channel.add_on_close_callback(lambda _, reason: self._end(self._refusal(reason)))
        channel.add_on_cancel_callback(lambda _: self._end(f"a queue of {self._queues} was deleted, or lost its node"))
        channel.basic_qos(prefetch_count=RELAY_WINDOW)
        self._open_publisher()

    def _open_publisher(self) -> None:
        self._connection.channel(on_open_callback=self._on_publisher)

    def _on_publisher(self, channel: Channel) -> None:
        channel.add_on_close_callback(self._on_publisher_closed)
        channel.add_on_return_callback(self._on_return)
        channel.confirm_delivery(self._on_confirm, callback=lambda _: self._on_ready(channel))

    def _on_ready(self, channel: Channel) -> None:
        self._publisher, self._last = channel, 0
        self._write = message_writer(channel, None, self._connection.params.frame_max)
        if not self.opened.done():
            assert self._consumer is not None
            for queue in self._queues:
                self._consumer.basic_consume(queue, self._taker(queue), callback=lambda _: self._on_opened())
        self._pump()

    def _on_closed(self, connection: Connection, reason: BaseException) -> None:
        self._refusals.note(reason, [entry.taken for entry in self._unconfirmed.values()])
        super()._on_closed(connection, reason)

    def _end(self, why: str) -> None:
        self._publisher = None
        super()._end(why)

    def _refusal(self, reason: Exception) -> str:
        if not isinstance(reason, ChannelClosedByBroker):
            return describe_error(reason)
        text = f"the broker closed the channel: {reason.reply_text}"
        if reason.reply_code == NOT_FOUND:
            return f"{text}; declare it, or run the bridge once with --install"
        if reason.reply_code == ACCESS_REFUSED:
            return f"{text}; the rights of the bridge's user are listed in docs/rabbitmq/leaving-the-plugin.md"
        return text

    def _on_blocked(self, _: Connection, frame: Any) -> None:
        self.blocked = frame.method.reason or "no reason given"

    def _on_unblocked(self, _: Connection, __: Any) -> None:
        self.blocked = None
        self._pump()

    # publishing

    def _taker(self, queue: str) -> Callable[..., None]:
        def take(_: Channel, method: Basic.Deliver, properties: BasicProperties, body: bytes) -> None:
            if not self.stalled()[0]:
                self._settled_at = time.monotonic()
            found = ReceivedProperties.of(properties)
            self._pending.append(TakenMessage(queue, method.delivery_tag or 0, method.routing_key or "", found, body))
            self._pump()

        return take

    def _pump(self) -> None:
        while self._pending and len(self._unconfirmed) + self._refused < self._window:
            if self._publisher is None or self._stopped or self.blocked is not None:
                return
            self._route_and_publish(self._pending.popleft(), None)

    def _route_and_publish(self, taken: TakenMessage, refused: str | None) -> None:
        if self._refusals.digests and taken.digest() in self._refusals.digests:
            self._reject(taken, "the broker closed the connection when it was published")
            return
        try:
            publication = self._route(taken, refused)
        except Exception as error:
            # the messages behind it must not wait for what nobody has foreseen in this one
            self._reject(taken, describe_error(error))
        else:
            self._publish(taken, publication)

    def _reject(self, taken: TakenMessage, reason: str) -> None:
        """Let the broker dead-letter a message for which nothing can be published."""
        if self._consumer is not None and self._consumer.is_open:
            self._consumer.basic_reject(taken.tag, requeue=False)
            self._settled_at = time.monotonic()
            self._on_confirmed(taken, Publication("", "", taken.properties, parked=reason))

    def _publish(self, taken: TakenMessage, publication: Publication, refusals: int = 0) -> None:
        if self._publisher is None:
            # it is closed, or another one opens; the message is still in its queue
            self._pending.appendleft(taken)
            return
        try:
            self._write(publication.exchange, publication.key, taken.body, publication.properties)
        except (ConnectionWrongStateError, ChannelWrongStateError):
            # the connection is being closed; a callback reports that
            self._pending.appendleft(taken)
        except Exception as error:
            # it cannot be encoded, or is larger than a frame
            if publication.parked:
                self._reject(taken, describe_error(error))
            else:
                self._route_and_publish(taken, describe_error(error))
        else:
            self._last += 1
            self._unconfirmed[self._last] = _Unconfirmed(taken, publication, refusals)

    def _on_return(self, _: Channel, method: Basic.Return, sent: BasicProperties, body: bytes) -> None:
        """Note the messages that the broker may have returned; it confirms them afterwards, like any other.

        The broker does not say which of several alike it returned. All of these count as returned: one that was
        delivered after all is then in the queue for parked messages too.
        """
        for entry in self._unconfirmed.values():
            alike = entry.publication.exchange == method.exchange and entry.publication.key == method.routing_key
            if alike and entry.taken.body == body:
                entry.returned = method.reply_text

    def _on_confirm(self, frame: Method[Basic.Ack | Basic.Nack]) -> None:
        method = frame.method
        last = method.delivery_tag
        tags = [tag for tag in self._unconfirmed if tag <= last] if method.multiple else [last]
        for entry in [self._unconfirmed.pop(tag) for tag in tags if tag in self._unconfirmed]:
            if method.NAME == "Basic.Nack" or (entry.returned and entry.publication.parked):
                self._publish_later(entry)
            elif entry.returned:
                where = f"exchange {entry.publication.exchange!r} with key {entry.publication.key!r}"
                self._route_and_publish(entry.taken, f"{entry.returned} by {where}")
            else:
                self._settle(entry)
        self._refusals.one_by_one = max(0, self._refusals.one_by_one - len(tags))
        self._window = 1 if self._refusals.one_by_one else min(RELAY_WINDOW, 2 * self._window)
        self._pump()

    def _settle(self, entry: _Unconfirmed) -> None:
        # the messages of a closed channel are back in their queues, so there is nothing to acknowledge
        if self._consumer is not None and self._consumer.is_open:
            self._consumer.basic_ack(entry.taken.tag)
            self._settled_at = time.monotonic()
            self._on_confirmed(entry.taken, entry.publication)

    def _publish_later(self, entry: _Unconfirmed) -> None:
        """Publish a message again that the broker refused, after a growing pause; park it after the last try."""
        refusals, publication = entry.refusals + 1, entry.publication
        if refusals >= _TRIES and not publication.parked:
            reason = f"refused by the broker {refusals} times; is a queue full, or without a leader?"
            self._route_and_publish(entry.taken, reason)
            return

        def publish() -> None:
            self._refused -= 1
            self._publish(entry.taken, publication, refusals)

        self._refused += 1
        self._loop.call_later(next_sleep(refusals, first=_FIRST_SLEEP, longest=_LONGEST_SLEEP), publish)

    def _on_publisher_closed(self, channel: Channel, reason: Exception) -> None:
        if self.ended.done() or channel is not self._publisher:
            self._end(self._refusal(reason))
            return
        self._publisher = None
        entries = list(self._unconfirmed.values())
        self._unconfirmed.clear()
        refused = isinstance(reason, ChannelClosedByBroker) and reason.reply_code == PRECONDITION_FAILED
        if not refused or not entries or self._consumer is None:
            self._end(self._refusal(reason))
            return
        # The broker does not name the message that it refuses, such as one larger than it takes by now: publish them
        # one by one, and let the broker itself dead-letter the message that it refuses alone.
        self._window = 1
        if len(entries) == 1:
            self._reject(entries[0].taken, self._refusal(reason))
        else:
            self._pending.extendleft(entry.taken for entry in reversed(entries))
        self._open_publisher()
