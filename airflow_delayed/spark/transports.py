"""Transports made from a plain connection: the publishers, senders and statements are those that the hooks use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from airflow_delayed.delivery import Clock, Connection, DelayStore, Delivery
from airflow_delayed.errors import UnsupportedConnection, UnsupportedOption
from airflow_delayed.route import Route
from airflow_delayed.spark.connections import find
from airflow_delayed.spark.options import Settings, check_type

if TYPE_CHECKING:
    from airflow_delayed.store.api import Store

_RABBITMQ = ("rabbitmq", "amqp", "amqps")
_SQL = ("sqlite", "postgres", "mysql")
#: Options of the transports, by what a connection of that type has.
_OPTIONS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(_RABBITMQ, ("topology", "routing", "window")),
    "aws": ("envelope",),
    **dict.fromkeys(_SQL, ("on_conflict", "origin")),
}


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
    delivery = transport_of(deliver, clock=clock, **options)
    if holds:
        return Route(delivery=delivery, store=cast(DelayStore, delivery))
    if settings.store is None:
        return Route(delivery=delivery)
    waits = find(settings.store, settings.connections_file)
    if not is_store(waits):
        raise UnsupportedConnection(waits.conn_id, waits.conn_type, _SQL)
    store = _store(waits, deliver.conn_id, on_conflict=settings.on_conflict or "error", origin=settings.origin)
    return Route(delivery=delivery, store=store, hold_over=min(settings.hold_over, delivery.horizon))


def transport_of(connection: Connection, *, clock: Clock, **options: Any) -> Delivery:
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
        from airflow_delayed.rabbitmq.transport import RabbitMQTransport

        made = RabbitMQTransport(connection.conn_id, lambda: connection, clock=clock, **given)
        # a name that is not known is an error here, where nothing is connected
        _ = made.topology
        return made
    if connection.conn_type == "aws":
        from airflow_delayed.sqs.transport import SqsTransport

        return SqsTransport.of(connection, clock=clock, **given)
    return _store(connection, None, **given)


def _store(connection: Connection, deliver_conn_id: str | None, **options: Any) -> Store:
    from airflow_delayed.spark.databases import engine_of
    from airflow_delayed.store.api import Store

    # what keeps it from being made is an error here, where nothing is connected
    engine = engine_of(connection)
    return Store(connection.conn_id, lambda: engine, deliver_conn_id, **options)
