"""One live Airflow for all acceptance tests, with a store in PostgreSQL and a consumer outside it."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from cryptography.fernet import Fernet
from reckoning import Consumer, consuming
from support.rabbitmq import VirtualHost, virtual_host

from services import airflow, java, postgres, process, sqs

DAG = "flight_reminders"
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class World:
    """A running Airflow that knows the example DAG, and what its messages come to."""

    live: airflow.Airflow
    consumer: Consumer
    reminders: Path
    store_url: str
    broker: VirtualHost
    #: Of the names of its queues in SQS.
    prefix: str
    #: Of Airflow's own database, and the key of what is encrypted in it.
    metadata_url: str
    fernet_key: str

    def folder(self, run_id: str) -> Path:
        """The folder that a run's Spark job writes."""
        return self.reminders / run_id.replace(":", "-").replace("+", "-") / "reminders"

    def held(self) -> int:
        """How many messages the store holds."""
        import psycopg2

        with closing(psycopg2.connect(self.store_url)) as database, database.cursor() as cursor:
            cursor.execute("select count(*) from delayed_messages")
            return int(cursor.fetchone()[0])


@pytest.fixture(scope="session")
def world(sqs_endpoint: str, rabbitmq_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A live Airflow with the example DAG; nothing runs that a test does not start."""
    java.require()
    folder = tmp_path_factory.mktemp("world")
    # a queue of its own also on a server of the user's
    prefix = f"live-{secrets.token_hex(4)}-"
    # the examples, and DAGs for the tests alone
    dags = shutil.copytree(ROOT / "dags", folder / "dags")
    shutil.copytree(ROOT / "tests/acceptance/dags", dags, dirs_exist_ok=True)
    with postgres.running() as server, virtual_host(rabbitmq_url) as broker:
        metadata, fernet_key = create_database(server.url, "metadata"), Fernet.generate_key().decode()
        connections = {
            "delayed_sqs": sqs.connection(sqs_endpoint, queue_name_prefix=prefix),
            "delayed_store": _connection(server.url),
            "delayed_rabbitmq": broker.connection,
            "spark_default": airflow.LOCAL_SPARK,
        }
        with (
            consuming(f"{prefix}flight-reminders", sqs_endpoint, folder) as consumer,
            airflow.running(
                dags,
                database=metadata,
                connections=connections,
                FLIGHT_REMINDERS_FOLDER=str(folder / "reminders"),
                FLIGHTS_IN_ANY_ORDER="1",
                AIRFLOW__CORE__FERNET_KEY=fernet_key,
                AIRFLOW__CORE__TEST_CONNECTION="Enabled",
                # a triggerer that was killed is missed sooner than after 30 s
                AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC="2",
                AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD="8",
            ) as live,
        ):
            process.wait_for(f"DAG {DAG}", lambda: live.has(DAG), seconds=120, log=live.folder / "dag-processor.log")
            live.call("PATCH", f"/dags/{DAG}", is_paused=False)
            yield World(live, consumer, folder / "reminders", server.url, broker, prefix, metadata, fernet_key)


def create_database(url: str, name: str) -> str:
    """Make a database on a server, and return its URL."""
    import psycopg2

    with closing(psycopg2.connect(url)) as database, database.cursor() as cursor:
        database.autocommit = True
        cursor.execute(f"create database {name}")
    return urlsplit(url)._replace(path=f"/{name}").geturl()


def _connection(url: str) -> dict[str, object]:
    parts = urlsplit(url)
    return {
        "conn_type": "postgres",
        "host": parts.hostname,
        "port": parts.port,
        "login": parts.username,
        "password": parts.password,
        "schema": parts.path.lstrip("/"),
    }
