"""A temporary queue of RabbitMQ: bound as a destination is, and deleted by the broker itself if nobody else does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING

from airflow_delayed.delivery import TemporaryQueue
from airflow_delayed.rabbitmq.topology import Topology

if TYPE_CHECKING:
    from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection

#: Seconds that the broker keeps the queue without a consumer, beyond the time for which it is wanted.
_GRACE = 60


class RabbitMQTemporaryQueue(TemporaryQueue):
    """A classic queue of its own.

    It is not exclusive: a destination is bound by the connection that sends. While a message is on its way through the
    delay levels, the queue is not deleted: the message would become unroutable, and on a topology of others block its
    level.
    """

    def __init__(self, name: str, channel: BlockingChannel, lifetime: int) -> None:
        super().__init__(name)
        self._channel = channel
        self._lifetime = lifetime

    def arrives(self, seconds: float) -> bool:
        """Wait for a message."""
        # it goes on where the last call ended
        taken = self._channel.consume(self.name, auto_ack=True, inactivity_timeout=seconds)
        return next(taken)[0] is not None

    def end(self) -> None:
        """Delete the queue, unless a message is on its way to it."""
        if self.awaited:
            self.remains = (
                f"queue {self.name} stays, because a message is on its way to it; RabbitMQ deletes it when it was not"
                f" used for {self._lifetime:,} s"
            )
        else:
            self._channel.queue_delete(self.name)


@contextmanager
def temporary_queue(
    topology: Topology,
    name: str,
    seconds: float,
    connected: Callable[[], AbstractContextManager[BlockingConnection]],
) -> Iterator[TemporaryQueue]:
    """Make a destination of a topology for the block.

    :param seconds: for which it is wanted at most.
    :param connected: returns a connection, whose errors it translates.
    """
    from pika.exceptions import AMQPError

    lifetime = math.ceil(seconds) + _GRACE
    key = topology.binding_key(name)
    with connected() as connection:
        channel = connection.channel()
        arguments = {"x-queue-type": "classic", "x-expires": lifetime * 1000}
        channel.queue_declare(name, durable=True, arguments=arguments)
        queue = RabbitMQTemporaryQueue(name, channel, lifetime)
        try:
            if topology.routing == "conventional":
                # it goes with the queue
                channel.exchange_declare(name, "fanout", durable=True, auto_delete=True)
                channel.queue_bind(name, name)
                channel.exchange_bind(name, topology.delivery_exchange, key)
            else:
                channel.queue_bind(name, topology.delivery_exchange, key)
            yield queue
        finally:
            # without the connection the broker deletes the queue by itself
            with suppress(AMQPError):
                queue.end()
