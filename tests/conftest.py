"""Servers for the tests, started when a test first asks for one; an Airflow home of the test run's own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Airflow reads its home when it is first imported
_HOME = tempfile.TemporaryDirectory(prefix="airflow-delayed-")
os.environ.update(
    AIRFLOW_HOME=_HOME.name,
    AIRFLOW__CORE__DAGS_FOLDER=_HOME.name + "/dags",
    AIRFLOW__CORE__LOAD_EXAMPLES="False",
    AIRFLOW__CORE__UNIT_TEST_MODE="False",
    AIRFLOW__LOGGING__LOGGING_LEVEL="INFO",
)
Path(_HOME.name, "dags").mkdir()

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

# a slow machine is no failure
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


@pytest.fixture(scope="session")
def rabbitmq_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """amqp:// URL of a RabbitMQ: that of RABBITMQ_URL, or a private one."""
    if url := os.environ.get("RABBITMQ_URL"):
        yield url
        return
    from services import rabbitmq

    with rabbitmq.running() as broker:
        yield broker.url


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """postgresql:// URL of a database that may be filled: that of POSTGRES_URL, or a private one."""
    if url := os.environ.get("POSTGRES_URL"):
        yield url
        return
    from services import postgres

    with postgres.running() as server:
        yield server.url


@pytest.fixture(scope="session")
def mariadb_url() -> Iterator[str]:
    """mysql:// URL of a database; its user may make more. That of MARIADB_URL, or a private one."""
    if url := os.environ.get("MARIADB_URL"):
        yield url
        return
    from services import mariadb

    with mariadb.running() as server:
        yield server.url


@pytest.fixture(scope="session")
def sqs_endpoint() -> Iterator[str]:
    """http:// endpoint of an SQS: that of SQS_ENDPOINT, or a private ministack."""
    if url := os.environ.get("SQS_ENDPOINT"):
        yield url
        return
    from services import sqs

    with sqs.running() as server:
        yield server.url


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch):
    """Define an Airflow connection for one test: connect("name", conn_type=..., host=..., extra={...}) or a URI."""
    import json

    def define(conn_id: str, uri: str | None = None, **fields: object) -> str:
        monkeypatch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", uri or json.dumps(fields))
        return conn_id

    return define


@pytest.fixture
def here() -> Path:
    """The top of the repository."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def airflow_db() -> None:
    """Airflow's own database, for tests that run a DAG."""
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-m", "airflow", "db", "migrate"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def run_dag(airflow_db: None):
    """Run a DAG that a test has made, in this process, and return its run."""

    def run(dag, **arguments):
        from airflow.dag_processing.bundles.manager import DagBundlesManager
        from airflow.dag_processing.dagbag import DagBag, sync_bag_to_db

        bag = DagBag(os.devnull)
        bag.bag_dag(dag)
        DagBundlesManager().sync_bundles_to_db()
        sync_bag_to_db(bag, "dags-folder", None)
        return dag.test(**arguments)

    return run
