"""Making destinations ready to be sent to: bound, and known to take a direct entry or not; on channels of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from uuid import uuid4

from pika.exceptions import ChannelClosedByBroker

from airflow_delayed.rabbitmq.plan import PRECONDITION_FAILED, Queue, difference
from airflow_delayed.rabbitmq.topology import Topology

if TYPE_CHECKING:
    from pika.channel import Channel
    from pika.connection import Connection

_DEAD_LETTERS = "x-dead-letter-exchange"
#: How many questions a queue's dead-letter exchange may take: the broker names one argument that differs at a time.
_QUESTIONS = 5


class Destinations:
    """The destinations of one connection.

    A level's queue can be entered directly by way of the default exchange if the user may write to that. Not so for a
    destination that dead-letters to the default exchange: a message keeps all its routing keys, also the one that led
    it into the level's queue, so a consumer's reject would send it there again. What cannot be known over AMQP
    without the right to configure the queue, is taken for such a one; a dead-letter exchange that a *policy* sets
    cannot be seen at all.

    :param on_ready: called when a destination is ready.
    :param on_refused: called with the broker's reason when it is not to be made ready.
    """

    def __init__(
        self,
        connection: Connection,
        topology: Topology,
        *,
        on_ready: Callable[[], None],
        on_refused: Callable[[ChannelClosedByBroker], None],
    ) -> None:
        #: Whether the user may write to the default exchange.
        self.default_exchange = False
        #: Of each destination that is ready, whether a message to it may enter a level's queue directly.
        self.direct: dict[str, bool] = {}
        self._connection = connection
        self._topology = topology
        self._on_ready = on_ready
        self._on_refused = on_refused
        self._binder: Channel

    def open(self, done: Callable[[], None]) -> None:
        """Open a channel and learn the user's rights; then call ``done``."""

        def opened(channel: Channel) -> None:
            self._binder = channel
            channel.add_on_close_callback(self._on_binder_closed)
            if self._topology.routing == "conventional":
                done()
            else:
                self._ask_default_exchange(done)

        self._connection.channel(on_open_callback=opened)

    def prepare(self, destination: str) -> None:
        """Bind a destination, which it has to exist for, and learn whether it takes a direct entry."""
        conventional = self._topology.routing == "conventional"
        bind = self._binder.exchange_bind if conventional else self._binder.queue_bind
        key = self._topology.binding_key(destination)

        def bound(_: object) -> None:
            if self._topology.entry == "direct" and self.default_exchange:
                self._ask_dead_letters(Queue(destination), {}, _QUESTIONS)
            else:
                self._ready(destination, direct=False)

        bind(destination, self._topology.delivery_exchange, key, callback=bound)

    def _ready(self, destination: str, *, direct: bool) -> None:
        self.direct[destination] = direct
        self._on_ready()

    def _on_binder_closed(self, _: Channel, reason: Exception) -> None:
        # it is replaced, since the broker closes a channel with each refusal
        if isinstance(reason, ChannelClosedByBroker):
            self.open(lambda: self._on_refused(reason))

    def _ask_default_exchange(self, done: Callable[[], None]) -> None:
        """Publish a message that goes nowhere: the broker checks the right to do so first."""

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

    def _ask_dead_letters(self, queue: Queue, known: dict[str, object], questions: int) -> None:
        """Ask for a queue's dead-letter exchange, by a declaration of it that the broker can only refuse.

        A number is no name of an exchange, so if the queue has just been deleted, none is made.
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
            if found is None or found.argument is None:
                self._ready(queue.name, direct=False)
            elif found.argument == _DEAD_LETTERS:
                self._ready(queue.name, direct=found.found != "")
            elif found.found is not None and found.argument.startswith("x-") and questions > 1:
                self._ask_dead_letters(queue, {**known, found.argument: found.found}, questions - 1)
            else:
                self._ready(queue.name, direct=False)

        self._connection.channel(on_open_callback=opened)
