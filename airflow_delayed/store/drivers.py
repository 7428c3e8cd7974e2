"""MySQL's drivers, as Airflow's hook has them in the extra ``client``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from airflow_delayed.errors import InputError


class MysqlClient(NamedTuple):
    """A driver of MySQL: its dialect, its module, and the extras that ask it for TLS, with an example."""

    dialect: str
    module: str
    tls: str
    example: str


#: By the extra ``client``.
_MYSQL_CLIENTS: Mapping[str, MysqlClient] = {
    "mysqlclient": MysqlClient("mysql+mysqldb", "MySQLdb", r"ssl|ssl_mode", '"ssl": {"ca": "/path/ca.pem"}'),
    "mysql-connector-python": MysqlClient(
        "mysql+mysqlconnector", "mysql.connector", r"ssl_\w+", '"ssl_ca": "/path/ca.pem"'
    ),
}
#: How a name begins that asks for TLS somewhere.
_ASKS_FOR_TLS = re.compile(
    r"(use_?|require_?)?(ssl|tls)|(ca|cert|key)_?(file|path|cert)|ca$|cert|verify", re.IGNORECASE
)


def mysql_client(conn_id: str, extra: Mapping[str, Any]) -> MysqlClient:
    """Return the driver that a connection names; it must know the extras that ask for TLS."""
    name = extra.get("client") or "mysqlclient"
    if name not in _MYSQL_CLIENTS:
        choices = ", ".join(_MYSQL_CLIENTS)
        raise InputError(f"connection {conn_id!r}: the extra client={name!r} is none of {choices}")
    client = _MYSQL_CLIENTS[name]
    for key, value in extra.items():
        if value and _ASKS_FOR_TLS.match(key) and not re.fullmatch(client.tls, key):
            raise InputError(
                f"connection {conn_id!r}: {name} ignores the extra {key!r}, and would connect without it; write for"
                f" instance {client.example}"
            )
    return client
