"""DueTimeSensor and the operators that change messages, under a real scheduler and triggerer."""

from __future__ import annotations

import json
from contextlib import closing
from datetime import datetime, timedelta
from typing import Any

import pytest

from acceptance.conftest import World
from airflow_delayed.hooks.store import DelayedStoreHook
from services import process

DAGS = ("waits", "wait_for_no_time", "change_of_mind")
pytestmark = [pytest.mark.timeout(600), pytest.mark.long]


@pytest.fixture(scope="module")
def live(world: World) -> Any:
    for dag in DAGS:
        log = world.live.folder / "dag-processor.log"
        process.wait_for(dag, lambda dag=dag: world.live.has(dag), seconds=120, log=log)
        world.live.call("PATCH", f"/dags/{dag}", is_paused=False)
    return world.live


def tasks(live: Any, dag_id: str, run_id: str) -> dict[tuple[str, int], dict[str, Any]]:
    found = live.call("GET", f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances")["task_instances"]
    return {(one["task_id"], one["map_index"]): one for one in found}


def test_waits(live: Any) -> None:
    run_id = live.trigger("waits")
    assert live.wait("waits", run_id) == "success", live.states("waits", run_id)
    began = datetime.fromisoformat(live.call("GET", f"/dags/waits/dagRuns/{run_id}")["run_after"])
    found = tasks(live, "waits", run_id)
    assert {place: one["state"] for place, one in found.items()} == {
        ("in_the_triggerer", -1): "success",
        ("past", -1): "success",
        ("mapped", 0): "success",
        ("mapped", 1): "success",
        ("too_long", -1): "skipped",
    }
    for place, seconds in ((("in_the_triggerer", -1), 5), (("mapped", 0), 20), (("mapped", 1), 22)):
        # none early; and each of the mapped tasks has a time of its own
        assert datetime.fromisoformat(found[place]["end_date"]) >= began + timedelta(seconds=seconds)
    # no worker had it, before or after the wait
    assert not found["in_the_triggerer", -1]["hostname"]
    assert found["past", -1]["hostname"]


def test_a_time_without_a_zone_fails_the_task_with_the_reason(live: Any) -> None:
    run_id = live.trigger("wait_for_no_time")
    assert live.wait("wait_for_no_time", run_id) == "failed"
    assert "target_time: 2030-01-01 00:00:00 has no time zone" in live.log("wait_for_no_time", run_id, "wait")


def test_changes_of_mind(live: Any, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = live.trigger("change_of_mind")
    assert live.wait("change_of_mind", run_id) == "success", live.states("change_of_mind", run_id)
    ids = live.result("change_of_mind", run_id, "first")["message_ids"]
    by_ids = live.result("change_of_mind", run_id, "by_ids")
    assert by_ids == {"changed": 1, "outcomes": {"cancelled": 1}, "ids": {"cancelled": ids}}
    rest = live.result("change_of_mind", run_id, "rest")
    assert sorted(rest["ids"]["cancelled"]) == sorted(live.result("change_of_mind", run_id, "more")["message_ids"])
    moved = live.log("change_of_mind", run_id, "rest")
    assert "done: 3 cancelled" in moved
    monkeypatch.setenv("AIRFLOW_CONN_DELAYED_STORE", json.dumps(world.connections["delayed_store"]))
    with closing(DelayedStoreHook("delayed_store")) as store:
        assert any(f"task change_of_mind.moved, run {run_id}" in one.who for one in store.audit())
