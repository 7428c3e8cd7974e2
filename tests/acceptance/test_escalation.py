"""DelayedNotifier and DelayedCancelNotifier as callbacks of DAGs that fail or are late, in a live Airflow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from sqlalchemy import text

from acceptance.conftest import World
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.store.records import Remembered

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
QUEUE = "escalate_queue"


def become(true: Callable[[], bool], *, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.fixture
def store(world: World, connect: Callable[..., str]) -> Iterator[DelayedStoreHook]:
    """The store "escalate_store", here and in the live Airflow."""
    live = world.live
    connect("escalate_store", world.store_url)
    # in Airflow's own database, where the process of a callback asks for it
    fields = {name: value for name, value in world.connections["delayed_store"].items() if name != "extra"}
    live.call("POST", "/connections", connection_id="escalate_store", **fields)
    for dag in ("escalate", "escalate_dispatch", "escalate_late"):
        become(lambda dag=dag: live.has(dag))
        live.call("PATCH", f"/dags/{dag}", is_paused=False)
    with closing(DelayedStoreHook("escalate_store")) as made:
        made.install([QUEUE], create_destinations=True)
        yield made
    live.call("DELETE", "/connections/escalate_store")


def test_the_escalation_of_what_stays_red_arrives_and_of_what_is_green_again_does_not(
    world: World, store: DelayedStoreHook
) -> None:
    live = world.live
    # how long the second has is not a question of the machine's speed
    red = live.trigger("escalate", delay=1, failures=9)
    mended = live.trigger("escalate", delay=3600, failures=1)
    for run in (red, mended):
        assert live.wait("escalate", run) == "failed"

    def armed(run: str) -> list[str]:
        return [one.message_id for one in store.list(tag=f"notifier:escalate/{run}")]

    become(lambda: len(armed(red)) == len(armed(mended)) == 1)
    (taken_back,) = armed(mended)
    live.clear("escalate", mended, ["work"])
    assert live.wait("escalate", mended) == "success", live.why("escalate", mended, "work")
    become(lambda: armed(mended) == [])
    left = store.get(taken_back)
    assert isinstance(left, Remembered)
    assert left.state == "cancelled"

    run = live.trigger("escalate_dispatch")
    assert live.wait("escalate_dispatch", run) == "success", live.why("escalate_dispatch", run, "dispatch")
    with store.engine.connect() as connection:
        bodies = [bytes(body).decode() for body in connection.execute(text(f"SELECT body FROM {QUEUE}")).scalars()]
    assert bodies == [f"{red} is red"]


def test_a_deadline_that_is_missed_escalates_until_its_run_succeeds(world: World, store: DelayedStoreHook) -> None:
    live = world.live
    run = live.trigger("escalate_late")
    assert live.wait("escalate_late", run) == "success", live.why("escalate_late", run, "late")
    (message_id,) = live.result("escalate_late", run, "late")

    def left() -> str | None:
        found = store.get(message_id)
        return found.state if isinstance(found, Remembered) else None

    become(lambda: left() == "cancelled")
