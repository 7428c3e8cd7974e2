"""Replies in a RabbitMQ queue: each is moved into a queue of its own, for the task that waits for it.

RabbitMQ cannot read a message in the middle of a queue. Who looks for one has to take those before it and to return
them, and a quorum queue lets a message go that was returned too often (RabbitMQ 4: after 20 times). So a reply is
searched once, by the triggerer, and moved into the queue ``<queue>.reply.<id of the message that it answers>``: it is
published there, confirmed, and then acknowledged. There a worker reads it, once more if it was killed, however many
others are in the queue of all.

- A queue is made only for an id that a task waits for, never because a message names it. So a reply that comes before
  its task waits stays in the queue of all, and so does each message that is no reply.
- These are returned after a search. A message that was returned twice goes to the end of the queue as a copy instead,
  so that its count starts again.
- A reply that no worker reads within a day goes back to the queue of all. Its queue is deleted when it was handled. It
  is not deleted when a wait ends without a reply, for one may be on its way into it; it ends after two unused days.
- Whoever waits searches for its own ids. Several triggerers side by side only take turns.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from pika.exceptions import AMQPError, ChannelClosedByBroker, NackError, UnroutableError

from airflow_delayed.errors import LimitExceeded, TransportUnavailable, one_line
from airflow_delayed.rabbitmq.connection import connect, describe_error, muted_pika
from airflow_delayed.rabbitmq.declare import ACCESS_REFUSED, NOT_FOUND
from airflow_delayed.rabbitmq.properties import BROKERS_OWN, DELIVERY_COUNT, ReceivedProperties, text
from airflow_delayed.replies import Reply, ReplyQueue, answered

if TYPE_CHECKING:
    from pika import BlockingConnection, ConnectionParameters
    from pika.adapters.blocking_connection import BlockingChannel

log = logging.getLogger(__name__)

#: Between the name of the queue of all and an id.
INFIX = ".reply."
#: Bytes of the longest name of a queue.
_LONGEST_NAME = 255
#: Seconds after which a reply that nobody reads goes back, and a queue that nobody uses ends. A queue is used when
#: something is taken from it, which happens before each reply is put into it; so no reply ends with its queue.
_KEPT, _UNUSED = 86_400, 2 * 86_400
#: A message that was returned so often is copied.
_RETURNS = 3
#: Seconds between two searches of a queue to which nothing seems to have come.
_SEARCH_AGAIN = 30.0
#: Seconds to wait for a reply that was returned to its queue.
_RETURNING = 10.0
_LEFT_OUT = BROKERS_OWN | {DELIVERY_COUNT, "CC", "BCC"}


class RabbitMQReplyQueue(ReplyQueue):
    """A queue of replies.

    :param conn_id: names the connection in errors.
    :param queue: the queue of all.
    :param hosts: returns the hosts to try; called for each new connection.
    """

    def __init__(
        self,
        conn_id: str,
        queue: str,
        hosts: Callable[[], Sequence[ConnectionParameters]],
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._conn_id = conn_id
        self._queue = queue
        self._hosts = hosts
        self._monotonic = monotonic
        self._connection: BlockingConnection | None = None
        self._user: str | None = None
        #: The ids of the last search, how many messages it left, and when it ended.
        self._searched: frozenset[str] = frozenset()
        self._left = 0
        self._searched_at = 0.0

    def collect(self, ids: Collection[str]) -> dict[str, str]:
        """Move replies into queues of their own, and return the keys of the replies that are there, by id.

        The queue of all is searched if messages have come, if an id is new, and every half minute.
        """
        wanted = frozenset(ids)
        with self._channel() as channel:
            there = {message_id for message_id in wanted if self._declare(channel, message_id)}
            count = self._count(channel)
            late = self._monotonic() - self._searched_at >= _SEARCH_AGAIN
            if count and (late or count > self._left or not wanted <= self._searched):
                there |= self._search(channel, count, wanted)
            self._searched = wanted
            found = {message_id: self._first(channel, message_id) for message_id in there}
        return {message_id: _key(reply) for message_id, reply in found.items() if reply is not None}

    def collected(self, message_id: str) -> str | None:
        """Return the key of a reply in its own queue, and check that the queue of all is there."""
        with self._channel() as channel:
            self._count(channel)
            there = self._declare(channel, message_id)
            reply = self._first(channel, message_id) if there else None
        return None if reply is None else _key(reply)

    def read(self, message_id: str, key: str) -> Reply | None:
        """Return the reply in its own queue."""
        with self._channel() as channel:
            self._declare(channel, message_id)
            reply = self._first(channel, message_id)
        return None if reply is None or _key(reply) != key else reply

    def remove(self, message_id: str, key: str) -> None:
        """Acknowledge the reply, and delete its own queue if nothing else is in it."""
        name = self._name(message_id)
        with self._channel() as channel:
            self._declare(channel, message_id)
            # the reply may still be on its way back from who has read it
            deadline = self._monotonic() + _RETURNING
            removed = others = False
            while not removed:
                method, properties, body = channel.basic_get(name)
                if method is None or properties is None or body is None:
                    if self._monotonic() >= deadline:
                        break
                    channel.connection.sleep(0.05)
                elif _key(_reply(message_id, ReceivedProperties.of(properties), body)) == key:
                    channel.basic_ack(method.delivery_tag or 0)
                    removed = True
                else:
                    others = True
            if not removed:
                log.warning("the reply to message %s is handled, and was not in queue %r any more", message_id, name)
            # not the count: it may not have what was returned just now
            if removed and not others and channel.basic_get(name)[0] is None:
                channel.queue_delete(name)
            else:
                channel.basic_nack(multiple=True, requeue=True)

    def close(self) -> None:
        """Close the connection; what was taken and is not settled goes back to its queue."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with muted_pika(), suppress(AMQPError):
                connection.close()

    def _name(self, message_id: str) -> str:
        name = f"{self._queue}{INFIX}{message_id}"
        if len(name.encode()) > _LONGEST_NAME:
            raise LimitExceeded(
                "queue",
                f"the reply needs a queue {name!r}, and a name has at most {_LONGEST_NAME} bytes; shorten the name of"
                " the queue, or the message's id",
            )
        return name

    def _declare(self, channel: BlockingChannel, message_id: str) -> int:
        """Make the queue of a reply, and return how many messages are in it."""
        arguments = {
            "x-queue-type": "quorum",
            "x-overflow": "reject-publish",
            "x-dead-letter-strategy": "at-least-once",
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": self._queue,
            "x-message-ttl": _KEPT * 1000,
            "x-expires": _UNUSED * 1000,
        }
        found = channel.queue_declare(self._name(message_id), durable=True, arguments=arguments)
        count: int = found.method.message_count
        return count

    def _count(self, channel: BlockingChannel) -> int:
        count: int = channel.queue_declare(self._queue, passive=True).method.message_count
        return count

    def _first(self, channel: BlockingChannel, message_id: str) -> Reply | None:
        method, properties, body = channel.basic_get(self._name(message_id))
        if method is None or properties is None or body is None:
            return None
        channel.basic_nack(method.delivery_tag or 0, requeue=True)
        return _reply(message_id, ReceivedProperties.of(properties), body)

    def _search(self, channel: BlockingChannel, count: int, wanted: Collection[str]) -> set[str]:
        """Move the replies to these ids, and return the ids whose replies came; note how many messages are left."""
        moved: set[str] = set()
        left = 0
        for _ in range(count):
            method, properties, body = channel.basic_get(self._queue)
            if method is None or properties is None or body is None:
                break
            received = ReceivedProperties.of(properties)
            message_id = _answered(received, wanted)
            if message_id is not None:
                if message_id not in moved:
                    # so that its queue is in use, and does not end before the reply goes back
                    self._first(channel, message_id)
                target, expires = self._name(message_id), False
            elif _returns(received) + 1 >= _RETURNS:
                target, expires = self._queue, True
            else:
                left += 1
                continue
            copy = received.again(without=_LEFT_OUT, added={}, user=self._user, expires=expires)
            try:
                channel.basic_publish("", target, body, copy, mandatory=True)
            except (UnroutableError, NackError):
                # the queue is full, or was deleted just now
                left += 1
                continue
            channel.basic_ack(method.delivery_tag or 0)
            if message_id is None:
                left += 1
            else:
                moved.add(message_id)
                log.info("queue %r: moved a reply to message %s into its own queue", self._queue, message_id)
        channel.basic_nack(multiple=True, requeue=True)
        self._left, self._searched_at = left, self._monotonic()
        return moved

    @contextmanager
    def _channel(self) -> Iterator[BlockingChannel]:
        try:
            with muted_pika():
                if self._connection is None or not self._connection.is_open:
                    hosts = self._hosts()
                    self._connection = connect(self._conn_id, hosts)
                    self._user = getattr(hosts[0].credentials, "username", None)
                    self._searched = frozenset()
                channel = self._connection.channel()
                channel.confirm_delivery()
                yield channel
                channel.close()
        except ChannelClosedByBroker as error:
            self.close()
            raise TransportUnavailable(f"connection {self._conn_id!r}: {self._refusal(error)}") from error
        except (AMQPError, OSError) as error:
            self.close()
            raise TransportUnavailable(f"connection {self._conn_id!r}: {describe_error(error)}") from error
        except BaseException:
            # what was taken goes back to its queue
            self.close()
            raise

    def _refusal(self, error: ChannelClosedByBroker) -> str:
        if error.reply_code == ACCESS_REFUSED:
            return (
                f"the broker refused: {error.reply_text}. To wait for replies, the user needs the rights read on"
                f" {self._queue!r}, configure, write and read on the queues {self._queue + INFIX + '*'!r}, and write on"
                " amq.default"
            )
        if error.reply_code == NOT_FOUND:
            return (
                f"the broker refused: {error.reply_text}. The queue {self._queue!r} must exist before a task waits for"
                " replies in it: declare it, or have TopologyInstallOperator make it as a destination"
                " (create_destinations=True)"
            )
        return f"the broker refused: {error.reply_text}"


def _answered(received: ReceivedProperties, wanted: Collection[str]) -> str | None:
    return answered(received.headers or {}, received.correlation_id, wanted)


def _returns(received: ReceivedProperties) -> int:
    count = (received.headers or {}).get(DELIVERY_COUNT, 0)
    return count if isinstance(count, int) else 0


def _reply(message_id: str, received: ReceivedProperties, body: bytes) -> Reply:
    headers: Mapping[str, object] = received.headers or {}
    return Reply(
        message_id=text(received.message_id) if received.message_id else None,
        answers=message_id,
        body=body,
        headers={name: value for name, value in headers.items() if isinstance(value, str)},
    )


def _key(reply: Reply) -> str:
    # it is in Airflow's database and log
    return one_line(reply.message_id or "")
