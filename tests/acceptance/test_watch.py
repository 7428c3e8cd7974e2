"""dags/on_message_due.py under a real scheduler and triggerer: a message starts the DAG when due, whatever dies."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from support.leaks import leaks

from acceptance.conftest import World, by_schedule
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.message import DelayedMessage
from services import process

DAG = "on_message_due"
QUEUE = "on-message-due"
pytestmark = [pytest.mark.timeout(600), pytest.mark.long]


def eventually(what: str, ready: Callable[[], object], log: Path) -> None:
    process.wait_for(what, ready, seconds=120, log=log)


def handled(world: World) -> dict[str, tuple[datetime, str]]:
    """When the run of each message began and when the message was due, by id; no message is two runs'."""
    found: dict[str, tuple[datetime, str]] = {}
    for run in world.live.runs(DAG, state="success"):
        dues = world.live.result(DAG, run["dag_run_id"], "handle")
        assert not found.keys() & dues.keys()
        began = datetime.fromisoformat(run["run_after"])
        found |= {message_id: (began, due) for message_id, due in dues.items()}
    return found


def received(world: World) -> list[dict[str, Any]]:
    """The messages of all events that Airflow has stored."""
    # a send makes events too
    payloads = [event["extra"]["payload"] for event in world.live.asset_events() if "payload" in event["extra"]]
    return [message for payload in payloads for message in payload["messages"]]


def unacknowledged(world: World) -> int:
    found = world.broker.manage("GET", f"queues/{{vhost}}/{QUEUE}")
    assert isinstance(found, dict)
    return int(found.get("messages_unacknowledged", 0))


@pytest.fixture(scope="module")
def watched(world: World) -> Iterator[World]:
    """The example's messages are on their way, and its other DAG is watching."""
    live = world.live
    for dag in (DAG, f"{DAG}_send"):
        eventually(dag, lambda dag=dag: live.has(dag), live.folder / "dag-processor.log")
    with by_schedule(world):
        live.unpause(f"{DAG}_send")
        run = live.trigger(f"{DAG}_send")
        assert live.wait(f"{DAG}_send", run) == "success"
        live.unpause(DAG)
        yield world
        live.call("PATCH", f"/dags/{DAG}", is_paused=True)


def test_a_message_starts_the_dag_when_it_is_due(watched: World) -> None:
    log = watched.live.folder / "triggerer.log"
    eventually("both messages", lambda: len(received(watched)) == 2, log)
    dues = {message["message_id"]: message["due_at"] for message in received(watched)}
    assert len(dues) == 2
    eventually("runs for both", lambda: handled(watched).keys() == dues.keys(), log)
    for message_id, (began, due) in handled(watched).items():
        assert (due, began >= datetime.fromisoformat(due)) == (dues[message_id], True)
    eventually("the acknowledgement", lambda: watched.broker.count(QUEUE) == unacknowledged(watched) == 0, log)


def test_no_message_is_lost_when_the_triggerer_is_killed_before_its_event_is_stored(
    watched: World, connect: Callable[..., str]
) -> None:
    live = watched.live
    log = live.folder / "triggerer.log"
    eventually("the end of what was before", lambda: unacknowledged(watched) == 0, log)
    # the process that stores events stands still; that which receives messages does not
    live.parts["triggerer"].signal(signal.SIGSTOP)
    message = DelayedMessage(
        destination=QUEUE, body=b"top secret", due_at=datetime.now(timezone.utc), message_id="killed-between"
    )
    RabbitMQDelayHook(connect("rabbit", **watched.broker.connection)).send([message])
    eventually("the message in the triggerer's hands", lambda: unacknowledged(watched) == 1, log)
    time.sleep(1.5)
    live.kill("triggerer")
    assert "killed-between" not in [message["message_id"] for message in received(watched)]

    live.start("triggerer")
    eventually("a run", lambda: "killed-between" in handled(watched), log)
    (stored,) = [message for message in received(watched) if message["message_id"] == "killed-between"]
    assert stored["redelivered"] is True
    eventually("the acknowledgement", lambda: watched.broker.count(QUEUE) == unacknowledged(watched) == 0, log)
    kept = watched.metadata_url, watched.fernet_key, live.folder
    assert "asset_event.extra" in leaks(*kept, "killed-between")
    assert leaks(*kept, "top secret") == []
