"""Airflow's connections, and headers, for Spark's executors, which have no Airflow.

Spark shows options, settings and the variables of ``spark.executorEnv`` in its UI and writes them into its event log.
So connections go as a file, or in the environment of a Spark that runs on this machine alone; the secrets of
connections are masked in every log. Headers go as a file too.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from airflow.sdk import BaseHook
from airflow.sdk.log import mask_secret

from airflow_delayed.spark.connections import CONNECTION_FIELDS, VARIABLES

#: The files' names, by which executors find them where Spark distributes them.
FILE = "delayed-connections.json"
HEADERS_FILE = "delayed-headers.json"


def spark_environment(conn_ids: Iterable[str]) -> dict[str, str]:
    """Return connections as environment variables, for a Spark process on this machine: master ``local[...]``.

    Call it when the task runs, never while a DAG is parsed, and do not give the result to SparkSubmitOperator's
    ``env_vars`` for YARN or Kubernetes: its hook writes them onto spark-submit's command line, and Spark shows them.

    :raises AirflowNotFoundException: there is no connection of that name.
    """
    return {VARIABLES[0] + conn_id.upper(): json.dumps(_plain(conn_id)) for conn_id in conn_ids}


@contextmanager
def spark_connections_file(conn_ids: Iterable[str]) -> Iterator[str]:
    """Make a file of connections that only this user may read, for spark-submit's ``--files``; remove it in the end.

    Its bare name is what the option ``connections_file`` takes then.

    :raises AirflowNotFoundException: there is no connection of that name.
    """
    with _private_file(FILE, {conn_id: _plain(conn_id) for conn_id in conn_ids}) as path:
        yield path


@contextmanager
def spark_headers_file(headers: Mapping[str, str]) -> Iterator[str]:
    """Make such a file of headers; its bare name is what the option ``headers_file`` takes then."""
    with _private_file(HEADERS_FILE, headers) as path:
        yield path


@contextmanager
def _private_file(name: str, content: Mapping[str, Any]) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="delayed-spark-") as folder:
        file = Path(folder, name)
        file.touch(mode=0o600, exist_ok=False)
        file.write_text(json.dumps(content))
        yield str(file)


def _plain(conn_id: str) -> dict[str, Any]:
    connection = BaseHook.get_connection(conn_id)
    fields = {name: getattr(connection, name) for name in CONNECTION_FIELDS} | {"extra": connection.extra_dejson}
    secrets: Any = {"password": connection.password, "extra": connection.extra_dejson}
    for form in (secrets, _in_json(secrets)):
        # of an extra the values whose names sound like secrets
        mask_secret(form)
    return {name: value for name, value in fields.items() if value}


def _in_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _in_json(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_in_json(one) for one in value]
    return json.dumps(value)[1:-1] if isinstance(value, str) else value
