"""Rows that come once: of a function and of a query whose workers are killed, each row is sent, and no other one."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from acceptance.conftest import World
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from services import process

DAG = "spooled"
ROWS = 6000
#: Messages between two checkpoints of a send, which a retry may send twice.
BATCH = 2500
pytestmark = [pytest.mark.timeout(600), pytest.mark.long]


def test_a_retry_sends_the_rows_of_the_try_whose_worker_was_killed(world: World, tmp_path: Path) -> None:
    live = world.live
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("AIRFLOW_CONN_SPOOLED", json.dumps(world.broker.connection))
        RabbitMQDelayHook("spooled").install([DAG], create_destinations=True)
    process.wait_for(DAG, lambda: live.has(DAG), seconds=120, log=live.folder / "dag-processor.log")
    live.unpause(DAG)
    run_id = live.trigger(DAG, folder=str(tmp_path))
    assert live.wait(DAG, run_id) == "success", [live.why(DAG, run_id, task) for task in ("yields", "selects")]

    for task in ("yields", "selects"):
        summary = live.result(DAG, run_id, task)
        assert (summary["sent"], summary["duplicates"]) == (ROWS, 0)
        assert summary["earlier_tries"] > 0
        assert "does not run again: its rows were spooled before" in live.log(DAG, run_id, task)
    assert (tmp_path / "runs").read_text() == f"{DAG}\n"
    arrived = Counter(taken(world))
    kinds = Counter(body.partition(b" ")[0] for _, body in arrived)
    assert kinds == {b"function": ROWS, b"query": ROWS}
    assert arrived.total() - 2 * ROWS <= 2 * BATCH
    # what was spooled is gone
    assert [file for file in world.spools.rglob("*") if file.is_file()] == []


def taken(world: World) -> list[tuple[str, bytes]]:
    """The id and the body of each message that arrived."""
    with world.broker.channel() as channel:
        count = channel.queue_declare(DAG, passive=True).method.message_count
        found = []
        for _, properties, body in channel.consume(DAG, auto_ack=True):
            found.append((properties.message_id, body))
            if len(found) == count:
                break
        return found
