"""cancel_on_kill and on_backfill under a real scheduler: a task marked failed, a worker that shuts down, a backfill."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from acceptance.conftest import World
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.hooks.store import DelayedStoreHook
from services import process

#: Twice as many as are stored in one transaction.
COUNT = 5000
DAGS = ("marked_failed", "shut_down", "no_backfill")
pytestmark = [pytest.mark.timeout(600), pytest.mark.long]


class Killed:
    """The DAGs whose tasks are killed, and what they have in the store."""

    def __init__(self, world: World, store: DelayedStoreHook, source: Path) -> None:
        self.live = world.live
        self.broker = world.broker
        self.store = store
        self.source = source
        self.scheduler_log = world.live.folder / "scheduler.log"

    def stored(self, dag_id: str) -> int:
        return self.store.counts(tag=dag_id, hours=0).waiting

    def start(self, dag_id: str) -> tuple[str, int]:
        """Start a run, wait until a part of it is stored, and return its id and its task's process."""
        run_id = self.live.trigger(dag_id, source=str(self.source))
        process.wait_for("some", lambda: self.stored(dag_id), seconds=120, log=self.scheduler_log)
        return run_id, self.live.call("GET", self.task(dag_id, run_id))["pid"]

    def task(self, dag_id: str, run_id: str) -> str:
        return f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/send"


@pytest.fixture(scope="module")
def killed(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killed]:
    source = tmp_path_factory.mktemp("killed") / "rows.parquet"
    pq.write_table(pa.table({"value": [f"body {number}" for number in range(COUNT)]}), source)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("AIRFLOW_CONN_KILLED", json.dumps(world.broker.connection))
        monkeypatch.setenv("AIRFLOW_CONN_KILLED_STORE", json.dumps(world.connections["delayed_store"]))
        RabbitMQDelayHook("killed").install(["killed"], create_destinations=True)
        store = DelayedStoreHook("killed_store")
        store.install([])
        for dag_id in DAGS:
            log = world.live.folder / "dag-processor.log"
            process.wait_for(dag_id, lambda dag_id=dag_id: world.live.has(dag_id), seconds=120, log=log)
            world.live.call("PATCH", f"/dags/{dag_id}", is_paused=False)
        yield Killed(world, store, source)
        store.cancel(destination="killed")
        store.close()


def test_marked_failed_what_it_stored_is_taken_out_and_a_clear_stores_it_again(killed: Killed) -> None:
    live = killed.live
    run_id, pid = killed.start("marked_failed")
    assert 0 < killed.stored("marked_failed") < COUNT
    live.call("PATCH", killed.task("marked_failed", run_id), new_state="failed")
    process.wait_for("the worker's end", lambda: not psutil.pid_exists(pid), seconds=120)
    log = live.log("marked_failed", run_id, "send")
    assert "killed, and not tried again: " in log, log
    assert killed.stored("marked_failed") == 0
    done = next(iter(killed.store.audit()))
    assert (done.action, done.counts.keys()) == ("withdraw", {"withdrawn"})
    assert done.who.startswith(f"task marked_failed.send, run {run_id}")

    live.clear("marked_failed", run_id, ["send"])
    assert live.wait("marked_failed", run_id) == "success", live.log("marked_failed", run_id, "send")
    summary = live.result("marked_failed", run_id, "send")
    assert (summary["stored"], summary["duplicates"]) == (COUNT, 0)
    assert killed.stored("marked_failed") == COUNT


def test_of_a_worker_that_shuts_down_the_retry_loses_nothing_and_stores_nothing_twice(killed: Killed) -> None:
    live = killed.live
    run_id, pid = killed.start("shut_down")
    before = killed.stored("shut_down")
    # the process that watches over the task hands the signal on
    os.kill(psutil.Process(pid).ppid(), signal.SIGTERM)
    assert live.wait("shut_down", run_id) == "success", live.why("shut_down", run_id, "send")
    assert "and Airflow tries it again (its state is running)" in live.log("shut_down", run_id, "send", number=1)
    summary = live.result("shut_down", run_id, "send")
    assert (summary["stored"], summary["duplicates"]) == (COUNT - before, before)
    assert killed.stored("shut_down") == COUNT


def test_a_backfill_is_left_out_or_refused(killed: Killed) -> None:
    live = killed.live
    day = date.today() - timedelta(days=2)
    live.backfill("no_backfill", f"{day}", f"{day}")
    process.wait_for("the run", lambda: live.runs("no_backfill"), seconds=60, log=killed.scheduler_log)
    [run] = live.runs("no_backfill")
    assert run["run_type"] == "backfill"
    run_id = run["dag_run_id"]
    assert live.wait("no_backfill", run_id) == "failed"
    assert live.states("no_backfill", run_id) == {"skip": "skipped", "fail": "failed"}
    assert "this run belongs to a backfill" in live.log("no_backfill", run_id, "fail")
    # each other run sends
    run_id = live.trigger("no_backfill")
    assert live.wait("no_backfill", run_id) == "success"
    process.wait_for("both", lambda: killed.broker.count("killed") == 2, seconds=60)
