"""The page of docs/spark is run as it stands."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from pyspark.sql import SparkSession
from support import pages
from support.examples import dags_of, result
from support.rabbitmq import VirtualHost
from support.spark import Connections

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.message import utcnow
from airflow_delayed.rabbitmq.publisher import WINDOW
from airflow_delayed.spark.options import BATCH_ROWS, NAMES, settings_of
from airflow_delayed.spark.reporting import EVERY

pytestmark = pytest.mark.long


@pytest.fixture
def page(here: Path) -> Path:
    return here / "docs/spark/README.md"


@pytest.fixture
def store(connections: Connections, connect, tmp_path: Path) -> Iterator[DelayedStoreHook]:
    connections.add("broker", conn_type="rabbitmq", host="127.0.0.1")
    connections.add("reminders_db", conn_type="sqlite", host=str(tmp_path / "reminders.db"))
    for name in ("broker", "reminders_db"):
        connect(name, connections.json(name))
    made = DelayedStoreHook("reminders_db", "broker")
    made.install([])
    yield made
    made.close()


def test_the_page(
    page: Path, spark: SparkSession, store: DelayedStoreHook, connections: Connections, tmp_path: Path
) -> None:
    def change(block: str) -> str:
        block = block.replace("/run/secrets/delayed.json", str(connections.path))
        return block.replace("/tmp/reminders.json", str(tmp_path / "reminders.json"))

    assert len(list(pages.run(page, change))) == 5
    assert store.count() == 1000
    assert json.loads((tmp_path / "reminders.json").read_text())["destinations"] == {"reminders": 1000}


def test_the_job_and_the_dag_of_a_start(
    here: Path, spark: SparkSession, empty_vhost: VirtualHost, connect, run_dag, tmp_path: Path, monkeypatch
) -> None:
    """docs/start/dags.md: a job without any configuration, RabbitMQ and a store, where nothing is installed."""
    connect("rabbitmq_default", **empty_vhost.connection)
    connect("reminders_db", conn_type="sqlite", host=str(tmp_path / "store.db"))
    python = [text for language, text in pages.blocks(here / "docs/start/dags.md") if language == "python"]
    job, code = python[:2]
    soon = utcnow().replace(microsecond=0) + timedelta(hours=2, minutes=5)
    job = job.replace("2030-07-31T09:30:00+02:00", soon.isoformat())

    def execute(operator: Any, context: Any) -> None:
        assert operator.application == "/jobs/reminders.py"
        monkeypatch.setattr(sys, "argv", ["reminders.py", *operator.application_args])
        exec(compile(job, "reminders.py", "exec"), {})

    monkeypatch.setattr(SparkSubmitOperator, "execute", execute)
    (tmp_path / "dags.py").write_text(code.replace("/data", str(tmp_path)))
    dags = dags_of(tmp_path / "dags.py", monkeypatch)
    summary = result(run_dag(dags["remind_by_spark"]), "send")
    assert (summary["sent"], summary["stored"]) == (1, 1)
    with closing(DelayedStoreHook("reminders_db")) as store:
        # half past nine in winter, less two hours
        assert [one.due_at for one in store.list()] == [datetime(2030, 1, 31, 6, 30, tzinfo=timezone.utc)]
    assert result(run_dag(dags["dispatch_to_rabbitmq"]), "dispatch")["dispatched"] == 0
    # a run on the same day means the same messages
    again = result(run_dag(dags["remind_by_spark"]), "send")
    assert (again["sent"], again["stored"]) == (0, 0)


def test_options_and_figures_are_told(page: Path) -> None:
    text = page.read_text()
    assert [name for name in NAMES if f"`{name}`" not in text] == []
    settings = settings_of({"deliver": "b"}, utcnow())
    assert (settings.hold_over.seconds, settings.max_past.seconds) == (900, 3600)
    assert (BATCH_ROWS, WINDOW, EVERY) == (5000, 1000, 10)
