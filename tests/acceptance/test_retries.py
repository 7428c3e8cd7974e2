"""Tries of a send under a real scheduler: a worker killed, a task marked failed; all counted by id."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.lengths import length

from acceptance.conftest import World
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from services import process

CROWD = length("messages of a task whose worker is killed", 20_000, 100_000)
#: Messages between two checkpoints of a send, which a retry may send twice.
BATCH = 2500
DAGS = ("crowd", "lost", "ended")
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def broker(world: World) -> World:
    """A queue for each DAG is there, and the DAGs may run."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("AIRFLOW_CONN_RETRIES", json.dumps(world.broker.connection))
        RabbitMQDelayHook("retries").install(DAGS, create_destinations=True)
    for dag in DAGS:
        log = world.live.folder / "dag-processor.log"
        process.wait_for(dag, lambda dag=dag: world.live.has(dag), seconds=120, log=log)
        world.live.call("PATCH", f"/dags/{dag}", is_paused=False)
    return world


def test_a_worker_killed_in_the_middle_of_its_messages_loses_none(broker: World, tmp_path: Path) -> None:
    live = broker.live
    source = tmp_path / "crowd.parquet"
    pq.write_table(pa.table({"value": [f"body {number}" for number in range(CROWD)]}), source)
    run_id = live.trigger("crowd", source=str(source))
    worker = f"/dags/crowd/dagRuns/{run_id}/taskInstances/send"
    log = live.folder / "scheduler.log"
    process.wait_for("the worker", lambda: live.call("GET", worker)["pid"], seconds=120, log=log)
    pid = live.call("GET", worker)["pid"]
    with broker.broker.channel() as channel:
        third = time.monotonic() + 120
        while channel.queue_declare("crowd", passive=True).method.message_count <= CROWD // 3:
            assert time.monotonic() < third
        # at once: the worker goes on
        os.kill(pid, signal.SIGKILL)
    assert live.wait("crowd", run_id) == "success", live.log("crowd", run_id, "send")

    summary = live.result("crowd", run_id, "send")
    earlier = summary["earlier_tries"]
    assert f"goes on after {earlier:,} of {CROWD:,} rows" in live.log("crowd", run_id, "send")
    assert CROWD // 3 - BATCH <= earlier < CROWD
    assert summary["sent"] == CROWD
    arrived = Counter(taken(broker, "crowd"))
    # each body once, and what came twice with the id that it had
    assert {body for _, body in arrived} == {f"body {number}".encode() for number in range(CROWD)}
    assert len({message_id for message_id, _ in arrived}) == len(arrived) == CROWD
    assert arrived.total() - CROWD <= BATCH


@pytest.mark.long
def test_a_worker_lost_after_all_was_sent_sends_nothing_again(broker: World) -> None:
    live = broker.live
    run_id = live.trigger("lost")
    assert live.wait("lost", run_id) == "success", live.log("lost", run_id, "send")
    summary = live.result("lost", run_id, "send")
    assert (summary["sent"], summary["earlier_tries"]) == (100, 100)
    assert len(taken(broker, "lost")) == 100
    # months later somebody clears it: it is another send then, with the same ids
    before = summary["first_due"]
    live.clear("lost", run_id, ["send"])
    assert live.wait("lost", run_id) == "success"
    summary = live.result("lost", run_id, "send")
    assert (summary["sent"], summary["earlier_tries"], summary["first_due"]) == (100, 0, before)


@pytest.mark.long
def test_marked_failed_while_it_sends_it_ends_in_the_middle(broker: World, tmp_path: Path) -> None:
    live = broker.live
    source = tmp_path / "ended.parquet"
    pq.write_table(pa.table({"value": [f"body {number}" for number in range(100_000)]}), source)
    run_id = live.trigger("ended", source=str(source))
    process.wait_for("some", lambda: broker.broker.count("ended"), seconds=120, log=live.folder / "scheduler.log")
    task = f"/dags/ended/dagRuns/{run_id}/taskInstances/send"
    worker = Path("/proc", str(live.call("GET", task)["pid"]))
    live.call("PATCH", task, new_state="failed")
    pattern = r"killed when at least ([\d,]+) messages were sent, which cannot be recalled"
    process.wait_for("the worker's end", lambda: not worker.exists(), seconds=120)
    found = re.search(pattern, live.log("ended", run_id, "send"))
    assert found
    sent = int(found[1].replace(",", ""))
    assert 0 < sent < 100_000
    # at most the batch in hand came after that
    assert sent <= broker.broker.count("ended") <= sent + BATCH


def taken(world: World, queue: str) -> list[tuple[str, bytes]]:
    """The id and the body of each message of a queue."""
    with world.broker.channel() as channel:
        count = channel.queue_declare(queue, passive=True).method.message_count
        found = []
        for _, properties, body in channel.consume(queue, auto_ack=True):
            found.append((properties.message_id, body))
            if len(found) == count:
                break
        return found
