"""The page of docs/spark is run as it stands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from support import pages
from support.spark import Connections, connections_fixture, spark_fixture  # noqa: F401 - fixtures

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.message import utcnow
from airflow_delayed.rabbitmq.publisher import WINDOW
from airflow_delayed.spark.options import BATCH_ROWS, NAMES, settings_of
from airflow_delayed.spark.reporting import EVERY


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


def test_links_lead_somewhere(page: Path) -> None:
    for link in pages.links(page):
        assert (page.parent / link.partition("#")[0]).resolve().exists(), link


def test_options_and_figures_are_told(page: Path) -> None:
    text = page.read_text()
    assert [name for name in NAMES if f"`{name}`" not in text] == []
    settings = settings_of({"deliver": "b"}, utcnow())
    assert (settings.hold_over.seconds, settings.max_past.seconds) == (900, 3600)
    assert (BATCH_ROWS, WINDOW, EVERY) == (5000, 1000, 10)
