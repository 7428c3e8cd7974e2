"""QueueTableTrigger under a real scheduler and triggerer, on PostgreSQL: each row is one run's, whatever dies."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime, timedelta

import pytest
from support.lengths import LONG, TABLES, length

from acceptance.conftest import World, by_schedule
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.message import DelayedMessage
from services import process

DAG, QUEUE = "rows", "watched_rows"
EXAMPLE, EXAMPLE_QUEUE = "on_row_due", "on-row-due"
ROWS = length("rows of a watched queue table in a live Airflow", 500, 10_000)
RUNS = length("rows with a run of their own", 5, 60)
#: How many rows fall due in a second.
RATE = 167
pytestmark = [pytest.mark.timeout(1200), pytest.mark.long]


@pytest.fixture(scope="module")
def watched(world: World) -> Iterator[World]:
    """The scheduler starts DAGs by events."""
    for dag in (DAG, EXAMPLE, "handle_row", f"{EXAMPLE}_send"):
        log = world.live.folder / "dag-processor.log"
        process.wait_for(dag, lambda dag=dag: world.live.has(dag), seconds=120, log=log)
    with by_schedule(world):
        yield world
        for dag in (DAG, EXAMPLE):
            world.live.call("PATCH", f"/dags/{dag}", is_paused=True)


@pytest.fixture
def store(watched: World, connect: Callable[..., str]) -> Iterator[DelayedStoreHook]:
    connect("delayed_store", watched.store_url)
    with closing(DelayedStoreHook("delayed_store", table="watched_messages")) as made:
        made.install([QUEUE, EXAMPLE_QUEUE], create_destinations=True)
        yield made


def eventually(world: World, what: str, ready: Callable[[], object], part: str = "triggerer") -> None:
    process.wait_for(what, ready, seconds=400, log=world.live.folder / f"{part}.log")


def send(store: DelayedStoreHook, queue: str, ids: list[str]) -> dict[str, datetime]:
    """Store messages that fall due one after the other, and return when."""
    start = store.now() + timedelta(seconds=3)
    dues = {name: start + timedelta(seconds=number / RATE) for number, name in enumerate(ids)}
    store.send(
        DelayedMessage(destination=queue, body=name.encode(), due_at=due, message_id=name, headers={})
        for name, due in dues.items()
    )
    return dues


def dispatch(store: DelayedStoreHook) -> None:
    """Dispatch until nothing is left."""
    dispatcher = store.dispatcher(["delayed_store"], lambda conn_id, clock: None, lookahead=timedelta(0))
    dispatcher.run("empty")


def left(store: DelayedStoreHook) -> int:
    with store.engine.connect() as connection:
        return int(connection.exec_driver_sql(f"SELECT count(*) FROM {QUEUE}").scalar_one())


def arrived(world: World) -> list[tuple[str, datetime]]:
    """The messages in the events of all runs, and when the run was made."""
    found = []
    for run in world.live.call("GET", f"/dags/{DAG}/dagRuns?limit=1000")["dag_runs"]:
        events = world.live.call("GET", f"/dags/{DAG}/dagRuns/{run['dag_run_id']}/upstreamAssetEvents")["asset_events"]
        ids = [message["message_id"] for event in events for message in event["extra"]["payload"]["messages"]]
        found += [(name, datetime.fromisoformat(run["queued_at"])) for name in ids]
    return found


def test_each_row_is_in_the_events_of_one_run(watched: World, store: DelayedStoreHook) -> None:
    watched.live.unpause(DAG)
    dues = send(store, QUEUE, [f"r{number}" for number in range(ROWS)])
    dispatch(store)
    eventually(watched, "all rows in events", lambda: left(store) == 0)
    eventually(watched, "runs for all", lambda: len(arrived(watched)) >= ROWS, "scheduler")
    found = arrived(watched)
    times = Counter(name for name, _ in found)
    late = sorted((made - dues[name]).total_seconds() for name, made in found)
    assert set(times) == set(dues)
    assert max(times.values()) == 1
    assert late[0] >= 0
    if LONG:
        figures = ", ".join(f"p{part} {late[len(late) * part // 100]:.1f} s" for part in (50, 99))
        runs = len({made for _, made in found})
        TABLES["lateness of rows of a watched queue table"] = [
            f"{ROWS:,} rows in {runs} runs: {figures}, {late[-1]:.1f} s at most"
        ]


def test_a_triggerer_that_is_killed_loses_no_row(watched: World, store: DelayedStoreHook) -> None:
    watched.live.unpause(DAG)
    dues = send(store, QUEUE, [f"k{number}" for number in range(ROWS // 2)])
    dispatching = threading.Thread(target=dispatch, args=(store,))
    dispatching.start()
    # in the middle: some are in events, some in its hands, and some still to come
    eventually(watched, "the first rows", lambda: any(name in dues for name, _ in arrived(watched)), "scheduler")
    watched.live.kill("triggerer")
    dispatching.join()
    time.sleep(0.5)
    watched.live.start("triggerer")
    eventually(watched, "all rows in events", lambda: left(store) == 0)
    eventually(watched, "runs for all", lambda: {name for name, _ in arrived(watched)} >= dues.keys(), "scheduler")
    found = [(name, made) for name, made in arrived(watched) if name in dues]
    assert min((made - dues[name]).total_seconds() for name, made in found) >= 0
    if LONG:
        twice = len(found) - len(dues)
        TABLES["a triggerer killed while rows fall due"] = [f"{len(dues):,} rows: 0 lost, {twice} twice"]


def test_the_example_makes_one_run_for_each_row(watched: World, store: DelayedStoreHook) -> None:
    live = watched.live
    for dag in ("handle_row", f"{EXAMPLE}_send"):
        live.call("PATCH", f"/dags/{dag}", is_paused=False)
    live.unpause(EXAMPLE)
    run = live.trigger(f"{EXAMPLE}_send")
    assert live.wait(f"{EXAMPLE}_send", run) == "success"

    def made() -> dict[str, dict[str, object]]:
        runs = live.call("GET", "/dags/handle_row/dagRuns?limit=1000")["dag_runs"]
        return {run["dag_run_id"]: run for run in runs}

    eventually(watched, "two runs", lambda: len(live.runs("handle_row", state="success")) == 2, "scheduler")
    assert {live.result("handle_row", name, "handle") for name in made()} == {"the first", "the second"}
    assert all(run["conf"]["message_id"] == name for name, run in made().items())

    names = [f"own-{number}" for number in range(RUNS)]
    send(store, EXAMPLE_QUEUE, names)
    dispatch(store)
    eventually(watched, "a run for each", lambda: made().keys() >= set(names), "scheduler")
    # the same messages once more
    with store.engine.begin() as connection:
        connection.execute(store.tables.past.delete())
    send(store, EXAMPLE_QUEUE, names[:2])
    mapped = len(live.runs(EXAMPLE, state="success"))
    dispatch(store)
    eventually(watched, "another run", lambda: len(live.runs(EXAMPLE, state="success")) > mapped, "scheduler")
    assert len(made()) == RUNS + 2
    if LONG:
        queued = sorted(datetime.fromisoformat(str(made()[name]["queued_at"])) for name in names)
        minutes = (queued[-1] - queued[0]).total_seconds() / 60
        TABLES["one run for each row"] = [f"{RUNS} rows: {RUNS / minutes:.0f} runs a minute"]


def test_the_escalation_of_a_red_run_reaches_its_desk(watched: World, connect: Callable[..., str]) -> None:
    live = watched.live
    connect("delayed_store", watched.store_url)
    for dag in ("escalation", "escalation_dispatch"):
        live.call("PATCH", f"/dags/{dag}", is_paused=False)
    live.unpause("escalation_desk")
    with closing(DelayedStoreHook("delayed_store")) as store:
        eventually(watched, "a dispatcher", lambda: waits_in_triggerer(watched, "escalation_dispatch", "dispatch"))
        run = live.trigger("escalation")
        assert live.wait("escalation", run) == "failed"
        eventually(watched, "its message", lambda: any(store.list(tag=f"notifier:escalation/{run}")), "dag-processor")
        (one,) = store.list(tag=f"notifier:escalation/{run}")
        assert live.runs("escalation_desk") == []
        # not in half an hour
        due = store.now() + timedelta(seconds=3)
        store.reschedule([one.message_id], due)
    eventually(watched, "a call", lambda: live.runs("escalation_desk", state="success"), "scheduler")
    (called,) = live.runs("escalation_desk")
    (body,) = live.result("escalation_desk", called["dag_run_id"], "call")
    assert run in body
    late = datetime.fromisoformat(called["queued_at"]) - due
    assert late >= timedelta(0)
    if LONG:
        TABLES["an escalation, from its due time to the run of the desk"] = [f"{late.total_seconds():.1f} s"]
    for dag in ("escalation_dispatch", "escalation_desk"):
        live.call("PATCH", f"/dags/{dag}", is_paused=True)
    for left in live.runs("escalation_dispatch", state="running"):
        live.call("PATCH", f"/dags/escalation_dispatch/dagRuns/{left['dag_run_id']}", state="failed")


def waits_in_triggerer(world: World, dag_id: str, task_id: str) -> bool:
    runs = world.live.runs(dag_id, state="running")
    return any(world.live.deferred(dag_id, run["dag_run_id"], task_id) for run in runs)
