"""Deleting a topology's queues and exchanges without losing a message.

A classic queue is deleted if it is empty. A quorum queue cannot be: RabbitMQ refuses ``if-empty`` and ``if-unused`` for
them and closes the connection (NOT_IMPLEMENTED, 540). So each of those gets a consumer first. A message that arrives
between the last count and the deletion, by way of an exchange or directly, goes to that consumer, and is put back with
the queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pika.exceptions import ChannelClosedByBroker

from airflow_delayed.delivery import Finding, State
from airflow_delayed.rabbitmq import cluster, declare
from airflow_delayed.rabbitmq.declare import Declaration
from airflow_delayed.rabbitmq.management import BindingFacts, Facts, Management
from airflow_delayed.rabbitmq.properties import DELIVERY_COUNT, ReceivedProperties
from airflow_delayed.rabbitmq.topology import Topology

if TYPE_CHECKING:
    from pika import BasicProperties
    from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection

#: Seconds to wait for statistics from after the consumers came; the broker makes them every 5 s.
_STATISTICS_SECONDS = 30.0
#: Seconds to wait until the broker cancels the consumer of a deleted queue; its messages come before that.
_CANCEL_SECONDS = 5.0


def waiting_finding(queue: str, count: int | None) -> Finding:
    """Return the finding of a queue whose deletion would lose messages; None: whether there are some is unknown."""
    if count is None:
        why = "whether messages wait in it, or are stuck in dead-lettering, the management API alone tells"
        return Finding(state=State.UNKNOWN, resource=f"queue {queue}", found=why, code="waiting")
    return Finding(
        state=State.BLOCKED, resource=f"queue {queue}", found=f"{count:,} messages wait in it", code="waiting"
    )


@dataclass(frozen=True, slots=True)
class QueueContents:
    """The kinds and the messages of a topology's own queues, which may have to be deleted.

    :param found: AMQP's findings of the queues, where the management API shows none; empty: all are as planned.
    """

    topology: Topology
    connection: BlockingConnection
    facts: Facts
    found: Sequence[Finding] = ()

    def waiting(self, names: Iterable[str]) -> dict[str, int | None]:
        """Return the number of messages in each queue that has some; None where AMQP may not count all of them."""
        counts = declare.counts(self.connection, names)
        found = {name: count for name, count in counts.items() if count is not None}
        waiting: dict[str, int | None] = {name: count for name, count in found.items() if count}
        leaderless = {queue.name for queue in cluster.unavailable((self.facts.queues or {}).values())}
        unknown = [name for name in found if self.facts.silent or name in leaderless]
        waiting.update(dict.fromkeys(unknown))
        for name in filter(self.may_be_stuck, found):
            known = (self.facts.queues or {}).get(name)
            if known is None or name in leaderless:
                waiting.setdefault(name, None)
            # without statistics yet the queue counts as empty: a removal waits for them
            elif known.stuck:
                waiting[name] = found[name] + known.stuck
        return waiting

    def may_be_stuck(self, name: str) -> bool:
        """Whether a queue may hold messages that a passive declare does not count."""
        known = (self.facts.queues or {}).get(name)
        if known is not None:
            return known.arguments.get("x-dead-letter-strategy") == "at-least-once"
        kinds = [one for one in self._of(name) if one.argument == "x-queue-type"]
        return name != self.topology.unroutable_queue and self.topology.keeps_stuck and not kinds

    def is_classic(self, name: str) -> bool:
        """Whether a queue is known to be a classic one."""
        known = (self.facts.queues or {}).get(name)
        if known is not None:
            return known.type == "classic"
        differs = [one for one in self._of(name) if one.state is State.DIFFERS]
        if differs:
            return any(one.argument == "x-queue-type" and one.found in (None, "classic") for one in differs)
        return name != self.topology.unroutable_queue and not self.topology.is_quorum

    def _of(self, name: str) -> list[Finding]:
        return [one for one in self.found if one.resource == f"queue {name}"]


@dataclass(frozen=True, slots=True)
class _LateMessage:
    """A message that came to a queue that was to be deleted."""

    queue: str
    key: str
    properties: BasicProperties
    body: bytes


class NotEmpty(Exception):
    """Messages arrived, or were stuck, and nothing was deleted. ``counts`` has them by queue, None for unknown."""

    def __init__(self, counts: Mapping[str, int | None]) -> None:
        super().__init__("queues that were to be deleted are not empty")
        self.counts = dict(counts)


class Removal:
    """Deletes exchanges and queues, and puts all of them back when a message arrives in one of the queues.

    :param queues: the queues to delete, in this order; each was empty at the last count.
    :param classic: the classic ones of these queues.
    :param exchanges: the exchanges to delete before the queues.
    :param parts: the declarations to make again when all is put back.
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
        self._arrived: list[_LateMessage] = []
        self._gone: set[str] = set()
        self._changed = False
        self._deleted: set[str] = set()

    def run(self, management: Management | None, *, stuck_in: Iterable[str] = ()) -> None:
        """Delete the exchanges and the queues.

        One message cannot be saved: what a sender, after seconds of silence, publishes straight into a queue in the
        millisecond of its deletion. RabbitMQ confirms it and drops it (seen on 4.0.5; with classic queues on 3.10.8).

        :param stuck_in: the queues that may have messages stuck in dead-lettering, which no consumer gets.
        :raises NotEmpty: messages arrived, or are stuck.
        """
        consuming = self._consume()
        try:
            if management is not None:
                self._check_stuck(management, set(stuck_in))
            self._check()
            worker = self._connection.channel()
            # exchanges first: a sender that uses one of them from now on gets an error
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
            # with the channel, messages of a queue that stays go back into it
            if consuming.is_open:
                consuming.close()

    def _delete(self, worker: BlockingChannel, name: str) -> None:
        if name in self._classic:
            try:
                worker.queue_delete(name, if_empty=True)
            except ChannelClosedByBroker as error:
                if error.reply_code != declare.PRECONDITION_FAILED:
                    raise
                raise NotEmpty(declare.counts(self._connection, [name])) from error
        else:
            worker.queue_delete(name)
            self._deleted.add(name)
            self._pump(lambda: name in self._gone, _CANCEL_SECONDS)
        self._changed = True
        self._check()

    def _consume(self) -> BlockingChannel:
        channel = self._connection.channel()

        def cancelled(frame: Any) -> None:
            self._gone.add(consumers[frame.method.consumer_tag])

        channel.add_on_cancel_callback(cancelled)
        quorum = [name for name in self._queues if name not in self._classic]
        consumers = {channel.basic_consume(name, self._take(name)): name for name in quorum}
        return channel

    def _take(self, queue: str) -> Callable[[BlockingChannel, Any, BasicProperties, bytes], None]:
        def take(_: BlockingChannel, method: Any, properties: BasicProperties, body: bytes) -> None:
            self._arrived.append(_LateMessage(queue, method.routing_key, properties, body))

        return take

    def _check_stuck(self, management: Management, names: set[str]) -> None:
        # A queue's count of consumers and that of its stuck messages are from one moment. A consumer gets each message
        # that arrives, so none gets stuck any more once there is one.
        found: dict[str, int | None] = {}

        def counted() -> bool:
            queues = management.queues() or {}
            for name in names & queues.keys():
                if queues[name].consumers:
                    found[name] = queues[name].stuck
            return names <= found.keys()

        self._pump(counted, _STATISTICS_SECONDS, pause=0.5)
        if bad := {name: found.get(name) for name in sorted(names) if found.get(name) != 0}:
            raise NotEmpty(bad)

    def _check(self) -> None:
        # deliveries that are on their way come before the broker's next answer
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
        declare.apply(self._connection, self._parts)
        rebind(self._connection, self._bindings)
        channel = self._connection.channel()
        channel.confirm_delivery()
        for arrived in self._arrived:
            if arrived.queue not in self._deleted:
                continue
            # straight into its queue, with the key that it had (see Topology.address); headers that fill a frame have
            # no room for another one
            added = {} if arrived.key == arrived.queue else {"BCC": [arrived.queue]}
            # without the user who sent it: the broker accepts that property from the same user alone
            properties = ReceivedProperties.of(arrived.properties).again(
                without={DELIVERY_COUNT}, added=added, user=None
            )
            channel.basic_publish("", arrived.key, arrived.body, properties, mandatory=True)
        channel.close()


def rebind(connection: BlockingConnection, bindings: Iterable[BindingFacts]) -> None:
    """Make bindings again if both ends exist."""
    channel = connection.channel()
    for one in bindings:
        try:
            if one.is_queue:
                channel.queue_bind(one.target, one.source, one.key)
            else:
                channel.exchange_bind(one.target, one.source, one.key)
        except ChannelClosedByBroker as error:
            if error.reply_code != declare.NOT_FOUND:
                raise
            channel = connection.channel()
    channel.close()
