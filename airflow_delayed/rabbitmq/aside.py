"""Putting messages that cannot be moved where they are not in the way, on the broker they came from."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from airflow_delayed.errors import one_line
from airflow_delayed.rabbitmq.frames import properties_max
from airflow_delayed.rabbitmq.properties import (
    BROKERS_OWN,
    DESTINATION,
    DUE_AT,
    ORIGINAL_KEY,
    SET_ASIDE_FROM,
    SET_ASIDE_REASON,
)
from airflow_delayed.rabbitmq.received import Reading, split_key
from airflow_delayed.rabbitmq.rewriter import DELIVERY_COUNT, Taken

if TYPE_CHECKING:
    from pika.adapters.blocking_connection import BlockingConnection

#: Durable quorum queue of the source's broker that takes what ``migrate`` cannot move.
SET_ASIDE_QUEUE = "delayed.set-aside"
#: Headers that the broker would take for further queues, and its own count.
_LEFT_OUT = frozenset(["CC", "BCC", DELIVERY_COUNT])

log = logging.getLogger(__name__)


class Aside:
    """Publishes to queues of one connection, each message confirmed before the next.

    :param user: who is logged in.
    """

    def __init__(self, connection: BlockingConnection, user: str | None) -> None:
        self._channel = connection.channel()
        self._channel.confirm_delivery()
        self._user = user
        # what was agreed upon, pika's blocking connection does not show
        inner: Any = vars(connection)["_impl"]
        self._most = properties_max(inner.params.frame_max)
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
        original = taken.original
        if split_key(taken.routing_key) or ORIGINAL_KEY not in (original.headers or {}):
            added[ORIGINAL_KEY] = taken.routing_key
        if reading.destination is not None:
            added[DESTINATION] = reading.destination
        if reading.due_at is not None:
            added[DUE_AT] = reading.due_at.isoformat(timespec="microseconds")
        # what the broker wrote on the way is the first to go if a frame has no room for ours, and then ours
        without = _LEFT_OUT | BROKERS_OWN
        for left_out, written in ((_LEFT_OUT, added), (without, added), (without, {})):
            # it is to wait here until somebody looks, so it does not expire
            properties = original.again(without=left_out, added=written, user=self._user, expires=False)
            if sum(map(len, properties.encode())) <= self._most:
                break
        if not written:
            log.warning(
                "message %s of queue %r: its headers leave no room for ours; it goes to queue %r without them (%s)",
                one_line(taken.message_id),
                taken.queue,
                queue,
                one_line(str(added)),
            )
        self._channel.basic_publish("", queue, taken.body, properties, mandatory=True)
