"""The hook for RabbitMQ: an Airflow connection as a transport with 28 delay levels."""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseHook

from airflow_delayed.delivery import Clock, SendReport, TopologyReport
from airflow_delayed.errors import TransportUnavailable
from airflow_delayed.message import DelayedMessage, ceil_units, delay_seconds, utcnow
from airflow_delayed.rabbitmq import levels, plan, properties
from airflow_delayed.rabbitmq.topology import DELAYED, Topology, topology_of

if TYPE_CHECKING:
    from pika import ConnectionParameters
    from pika.adapters.blocking_connection import BlockingConnection

    from airflow_delayed.rabbitmq.management import Management
    from airflow_delayed.rabbitmq.upkeep import Upkeep
    from airflow_delayed.rabbitmq.waiting import Waiting


class RabbitMQDelayHook(BaseHook):
    """Delivers messages to RabbitMQ queues at their due time; an :class:`airflow_delayed.delivery.DelayedDelivery`.

    A destination is a queue. Delays are whole seconds, rounded up, of at most 268,435,455 s, by the sender's clock.
    Needs RabbitMQ 3.10 or later for its quorum queues with a time to live and at-least-once dead-lettering.

    The connection (type ``rabbitmq`` or ``amqp``): host, port (5672, with ssl 5671), login, password, schema = virtual
    host (``/``); extra: ``ssl`` (true: TLS, the broker's certificate is verified), ``heartbeat`` (seconds),
    ``management_url`` (of the management API, ``http(s)://[user:password@]host:port``; by default 10,000 ports above
    AMQP's on the same host; ``none`` to do without).

    :param clock: what is taken for the present.
    """

    conn_name_attr = "conn_id"
    default_conn_name = "rabbitmq_default"
    conn_type = "rabbitmq"
    hook_name = "RabbitMQ (delayed delivery)"

    def __init__(
        self,
        conn_id: str = default_conn_name,
        *,
        clock: Clock = utcnow,
        topology: Topology | str | None = None,
        routing: str | None = None,
    ) -> None:
        super().__init__()
        self.conn_id = conn_id
        self._clock = clock
        self._chosen = topology, routing

    @cached_property
    def topology(self) -> Topology:
        """The delay levels that this hook uses.

        :raises ValueError: the connection or the caller names none that is known.
        """
        topology, routing = self._chosen
        if topology is None or routing is None:
            extra = self.get_connection(self.conn_id).extra_dejson
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
            return upkeep.verify(names, top_level, lambda: server.version(self._parameters()))

    def waiting(self) -> Waiting:
        """Count what waits in each level, and tell when it falls due; ``str()`` of it is a table.

        Without the management API the messages stuck in dead-lettering are unknown, and the total is the least there
        can be.

        :raises TopologyError: nothing is installed.
        :raises TransportUnavailable: the broker cannot be reached or refuses the user.
        """
        with self._upkeep() as upkeep:
            return upkeep.waiting(self._clock())

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
        from airflow_delayed.rabbitmq.publisher import Publisher

        publisher = Publisher(self._parameters(), conn_id=self.conn_id, topology=self.topology, clock=self._clock)
        return publisher.send(messages)

    def close(self) -> None:
        """Do nothing: each call has its own connection, since one that nobody serves between calls would be cut."""

    def test_connection(self) -> tuple[bool, str]:
        """Log in within a few seconds; say in plain words what is wrong, or what answered."""
        try:
            parameters, levels_used = self._parameters(timeout=5), self.topology
            with self._connected(parameters):
                pass
        except (TransportUnavailable, ValueError) as error:
            return False, str(error)
        where = f"{parameters.host}:{parameters.port}, virtual host {parameters.virtual_host!r}"
        return True, f"Connected to RabbitMQ at {where}; topology {levels_used.name!r}"

    @contextmanager
    def _connected(self, parameters: ConnectionParameters | None = None) -> Iterator[BlockingConnection]:
        from pika import BlockingConnection
        from pika.exceptions import AMQPConnectionError, ChannelClosedByBroker

        from airflow_delayed.rabbitmq.connection import explain

        try:
            with BlockingConnection(parameters or self._parameters()) as connection:
                yield connection
        except ChannelClosedByBroker as error:
            raise TransportUnavailable(
                f"connection {self.conn_id!r}: the broker refused: {error.reply_text}. To install, the user needs the"
                f" rights configure, write and read on {self.topology.pattern} and on the destinations"
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

    def _management(self) -> tuple[Management | None, str | None]:
        from airflow_delayed.rabbitmq import management

        url = self.get_connection(self.conn_id).extra_dejson.get("management_url")
        return management.reach([self._parameters()], url)

    def _parameters(self, timeout: float = 15) -> ConnectionParameters:
        from pika import ConnectionParameters, PlainCredentials, SSLOptions

        given = self.get_connection(self.conn_id)
        extra: dict[str, Any] = given.extra_dejson
        host = given.host or "localhost"
        secure = _flag(extra.get("ssl", False))
        heartbeat = extra.get("heartbeat")
        return ConnectionParameters(
            host=host,
            port=given.port or (5671 if secure else 5672),
            virtual_host=given.schema or "/",
            credentials=PlainCredentials(given.login or "guest", given.password or "guest", erase_on_connect=False),
            ssl_options=SSLOptions(ssl.create_default_context(), host) if secure else None,
            heartbeat=None if heartbeat in (None, "") else int(heartbeat),
            socket_timeout=timeout,
            stack_timeout=timeout,
            # a broker short of memory or disk stops reading; wait, but not for ever
            blocked_connection_timeout=300,
            client_properties={"connection_name": f"airflow-delayed {self.conn_id}"},
        )


def _flag(value: object) -> bool:
    """Read an extra that may come from a URI or a form as text."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in ("true", "1", "yes", "on"):
        return True
    if text in ("false", "0", "no", "off", "", "none"):
        return False
    raise ValueError("the extra 'ssl' must be true or false")
