"""Connections by name where there is no Airflow, and the transports made from them.

Connections come from a file of the cluster's, or from the environment. Both hold the JSON form that Airflow's own
``AIRFLOW_CONN_<NAME>`` has: an object with conn_type, host, port, login, password, schema and extra.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow_delayed.delivery import Clock, Connection, DelayStore, Delivery
from airflow_delayed.errors import InputError, UnsupportedConnection, UnsupportedOption
from airflow_delayed.route import Route
from airflow_delayed.spark.options import Settings, check_type, headers_of

if TYPE_CHECKING:
    from sqlalchemy import URL, Engine

    from airflow_delayed.store.api import Store

#: Environment variables of a connection, with its name in capitals at the end; the first that is there counts.
VARIABLES = ("DELAYED_CONN_", "AIRFLOW_CONN_")
#: The environment variable with the path of the file, where no option names one.
FILE_VARIABLE = "DELAYED_CONNECTIONS_FILE"
#: Fields of Airflow's form that are read.
CONNECTION_FIELDS = ("conn_type", "host", "port", "login", "password", "schema", "extra")
#: And names that are ignored.
_IGNORED = ("conn_id", "description", "team_name")


class ConnectionNotFound(InputError):
    """A connection is neither in the file nor in the environment of this machine."""


def spark_file(name: str) -> str:
    """Return the path of a file that was given to spark-submit by ``--files``."""
    from pyspark import SparkFiles

    return SparkFiles.get(name)


def find(
    conn_id: str,
    file: str | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    distributed: Callable[[str], str] = spark_file,
) -> Connection:
    """Return a connection by its name.

    :param file: a JSON file with an object of connections by name: a path, or the bare name of a file that Spark
        distributes (``--files``). By default the file of the environment variable ``DELAYED_CONNECTIONS_FILE``, or else
        the environment variable ``DELAYED_CONN_<NAME>`` or ``AIRFLOW_CONN_<NAME>``.
    :raises ConnectionNotFound: it is not there.
    :raises InputError: it cannot be read; its content is not shown.
    """
    file = file or environ.get(FILE_VARIABLE)
    if file:
        path = Path(file if "/" in file else distributed(file))
        known = _read(path)
        if conn_id in known:
            return parse(conn_id, known[conn_id], f"the file {path}")
        raise ConnectionNotFound(f"connection {conn_id!r} is not in the file {path}, which has {sorted(known)}")
    for name in (prefix + conn_id.upper() for prefix in VARIABLES):
        if name in environ:
            return parse(conn_id, environ[name], f"the environment variable {name}")
    raise ConnectionNotFound(
        f"connection {conn_id!r} is not known on this machine: set the environment variable"
        f" {VARIABLES[0]}{conn_id.upper()} of Spark's executors, or name a file of connections with the option"
        " connections_file"
    )


def with_headers(settings: Settings, *, distributed: Callable[[str], str] = spark_file) -> Settings:
    """Return the settings with the headers of the file that the option ``headers_file`` names, on this machine.

    :raises InputError: it cannot be read; its content is not shown.
    """
    file = settings.headers_file
    if file is None:
        return settings
    path = Path(file if "/" in file else distributed(file))
    try:
        headers = headers_of(path.read_text())
    except OSError as error:
        raise InputError(
            f"the file of headers {path} cannot be read: {error.strerror}; it has to be on every machine with an"
            " executor, readable for Spark's user"
        ) from None
    except ValueError as error:
        raise InputError(f"the file of headers {path} cannot be read: {error}") from None
    return replace(settings, rules=replace(settings.rules, headers=headers))


def _read(path: Path) -> Mapping[str, Any]:
    try:
        known = json.loads(path.read_text())
    except OSError as error:
        raise ConnectionNotFound(
            f"the file of connections {path} cannot be read: {error.strerror}; it has to be on every machine with an"
            " executor, readable for Spark's user"
        ) from None
    except ValueError:
        known = None
    if not isinstance(known, dict):
        raise InputError(f"the file of connections {path} is no JSON object of connections by name")
    return known


def parse(conn_id: str, given: object, place: str) -> Connection:
    """Return a connection from its JSON form, text or not.

    :raises InputError: it cannot be read; the text names its place, and shows none of its content.
    """
    if (read := _object(given)) is None:
        raise InputError(
            f'connection {conn_id!r}: {place} must have it as JSON, {{"conn_type": "rabbitmq", "host": ...}}; a URI'
            " cannot be read here"
        )
    unknown = sorted(read.keys() - {*CONNECTION_FIELDS, *_IGNORED})
    if unknown:
        raise InputError(f"connection {conn_id!r}: {place} has unknown fields {', '.join(unknown)}")
    fields = {name: read[name] for name in CONNECTION_FIELDS if read.get(name) not in (None, "")}
    fields["extra"] = _object(fields.get("extra") or {})
    if fields["extra"] is None:
        raise InputError(f"connection {conn_id!r}: {place} has an extra that is no JSON object")
    if not isinstance(fields.get("conn_type"), str):
        raise InputError(f"connection {conn_id!r}: {place} has no conn_type")
    try:
        if "port" in fields:
            fields["port"] = int(fields["port"])
    except (TypeError, ValueError):
        raise InputError(f"connection {conn_id!r}: {place} has a port that is no number") from None
    return Connection(conn_id=conn_id, **fields)


def _object(given: object) -> dict[str, Any] | None:
    """Return a JSON object, which may be written as text; None: it is something else."""
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


_RABBITMQ = ("rabbitmq", "amqp", "amqps")
#: Connection types that a store can be on.
_SQL = ("sqlite", "postgres", "mysql")
#: Options of the transports, by connection type.
_OPTIONS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(_RABBITMQ, ("window",)),
    "aws": ("envelope",),
    **dict.fromkeys(_SQL, ("on_conflict", "origin")),
}


def is_store(connection: Connection) -> bool:
    """Return whether a connection stores its messages itself."""
    return connection.conn_type in _SQL


def route_of(settings: Settings, *, clock: Clock, find: Callable[..., Connection] = find) -> Route:
    """Return the transport that delivers, and the store in front of it; nothing is connected yet."""
    deliver = find(settings.deliver, settings.connections_file)
    holds = is_store(deliver)
    check_type(settings, deliver.conn_type, holds=holds)
    options: dict[str, Any] = {name: getattr(settings, name) for name in ("window", "envelope")}
    if holds:
        options |= {"on_conflict": settings.on_conflict, "origin": settings.origin}
    delivery = transport_of(deliver, clock=clock, **options)
    store: DelayStore | None = None
    if settings.store is not None and not holds:
        waits = find(settings.store, settings.connections_file)
        if not is_store(waits):
            raise UnsupportedConnection(waits.conn_id, waits.conn_type, _SQL)
        store = _store(
            waits,
            deliver.conn_id,
            on_conflict=settings.on_conflict or "error",
            origin=settings.origin,
            until_due=settings.until_due,
        )
    return Route.of(delivery, store, hold_over=settings.hold_over, trace=settings.trace)


def transport_of(connection: Connection, *, clock: Clock, **options: Any) -> Delivery:
    """Return the transport of a connection; nothing is connected yet.

    :param options: see ``_OPTIONS``; None counts as not given.
    """
    known = _OPTIONS.get(connection.conn_type)
    if known is None:
        raise UnsupportedConnection(connection.conn_id, connection.conn_type, sorted(_OPTIONS))
    given = {name: value for name, value in options.items() if value is not None}
    if unknown := sorted(given.keys() - set(known)):
        raise UnsupportedOption(connection.conn_id, connection.conn_type, unknown)
    if connection.conn_type in _RABBITMQ:
        _require(connection, "pika")
        from airflow_delayed.rabbitmq.transport import RabbitMQTransport

        made = RabbitMQTransport(connection.conn_id, lambda: connection, clock=clock, **given)
        # a name that is not known is an error here, where nothing is connected
        _ = made.topology
        return made
    if connection.conn_type == "aws":
        _require(connection, "boto3")
        from airflow_delayed.sqs.transport import SqsTransport

        return SqsTransport.of(connection, clock=clock, **given)
    return _store(connection, None, **given)


def _require(connection: Connection, library: str) -> None:
    if not find_spec(library):
        raise InputError(f"connection {connection.conn_id!r} needs {library}; install it on Spark's executors")


def _store(connection: Connection, deliver_conn_id: str | None, **options: Any) -> Store:
    from airflow_delayed.store.api import Store

    # an engine that cannot be made is an error here, before anything is connected
    engine = engine_of(connection)
    return Store(connection.conn_id, lambda: engine, deliver_conn_id, **options)


_POSTGRES_DRIVERS = ("psycopg", "psycopg2")
#: Extras for Airflow, and the character set, which is that of all texts; all others are the driver's.
_NOT_THE_DRIVERS = ("client", "cursor", "sqlalchemy_scheme", "sqlalchemy_query", "charset", "client_encoding")
#: Extras that let Airflow's hooks fetch a password from elsewhere.
_FETCHED = ("iam", "redshift", "azure_conn_id")


def engine_of(connection: Connection) -> Engine:
    """Return an engine that is ready for the store."""
    from sqlalchemy import create_engine

    from airflow_delayed.store.api import engine_options, prepare

    if fetched := [name for name in _FETCHED if connection.extra.get(name)]:
        raise InputError(
            f"connection {connection.conn_id!r}: the extra {fetched[0]!r} lets Airflow fetch a password, which is not"
            " done here; give it login and password"
        )
    url, arguments = _url(connection)
    options = engine_options(url.get_dialect().name)
    options["connect_args"] = {**options.get("connect_args", {}), **arguments}
    return prepare(create_engine(url, **options))


def _url(connection: Connection) -> tuple[URL, Mapping[str, Any]]:
    from sqlalchemy import URL

    from airflow_delayed.store.api import dialect_named

    if connection.conn_type == "sqlite":
        return URL.create("sqlite", database=connection.host or connection.schema), {}
    if connection.conn_type == "postgres":
        drivers = [name for name in _POSTGRES_DRIVERS if find_spec(name)]
        dialects = [f"postgresql+{name}" for name in drivers]
        wanted = "psycopg or psycopg2"
    elif connection.conn_type == "mysql":
        dialect, wanted, *_ = dialect_named("mysql").client(connection.conn_id, connection.extra)
        dialects = [dialect] if find_spec(wanted.partition(".")[0]) else []
    else:
        raise UnsupportedConnection(connection.conn_id, connection.conn_type, _SQL)
    if not dialects:
        raise InputError(f"connection {connection.conn_id!r} needs {wanted}; install it on Spark's executors")
    url = URL.create(
        dialects[0],
        username=connection.login,
        password=connection.password,
        host=connection.host,
        port=connection.port,
        database=connection.schema,
    )
    arguments = {name: value for name, value in connection.extra.items() if name not in _NOT_THE_DRIVERS}
    if isinstance(arguments.get("ssl"), str):
        # as Airflow's hook reads it
        arguments["ssl"] = _object(arguments["ssl"])
        if arguments["ssl"] is None:
            raise InputError(f"connection {connection.conn_id!r}: the extra 'ssl' is no JSON object")
    return url, arguments
