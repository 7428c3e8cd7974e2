"""Putting messages that cannot be moved where they are not in the way, on the broker they came from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_delayed.rabbitmq.properties import (
    DESTINATION,
    DUE_AT,
    ORIGINAL_KEY,
    SET_ASIDE_FROM,
    SET_ASIDE_REASON,
)
from airflow_delayed.rabbitmq.received import Reading
from airflow_delayed.rabbitmq.rewriter import DELIVERY_COUNT, Taken, again

if TYPE_CHECKING:
    from pika.adapters.blocking_connection import BlockingConnection

#: Durable quorum queue of the source's broker that takes what ``migrate`` cannot move.
SET_ASIDE_QUEUE = "delayed.set-aside"


class Aside:
    """Publishes to queues of one connection, each message confirmed before the next.

    :param user: who is logged in.
    """

    def __init__(self, connection: BlockingConnection, user: str | None) -> None:
        self._channel = connection.channel()
        self._channel.confirm_delivery()
        self._user = user
        self._declared = False

    def set_aside(self, taken: Taken, reading: Reading, reason: str) -> None:
        """Put a message into the queue ``delayed.set-aside``, with headers that tell why and where it came from.

        :raises pika.exceptions.AMQPError: the queue did not take it.
        """
        if not self._declared:
            self._channel.queue_declare(SET_ASIDE_QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
            self._declared = True
        self._put(taken, reading, SET_ASIDE_QUEUE, {SET_ASIDE_REASON: reason, SET_ASIDE_FROM: taken.queue})

    def put_back(self, taken: Taken, reading: Reading) -> None:
        """Put a message at the end of the queue it came from.

        Not by returning it: a quorum queue counts that, and lets a message go after the twentieth time.

        :raises pika.exceptions.AMQPError: the queue did not take it.
        """
        self._put(taken, reading, taken.queue, {})

    def _put(self, taken: Taken, reading: Reading, queue: str, added: dict[str, str]) -> None:
        headers = {**(taken.original.headers or {}), **added}
        headers.pop(DELIVERY_COUNT, None)
        for name in ("CC", "BCC"):
            headers.pop(name, None)
        headers.setdefault(ORIGINAL_KEY, taken.routing_key)
        if reading.destination is not None:
            headers[DESTINATION] = reading.destination
        if reading.due_at is not None:
            headers[DUE_AT] = reading.due_at.isoformat(timespec="microseconds")
        written = again(taken.original, headers, self._user)
        # it is to wait here until somebody looks
        written.expiration = None
        self._channel.basic_publish("", queue, taken.body, written, mandatory=True)
