"""The sources and destinations of messages, by OpenLineage's names.

Files, tables and topics are named as OpenLineage's ``spec/Naming.md`` and Airflow's own hooks have them. OpenLineage
has no rule for queues: RabbitMQ's are named as Kafka's topics are, by ``amqp://{host}:{port}``, and SQS's as AWS Glue's
tables are, by the first part of their ARN.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from os.path import abspath
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from airflow_delayed.addresses import parse
from airflow_delayed.errors import explained

log = logging.getLogger(__name__)

#: How many datasets a task names on either side.
MOST_DATASETS = 100

_SCHEMES = {"postgresql": "postgres", "mariadb": "mysql"}
_PORTS = {"postgres": 5432, "mysql": 3306, "mssql": 1433}


class Dataset(NamedTuple):
    """A file, a table or a queue; the namespace is its data source."""

    namespace: str
    name: str


def file(url: str) -> Dataset:
    """Name a file or folder by a path, or by any URL; the connection in ``s3://conn_id@bucket/key`` is left out."""
    if "://" not in url:
        return Dataset("file", abspath(url))
    parts = parse(url)
    assert parts is not None
    if parts.scheme in ("file", "local"):
        return Dataset("file", parts.path)
    scheme = {"s3a": "s3", "s3n": "s3", "gcs": "gs"}.get(parts.scheme, parts.scheme)
    # object stores have keys, and file systems have paths
    path = parts.path if scheme in ("hdfs", "webhdfs") else parts.shown_path.strip("/")
    return Dataset(f"{scheme}://{parts.host}", path or "/")


def table(
    dialect: str, host: str | None, port: int | None, database: str | None, schema: str | None, name: str
) -> Dataset:
    """Name a table; on MySQL and MariaDB a schema is a database."""
    scheme = _SCHEMES.get(dialect, dialect)
    if scheme == "sqlite":
        return Dataset(f"sqlite://{database}", name)
    parts = (schema or database, name) if scheme == "mysql" else (database, schema, name)
    return Dataset(
        f"{scheme}://{host or 'localhost'}:{port or _PORTS.get(scheme)}", ".".join(part for part in parts if part)
    )


def rabbitmq_queue(host: str, virtual_host: str, queue: str) -> Dataset:
    """Name a queue of RabbitMQ; a virtual host other than ``/`` stands before its name."""
    return Dataset(f"amqp://{host}", queue if virtual_host == "/" else f"{virtual_host}/{queue}")


def sqs_queue(partition: str, region: str, url: str) -> Dataset:
    """Name a queue of SQS, so that namespace, colon and name are its ARN."""
    account, name = urlsplit(url).path.rsplit("/", 2)[-2:]
    return Dataset(f"arn:{partition}:sqs:{region}:{account}", name)


class Traced:
    """OpenLineage's interface of an operator, see the page docs/airflow/lineage.md."""

    _inputs: Sequence[Dataset] = ()
    _outputs: Sequence[Dataset] = ()

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> Any:
        """Return the task's inputs and outputs as OpenLineage's OperatorLineage, also when it failed half-way."""
        from airflow.providers.common.compat.openlineage.facet import Dataset as Named
        from airflow.providers.openlineage.extractors import OperatorLineage  # type: ignore[import-not-found]

        def named(datasets: Iterable[Dataset]) -> list[Any]:
            return [Named(namespace=one.namespace, name=one.name) for one in datasets]

        return OperatorLineage(inputs=named(self._inputs), outputs=named(self._outputs))

    def _trace(self, datasets: Callable[[], tuple[Iterable[Dataset], Iterable[Dataset]]]) -> None:
        """Note inputs and outputs, if OpenLineage is installed: each once, the first hundred."""
        if not wanted():
            return
        try:
            inputs, outputs = datasets()
            self._inputs = list(dict.fromkeys(inputs))[:MOST_DATASETS]
            self._outputs = list(dict.fromkeys(outputs))[:MOST_DATASETS]
        except Exception as error:
            log.warning("inputs and outputs could not be reported to OpenLineage: %s", explained(error))


def wanted() -> bool:
    """Return whether OpenLineage's provider is installed."""
    return find_spec("airflow.providers.openlineage") is not None
