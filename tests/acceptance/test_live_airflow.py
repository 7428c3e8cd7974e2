"""The example DAG under a real scheduler, triggerer and api-server, started by the REST API."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta

import pyarrow.dataset as parquet
import pytest
from reckoning import Arrival, Reckoning, computed, reckon

from acceptance.conftest import DAG, World

# a minute or two each, and more beside other work
pytestmark = pytest.mark.timeout(900)


def until(done: Callable[[], bool], *, seconds: float) -> None:
    """Wait until something is so, or the time is over; the assertions that follow say what is missing."""
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.2)


@dataclass
class Played:
    """The first run, whole."""

    run_id: str
    state: str
    due: dict[str, float]
    arrivals: list[Arrival]
    result: Reckoning
    in_order: list[str]


def order(world: World, run_id: str) -> list[str]:
    """Return the bodies of a run's reminders in the order in which Spark wrote them."""
    return parquet.dataset(world.folder(run_id)).to_table(columns=["value"])["value"].to_pylist()


@pytest.fixture(scope="module")
def played(world: World) -> Played:
    """A run that the REST API started without a logical date."""
    # long enough that some are due later than the store holds them over, however slow the machine
    run_id = world.live.trigger(DAG, day="2026-06-14", replay_seconds=50)
    state = world.live.wait(DAG, run_id, seconds=600)
    due = computed(world.folder(run_id))
    until(lambda: not reckon(due, world.consumer.arrivals()).missing, seconds=max(due.values()) - time.time() + 30)
    arrivals = world.consumer.arrivals()
    return Played(run_id, state, due, arrivals, reckon(due, arrivals), order(world, run_id))


def test_every_reminder_arrives_and_none_early(world: World, played: Played) -> None:
    [run] = world.live.runs(DAG, dag_run_id=played.run_id)
    assert run["logical_date"] is None
    assert played.state == "success", world.live.states(DAG, played.run_id)
    assert played.result.computed == 989
    assert (played.result.arrived, played.result.early, played.result.missing) == (989, 0, 0), played.result
    assert played.result.strange == 0
    assert len({arrival.id for arrival in played.arrivals}) == 989

    sent = world.live.result(DAG, played.run_id, "send")
    assert sent["sent"] + sent["stored"] == 989
    assert world.live.result(DAG, played.run_id, "dispatch")["dispatched"] == sent["stored"]
    assert world.stored() == 0


@pytest.mark.long
def test_a_cleared_spark_and_send_pair_means_the_same_messages(world: World, played: Played) -> None:
    before = len(world.consumer.arrivals())
    stored = world.live.result(DAG, played.run_id, "send")["stored"]
    world.live.clear(DAG, played.run_id, ["compute", "send"])
    assert world.live.wait(DAG, played.run_id) == "success", world.live.states(DAG, played.run_id)

    in_order = order(world, played.run_id)
    assert in_order != played.in_order, "the rows came back in the same order, which tests nothing"
    assert computed(world.folder(played.run_id)) == played.due
    # what the store has dispatched it remembers; only what goes past it is sent anew
    summary = world.live.result(DAG, played.run_id, "send")
    assert 0 < stored <= summary["duplicates"]
    assert (summary["sent"], summary["stored"]) == (len(played.due) - summary["duplicates"], 0)
    until(lambda: len(world.consumer.arrivals()) >= before + summary["sent"], seconds=60)
    again = world.consumer.arrivals()[before:]
    assert len(again) == summary["sent"]
    # what a consumer that remembers ids would find new: nothing, and of no reminder the id of another
    assert {(arrival.id, arrival.body) for arrival in again} <= {(seen.id, seen.body) for seen in played.arrivals}


@pytest.mark.long
def test_a_backfill_of_past_days_is_refused_and_sends_nothing(world: World) -> None:
    before = len(world.consumer.arrivals())
    first = date.today() - timedelta(days=9)
    world.live.backfill(DAG, f"{first}", f"{first + timedelta(days=1)}", replay_seconds=0)
    until(lambda: len(world.live.runs(DAG, run_type="backfill")) == 2, seconds=60)
    runs = [run["dag_run_id"] for run in world.live.runs(DAG, run_type="backfill")]
    assert len(runs) == 2
    for run_id in runs:
        assert world.live.wait(DAG, run_id) == "failed"

    for run_id in runs:
        states = world.live.states(DAG, run_id)
        assert (states["compute"], states["send"], states["dispatch"]) == ("success", "failed", "upstream_failed")
        count = f"{len(computed(world.folder(run_id))):,}"
        refusal = f"{count} of {count} rows were due more than 1:00:00 before"
        assert refusal in world.live.log(DAG, run_id, "send")
    assert world.stored() == 0
    # anything that was sent would have been overdue, and so on its way at once
    time.sleep(3)
    assert len(world.consumer.arrivals()) == before
