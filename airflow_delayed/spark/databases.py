"""The engine of a SQL connection, as Airflow's own hooks make it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from sqlalchemy import URL, Engine, create_engine

from airflow_delayed.delivery import Connection
from airflow_delayed.errors import InputError, UnsupportedConnection
from airflow_delayed.store.engine import engine_options, prepare

#: Connection types that a store can be on.
SQL = ("sqlite", "postgres", "mysql")
_POSTGRES_DRIVERS = ("psycopg", "psycopg2")
#: The name of a driver in the extra ``client``, as Airflow's MySQL hook has it: its dialect and its module.
_MYSQL_CLIENTS = {
    "mysqlclient": ("mysql+mysqldb", "MySQLdb"),
    "mysql-connector-python": ("mysql+mysqlconnector", "mysql.connector"),
    "pymysql": ("mysql+pymysql", "pymysql"),
}
#: Extras that are Airflow's own affair; all others are the driver's.
_NOT_THE_DRIVERS = ("client", "cursor", "sqlalchemy_scheme", "sqlalchemy_query", "charset")
#: Extras by which Airflow's hooks fetch a password from elsewhere.
_FETCHED = ("iam", "redshift", "azure_conn_id")


def engine_of(connection: Connection) -> Engine:
    """Return an engine that is ready for the store.

    :raises UnsupportedConnection: no store is on such a connection.
    :raises InputError: its driver is missing, or its password is to be fetched from elsewhere.
    """
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
    if connection.conn_type == "sqlite":
        return URL.create("sqlite", database=connection.host or connection.schema), {}
    if connection.conn_type == "postgres":
        drivers = [name for name in _POSTGRES_DRIVERS if find_spec(name)]
        dialects = [f"postgresql+{name}" for name in drivers]
        wanted = "psycopg or psycopg2"
    elif connection.conn_type == "mysql":
        dialect, wanted = _mysql(connection)
        dialects = [dialect] if find_spec(wanted.partition(".")[0]) else []
    else:
        raise UnsupportedConnection(connection.conn_id, connection.conn_type, SQL)
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
    return url, {name: value for name, value in connection.extra.items() if name not in _NOT_THE_DRIVERS}


def _mysql(connection: Connection) -> tuple[str, str]:
    client = connection.extra.get("client", "mysqlclient")
    if client not in _MYSQL_CLIENTS:
        known = ", ".join(_MYSQL_CLIENTS)
        raise InputError(f"connection {connection.conn_id!r}: the extra client={client!r} is none of {known}")
    return _MYSQL_CLIENTS[client]
