"""The hook for RabbitMQ: an Airflow connection as a transport with 28 delay levels."""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseHook

from airflow_delayed.delivery import Clock, SendReport, State, TopologyReport
from airflow_delayed.errors import TopologyError, TransportUnavailable
from airflow_delayed.message import DelayedMessage, ceil_units, delay_seconds, utcnow
from airflow_delayed.rabbitmq import levels, properties, topology

if TYPE_CHECKING:
    from pika import ConnectionParameters
    from pika.adapters.blocking_connection import BlockingConnection


class RabbitMQDelayHook(BaseHook):
    """Delivers messages to RabbitMQ queues at their due time; an :class:`airflow_delayed.delivery.DelayedDelivery`.

    A destination is a queue. Delays are whole seconds, rounded up, of at most 268,435,455 s, by the sender's clock.
    Needs RabbitMQ 3.10 or later for its quorum queues with a time to live and at-least-once dead-lettering.

    The connection (type ``rabbitmq`` or ``amqp``): host, port (5672, with ssl 5671), login, password, schema = virtual
    host (``/``); extra: ``ssl`` (true: TLS, the broker's certificate is verified), ``heartbeat`` (seconds).

    :param clock: what is taken for the present.
    """

    conn_name_attr = "conn_id"
    default_conn_name = "rabbitmq_default"
    conn_type = "rabbitmq"
    hook_name = "RabbitMQ (delayed delivery)"

    def __init__(self, conn_id: str = default_conn_name, *, clock: Clock = utcnow) -> None:
        super().__init__()
        self.conn_id = conn_id
        self._clock = clock

    @property
    def horizon(self) -> timedelta:
        """All that the delay levels can hold: waiting in them costs no request."""
        return timedelta(seconds=levels.MAX_DELAY_SECONDS)

    def install(
        self, destinations: Iterable[str], *, create_destinations: bool = False, dry_run: bool = False
    ) -> TopologyReport:
        """Make the 28 levels, the delivery exchange and the destinations' bindings; may be repeated at any time.

        A destination is created as a durable quorum queue. If something differs or is missing, nothing is made.

        :raises TopologyError: something differs or a destination is missing (not with ``dry_run``).
        :raises LimitExceeded: a destination's name is beyond the limits.
        :raises TransportUnavailable: the broker cannot be reached or refuses the user.
        """
        parts = topology.plan(destinations)
        with self._connected() as connection:
            found = topology.compare(connection, parts)
            report = TopologyReport(topology.todo(parts, found, create_destinations=create_destinations))
            if dry_run:
                return report
            if report.problems:
                raise TopologyError(self.conn_id, report)
            topology.apply(connection, parts)
        return TopologyReport(topology.todo(parts, found, create_destinations=create_destinations, done=State.CREATED))

    def verify(self, destinations: Iterable[str], *, max_delay: timedelta | None = None) -> TopologyReport:
        """Compare exchanges and queues with what messages need that are delayed by up to ``max_delay``.

        Changes nothing and needs no management API. Bindings cannot be seen this way; install makes them again.

        :raises LimitExceeded: ``max_delay`` or a destination's name is beyond the limits.
        :raises TransportUnavailable: the broker cannot be reached or refuses the user.
        """
        top_level = levels.TOP_LEVEL
        if max_delay is not None:
            seconds = ceil_units(max_delay)
            top_level = levels.entry_level(seconds) if seconds else -1
        parts = topology.plan(destinations, top_level=top_level)
        with self._connected() as connection:
            return TopologyReport(topology.compare(connection, parts))

    def check(self, message: DelayedMessage, now: datetime) -> None:
        """Check one message against RabbitMQ's limits, without a network.

        :raises LimitExceeded: its delay, destination or headers are beyond one.
        """
        properties.check(message, delay_seconds(message.due_at, now))

    def send(self, messages: Iterable[DelayedMessage]) -> SendReport:
        """Send each message into the delay levels and return when the broker has confirmed all of them.

        Consumes a stream with at most 1000 messages unconfirmed at a time. Errors: see
        :meth:`airflow_delayed.rabbitmq.publisher.Publisher.send`.
        """
        from airflow_delayed.rabbitmq.publisher import Publisher

        return Publisher(self._parameters(), conn_id=self.conn_id, clock=self._clock).send(messages)

    def close(self) -> None:
        """Do nothing: each call has its own connection, since one that nobody serves between calls would be cut."""

    def test_connection(self) -> tuple[bool, str]:
        """Log in within a few seconds; say in plain words what is wrong, or what answered."""
        try:
            parameters = self._parameters(timeout=5)
            with self._connected(parameters):
                pass
        except (TransportUnavailable, ValueError) as error:
            return False, str(error)
        where = f"{parameters.host}:{parameters.port}, virtual host {parameters.virtual_host!r}"
        return True, f"Connected to RabbitMQ at {where}"

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
                " rights configure, write and read on ^delayed\\. and on the destinations"
            ) from error
        except (AMQPConnectionError, OSError) as error:
            raise TransportUnavailable(f"connection {self.conn_id!r}: {explain(error)}") from error

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
