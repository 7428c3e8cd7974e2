"""Redrive: messages that no destination took are taken from their queue and sent again, one at a time.

A message is acknowledged in its queue once its copy is confirmed: at its destination, or at the end of the same queue.
So a redrive that is killed loses nothing: started again, it sends the rest, and the unacknowledged message again with
the same id. It returns at most that one, because a quorum queue lets a message go after twenty returns.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pika.exceptions import AMQPConnectionError, NackError, UnroutableError

from airflow_delayed.delivery import Clock, Finding, State, TopologyReport
from airflow_delayed.errors import (
    InputError,
    InvalidMessage,
    LimitExceeded,
    SendFailed,
    TopologyError,
    TransportUnavailable,
    one_line,
    some,
)
from airflow_delayed.message import DelayedMessage, delay_seconds, parse_moment
from airflow_delayed.nservicebus import nservicebus_time
from airflow_delayed.rabbitmq import declare
from airflow_delayed.rabbitmq.connection import describe_error
from airflow_delayed.rabbitmq.levels import DelayDigits
from airflow_delayed.rabbitmq.management import BindingFacts, Facts
from airflow_delayed.rabbitmq.properties import BROKERS_OWN, DESTINATION, DUE_AT, ReceivedProperties, text
from airflow_delayed.rabbitmq.publisher import Publisher
from airflow_delayed.rabbitmq.topology import NSERVICEBUS_DELAY, NSERVICEBUS_TIME_SENT, HeaderStyle, Topology
from airflow_delayed.rabbitmq.wire import properties_max

if TYPE_CHECKING:
    from pika import BasicProperties
    from pika.adapters.blocking_connection import BlockingConnection
    from pika.connection import Parameters

log = logging.getLogger(__name__)

#: Header of a message put back: its routing key before that.
_ORIGINAL_KEY = "airflow-delayed-routing-key"
#: Header in which a quorum queue counts how often a message was returned.
_DELIVERY_COUNT = "x-delivery-count"
#: Headers that the broker would read as further queues, and its own count.
_LEFT_OUT = frozenset(["CC", "BCC", _DELIVERY_COUNT])
#: Headers of a message's earlier way through a broker.
_PASSED = BROKERS_OWN | _LEFT_OUT | {_ORIGINAL_KEY, NSERVICEBUS_DELAY}
#: A dry run puts a message that would be returned this often at the end of its queue, where the count starts again.
_RETURNS = 3
#: Seconds to wait for returned messages to be back in their queue.
_RETURN_SECONDS = 10.0
_LOG_SECONDS = 10.0
_NO_QUEUE = (
    "on topologies that others declare too, the queue for what is unroutable comes with unroutable_policy=True alone"
)
#: Texts of a session's errors for which the message itself is at fault.
_AT_FAULT = ("PRECONDITION_FAILED", "not to be written as AMQP")


@dataclass(slots=True)
class RedriveReport:
    """The result of ``redrive``, or with ``dry_run`` the messages that it would send.

    :param topology: the topology and the connection.
    :param by_destination: how many messages the broker confirmed; they were removed from their queue.
    :param remaining: how many were put back at the end of their queue, by reason.
    :param waiting: how many were in the queue at the start; nothing for an empty queue.
    :param destinations: in a dry run: how many messages there are, by destination.
    :param problems: destinations to which nothing would be sent, each with the reason.
    """

    topology: str
    dry_run: bool = False
    by_destination: dict[str, int] = field(default_factory=dict)
    remaining: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, int] = field(default_factory=dict)
    destinations: dict[str, int] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    @property
    def moved(self) -> int:
        """How many messages were sent, and removed from their queue."""
        return sum(self.by_destination.values())

    def __str__(self) -> str:
        if self.dry_run:
            parts = [f"{self.topology}: would move up to {sum(self.waiting.values()):,} waiting{_list(self.waiting)}"]
            good = {name: count for name, count in self.destinations.items() if name not in self.problems}
            bad = {self.problems[name]: count for name, count in self.destinations.items() if name in self.problems}
            if good:
                parts.append(f"would send{_list(good)}")
            if bad or self.remaining:
                parts.append(f"would leave{_list(bad | self.remaining)}")
            return "; ".join(parts)
        parts = [f"{self.topology}: moved {self.moved:,}{_list(self.by_destination)}"]
        if self.remaining:
            parts.append(f"remaining {sum(self.remaining.values()):,}{_list(self.remaining)}")
        return "; ".join(parts)


def _list(counts: Mapping[str, int]) -> str:
    return f" ({some([f'{name}: {count:,}' for name, count in counts.items()], separator=', ')})" if counts else ""


def _count(counts: dict[str, int], name: str) -> None:
    counts[name] = counts.get(name, 0) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenMessage(DelayedMessage):
    """A message that was taken from its queue and is not acknowledged there.

    Unlike a user's message it is not checked: its id may be missing (then it is empty here and stays missing in the
    broker). Its headers are in the original properties alone, and need not be text.

    :param due: the due time that it states; None if it states none.
    :param problem: why it cannot be sent, whatever there is at the broker; None if it can.
    """

    original: ReceivedProperties = field(repr=False)
    routing_key: str
    due: datetime | None
    problem: str | None

    def __post_init__(self) -> None:
        """Check nothing: the message has been through a broker already."""


def read_taken(found: BasicProperties, key: str, body: bytes, digits: DelayDigits, now: datetime) -> TakenMessage:
    """Read a message that no destination took.

    A message that came out of the levels, which its routing key shows, has waited: it is due unless this package's
    header states a later time. Any other message has to have that header.
    """
    original = ReceivedProperties.of(found)
    headers: Mapping[str, Any] = original.headers or {}
    before, stated = headers.get(_ORIGINAL_KEY), headers.get(DESTINATION)
    from_levels = digits.split_key(key)
    split = from_levels or (digits.split_key(before) if isinstance(before, str) else None)
    destination = split[1] if split else stated if isinstance(stated, str) else ""
    due, problem = now if from_levels else None, original.problem
    try:
        due = parse_moment(DUE_AT, headers.get(DUE_AT))
    except InvalidMessage:
        problem = problem or (None if due else "no header tells when it is due")
    if not destination:
        problem = original.problem or "neither its routing key nor a header tells its destination"
    return TakenMessage(
        destination=destination,
        body=body,
        due_at=due or now,
        message_id=original.message_id or "",
        original=original,
        routing_key=key,
        due=due,
        problem=problem,
    )


class _TakenPropertiesWriter:
    """Writes the properties of taken messages: as they were, with destination and due time of the new way.

    ``expiration`` stays only on a message that is due, since in a delay level it would fire first; the broker itself
    removes it at the first level.
    """

    def __init__(self, style: HeaderStyle, user: str | None) -> None:
        self._style = style
        self._user = user

    def properties(
        self, message: DelayedMessage, now: datetime, delay_seconds: int, level: str | None = None
    ) -> BasicProperties:
        assert isinstance(message, TakenMessage)
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


class Redriver:
    """Takes messages from one queue and sends them to their destinations; each object for one call.

    It sends to destinations that are bound already, or that its caller has named. That a message names a queue is not
    enough: to bind that queue would open it to everybody who may write to the delivery exchange.

    :param hosts: at least one; the user is the same at all.
    :param facts: what the management API shows.
    :param destinations: the only ones to send to, bound or not; None: all that are bound.
    """

    def __init__(
        self,
        queue: str,
        connection: BlockingConnection,
        hosts: Sequence[Parameters],
        facts: Facts,
        *,
        conn_id: str,
        topology: Topology,
        destinations: Collection[str] | None,
        clock: Clock,
    ) -> None:
        self._queue = queue
        self._connection = connection
        self._hosts = hosts
        self._facts = facts
        self._conn_id = conn_id
        self._topology = topology
        self._named = None if destinations is None else frozenset(destinations)
        existing = facts.queues if topology.routing == "direct" else facts.exchanges
        #: All queues, or with conventional routing exchanges; None if it is unknown which of them are bound.
        self._existing = None if facts.bindings is None else existing
        self._clock = clock
        # None if a certificate names the user
        self._user: str | None = getattr(hosts[0].credentials, "username", None)
        self._problems: dict[str, str | None] = {}
        self._report = RedriveReport(f"{topology.name} of connection {conn_id!r}")

    def redrive(self, limit: int | None, *, dry_run: bool) -> RedriveReport:
        """Send each message that is in the queue at the start, or put it at the queue's end if that is impossible.

        :raises TopologyError: the queue does not exist, or the delay levels are not as planned.
        :raises TransportUnavailable: a connection was lost; messages that were not sent are in their queue. Or no
            destinations are named, and the management API does not show which are bound.
        :raises SendFailed: the broker did not take a message; it is in its queue.
        """
        self._report.dry_run = dry_run
        self._require()
        self._channel = self._connection.channel()
        self._end = self._connection.channel()
        self._end.confirm_delivery()
        if count := self._ready():
            self._report.waiting[self._queue] = count
        taken = self._take(count if limit is None else min(limit, count))
        if dry_run:
            self._preview(taken, count)
        else:
            self._send(taken)
        return self._report

    def _require(self) -> None:
        (found,) = declare.compare(self._connection, [_queue(self._queue)])
        if found.state is State.MISSING:
            missing = TopologyReport((Finding(state=State.MISSING, resource=f"queue {self._queue}"),))
            raise TopologyError(self._conn_id, missing, _NO_QUEUE, topology=self._topology.name)
        report = TopologyReport(declare.compare(self._connection, declare.plan(self._topology)))
        if report.problems:
            raise TopologyError(self._conn_id, report, topology=self._topology.name)
        if self._named is None and self._existing is None and not self._report.dry_run:
            raise TransportUnavailable(
                f"connection {self._conn_id!r}: which destinations are bound, the management API alone tells:"
                f" {self._facts.why}. Name the allowed destinations: destinations=[...]. Nothing was moved"
            )

    def _ready(self) -> int:
        found: int = self._channel.queue_declare(self._queue, passive=True).method.message_count
        return found

    def _take(self, count: int) -> Iterator[tuple[TakenMessage, int]]:
        """Yield messages, each with its delivery tag."""
        for _ in range(count):
            method, properties, body = self._channel.basic_get(self._queue)
            if method is None or properties is None or body is None:
                break
            key = text(method.routing_key or "")
            yield read_taken(properties, key, body, self._topology.digits, self._clock()), method.delivery_tag or 0

    def _preview(self, taken: Iterator[tuple[TakenMessage, int]], count: int) -> None:
        """Count where the messages would go, and return them to their queue."""
        for message, tag in taken:
            if own := self._own_problem(message):
                _count(self._report.remaining, own)
            else:
                _count(self._report.destinations, message.destination)
                if problem := self._problem_of(message.destination):
                    self._report.problems[message.destination] = problem
            returns = (message.original.headers or {}).get(_DELIVERY_COUNT, 0)
            if isinstance(returns, int) and returns + 1 >= _RETURNS:
                self._put_at_end(message, tag)
        self._channel.basic_nack(multiple=True, requeue=True)
        deadline = time.monotonic() + _RETURN_SECONDS
        while self._ready() < count and time.monotonic() < deadline:
            self._connection.sleep(0.05)

    def _send(self, taken: Iterator[tuple[TakenMessage, int]]) -> None:
        writer = _TakenPropertiesWriter(self._topology.headers, self._user)
        publisher = Publisher(
            self._hosts, conn_id=self._conn_id, topology=self._topology, clock=self._clock, writer=writer, keep=True
        )
        logged = time.monotonic()
        try:
            for message, tag in taken:
                if reason := self._problem(message) or self._try(publisher, message):
                    self._put_at_end(message, tag)
                    _count(self._report.remaining, reason)
                else:
                    # if this fails, the message is at its destination, and will be sent again with the same id
                    self._channel.basic_ack(tag)
                    _count(self._report.by_destination, message.destination)
                if time.monotonic() >= logged + _LOG_SECONDS:
                    logged = time.monotonic()
                    log.info("%s so far", self._report)
        except AMQPConnectionError as error:
            raise TransportUnavailable(
                f"connection {self._conn_id!r}: {describe_error(error)}. {self._report.moved:,} messages were moved;"
                " run it again for the rest"
            ) from error
        finally:
            publisher.close()

    def _try(self, publisher: Publisher, message: TakenMessage) -> str | None:
        """Send a message; return why the broker refuses it, if by the message's or the destination's fault."""
        try:
            publisher.send([message])
        except (SendFailed, InputError) as error:
            self._problems.pop(message.destination, None)
            if reason := self._problem(message):
                return reason
            if isinstance(error, LimitExceeded) or any(each in str(error) for each in _AT_FAULT):
                return str(error.failures[0][1] if isinstance(error, SendFailed) else error)
            raise
        return None

    def _put_at_end(self, message: TakenMessage, tag: int) -> None:
        """Publish a copy to the end of the queue, and acknowledge the message when that is confirmed.

        :raises TransportUnavailable: the queue does not take it.
        """
        original, added = message.original, dict[str, str]()
        if self._topology.digits.split_key(message.routing_key) or _ORIGINAL_KEY not in (original.headers or {}):
            added[_ORIGINAL_KEY] = message.routing_key
        if message.destination:
            added[DESTINATION] = message.destination
        if message.due is not None:
            added[DUE_AT] = message.due.isoformat(timespec="microseconds")
        # the largest frame that was agreed upon; pika's blocking connection does not expose it
        inner: Any = vars(self._connection)["_impl"]
        # if a frame has no room for all headers, leave out the broker's own headers, and then the headers added here
        for without, written in ((_LEFT_OUT, added), (_LEFT_OUT | BROKERS_OWN, added), (_LEFT_OUT | BROKERS_OWN, {})):
            # it has to wait there until somebody looks at it, so it must not expire
            properties = original.again(without=without, added=written, user=self._user, expires=False)
            if sum(map(len, properties.encode())) <= properties_max(inner.params.frame_max):
                break
        if not written:
            log.warning(
                "message %s of queue %r: its headers leave no room for ours; it stays there without them (%s)",
                one_line(message.message_id),
                self._queue,
                one_line(str(added)),
            )
        try:
            self._end.basic_publish("", self._queue, message.body, properties, mandatory=True)
        except (UnroutableError, NackError) as error:
            raise TransportUnavailable(
                f"connection {self._conn_id!r}: the queue does not take back what cannot be moved; is it full, or"
                " without a leader?"
            ) from error
        self._channel.basic_ack(tag)

    def _problem(self, message: TakenMessage) -> str | None:
        return self._own_problem(message) or self._problem_of(message.destination)

    def _own_problem(self, message: TakenMessage) -> str | None:
        try:
            self._topology.digits.check_delay(delay_seconds(message.due_at, self._clock()))
        except LimitExceeded as error:
            return message.problem or str(error)
        return message.problem

    def _problem_of(self, destination: str) -> str | None:
        if destination not in self._problems:
            self._problems[destination] = self._look_for_problem(destination)
        return self._problems[destination]

    def _look_for_problem(self, destination: str) -> str | None:
        if self._named is not None and destination not in self._named:
            return f"destination {destination!r}: not among destinations=[...]"
        # the broker is not asked for each name that somebody may have made up
        if self._named is None and self._existing is not None and destination not in self._existing:
            return f"destination {destination!r}: missing"
        try:
            key = self._topology.binding_key(destination)
        except LimitExceeded as error:
            return str(error)
        is_queue = self._topology.routing == "direct"
        part = _queue(destination) if is_queue else declare.Exchange(destination, "fanout", destination=True)
        (found,) = declare.compare(self._connection, [part])
        if found.state is not State.OK:
            return f"destination {destination!r}: {'missing' if found.state is State.MISSING else found.found}"
        way = BindingFacts(self._topology.delivery_exchange, destination, is_queue, key)
        if self._named is not None or (self._existing is not None and way in (self._facts.bindings or ())):
            return None
        how = "not bound" if self._existing is not None else "unknown whether bound without the management API"
        return f"destination {destination!r}: {how}; name it in destinations=[...]"


def _queue(name: str) -> declare.Queue:
    return declare.Queue(name, destination=True)
