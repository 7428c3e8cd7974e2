"""DelayedNotifier and DelayedCancelNotifier at a store: a message waits for what is red, and for nothing else."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime, timedelta, timezone
from itertools import permutations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.sdk.execution_time.callback_supervisor import execute_callback
from airflow.triggers.callback import CallbackTrigger
from support.lengths import length
from support.silent import Silent

from airflow_delayed.errors import DelayedError, InputError, LimitExceeded, TopologyError
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.notifications import notifiers
from airflow_delayed.notifications.notifiers import DelayedCancelNotifier, DelayedNotifier

NOTIFIER = "airflow_delayed.notifications.notifiers.DelayedNotifier"
CANCEL = "airflow_delayed.notifications.notifiers.DelayedCancelNotifier"
END = datetime(2090, 1, 1, tzinfo=timezone.utc)
TO: dict[str, Any] = {"conn_id": "db", "store_conn_id": "db", "destination": "desk", "delay": 1800}
#: Every outcome of three attempts of a run, and every order of their callbacks.
HISTORIES = list(product(product([True, False], repeat=3), permutations(range(3))))
STEP = length("one of so many orders of the callbacks of three attempts", 5, 1)


@pytest.fixture
def store(connect, tmp_path: Path) -> Iterator[DelayedStoreHook]:
    connect("db", conn_type="sqlite", host=str(tmp_path / "store.db"))
    with closing(DelayedStoreHook("db")) as hook:
        hook.install([])
        yield hook


def context(run: str = "a", clears: int = 0, *, task: str | None = None, map_index: int = -1) -> dict[str, Any]:
    """What Airflow passes when a run ends, or a task of a run that goes on."""
    end = END + timedelta(minutes=clears)
    dag_run = SimpleNamespace(dag_id="etl", run_id=run, clear_number=clears, end_date=None if task else end)
    ti = SimpleNamespace(task_id=task or "work", map_index=map_index, end_date=end)
    return {"dag": DAG("etl", schedule=None), "run_id": run, "dag_run": dag_run, "ti": ti, "reason": "task_failure"}


def deadline(run: str = "a") -> dict[str, Any]:
    """What Airflow passes when a DeadlineAlert's time is over: a run without its clears."""
    dag_run = {"dag_id": "etl", "dag_run_id": run, "state": "running", "end_date": None}
    return {"dag_run": dag_run, "deadline": {"id": "0199", "deadline_time": END.isoformat()}}


def red(*of: Any, key: str | None = None, missed: bool = False, **more: Any) -> tuple[Any, dict[str, Any]]:
    per = "task" if "task" in more else "run"
    return DelayedNotifier(**TO, per=per, key=key), deadline(*of) if missed else context(*of, **more)


def green(*of: Any, key: str | None = None, **more: Any) -> tuple[Any, dict[str, Any]]:
    per = "task" if "task" in more else "run"
    return DelayedCancelNotifier(store_conn_id="db", per=per, key=key), context(*of, **more)


ONE, TWO = {"task": "load", "map_index": 1}, {"task": "load", "map_index": 2}


@pytest.mark.parametrize(
    "calls, waiting",
    [
        ([red()], ["a"]),
        ([red(), red()], ["a"]),
        ([red(), red(missed=True)], ["a"]),
        ([red(), green()], []),
        ([green(), red()], []),
        ([red(), green("a", 2)], []),
        ([green("a", 2), red("a", 1), red()], []),
        ([green(), red("a", 1)], ["a"]),
        ([red(), green("a", 1), red("a", 2)], ["a"]),
        ([green("a", 1), green("a", 1), red()], []),
        ([red("a"), red("b"), green("a")], ["b"]),
        ([red(missed=True), green("a", 1)], []),
        ([green(), red(missed=True)], []),
        # two notifiers of a DAG: each key by itself
        ([red(), red(key="manager")], ["a", "a"]),
        ([red(), red(key="manager"), green()], ["a"]),
        ([green(key="manager"), red(key="manager"), red()], ["a"]),
        # each instance of a mapped task by itself
        ([red(**ONE), red(**ONE), red(**TWO)], ["a", "a"]),
        ([red(**ONE), red(**TWO), green(**ONE)], ["a"]),
        ([green(**ONE), red(**ONE)], []),
        ([red(**ONE), green("a", 1, **ONE)], []),
    ],
)  # fmt: skip
def test_what_waits_after_some_callbacks(store: DelayedStoreHook, calls, waiting: list[str]) -> None:
    for notifier, passed in calls:
        notifier(dict(passed))
    assert [one.origin.run_id for one in store.list()] == waiting
    assert all(one.tag == f"notifier:etl/{one.origin.run_id}" and one.until_due for one in store.list())


def test_a_message_waits_for_what_is_red_in_whatever_order_callbacks_come(store: DelayedStoreHook) -> None:
    failed, ended = DelayedNotifier(**TO), DelayedCancelNotifier(store_conn_id="db")
    for number, (reds, order) in enumerate(HISTORIES[::STEP]):
        run = f"run {number}"
        for clears in order:
            (failed if reds[clears] else ended)(context(run, clears))
        # of the attempts after the last success
        due = [END + timedelta(minutes=30 + one) for one in range(3) if all(reds[one:])]
        assert [one.due_at for one in store.list(tag=f"notifier:etl/{run}")] == due, (reds, order)


def test_what_is_green_in_time_is_not_delivered_and_what_was_delivered_is_a_warning(
    store: DelayedStoreHook, caplog
) -> None:
    store.install(["desk"], create_destinations=True)

    def dispatched() -> int:
        with closing(store.dispatcher(["db"], transports=lambda *_: None)) as dispatcher:
            return dispatcher.run().dispatched

    for run in ("a", "b"):
        DelayedNotifier(**TO)(context(run))
    # not before it is due, however far the dispatcher looks ahead
    assert dispatched() == 0
    DelayedCancelNotifier(store_conn_id="db")(context("a", 1))
    (late,) = store.list()
    store.reschedule([late.message_id], delay=0)
    assert dispatched() == 1
    caplog.clear()
    DelayedCancelNotifier(store_conn_id="db")(context("b", 1))
    (warning,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert warning == f"DAG etl, run b: too late to cancel {late.message_id}: a dispatcher has taken it"


def content(store: DelayedStoreHook, run: str = "a") -> Any:
    (one,) = store.list(tag=f"notifier:etl/{run}")
    return store.content(one.message_id, body_limit=10_000)


def test_the_default_body_names_the_failure(store: DelayedStoreHook, monkeypatch) -> None:
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "https://airflow.example/")
    DelayedNotifier(**TO)(context(map_index=3))
    DelayedNotifier(**TO)(deadline("b/c"))
    bodies = [json.loads(content(store, run).body) for run in ("a", "b/c")]
    at, runs = END.isoformat(), "https://airflow.example/dags/etl/runs"
    failed = {"task_id": "work", "map_index": 3, "reason": "task_failure", "run_url": f"{runs}/a"}
    assert bodies == [
        {"dag_id": "etl", "run_id": "a", "failed_at": at, **failed},
        {"dag_id": "etl", "run_id": "b/c", "failed_at": at, "reason": "deadline", "run_url": f"{runs}/b%2Fc"},
    ]


def test_templates_are_rendered_for_each_run_and_one_that_fails_loses_nothing(store: DelayedStoreHook, caplog) -> None:
    own = {"value": {"run": "{{ run_id }}"}, "headers": {"why": "{{ reason }}"}}
    notifier = DelayedNotifier(**{**TO, **own, "delay": "{{ 60 * 30 }}", "destination": "desk-{{ dag.dag_id }}"})
    for run in ("a", "b"):
        notifier(context(run))
        found = content(store, run)
        assert (json.loads(found.body), found.headers) == ({"run": run}, {"why": "task_failure"})
    assert {one.destination for one in store.list()} == {"desk-etl"}
    for number, (wrong, problem) in enumerate(
        [
            ({"value": "{{ nobody.name }}"}, "value= cannot be rendered (UndefinedError)"),
            ({"headers": {"n": "{{ 1 / 0 }}"}}, "headers= cannot be rendered (ZeroDivisionError)"),
        ]
    ):
        DelayedNotifier(**TO, **wrong)(context(f"wrong {number}"))
        assert json.loads(content(store, f"wrong {number}").body)["problem"] == problem
        assert problem in caplog.text
    # Airflow makes a deadline's notifier after the deadline, where an error would lose the escalation
    late = deadline("late")
    wrong = DelayedNotifier(**TO, value={"when": END}, headers={"n": 3}, context=late)
    asyncio.run(_awaited(wrong))
    assert "headers= the value of 'n' must be text" in json.loads(content(store, "late").body)["problem"]
    for name in ("destination", "conn_id", "delay", "key"):
        with pytest.raises(InputError, match=f"{name}= cannot be rendered .UndefinedError., and without it"):
            DelayedNotifier(**{**TO, name: "{{ nobody.name }}"})(context("lost"))


def test_what_cannot_be_stored_says_what_to_do(store: DelayedStoreHook, connect, tmp_path: Path) -> None:
    connect("empty", conn_type="sqlite", host=str(tmp_path / "empty.db"))
    connect("queue", conn_type="aws", extra={"region_name": "eu-central-1"})
    with pytest.raises(TopologyError, match="TopologyInstallOperator"):
        DelayedNotifier(**{**TO, "store_conn_id": "empty", "conn_id": "empty"})(context())
    with pytest.raises(InputError, match=r"connection 'empty' is a store itself.*pass store_conn_id='empty'"):
        DelayedNotifier(**{**TO, "conn_id": "empty"})(context())
    with pytest.raises(LimitExceeded, match="body"):
        DelayedNotifier(**{**TO, "conn_id": "queue"}, value="x" * 2_000_000)(context())
    assert list(store.list()) == []


async def _awaited(notifier: Any) -> None:
    await notifier


def fired(path: str, arguments: dict[str, Any], passed: dict[str, Any]) -> Any:
    async def last() -> str:
        trigger = CallbackTrigger(path, {**arguments, "context": passed})
        return [event.payload["state"] async for event in trigger.run()][-1]

    return last()


def test_a_deadline_is_heard_in_the_triggerer_and_by_the_executor(store: DelayedStoreHook) -> None:
    assert asyncio.run(fired(NOTIFIER, TO, deadline())) == "success"
    log = SimpleNamespace(**dict.fromkeys(("debug", "info", "exception"), lambda *_, **__: None))
    given = {**TO, "value": "{{ dag_run.dag_run_id }} is late", "context": deadline("b")}
    assert execute_callback(NOTIFIER, given, "", None, log) == (True, None)
    assert content(store, "b").body == b"b is late"
    assert asyncio.run(fired(CANCEL, {"store_conn_id": "db"}, deadline())) == "success"
    assert [one.origin.run_id for one in store.list()] == ["b"]


def test_many_missed_deadlines_ask_a_store_four_at_a_time(store: DelayedStoreHook, monkeypatch) -> None:
    lock, at_work, most = threading.Lock(), [0], [0]
    send = DelayedStoreHook.send

    def counted(hook: DelayedStoreHook, messages: Any) -> Any:
        with lock:
            at_work[0] += 1
            most[0] = max(most[0], at_work[0])
        try:
            return send(hook, messages)
        finally:
            with lock:
                at_work[0] -= 1

    monkeypatch.setattr(DelayedStoreHook, "send", counted)

    async def all_at_once() -> list[Any]:
        return await asyncio.gather(*(fired(NOTIFIER, TO, deadline(f"run {number}")) for number in range(20)))

    assert set(asyncio.run(all_at_once())) == {"success"}
    assert (len(list(store.list())), most[0] <= 4) == (20, True)


@pytest.fixture
def silent(connect) -> Iterator[Silent]:
    with closing(Silent()) as made:
        fields = {"login": "a", "password": "password", "schema": "b"}
        connect("silent", conn_type="postgres", host="127.0.0.1", port=made.port, **fields)
        yield made


@pytest.mark.parametrize("kind", [DelayedNotifier, DelayedCancelNotifier])
def test_a_store_that_does_not_answer_costs_ten_seconds_and_a_line(
    kind, store, silent: Silent, monkeypatch, caplog, capsys
) -> None:
    monkeypatch.setattr(notifiers, "CALL_SECONDS", 0.5)
    more = (
        {**TO, "store_conn_id": "silent", "conn_id": "silent"}
        if kind is DelayedNotifier
        else {"store_conn_id": "silent"}
    )
    wanted = "connection 'silent' did not answer within 0.5 seconds"
    with pytest.raises(DelayedError, match=wanted):
        kind(**more)(context())
    # Airflow's own line
    logged = capsys.readouterr()
    assert (logged.out + logged.err).count(wanted) == 1
    caplog.clear()
    with pytest.raises(DelayedError, match=wanted):
        asyncio.run(_awaited(kind(**more, context=context())))
    assert [wanted in one.getMessage() for one in caplog.records if one.levelname == "ERROR"] == [True]


def test_a_frozen_store_holds_up_no_other(store: DelayedStoreHook, silent: Silent) -> None:
    many = [DelayedCancelNotifier(store_conn_id="silent", context=context()) for _ in range(9)]

    async def beside() -> None:
        waiting = [asyncio.ensure_future(_awaited(one)) for one in many]
        while not silent.connections:
            await asyncio.sleep(0.01)
        await DelayedNotifier(**TO, context=context())
        assert [one.done() for one in waiting] == [False] * 9
        for one in waiting:
            one.cancel()

    asyncio.run(beside())
    assert len(list(store.list())) == 1
