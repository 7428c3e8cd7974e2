"""MessagesDispatchedSensor: it claims of messages what the store knows of them, on a worker and in the triggerer."""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from airflow.models.trigger import Trigger
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException, TaskDeferred
from airflow.serialization.serialized_objects import DagSerialization
from sqlalchemy import delete
from support.stores import Store, Transport, message

from airflow_delayed.errors import TransportUnavailable
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.identity import Origin, SentBy
from airflow_delayed.operators.send import DelayedSendOperator
from airflow_delayed.sensors.messages_dispatched import MessagesDispatchedSensor
from airflow_delayed.store.dispatch.report import DispatchFailed
from airflow_delayed.testing.delayed import TaskRun
from airflow_delayed.triggers import messages_dispatched
from airflow_delayed.triggers.messages_dispatched import MessagesDispatchedTrigger

PAST = datetime(2020, 1, 1, tzinfo=timezone.utc)
LATER = datetime(2030, 5, 6, 7, 8, 9, tzinfo=timezone.utc)
MONDAY = Origin(dag_id="billing", run_id="monday", task_id="remind")
NONE = {"waiting": 0, "dispatched": 0, "cancelled": 0, "failed": 0, "expired": 0}
NONE |= {"dead_lettered": 0, "purged": 0, "erased": 0, "forgotten": 0}


def sensor(store: Store, **options: Any) -> MessagesDispatchedSensor:
    arguments = {"task_id": "wait", "store_conn_id": store.conn_id, "schema": store.schema, "poke_interval": 0.01}
    with DAG("billing", schedule=None):
        return MessagesDispatchedSensor(**{**arguments, **options})


def run_of(task: MessagesDispatchedSensor, run_id: str = "monday") -> TaskRun:
    return TaskRun(task, datetime.now(timezone.utc), run_id=run_id)


def counts(total: int, **outcomes: int) -> dict[str, int]:
    return {**NONE, "total": total, **outcomes}


def dispatch(store: Store, hook: DelayedStoreHook, *missing: str, **policy: Any) -> None:
    store.dispatcher(hook, Transport(missing=set(missing)), number_of_retries=0, **policy).run()


@pytest.fixture
def hook(store: Store) -> DelayedStoreHook:
    """The run of Monday stored two messages and sent a third at once; another run stored one."""
    store.installed()
    store.hook(origin=Origin(dag_id="billing", run_id="sunday", task_id="remind")).send([message("other", LATER)])
    hook = store.hook(origin=MONDAY)
    hook.send([message("a", PAST, tag="ann"), message("b", PAST, tag="bob", destination="gone")])
    hook.note_sent([message("c", PAST, tag="ann")])
    return hook


def defer(task: MessagesDispatchedSensor, run_id: str = "monday") -> TaskDeferred:
    task.deferrable = True
    context, rendered = run_of(task, run_id).context, task.prepare_for_execution()
    rendered.render_template_fields(context)
    with pytest.raises(TaskDeferred) as caught:
        rendered.execute(context)
    return caught.value


def fire(deferred: TaskDeferred, monkeypatch: pytest.MonkeyPatch, *between: Any) -> dict[str, Any]:
    """Run the trigger as Airflow's database gives it back; do one thing in place of each sleep."""
    things = iter(between)

    async def sleep(_: float) -> None:
        next(things)()

    monkeypatch.setattr(messages_dispatched, "_sleep", sleep)
    path, arguments = deferred.trigger.serialize()
    assert path == "airflow_delayed.triggers.messages_dispatched.MessagesDispatchedTrigger"
    trigger = MessagesDispatchedTrigger(**Trigger._decrypt_kwargs(Trigger.encrypt_kwargs(arguments)))
    assert trigger.serialize() == (path, arguments)

    async def first() -> dict[str, Any]:
        async for event in trigger.run():
            return event.payload
        raise AssertionError

    payload = asyncio.run(first())
    assert list(things) == []
    return payload


def test_it_waits_for_its_own_run_in_the_triggerer(store: Store, hook: DelayedStoreHook, monkeypatch, capsys):
    task = sensor(store)
    deferred = defer(task)
    assert deferred.timeout is not None
    event = fire(deferred, monkeypatch, lambda: dispatch(store, hook))
    assert (event["status"], event["error"]) == ("done", None)
    assert task.execute_complete({}, event) == counts(3, dispatched=3)
    assert (
        "2 of 3 messages wait; 1 dispatched; the next is due 2020-01-01T00:00:00+00:00, and is late"
        in capsys.readouterr().out
    )
    # the message of the other run waits
    assert hook.get("other").state == "waiting"


def test_on_a_worker_it_returns_the_counts_at_once_or_pokes_on(store: Store, hook: DelayedStoreHook):
    task = sensor(store)
    run = run_of(task)
    assert not task.poke(run.context)
    hook.cancel(["b"])
    dispatch(store, hook)
    assert run.execute() == counts(3, dispatched=2, cancelled=1)
    assert run_of(sensor(store, deferrable=True)).execute() == counts(3, dispatched=2, cancelled=1)


@pytest.mark.parametrize("deferrable", [True, False])
def test_what_was_given_up_fails_it_unless_that_may_be(store: Store, hook: DelayedStoreHook, capsys, deferrable: bool):
    with pytest.raises(DispatchFailed):
        dispatch(store, hook, "gone")
    task = sensor(store, deferrable=deferrable)
    with pytest.raises(
        AirflowFailException, match=r"of 3 messages 1 were given up: 1 failed\. .*on_given_up='succeed'"
    ):
        run_of(task).execute()
    assert run_of(sensor(store, on_given_up="succeed", deferrable=deferrable)).execute() == counts(
        3, dispatched=2, failed=1
    )
    assert "of 3 messages 1 were given up: 1 failed" in capsys.readouterr().out
    # those of the error destination did not reach theirs either
    hook.send([message("d", PAST, destination="gone", tag="d")])
    dispatch(store, hook, "gone", error_destination="errors")
    with pytest.raises(AirflowFailException, match="1 were given up: 1 dead-lettered"):
        run_of(sensor(store, tag="d", deferrable=deferrable)).execute()
    with pytest.raises(AirflowSkipException):
        run_of(sensor(store, tag="d", deferrable=deferrable, soft_fail=True)).execute()


@pytest.mark.parametrize(
    "selection, found",
    [
        ({"tag": "ann"}, {"total": 2, "dispatched": 2}),
        ({"ids": ["a", "c", "a"]}, {"total": 2, "dispatched": 2}),
        ({"ids": {"message_ids": ["b"]}}, {"total": 1, "dispatched": 1}),
        ({"ids": []}, {"total": 0}),
        ({"destination": "gone"}, {"total": 1, "dispatched": 1}),
        ({"deliver_conn_id": "broker", "due_until": "2020-01-02T00:00Z"}, {"total": 3, "dispatched": 3}),
        ({"due_from": PAST, "due_until": PAST + timedelta(days=1), "tag": "bob"}, {"total": 1, "dispatched": 1}),
        ({"sent_by": SentBy(dag_id="billing", run_id="monday")}, {"total": 3, "dispatched": 3}),
        (
            {"sent_by": {"dag_id": "billing", "task_id": "remind", "run_id": "{{ run_id }}"}},
            {"total": 3, "dispatched": 3},
        ),
    ],
)
def test_each_selection(store: Store, hook: DelayedStoreHook, monkeypatch, selection: dict[str, Any], found):
    if found["total"]:
        # through the database as JSON
        event = fire(defer(sensor(store, **selection)), monkeypatch, lambda: dispatch(store, hook))
        assert event["counts"] == {**counts(0), **found}
    assert run_of(sensor(store, **selection)).execute() == {**counts(0), **found}


def test_of_what_the_store_does_not_know_it_claims_nothing(store: Store, hook: DelayedStoreHook, monkeypatch, capsys):
    for deferrable in (True, False):
        with pytest.raises(AirflowFailException, match=r"knows no such message\. They were sent without this store"):
            run_of(sensor(store, deferrable=deferrable), "tuesday").execute()
        with pytest.raises(AirflowFailException, match="knows only 1 of the messages"):
            run_of(sensor(store, ids=["c", "x"], deferrable=deferrable)).execute()
        assert run_of(sensor(store, on_missing="succeed", deferrable=deferrable), "tuesday").execute() == counts(0)
    assert "knows no such message" in capsys.readouterr().out
    dispatch(store, hook)
    hook.origin = Origin(dag_id="billing", run_id="tuesday", task_id="remind")
    deferred = defer(sensor(store, on_missing="wait"), "tuesday")
    event = fire(deferred, monkeypatch, lambda: hook.send([message("d", PAST)]), lambda: dispatch(store, hook))
    assert (event["status"], event["counts"]) == ("done", counts(1, dispatched=1))
    # what is known is waited for, whatever is unknown
    hook.send([message("e", LATER)])
    task = sensor(store, ids=["e", "x"], on_missing="succeed")
    event = fire(defer(task), monkeypatch, lambda: hook.cancel(["e"]))
    assert (event["status"], task.execute_complete({}, event)) == ("unknown", counts(1, cancelled=1))


@pytest.mark.parametrize("mode", ["deferred", "poke", "reschedule"])
def test_ids_that_are_forgotten_meanwhile_are_counted(store: Store, hook: DelayedStoreHook, monkeypatch, mode: str):
    dispatch(store, hook)
    hook.send([message("last", LATER)])

    def forget() -> None:
        hook.cancel(["last"])
        past = hook.tables.past
        with hook.engine.begin() as connection:
            connection.execute(delete(past).where(past.c.Id.in_(["a", "b"])))

    wanted = counts(4, dispatched=1, cancelled=1, forgotten=2)
    if mode == "deferred":
        assert fire(defer(sensor(store)), monkeypatch, forget)["counts"] == wanted
        return
    task = sensor(store, mode=mode, deferrable=False)
    run = run_of(task)
    assert not task.poke(run.context)
    forget()
    # each poke of a rescheduled sensor is a process of its own
    again = sensor(store, mode=mode, deferrable=False) if mode == "reschedule" else task
    done = again.poke(run.context)
    assert (done.is_done, done.xcom_value) == (True, wanted)


def test_a_criterion_that_is_none_selects_nothing(store: Store, hook: DelayedStoreHook):
    with DAG("mapped", schedule=None) as dag:
        MessagesDispatchedSensor.partial(
            task_id="wait", store_conn_id=store.conn_id, schema=store.schema
        ).expand_kwargs([{"tag": None, "destination": "q"}])
    unmapped = dag.get_task("wait").unmap({"tag": None, "destination": "q"})
    with pytest.raises(AirflowFailException, match="tag= is None"):
        unmapped.execute(run_of(sensor(store)).context)
    DagSerialization.to_dict(dag)


@pytest.mark.parametrize(
    "options, text",
    [
        ({"on_given_up": "skip"}, "on_given_up='skip' is none of"),
        ({"on_missing": "warn"}, "on_missing='warn' is none of"),
        ({"ids": ["a"], "tag": "t"}, "give ids= or a filter, and not both"),
    ],
)
def test_what_cannot_be_is_an_error_when_the_dag_is_read(store: Store, options: dict[str, Any], text: str):
    with pytest.raises(ValueError, match=text):
        sensor(store, **options)


def test_what_a_template_renders_to_is_checked(store: Store, hook: DelayedStoreHook):
    for options in ({"due_from": "soon"}, {"ids": "['a']"}, {"ids": [str(number) for number in range(10_001)]}):
        with pytest.raises(AirflowFailException):
            run_of(sensor(store, **options)).execute()


def test_a_store_that_is_away_is_waited_for_and_one_that_refuses_is_an_error(
    store: Store, hook: DelayedStoreHook, monkeypatch, capsys
):
    deferred = defer(sensor(store))
    progress, away = DelayedStoreHook.progress, [TransportUnavailable("connection refused")]

    def broken(self: Any, **criteria: Any) -> Any:
        if away:
            raise away[0]
        return progress(self, **criteria)

    with monkeypatch.context() as patch:
        patch.setattr(DelayedStoreHook, "progress", broken)
        event = fire(deferred, patch, away.clear, lambda: dispatch(store, hook))
    assert event["status"] == "done"
    assert "cannot look into the store: connection refused. Still trying" in capsys.readouterr().out
    refused = (
        fire(
            defer(sensor(store, tag="ann", on_missing="wait", table="delayed_messages"), "x"), monkeypatch, lambda: None
        )
        if False
        else None
    )
    assert refused is None
    trigger = MessagesDispatchedTrigger(store.conn_id, {"tag": "t"}, 1.0, table="nowhere", schema=store.schema)

    async def first() -> Any:
        return [event.payload async for event in trigger.run()]

    ((event),) = asyncio.run(first())
    assert event["status"] == "failed"
    with pytest.raises(Exception, match="nowhere"):
        sensor(store).execute_complete({}, event)


def test_resumed_too_early_it_waits_on(store: Store, hook: DelayedStoreHook):
    task = sensor(store, timeout=100)
    task.deferrable = True
    began = task.clock() - timedelta(seconds=40)
    with pytest.raises(TaskDeferred) as caught:
        task.execute_complete(run_of(task).context, None, began=began.isoformat())
    assert timedelta(seconds=55) < caught.value.timeout <= timedelta(seconds=60)


def test_with_the_fixture_of_ones_own_tests(delayed):
    with DAG("billing", schedule=None):
        rows = [{"value": str(hours), "delay_seconds": 3600 * hours} for hours in (0, 2, 48)]
        send = DelayedSendOperator(
            task_id="send", conn_id="broker", store_conn_id="db", destination="mail", messages=rows
        )
        wait = MessagesDispatchedSensor(task_id="wait", store_conn_id="db")
    began = delayed.now
    delayed.run(send, run_id="one")
    assert delayed.run(wait, run_id="one") == counts(3, dispatched=3)
    assert delayed.now == began + timedelta(hours=48)
    assert [sent.body for sent in delayed.arrived()] == [b"0", b"2", b"48"]
    with pytest.raises(AirflowFailException, match="knows no such message"):
        delayed.run(wait, run_id="two")


def test_in_a_dag_as_airflow_runs_it(store: Store, run_dag):
    hook = store.installed("mail", deliver_conn_id=None)
    conn_id = store.conn_id
    with DAG("billing_live", schedule=None) as dag:
        send = DelayedSendOperator(task_id="send", conn_id=conn_id, destination="mail", value="x", delay=2)
        wait = MessagesDispatchedSensor(
            task_id="wait", store_conn_id=conn_id, deferrable=True, poke_interval=0.2, timeout=300
        )
        send >> wait
    with closing(store.dispatcher(hook)) as dispatcher:
        thread = threading.Thread(target=dispatcher.run, args=("stopped",))
        thread.start()
        try:
            run = run_dag(dag)
        finally:
            dispatcher.stop()
            thread.join()
    (ended,) = [one for one in run.get_task_instances() if one.task_id == "wait"]
    assert (ended.state, ended.xcom_pull(task_ids="wait")) == ("success", counts(1, dispatched=1))
    assert len(store.rows(hook, "mail")) == 1
