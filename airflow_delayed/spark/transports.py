"""Transports made from a plain connection: the publishers, senders and statements are those that the hooks use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from datetime import datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, cast

from airflow_delayed.delivery import Clock, DelayStore, Delivery, SendReport
from airflow_delayed.errors import InputError, UnsupportedConnection, UnsupportedOption
from airflow_delayed.message import DelayedMessage, delay_seconds
from airflow_delayed.route import Route
from airflow_delayed.spark.connections import Connection, find
from airflow_delayed.spark.options import Settings, check_type

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient

    from airflow_delayed.origin import Origin
    from airflow_delayed.rabbitmq.publisher import Publisher
    from airflow_delayed.store.conflicts import OnConflict

_RABBITMQ = ("rabbitmq", "amqp", "amqps")
_SQL = ("sqlite", "postgres", "mysql")
#: Options of the transports, by what a connection of that type has.
_OPTIONS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(_RABBITMQ, ("topology", "routing", "window")),
    "aws": ("envelope",),
    **dict.fromkeys(_SQL, ("on_conflict", "origin")),
}


class Transport(Protocol):
    """What an executor needs of a transport, see :class:`airflow_delayed.delivery.Delivery`."""

    @property
    def horizon(self) -> timedelta:
        """How long the transport itself can delay."""
        ...

    def check(self, message: DelayedMessage, now: datetime) -> None:
        """Check one message against the transport's limits."""
        ...

    def send(self, messages: Iterable[DelayedMessage]) -> SendReport:
        """Send, and return when all are confirmed."""
        ...

    def close(self) -> None:
        """Close connections."""
        ...


def is_store(connection: Connection) -> bool:
    """Return whether a connection holds its messages itself."""
    return connection.conn_type in _SQL


def route_of(settings: Settings, *, clock: Clock, find: Callable[..., Connection] = find) -> Route:
    """Return who delivers and what waits in a store before; nothing is connected yet.

    :param find: returns a connection by its name.
    :raises ConnectionNotFound: a connection is not known on this machine.
    :raises InputError: options do not go together with what the connections are.
    """
    deliver = find(settings.deliver, settings.connections_file)
    holds = is_store(deliver)
    check_type(settings, deliver.conn_type, holds=holds)
    options: dict[str, Any] = {name: getattr(settings, name) for name in ("topology", "routing", "window", "envelope")}
    if holds:
        options |= {"on_conflict": settings.on_conflict, "origin": settings.origin}
    # what install and verify do is not done here
    delivery = cast(Delivery, transport_of(deliver, clock=clock, **options))
    if holds:
        return Route(delivery=delivery, store=cast(DelayStore, delivery))
    if settings.store is None:
        return Route(delivery=delivery)
    waits = find(settings.store, settings.connections_file)
    if not is_store(waits):
        raise UnsupportedConnection(waits.conn_id, waits.conn_type, _SQL)
    store = Store(waits, deliver.conn_id, on_conflict=settings.on_conflict or "error", origin=settings.origin)
    hold_over = min(settings.hold_over, delivery.horizon)
    return Route(delivery=delivery, store=cast(DelayStore, store), hold_over=hold_over)


def transport_of(connection: Connection, *, clock: Clock, **options: Any) -> Transport:
    """Return the transport of a connection; nothing is connected yet.

    :param options: what else there is to say, see ``_OPTIONS``; one that is None is left out.
    :raises UnsupportedConnection: nothing serves that type.
    :raises UnsupportedOption: that transport has no such option.
    """
    known = _OPTIONS.get(connection.conn_type)
    if known is None:
        raise UnsupportedConnection(connection.conn_id, connection.conn_type, sorted(_OPTIONS))
    given = {name: value for name, value in options.items() if value is not None}
    if unknown := sorted(given.keys() - set(known)):
        raise UnsupportedOption(connection.conn_id, connection.conn_type, unknown)
    if connection.conn_type in _RABBITMQ:
        return RabbitMQ(connection, clock=clock, **given)
    if connection.conn_type == "aws":
        return Sqs(connection, clock=clock, **given)
    return Store(connection, None, **given)


class RabbitMQ:
    """RabbitMQ's delay levels, over one connection that is kept between sends.

    :param window: messages that may be unconfirmed at a time.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        clock: Clock,
        topology: str | None = None,
        routing: str | None = None,
        window: int | None = None,
    ) -> None:
        from airflow_delayed.rabbitmq.publisher import WINDOW
        from airflow_delayed.rabbitmq.topology import DELAYED, topology_of

        self._connection = connection
        self._clock = clock
        self._window = window or WINDOW
        extra = connection.extra
        # a caller's topology goes with the caller's routing, not with that of another one
        routing = routing or (extra.get("routing") if topology is None else None)
        self.topology = topology_of(topology or extra.get("topology") or DELAYED, routing)

    @property
    def horizon(self) -> timedelta:
        """All that the delay levels can hold."""
        from airflow_delayed.rabbitmq.levels import MAX_DELAY_SECONDS

        return timedelta(seconds=MAX_DELAY_SECONDS)

    def check(self, message: DelayedMessage, now: datetime) -> None:
        """Check one message against RabbitMQ's limits."""
        from airflow_delayed.rabbitmq.properties import check

        check(message, delay_seconds(message.due_at, now), self.topology)

    def send(self, messages: Iterable[DelayedMessage]) -> SendReport:
        """Send into the delay levels, see :meth:`airflow_delayed.rabbitmq.publisher.Publisher.send`."""
        return self._publisher.send(messages)

    def close(self) -> None:
        """Close the connection."""
        if "_publisher" in self.__dict__:
            self._publisher.close()
            del self._publisher

    @cached_property
    def _publisher(self) -> Publisher:
        from airflow_delayed.rabbitmq.parameters import parameters
        from airflow_delayed.rabbitmq.publisher import Publisher

        given = self._connection
        hosts = parameters(
            given.conn_id,
            conn_type=given.conn_type,
            host=given.host,
            port=given.port,
            login=given.login,
            password=given.password,
            schema=given.schema,
            extra=given.extra,
        )
        return Publisher(
            hosts,
            conn_id=given.conn_id,
            topology=self.topology,
            clock=self._clock,
            window=self._window,
            keep=True,
        )


#: Extras of Airflow's aws connections by which a role is taken on; an executor has one of its own.
_ROLES = ("role_arn", "assume_role_method", "assume_role_kwargs")
_SESSION = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token", "region_name", "profile_name")


class Sqs:
    """SQS. What the connection does not say, boto3 finds as ever: the environment, the machine's own role.

    :param envelope: the form of what is sent, in place of what the connection says.
    """

    def __init__(self, connection: Connection, *, clock: Clock, envelope: str | None = None) -> None:
        from airflow_delayed.sqs.outlet import Outlet

        if taken := [name for name in _ROLES if connection.extra.get(name)]:
            raise InputError(
                f"connection {connection.conn_id!r}: the extra {taken[0]!r} takes on a role, which is not done here;"
                " give Spark's executors the role itself, or a connection with keys"
            )
        self._connection = connection
        self._outlet = Outlet(
            connection.conn_id,
            lambda: self._client,
            connection.extra,
            envelope=envelope,
            clock=clock,
            sleep=time.sleep,
        )

    @property
    def horizon(self) -> timedelta:
        """What SQS itself can delay, less a margin."""
        from airflow_delayed.sqs.outlet import HORIZON

        return HORIZON

    def check(self, message: DelayedMessage, now: datetime) -> None:
        """Check one message against SQS's limits."""
        self._outlet.check(message, now)

    def send(self, messages: Iterable[DelayedMessage]) -> SendReport:
        """Send in batches, see :meth:`airflow_delayed.sqs.sender.Sender.send`."""
        return self._outlet.send(messages)

    def close(self) -> None:
        """Close the client."""
        if "_client" in self.__dict__:
            self._client.close()

    @cached_property
    def _client(self) -> SQSClient:
        from boto3.session import Session
        from botocore.config import Config

        from airflow_delayed.sqs.access import name_queues
        from airflow_delayed.sqs.faults import translated

        given, extra = self._connection, self._connection.extra
        session = {name: extra[name] for name in _SESSION if extra.get(name)}
        if given.login and given.password:
            session |= {"aws_access_key_id": given.login, "aws_secret_access_key": given.password}
        service = (extra.get("service_config") or {}).get("sqs") or {}
        config = Config(**{"parameter_validation": False, **(extra.get("config_kwargs") or {})})
        with translated(given.conn_id, "make a client"):
            client: SQSClient = Session(**session).client(
                "sqs",
                endpoint_url=service.get("endpoint_url") or extra.get("endpoint_url"),
                verify=extra.get("verify"),
                config=config,
            )
        name_queues(client)
        return client


class Store:
    """The SQL store, or queue tables of its database.

    :param deliver: the name of the connection that delivers in the end; None: the database itself, where a destination
        is a queue table.
    :param origin: the run of a task that is sent for; what is stored is found by it.
    """

    def __init__(
        self,
        connection: Connection,
        deliver: str | None,
        *,
        on_conflict: OnConflict = "error",
        origin: Origin | None = None,
    ) -> None:
        from airflow_delayed.spark.databases import engine_of
        from airflow_delayed.store.schema import store_tables

        self._conn_id = connection.conn_id
        self._deliver = deliver
        self._on_conflict = on_conflict
        self._origin = origin
        self._engine = engine_of(connection)
        self._tables = store_tables()
        self._checked = False

    @property
    def horizon(self) -> timedelta:
        """Zero: the store itself delivers nothing ahead."""
        return timedelta(0)

    def check(self, message: DelayedMessage, now: datetime) -> None:
        """Check a message against the table's columns."""
        from airflow_delayed.store.rows import check_limits, check_queue_name

        check_limits(message)
        if self._deliver is None:
            check_queue_name(message.destination)

    def send(self, messages: Iterable[DelayedMessage]) -> SendReport:
        """Store messages, see :func:`airflow_delayed.store.storing.store`."""
        from airflow_delayed.store.engine import database_errors
        from airflow_delayed.store.storing import store

        with database_errors(self._conn_id, self._engine, self._tables):
            self._check_version()
            return store(
                self._engine,
                self._tables,
                messages,
                self._deliver,
                on_conflict=self._on_conflict,
                origin=self._origin,
            )

    def known(self, ids: Sequence[str]) -> set[str]:
        """Return the ids that wait, have failed, or are remembered to have been handed over or cancelled."""
        from airflow_delayed.store.engine import database_errors
        from airflow_delayed.store.placing import known

        with (
            database_errors(self._conn_id, self._engine, self._tables),
            closing(self._engine.connect().execution_options(read_only=True)) as connection,
        ):
            self._check_version()
            return known(connection, self._tables, ids)

    def note_sent(self, messages: Sequence[DelayedMessage]) -> None:
        """Remember messages that their transport has confirmed, and that never waited here."""
        from airflow_delayed.store.engine import database_errors
        from airflow_delayed.store.storing import note_sent

        with database_errors(self._conn_id, self._engine, self._tables):
            self._check_version()
            note_sent(self._engine, self._tables, messages)

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    def _check_version(self) -> None:
        from airflow_delayed.store.versions import check_ready

        if not self._checked:
            check_ready(self._conn_id, self._engine, self._tables)
            self._checked = True
