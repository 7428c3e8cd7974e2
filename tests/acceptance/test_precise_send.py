"""dags/precise_send.py under a real scheduler and two triggerers: the message is sent once, whatever dies meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from reckoning import Consumer, consuming

from acceptance.conftest import World
from services import process

DAG = "precise_send"
pytestmark = [pytest.mark.timeout(600), pytest.mark.long]


@pytest.fixture(scope="module")
def consumer(world: World, sqs_endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Consumer]:
    live = world.live
    process.wait_for(DAG, lambda: live.has(DAG), seconds=120, log=live.folder / "dag-processor.log")
    live.unpause(DAG)
    with consuming(f"{world.prefix}precise-send", sqs_endpoint, tmp_path_factory.mktemp("precise")) as consumer:
        yield consumer


def task(world: World, run_id: str) -> dict[str, Any]:
    found: dict[str, Any] = world.live.call("GET", f"/dags/{DAG}/dagRuns/{run_id}/taskInstances/wait")
    return found


def deferred(world: World, run_id: str) -> dict[str, Any]:
    """Wait until a triggerer holds the task, and return the task."""

    def deferred() -> bool:
        found = task(world, run_id)
        return found["state"] == "deferred" and found["triggerer_job"] is not None

    process.wait_for("the wait", deferred, seconds=120, log=world.live.folder / "scheduler.log")
    return task(world, run_id)


def triggerers(world: World) -> list[int]:
    """The jobs of the triggerers that are alive."""
    jobs = world.live.call("GET", "/jobs?job_type=TriggererJob&is_alive=true")["jobs"]
    return sorted(job["id"] for job in jobs)


def test_a_wait_survives_the_triggerer_that_waited_for_it(world: World, consumer: Consumer) -> None:
    live = world.live
    log = live.folder / "triggerer.log"
    first = live.parts["triggerer"]
    [first_job] = triggerers(world)
    live.start("triggerer")
    second = live.parts["triggerer"]
    process.wait_for("a second triggerer", lambda: len(triggerers(world)) == 2, seconds=120, log=log)

    run_id = live.trigger(DAG, delay_seconds=60, text="precise body")
    job = deferred(world, run_id)["triggerer_job"]["id"]
    holder, live.parts["triggerer"] = (first, second) if job == first_job else (second, first)
    holder.kill()

    assert live.wait(DAG, run_id) == "success", live.states(DAG, run_id)
    assert job not in triggerers(world)
    summary = live.result(DAG, run_id, "send")
    due = datetime.fromisoformat(summary["first_due"]).timestamp()
    process.wait_for("the message", consumer.arrivals, seconds=90)
    time.sleep(max(0.0, due + 3 - time.time()))
    [arrival] = consumer.arrivals()
    assert arrival.body == "precise body"
    assert arrival.arrived >= due
    [event] = live.asset_events(source_dag_id=DAG)
    assert (event["extra"]["sent"], list(event["extra"]["destinations"].values())) == (1, [1])


def test_cleared_it_waits_for_another_message_and_marked_failed_it_sends_none(world: World, consumer: Consumer) -> None:
    live = world.live
    [run] = live.runs(DAG)
    run_id = run["dag_run_id"]
    before = len(consumer.arrivals())
    earlier = live.result(DAG, run_id, "send")["first_due"]
    live.clear(DAG, run_id, ["due", "wait", "send"])
    # the delay counts anew
    deferred(world, run_id)
    live.call("PATCH", f"/dags/{DAG}/dagRuns/{run_id}/taskInstances/wait", new_state="failed")
    assert live.wait(DAG, run_id) == "failed"

    reason = "ended by a user before "
    process.wait_for("the triggerer's word", lambda: reason in live.log(DAG, run_id, "wait"), seconds=60)
    [line] = [line for line in live.log(DAG, run_id, "wait").splitlines() if reason in line]
    moment = line.split(reason)[1].split(": ")[0]
    assert datetime.fromisoformat(moment) > datetime.fromisoformat(earlier)
    # 30 s before it was due it would have been given to SQS, and were there to be seen
    assert len(consumer.arrivals()) == before
