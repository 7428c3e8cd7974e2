"""Notifiers at a store that does not answer, or at which many ask at once; nothing else waits for them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.triggers.callback import CallbackTrigger
from support.silent import Silent

from airflow_delayed.errors import DelayedError, TransportUnavailable
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.message import utcnow
from airflow_delayed.notifications import store_calls
from airflow_delayed.notifications.notifiers import DelayedCancelNotifier, DelayedNotifier
from airflow_delayed.notifications.store_calls import CALL_SECONDS, StoreCalls

NOTIFIER = "airflow_delayed.notifications.notifiers.DelayedNotifier"


class Clock:
    """Seconds that a test moves on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Counters:
    """Gets metrics, and keeps the counters."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def incr(self, name: str, count: int, *, tags: dict[str, str]) -> None:
        self.counts[name] = self.counts.get(name, 0) + count

    def timing(self, name: str, dt: timedelta, *, tags: dict[str, str]) -> None: ...

    def gauge(self, name: str, value: float, *, tags: dict[str, str]) -> None: ...


@pytest.fixture
def counters(monkeypatch) -> Counters:
    made = Counters()
    monkeypatch.setattr("airflow_delayed.metrics._recorders", [made])
    return made


@pytest.fixture
def silent(connect) -> Iterator[Silent]:
    with closing(Silent()) as made:
        fields = {"login": "a", "password": "password", "schema": "b"}
        connect("silent", conn_type="postgres", host="127.0.0.1", port=made.port, **fields)
        yield made


def context(run: str = "a") -> dict[str, Any]:
    return {"dag": DAG("etl", schedule=None), "run_id": run}


def as_airflow_calls(callbacks: list[Any]) -> list[str]:
    """Call what a DAG has in a list as Airflow's DAG processor does; returns the errors."""
    errors = []
    for callback in callbacks:
        try:
            callback(context())
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def installed(folder: Path, conn_id: str, connect) -> DelayedStoreHook:
    connect(conn_id, conn_type="sqlite", host=str(folder / f"{conn_id}.db"))
    hook = DelayedStoreHook(conn_id)
    hook.install([])
    return hook


def test_five_notifiers_at_a_store_that_hangs_leave_the_sixth_callback_its_turn(
    silent: Silent, connect, monkeypatch, counters: Counters, caplog, tmp_path: Path
) -> None:
    clock = Clock()
    monkeypatch.setattr(store_calls, "CALL_SECONDS", 0.3)
    monkeypatch.setitem(store_calls._calls, "silent", StoreCalls("silent", monotonic=clock))
    called: list[dict[str, Any]] = []
    notifiers = [DelayedNotifier(conn_id="silent", store_conn_id="silent", destination="q", delay=n) for n in range(4)]
    every = [*notifiers, DelayedCancelNotifier(store_conn_id="silent")]
    first, *others = as_airflow_calls([*every, called.append])
    assert "connection 'silent' did not answer within 0.3 seconds" in first
    assert len(others) == 4
    assert all("did not answer an earlier notifier of this process" in error for error in others)
    assert "5 callbacks were dropped" in others[-1]
    assert (silent.was_asked(1), len(called)) == (True, 1)
    assert counters.counts == {"delayed.notifier_dropped": 5}
    # one asks again after half a minute, and no other beside it
    clock.now += 29
    as_airflow_calls(every)
    clock.now += 2
    errors = as_airflow_calls(every)
    assert "within 0.3 seconds" in errors[0]
    assert (silent.was_asked(2), counters.counts["delayed.notifier_dropped"]) == (True, 15)
    # until it answers
    clock.now += 31
    monkeypatch.setattr(store_calls, "CALL_SECONDS", 120.0)
    installed(tmp_path, "silent", connect).close()
    caplog.clear()
    assert as_airflow_calls(every[-1:]) == []
    assert "store 'silent' answers again; 15 callbacks" in caplog.text
    assert as_airflow_calls(every[-1:]) == []
    assert caplog.text.count("answers again") == 1


def test_another_store_is_asked_all_the_same(silent: Silent, connect, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(store_calls, "CALL_SECONDS", 0.3)
    hook = installed(tmp_path, "answering", connect)
    made = {"destination": "q", "delay": 1}
    monkeypatch.setitem(store_calls._calls, "silent", StoreCalls("silent"))
    silent_ones = [DelayedNotifier(conn_id="silent", store_conn_id="silent", **made)] * 2
    assert len(as_airflow_calls(silent_ones)) == 2
    monkeypatch.setattr(store_calls, "CALL_SECONDS", 120.0)
    assert as_airflow_calls([DelayedNotifier(conn_id="answering", store_conn_id="answering", **made)]) == []
    assert len(list(hook.list())) == 1
    hook.close()


def test_a_connection_that_fails_is_tried_once_more(connect, tmp_path: Path, caplog) -> None:
    folder = tmp_path / "later"
    connect("blip", conn_type="sqlite", host=str(folder / "store.db"))
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) > 1:
            folder.mkdir()
            DelayedStoreHook("blip").install([])

    calls = StoreCalls("blip", monotonic=Clock(), sleep=sleep)
    with pytest.raises(TransportUnavailable, match="unable to open database file"):
        calls.call(lambda store: store.count())
    # it counts as a store that does not answer
    with pytest.raises(DelayedError, match="is not asked again"):
        calls.call(lambda store: store.count())
    calls = StoreCalls("blip", monotonic=Clock(), sleep=sleep)
    assert calls.call(lambda store: store.count()) == 0
    assert slept == [store_calls.RETRY_PAUSE] * 2
    assert store_calls.RETRY_PAUSE < CALL_SECONDS


def test_many_missed_deadlines_share_four_threads_and_one_engine(connect, monkeypatch, tmp_path: Path) -> None:
    installed(tmp_path, "shared", connect).close()
    engines: list[object] = []
    make = DelayedStoreHook._make_engine
    monkeypatch.setattr(DelayedStoreHook, "_make_engine", lambda hook: engines.append(hook) or make(hook))
    threads: set[int] = set()
    at_once: list[int] = []
    arm = DelayedStoreHook.arm

    def counted(hook: DelayedStoreHook, *args: Any, **options: Any) -> Any:
        alive = [one for one in threading.enumerate() if one.name == "delayed-store"]
        at_once.append(len(alive))
        threads.add(threading.get_ident())
        return arm(hook, *args, **options)

    monkeypatch.setattr(DelayedStoreHook, "arm", counted)
    arguments = {"conn_id": "shared", "store_conn_id": "shared", "destination": "q", "delay": 1800}

    async def fired(number: int) -> dict[str, Any]:
        run = {"dag_id": "etl", "dag_run_id": f"run {number}", "start_date": None, "end_date": None}
        deadline = {"id": str(number), "deadline_time": utcnow().isoformat()}
        context = {"dag_run": run, "deadline": deadline}
        trigger = CallbackTrigger(NOTIFIER, {**arguments, "context": context})
        return [event.payload async for event in trigger.run()][-1]

    async def all_at_once() -> list[dict[str, Any]]:
        return await asyncio.gather(*map(fired, range(60)))

    payloads = asyncio.run(all_at_once())
    assert {payload["state"] for payload in payloads} == {"success"}
    assert (len(engines), len(at_once), max(at_once) <= 4) == (1, 60, True)
    hook = DelayedStoreHook("shared")
    assert len(list(hook.list())) == 60
    hook.close()


def test_what_waits_for_a_thread_fails_with_the_calls_before_it(silent: Silent, monkeypatch) -> None:
    monkeypatch.setattr(store_calls, "CALL_SECONDS", 0.3)
    calls = StoreCalls("silent")

    async def all_at_once() -> list[Any]:
        every = (calls.call_async(lambda store: store.count()) for _ in range(20))
        return await asyncio.gather(*every, return_exceptions=True)

    errors = asyncio.run(all_at_once())
    assert all(isinstance(error, DelayedError) for error in errors)
    # no more than four have ever asked
    assert len(silent.connections) <= store_calls.THREADS


def test_a_template_that_fails_does_not_lose_the_escalation(connect, tmp_path: Path, caplog) -> None:
    hook = installed(tmp_path, "db", connect)
    to: dict[str, Any] = {"conn_id": "db", "store_conn_id": "db", "destination": "q", "delay": 1800}
    cases = [
        ({"value": "{{ ti.task_id }} failed"}, "value= cannot be rendered (UndefinedError)"),
        ({"headers": {"task": "{{ ti.task_id }}"}}, "headers= cannot be rendered (UndefinedError)"),
        ({"value": {"n": "{{ 1 / 0 }}"}}, "value= cannot be rendered (ZeroDivisionError)"),
    ]
    for number, (wrong, problem) in enumerate(cases):
        caplog.clear()
        run = f"run {number}"
        DelayedNotifier(**to, **wrong)(context(run))
        (one,) = hook.list(tag=f"notifier:etl/{run}")
        content = hook.content(one.message_id, body_limit=10_000)
        assert json.loads(content.body)["problem"] == problem
        assert json.loads(content.headers["airflow-escalation"])["latest"][0]["problem"] == problem
        assert problem in caplog.text
    # an author's body stays if only the headers fail
    DelayedNotifier(**to, value="on fire", headers={"task": "{{ ti.task_id }}"})(context("own"))
    (one,) = hook.list(tag="notifier:etl/own")
    content = hook.content(one.message_id, body_limit=10_000)
    assert (content.body, sorted(content.headers)) == (b"on fire", ["airflow-escalation"])
    # what cannot be delivered anywhere is an error
    for name in ("destination", "conn_id", "delay"):
        with pytest.raises(DelayedError, match=f"{name}= cannot be rendered.*'ti' is undefined"):
            DelayedNotifier(**{**to, name: "{{ ti.task_id }}"})(context("lost"))
    hook.close()


def test_a_deadline_s_notifier_stores_the_default_body_for_what_cannot_be_one(connect, tmp_path: Path) -> None:
    """Airflow makes it after the deadline, where an error would lose the escalation."""
    hook = installed(tmp_path, "db", connect)
    run = {"dag_id": "etl", "dag_run_id": "a", "start_date": None, "end_date": None}
    missed = {"dag_run": run, "deadline": {"id": "0199", "deadline_time": utcnow()}}
    to: dict[str, Any] = {"conn_id": "db", "store_conn_id": "db", "destination": "q", "delay": 1800}
    wrong = {"value": {"when": utcnow()}, "headers": {"n": 3}}
    asyncio.run(_awaited(DelayedNotifier(**to, **wrong, context=dict(missed))))
    (one,) = hook.list()
    problem = json.loads(hook.content(one.message_id, body_limit=10_000).body)["problem"]
    assert "value= cannot be written as JSON" in problem
    assert "headers= the value of 'n' must be text, not int" in problem
    hook.close()


async def _awaited(notifier: Any) -> None:
    await notifier


def test_a_body_that_its_transport_refuses_becomes_the_default_body(connect, tmp_path: Path, caplog) -> None:
    hook = installed(tmp_path, "db", connect)
    connect("queue", conn_type="aws", extra={"region_name": "eu-central-1"})
    own = {"value": "x" * 2_000_000, "headers": {"a": "b"}}
    DelayedNotifier(conn_id="queue", store_conn_id="db", destination="q", delay=1800, **own)(context())
    (one,) = hook.list()
    body = json.loads(hook.content(one.message_id, body_limit=10_000).body)
    assert "exceed a limit" in body["problem"]
    assert "the message has the default body and no headers" in caplog.text
    hook.close()
