"""A first send, where nothing is installed yet: one error names all that is missing, and the tasks that make it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException
from support.rabbitmq import VirtualHost
from support.send_runs import States

from airflow_delayed.errors import TopologyError
from airflow_delayed.operators.send import DelayedSendOperator
from airflow_delayed.operators.topology import TopologyInstallOperator

IN_AN_HOUR, IN_A_MINUTE = {"value": "x", "delay_seconds": 3600}, {"value": "y", "delay_seconds": 60}
INSTALL_BROKER = "TopologyInstallOperator(conn_id='broker', destinations=['reminders'], create_destinations=True)"
NO_TABLES = "connection 'database' is not ready: table delayed_messages: missing; "
INSTALL_STORE = (
    "TopologyInstallOperator(conn_id='database', ...) makes what is missing; its dry_run=True shows the plan"
)


def context() -> dict[str, Any]:
    ti = SimpleNamespace(
        dag_id="dag",
        run_id="r",
        task_id="send",
        map_index=-1,
        max_tries=0,
        try_number=1,
        xcom_push=lambda key, value: None,
    )
    return {"ti": ti, "task_state_store": States()}


def send(**arguments: Any) -> dict[str, Any]:
    operator = DelayedSendOperator(
        **{"task_id": "send", "destination": "reminders", "messages": [IN_AN_HOUR, IN_A_MINUTE], **arguments}
    )
    summary: dict[str, Any] = operator.execute(context())
    return summary


def install(**arguments: Any) -> None:
    TopologyInstallOperator(task_id="install", **arguments).execute(context())


@pytest.fixture
def connections(empty_vhost: VirtualHost, connect: Callable[..., str], tmp_path: Path) -> dict[str, str]:
    connect("broker", **empty_vhost.connection)
    connect("database", conn_type="sqlite", host=str(tmp_path / "store.db"))
    return {"conn_id": "broker", "store_conn_id": "database"}


@pytest.mark.parametrize("options", [{}, {"dry_run": True}, {"delay": 60, "messages": None, "value": "x"}])
def test_all_that_is_missing_is_named_at_once(connections: dict[str, str], options: dict[str, Any]) -> None:
    with pytest.raises(AirflowFailException) as found:
        send(**connections, **options)
    text = str(found.value)
    assert text.startswith("connection 'broker' has no destination reminders; and is not ready: exchange delayed.")
    assert f" more. {INSTALL_BROKER} makes all of it. And {NO_TABLES}" in text
    assert text.endswith(f" more. {INSTALL_STORE}. Nothing was sent")
    # and these tasks are enough
    install(conn_id="broker", destinations=["reminders"], create_destinations=True)
    install(conn_id="database")
    assert sum(send(**connections, **options)[name] for name in ("sent", "stored")) in (1, 2)


def test_destinations_of_rows_are_named_too(connections: dict[str, str]) -> None:
    rows = [{**IN_AN_HOUR, "destination": "a"}, {**IN_A_MINUTE, "destination": "b"}]
    with pytest.raises(
        AirflowFailException, match=r"has no destination a, b; and is not ready: .* And connection 'data"
    ):
        send(**connections, messages=rows, destination=None)


def test_what_is_there_is_not_named(connections: dict[str, str]) -> None:
    install(conn_id="broker", destinations=["reminders"], create_destinations=True)
    with pytest.raises(TopologyError) as found:
        send(**connections)
    assert str(found.value).startswith(NO_TABLES)
    assert "broker" not in str(found.value)
    install(conn_id="database")
    with pytest.raises(AirflowFailException) as missing:
        send(**connections, destination="others")
    assert str(missing.value) == (
        "connection 'broker' has no destination others; create it, or run TopologyInstallOperator(conn_id='broker',"
        " destinations=['others'], create_destinations=True). Nothing was sent"
    )


def test_a_queue_table_and_the_tables_of_its_store(connections: dict[str, str]) -> None:
    with pytest.raises(AirflowFailException) as found:
        send(conn_id="database")
    assert "connection 'database' has no destination reminders; and is not ready: table delayed_" in str(found.value)
    assert "TopologyInstallOperator(conn_id='database', destinations=['reminders'], create" in str(found.value)
    install(conn_id="database", destinations=["reminders"], create_destinations=True)
    assert send(conn_id="database")["stored"] == 2


def test_a_store_that_lacks_its_tables_is_an_error_without_rows_too(connections: dict[str, str]) -> None:
    with pytest.raises(TopologyError, match="connection 'database' is not ready"):
        send(**connections, messages=[])
