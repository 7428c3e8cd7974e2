"""Moving messages that wait from the queues of one place to another, with the delay that remains.

A message is acknowledged where it came from only when the target has confirmed it, so a move that is killed loses
nothing: started again, it moves the rest, and what was under way again with the same id. Few are under way at a time
and none is returned on purpose, because a quorum queue counts each return and lets a message go, early, after twenty.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from airflow_delayed.delivery import Clock, Finding, State, TopologyReport
from airflow_delayed.errors import InputError, LimitExceeded, SendFailed, TopologyError, TransportUnavailable
from airflow_delayed.message import DelayedMessage, delay_seconds, utcnow
from airflow_delayed.rabbitmq import levels
from airflow_delayed.rabbitmq.moved import MoveReport
from airflow_delayed.rabbitmq.place import Destinations, Place, same
from airflow_delayed.rabbitmq.publisher import Publisher
from airflow_delayed.rabbitmq.received import Reading, read, read_waited
from airflow_delayed.rabbitmq.rewriter import Rewriter, Taken
from airflow_delayed.rabbitmq.taker import RETURNS, Read, Taker

if TYPE_CHECKING:
    from datetime import datetime

    from pika import BasicProperties
    from pika.adapters.blocking_connection import BlockingConnection

#: Messages that are taken and not yet acknowledged at a time.
WINDOW = 32
#: Between two looks at queues that seem empty: a message on its way from one level to the next is in neither.
_SETTLE_SECONDS = 0.5
_NO_QUEUE = (
    "on topologies that others declare too, the queue for what is unroutable comes with unroutable_policy=True alone;"
    " delayed.set-aside is there once migrate() has set a message aside"
)
#: What the session says of a message that itself is at fault.
_AT_FAULT = ("PRECONDITION_FAILED", "not to be written as AMQP")


class Mover:
    """Takes messages from queues of one place and sends them to another; each object for one call.

    It sends to destinations that are bound already, or that somebody has named. A message's word is not enough: to
    bind a queue for it would open that queue to whoever may write to the delivery exchange.

    :param destinations: the only ones to send to, bound or not; None: all that are bound.
    :param clock: what is taken for the present.
    """

    def __init__(
        self, source: Place, target: Place, *, destinations: Collection[str] | None = None, clock: Clock = utcnow
    ) -> None:
        self._source = source
        self._target = target
        self._named = None if destinations is None else frozenset(destinations)
        self._known = Destinations()
        self._clock = clock
        self._problems: dict[str, str | None] = {}
        self._report = MoveReport(str(source), str(target))
        self._taker: Taker
        self._alone: Taken | None = None

    def migrate(self, *, dry_run: bool = False) -> MoveReport:
        """Move all that waits in the source's levels, from the highest to the lowest, until nothing is left.

        :raises ValueError: source and target are one.
        :raises TopologyError: the source's levels are not there, or the target's are not as they should be.
        :raises TransportUnavailable: a connection was lost; what was not moved is where it was. Or no destinations are
            named, and the management API does not tell which are bound.
        :raises SendFailed: the target did not take some; they are where they were.
        """
        if same(self._source, self._target):
            raise ValueError(f"messages cannot be moved from {self._source} to the same place")
        topology = self._source.topology
        names = {topology.level_name(level): level for level in range(levels.TOP_LEVEL, -1, -1)}
        queues = self._source.existing(names)
        if not queues:
            missing = _missing(topology.level_name(levels.TOP_LEVEL))
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
                before = self._taker.handled
                self._move(self._taker.take(queues))
                empty = 0 if self._taker.handled > before else empty + 1
                if empty == 1:
                    self._taker.sleep(_SETTLE_SECONDS)
        self._report.dry_run = dry_run
        return self._report

    def redrive(self, queue: str, *, limit: int | None = None, dry_run: bool = False) -> MoveReport:
        """Send what no destination took to its destination, where there is one by now.

        Each message that is there at the start is looked at once; one that still cannot be sent goes to the queue's
        end.

        :param limit: look at no more than so many.
        :raises TopologyError: the queue is not there, or the target's levels are not as they should be.
        :raises TransportUnavailable: a connection was lost; what was not sent is where it was. Or no destinations are
            named, and the management API does not tell which are bound.
        :raises SendFailed: the broker did not take some; they are where they were.
        """
        if not self._source.existing([queue]):
            raise TopologyError(self._source.conn_id, _missing(queue), _NO_QUEUE, topology=self._source.topology.name)
        self._target.require()
        self._ask_bound(dry_run=dry_run)

        def reading(found: BasicProperties, key: str, _: str, now: datetime) -> Reading:
            return read_waited(found, key, now=now)

        with self._source.connect() as connection:
            self._open(connection, reading, [queue], put_back=True)
            if dry_run:
                self._look(queue, limit)
            else:
                self._move(self._taker.take([queue], limit))
        self._report.dry_run = dry_run
        return self._report

    def _ask_bound(self, *, dry_run: bool = False) -> None:
        """Learn which destinations are bound, if none are named; a dry run does without."""
        if self._named is not None:
            return
        self._known = self._target.destinations()
        if self._known.bound is None and not dry_run:
            raise TransportUnavailable(
                f"connection {self._target.conn_id!r}: which destinations are bound, the management API alone tells:"
                f" {self._known.why}. Name those that may be sent to: destinations=[...]. Nothing was moved"
            )

    def _look(self, queue: str, limit: int | None) -> None:
        """Note where the messages of a queue would go, and leave them there."""
        for taken, reading in self._taker.take([queue], limit):
            own = reading.problem or self._beyond(taken)
            if own is not None:
                self._report.add_left(own)
            else:
                self._report.add_destination(taken.destination, self._problem_of(taken.destination))
            self._taker.release(taken, reading)
        self._taker.settle(queue, self._report.waiting.get(queue, 0))

    def _open(self, connection: BlockingConnection, reading: Read, queues: Sequence[str], *, put_back: bool) -> None:
        self._taker = Taker(
            connection,
            self._report,
            conn_id=self._source.conn_id,
            user=self._source.user,
            clock=self._clock,
            read=reading,
            put_back=put_back,
        )
        counts = {queue: self._taker.count(queue) for queue in queues}
        self._report.waiting.update({queue: count for queue, count in counts.items() if count})

    def _move(self, takings: Iterator[tuple[Taken, Reading]]) -> None:
        """Send all; a message that was returned often waits for those before it, and is sent alone."""
        publisher = Publisher(
            self._target.hosts,
            conn_id=self._target.conn_id,
            topology=self._target.topology,
            clock=self._clock,
            window=WINDOW,
            sleep=self._taker.sleep,
            writer=Rewriter(self._target.topology.headers, self._target.user),
            on_confirm=self._on_confirm,
        )
        more = True
        while more:
            try:
                publisher.send(self._until_alone(takings))
            except (SendFailed, InputError):
                self._one_by_one(publisher)
                continue
            more = self._alone is not None
            if self._alone:
                self._alone = None
                self._one_by_one(publisher)
        self._taker.check()

    def _until_alone(self, takings: Iterator[tuple[Taken, Reading]]) -> Iterator[Taken]:
        for taken, reading in takings:
            reason = reading.problem or self._problem(taken)
            if reason is not None:
                self._taker.reject(taken, reading, reason)
                continue
            if taken.returns >= RETURNS:
                self._alone = taken
                return
            yield taken

    def _one_by_one(self, publisher: Publisher) -> None:
        """Send what is held, and reject what the target cannot take by the message's own fault."""
        for taken, reading in list(self._taker.held.values()):
            self._taker.check()
            try:
                publisher.send([taken])
            except (SendFailed, InputError) as error:
                self._problems.pop(taken.destination, None)
                reason = self._problem(taken)
                if reason is None and (isinstance(error, LimitExceeded) or any(t in str(error) for t in _AT_FAULT)):
                    reason = str(error.failures[0][1] if isinstance(error, SendFailed) else error)
                if reason is None:
                    raise
                self._taker.reject(taken, reading, reason)

    def _problem(self, message: Taken) -> str | None:
        return self._beyond(message) or self._problem_of(message.destination)

    def _beyond(self, message: Taken) -> str | None:
        try:
            levels.check_delay(delay_seconds(message.due_at, self._clock()))
        except LimitExceeded as error:
            return str(error)
        return None

    def _problem_of(self, destination: str) -> str | None:
        if self._named is not None and destination not in self._named:
            return f"destination {destination!r}: not among destinations=[...]"
        # who makes names up is not to have each of them looked for
        if self._named is None and self._known.there is not None and destination not in self._known.there:
            return f"destination {destination!r}: missing"
        if destination not in self._problems:
            self._problems[destination] = self._target.problem(destination) or self._unbound(destination)
        return self._problems[destination]

    def _unbound(self, destination: str) -> str | None:
        bound = self._known.bound
        if self._named is not None or (bound is not None and destination in bound):
            return None
        how = "not bound" if bound is not None else "unknown whether bound without the management API"
        return f"destination {destination!r}: {how}; name it in destinations=[...]"

    def _on_confirm(self, message: DelayedMessage) -> None:
        assert isinstance(message, Taken)
        self._taker.done(message)


def _missing(queue: str) -> TopologyReport:
    return TopologyReport((Finding(state=State.MISSING, resource=f"queue {queue}"),))
