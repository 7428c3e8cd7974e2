"""Connections by name where there is no Airflow: from a file of the cluster's, or from the environment.

Both hold the JSON form that Airflow's own ``AIRFLOW_CONN_<NAME>`` has: an object with conn_type, host, port, login,
password, schema and extra.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from airflow_delayed.delivery import Connection
from airflow_delayed.errors import InputError

#: Environment variables of a connection, with its name in capitals at the end; the first that is there counts.
VARIABLES = ("DELAYED_CONN_", "AIRFLOW_CONN_")
#: The environment variable with the path of the file, where no option names one.
FILE_VARIABLE = "DELAYED_CONNECTIONS_FILE"
_FIELDS = ("conn_type", "host", "port", "login", "password", "schema", "extra")
#: Fields of Airflow's form that say nothing here.
_PASSED_OVER = ("conn_id", "description", "team_name")


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
    :raises InputError: what is there cannot be read; its content is not shown.
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

    :raises InputError: it cannot be read; the text says where it is, and not what it holds.
    """
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            given = None
    if not isinstance(given, dict):
        raise InputError(
            f'connection {conn_id!r}: {place} must have it as JSON, {{"conn_type": "rabbitmq", "host": ...}}; a URI'
            " cannot be read here"
        )
    unknown = sorted(given.keys() - {*_FIELDS, *_PASSED_OVER})
    if unknown:
        raise InputError(f"connection {conn_id!r}: {place} has unknown fields {', '.join(unknown)}")
    fields = {name: given[name] for name in _FIELDS if given.get(name) not in (None, "")}
    fields["extra"] = _extra(conn_id, fields.get("extra") or {}, place)
    if not isinstance(fields.get("conn_type"), str):
        raise InputError(f"connection {conn_id!r}: {place} has no conn_type")
    try:
        if "port" in fields:
            fields["port"] = int(fields["port"])
    except (TypeError, ValueError):
        raise InputError(f"connection {conn_id!r}: {place} has a port that is no number") from None
    return Connection(conn_id=conn_id, **fields)


def _extra(conn_id: str, extra: object, place: str) -> Mapping[str, Any]:
    if isinstance(extra, str):
        try:
            extra = json.loads(extra)
        except ValueError:
            extra = None
    if not isinstance(extra, dict):
        raise InputError(f"connection {conn_id!r}: {place} has an extra that is no JSON object")
    return extra
