"""Spark for the tests: executors that have no Airflow, and connections in a file."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from services import java

if TYPE_CHECKING:
    from airflow_delayed.hooks.store import DelayedStoreHook

ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    """What a Spark process needs so that its Python has the package and no Airflow."""
    here = os.pathsep.join([str(ROOT / "tests/support/without_airflow"), str(ROOT)])
    dropped = ("SPARK_HOME", "PYTHONPATH", "AIRFLOW_HOME")
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    return env | {
        "PATH": f"{Path(sys.executable).parent}:{env['PATH']}",
        "PYTHONPATH": here,
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        **java.options(),
    }


def session(master: str, **conf: str) -> SparkSession:
    """A session in this process, which ends one that has another master; what it starts has no Airflow."""
    running = SparkSession.getActiveSession()
    if running is not None and running.sparkContext.master != master:
        running.stop()
    java.require()
    before, wanted = dict(os.environ), environment()
    os.environ.clear()
    os.environ.update(wanted)
    try:
        builder = SparkSession.builder.master(master).appName("airflow_delayed tests")
        settings = {
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.session.timeZone": "UTC",
            "spark.sql.shuffle.partitions": "2",
            "spark.driver.memory": "1g",
            **conf,
        }
        for name, value in settings.items():
            builder = builder.config(name, value)
        made = builder.getOrCreate()
    finally:
        os.environ.clear()
        os.environ.update(before)
    made.sparkContext.setLogLevel("ERROR")
    # it tells the end of its connections, when nobody listens any more
    logging.getLogger("py4j").setLevel(logging.WARNING)
    return made


@pytest.fixture(name="spark")
def spark_fixture() -> SparkSession:
    """Spark in local mode, whose tasks are tried twice; one that runs serves all tests of this process."""
    return session("local[2,2]")


class Connections:
    """A file of connections, as a cluster's secret store would mount it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, dict] = {}
        self._write()

    def add(self, name: str, **fields: object) -> str:
        self._known[name] = fields
        self._write()
        return name

    def add_postgres(self, name: str, url: str, schema: str | None = None) -> str:
        from sqlalchemy import make_url

        parts = make_url(url)
        extra = {"options": f"-csearch_path={schema}"} if schema else {}
        return self.add(
            name,
            conn_type="postgres",
            host=parts.host,
            port=parts.port,
            login=parts.username,
            password=parts.password,
            schema=parts.database,
            extra=extra,
        )

    def json(self, name: str) -> str:
        return json.dumps(self._known[name])

    def _write(self) -> None:
        self.path.touch(mode=0o600)
        self.path.write_text(json.dumps(self._known))


@pytest.fixture(name="connections")
def connections_fixture(tmp_path: Path) -> Connections:
    return Connections(tmp_path / "connections.json")


@pytest.fixture(name="store")
def waiting_store_fixture(
    postgres_url: str, connections: Connections, connect: Callable[..., str]
) -> Iterator[DelayedStoreHook]:
    """A store in PostgreSQL, as the connection ``waits``; seen here as Airflow's, for messages that broker delivers."""
    # benchmarks import this module before Airflow has a home
    from airflow_delayed.hooks.store import DelayedStoreHook
    from support.stores import run_sql

    schema = f"spark_{uuid4().hex[:8]}"
    run_sql(postgres_url, f'CREATE SCHEMA "{schema}"')
    connections.add_postgres("waits", postgres_url, schema)
    connect("waits", connections.json("waits"))
    made = DelayedStoreHook("waits", "broker")
    made.install([])
    yield made
    made.close()
    run_sql(postgres_url, f'DROP SCHEMA "{schema}" CASCADE')


def rows(spark: SparkSession, count: int, *, due_at: datetime, partitions: int = 2, prefix: str = "m") -> DataFrame:
    """Messages with ids m0, m1, ... to the queue mail, made by Spark itself."""
    name = F.concat(F.lit(prefix), F.col("id").cast("string"))
    return spark.range(0, count, 1, partitions).select(
        name.alias("message_id"),
        F.lit("mail").alias("destination"),
        F.concat(F.lit("body of "), name).alias("value"),
        F.lit(due_at.astimezone(timezone.utc).isoformat()).cast("timestamp").alias("due_at"),
        F.create_map(F.lit("content-type"), F.lit("text/plain")).alias("headers"),
        F.concat(F.lit("order "), (F.col("id") % 7).cast("string")).alias("tag"),
    )


def send(frame: DataFrame, connections: Connections, deliver: str, **options: object) -> None:
    """Write a DataFrame as a user does."""
    writer = frame.write.format("delayed").mode("append").option("deliver", deliver)
    writer = writer.option("connections_file", str(connections.path))
    for name, value in options.items():
        writer = writer.option(name, str(value))
    writer.save()


@pytest.fixture(name="spark_submit")
def spark_submit_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Close the pipe to spark-submit, which Airflow's hook leaves to the garbage collector, and so to another test."""
    from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook

    submit = SparkSubmitHook.submit

    def submit_and_close(hook: SparkSubmitHook, *arguments: object, **options: object) -> None:
        try:
            submit(hook, *arguments, **options)
        finally:
            if hook._submit_sp is not None:
                hook._submit_sp.stdout.close()

    monkeypatch.setattr(SparkSubmitHook, "submit", submit_and_close)
