"""Sending the messages of a queue again: those that no destination took.

A message is acknowledged in its queue only when the broker has confirmed it, so a redrive that is killed loses nothing:
started again, it sends the rest, and unacknowledged messages again with the same id. It keeps few messages
unacknowledged at a time and returns none, because a quorum queue lets a message go after twenty returns. A dry run does
return messages, see :meth:`airflow_delayed.rabbitmq.drain.QueueDrainer.release`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_delayed.delivery import Clock, Finding, State, TopologyReport
from airflow_delayed.errors import InputError, LimitExceeded, SendFailed, TopologyError, TransportUnavailable
from airflow_delayed.message import DelayedMessage, delay_seconds, utcnow
from airflow_delayed.rabbitmq import cluster, declare
from airflow_delayed.rabbitmq.drain import (
    RETURNS,
    DrainedMessage,
    DrainedPropertiesWriter,
    QueueDrainer,
    RedriveReport,
)
from airflow_delayed.rabbitmq.management import Facts
from airflow_delayed.rabbitmq.publisher import Publisher
from airflow_delayed.rabbitmq.topology import Topology
from airflow_delayed.rabbitmq.waiting import Reading

if TYPE_CHECKING:
    from pika.adapters.blocking_connection import BlockingConnection
    from pika.connection import Parameters

#: How many messages may be taken and not acknowledged.
_WINDOW = 32
_NO_QUEUE = (
    "on topologies that others declare too, the queue for what is unroutable comes with unroutable_policy=True alone"
)
#: Texts of a session's errors for which the message itself is at fault.
_AT_FAULT = ("PRECONDITION_FAILED", "not to be written as AMQP")


@dataclass(frozen=True, slots=True)
class BoundDestinations:
    """The names of a topology's destinations; None if the management API does not show them, with the reason."""

    existing: frozenset[str] | None = None
    bound: frozenset[str] | None = None
    why: str | None = None


@dataclass(frozen=True, slots=True)
class TopologyEndpoint:
    """A delay topology on a broker.

    :param hosts: at least one; the user is the same at all.
    :param connect: opens a connection of its own for a while.
    :param facts: asks the management API.
    """

    conn_id: str
    topology: Topology
    hosts: Sequence[Parameters]
    connect: Callable[[], AbstractContextManager[BlockingConnection]]
    facts: Callable[[], Facts]

    def __str__(self) -> str:
        return f"{self.topology.name} of connection {self.conn_id!r}"

    @property
    def user(self) -> str | None:
        """The name of the user who logs in; None if a certificate names the user."""
        return getattr(self.hosts[0].credentials, "username", None)

    def require(self) -> None:
        """Check that the delay levels exist.

        :raises TopologyError: a part is missing or differs.
        """
        with self.connect() as connection:
            report = TopologyReport(declare.compare(connection, declare.plan(self.topology)))
        if report.problems:
            raise TopologyError(self.conn_id, report, topology=self.topology.name)

    def problem(self, destination: str) -> str | None:
        """Return why a destination cannot be sent to; None if it can."""
        try:
            self.topology.check_destination(destination)
        except LimitExceeded as error:
            return str(error)
        exchange = self.topology.routing == "conventional"
        part = declare.Exchange(destination, "fanout", destination=True) if exchange else _queue(destination)
        with self.connect() as connection:
            (found,) = declare.compare(connection, [part])
        if found.state is State.OK:
            return None
        return f"destination {destination!r}: " + ("missing" if found.state is State.MISSING else str(found.found))

    def destinations(self) -> BoundDestinations:
        """Ask the management API which destinations exist, and which of them are bound."""
        facts = self.facts()
        queues = self.topology.routing == "direct"
        there = facts.queues if queues else facts.exchanges
        if facts.bindings is None or there is None:
            return BoundDestinations(why=facts.why)
        before = self.topology.binding_prefix
        ways = [each for each in facts.bindings if each.source == self.topology.delivery_exchange]
        bound = frozenset(each.target for each in ways if each.is_queue == queues and each.key == before + each.target)
        return BoundDestinations(frozenset(there), bound)

    def require_available(self, queues: Iterable[str]) -> None:
        """Check that the messages in these queues can be counted, as far as the management API shows it.

        :raises TransportUnavailable: a queue has no leader, or too few of its members run.
        """
        cluster.require_available(self.conn_id, self.facts(), queues, "Nothing was moved")

    def exists(self, queue: str) -> bool:
        """Return whether a queue exists."""
        with self.connect() as connection:
            (found,) = declare.compare(connection, [_queue(queue)])
        return found.state is not State.MISSING


def _queue(name: str) -> declare.Queue:
    return declare.Queue(name, destination=True)


class Redriver:
    """Takes messages from a queue and sends them to their destinations; each object for one call.

    It sends to destinations that are bound already, or that its caller has named. That a message names a queue is not
    enough: to bind that queue would open it to everybody who may write to the delivery exchange.

    :param destinations: the only ones to send to, bound or not; None: all that are bound.
    """

    def __init__(
        self, here: TopologyEndpoint, *, destinations: Collection[str] | None = None, clock: Clock = utcnow
    ) -> None:
        self._here = here
        self._named = None if destinations is None else frozenset(destinations)
        self._bound = BoundDestinations()
        self._clock = clock
        self._problems: dict[str, str | None] = {}
        self._report = RedriveReport(str(here))
        self._drainer: QueueDrainer
        self._alone: DrainedMessage | None = None

    def redrive(self, queue: str, *, limit: int | None = None, dry_run: bool = False) -> RedriveReport:
        """Try again to deliver messages that were unroutable: send each to its destination if that exists now.

        Each message that is in the queue at the start is tried once; if it still cannot be sent it goes to the end of
        the queue.

        :raises TopologyError: the queue does not exist, or the delay levels are not as planned.
        :raises TransportUnavailable: a connection was lost; messages that were not sent are in their queue. Or that
            has no leader. Or no destinations are named, and the management API does not show which are bound.
        :raises SendFailed: the broker did not take some; they are in their queue.
        """
        self._here.require_available([queue])
        if not self._here.exists(queue):
            missing = TopologyReport((Finding(state=State.MISSING, resource=f"queue {queue}"),))
            raise TopologyError(self._here.conn_id, missing, _NO_QUEUE, topology=self._here.topology.name)
        self._here.require()
        self._ask_bound(dry_run=dry_run)
        with self._here.connect() as connection:
            self._drainer = QueueDrainer(
                connection, self._report, conn_id=self._here.conn_id, user=self._here.user, clock=self._clock
            )
            if count := self._drainer.count(queue):
                self._report.waiting[queue] = count
            if dry_run:
                self._preview(queue, limit)
            else:
                self._send(self._drainer.take(queue, limit))
        self._report.dry_run = dry_run
        return self._report

    def _ask_bound(self, *, dry_run: bool) -> None:
        """Learn which destinations are bound, if none are named; a dry run goes on without."""
        if self._named is not None:
            return
        self._bound = self._here.destinations()
        if self._bound.bound is None and not dry_run:
            raise TransportUnavailable(
                f"connection {self._here.conn_id!r}: which destinations are bound, the management API alone tells:"
                f" {self._bound.why}. Name the allowed destinations: destinations=[...]. Nothing was moved"
            )

    def _preview(self, queue: str, limit: int | None) -> None:
        """Count where the messages of a queue would go, and leave them there."""
        for message, reading in self._drainer.take(queue, limit):
            own = reading.problem or self._beyond(message)
            if own is not None:
                self._report.add_remaining(own)
            else:
                self._report.add_destination(message.destination, self._problem_of(message.destination))
            self._drainer.release(message, reading)
        self._drainer.settle(queue, self._report.waiting.get(queue, 0))

    def _send(self, drained: Iterator[tuple[DrainedMessage, Reading]]) -> None:
        """Send all messages; a message that was returned often waits for the messages before it, and is sent alone."""
        publisher = Publisher(
            self._here.hosts,
            conn_id=self._here.conn_id,
            topology=self._here.topology,
            clock=self._clock,
            window=_WINDOW,
            sleep=self._drainer.sleep,
            writer=DrainedPropertiesWriter(self._here.topology.headers, self._here.user),
            on_confirm=self._on_confirm,
        )
        more = True
        while more:
            try:
                publisher.send(self._until_alone(drained))
            except (SendFailed, InputError):
                self._send_alone(publisher)
                continue
            more = self._alone is not None
            if self._alone:
                self._alone = None
                self._send_alone(publisher)
        self._drainer.check()

    def _until_alone(self, drained: Iterator[tuple[DrainedMessage, Reading]]) -> Iterator[DrainedMessage]:
        for message, reading in drained:
            reason = reading.problem or self._problem(message)
            if reason is not None:
                self._drainer.reject(message, reading, reason)
                continue
            if message.returns >= RETURNS:
                self._alone = message
                return
            yield message

    def _send_alone(self, publisher: Publisher) -> None:
        """Send unsettled messages one at a time; reject the messages that the broker refuses by their own fault."""
        for message, reading in list(self._drainer.unsettled.values()):
            self._drainer.check()
            try:
                publisher.send([message])
            except (SendFailed, InputError) as error:
                self._problems.pop(message.destination, None)
                reason = self._problem(message)
                if reason is None and (isinstance(error, LimitExceeded) or any(t in str(error) for t in _AT_FAULT)):
                    reason = str(error.failures[0][1] if isinstance(error, SendFailed) else error)
                if reason is None:
                    raise
                self._drainer.reject(message, reading, reason)

    def _problem(self, message: DrainedMessage) -> str | None:
        return self._beyond(message) or self._problem_of(message.destination)

    def _beyond(self, message: DrainedMessage) -> str | None:
        try:
            self._here.topology.digits.check_delay(delay_seconds(message.due_at, self._clock()))
        except LimitExceeded as error:
            return str(error)
        return None

    def _problem_of(self, destination: str) -> str | None:
        if self._named is not None and destination not in self._named:
            return f"destination {destination!r}: not among destinations=[...]"
        # the broker is not asked for each name that somebody may have made up
        if self._named is None and self._bound.existing is not None and destination not in self._bound.existing:
            return f"destination {destination!r}: missing"
        if destination not in self._problems:
            self._problems[destination] = self._here.problem(destination) or self._unbound(destination)
        return self._problems[destination]

    def _unbound(self, destination: str) -> str | None:
        bound = self._bound.bound
        if self._named is not None or (bound is not None and destination in bound):
            return None
        how = "not bound" if bound is not None else "unknown whether bound without the management API"
        return f"destination {destination!r}: {how}; name it in destinations=[...]"

    def _on_confirm(self, message: DelayedMessage) -> None:
        assert isinstance(message, DrainedMessage)
        self._drainer.done(message)
