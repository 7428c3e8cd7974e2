"""What a broker says of itself when a connection is opened."""

from __future__ import annotations

from collections.abc import Sequence

from pika import ConnectionParameters, SelectConnection
from pika.adapters.utils.connection_workflow import AMQPConnectorException
from pika.exceptions import AMQPError


def version(hosts: Sequence[ConnectionParameters]) -> str | None:
    """Return a broker's version, such as ``3.13.7``, as its AMQP greeting has it; None if no host says."""
    for host in hosts:
        try:
            return _version(host)
        except (AMQPError, AMQPConnectorException, OSError):
            continue
    return None


def _version(parameters: ConnectionParameters) -> str | None:
    found: list[str] = []
    errors: list[BaseException] = []

    def opened(connection: SelectConnection) -> None:
        said = (connection.server_properties or {}).get("version")
        found.append(said.decode() if isinstance(said, bytes) else str(said or ""))
        connection.close()

    def failed(connection: SelectConnection, error: BaseException | str) -> None:
        errors.append(error if isinstance(error, BaseException) else ConnectionError(error))
        connection.ioloop.stop()

    # pika's blocking connection has this too, and does not show it
    connection = SelectConnection(
        parameters,
        on_open_callback=opened,
        on_open_error_callback=failed,
        on_close_callback=lambda closed, _: closed.ioloop.stop(),
    )
    try:
        connection.ioloop.start()
    finally:
        connection.ioloop.close()
    if errors:
        raise errors[0]
    return next(iter(found), None) or None
