"""Moving messages that wait from the queues of one place to another, with the delay that remains.

A message is acknowledged where it came from only when the target has confirmed it, so a move that is killed loses
nothing: started again, it moves the rest, and what was under way again with the same id. Few are under way at a time
and none is returned on purpose, because a quorum queue counts each return and lets a message go, early, after twenty.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING

from pika.exceptions import AMQPError, NackError, UnroutableError

from airflow_delayed.delivery import Clock, Finding, State, TopologyReport
from airflow_delayed.errors import LimitExceeded, TopologyError, TransportUnavailable
from airflow_delayed.message import DelayedMessage, delay_seconds, utcnow
from airflow_delayed.rabbitmq import levels
from airflow_delayed.rabbitmq.aside import Aside
from airflow_delayed.rabbitmq.connection import explain
from airflow_delayed.rabbitmq.moved import MoveReport
from airflow_delayed.rabbitmq.place import Place, same
from airflow_delayed.rabbitmq.publisher import Publisher
from airflow_delayed.rabbitmq.received import Reading, read, read_waited
from airflow_delayed.rabbitmq.rewriter import Rewriter, Taken

if TYPE_CHECKING:
    from pika import BasicProperties
    from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection

    _Read = Callable[[BasicProperties, str, str, datetime], Reading]
    _Bad = Callable[[Taken, Reading, str], None]

log = logging.getLogger(__name__)

#: Messages that are taken and not yet acknowledged at a time.
WINDOW = 32
#: A message that was returned so often is moved at once and alone.
RETURNS = 3
_LOG_SECONDS = 10.0
#: Between two looks at queues that seem empty: a message on its way from one level to the next is in neither.
_SETTLE_SECONDS = 0.5


class Mover:
    """Takes messages from queues of one place and sends them to another.

    :param clock: what is taken for the present.
    """

    def __init__(self, source: Place, target: Place, *, clock: Clock = utcnow, window: int = WINDOW) -> None:
        self._source = source
        self._target = target
        self._clock = clock
        self._window = window
        self._problems: dict[str, str | None] = {}
        self._reports = _Progress(source, target)
        self._connection: BlockingConnection
        self._channel: BlockingChannel
        self._aside: Aside
        self._alone: Taken | None = None
        self._lost: AMQPError | None = None

    def migrate(self, *, dry_run: bool = False) -> MoveReport:
        """Move all that waits in the source's levels, from the highest to the lowest, until nothing is left.

        :raises ValueError: source and target are one.
        :raises TopologyError: the source's levels are not there, or the target's are not as they should be.
        :raises TransportUnavailable: a connection was lost; what was not moved is where it was.
        :raises SendFailed: the target did not take some; they are where they were.
        """
        if same(self._source, self._target):
            raise ValueError(f"messages cannot be moved from {self._source} to the same place")
        topology = self._source.topology
        names = {topology.level_name(level): level for level in range(levels.TOP_LEVEL, -1, -1)}
        queues = {name: names[name] for name in self._source.existing(names)}
        if not queues:
            raise TopologyError(self._source.conn_id, _missing(topology.level_name(levels.TOP_LEVEL)))
        self._target.require()

        def reading(found: BasicProperties, key: str, queue: str, now: datetime) -> Reading:
            return read(found, key, topology=topology, level=queues[queue], now=now)

        def bad(taken: Taken, found: Reading, reason: str) -> None:
            self._aside.set_aside(taken, found, reason)
            self._reports.report.add_set_aside(reason)

        with self._source.connect() as connection:
            self._open(connection)
            report = self._look(queues, dry_run=dry_run)
            empty = 0
            while not dry_run and empty < 2:
                before = self._reports.handled
                self._move(self._takings(queues, reading, bad))
                empty = 0 if self._reports.handled > before else empty + 1
                connection.sleep(_SETTLE_SECONDS if empty == 1 else 0)
        return report

    def redrive(self, queue: str, *, limit: int | None = None, dry_run: bool = False) -> MoveReport:
        """Send what no destination took to its destination, where there is one by now.

        Each message that is there at the start is looked at once; one that still cannot be sent goes to the queue's
        end.

        :param limit: look at no more than so many.
        :raises TopologyError: the queue is not there, or the target's levels are not as they should be.
        :raises TransportUnavailable: a connection was lost; what was not sent is where it was.
        :raises SendFailed: the broker did not take some; they are where they were.
        """
        if not self._source.existing([queue]):
            raise TopologyError(self._source.conn_id, _missing(queue))
        self._target.require()

        def reading(found: BasicProperties, key: str, _: str, now: datetime) -> Reading:
            return read_waited(found, key, now=now)

        def bad(taken: Taken, found: Reading, reason: str) -> None:
            self._aside.put_back(taken, found)
            self._reports.report.add_left(reason)

        with self._source.connect() as connection:
            self._open(connection)
            report = self._look([queue], dry_run=dry_run)
            if not dry_run:
                self._move(self._takings([queue], reading, bad, limit))
        return report

    def _open(self, connection: BlockingConnection) -> None:
        self._connection, self._channel = connection, connection.channel()
        self._aside = Aside(connection, self._source.user)

    def _look(self, queues: Iterable[str], *, dry_run: bool) -> MoveReport:
        counts = {queue: self._count(queue) for queue in queues}
        report = self._reports.report
        report.dry_run = dry_run
        report.waiting.update({queue: count for queue, count in counts.items() if count})
        return report

    def _count(self, queue: str) -> int:
        count: int = self._channel.queue_declare(queue, passive=True).method.message_count
        return count

    # taking

    def _takings(
        self,
        queues: Iterable[str],
        reading: _Read,
        bad: _Bad,
        limit: int | None = None,
    ) -> Iterator[Taken]:
        """Take what is in each queue at the moment; yield what can be sent, and put the rest where it belongs."""
        for queue in queues:
            count = self._count(queue)
            for _ in range(count if limit is None else min(limit, count)):
                taken = self._take(queue, reading)
                if taken is None:
                    break
                message, found = taken
                reason = found.problem or self._problem(message, found)
                if reason is None:
                    yield message
                else:
                    bad(message, found, reason)
                    self._channel.basic_ack(message.delivery_tag)
                    self._reports.add_bad()

    def _take(self, queue: str, reading: _Read) -> tuple[Taken, Reading] | None:
        method, original, body = self._channel.basic_get(queue)
        if method is None or original is None or body is None:
            return None
        now, key = self._clock(), method.routing_key or ""
        found = reading(original, key, queue, now)
        taken = Taken(
            destination=found.destination or "",
            body=body,
            due_at=found.due_at or now,
            message_id=original.message_id or "",
            original=original,
            queue=queue,
            routing_key=key,
            delivery_tag=method.delivery_tag or 0,
        )
        return taken, found

    def _problem(self, message: Taken, found: Reading) -> str | None:
        try:
            levels.check_delay(delay_seconds(message.due_at, self._clock()))
        except LimitExceeded as error:
            return str(error)
        if message.destination not in self._problems:
            self._problems[message.destination] = self._target.problem(message.destination)
        return self._problems[message.destination]

    # sending

    def _move(self, takings: Iterator[Taken]) -> None:
        """Send all; a message that was returned often waits for those before it, and is sent alone."""
        publisher = Publisher(
            self._target.parameters,
            conn_id=self._target.conn_id,
            topology=self._target.topology,
            clock=self._clock,
            window=self._window,
            sleep=self._sleep,
            writer=Rewriter(self._target.topology.headers, self._target.user),
            on_confirm=self._on_confirm,
        )
        try:
            while True:
                publisher.send(self._until_alone(takings))
                if self._alone is None:
                    break
                alone, self._alone = self._alone, None
                publisher.send([alone])
                self._check()
            self._check()
        except (UnroutableError, NackError) as error:
            raise TransportUnavailable(
                f"connection {self._source.conn_id!r}: a queue took no message that was to be put there"
            ) from error
        finally:
            log.info("%s", self._reports.report)

    def _until_alone(self, takings: Iterator[Taken]) -> Iterator[Taken]:
        for taken in takings:
            self._check()
            self._reports.tick()
            if taken.returns >= RETURNS:
                self._alone = taken
                return
            yield taken

    def _on_confirm(self, message: DelayedMessage) -> None:
        assert isinstance(message, Taken)
        try:
            self._channel.basic_ack(message.delivery_tag)
        except AMQPError as error:
            # it is in the target, and will be moved again with the same id
            self._lost = self._lost or error
            return
        self._reports.add(message)

    def _check(self) -> None:
        if self._lost is not None:
            raise TransportUnavailable(
                f"connection {self._source.conn_id!r}: {explain(self._lost)}. {self._reports.report.moved:,} messages"
                " were moved; run it again for the rest"
            ) from self._lost

    def _sleep(self, seconds: float) -> None:
        """Wait for the target, and keep the source's connection alive."""
        end = time.monotonic() + seconds
        try:
            self._connection.sleep(seconds)
        except AMQPError as error:
            self._lost = self._lost or error
            time.sleep(max(0.0, end - time.monotonic()))


class _Progress:
    """The report of a move, and a line of it in the log now and then."""

    def __init__(self, source: Place, target: Place) -> None:
        self.report = MoveReport(str(source), str(target))
        self.handled = 0
        self._next = time.monotonic() + _LOG_SECONDS

    def add(self, message: Taken) -> None:
        self.report.add(message.destination, message.queue)
        self.handled += 1

    def add_bad(self) -> None:
        self.handled += 1
        self.tick()

    def tick(self) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _LOG_SECONDS
            log.info("%s so far", self.report)


def _missing(queue: str) -> TopologyReport:
    return TopologyReport((Finding(state=State.MISSING, resource=f"queue {queue}"),))
