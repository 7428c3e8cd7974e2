"""Moving messages that wait from the queues of one topology to another's, with the delay that remains.

A message is acknowledged in its queue only when the target has confirmed it, so a move that is killed loses nothing:
started again, it moves the rest, and unacknowledged messages again with the same id. A move keeps few messages
unacknowledged at a time and returns none, because a quorum queue lets a message go, early, after twenty returns. A dry
run of ``redrive`` does return messages, see :meth:`airflow_delayed.rabbitmq.drain.QueueDrainer.release`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import uuid4

from airflow_delayed.delivery import Clock, Finding, State, TopologyReport
from airflow_delayed.errors import InputError, LimitExceeded, SendFailed, TopologyError, TransportUnavailable
from airflow_delayed.message import DelayedMessage, delay_seconds, utcnow
from airflow_delayed.rabbitmq import cluster, declare
from airflow_delayed.rabbitmq.drain import (
    RETURNS,
    DrainedMessage,
    MovedPropertiesWriter,
    MoveReport,
    QueueDrainer,
    ReadMessage,
)
from airflow_delayed.rabbitmq.management import PLUGIN_TYPE, Facts
from airflow_delayed.rabbitmq.publisher import Publisher
from airflow_delayed.rabbitmq.topology import Topology
from airflow_delayed.rabbitmq.waiting import Reading, read, read_waited

if TYPE_CHECKING:
    from datetime import datetime

    from pika import BasicProperties
    from pika.adapters.blocking_connection import BlockingConnection
    from pika.connection import Parameters

#: How many messages may be taken and not acknowledged.
_WINDOW = 32
#: Seconds between two passes over queues that seem empty: a message between two levels is in neither.
_SETTLE_SECONDS = 0.5
_NO_QUEUE = (
    "on topologies that others declare too, the queue for what is unroutable comes with unroutable_policy=True alone;"
    " delayed.set-aside is there once migrate() has parked a message"
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
class MigrationEndpoint:
    """One end of a move: a delay topology on a broker.

    :param conn_id: names the connection in errors.
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

    def require_available(self, queues: Iterable[str], moved: int = 0) -> None:
        """Check that the messages in these queues can be counted, as far as the management API shows it.

        :param moved: how many messages were moved, for the error.
        :raises TransportUnavailable: a queue has no leader, or too few of its members run.
        """
        then = f"{moved:,} messages were moved; run it again for the rest" if moved else "Nothing was moved"
        cluster.require_available(self.conn_id, self.facts(), queues, then)

    def existing(self, queues: Iterable[str]) -> list[str]:
        """Return which of these queues exist."""
        names = list(queues)
        with self.connect() as connection:
            found = declare.compare(connection, map(_queue, names))
        return [name for name, each in zip(names, found, strict=True) if each.state is not State.MISSING]


def same_queues(one: MigrationEndpoint, other: MigrationEndpoint) -> bool:
    """Whether two ends have the same queues, in one virtual host of one broker, whatever its address."""
    if one.topology.level_prefix != other.topology.level_prefix:
        return False
    # its name begins with the levels' prefix, because the user's rights may cover nothing else
    mark = _queue(f"{one.topology.level_prefix}move-{uuid4()}")
    with one.connect() as connection:
        # an exclusive queue ends with its connection, and is locked for other connections
        connection.channel().queue_declare(mark.name, exclusive=True)
        with other.connect() as another:
            (found,) = declare.compare(another, [mark])
    return found.state is not State.MISSING


def _queue(name: str) -> declare.Queue:
    return declare.Queue(name, destination=True)


class MessageMover:
    """Takes messages from queues of one end and sends them to the other; each object for one call.

    It sends to destinations that are bound already, or that its caller has named. That a message names a queue is not
    enough: to bind that queue would open it to everybody who may write to the delivery exchange.

    :param destinations: the only ones to send to, bound or not; None: all that are bound.
    :param clock: returns the present.
    """

    def __init__(
        self,
        source: MigrationEndpoint,
        target: MigrationEndpoint,
        *,
        destinations: Collection[str] | None = None,
        clock: Clock = utcnow,
    ) -> None:
        self._source = source
        self._target = target
        self._named = None if destinations is None else frozenset(destinations)
        self._bound = BoundDestinations()
        self._clock = clock
        self._problems: dict[str, str | None] = {}
        self._report = MoveReport(str(source), str(target))
        self._drainer: QueueDrainer
        self._alone: DrainedMessage | None = None

    def migrate(self, *, dry_run: bool = False) -> MoveReport:
        """Move all messages in the source's levels, from the highest to the lowest, until there are none.

        :raises ValueError: source and target are one.
        :raises TopologyError: the source's levels do not exist, or the target's are not as planned.
        :raises TransportUnavailable: a connection was lost; messages that were not moved are in their queue. Or a queue
            has no leader. Or no destinations are named, and the management API does not show which are bound.
        :raises SendFailed: the target did not take some; they are in their queue.
        """
        if same_queues(self._source, self._target):
            raise ValueError(f"messages cannot be moved from {self._source} to the same place")
        topology = self._source.topology
        names = dict(reversed(topology.level_names().items()))
        self._source.require_available(names)
        queues = self._source.existing(names)
        if not queues:
            missing = _missing(next(iter(names)))
            raise TopologyError(self._source.conn_id, missing, topology=topology.name)
        self._target.require()
        if not dry_run:
            self._ask_bound()

        def reading(found: BasicProperties, key: str, queue: str, now: datetime) -> Reading:
            return read(found, key, topology=topology, level=names[queue], now=now)

        with self._source.connect() as connection:
            self._open(connection, reading, queues, put_back=False)
            empty = 0 if not dry_run else 2
            while empty < 2:
                before = self._drainer.handled
                self._move(self._drainer.take(queues))
                empty = 0 if self._drainer.handled > before else empty + 1
                if empty == 1:
                    self._drainer.sleep(_SETTLE_SECONDS)
                    # a queue that has lost its leader meanwhile seems empty too
                    self._source.require_available(names, self._report.moved)
        self._report.dry_run = dry_run
        exchanges = (self._source.facts().exchanges or {}).values()
        inside = {each.name: each.messages_delayed for each in exchanges if each.type == PLUGIN_TYPE}
        self._report.unreadable.update({name: count for name, count in inside.items() if count != 0})
        return self._report

    def redrive(self, queue: str, *, limit: int | None = None, dry_run: bool = False) -> MoveReport:
        """Try again to deliver messages that were unroutable: send each to its destination if that exists now.

        Each message that is in the queue at the start is tried once; if it still cannot be sent it goes to the end of
        the queue.

        :param limit: try no more than so many messages.
        :raises TopologyError: the queue does not exist, or the target's levels are not as planned.
        :raises TransportUnavailable: a connection was lost; messages that were not sent are in their queue. Or that
            has no leader. Or no destinations are named, and the management API does not show which are bound.
        :raises SendFailed: the broker did not take some; they are in their queue.
        """
        self._source.require_available([queue])
        if not self._source.existing([queue]):
            raise TopologyError(self._source.conn_id, _missing(queue), _NO_QUEUE, topology=self._source.topology.name)
        self._target.require()
        self._ask_bound(dry_run=dry_run)

        def reading(found: BasicProperties, key: str, _: str, now: datetime) -> Reading:
            return read_waited(found, key, now=now)

        with self._source.connect() as connection:
            self._open(connection, reading, [queue], put_back=True)
            if dry_run:
                self._preview(queue, limit)
            else:
                self._move(self._drainer.take([queue], limit))
        self._report.dry_run = dry_run
        return self._report

    def _ask_bound(self, *, dry_run: bool = False) -> None:
        """Learn which destinations are bound, if none are named; a dry run goes on without."""
        if self._named is not None:
            return
        self._bound = self._target.destinations()
        if self._bound.bound is None and not dry_run:
            raise TransportUnavailable(
                f"connection {self._target.conn_id!r}: which destinations are bound, the management API alone tells:"
                f" {self._bound.why}. Name the allowed destinations: destinations=[...]. Nothing was moved"
            )

    def _preview(self, queue: str, limit: int | None) -> None:
        """Count where the messages of a queue would go, and leave them there."""
        for message, reading in self._drainer.take([queue], limit):
            own = reading.problem or self._beyond(message)
            if own is not None:
                self._report.add_remaining(own)
            else:
                self._report.add_destination(message.destination, self._problem_of(message.destination))
            self._drainer.release(message, reading)
        self._drainer.settle(queue, self._report.waiting.get(queue, 0))

    def _open(
        self, connection: BlockingConnection, reading: ReadMessage, queues: Sequence[str], *, put_back: bool
    ) -> None:
        self._drainer = QueueDrainer(
            connection,
            self._report,
            conn_id=self._source.conn_id,
            user=self._source.user,
            clock=self._clock,
            read=reading,
            put_back=put_back,
        )
        counts = {queue: self._drainer.count(queue) for queue in queues}
        self._report.waiting.update({queue: count for queue, count in counts.items() if count})

    def _move(self, drained: Iterator[tuple[DrainedMessage, Reading]]) -> None:
        """Send all messages; a message that was returned often waits for the messages before it, and is sent alone."""
        publisher = Publisher(
            self._target.hosts,
            conn_id=self._target.conn_id,
            topology=self._target.topology,
            clock=self._clock,
            window=_WINDOW,
            sleep=self._drainer.sleep,
            writer=MovedPropertiesWriter(self._target.topology.headers, self._target.user),
            on_confirm=self._on_confirm,
        )
        more = True
        while more:
            try:
                publisher.send(self._until_alone(drained))
            except (SendFailed, InputError):
                self._one_by_one(publisher)
                continue
            more = self._alone is not None
            if self._alone:
                self._alone = None
                self._one_by_one(publisher)
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

    def _one_by_one(self, publisher: Publisher) -> None:
        """Send unsettled messages one at a time; reject the messages that the target refuses by their own fault."""
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
            self._target.topology.digits.check_delay(delay_seconds(message.due_at, self._clock()))
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
            self._problems[destination] = self._target.problem(destination) or self._unbound(destination)
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


def _missing(queue: str) -> TopologyReport:
    return TopologyReport((Finding(state=State.MISSING, resource=f"queue {queue}"),))
