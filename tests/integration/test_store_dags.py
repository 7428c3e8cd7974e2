"""The example DAGs of the store, run by Airflow: dags/dispatch_store.py and dags/nightly_reminders.py, through SQS."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG, task
from support.examples import dags_of, result
from support.sqs import World

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.message import DelayedMessage, utcnow
from services import sqs

HOUR = timedelta(hours=1)


@pytest.fixture
def store(connect, tmp_path: Path) -> DelayedStoreHook:
    connect("delayed_store", conn_type="sqlite", host=str(tmp_path / "store.db"))
    made = DelayedStoreHook("delayed_store", "delayed_sqs")
    made.install([])
    yield made
    made.close()


@pytest.fixture
def world(sqs_endpoint: str, connect) -> World:
    conn_id = connect("delayed_sqs", **sqs.connection(sqs_endpoint))
    return World(sqs_endpoint, conn_id, destination="appointment-reminders").install()


def test_dispatch_store(here: Path, world: World, store: DelayedStoreHook, run_dag, monkeypatch):
    dag = dags_of(here / "dags/dispatch_store.py", monkeypatch)["dispatch_store"]
    now = store.now()
    dues = {"due": -1, "soon": 2, "within": 14 * 60, "after": 16 * 60}
    store.send(
        DelayedMessage(
            destination=world.destination,
            body=name.encode(),
            due_at=now + timedelta(seconds=seconds),
            message_id=name,
            headers={},
        )
        for name, seconds in dues.items()
    )
    (alert,) = dag.deadline if isinstance(dag.deadline, list) else [dag.deadline]
    # Airflow 3.3's dag.test cannot end a run with one; the acceptance tests run it as it is
    dag.deadline = None
    summary = result(run_dag(dag), "dispatch")
    assert (summary["dispatched"], summary["by_connection"]) == (3, {"delayed_sqs": 3})
    assert [one.message_id for one in store.list()] == ["after"]
    # one run at a time, in a pool of its own, and somebody is told if it takes longer than what it is ahead
    assert (dag.max_active_runs, dag.get_task("dispatch").pool) == (1, "delayed_dispatch")
    assert alert.interval == timedelta(minutes=5)


def test_who_is_told_is_found_beside_the_dag(here: Path, monkeypatch, caplog):
    """As Airflow does: by its path, with the DAGs' folder to be looked through."""
    from importlib import import_module

    dag_file = (here / "dags/dispatch_store.py").read_text()
    assert 'SyncCallback("alerts.late.report")' in dag_file
    monkeypatch.syspath_prepend(str(here / "dags"))
    import_module("alerts.late").report(context={})
    assert "messages may be late" in caplog.text
    for name in ("alerts.late", "alerts"):
        sys.modules.pop(name, None)


@pytest.fixture
def nightly(here: Path, tmp_path: Path, monkeypatch) -> Callable[..., dict[str, DAG]]:
    path = tmp_path / "appointments.csv"
    monkeypatch.setenv("NIGHTLY_REMINDERS_FILE", str(path))

    def with_appointments(*rows: tuple[str, str, Any, str]) -> dict[str, DAG]:
        with path.open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(("appointment", "customer", "starts", "called_off"))
            table.writerows((number, customer, starts.isoformat(), off) for number, customer, starts, off in rows)
        return dags_of(here / "dags/nightly_reminders.py", monkeypatch)

    return with_appointments


def test_nightly_reminders(nightly, world: World, store: DelayedStoreHook, run_dag):
    start = utcnow().replace(microsecond=0) + 24 * HOUR
    first = [("1", "ann", start, "no"), ("2", "bob", start + HOUR, "no"), ("3", "ann", start + 2 * HOUR, "no")]
    dag = nightly(*first)["nightly_reminders"]
    assert result(run_dag(dag), "send")["stored"] == 3

    # one has moved, one was called off, one is new, one was yesterday
    second = [
        ("1", "ann", start + 5 * HOUR, "no"),
        ("2", "bob", start + HOUR, "yes"),
        ("3", "ann", start + 2 * HOUR, "no"),
        ("4", "eve", start, "no"),
        ("5", "eve", start - 48 * HOUR, "no"),
    ]
    run = run_dag(nightly(*second)["nightly_reminders"])
    summary = result(run, "send")
    assert {name: summary[name] for name in ("stored", "replaced", "duplicates", "skipped")} == {
        "stored": 1,
        "replaced": 1,
        "duplicates": 1,
        "skipped": 1,
    }
    gone = result(run, "cancel_called_off")
    assert (gone["changed"], gone["ids"]) == (1, {"cancelled": ["appointment-2"]})
    assert {one.message_id: one.due_at for one in store.list()} == {
        "appointment-1": start + 3 * HOUR,
        "appointment-3": start,
        "appointment-4": start - 2 * HOUR,
    }

    cancelled = run_dag(nightly(*second)["cancel_reminders"], run_conf={"customer": "ann"})
    assert result(cancelled, "cancel")["outcomes"] == {"cancelled": 2}
    # and the next night does not bring them back
    again = result(run_dag(nightly(*second)["nightly_reminders"]), "send")
    assert (again["stored"], again["replaced"]) == (0, 0)
    assert [one.message_id for one in store.list()] == ["appointment-4"]


def test_who_changes_messages_in_a_task_is_the_task(store: DelayedStoreHook, run_dag):
    with DAG("change_of_mind", schedule=None) as dag:

        @task
        def cancel() -> dict[str, str]:
            with closing(DelayedStoreHook("delayed_store", "delayed_sqs")) as hook:
                return hook.cancel(["a"])

        cancel()
    run = run_dag(dag)
    (done,) = store.audit()
    assert done.who == f"task change_of_mind.cancel, run {run.run_id}, triggered by dag_test"
