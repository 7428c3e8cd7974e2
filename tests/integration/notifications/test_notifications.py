"""DelayedNotifier and DelayedCancelNotifier with a store: what is red for too long is escalated, and no other."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.sdk.execution_time.callback_supervisor import execute_callback
from airflow.triggers.callback import CallbackTrigger
from support.etl import HALF_AN_HOUR, Etl
from support.examples import dags_of, result
from support.stores import Store, Transport, on_postgres_too

from airflow_delayed.delivery import SendReport
from airflow_delayed.errors import DelayedError, InputError, TopologyError
from airflow_delayed.notifications import store_calls
from airflow_delayed.notifications.notifiers import DelayedCancelNotifier, DelayedNotifier
from airflow_delayed.notifications.store_calls import CALL_SECONDS

NOTIFIER = "airflow_delayed.notifications.notifiers.DelayedNotifier"
CANCEL = "airflow_delayed.notifications.notifiers.DelayedCancelNotifier"


@on_postgres_too
def test_what_stays_red_is_escalated_when_it_is_due_and_not_before(etl: Etl) -> None:
    etl.red("a", 0)
    (one,) = etl.hook.list()
    assert (one.due_at, one.state, one.next_try) == (etl.began + HALF_AN_HOUR, "waiting", None)
    # with a lookahead of 15 minutes
    assert [etl.dispatch(minutes) for minutes in (14, 16, 29.9)] == [[], [], []]
    assert etl.hook.counts().waiting == len(list(etl.hook.list(state="waiting"))) == 1
    assert list(etl.hook.list(state="retrying")) == []
    (body,) = etl.dispatch(30)
    failure = json.loads(body)
    assert (failure["dag_id"], failure["run_id"], failure["failed_at"]) == ("etl", "a", etl.began.isoformat())
    assert (failure["task_id"], failure["reason"], failure["failures"]) == ("work", "task_failure", 1)
    assert etl.waiting == []


@on_postgres_too
def test_green_ten_seconds_before_it_is_due_stops_it(etl: Etl) -> None:
    etl.red("a", 0)
    almost = 30 - 1 / 6
    assert etl.dispatch(almost) == []
    etl.green("a", almost)
    assert (etl.waiting, etl.dispatch(31)) == ([], [])
    (change,) = etl.hook.audit()
    assert (change.who, change.action) == ("DAG etl, run a", "cancel")


def test_by_default_a_run_is_red_by_itself(reachable: Store, broker: str) -> None:
    etl = Etl(reachable, reachable.installed(), per="run")
    assert DelayedNotifier(conn_id="c", store_conn_id="db", destination="q", delay=1).per == "run"
    assert DelayedCancelNotifier(store_conn_id="db").per == "run"
    etl.green("0", -60)
    assert list(etl.hook.audit()) == []
    etl.red("a", 0)
    etl.red("b", 1)
    etl.green("c", 2)
    assert etl.waiting == [30, 31]
    etl.green("a", 3)
    assert (etl.waiting, etl.stands_for) == ([31], [["b"]])
    assert [one.tag for one in etl.hook.list()] == ["notifier:etl/b"]


@on_postgres_too
def test_red_green_red_arms_twice_and_red_red_once(etl: Etl) -> None:
    etl.red("a", 0)
    etl.red("a", 0)  # Airflow calls once more for the same failure
    etl.red("a", 1)  # cleared, and red again
    etl.red("b", 2)
    etl.red("b", 2)
    assert (etl.waiting, etl.stands_for) == ([30], [["a", "a", "b"]])
    etl.green("b", 9)
    etl.red("a", 0)  # a callback of the first failure that comes late
    assert etl.waiting == []
    etl.red("b", 20)
    assert (etl.waiting, etl.stands_for) == ([50], [["b"]])


def test_what_is_red_after_an_escalation_is_escalated_again(etl: Etl) -> None:
    etl.red("a", 0)
    assert len(etl.dispatch(30)) == 1
    etl.red("b", 31)
    etl.red("b", 31)
    assert (etl.waiting, etl.stands_for) == ([61], [["b"]])


def test_two_notifiers_of_a_dag_are_armed_both_and_stopped_by_one_green(etl: Etl) -> None:
    manager = etl.notifier(delay=7200)
    for run, minutes in (("a", 0), ("b", 1)):
        etl.red(run, minutes)
        etl.red(run, minutes, manager)
    assert (etl.waiting, etl.stands_for) == ([30, 120], [["a", "b"], ["a", "b"]])
    etl.green("c", 2)
    assert etl.waiting == []


def test_who_moves_its_due_time_can_still_take_it_back_until_then(etl: Etl) -> None:
    etl.red("a", 0)
    etl.hook.reschedule(tag="notifier:etl", due_at=etl.began + timedelta(minutes=40))
    assert etl.dispatch(39) == []
    assert len(etl.dispatch(40)) == 1


@dataclass
class Meanwhile(Transport):
    """A transport during whose send something happens."""

    what: Callable[[], None] = print

    def send(self, messages: Any) -> SendReport:
        self.what()
        return super().send(messages)


def test_what_was_handed_over_is_a_warning(etl: Etl, caplog) -> None:
    etl.red("a", 0)
    (one,) = etl.hook.list()
    caplog.clear()
    warning = f"DAG etl, run b: too late to take back {one.message_id}: a dispatcher has handed it over"
    etl.dispatch(30, Meanwhile(what=lambda: etl.green("b", 30.1)))
    assert _warnings(caplog) == [warning]
    caplog.clear()
    # it had left before the run ended
    etl.green("b", 32)
    assert _warnings(caplog) == [warning]
    caplog.clear()
    # it had left before the run began
    etl.green("c", 40)
    assert _warnings(caplog) == []


def test_who_fails_when_nobody_dispatches_is_warned(etl: Etl, caplog) -> None:
    etl.red("a", 0)
    (warning,) = _warnings(caplog)
    assert "no dispatcher of store" in warning


def test_a_tasks_failure_counts_from_its_try(etl: Etl) -> None:
    etl.red("a", 0, task="load")
    assert etl.waiting == [30]
    # and a DAG's callback without a task has neither run nor try
    etl.green("a", 1)
    etl.on_failure({"dag": etl.dag, "run_id": "a", "reason": "timed_out"})
    (due,) = etl.waiting
    assert due > 30


def test_templates_are_rendered_for_each_run(etl: Etl) -> None:
    notifier = DelayedNotifier(
        conn_id="{{ 'broker' }}",
        store_conn_id=etl.store.conn_id,
        destination="desk-{{ dag.dag_id }}",
        delay="{{ 60 * 30 }}",
        value={"run": "{{ run_id }}", "reason": "{{ reason }}"},
        headers={"run": "{{ dag_run.run_id }}"},
    )
    for run in ("a", "b"):
        notifier({**etl.context(run, 0), "reason": "task_failure"})
    transport = Transport()
    etl.dispatch(30, transport)
    sent = sorted((one.destination, one.body, one.headers["run"]) for one in transport.sent)
    assert sent == [
        ("desk-etl", b'{"run":"a","reason":"task_failure"}', "a"),
        ("desk-etl", b'{"run":"b","reason":"task_failure"}', "b"),
    ]


def of_deadline(began: datetime) -> dict[str, Any]:
    """The context that a DeadlineAlert passes."""
    started, late = (began - timedelta(hours=1)).isoformat(), began.isoformat()
    run = {"dag_id": "etl", "dag_run_id": "a", "state": "running", "start_date": started, "end_date": None}
    return {"dag_run": run, "deadline": {"id": "0199", "deadline_time": late}}


def test_a_deadline_in_the_triggerer_arms_and_takes_back(etl: Etl) -> None:
    context = of_deadline(etl.began)
    value = "{{ dag_run.dag_id }}, {{ dag_run.dag_run_id }}: {{ deadline.deadline_time }}"
    arguments = {"conn_id": "broker", "store_conn_id": etl.store.conn_id, "destination": "desk", "delay": 1800}

    def fired(path: str, arguments: dict[str, Any]) -> dict[str, Any]:
        async def last() -> dict[str, Any]:
            trigger = CallbackTrigger(path, {**arguments, "context": dict(context)})
            return [event.payload async for event in trigger.run()][-1]

        return asyncio.run(last())

    for _ in range(2):
        assert fired(NOTIFIER, {**arguments, "value": value})["state"] == "success"
    assert etl.dispatch(30) == [f"etl, a: {etl.began.isoformat()}".encode()]
    context["deadline"]["id"] = "0200"
    assert fired(NOTIFIER, arguments)["state"] == "success"
    assert fired(CANCEL, {"store_conn_id": etl.store.conn_id})["state"] == "success"
    assert etl.waiting == []


def test_a_deadline_by_the_executor_warns_of_a_literal_body(etl: Etl, caplog) -> None:
    arguments = {"conn_id": "broker", "store_conn_id": etl.store.conn_id, "destination": "desk", "delay": 1800}
    for value, warned in (("hush", True), ("{{ dag_run.dag_id }}", False)):
        caplog.clear()
        context = of_deadline(etl.began)
        context["deadline"]["id"] = str(value)
        log = SimpleNamespace(**dict.fromkeys(("debug", "info", "exception"), lambda *_, **__: None))
        given = {**arguments, "value": value, "context": context}
        assert execute_callback(NOTIFIER, given, "", None, log) == (True, None)
        assert any("in the clear" in line for line in _warnings(caplog)) is warned
        assert "hush" not in caplog.text
        assert len(etl.waiting) == 1
        etl.hook.cancel(tag="notifier:etl/a")


@pytest.fixture
def silent(connect) -> Iterator[str]:
    """A connection to a database that takes connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        yield connect("silent", conn_type="postgres", host="127.0.0.1", port=port, login="a", password="pw", schema="b")


@pytest.mark.parametrize("kind", [DelayedNotifier, DelayedCancelNotifier])
def test_a_store_that_does_not_answer_is_one_line_and_the_error(
    kind, silent, broker, monkeypatch, caplog, capsys
) -> None:
    assert CALL_SECONDS == 10
    monkeypatch.setattr(store_calls, "CALL_SECONDS", 0.5)
    # it is asked each time
    monkeypatch.setattr(store_calls, "SILENCE", 0.0)
    more = {"conn_id": broker, "destination": "q", "delay": 1} if kind is DelayedNotifier else {}
    context = {"dag": DAG("etl", schedule=None), "run_id": "a"}
    wanted = "connection 'silent' did not answer within 0.5 seconds"
    caplog.set_level(logging.ERROR)
    with pytest.raises(DelayedError, match=wanted):
        kind(store_conn_id=silent, **more)(dict(context))
    # Airflow's own line
    logged = capsys.readouterr()
    assert (logged.out + logged.err).count(wanted) == 1
    assert caplog.records == []

    async def wait() -> None:
        await kind(store_conn_id=silent, **more, context=dict(context))

    with pytest.raises(DelayedError, match=wanted):
        asyncio.run(wait())
    assert [wanted in record.getMessage() for record in caplog.records] == [True]


def test_what_cannot_wait_says_what_to_do(store: Store, broker, connect, caplog) -> None:
    context = {"dag": DAG("etl", schedule=None), "run_id": "a"}
    to: dict[str, Any] = {"destination": "q", "delay": 1}
    with pytest.raises(TopologyError, match="TopologyInstallOperator"):
        DelayedNotifier(conn_id=broker, store_conn_id=store.hook().conn_id, **to)(dict(context))
    connect("another", conn_type="sqlite", host="/nowhere.db")
    with pytest.raises(InputError, match=r"connection 'another' is a store itself.*pass store_conn_id='another'"):
        DelayedNotifier(conn_id="another", store_conn_id=store.conn_id, **to)(dict(context))
    with pytest.raises(InputError, match="destination: must be the name of a queue"):
        DelayedNotifier(conn_id=broker, store_conn_id=store.conn_id, destination="{{ '' }}", delay=1)(context)


def test_the_quickstart_reads_its_message(here: Path, tmp_path: Path, connect, run_dag, monkeypatch) -> None:
    connect("delayed_store", conn_type="sqlite", host=str(tmp_path / "store.db"))
    dag = dags_of(here / "dags/quickstart.py", monkeypatch)["quickstart"]
    assert dag.get_task("send").delay == 10
    # no test waits for what a user would
    dag.get_task("send").delay = 0.1
    assert "Hello!" in str(result(run_dag(dag), "read"))


def _warnings(caplog: Any) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING and "notifier" in one.name]
