"""The end of a move that messages are taken from: one connection, each message acknowledged when it is elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING

from pika.exceptions import AMQPError, NackError, UnroutableError

from airflow_delayed.delivery import Clock
from airflow_delayed.errors import TransportUnavailable
from airflow_delayed.rabbitmq.aside import Aside
from airflow_delayed.rabbitmq.connection import explain
from airflow_delayed.rabbitmq.decoding import Received, text
from airflow_delayed.rabbitmq.moved import MoveReport
from airflow_delayed.rabbitmq.received import Reading
from airflow_delayed.rabbitmq.rewriter import Taken

if TYPE_CHECKING:
    from pika import BasicProperties
    from pika.adapters.blocking_connection import BlockingConnection

log = logging.getLogger(__name__)

#: How a message is read: properties, routing key, queue, the present.
Read = Callable[["BasicProperties", str, str, datetime], Reading]
_LOG_SECONDS = 10.0
#: Seconds to wait for messages to be back in their queue.
_RETURN_SECONDS = 10.0
#: A message that was returned so often is moved at once and alone.
RETURNS = 3


class Taker:
    """Takes messages, and counts what became of each.

    :param conn_id: names the connection in errors.
    :param read: reads where a message goes and when it is due.
    :param put_back: what cannot be moved goes to its queue's end; else it is set aside.
    """

    def __init__(
        self,
        connection: BlockingConnection,
        report: MoveReport,
        *,
        conn_id: str,
        user: str | None,
        clock: Clock,
        read: Read,
        put_back: bool,
    ) -> None:
        #: How many messages are elsewhere by now.
        self.handled = 0
        #: What was taken and is not elsewhere yet, by delivery tag.
        self.held: dict[int, tuple[Taken, Reading]] = {}
        self._connection = connection
        self._report = report
        self._conn_id = conn_id
        self._clock = clock
        self._read = read
        self._put_back = put_back
        self._channel = connection.channel()
        self._aside = Aside(connection, user)
        self._lost: AMQPError | None = None
        self._next_log = time.monotonic() + _LOG_SECONDS

    def count(self, queue: str) -> int:
        """Return how many messages are ready in a queue."""
        found: int = self._channel.queue_declare(queue, passive=True).method.message_count
        return found

    def take(self, queues: Iterable[str], limit: int | None = None) -> Iterator[tuple[Taken, Reading]]:
        """Take of each queue as many messages as there are when its turn comes.

        :raises TransportUnavailable: the connection was lost.
        """
        for queue in queues:
            count = self.count(queue)
            for _ in range(count if limit is None else min(limit, count)):
                self.check()
                found = self._get(queue)
                if found is None:
                    break
                self.held[found[0].delivery_tag] = found
                yield found

    def _get(self, queue: str) -> tuple[Taken, Reading] | None:
        method, properties, body = self._channel.basic_get(queue)
        if method is None or properties is None or body is None:
            return None
        now, key, original = self._clock(), text(method.routing_key or ""), Received.of(properties)
        reading = self._read(original, key, queue, now)
        if original.problem is not None:
            reading = replace(reading, problem=original.problem)
        taken = Taken(
            destination=reading.destination or "",
            body=body,
            due_at=reading.due_at or now,
            message_id=original.message_id or "",
            original=original,
            queue=queue,
            routing_key=key,
            delivery_tag=method.delivery_tag or 0,
        )
        return taken, reading

    def done(self, taken: Taken) -> None:
        """Let the source forget a message that the target has confirmed."""
        try:
            self._channel.basic_ack(taken.delivery_tag)
        except AMQPError as error:
            # it is in the target, and will be moved again with the same id
            self._lost = self._lost or error
            return
        self._report.add(taken.destination, taken.queue)
        self._count(taken)

    def reject(self, taken: Taken, reading: Reading, reason: str) -> None:
        """Put a message that cannot be moved where it is not in the way.

        :raises TransportUnavailable: the queue there does not take it.
        """
        with self._refusals():
            if self._put_back:
                self._aside.put_back(taken, reading)
                self._report.add_left(reason)
            else:
                self._aside.set_aside(taken, reading, reason)
                self._report.add_set_aside(reason)
        self._channel.basic_ack(taken.delivery_tag)
        self._count(taken)

    def release(self, taken: Taken, reading: Reading) -> None:
        """Let a message that was only looked at stay in its queue.

        It returns there with the end of the connection. Before it has been returned so often that a move would take it
        alone, it goes to the queue's end instead, as a message that nobody has returned.

        :raises TransportUnavailable: the queue does not take it.
        """
        del self.held[taken.delivery_tag]
        if taken.returns + 1 >= RETURNS:
            with self._refusals():
                self._aside.put_back(taken, reading)
            self._channel.basic_ack(taken.delivery_tag)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except (UnroutableError, NackError) as error:
            raise TransportUnavailable(
                f"connection {self._conn_id!r}: no queue takes what cannot be moved; is one full, or without a leader?"
            ) from error

    def settle(self, queue: str, count: int) -> None:
        """Return what was released, and wait until so many messages are ready in the queue again."""
        self._channel.basic_nack(multiple=True, requeue=True)
        deadline = time.monotonic() + _RETURN_SECONDS
        while self.count(queue) < count and time.monotonic() < deadline:
            self.sleep(0.05)

    def _count(self, taken: Taken) -> None:
        del self.held[taken.delivery_tag]
        self.handled += 1
        if time.monotonic() >= self._next_log:
            self._next_log = time.monotonic() + _LOG_SECONDS
            log.info("%s so far", self._report)

    def check(self) -> None:
        """Check that the connection is there.

        :raises TransportUnavailable: it was lost.
        """
        if self._lost is not None:
            raise TransportUnavailable(
                f"connection {self._conn_id!r}: {explain(self._lost)}. {self._report.moved:,} messages were moved; run"
                " it again for the rest"
            ) from self._lost

    def sleep(self, seconds: float) -> None:
        """Wait, and keep the connection alive."""
        end = time.monotonic() + seconds
        try:
            self._connection.sleep(seconds)
        except AMQPError as error:
            self._lost = self._lost or error
            time.sleep(max(0.0, end - time.monotonic()))
