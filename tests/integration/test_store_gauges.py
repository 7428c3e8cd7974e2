"""The counts as gauges through Airflow's Stats."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
from airflow.sdk.observability import stats
from airflow.sdk.observability.metrics.stats_utils import get_stats_factory
from support.standing import give_up, hand_over, hold, pause
from support.stores import Store, message, store_fixture  # noqa: F401 - a fixture

from airflow_delayed.operators.dispatch import StoreDispatchOperator

HOUR = timedelta(hours=1)


class Recorder:
    """Takes gauges as the client of a statsd would."""

    def __init__(self) -> None:
        self.told: list[tuple[str, float, dict[str, str]]] = []

    def gauge(self, stat: str, value: float, *, tags: dict[str, str]) -> None:
        self.told.append((stat, value, tags))


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    made = Recorder()
    stats.initialize(factory=lambda: made, export_legacy_names=True)
    yield made
    stats.initialize(factory=get_stats_factory(), export_legacy_names=True)


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
def test_gauges(store: Store, recorder: Recorder):
    hook = store.installed()
    now = hook.now()
    hook.send(message(f"m{n}", now + (n - 4.5) * HOUR) for n in range(10))
    hold(hook, "m0")
    hand_over(hook, "m1")
    give_up(hook, "m2")
    pause(hook, ["m3"], HOUR)
    clock = [100.0]
    hook.gauges(monotonic=lambda: clock[0])
    assert {tags["conn_id"] for _, _, tags in recorder.told} == {store.conn_id}
    told = {name.removeprefix("delayed.store."): value for name, value, _ in recorder.told}
    # the one in flight
    assert 4.5 * 3600 <= told.pop("oldest_due_seconds") < 5.5 * 3600
    assert told == {
        "waiting": 5,
        "due": 1,
        "overdue": 1,
        "in_flight": 1,
        "retrying": 1,
        "failed": 1,
        "expired": 0,
        "remembered": 1,
    }
    # no oftener, however short the passes of a dispatcher are
    recorder.told.clear()
    clock[0] += 29
    hook.gauges(monotonic=lambda: clock[0])
    assert recorder.told == []
    hook.cancel("m9")
    clock[0] += 2
    hook.gauges(monotonic=lambda: clock[0])
    assert ("delayed.store.waiting", 4, {"conn_id": store.conn_id}) in recorder.told


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
def test_an_empty_store_is_late_by_nothing(store: Store, recorder: Recorder):
    store.installed().gauges()
    assert {value for _, value, _ in recorder.told} == {0}


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
def test_a_dispatcher_tells_what_is_left(store: Store, recorder: Recorder):
    hook = store.installed("queue", deliver_conn_id=None)
    now = hook.now()
    hook.send([message("now", now, destination="queue"), message("later", now + HOUR, destination="queue")])
    task = StoreDispatchOperator(task_id="t", conn_id=store.conn_id, deliver_conn_ids=store.conn_id)
    assert task.execute({})["dispatched"] == 1
    told = {name.removeprefix("delayed.store."): value for name, value, _ in recorder.told}
    assert (told["waiting"], told["due"], told["remembered"]) == (1, 0, 1)
