"""The example DAG: a year of flights (of a short run some days) through Spark into the store, a day's into RabbitMQ."""

from __future__ import annotations

import tempfile
from datetime import datetime, timezone
from pathlib import Path
from uuid import uuid4

import pytest
from airflow.dag_processing.dagbag import DagBag
from sqlalchemy import func, make_url, select
from support import flights
from support.lengths import length
from support.rabbitmq import VirtualHost
from support.spark import Connections, environment
from support.stores import run_sql

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.identity import Origin
from services import java

pytestmark = pytest.mark.long

#: Days of the year, as month and day: its first and its last, and the one that goes to the broker.
DAYS = length("days of a year of flights", {(1, 1), (6, 14), (12, 31)}, None)


@pytest.fixture
def cluster(connect, spark_submit: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Spark on this machine, whose Python has no Airflow."""
    java.require()
    for name, value in environment().items():
        if name in ("PATH", "PYTHONPATH", "PYSPARK_PYTHON", "SPARK_LOCAL_IP", "JDK_JAVA_OPTIONS"):
            monkeypatch.setenv(name, value)
    connect("spark_default", conn_type="spark", host="local[2]")
    (tmp_path / "events").mkdir()
    (tmp_path / "spark-defaults.conf").write_text(
        f"spark.eventLog.enabled true\nspark.eventLog.compress false\nspark.eventLog.dir file://{tmp_path}/events\n"
        "spark.ui.enabled false\n"
    )
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))


@pytest.mark.timeout(900)
def test_a_year_of_flights(
    here: Path,
    cluster,
    vhost: VirtualHost,
    postgres_url: str,
    connections: Connections,
    connect,
    run_dag,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd,
) -> None:
    monkeypatch.setenv("FLIGHT_REMINDERS_FOLDER", str(tmp_path / "flights"))
    # others' temporary files are none of this test's
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    count = 336_776
    if DAYS is not None:
        count = flights.write_fewer(tmp_path / "fewer", lambda row: (int(row["month"]), int(row["day"])) in DAYS)
        assert count > 2_000
        monkeypatch.syspath_prepend(tmp_path / "fewer")
    schema = f"flights_{uuid4().hex[:8]}"
    run_sql(postgres_url, f'CREATE SCHEMA "{schema}"')
    connections.add_postgres("delayed_store", postgres_url, schema)
    connect("delayed_store", connections.json("delayed_store"))
    login, secret = f"spark-{schema}", f"hush {schema}"
    vhost.manage("PUT", f"users/{login}", {"password": secret, "tags": "administrator"})
    vhost.manage("PUT", f"permissions/{{vhost}}/{login}", {"configure": ".*", "write": ".*", "read": ".*"})
    connect("delayed_rabbitmq", **{**vhost.connection, "login": login, "password": secret})
    dag = DagBag(str(here / "dags/flight_reminders_on_spark.py")).dags["flight_reminders_on_spark"]

    run = run_dag(dag, run_conf={"onto": 2031})
    shown = capfd.readouterr()
    assert run.state == "success", shown.out[-5000:]
    summaries = {
        one.task_id: one.xcom_pull(task_ids=one.task_id)
        for one in run.get_task_instances()
        if one.task_id.startswith("send")
    }
    year, day = summaries["send_year"], summaries["send_day"]
    assert (year["rows"], year["stored"], year["sent"], year["duplicates"]) == (count, count, 0, 0)
    assert (day["rows"], day["sent"], day["stored"]) == (989, 989, 0)

    store = DelayedStoreHook("delayed_store", "delayed_rabbitmq")
    messages = store.tables.messages
    with store.engine.connect() as connection:
        stored, ids = connection.execute(select(func.count(), func.count(messages.c.Id.distinct()))).one()
        destinations = set(connection.execute(select(messages.c.Destination).distinct()).scalars())
        first, last = connection.execute(select(func.min(messages.c.Time), func.max(messages.c.Time))).one()
    assert (stored, ids, destinations) == (count, count, {"flight-reminders"})
    # 5:15 of 1 January and 23:59 of 31 December in New York, two hours before
    assert (first, last) == (
        datetime(2031, 1, 1, 8, 15, tzinfo=timezone.utc),
        datetime(2032, 1, 1, 2, 59, tzinfo=timezone.utc),
    )
    assert (year["first_due"], year["last_due"]) == (first.isoformat(), last.isoformat())
    # found by the task that sent them, also where executors stored for it side by side
    origin = Origin(dag_id=dag.dag_id, run_id=run.run_id, task_id="send_year")
    assert {one.origin for one in store.list(limit=1000)} == {origin}
    with store.engine.connect() as connection:
        assert len(connection.execute(select(messages.c.Run).distinct()).all()) == 1
    store.close()

    # what Spark shows and keeps: the plan, its settings, the driver's log
    events = "".join(file.read_text() for file in (tmp_path / "events").rglob("*") if file.is_file())
    assert events.count("SparkListenerEnvironmentUpdate") == 2
    assert "physicalPlanDescription" in events
    assert "flight-reminders" in events
    assert (
        f"INFO airflow_delayed.spark: all confirmed: 0 sent by connection delayed_rabbitmq and {count:,} stored"
        in shown.out
    )
    for hushed in (secret, make_url(postgres_url).password):
        assert hushed not in events
        assert hushed not in shown.out + shown.err
    assert list((tmp_path / "temporary").rglob("delayed-connections.json")) == []

    vhost.manage("DELETE", f"users/{login}")
    run_sql(postgres_url, f'DROP SCHEMA "{schema}" CASCADE')
