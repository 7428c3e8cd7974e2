"""StoreDispatchOperator(deferrable=True) under a real scheduler and triggerer, on PostgreSQL."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta

import pytest
from sqlalchemy import text

from acceptance.conftest import World
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.message import DelayedMessage

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
QUEUE = "stay_queue"


def become(true: Callable[[], bool], *, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s"
        time.sleep(0.05)


def test_the_triggerer_sleeps_and_is_woken(world: World, connect):
    connect("delayed_store", world.store_url)
    world.live.call("PATCH", "/dags/stay", is_paused=False)
    with closing(DelayedStoreHook("delayed_store", table="stay_messages")) as store:
        store.install([QUEUE], create_destinations=True)

        def arrived() -> int:
            with store.engine.connect() as connection:
                return int(connection.execute(text(f"SELECT count(*) FROM {QUEUE}")).scalar_one())

        def message(name: str, seconds: float) -> DelayedMessage:
            due = store.now() + timedelta(seconds=seconds)
            return DelayedMessage(destination=QUEUE, body=b"hush", due_at=due, message_id=name, headers={})

        later = message("later", 3600)
        store.send([later])
        run = world.live.trigger("stay")
        become(lambda: world.live.deferred("stay", run, "stay"))
        # the worker's dispatcher has ended, and the triggerer's is there
        become(lambda: _at_work(store) == 1)
        earlier = message("earlier", 2)
        store.send([earlier])
        become(lambda: arrived() == 1)
        assert store.now() >= earlier.due_at
        assert [one.message_id for one in store.list()] == ["later"]

        due = store.now() + timedelta(seconds=1)
        store.reschedule(["later"], due)
        become(lambda: arrived() == 2)
        assert store.now() >= due
    assert world.live.wait("stay", run) == "success", world.live.why("stay", run, "stay")
    summary = world.live.result("stay", run, "stay")
    assert (summary["dispatched"], summary["by_connection"]) == (2, {"delayed_store": 2})
    assert "hush" not in world.live.log("stay", run, "stay")


def _at_work(store: DelayedStoreHook) -> int:
    with store.engine.connect() as connection:
        found = store.tables.dispatchers
        return sum(1 for row in connection.execute(found.select()) if row.EndedAt is None)


def test_the_example_that_dispatches_every_ten_minutes_runs(world: World, connect):
    """With its pool and its deadline alert, which only a real scheduler sees through."""
    connect("delayed_store", world.store_url)
    with closing(DelayedStoreHook("delayed_store", "delayed_sqs")) as store:
        store.install([])
    world.live.call("POST", "/pools", name="delayed_dispatch", slots=1)
    world.live.call("PATCH", "/dags/dispatch_store", is_paused=False)
    run = world.live.trigger("dispatch_store")
    assert world.live.wait("dispatch_store", run) == "success", world.live.why("dispatch_store", run, "dispatch")
    assert world.live.result("dispatch_store", run, "dispatch")["dispatched"] == 0
