"""df.write.format("delayed") in local mode: executors without Airflow, real brokers and databases."""

from __future__ import annotations

import json
from collections import Counter
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException, PythonException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812
from support.rabbitmq import VirtualHost
from support.spark import Connections, rows, send
from support.sqs import World

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.identity import Origin, SentBy, content_digest, key_id, scope_of
from airflow_delayed.message import microseconds, utcnow
from services import sqs

HOUR = timedelta(hours=1)
#: Messages that wait in the store.
FAR = 600


@pytest.fixture
def broker(vhost: VirtualHost, connections: Connections) -> VirtualHost:
    """A RabbitMQ with the queue mail, as the connection ``broker`` for Spark alone."""
    connections.add("broker", **vhost.connection)
    vhost.declare("mail")
    return vhost


def test_executors_have_no_airflow(spark: SparkSession) -> None:
    def look(batches):
        import pyarrow as pa

        list(batches)
        try:
            import airflow  # noqa: F401
        except ModuleNotFoundError as error:
            said = str(error)
        else:
            said = "it is there"
        yield pa.RecordBatch.from_pydict({"said": [said]})

    (row,) = spark.range(1).coalesce(1).mapInArrow(look, "said string").collect()
    assert row.said == "No module named 'airflow': this Python has no Airflow"


def test_rows_arrive_at_their_due_time_with_all_that_they_say(
    spark: SparkSession, broker: VirtualHost, connections: Connections, tmp_path: Path
) -> None:
    due = utcnow() + timedelta(seconds=12)
    # as spark-submit distributes it
    (tmp_path / "headers.json").write_text(json.dumps({"from": "spark"}))
    spark.sparkContext.addFile(str(tmp_path / "headers.json"))
    send(rows(spark, 500, due_at=due), connections, "broker", headers_file="headers.json", past_due="send")
    arrivals = broker.collect("mail", enough=500)
    assert Counter(one.message_id for one in arrivals) == Counter(f"m{number}" for number in range(500))
    assert min(one.received_at - due for one in arrivals) >= timedelta(0)
    for one in arrivals:
        assert one.due_at == due
        assert one.body == f"body of {one.message_id}".encode()
        assert one.properties.headers["content-type"] == "text/plain"
        assert one.properties.headers["from"] == "spark"


def test_near_ones_go_to_the_broker_and_far_ones_wait_in_the_store(
    spark: SparkSession, broker: VirtualHost, store: DelayedStoreHook, connections: Connections, tmp_path
) -> None:
    now = utcnow()
    far = rows(spark, FAR, due_at=now + HOUR)
    near = rows(spark, 200, due_at=now + timedelta(seconds=1), prefix="near")
    manifest = tmp_path / "manifest.json"
    options = {"store": "waits", "hold_over": 600, "manifest": manifest, "past_due": "send"}
    names = {"dag_id": "nightly", "run_id": "run 1", "task_id": "send", "map_index": 2}
    send(far.union(near), connections, "broker", origin=json.dumps(names), **options)
    told = json.loads(manifest.read_text())
    assert told["summary"] == {
        "rows": FAR + 200,
        "sent": 200,
        "stored": FAR,
        "replaced": 0,
        "not_replaced": 0,
        "duplicates": 0,
        "skipped": 0,
        "first_due": (now + timedelta(seconds=1)).isoformat(),
        "last_due": (now + HOUR).isoformat(),
    }
    assert (told["destinations"], told["other_attempts"], told["partitions"]) == ({"mail": FAR + 200}, None, 4)
    assert store.count() == FAR
    waiting = {one.message_id: one for one in store.list(limit=5000)}
    assert waiting.keys() == {f"m{number}" for number in range(FAR)}
    assert {(one.destination, one.due_at) for one in waiting.values()} == {("mail", now + HOUR)}
    assert waiting["m8"].tag == "order 1"
    # found by DAG, run and task, as the operations page finds them
    assert {one.origin for one in waiting.values()} == {Origin(**names)}
    assert len(list(store.list(sent_by=SentBy(dag_id="nightly", run_id="run 1", task_id="send"), limit=5000))) == FAR
    assert list(store.list(sent_by=SentBy(dag_id="nightly", task_id="other"))) == []

    # the same job again, as after a crash of the driver: the store has nothing twice
    send(far, connections, "broker", **options)
    again = json.loads(manifest.read_text())["summary"]
    assert (again["stored"], again["duplicates"], again["sent"]) == (0, FAR, 0)
    # and what is so near by now that it would go to the broker stays the store's
    send(far, connections, "broker", **{**options, "hold_over": 86400})
    again = json.loads(manifest.read_text())["summary"]
    assert (again["stored"], again["duplicates"], again["sent"]) == (0, FAR, 0)
    assert store.count() == FAR
    assert len(broker.collect("mail", enough=200)) == 200


def test_sqs(spark: SparkSession, sqs_endpoint: str, connections: Connections, connect) -> None:
    connections.add("aws", **sqs.connection(sqs_endpoint))
    connect("aws_default", **sqs.connection(sqs_endpoint))
    world = World(sqs_endpoint, "aws_default").install()
    frame = rows(spark, 30, due_at=utcnow() - timedelta(seconds=1)).withColumn("destination", F.lit(world.destination))
    send(frame, connections, "aws")
    ids: list[str] = []
    while len(ids) < 30:
        ids += world.ids()
    assert sorted(ids) == sorted(f"m{number}" for number in range(30))


def test_ids_are_those_of_the_operator(spark: SparkSession, store: DelayedStoreHook, connections: Connections) -> None:
    due = (utcnow() + HOUR).replace(microsecond=0)
    frame = rows(spark, 50, due_at=due).drop("message_id", "tag", "headers")
    scope = ["dag", "run", "task", -1]
    send(frame, connections, "broker_unknown_to_the_driver", dry_run="true")
    connections.add("broker", conn_type="rabbitmq", host="127.0.0.1")
    send(frame, connections, "broker", store="waits", scope=json.dumps(scope))
    by_content = {
        content_digest("mail", microseconds(due), {}, f"body of m{n}".encode(), scope=scope_of(*scope)).hex()
        for n in range(50)
    }
    assert {one.message_id for one in store.list(limit=100)} == by_content

    keyed = frame.withColumn("customer", F.col("value")).withColumn("day", F.lit(7))
    send(keyed, connections, "broker", store="waits", id_columns="customer, day")
    by_key = {key_id(("customer", "day"), (f"body of m{n}", 7)) for n in range(50)}
    assert {one.message_id for one in store.list(limit=200)} == by_content | by_key


def test_the_anchor_and_the_scope_make_a_second_driver_mean_the_same(
    spark: SparkSession, store: DelayedStoreHook, connections: Connections
) -> None:
    connections.add("broker", conn_type="rabbitmq", host="127.0.0.1")
    frame = rows(spark, 20, due_at=utcnow()).drop("message_id", "due_at").withColumn("delay_seconds", F.lit(7200))
    anchor = datetime.now(timezone.utc) - timedelta(minutes=3)
    for _ in range(2):
        send(frame, connections, "broker", store="waits", anchor=anchor.isoformat(), scope="nightly 2026-01-31")
    assert {one.due_at for one in store.list(limit=100)} == {anchor + timedelta(hours=2)}
    assert store.count() == 20


def test_what_is_wrong_is_told_before_the_first_task(spark: SparkSession, connections: Connections) -> None:
    connections.add("broker", conn_type="rabbitmq", host="nowhere.invalid")
    spark.sparkContext.setJobGroup("wrong", "wrong")
    frame = rows(spark, 10, due_at=utcnow()).withColumn("due_at", F.lit("tomorrow")).withColumn("colour", F.lit("red"))
    with pytest.raises(AnalysisException, match="unknown columns colour"):
        send(frame, connections, "broker")
    with pytest.raises(AnalysisException, match="column due_at is string, and must be a timestamp"):
        send(frame, connections, "broker", columns="{}")
    assert list(spark.sparkContext.statusTracker().getJobIdsForGroup("wrong")) == []


def test_a_row_that_is_wrong_fails_the_job_and_what_was_sent_is_told(
    spark: SparkSession, broker: VirtualHost, connections: Connections, tmp_path
) -> None:
    frame = rows(spark, 1300, due_at=utcnow(), partitions=1)
    frame = frame.withColumn("tag", F.when(F.col("message_id") == "m1200", "").otherwise("t"))
    with pytest.raises(PythonException) as caught:
        send(frame, connections, "broker", batch_rows=500, attempts=tmp_path / "attempts")
    assert "partition 0, attempt 2: its row 1,201, column tag: must be text" in str(caught.value)
    assert "It had sent or stored 1,000 messages (1,000 to mail)" in str(caught.value)
    assert list((tmp_path / "attempts").iterdir()) == []
    ids = Counter(one.message_id for one in broker.collect("mail", enough=1000))
    assert ids == Counter({f"m{number}": 2 for number in range(1000)})


def test_what_is_past_due(spark: SparkSession, store: DelayedStoreHook, connections: Connections, tmp_path) -> None:
    connections.add("broker", conn_type="rabbitmq", host="127.0.0.1")
    late = rows(spark, 10, due_at=utcnow() - 2 * HOUR, partitions=1, prefix="late")
    frame = late.union(rows(spark, 10, due_at=utcnow() + HOUR, partitions=1))
    with pytest.raises(PythonException, match=r"more than 1:00:00 before this job began.*past_due=skip"):
        send(late, connections, "broker", store="waits")
    manifest = tmp_path / "m.json"
    send(frame, connections, "broker", store="waits", past_due="skip", manifest=manifest)
    summary = json.loads(manifest.read_text())["summary"]
    assert (summary["skipped"], summary["stored"], store.count()) == (10, 10, 10)
