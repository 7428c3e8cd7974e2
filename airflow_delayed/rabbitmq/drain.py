"""Draining a queue: each message is taken from it, rewritten for its next publish, sent, and counted.

A message is acknowledged once its copy is confirmed: at its destination, or at the end of its own queue.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pika.exceptions import AMQPError, NackError, UnroutableError

from airflow_delayed.delivery import Clock
from airflow_delayed.errors import TransportUnavailable, one_line, some
from airflow_delayed.message import DelayedMessage
from airflow_delayed.nservicebus import nservicebus_time
from airflow_delayed.rabbitmq.connection import describe_error
from airflow_delayed.rabbitmq.levels import split_key
from airflow_delayed.rabbitmq.properties import (
    BROKERS_OWN,
    DELIVERY_COUNT,
    DESTINATION,
    DUE_AT,
    ORIGINAL_KEY,
    ReceivedProperties,
    text,
)
from airflow_delayed.rabbitmq.topology import NSERVICEBUS_DELAY, NSERVICEBUS_TIME_SENT, HeaderStyle
from airflow_delayed.rabbitmq.waiting import Reading, read_waited
from airflow_delayed.rabbitmq.wire import properties_max

if TYPE_CHECKING:
    from pika import BasicProperties
    from pika.adapters.blocking_connection import BlockingConnection

log = logging.getLogger(__name__)

#: Headers that the broker would read as further queues, and its own count.
_LEFT_OUT = frozenset(["CC", "BCC", DELIVERY_COUNT])
#: Headers of a message's earlier way through a broker.
_PASSED = BROKERS_OWN | {DELIVERY_COUNT, ORIGINAL_KEY, NSERVICEBUS_DELAY, "CC", "BCC"}
_LOG_SECONDS = 10.0
#: Seconds to wait for messages to be back in their queue.
_RETURN_SECONDS = 10.0
#: A message that was returned this often is sent alone: after the messages before it are confirmed, before the next.
RETURNS = 3


@dataclass(slots=True)
class RedriveReport:
    """The result of ``redrive``, or with ``dry_run`` the messages that it would send.

    :param topology: the topology and the connection.
    :param moved: how many messages the broker confirmed; they were removed from their queue.
    :param by_destination: the same by destination.
    :param remaining: how many were put back at the end of their queue, by reason.
    :param waiting: how many were in the queue at the start; nothing for an empty queue.
    :param destinations: in a dry run: how many messages there are, by destination.
    :param problems: destinations to which nothing would be sent, each with the reason.
    """

    topology: str
    moved: int = 0
    dry_run: bool = False
    by_destination: dict[str, int] = field(default_factory=dict)
    remaining: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, int] = field(default_factory=dict)
    destinations: dict[str, int] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    def add(self, destination: str) -> None:
        """Count a message that was moved."""
        self.moved += 1
        _count(self.by_destination, destination)

    def add_destination(self, destination: str, problem: str | None) -> None:
        """Count a message that would be moved, unless its destination has a problem."""
        _count(self.destinations, destination)
        if problem is not None:
            self.problems[destination] = problem

    def add_remaining(self, reason: str) -> None:
        """Count a message that was put back."""
        _count(self.remaining, reason)

    def __str__(self) -> str:
        waiting = f"{_total(self.waiting):,} waiting{_list(self.waiting)}"
        if self.dry_run:
            parts = [f"{self.topology}: would move up to {waiting}"]
            good = {name: count for name, count in self.destinations.items() if name not in self.problems}
            bad = {self.problems[name]: count for name, count in self.destinations.items() if name in self.problems}
            if good:
                parts.append(f"would send{_list(good)}")
            if bad or self.remaining:
                parts.append(f"would leave{_list(bad | self.remaining)}")
            return "; ".join(parts)
        parts = [f"{self.topology}: moved {self.moved:,}{_list(self.by_destination)}"]
        if self.remaining:
            parts.append(f"remaining {_total(self.remaining):,}{_list(self.remaining)}")
        return "; ".join(parts)


def _count(counts: dict[str, int], name: str) -> None:
    counts[name] = counts.get(name, 0) + 1


def _total(counts: Mapping[str, int]) -> int:
    return sum(counts.values())


def _list(counts: Mapping[str, int]) -> str:
    return f" ({some([f'{name}: {count:,}' for name, count in counts.items()], separator=', ')})" if counts else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainedMessage(DelayedMessage):
    """A message that was taken from a queue and is not acknowledged there.

    Unlike a user's message it is not checked: its id may be missing (then it is empty here and stays missing in the
    broker). Its headers are in the original properties alone, and need not be text.
    """

    original: ReceivedProperties = field(repr=False)
    queue: str
    routing_key: str
    delivery_tag: int

    def __post_init__(self) -> None:
        """Check nothing: the message has been through a broker already."""

    @property
    def returns(self) -> int:
        """How often the message was returned to its queue, as quorum queues count."""
        count = (self.original.headers or {}).get(DELIVERY_COUNT, 0)
        return count if isinstance(count, int) else 0


class DrainedPropertiesWriter:
    """Writes the properties of :class:`DrainedMessage`: as they were, with destination and due time of the new way.

    ``expiration`` stays only on a message that is due, since in a delay level it would fire first; the broker itself
    removes it at the first level. ``user_id`` stays if it is that of the logged-in user, since the broker refuses
    another.

    :param style: of the headers, as in :class:`airflow_delayed.rabbitmq.properties.MessagePropertiesWriter`.
    :param user: the name of the logged-in user.
    """

    def __init__(self, style: HeaderStyle, user: str | None) -> None:
        self._style = style
        self._user = user

    def properties(
        self, message: DelayedMessage, now: datetime, delay_seconds: int, level: str | None = None
    ) -> BasicProperties:
        """Return the properties to publish; arguments as in :class:`~.properties.MessagePropertiesWriter`."""
        if not isinstance(message, DrainedMessage):
            raise TypeError("only what was taken from a queue has properties to keep")
        headers: dict[str, Any] = {
            DUE_AT: message.due_at.isoformat(timespec="microseconds"),
            DESTINATION: message.destination,
        }
        if self._style == "nservicebus" and delay_seconds > 0:
            # NServiceBus's tools add the delay to the time sent
            headers[NSERVICEBUS_DELAY] = delay_seconds
            headers[NSERVICEBUS_TIME_SENT] = nservicebus_time(now)
        if level:
            headers["BCC"] = [level]
        return message.original.again(without=_PASSED, added=headers, user=self._user, expires=delay_seconds <= 0)


class QueueEnd:
    """Puts messages back at the end of the queue that they came from, each confirmed before the next.

    A message is not returned: a quorum queue counts that, and lets a message go after the twentieth time.

    :param user: the name of the logged-in user.
    """

    def __init__(self, connection: BlockingConnection, user: str | None) -> None:
        self._channel = connection.channel()
        self._channel.confirm_delivery()
        self._user = user
        # the largest frame that was agreed upon; pika's blocking connection does not expose it
        inner: Any = vars(connection)["_impl"]
        self._most = properties_max(inner.params.frame_max)

    def put(self, message: DrainedMessage, reading: Reading) -> None:
        """Publish a message to the end of its queue.

        :raises pika.exceptions.AMQPError: the queue did not take it.
        """
        original, added = message.original, dict[str, str]()
        if split_key(message.routing_key) or ORIGINAL_KEY not in (original.headers or {}):
            added[ORIGINAL_KEY] = message.routing_key
        if reading.destination is not None:
            added[DESTINATION] = reading.destination
        if reading.due_at is not None:
            added[DUE_AT] = reading.due_at.isoformat(timespec="microseconds")
        # if a frame has no room for all headers, leave out the broker's own headers, and then the headers added here
        without = _LEFT_OUT | BROKERS_OWN
        for left_out, written in ((_LEFT_OUT, added), (without, added), (without, {})):
            # it has to wait there until somebody looks at it, so it must not expire
            properties = original.again(without=left_out, added=written, user=self._user, expires=False)
            if sum(map(len, properties.encode())) <= self._most:
                break
        if not written:
            log.warning(
                "message %s of queue %r: its headers leave no room for ours; it stays there without them (%s)",
                one_line(message.message_id),
                message.queue,
                one_line(str(added)),
            )
        self._channel.basic_publish("", message.queue, message.body, properties, mandatory=True)


class QueueDrainer:
    """Takes messages from a queue, and counts in the report how many were moved or put back.

    :param conn_id: names the connection in errors.
    """

    def __init__(
        self,
        connection: BlockingConnection,
        report: RedriveReport,
        *,
        conn_id: str,
        user: str | None,
        clock: Clock,
    ) -> None:
        #: Messages that were taken and are not elsewhere yet, by delivery tag.
        self.unsettled: dict[int, tuple[DrainedMessage, Reading]] = {}
        self._connection = connection
        self._report = report
        self._conn_id = conn_id
        self._clock = clock
        self._channel = connection.channel()
        self._end = QueueEnd(connection, user)
        self._lost: AMQPError | None = None
        self._next_log = time.monotonic() + _LOG_SECONDS

    def count(self, queue: str) -> int:
        """Return how many messages are ready in a queue."""
        found: int = self._channel.queue_declare(queue, passive=True).method.message_count
        return found

    def take(self, queue: str, limit: int | None = None) -> Iterator[tuple[DrainedMessage, Reading]]:
        """Take as many messages as are in the queue.

        :raises TransportUnavailable: the connection was lost.
        """
        count = self.count(queue)
        for _ in range(count if limit is None else min(limit, count)):
            self.check()
            found = self._get(queue)
            if found is None:
                break
            self.unsettled[found[0].delivery_tag] = found
            yield found

    def _get(self, queue: str) -> tuple[DrainedMessage, Reading] | None:
        method, properties, body = self._channel.basic_get(queue)
        if method is None or properties is None or body is None:
            return None
        now, key, original = self._clock(), text(method.routing_key or ""), ReceivedProperties.of(properties)
        reading = read_waited(original, key, now=now)
        if original.problem is not None:
            reading = replace(reading, problem=original.problem)
        message = DrainedMessage(
            destination=reading.destination or "",
            body=body,
            due_at=reading.due_at or now,
            message_id=original.message_id or "",
            original=original,
            queue=queue,
            routing_key=key,
            delivery_tag=method.delivery_tag or 0,
        )
        return message, reading

    def done(self, message: DrainedMessage) -> None:
        """Acknowledge a message that the target has confirmed."""
        try:
            self._channel.basic_ack(message.delivery_tag)
        except AMQPError as error:
            # the message is in the target, and will be moved again with the same id
            self._lost = self._lost or error
            return
        self._report.add(message.destination)
        self._count(message)

    def reject(self, message: DrainedMessage, reading: Reading, reason: str) -> None:
        """Put a message that cannot be moved back to the end of its queue.

        :raises TransportUnavailable: the queue does not take it.
        """
        with self._refusals():
            self._end.put(message, reading)
        self._report.add_remaining(reason)
        self._channel.basic_ack(message.delivery_tag)
        self._count(message)

    def release(self, message: DrainedMessage, reading: Reading) -> None:
        """Leave a message of a dry run in its queue.

        ``settle`` returns it. If that return would be its third (:data:`RETURNS`), a copy goes to the end of the queue
        instead, so that the count starts again.

        :raises TransportUnavailable: the queue does not take it.
        """
        del self.unsettled[message.delivery_tag]
        if message.returns + 1 >= RETURNS:
            with self._refusals():
                self._end.put(message, reading)
            self._channel.basic_ack(message.delivery_tag)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except (UnroutableError, NackError) as error:
            raise TransportUnavailable(
                f"connection {self._conn_id!r}: the queue does not take back what cannot be moved; is it full, or"
                " without a leader?"
            ) from error

    def settle(self, queue: str, count: int) -> None:
        """Return the released messages, and wait until so many are ready in the queue again."""
        self._channel.basic_nack(multiple=True, requeue=True)
        deadline = time.monotonic() + _RETURN_SECONDS
        while self.count(queue) < count and time.monotonic() < deadline:
            self.sleep(0.05)

    def _count(self, message: DrainedMessage) -> None:
        del self.unsettled[message.delivery_tag]
        if time.monotonic() >= self._next_log:
            self._next_log = time.monotonic() + _LOG_SECONDS
            log.info("%s so far", self._report)

    def check(self) -> None:
        """Check that the connection was not lost.

        :raises TransportUnavailable: it was.
        """
        if self._lost is not None:
            raise TransportUnavailable(
                f"connection {self._conn_id!r}: {describe_error(self._lost)}. {self._report.moved:,} messages were"
                " moved; run it again for the rest"
            ) from self._lost

    def sleep(self, seconds: float) -> None:
        """Wait, and keep the connection alive."""
        end = time.monotonic() + seconds
        try:
            self._connection.sleep(seconds)
        except AMQPError as error:
            self._lost = self._lost or error
            time.sleep(max(0.0, end - time.monotonic()))
