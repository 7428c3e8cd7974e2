"""RabbitMQ as a transport with 28 delay levels, made from a plain connection. No Airflow here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING

from airflow_delayed.delivery import Clock, Connection, Delivery, SendReport, TopologyReport
from airflow_delayed.errors import TransportUnavailable
from airflow_delayed.extremes import Extremes
from airflow_delayed.lineage import Dataset, rabbitmq_queue
from airflow_delayed.message import DelayedMessage, ceil_units, delay_seconds
from airflow_delayed.rabbitmq import levels, plan, properties
from airflow_delayed.rabbitmq.topology import DELAYED, Topology, topology_of

if TYPE_CHECKING:
    from pika import ConnectionParameters
    from pika.adapters.blocking_connection import BlockingConnection

    from airflow_delayed.rabbitmq.consumer import Consumer
    from airflow_delayed.rabbitmq.facts import Facts
    from airflow_delayed.rabbitmq.management import Management
    from airflow_delayed.rabbitmq.moved import MoveReport
    from airflow_delayed.rabbitmq.place import Place
    from airflow_delayed.rabbitmq.publisher import Publisher
    from airflow_delayed.rabbitmq.upkeep import Upkeep
    from airflow_delayed.rabbitmq.waiting import Waiting


class RabbitMQTransport(Delivery):
    """Delivers messages to RabbitMQ queues at their due time.

    :param conn_id: names the connection in errors.
    :param connection: returns the connection; it is asked each time the broker is connected to.
    :param clock: what is taken for the present.
    :param topology: the delay levels, in place of those that the connection's extra names.
    :param routing: likewise.
    :param window: messages that may be unconfirmed at a time; None: as the publisher has it.
    """

    def __init__(
        self,
        conn_id: str,
        connection: Callable[[], Connection],
        *,
        clock: Clock,
        topology: Topology | str | None = None,
        routing: str | None = None,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.conn_id = conn_id
        self._connection = connection
        self._clock = clock
        self._chosen = topology, routing
        self._window = window
        self._keeps = False
        self._kept: Publisher | None = None

    @cached_property
    def topology(self) -> Topology:
        """The delay levels that this hook uses.

        :raises ValueError: the connection or the caller names none that is known.
        """
        topology, routing = self._chosen
        if topology is None or routing is None:
            extra = self._connection().extra
            # a caller's topology goes with the caller's routing, not with that of another one
            routing = routing or (extra.get("routing") if topology is None else None)
            topology = topology or extra.get("topology") or DELAYED
        return topology_of(topology, routing)

    @property
    def horizon(self) -> timedelta:
        """All that the delay levels can hold: waiting in them costs no request."""
        return timedelta(seconds=levels.MAX_DELAY_SECONDS)

    def install(
        self,
        destinations: Iterable[str],
        *,
        create_destinations: bool = False,
        dry_run: bool = False,
        replace: bool = False,
        unroutable_policy: bool = False,
    ) -> TopologyReport:
        """Make the 28 levels, the delivery exchange and the destinations' bindings; may be repeated at any time.

        A destination is created as a durable quorum queue (with conventional routing behind a durable fanout exchange).
        If something differs or is missing, nothing is made; with the management API every argument that differs is
        named, without it the first one of each part.

        :param replace: delete and make anew exchanges and queues of the topology that differ. Refused, with nothing
            changed, while messages wait in such a queue; for the delivery exchange, and on topologies of classic
            queues, while any wait. Destinations' bindings are put back, without the management API those of
            ``destinations`` alone.
        :param unroutable_policy: on a topology that others declare too (NServiceBus's, Celery's), set a policy by which
            what no destination takes goes into a queue of ours, such as ``nsb.v2.delay-unroutable``. Needs the
            management API, and the tag policymaker. The default topology has such a queue anyway.
        :raises TopologyError: something differs or a destination is missing (not with ``dry_run``).
        :raises MessagesWaiting: what is to be replaced would lose messages (not with ``dry_run``).
        :raises LimitExceeded: a destination's name is beyond the limits.
        :raises TransportUnavailable: the broker cannot be reached or refuses the user.
        """
        names = list(destinations)
        plan.plan(self.topology, names)
        with self._upkeep() as upkeep:
            return upkeep.install(
                names,
                create_destinations=create_destinations,
                dry_run=dry_run,
                replace_differing=replace,
                unroutable_policy=unroutable_policy,
            )

    def uninstall(self, *, force: bool = False, dry_run: bool = False) -> TopologyReport:
        """Delete the topology's exchanges, queues and bindings, and the policy that is ours; no destination.

        Takes up to some ten seconds, for the broker's own statistics have to say that nothing is stuck in
        dead-lettering. A message that arrives meanwhile stops it: all that was deleted is put back, with the message.
        Still, stop the senders first: what is published straight into a queue in the millisecond of its deletion,
        RabbitMQ confirms and drops.

        :param force: delete it with all messages that wait.
        :param dry_run: delete nothing and return what would be, and what waits.
        :raises MessagesWaiting: messages wait; or may be stuck in dead-lettering, which the management API alone tells.
        :raises TransportUnavailable: the broker cannot be reached or refuses the user.
        """
        with self._upkeep() as upkeep:
            return upkeep.uninstall(force=force, dry_run=dry_run)

    def verify(self, destinations: Iterable[str], *, max_delay: timedelta | None = None) -> TopologyReport:
        """Compare what is there with what messages need that are delayed by up to ``max_delay``. Changes nothing.

        Over AMQP: exchanges, queues and their arguments, the broker's version, messages that were unroutable. With the
        management API also bindings, policies, feature flags, destinations that leak into each other or reject messages
        when full, and messages stuck in dead-lettering; without it each of these is said to be unknown.

        :raises LimitExceeded: ``max_delay`` or a destination's name is beyond the limits.
        :raises TransportUnavailable: the broker cannot be reached or refuses the user.
        """
        from airflow_delayed.rabbitmq import server

        top_level = levels.TOP_LEVEL
        if max_delay is not None:
            seconds = ceil_units(max_delay)
            top_level = levels.entry_level(seconds) if seconds else -1
        names = list(destinations)
        plan.plan(self.topology, names)
        with self._upkeep() as upkeep:
            return upkeep.verify(names, top_level, lambda: server.version(self._hosts()))

    def waiting(self) -> Waiting:
        """Count what waits in each level, and tell when it falls due; ``str()`` of it is a table.

        Without the management API the messages stuck in dead-lettering are unknown, and the total is the least there
        can be.

        :raises TopologyError: nothing is installed.
        :raises TransportUnavailable: the broker cannot be reached or refuses the user.
        """
        with self._upkeep() as upkeep:
            return upkeep.waiting(self._clock())

    def fits(self, extremes: Extremes, now: datetime) -> bool:
        """Return whether :meth:`check` passes all messages within these bounds; False where that is not sure."""
        return properties.fits(extremes, delay_seconds(extremes.last_due, now), self.topology)

    def check(self, message: DelayedMessage, now: datetime) -> None:
        """Check one message against RabbitMQ's limits, without a network.

        :raises LimitExceeded: its delay, destination or headers are beyond one.
        """
        properties.check(message, delay_seconds(message.due_at, now), self.topology)

    def send(self, messages: Iterable[DelayedMessage]) -> SendReport:
        """Send each message into the delay levels and return when the broker has confirmed all of them.

        Consumes a stream with at most 1000 messages unconfirmed at a time. Errors: see
        :meth:`airflow_delayed.rabbitmq.publisher.Publisher.send`.
        """
        from airflow_delayed.rabbitmq.publisher import WINDOW, Publisher

        publisher = self._kept or Publisher(
            self._hosts(),
            conn_id=self.conn_id,
            topology=self.topology,
            clock=self._clock,
            window=self._window or WINDOW,
            keep=self._keeps,
        )
        if self._keeps:
            self._kept = publisher
        return publisher.send(messages)

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        """Use one connection for all sends within the block, which follow each other within seconds."""
        self._keeps = True
        try:
            yield
        finally:
            kept, self._kept, self._keeps = self._kept, None, False
            if kept is not None:
                kept.close()

    def consumer(self, queue: str, *, prefetch: int) -> Consumer:
        """Return what hands out the messages of a queue in an asyncio loop, and acknowledges them.

        :param prefetch: how many messages may be in hand at most.
        """
        from airflow_delayed.rabbitmq.consumer import Consumer

        async def hosts() -> Sequence[ConnectionParameters]:
            # it asks for the connection, and reads certificates: nothing that a loop should wait for
            return await asyncio.to_thread(self._hosts)

        return Consumer(self.conn_id, queue, hosts, prefetch=prefetch)

    def migrate(
        self,
        source: Topology | str | RabbitMQTransport,
        target: Topology | str | RabbitMQTransport,
        *,
        destinations: Collection[str] | None = None,
        dry_run: bool = False,
    ) -> MoveReport:
        """Move the messages that wait in one topology's levels to another's, with the delay that remains, rounded up.

        Goes from the highest level to the lowest until nothing is left, so senders should use the target by then. It
        may be killed and run again at any moment: nothing is lost or early, and what comes twice has the same id.
        Messages keep their properties and headers but those of the way behind them. What cannot be moved, since
        nothing tells where it goes or when it is due, or its destination is missing or not bound in the target, is put
        into the queue ``delayed.set-aside`` of the source's broker. No destination is bound because a message names it.
        How due times are read, and how late a message may become by it: see
        :func:`airflow_delayed.rabbitmq.received.read`.

        :param source: a topology on this hook's connection, or a hook: another connection with its topology.
        :param target: likewise. Its levels and the messages' destinations have to be there.
        :param destinations: the only destinations to send to, bound or not, which they then are; the rest is set aside.
            None: all that are bound, as the management API tells.
        :param dry_run: take and change nothing; the report has what waits, by level.
        :raises ValueError: source and target are one, or a topology is unknown.
        :raises TopologyError: the source's levels do not exist, or the target is not installed.
        :raises TransportUnavailable: a connection failed; what was not moved is where it was. Or no destinations are
            named, and the management API does not tell which are bound.
        :raises SendFailed: the target did not take some messages; they are where they were.
        """
        from airflow_delayed.rabbitmq.mover import Mover

        mover = Mover(self._place(source), self._place(target), destinations=destinations, clock=self._clock)
        return mover.migrate(dry_run=dry_run)

    def redrive(
        self,
        *,
        queue: str | None = None,
        destinations: Collection[str] | None = None,
        limit: int | None = None,
        dry_run: bool = False,
    ) -> MoveReport:
        """Send the messages that no destination took, to those destinations that exist by now and are bound.

        A message that still waits for its due time waits on; usually it is past. One that cannot be sent goes to the
        end of the queue; each is looked at once. No destination is bound because a message names it: who may write to
        the delivery exchange can name any.

        :param queue: where they are: by default the topology's queue for what is unroutable; ``delayed.set-aside`` is
            where :meth:`migrate` puts what it cannot move.
        :param destinations: the only destinations to send to, bound or not, which they then are. None: all that are
            bound, as the management API tells.
        :param limit: look at no more than so many messages.
        :param dry_run: send nothing; the report's ``destinations`` counts the messages by destination, and its
            ``problems`` says of each to which nothing would be sent why. Messages that were looked at are returned.
        :raises ValueError: the limit is negative.
        :raises TopologyError: the queue does not exist, or the delay levels are not installed.
        :raises TransportUnavailable: the connection failed; what was not sent is where it was. Or no destinations are
            named, and the management API does not tell which are bound.
        :raises SendFailed: the broker did not take some messages; they are where they were.
        """
        from airflow_delayed.rabbitmq.mover import Mover

        queue = queue or self.topology.unroutable_queue
        if limit is not None and limit < 0:
            raise ValueError("limit must not be negative")
        here = self._place(self)
        mover = Mover(here, here, destinations=destinations, clock=self._clock)
        return mover.redrive(queue, limit=limit, dry_run=dry_run)

    def _place(self, choice: Topology | str | RabbitMQTransport) -> Place:
        from airflow_delayed.rabbitmq.place import Place

        hook = choice if isinstance(choice, RabbitMQTransport) else self
        if choice is hook or choice == hook.topology.name:
            topology = hook.topology
        else:
            assert not isinstance(choice, RabbitMQTransport)
            topology = topology_of(choice)
        return Place(hook.conn_id, topology, hook._hosts(), hook._connected, hook._facts)

    def close(self) -> None:
        """Do nothing: each call has its own connection, since one that nobody serves between calls would be cut."""

    def dataset(self, destination: str) -> Dataset:
        """Return OpenLineage's name of a queue, by the first host of the connection."""
        from airflow_delayed.rabbitmq.hosts import host_name

        first = self._hosts()[0]
        return rabbitmq_queue(host_name(first), first.virtual_host, destination)

    @contextmanager
    def _connected(self) -> Iterator[BlockingConnection]:
        from pika.exceptions import AMQPConnectionError, ChannelClosedByBroker

        from airflow_delayed.rabbitmq.connection import explain
        from airflow_delayed.rabbitmq.hosts import connect
        from airflow_delayed.rabbitmq.quiet import quiet

        try:
            with quiet(), connect(self.conn_id, self._hosts()) as connection:
                yield connection
        except ChannelClosedByBroker as error:
            rights = f"configure, write and read on {self.topology.pattern} and on the destinations"
            needs = (
                f". To install, the user needs the rights {rights}; to migrate and redrive also write on amq.default,"
                " and configure on delayed.set-aside"
            )
            raise TransportUnavailable(
                f"connection {self.conn_id!r}: the broker refused: {error.reply_text}"
                + (needs if error.reply_code == plan.ACCESS_REFUSED else "")
            ) from error
        except (AMQPConnectionError, OSError) as error:
            raise TransportUnavailable(f"connection {self.conn_id!r}: {explain(error)}") from error

    @contextmanager
    def _upkeep(self) -> Iterator[Upkeep]:
        from airflow_delayed.rabbitmq.upkeep import Upkeep

        with self._connected() as connection:
            management, why = self._management()
            with management or nullcontext():
                yield Upkeep(self.conn_id, self.topology, connection, management, why)

    def _facts(self) -> Facts:
        from airflow_delayed.rabbitmq.facts import Facts

        management, why = self._management()
        with management or nullcontext():
            return management.survey() if management else Facts(why=why)

    def _management(self) -> tuple[Management | None, str | None]:
        from airflow_delayed.rabbitmq import management

        url = self._connection().extra.get("management_url")
        return management.reach(self._hosts(), url)

    def _hosts(self) -> list[ConnectionParameters]:
        from airflow_delayed.rabbitmq.parameters import parameters

        given = self._connection()
        return parameters(
            self.conn_id,
            conn_type=given.conn_type,
            host=given.host,
            port=given.port,
            login=given.login,
            password=given.password,
            schema=given.schema,
            extra=given.extra,
        )
