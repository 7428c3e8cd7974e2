"""Deleting queues and exchanges of a topology without losing a message that arrives meanwhile.

A classic queue is deleted if it is empty. A quorum queue cannot be: RabbitMQ refuses ``if-empty`` and ``if-unused`` for
them and closes the connection (NOT_IMPLEMENTED, 540). So each of those gets a consumer first. What arrives between the
last look and the deletion, by way of an exchange or directly, is handed to that consumer, and is put back with the
queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pika.exceptions import ChannelClosedByBroker

from airflow_delayed.rabbitmq import plan
from airflow_delayed.rabbitmq.decoding import Received
from airflow_delayed.rabbitmq.facts import BindingFacts
from airflow_delayed.rabbitmq.management import Management
from airflow_delayed.rabbitmq.plan import Declaration
from airflow_delayed.rabbitmq.rewriter import DELIVERY_COUNT

if TYPE_CHECKING:
    from pika import BasicProperties
    from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection

#: Seconds to wait for statistics from after the consumers came; the broker makes them every 5 s.
_STATISTICS_SECONDS = 30.0
#: Seconds to wait for the broker to tell a consumer that its queue is gone; all it was to get comes before that.
_CANCEL_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message that came to a queue that was to be deleted."""

    queue: str
    tag: int
    key: str
    properties: BasicProperties
    body: bytes


class NotEmpty(Exception):
    """Messages arrived, or were stuck; all is as it was before. ``counts`` has them by queue, None for unknown."""

    def __init__(self, counts: Mapping[str, int | None]) -> None:
        super().__init__("queues that were to be deleted are not empty")
        self.counts = dict(counts)


class Removal:
    """Deletes exchanges and queues, and puts all of it back when a message turns up in one of the queues.

    :param queues: the queues to delete, which have been found empty, in this order.
    :param classic: those of them that are classic queues.
    :param exchanges: the exchanges to delete before them.
    :param parts: how to declare again what is to be put back.
    :param bindings: further bindings to put back.
    """

    def __init__(
        self,
        connection: BlockingConnection,
        *,
        queues: Sequence[str],
        classic: Container[str],
        exchanges: Sequence[str],
        parts: Sequence[Declaration],
        bindings: Iterable[BindingFacts] = (),
    ) -> None:
        self._connection = connection
        self._queues = queues
        self._classic = classic
        self._exchanges = exchanges
        self._parts = parts
        self._bindings = tuple(bindings)
        self._arrived: list[Arrived] = []
        self._gone: set[str] = set()
        # a level's exchange and queue have one name
        self._changed = False
        self._deleted: set[str] = set()

    def run(self, management: Management | None, *, stuck_in: Iterable[str] = ()) -> None:
        """Delete all of it.

        Beyond reach: the one message that a sender, after seconds of silence, publishes straight into a queue in the
        millisecond of its deletion. RabbitMQ confirms it and drops it (seen on 4.0.5; with classic queues on 3.10.8).

        :param stuck_in: the queues that may hold messages stuck in dead-lettering, which no consumer gets.
        :raises NotEmpty: messages came, or are stuck.
        """
        holder = self._hold()
        try:
            if management is not None:
                self._check_stuck(management, set(stuck_in))
            self._check()
            worker = self._connection.channel()
            # the ways in first: who uses one of them from now on gets an error
            for name in self._exchanges:
                worker.exchange_delete(name)
                self._changed = True
            self._check()
            for name in self._queues:
                self._delete(worker, name)
            worker.close()
        except NotEmpty:
            if self._changed:
                self._put_back()
            raise
        finally:
            # what is held of a queue that stays goes back into it
            if holder.is_open:
                holder.close()

    def _delete(self, worker: BlockingChannel, name: str) -> None:
        if name in self._classic:
            try:
                worker.queue_delete(name, if_empty=True)
            except ChannelClosedByBroker as error:
                if error.reply_code != plan.PRECONDITION_FAILED:
                    raise
                raise NotEmpty(plan.counts(self._connection, [name])) from error
        else:
            worker.queue_delete(name)
            self._deleted.add(name)
            self._pump(lambda: name in self._gone, _CANCEL_SECONDS)
        self._changed = True
        self._check()

    def _hold(self) -> BlockingChannel:
        channel = self._connection.channel()

        def cancelled(frame: Any) -> None:
            self._gone.add(consumers[frame.method.consumer_tag])

        channel.add_on_cancel_callback(cancelled)
        held = [name for name in self._queues if name not in self._classic]
        consumers = {channel.basic_consume(name, self._take(name)): name for name in held}
        return channel

    def _take(self, queue: str) -> Callable[[BlockingChannel, Any, BasicProperties, bytes], None]:
        def take(_: BlockingChannel, method: Any, properties: BasicProperties, body: bytes) -> None:
            self._arrived.append(Arrived(queue, method.delivery_tag, method.routing_key, properties, body))

        return take

    def _check_stuck(self, management: Management, names: set[str]) -> None:
        # A queue's count of consumers and that of its stuck messages are from one moment. Since a consumer gets what
        # arrives, nothing gets stuck any more after it.
        found: dict[str, int | None] = {}

        def told() -> bool:
            queues = management.queues() or {}
            for name in names & queues.keys():
                if queues[name].consumers:
                    found[name] = queues[name].stuck
            return names <= found.keys()

        self._pump(told, _STATISTICS_SECONDS, pause=0.5)
        if bad := {name: found.get(name) for name in sorted(names) if found.get(name) != 0}:
            raise NotEmpty(bad)

    def _check(self) -> None:
        # deliveries that are on their way come before the answer to what is asked after them
        self._connection.process_data_events(time_limit=0)
        if self._arrived:
            counts: dict[str, int | None] = {}
            for arrived in self._arrived:
                counts[arrived.queue] = (counts.get(arrived.queue) or 0) + 1
            raise NotEmpty(counts)

    def _pump(self, ready: Callable[[], bool], seconds: float, pause: float = 0.05) -> None:
        end = time.monotonic() + seconds
        while not ready() and time.monotonic() < end:
            self._connection.process_data_events(time_limit=pause)

    def _put_back(self) -> None:
        plan.apply(self._connection, self._parts)
        rebind(self._connection, self._bindings)
        channel = self._connection.channel()
        channel.confirm_delivery()
        for arrived in self._arrived:
            if arrived.queue not in self._deleted:
                continue
            # straight into its queue, with the key that it came with (see properties.address); headers that fill a
            # frame have no room for another one
            added = {} if arrived.key == arrived.queue else {"BCC": [arrived.queue]}
            # without the user who sent it: the broker takes that property from the same user alone
            properties = Received.of(arrived.properties).again(without={DELIVERY_COUNT}, added=added, user=None)
            channel.basic_publish("", arrived.key, arrived.body, properties, mandatory=True)
        channel.close()


def rebind(connection: BlockingConnection, bindings: Iterable[BindingFacts]) -> None:
    """Make bindings again, as far as both ends are there."""
    channel = connection.channel()
    for one in bindings:
        try:
            if one.is_queue:
                channel.queue_bind(one.target, one.source, one.key)
            else:
                channel.exchange_bind(one.target, one.source, one.key)
        except ChannelClosedByBroker as error:
            if error.reply_code != plan.NOT_FOUND:
                raise
            channel = connection.channel()
    channel.close()
