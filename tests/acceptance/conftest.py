"""One live Airflow for all acceptance tests, with a store in PostgreSQL and a consumer outside it."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

import demo_ui
import pytest
from cryptography.fernet import Fernet
from reckoning import Consumer, consuming
from support.rabbitmq import VirtualHost, virtual_host

from services import airflow, chromium, java, postgres, process, sqs

DAG = "flight_reminders"
ROOT = Path(__file__).resolve().parents[2]
#: Nobody listens on this port.
DOWN = {"conn_type": "postgres", "host": "127.0.0.1", "port": 1, "login": "a", "password": "s3cret-word", "schema": "b"}


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
    #: The fields of its connections.
    connections: Mapping[str, Mapping[str, object]]
    #: Where queries and functions are spooled.
    spools: Path
    #: Where Airflow sends its metrics; a test may receive them.
    statsd_port: int

    def folder(self, run_id: str) -> Path:
        """The folder that a run's Spark job writes."""
        return self.reminders / run_id.replace(":", "-").replace("+", "-") / "reminders"

    def empty_store(self) -> None:
        """Forget what the store holds."""
        import psycopg2

        with closing(psycopg2.connect(self.store_url)) as database, database.cursor() as cursor:
            cursor.execute("delete from delayed_messages")
            database.commit()

    def stored(self) -> int:
        """How many messages the store holds."""
        import psycopg2

        with closing(psycopg2.connect(self.store_url)) as database, database.cursor() as cursor:
            cursor.execute("select count(*) from delayed_messages")
            return int(cursor.fetchone()[0])


@pytest.fixture(scope="package")
def world(sqs_endpoint: str, rabbitmq_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A live Airflow with the example DAG; nothing runs that a test does not start."""
    java.require()
    folder = tmp_path_factory.mktemp("world")
    # a queue of its own also on a server of the user's
    prefix = f"live-{secrets.token_hex(4)}-"
    statsd_port = process.free_port()
    # the examples, and DAGs for the tests alone
    dags = shutil.copytree(ROOT / "dags", folder / "dags")
    shutil.copytree(ROOT / "tests/acceptance/dags", dags, dirs_exist_ok=True)
    with postgres.running() as server, virtual_host(rabbitmq_url) as broker:
        metadata, fernet_key = create_database(server.url, "metadata"), Fernet.generate_key().decode()
        connections = {
            "delayed_sqs": sqs.connection(sqs_endpoint, queue_name_prefix=prefix),
            "delayed_store": connection_fields(server.url),
            "delayed_rabbitmq": broker.connection,
            "spark_default": airflow.LOCAL_SPARK,
            "down_store": DOWN,
        }
        with (
            consuming(f"{prefix}flight-reminders", sqs_endpoint, folder) as consumer,
            airflow.running(
                dags,
                database=metadata,
                connections=connections,
                **{**demo_ui.settings(folder), "AIRFLOW__DELAYED__PAGE_STORES": "delayed_store,down_store"},
                SPARK_CONF_DIR=str(spark_settings(folder)),
                PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
                AIRFLOW__DELAYED__SPOOL_FOLDER=str(folder / "spools"),
                FLIGHT_REMINDERS_FOLDER=str(folder / "reminders"),
                FLIGHTS_IN_ANY_ORDER="1",
                AIRFLOW__CORE__FERNET_KEY=fernet_key,
                AIRFLOW__CORE__TEST_CONNECTION="Enabled",
                AIRFLOW__METRICS__STATSD_ON="True",
                AIRFLOW__METRICS__STATSD_PORT=str(statsd_port),
                AIRFLOW__METRICS__STATSD_INFLUXDB_ENABLED="True",
                # a triggerer that was killed is missed sooner than after 30 s
                AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC="2",
                AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD="12",
            ) as live,
        ):
            process.wait_for(f"DAG {DAG}", lambda: live.has(DAG), seconds=120, log=live.folder / "dag-processor.log")
            live.call("PATCH", f"/dags/{DAG}", is_paused=False)
            urls = server.url, broker, prefix, metadata, fernet_key
            yield World(live, consumer, folder / "reminders", *urls, connections, folder / "spools", statsd_port)


def spark_settings(folder: Path) -> Path:
    """Make a folder with Spark's settings, and return it."""
    settings = folder / "spark"
    settings.mkdir()
    # the job's rows in any order are those of a shuffle, which is into 200 partitions unless told otherwise
    (settings / "spark-defaults.conf").write_text("spark.ui.enabled false\nspark.sql.shuffle.partitions 4\n")
    return settings


class Site:
    """Airflow's UI in a browser, where one user at a time is logged in."""

    def __init__(self, live: airflow.Airflow, browser: chromium.Browser) -> None:
        self._live = live
        self._browser = browser
        self._user: str | None = None

    def open(self, user: str, path: str, *, height: int = 1400) -> chromium.Page:
        """Open a page of Airflow; who is not logged in does so by the form, as a person does."""
        if user == self._user:
            page = self._browser.open(f"{self._live.url}{path}")
        else:
            page = self._browser.open(f"{self._live.url}/auth/logout")
            page.go(f"{self._live.url}/auth/login?next={quote(self._live.url + path, safe='')}")
            self.log_in(page, user)
        page.resize(1280, height)
        return page

    def log_in(self, page: chromium.Page, user: str) -> None:
        """Fill in the form of the login."""
        page.log_in(user, self._live.passwords[user])
        self._user = user


@pytest.fixture(scope="package")
def airflow_ui(world: World) -> Iterator[Site]:
    with chromium.running() as browser:
        yield Site(world.live, browser)


def create_database(url: str, name: str) -> str:
    """Make a database on a server, and return its URL."""
    import psycopg2

    with closing(psycopg2.connect(url)) as database, database.cursor() as cursor:
        database.autocommit = True
        cursor.execute(f"create database {name}")
    return urlsplit(url)._replace(path=f"/{name}").geturl()


def connection_fields(url: str) -> dict[str, object]:
    parts = urlsplit(url)
    return {
        "conn_type": "postgres",
        "host": parts.hostname,
        "port": parts.port,
        "login": parts.username,
        "password": parts.password,
        "schema": parts.path.lstrip("/"),
    }
