"""dags/escalation.py: what stays red reaches the desk through a queue table, what is green again does not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG
from support.examples import dags_of, result

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.message import utcnow

HALF_AN_HOUR = timedelta(minutes=30)


@pytest.fixture
def dags(here: Path, tmp_path: Path, connect, monkeypatch) -> dict[str, DAG]:
    connect("delayed_store", conn_type="sqlite", host=str(tmp_path / "store.db"))
    return dags_of(here / "dags/escalation.py", monkeypatch)


@pytest.fixture
def store(dags: dict[str, DAG]) -> Iterator[DelayedStoreHook]:
    with closing(DelayedStoreHook("delayed_store")) as made:
        yield made


def test_what_stays_red_is_called(dags: dict[str, DAG], store: DelayedStoreHook, run_dag, caplog) -> None:
    def called() -> list[str]:
        bodies: list[str] = result(run_dag(dags["escalation_desk"]), "call")
        return bodies

    assert called() == []
    red = run_dag(dags["escalation"])
    assert (red.state, called()) == ("failed", [])
    (one,) = store.list()
    assert red.end_date <= one.due_at - HALF_AN_HOUR <= utcnow()
    store.reschedule([one.message_id], delay=0)
    (body,) = called()
    assert (json.loads(body)["dag_id"], json.loads(body)["run_id"]) == ("escalation", red.run_id)
    assert "STILL RED" in caplog.text
    assert called() == []


def test_a_success_of_the_same_run_takes_its_message_back_and_no_other(
    dags: dict[str, DAG], store: DelayedStoreHook, run_dag
) -> None:
    run_dag(dags["escalation_desk"])
    first, second = (datetime(2026, 1, day, tzinfo=timezone.utc) for day in (1, 2))

    def run(moment: datetime, **arguments: Any) -> Any:
        return run_dag(dags["escalation"], run_after=moment, logical_date=moment, **arguments)

    def waiting() -> set[str]:
        return {one.message_id for one in store.list()}

    red = run(first)
    mine = waiting()
    assert (red.state, run(second).state, len(waiting())) == ("failed", "failed", 2)
    theirs = waiting() - mine
    # dag.test begins the run again, as a clear does
    green = run(first, run_conf={"failures": 0})
    assert (green.run_id, green.state) == (red.run_id, "success")
    assert waiting() == theirs
