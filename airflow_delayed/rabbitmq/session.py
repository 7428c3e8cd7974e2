"""One connection's part of a send: publish in a window, take confirms; in the caller's thread."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING

from pika.exceptions import AMQPError, ChannelClosedByBroker, ChannelWrongStateError, ConnectionWrongStateError

from airflow_delayed.backoff import next_sleep
from airflow_delayed.delivery import Clock
from airflow_delayed.errors import DelayedError
from airflow_delayed.message import delay_seconds
from airflow_delayed.rabbitmq import properties, refusal
from airflow_delayed.rabbitmq.backlog import Backlog, Entry
from airflow_delayed.rabbitmq.decoding import DecodingSelectConnection
from airflow_delayed.rabbitmq.destinations import Destinations
from airflow_delayed.rabbitmq.frames import Frames
from airflow_delayed.rabbitmq.gathering import GatheringServices
from airflow_delayed.rabbitmq.topology import Topology
from airflow_delayed.rabbitmq.unconfirmed import Unconfirmed
from airflow_delayed.rabbitmq.writer import PropertiesWriter, Writer

if TYPE_CHECKING:
    from pika import BasicProperties
    from pika.channel import Channel
    from pika.connection import Connection, Parameters
    from pika.frame import Method
    from pika.spec import Basic
    from pika.spec import Connection as Methods

log = logging.getLogger(__name__)

#: How often a message that the broker refuses (basic.nack: a level is full or has no leader) is sent.
TRIES = 5
#: Seconds before such a message is sent a second and a last time.
_FIRST_SLEEP, _LONGEST_SLEEP = 0.5, 4.0
_CLOSE_SECONDS = 5.0
#: A source is slow when this much has passed, and this much for each message that it gave.
_TURN_SECONDS, _MESSAGE_SECONDS = 0.002, 0.0001
#: How many addresses are kept: of a batch, many messages have the same destination and second.
_ADDRESSES = 5000


class Session:
    """Sends a backlog over one connection until it is done or the connection is lost.

    :param keep: keep the connection when it is done, for :meth:`again`; the caller closes it in the end.
    """

    def __init__(
        self,
        parameters: Parameters,
        backlog: Backlog,
        *,
        topology: Topology,
        clock: Clock,
        window: int,
        writer: PropertiesWriter | None = None,
        keep: bool = False,
    ) -> None:
        self.opened = False
        #: The broker's reason why it takes no messages, from its alarm until it goes on.
        self.blocked: str | None = None
        self._topology = topology
        self._writer = writer or Writer(topology.headers)
        self._backlog = backlog
        self._clock = clock
        self._window = window
        self._keep = keep
        self._unconfirmed = Unconfirmed()
        self._waiting: Entry | None = None
        self._addresses: dict[tuple[str, int], properties.Address] = {}
        self._paused = True
        self._yields = False
        self._finished = False
        #: Nothing more is taken; what was written is still to be confirmed.
        self._stopped = False
        self._lost: BaseException | None = None
        self._publisher: Channel
        self._frames: Frames
        self._services = GatheringServices()
        self._connection = DecodingSelectConnection(
            parameters,
            on_open_callback=self._on_open,
            on_open_error_callback=self._on_closed,
            on_close_callback=self._on_closed,
            custom_ioloop=self._services,
        )
        self._loop = self._connection.ioloop
        self._destinations = Destinations(
            self._connection, topology, on_ready=self._on_ready, on_refused=self._on_refused
        )

    def run(self) -> BaseException | None:
        """Send; return None when the backlog is done, else why the connection ended. The rest is put back."""
        try:
            self._loop.start()
        finally:
            if not self.kept:
                self._shut()
            held = [self._waiting] if self._waiting else []
            self._backlog.put_back([*self._unconfirmed, *held])
        return self._lost

    @property
    def kept(self) -> bool:
        """Whether all was done, and the connection is there for more."""
        return self._keep and self._finished and self._connection.is_open and self._publisher.is_open

    def again(self, backlog: Backlog) -> None:
        """Take another backlog, which :meth:`run` then sends over the same connection."""
        self._backlog = backlog
        self._finished = False
        self._loop.call_later(0, self._resume)

    def close(self) -> None:
        """Close a connection that was kept."""
        with contextlib.suppress(Exception):
            self._keep = False
            if not self._connection.is_closed:
                self._finish()
                self._loop.start()
        self._loop.close()

    # opening and closing

    def _on_open(self, connection: Connection) -> None:
        self.opened = True
        connection.add_on_connection_blocked_callback(self._on_blocked)
        connection.add_on_connection_unblocked_callback(self._on_unblocked)
        connection.channel(on_open_callback=self._on_publisher)

    def _on_publisher(self, channel: Channel) -> None:
        self._publisher = channel
        self._frames = Frames(channel.channel_number, self._connection.params.frame_max)
        channel.add_on_close_callback(self._on_publisher_closed)
        channel.add_on_return_callback(self._on_return)
        channel.confirm_delivery(self._on_confirm, callback=lambda _: self._destinations.open(self._resume))

    def _on_closed(self, _: Connection, reason: BaseException | str) -> None:
        if not self._finished:
            self._lost = reason if isinstance(reason, BaseException) else ConnectionError(reason)
        self._loop.stop()

    def _finish(self) -> None:
        self._finished = True
        if self.kept:
            self._loop.stop()
            return
        if self._connection.is_open:
            self._connection.close()
        # a broker that takes no messages reads no farewell either
        self._loop.call_later(_CLOSE_SECONDS if self.blocked is None else 0, self._services.hang_up)

    def _shut(self) -> None:
        """After an interrupt, wait a while for confirms of what was written; then close, and the loop too."""
        with contextlib.suppress(Exception):
            if not self._connection.is_closed:
                self._stopped = True
                self._resume()
                wait = _CLOSE_SECONDS if self.blocked is None else 0
                self._loop.call_later(wait, self._finish)
                self._loop.call_later(wait + _CLOSE_SECONDS + 1, self._loop.stop)
                self._loop.start()
        self._loop.close()

    # alarms

    def _on_blocked(self, _: Connection, frame: Method[Methods.Blocked]) -> None:
        self.blocked = frame.method.reason
        log.warning(
            "Connection %r: the broker takes no messages, since it is %s; sending goes on when its alarm ends",
            self._backlog.conn_id,
            self.blocked,
        )

    def _on_unblocked(self, _: Connection, __: Method[Methods.Unblocked]) -> None:
        log.warning("Connection %r: the broker's alarm has ended; sending goes on", self._backlog.conn_id)
        self.blocked = None
        self._pump()

    # publishing

    def _resume(self) -> None:
        self._paused = self._finished
        self._pump()

    @property
    def _held(self) -> bool:
        return self._paused or self.blocked is not None

    def _pump(self, *, one: bool = False) -> None:
        """Publish until the window is full, or the backlog empty, or a destination has to be made ready first.

        Or until a source turns out to be slow: what it gave goes out before it is asked again.

        :param one: take it for slow after one message.
        """
        if self._yields:
            return
        began = time.monotonic()
        before = self._unconfirmed.last
        while not self._held and self._waiting is None and len(self._unconfirmed) < self._window:
            entry = None if self._stopped else self._backlog.take()
            if entry is None:
                if not self._unconfirmed:
                    self._paused = True
                    self._finish()
                return
            try:
                if entry.message.destination in self._destinations.direct:
                    self._publish(entry)
                else:
                    self._destinations.prepare(entry.message.destination)
                    self._waiting = entry
            except DelayedError as error:
                self._backlog.fail(entry, error)
            except (ChannelWrongStateError, ConnectionWrongStateError):
                # it is being closed, which is told by a callback
                self._backlog.put_back([entry])
                return
            except AMQPError as error:
                self._backlog.fail(entry, f"not to be written as AMQP: {type(error).__name__}")
            enough = max(_TURN_SECONDS, _MESSAGE_SECONDS * (self._unconfirmed.last - before))
            if one or time.monotonic() - began > enough:
                self._yields = True
                # in this turn of the loop timers come before the socket, in the next one after it
                self._loop.call_later(0, lambda: self._loop.call_later(0, self._go_on))
                return

    def _go_on(self) -> None:
        self._yields = False
        self._pump()

    def _publish(self, entry: Entry) -> None:
        message, now = entry.message, self._clock()
        delay = delay_seconds(message.due_at, now)
        properties.check_headers(message, self._topology.headers, delay)
        exchange, key, level = self._address(message.destination, delay)
        sent = self._writer.properties(message, now, delay, level)
        if not self._publisher.is_open:
            raise ChannelWrongStateError("the channel is closed")
        self._services.write(self._frames.message(exchange, key, message.body, sent))
        self._backlog.published = True
        self._unconfirmed.add(entry)

    def _address(self, destination: str, delay: int) -> properties.Address:
        known = self._addresses.get((destination, delay))
        if known is None:
            known = properties.address(
                self._topology,
                destination,
                delay,
                default_exchange=self._destinations.default_exchange,
                direct=self._destinations.direct[destination],
            )
            if len(self._addresses) >= _ADDRESSES:
                self._addresses.clear()
            self._addresses[destination, delay] = known
        return known

    def _on_return(self, _: Channel, method: Basic.Return, sent: BasicProperties, __: bytes) -> None:
        if method.exchange:
            where = f"through exchange {method.exchange!r}"
        elif method.routing_key == (sent.headers or {}).get(properties.DESTINATION):
            where = "queue is gone"
        else:
            where = "a delay level's queue is gone; TopologyInstallOperator makes it again"
        self._unconfirmed.returned(sent.message_id or "", f"returned by the broker as {method.reply_text} ({where})")

    def _on_confirm(self, frame: Method[Basic.Ack | Basic.Nack]) -> None:
        method = frame.method
        refused = method.NAME == "Basic.Nack"
        for entry, returned in self._unconfirmed.settle(method.delivery_tag, method.multiple):
            if refused:
                self._refuse(entry)
            elif returned:
                self._backlog.fail(entry, returned)
            else:
                self._backlog.confirm(entry)
        self._pump()

    def _refuse(self, entry: Entry) -> None:
        entry.refusals += 1
        if entry.refusals >= TRIES:
            self._backlog.fail(entry, f"refused by the broker {TRIES} times; is a queue full, or without a leader?")
            return
        self._backlog.put_back([entry])
        if not self._paused:
            self._paused = True
            seconds = next_sleep(entry.refusals, first=_FIRST_SLEEP, longest=_LONGEST_SLEEP)
            self._loop.call_later(seconds, self._resume)

    def _on_publisher_closed(self, _: Channel, reason: Exception) -> None:
        if not isinstance(reason, ChannelClosedByBroker):
            return
        # which message it was the broker does not say
        cause = refusal.cause(self._backlog.conn_id, self._topology, reason)
        for entry in self._unconfirmed.clear():
            self._backlog.fail(entry, cause)
        if self._waiting:
            self._backlog.fail(self._waiting, cause)
            self._waiting = None
        self._backlog.give_up(cause)
        self._paused = True
        self._finish()

    # destinations

    def _on_ready(self) -> None:
        if self._waiting is None:
            return
        entry, self._waiting = self._waiting, None
        self._backlog.put_back([entry])
        # it has waited enough, and is not to wait for what the source gives next too
        self._pump(one=True)

    def _on_refused(self, reason: ChannelClosedByBroker) -> None:
        if self._waiting is not None:
            entry, self._waiting = self._waiting, None
            cause = refusal.cause(self._backlog.conn_id, self._topology, reason, entry.message.destination)
            self._backlog.fail(entry, cause)
        # also if the broker closed the channel by itself: a message may have come while there was none
        self._pump()
