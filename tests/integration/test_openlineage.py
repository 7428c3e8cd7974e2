"""What OpenLineage's own provider tells of our tasks, as it writes it."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from airflow.sdk import DAG

from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.operators.dispatch import StoreDispatchOperator
from airflow_delayed.operators.send import DelayedSendOperator
from airflow_delayed.operators.topology import TopologyInstallOperator

#: Where .ci/setup puts it.
THEIRS = Path(sys.prefix) / "neighbour"
#: What knows whether OpenLineage is there, since it was imported.
KNOWS = ("openlineage", "airflow.providers.openlineage", "airflow.providers.common.compat.openlineage")


def named(datasets: list[dict]) -> list[tuple[str, str]]:
    return [(one["namespace"], one["name"]) for one in datasets]


def forget() -> None:
    """Let OpenLineage be found anew, or no longer."""
    for name in [name for name in sys.modules if name.startswith(KNOWS)]:
        parent, _, attribute = name.rpartition(".")
        if parent in sys.modules:
            vars(sys.modules[parent]).pop(attribute, None)
        del sys.modules[name]


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file to which OpenLineage's listener writes, as if its provider were installed while the test lasts."""
    assert (THEIRS / "airflow" / "providers" / "openlineage").is_dir(), "run `make setup`, which installs it there"
    import airflow
    from airflow.sdk.listener import get_listener_manager

    file = tmp_path / "events.jsonl"
    settings = {
        "TRANSPORT": json.dumps({"type": "file", "log_file_path": str(file), "append": True}),
        "NAMESPACE": "tests",
        # not in a process that it forks from this one, with all its threads
        "EXECUTE_IN_THREAD": "True",
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"AIRFLOW__OPENLINEAGE__{name}", value)
    # behind all others: what it needs and is here already stays as it is
    monkeypatch.setattr(sys, "path", [*sys.path, str(THEIRS)])
    monkeypatch.setattr(airflow, "__path__", [*airflow.__path__, str(THEIRS / "airflow")])
    importlib.invalidate_caches()
    forget()
    # as Airflow does with a plugin that it finds when it starts
    from airflow.providers.openlineage.plugins.openlineage import OpenLineageProviderPlugin

    listeners = get_listener_manager()
    for listener in OpenLineageProviderPlugin.listeners:
        listeners.add_listener(listener)
    yield file
    for listener in OpenLineageProviderPlugin.listeners:
        listeners.pm.unregister(listener)
    forget()


def test_inputs_and_outputs_of_a_dag(tmp_path: Path, connect, events: Path, run_dag):
    store, source = tmp_path / "messages.db", tmp_path / "rows.jsonl"
    connect("reminders_db", conn_type="sqlite", host=str(store))
    rows = [{"value": "hush", "destination": name, "delay_seconds": 0} for name in ("mail", "text", "mail")]
    source.write_text("".join(json.dumps({**row, "tag": str(number)}) + "\n" for number, row in enumerate(rows)))
    with DAG("traced", schedule=None) as dag:
        names = {"conn_id": "reminders_db", "destinations": ["mail", "text"], "create_destinations": True}
        install = TopologyInstallOperator(task_id="install", **names)
        send = DelayedSendOperator(task_id="send", conn_id="reminders_db", source=str(source))
        # what is said in the DAG itself
        secret = {"value": "hush", "headers": {"token": "hush"}, "delay": 3600, "destination": "mail"}
        one = DelayedSendOperator(task_id="one", conn_id="reminders_db", **secret)
        dispatch = StoreDispatchOperator(
            task_id="dispatch", store_conn_id="reminders_db", deliver_conn_ids="reminders_db"
        )
        install >> send >> one >> dispatch
    assert run_dag(dag).state == "success"
    emitted = [json.loads(line) for line in events.read_text().splitlines()]
    ended = {one["job"]["name"]: one for one in emitted if one["eventType"] == "COMPLETE"}
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
