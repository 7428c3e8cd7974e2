"""What is told through Airflow's Stats, as a statsd receives it."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from airflow.sdk import DAG
from airflow.sdk.observability import stats
from support import statsd
from support.standing import give_up, hold, mark_dispatched, pause
from support.statsd import Statsd, Told
from support.stores import Store, Transport, message

from airflow_delayed import metrics
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.operators.dispatch import StoreDispatchOperator
from airflow_delayed.operators.send import DelayedSendOperator
from airflow_delayed.operators.topology import TopologyInstallOperator
from airflow_delayed.sensors.fifo_cycle import FifoCycleSensor
from airflow_delayed.sqs.stats import CycleCounts
from airflow_delayed.store.dispatch.settle import BatchOutcome, PlannedRetry
from airflow_delayed.store.policy import DispatchPolicy
from airflow_delayed.triggers import store_dispatch
from airflow_delayed.triggers.store_dispatch import StoreDispatchTrigger

HOUR = timedelta(hours=1)
SECOND = timedelta(seconds=1)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "airflow" / "metrics.md"
#: However slow the machine is.
PATIENCE = 60

sqlite = pytest.mark.parametrize("store", ["sqlite"], indirect=True)


@pytest.fixture
def server() -> Iterator[Statsd]:
    with statsd.listening() as made:
        yield made


def gauges(told: list[Told]) -> dict[str, float]:
    return {one.name.removeprefix("delayed.store."): one.value for one in told if one.kind == "g"}


@sqlite
def test_gauges(store: Store, server: Statsd):
    hook = store.installed()
    now = hook.now()
    hook.send(message(f"m{n}", now + (n - 4.5) * HOUR) for n in range(10))
    hold(hook, "m0")
    mark_dispatched(hook, "m1")
    give_up(hook, "m2")
    pause(hook, ["m3"], HOUR)
    hook.gauges()
    told = server.told()
    assert {one.tags["store_conn_id"] for one in told} == {store.conn_id}
    found = gauges(told)
    # the one in flight
    assert 4.5 * 3600 <= found.pop("oldest_due_seconds") < 5.5 * 3600
    assert found == {
        "waiting": 5,
        "due": 1,
        # in flight and retrying ones too
        "overdue": 3,
        "in_flight": 1,
        "retrying": 1,
        "failed": 1,
        "expired": 0,
        "remembered": 1,
    }


@sqlite
def test_counts_that_take_long_leave_the_database_to_the_dispatchers(store: Store, server: Statsd, monkeypatch):
    hook = store.installed()
    now = hook.now()
    hook.send([message("due", now - HOUR), message("expired", now - 3 * HOUR, expires_at=now - 2 * HOUR)])
    clock, counted = [0.0], hook.counts

    def counts(**options: object) -> object:
        clock[0] += 6
        return counted(**options)

    monkeypatch.setattr(hook, "counts", counts)
    made = metrics.Gauges(hook, lambda: clock[0])
    told = []
    for _ in range(12):
        made.tell()
        told.append(gauges(server.told()))
        clock[0] += 30
    # how late it is, is always known
    assert all(3600 <= each["oldest_due_seconds"] < 3600 + PATIENCE for each in told)
    assert [len(each) for each in told] == [9, *[1] * 9, 9, 1]


@sqlite
@pytest.mark.parametrize("tags", [True, False])
def test_two_stores_do_not_overwrite_each_others_gauges(store: Store, tmp_path: Path, connect, tags: bool):
    other_id = connect("other.store", conn_type="sqlite", host=str(tmp_path / "other.db"))
    stores = [store.installed(), DelayedStoreHook(other_id), DelayedStoreHook(other_id, table="second")]
    with statsd.listening(tags=tags) as server:
        for number, hook in enumerate(stores):
            hook.install([])
            hook.send(message(f"m{n}", hook.now() + HOUR) for n in range(number))
            hook.gauges()
            hook.close()
        found = {
            (one.name, one.tags.get("store_conn_id"), one.tags.get("table")): one.value
            for one in server.told()
            if one.name.startswith("delayed.store.waiting")
        }
    if tags:
        names = [(store.conn_id, None), ("other.store", None), ("other.store", "second")]
        assert found == {("delayed.store.waiting", *name): number for number, name in enumerate(names)}
    else:
        names = [store.conn_id, "other_store", "other_store.second"]
        assert found == {(f"delayed.store.waiting.{name}", None, None): n for n, name in enumerate(names)}


@sqlite
def test_an_empty_store_is_late_by_nothing(store: Store, server: Statsd):
    store.installed().gauges()
    assert set(gauges(server.told()).values()) == {0}


def test_a_dag_tells_what_it_sent_stored_and_dispatched(tmp_path, connect, run_dag, server: Statsd):
    connect("reminders_db", conn_type="sqlite", host=str(tmp_path / "messages.db"))
    with DAG("told", schedule=None) as dag:
        names = {"conn_id": "reminders_db", "destinations": ["mail"], "create_destinations": True}
        install = TopologyInstallOperator(task_id="install", **names)
        rows = [{"value": str(seconds), "delay_seconds": seconds} for seconds in (0, 0, 3600)]
        send = DelayedSendOperator(task_id="send", conn_id="reminders_db", destination="mail", messages=rows)
        plan = DelayedSendOperator(
            task_id="plan", conn_id="reminders_db", destination="mail", messages=rows, dry_run=True
        )
        dispatch = StoreDispatchOperator(
            task_id="dispatch", store_conn_id="reminders_db", deliver_conn_ids="reminders_db"
        )
        install >> send >> plan >> dispatch
    assert run_dag(dag).state == "success"
    told = server.told()
    own = {"conn_id": "reminders_db", "store_conn_id": "reminders_db"}
    # the two that are alike in all but their row are one message
    assert [one for one in told if one.kind == "c"] == [
        Told("delayed.stored", 2, "c", own),
        Told("delayed.dispatched", 1, "c", own),
    ]
    (late,) = (one for one in told if one.kind == "ms")
    assert (late.name, late.tags) == ("delayed.lateness", own)
    assert 0 <= late.value < PATIENCE * 1000
    assert {name: gauges(told)[name] for name in ("waiting", "due", "remembered")} == {
        "waiting": 1,
        "due": 0,
        "remembered": 1,
    }


@sqlite
def test_a_dispatcher_tells_what_became_of_each_message(store: Store, server: Statsd):
    hook = store.installed()
    now = hook.now()
    hook.send([message("ahead", now + HOUR), message("late", now - 90 * SECOND), message("refused", now)])
    hook.send([message("long", now), message("stale", now - HOUR, expires_at=now)])
    transport = Transport(refused={"refused"}, too_long={"long"})
    with pytest.raises(Exception, match="1 failed"):
        hook.dispatcher(["broker"], lambda conn_id, clock: transport, lookahead=2 * HOUR).run()
    told = server.told()
    assert all(one.tags == {"conn_id": "broker", "store_conn_id": store.conn_id} for one in told)
    assert {one.name: one.value for one in told if one.kind == "c"} == {
        "delayed.dispatched": 2,
        "delayed.retried": 1,
        "delayed.failed": 1,
        "delayed.expired": 1,
    }
    # of the latest in the batch
    (late,) = (one.value for one in told if one.kind == "ms")
    assert 90_000 <= late < 90_000 + PATIENCE * 1000

    hook.cancel("refused")
    # what went to the error destination is not failed; what is dispatched ahead is not late
    hook.send([message("longer", now + HOUR), message("soon", now + HOUR)])
    transport = Transport()
    original = Transport(too_long={"longer"})
    transport.check = lambda one, at: None if one.destination == "errors" else original.check(one, at)
    policy = {"lookahead": 2 * HOUR, "error_destination": "errors"}
    hook.dispatcher(["broker"], lambda conn_id, clock: transport, **policy).run()
    told = server.told()
    sums = {one.name: one.value for one in told if one.kind == "c"}
    assert sums == {"delayed.dispatched": 1, "delayed.error_destination": 1}
    assert [one.value for one in told if one.kind == "ms"] == [0]


@sqlite
def test_a_dispatcher_that_stays_in_the_triggerer_tells_its_gauges_meanwhile(store: Store, server: Statsd, monkeypatch):
    hook = store.installed()
    hook.send([message("now", hook.now()), message("later", hook.now() + HOUR)])
    transport = Transport()
    monkeypatch.setattr(store_dispatch, "delivery_for", lambda conn_id, clock: transport)
    monkeypatch.setattr(metrics, "GAUGES_EVERY", 0.05)
    monkeypatch.setattr(metrics, "GAUGES_REST", 0)
    # as Airflow leaves it in the triggerer
    stats.initialize(factory=stats.Stats, export_legacy_names=False)
    metrics.begin_outside_tasks.cache_clear()
    policy = DispatchPolicy(lookahead=timedelta(0)).state()

    async def play() -> list[Told]:
        until = (hook.now() + PATIENCE * SECOND).isoformat()
        made = StoreDispatchTrigger(store.conn_id, ["broker"], until=until, schema=store.schema, policy=policy)
        events = made.run()
        work = asyncio.ensure_future(anext(events))
        told: list[Told] = []
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            await asyncio.sleep(0.01)
            told += server.told()
            names = [one.name for one in told]
            if names.count("delayed.store.waiting") >= 3 and "delayed.dispatched" in names:
                break
        work.cancel()
        await asyncio.wait([work])
        return told

    told = asyncio.run(play())
    waiting = [one.value for one in told if one.name == "delayed.store.waiting"]
    assert len(waiting) >= 3
    assert waiting[-1] == 1
    assert [one.value for one in told if one.name == "delayed.dispatched"] == [1]
    assert transport.ids == ["now"]


@sqlite
def test_gauges_are_looked_for_only_if_somebody_takes_them(store: Store, caplog):
    hook = store.hook()  # without its tables, so that to count is an error
    metrics.tell_gauges(hook)
    assert caplog.records == []
    with statsd.listening() as server:
        metrics.tell_gauges(hook)
        assert server.told() == []
    (record,) = caplog.records
    assert "could not be reported as gauges" in record.getMessage()
    assert "TopologyInstallOperator" in record.getMessage()


class Queue:
    """A delay queue that one look finds these in."""

    conn_id = "aws"

    def __init__(self, *found: CycleCounts) -> None:
        self.found = list(found)

    def clock(self):
        raise AssertionError("not needed")

    def cycle(self, destination, wait_seconds=0, *, error_queue=None, stop=None) -> CycleCounts:
        return self.found.pop(0) if self.found else CycleCounts()

    def waiting(self, destination) -> int:
        return 0


def test_a_sensor_tells_what_it_sent_on(server: Statsd):
    found = CycleCounts(delivered=3, requeued=5, failed=2, to_error_queue=1)
    found.note_late(1234)
    found.note_late(200)
    sensor = FifoCycleSensor(task_id="t", conn_id="aws", destination="q", wait_time_seconds=0, empty_looks=1)
    queue = Queue(found)
    queue.clock = lambda: None
    sensor.__dict__["hook"] = queue
    assert not sensor.poke({}).is_done
    tags = {"conn_id": "aws"}
    assert server.told() == [
        Told("delayed.dispatched", 3, "c", tags),
        Told("delayed.retried", 2, "c", tags),
        Told("delayed.error_destination", 1, "c", tags),
        Told("delayed.lateness", 1234, "ms", tags),
    ]
    # nothing found is nothing told
    assert sensor.poke({}).is_done
    assert server.told() == []


@sqlite
def test_the_docs_name_every_metric(store: Store, server: Statsd):
    store.installed().gauges()
    metrics.count_sent("c", "s", 1, 1)
    row = {"Id": "a", "Time": store.hook().now()}
    outcome = BatchOutcome([row], [row], [PlannedRetry(row, "", row["Time"])], [(row, "")], [row], at=row["Time"])
    metrics.count_outcomes("s")("c", outcome)
    kinds = {"counter": "c", "timing": "ms", "gauge": "g"}
    named = re.findall(r"^\| `(delayed\.[\w.]+)` \| (\w+) \| ([^|]*) \|", PAGE.read_text(), re.MULTILINE)
    documented = {(name, kinds[kind], frozenset(re.findall(r"`(\w+)`", tags))) for name, kind, tags in named}
    assert documented == {(one.name, one.kind, frozenset(one.tags)) for one in server.told()}
