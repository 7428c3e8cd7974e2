"""RabbitMQ as a transport with delay levels, made from a plain connection. No Airflow here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime, timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING

from airflow_delayed.celery import warning_without_task
from airflow_delayed.delivery import (
    BatchBounds,
    Clock,
    Connection,
    Delivery,
    SendReport,
    TopologyReport,
)
from airflow_delayed.errors import TransportUnavailable, require
from airflow_delayed.lineage import Dataset, rabbitmq_queue
from airflow_delayed.message import DelayedMessage, ceil_seconds, delay_seconds, plain_span
from airflow_delayed.nservicebus import warning_without_type
from airflow_delayed.rabbitmq import declare
from airflow_delayed.rabbitmq.topology import CELERY, DELAYED, Topology, check_message, fits, topology_of
from airflow_delayed.threads import in_thread

if TYPE_CHECKING:
    from pika import ConnectionParameters
    from pika.adapters.blocking_connection import BlockingConnection

    from airflow_delayed.rabbitmq.admin import TopologyAdmin
    from airflow_delayed.rabbitmq.management import Facts, Management
    from airflow_delayed.rabbitmq.publisher import Publisher
    from airflow_delayed.rabbitmq.redrive import RedriveReport
    from airflow_delayed.rabbitmq.waiting import Waiting

#: Seconds that each of several hosts has for the login during a ``verify``.
_LOGIN_SECONDS = 2.0


def require_client() -> None:
    """Check that RabbitMQ's client is installed; what needs no network works without it.

    :raises MissingExtra: it is not.
    """
    require("RabbitMQ", "rabbitmq", "pika")


class RabbitMQTransport(Delivery):
    """Delivers messages to RabbitMQ queues at their due time.

    :param conn_id: names the connection in errors.
    :param connection: returns the connection; called each time that the broker is connected to.
    :param clock: returns the present.
    :param topology: the delay levels, in place of the levels that the connection's extra names.
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
        """The delay levels that this transport uses.

        :raises ValueError: the connection or the caller names an unknown topology.
        """
        topology, routing = self._chosen
        if topology is None or routing is None:
            extra = self._connection().extra
            # a caller's topology goes with the caller's routing, not with the connection's
            routing = routing or (extra.get("routing") if topology is None else None)
            topology = topology or extra.get("topology") or DELAYED
        return topology_of(topology, routing)

    #: A level passes messages on one after the other.
    sooner_when_due = True

    @property
    def horizon(self) -> timedelta:
        """The longest delay of the levels: to wait in them costs no request."""
        return timedelta(seconds=self.topology.digits.max_delay)

    def install(
        self,
        destinations: Iterable[str],
        *,
        create_destinations: bool = False,
        dry_run: bool = False,
        replace: bool = False,
        unroutable_policy: bool = False,
    ) -> TopologyReport:
        """Make the levels, the delivery exchange and the destinations' bindings; may be repeated at any time.

        A destination is created as a durable quorum queue (with conventional routing behind a durable fanout exchange).
        If an existing part differs or a destination is missing, nothing is made. With the management API every argument
        that differs is named, without it the first of each part.

        :param replace: delete exchanges and queues of the topology that differ, and make them again. Refused, with
            nothing changed, while messages wait in such a queue; for the delivery exchange, and on topologies of
            classic queues, while messages wait in any queue. A message that arrives after the last count goes with
            its queue, and the report has a warning. Destinations' bindings are made again, without the management API
            those of ``destinations`` alone.
        :param unroutable_policy: on a topology that others declare too (NServiceBus's, Celery's), set a policy that
            leads messages which no destination takes into a queue, such as ``nsb.v2.delay-unroutable``. Needs the
            management API, and the tag policymaker. The default topology has such a queue anyway.
        :raises TopologyError: something differs or a destination is missing (not with ``dry_run``).
        :raises MessagesWaiting: to replace the parts that differ would lose messages (not with ``dry_run``).
        :raises LimitExceeded: a destination's name is beyond the limits.
        :raises TransportUnavailable: the broker cannot be reached or refuses the user.
        """
        names = list(destinations)
        declare.plan(self.topology, names)
        with self._admin() as admin:
            return admin.install(
                names,
                create_destinations=create_destinations,
                dry_run=dry_run,
                replace_differing=replace,
                unroutable_policy=unroutable_policy,
            )

    def uninstall(self, *, force: bool = False, dry_run: bool = False) -> TopologyReport:
        """Delete the topology's exchanges, queues and bindings, and the policy of an install; no destination.

        Stop the senders first: a message that arrives after the last count goes with its queue, and the report has a
        warning. Takes some ten seconds, for the broker's own statistics have to show that no message is stuck in
        dead-lettering.

        :param force: delete the topology with all messages that wait.
        :param dry_run: delete nothing; report what would be deleted, and the messages that wait.
        :raises MessagesWaiting: messages wait; or may be stuck in dead-lettering, which only the management API shows.
        :raises TransportUnavailable: the broker cannot be reached or refuses the user. Or a queue has no leader, so
            that its messages are unknown; also with ``dry_run``, not with ``force``, and only if the management API
            shows it.
        """
        with self._admin() as admin:
            return admin.uninstall(force=force, dry_run=dry_run)

    def verify(self, destinations: Iterable[str], *, max_delay: timedelta | None = None) -> TopologyReport:
        """Compare the broker with what messages need that are delayed by up to ``max_delay``. Changes nothing.

        Over AMQP: exchanges, queues and their arguments, the broker's version, messages that were unroutable. With the
        management API also bindings, policies, feature flags, destinations that leak into each other or reject messages
        when full, messages stuck in dead-lettering, queues without a leader or with too few members, and nodes that do
        not run (for a user with the tag monitoring); without it the report has each of these as unknown. Of the
        connection's hosts, it names hosts that take no login, unless the broker is one node.

        :raises LimitExceeded: ``max_delay`` or a destination's name is beyond the limits.
        :raises TransportUnavailable: the broker cannot be reached or refuses the user.
        """
        top = None
        if max_delay is not None:
            seconds, digits = ceil_seconds(plain_span("max_delay", max_delay)), self.topology.digits
            top = digits.position(digits.entry_level(seconds)) if seconds else -1
        names = list(destinations)
        declare.plan(self.topology, names)
        require_client()
        from airflow_delayed.rabbitmq import verify
        from airflow_delayed.rabbitmq.connection import host_name, login_problems

        hosts, logins = self._hosts(), None
        with self._admin() as admin:
            nodes = admin.management.nodes() if admin.management and len(hosts) > 1 else None
            # one node may have several addresses
            if len(hosts) > 1 and (nodes is None or len(nodes) > 1):
                logins = in_thread(partial(login_problems, hosts, seconds=_LOGIN_SECONDS), "delayed-logins")
            report = admin.verify(names, top)
        if logins is None:
            return report
        problems = zip(map(host_name, hosts), logins.result(), strict=True)
        return TopologyReport((*report.findings, *verify.unreachable(problems, _LOGIN_SECONDS)))

    def waiting(self) -> Waiting:
        """Count the messages in each level, with the time when they fall due; ``str()`` of it is a table.

        Without the management API the messages stuck in dead-lettering are unknown, and the total is the least there
        can be; and a queue without a leader is taken for empty. With it, the messages of such a queue are unknown, and
        those of all queues while it is there and does not answer in time.

        :raises TopologyError: the topology is not installed.
        :raises TransportUnavailable: the broker cannot be reached or refuses the user.
        """
        with self._admin() as admin:
            return admin.waiting(self._clock())

    def fits(self, extremes: BatchBounds, now: datetime) -> bool:
        """Return whether :meth:`check` passes all messages within these bounds; False where that is not sure."""
        return fits(extremes, delay_seconds(extremes.last_due, now), self.topology)

    def check(self, message: DelayedMessage, now: datetime) -> None:
        """Check one message against RabbitMQ's limits, without a network.

        :raises LimitExceeded: its delay, destination or headers exceed a limit.
        """
        check_message(message, delay_seconds(message.due_at, now), self.topology)

    def receiver_warning(self, message: DelayedMessage) -> str | None:
        """Return a line for the log about a message that an NServiceBus endpoint or Celery worker cannot handle."""
        if self.topology.headers == "nservicebus":
            return warning_without_type(message)
        return warning_without_task(message) if self.topology == CELERY else None

    def send(self, messages: Iterable[DelayedMessage]) -> SendReport:
        """Send each message into the delay levels and return when the broker has confirmed all of them.

        Consumes a stream with at most 1000 messages unconfirmed at a time. Errors: see
        :meth:`airflow_delayed.rabbitmq.publisher.Publisher.send`.
        """
        require_client()
        return self._publisher().send(messages)

    def _publisher(self) -> Publisher:
        from airflow_delayed.rabbitmq.publisher import WINDOW, Publisher

        publisher = self._kept or Publisher(
            self._hosts(),
            conn_id=self.conn_id,
            topology=self.topology,
            clock=self._clock,
            window=self._window or WINDOW,
            keep=self._keeps,
            patient=self.patient,
            silence=self.silence,
        )
        if self._keeps:
            self._kept = publisher
        return publisher

    def service(self) -> None:
        """Answer the broker's heartbeats on the connection of :meth:`kept_open`, and check that the broker answers.

        Opens the connection if there is none.

        :raises TransportUnavailable: no host answers. The next call or send goes by what the connection says then.
        """
        require_client()
        try:
            self._publisher().service()
        except TransportUnavailable:
            self._kept = None
            raise

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        """Use one connection for all sends within the block; where they are minutes apart, :meth:`service` keeps it."""
        self._keeps = True
        try:
            yield
        finally:
            kept, self._kept, self._keeps = self._kept, None, False
            if kept is not None:
                kept.close()

    def redrive(
        self,
        *,
        queue: str | None = None,
        destinations: Collection[str] | None = None,
        limit: int | None = None,
        dry_run: bool = False,
    ) -> RedriveReport:
        """Send the messages that no destination took, to those destinations that exist by now and are bound.

        A message that is not due yet waits on; usually its due time is past. A message that cannot be sent goes to the
        end of the queue; each is tried once. A destination that only a message names is not bound: everybody with the
        right to write to the delivery exchange could name any queue.

        :param queue: the messages' queue: by default the topology's queue for unroutable messages.
        :param destinations: the only destinations to send to; they are bound if they are not yet. None: all
            destinations that are bound, by the management API.
        :param limit: try no more than so many messages.
        :param dry_run: send nothing; the report's ``destinations`` counts the messages by destination, and its
            ``problems`` has the reason for each to which nothing would be sent. The messages stay in the queue.
        :raises ValueError: the limit is negative.
        :raises TopologyError: the queue does not exist, or the delay levels are not installed.
        :raises TransportUnavailable: the connection failed; messages that were not sent are in their queue. Or that
            has no leader, so that its messages are unknown (as far as the management API shows it), or that API is
            there and does not answer in time. Or no destinations are named, and the management API does not show which
            are bound.
        :raises SendFailed: the broker did not take some messages; they are in their queue.
        """
        require_client()
        from airflow_delayed.rabbitmq import cluster
        from airflow_delayed.rabbitmq.redrive import Redriver

        queue = queue or self.topology.unroutable_queue
        if limit is not None and limit < 0:
            raise ValueError("limit must not be negative")
        facts = self._facts()
        cluster.require_available(self.conn_id, facts, [queue], "Nothing was moved")
        with self._connected() as connection:
            redriver = Redriver(
                queue,
                connection,
                self._hosts(),
                facts,
                conn_id=self.conn_id,
                topology=self.topology,
                destinations=destinations,
                clock=self._clock,
            )
            return redriver.redrive(limit, dry_run=dry_run)

    def close(self) -> None:
        """Do nothing: each call, or the block of :meth:`kept_open`, closes its own connection."""

    def dataset(self, destination: str) -> Dataset:
        """Return OpenLineage's name of a queue, by the first host of the connection."""
        first = self._hosts()[0]
        from airflow_delayed.rabbitmq.connection import host_name

        return rabbitmq_queue(host_name(first), first.virtual_host, destination)

    @contextmanager
    def _connected(self) -> Iterator[BlockingConnection]:
        require_client()
        from airflow_delayed.rabbitmq.connection import connect

        with self._explained(), connect(self.conn_id, self._hosts()) as connection:
            yield connection

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise the errors of a connection in plain words."""
        require_client()
        from pika.exceptions import AMQPConnectionError, ChannelClosedByBroker

        from airflow_delayed.rabbitmq.connection import describe_error, muted_pika

        try:
            with muted_pika():
                yield
        except ChannelClosedByBroker as error:
            rights = f"configure, write and read on {self.topology.pattern} and on the destinations"
            needs = f". To install, the user needs the rights {rights}; to redrive also write on amq.default"
            raise TransportUnavailable(
                f"connection {self.conn_id!r}: the broker refused: {error.reply_text}"
                + (needs if error.reply_code == declare.ACCESS_REFUSED else "")
            ) from error
        except (AMQPConnectionError, OSError) as error:
            raise TransportUnavailable(f"connection {self.conn_id!r}: {describe_error(error)}") from error

    @contextmanager
    def _admin(self) -> Iterator[TopologyAdmin]:
        with self._connected() as connection:
            from airflow_delayed.rabbitmq.admin import TopologyAdmin

            management, absent = self._management()
            with management or nullcontext():
                yield TopologyAdmin(self.conn_id, self.topology, connection, management, absent)

    def _facts(self) -> Facts:
        from airflow_delayed.rabbitmq.management import survey

        management, absent = self._management()
        with management or nullcontext():
            return survey(management, absent)

    def _management(self) -> tuple[Management | None, Facts]:
        from airflow_delayed.rabbitmq import management

        url = self._connection().extra.get("management_url")
        return management.reach(self._hosts(), url)

    def _hosts(self) -> Sequence[ConnectionParameters]:
        require_client()
        from airflow_delayed.rabbitmq.connection import parameters

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
