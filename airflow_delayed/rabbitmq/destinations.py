"""Binding destinations for one connection's sends, and learning where their messages may enter the delay levels."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from uuid import uuid4

from pika.exceptions import ChannelClosedByBroker

from airflow_delayed.rabbitmq.declare import PRECONDITION_FAILED, Queue, difference
from airflow_delayed.rabbitmq.topology import Topology

if TYPE_CHECKING:
    from pika.channel import Channel
    from pika.connection import Connection

_DEAD_LETTERS = "x-dead-letter-exchange"
#: How many declarations it may take to learn a queue's dead-letter exchange: each refusal names one argument.
_QUESTIONS = 5


class SessionDestinations:
    """Binds the destinations of one connection, and learns whether each takes a direct entry; on channels of its own.

    A user who may write to the default exchange can publish straight into a level's queue: the direct entry. A
    destination that dead-letters to the default exchange must not have it. A message keeps all its routing keys, also
    the name of the level's queue, so a consumer's reject would send it into that level again.

    The broker names a queue's dead-letter exchange only to a user who may configure the queue, and only if it is an
    argument of the queue. Without that right a destination gets no direct entry.

    A dead-letter exchange that a *policy* sets stays unknown here, and such a destination gets the direct entry. The
    risk is a policy with the default exchange (an empty name) and no ``dead-letter-routing-key``: a message that a
    consumer rejects goes back into its level and comes again, after each reject. ``verify`` finds such a policy with
    the management API (``differs``); a send does not use that API.

    :param on_ready: called when a destination is bound.
    :param on_failed: called with the broker's reason when a destination cannot be bound.
    """

    def __init__(
        self,
        connection: Connection,
        topology: Topology,
        *,
        on_ready: Callable[[], None],
        on_failed: Callable[[ChannelClosedByBroker], None],
    ) -> None:
        #: Whether the user may write to the default exchange.
        self.default_exchange = False
        #: For each destination that is bound, whether a message to it may enter a level's queue directly.
        self.direct: dict[str, bool] = {}
        self._connection = connection
        self._topology = topology
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._channel: Channel

    def open(self, done: Callable[[], None]) -> None:
        """Open a channel and learn the user's rights; then call ``done``."""

        def opened(channel: Channel) -> None:
            self._channel = channel
            channel.add_on_close_callback(self._on_channel_closed)
            if self._topology.routing == "conventional":
                done()
            else:
                self._ask_default_exchange(done)

        self._connection.channel(on_open_callback=opened)

    def prepare(self, destination: str) -> None:
        """Bind a destination, which has to exist, and learn whether it takes a direct entry."""
        self._bind(self._channel, destination, self._on_ready)

    def introduce(
        self,
        destination: str,
        on_ready: Callable[[Channel], None],
        on_closed: Callable[[Channel, Exception], None],
    ) -> None:
        """Do the same on a channel of its own, beside others; the caller goes on with the channel."""

        def opened(channel: Channel) -> None:
            channel.add_on_close_callback(on_closed)
            self._bind(channel, destination, lambda: on_ready(channel))

        self._connection.channel(on_open_callback=opened)

    def _bind(self, channel: Channel, destination: str, done: Callable[[], None]) -> None:
        conventional = self._topology.routing == "conventional"
        bind = channel.exchange_bind if conventional else channel.queue_bind
        key = self._topology.binding_key(destination)

        def ready(direct: bool) -> None:
            self.direct[destination] = direct
            done()

        def bound(_: object) -> None:
            if self.default_exchange and not self._topology.shared:
                self._ask_dead_letters(Queue(destination), {}, _QUESTIONS, ready)
            else:
                ready(False)

        bind(destination, self._topology.delivery_exchange, key, callback=bound)

    def _on_channel_closed(self, _: Channel, reason: Exception) -> None:
        # the broker closes a channel with each refusal, so open another
        if isinstance(reason, ChannelClosedByBroker):
            self.open(lambda: self._on_failed(reason))

    def _ask_default_exchange(self, done: Callable[[], None]) -> None:
        """Publish a message that reaches no queue: the broker checks the right to do so first."""

        def opened(channel: Channel) -> None:
            channel.add_on_close_callback(closed)
            channel.confirm_delivery(lambda _: channel.close(), callback=lambda _: ask(channel))

        def ask(channel: Channel) -> None:
            channel.basic_publish("", f"airflow-delayed.{uuid4()}", b"")

        def closed(_: Channel, reason: Exception) -> None:
            if self._connection.is_open:
                self.default_exchange = not isinstance(reason, ChannelClosedByBroker)
                done()

        self._connection.channel(on_open_callback=opened)

    def _ask_dead_letters(
        self, queue: Queue, known: dict[str, object], questions: int, ready: Callable[[bool], None]
    ) -> None:
        """Learn a queue's dead-letter exchange, by a declaration of the queue that the broker can only refuse.

        A number is no name of an exchange, so no queue is made even if it has just been deleted.
        """

        def opened(channel: Channel) -> None:
            channel.add_on_close_callback(closed)
            arguments = {**known, _DEAD_LETTERS: 0}
            channel.queue_declare(queue.name, durable=True, arguments=arguments, callback=lambda _: channel.close())

        def closed(_: Channel, reason: Exception) -> None:
            if not self._connection.is_open:
                return
            code, text = getattr(reason, "reply_code", None), getattr(reason, "reply_text", "")
            found = difference(queue, text) if code == PRECONDITION_FAILED else None
            argument = found.argument if found and found.argument else ""
            if found and argument == _DEAD_LETTERS:
                # None: no such argument; a policy may still set a dead-letter exchange, which AMQP does not show
                ready(found.found != "")
            elif found and found.found is not None and argument.startswith("x-") and questions > 1:
                self._ask_dead_letters(queue, {**known, argument: found.found}, questions - 1, ready)
            else:
                ready(False)

        self._connection.channel(on_open_callback=opened)
