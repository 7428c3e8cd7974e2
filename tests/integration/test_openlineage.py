"""What OpenLineage's own provider tells of our tasks, as it writes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import airflow_delayed
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook

HERE = Path(airflow_delayed.__file__).parents[1]
#: Where .ci/setup puts it.
THEIRS = Path(sys.prefix) / "neighbour"


def named(datasets: list[dict]) -> list[tuple[str, str]]:
    return [(one["namespace"], one["name"]) for one in datasets]


def test_inputs_and_outputs_of_a_dag(tmp_path, connect, airflow_db):
    assert (THEIRS / "airflow" / "providers" / "openlineage").is_dir(), "run `make setup`, which installs it there"
    store, source, events = (tmp_path / name for name in ("messages.db", "rows.jsonl", "events.jsonl"))
    connect("reminders_db", conn_type="sqlite", host=str(store))
    rows = [{"value": "hush", "destination": name, "delay_seconds": 0} for name in ("mail", "text", "mail")]
    source.write_text("".join(json.dumps({**row, "tag": str(number)}) + "\n" for number, row in enumerate(rows)))
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (HERE, HERE / "tests", THEIRS))),
        "AIRFLOW__OPENLINEAGE__TRANSPORT": json.dumps({"type": "file", "log_file_path": str(events), "append": True}),
        "AIRFLOW__OPENLINEAGE__NAMESPACE": "tests",
    }
    done = subprocess.run(
        [sys.executable, "-m", "support.lineage_dag", str(source)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = [json.loads(line) for line in events.read_text().splitlines()]
    ended = {one["job"]["name"]: one for one in told if one["eventType"] == "COMPLETE"}
    database = f"sqlite://{store}"
    assert named(ended["traced.send"]["inputs"]) == [("file", str(source))]
    # by way of the store, and then to the queue tables, the one with more messages first
    assert named(ended["traced.send"]["outputs"]) == [
        (database, "delayed_messages"),
        (database, "mail"),
        (database, "text"),
    ]
    assert named(ended["traced.dispatch"]["inputs"]) == [(database, "delayed_messages")]
    assert named(ended["traced.one"]["inputs"]) == []
    assert named(ended["traced.one"]["outputs"]) == [(database, "delayed_messages"), (database, "mail")]
    # neither bodies nor headers
    assert "hush" not in events.read_text()


def test_a_queue_of_rabbitmq_is_named_by_the_first_host(connect):
    connect("rabbit", conn_type="rabbitmq", host="one,two:5673", schema="shop", login="me", password="hush")
    assert RabbitMQDelayHook("rabbit").dataset("orders") == ("amqp://one:5672", "shop/orders")
