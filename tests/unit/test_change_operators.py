"""The operators that change messages: what they refuse before any change, and what a retry does."""

from __future__ import annotations

from contextlib import closing
from datetime import datetime, timedelta

import pytest
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowFailException
from support.send_runs import Run

from airflow_delayed.errors import DelayedError
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.hooks.sqs import SqsDelayHook
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.operators.change import (
    CRITERIA,
    DelayedCancelOperator,
    DelayedRescheduleOperator,
    DelayedRetryOperator,
)
from airflow_delayed.operators.dispatch import StoreDispatchOperator
from airflow_delayed.operators.send import DelayedSendOperator
from airflow_delayed.operators.topology import TopologyInstallOperator
from airflow_delayed.sensors.fifo_cycle import FifoCycleSensor
from airflow_delayed.testing.delayed import Delayed

DAY = timedelta(days=1)
OPERATORS = [DelayedCancelOperator, DelayedRescheduleOperator, DelayedRetryOperator]


def task_of(kind: type, **options: object):
    due = {"delay": 60} if kind is DelayedRescheduleOperator else {}
    return kind(**{"task_id": "change", "store_conn_id": "store", **due, **options})


@pytest.mark.parametrize("kind", OPERATORS)
@pytest.mark.parametrize(
    "options, text",
    [
        (
            {},
            "give ids= or a filter: at least one of tag=, destination=, deliver_conn_id=, due_from=, due_until=, ",
        ),
        ({"ids": ["a"], "tag": "t"}, "give ids= or a filter, and not both"),
        ({"tag": "t", "on_missing": "error"}, "on_missing='error' is none of 'warn', 'fail', 'ignore'"),
    ],
)
def test_what_cannot_be_is_an_error_when_the_dag_is_read(kind, options, text):
    with pytest.raises(ValueError, match=text):
        task_of(kind, **options)


@pytest.mark.parametrize("due", [{}, {"due_at": "2030-01-01T00:00Z", "delay": 60}])
def test_one_new_due_time(due):
    with pytest.raises(ValueError, match="give due_at= or delay=, and not both"):
        DelayedRescheduleOperator(task_id="change", store_conn_id="store", tag="t", **due)


@pytest.mark.parametrize("kind", OPERATORS)
@pytest.mark.parametrize(
    "options, text",
    [
        ({"tag": "{{ params.nothing }}"}, "tag= is ''; did its template render to nothing"),
        ({"tag": "t", "destination": "{{ none }}"}, "destination= is 'None'; did its template render to nothing"),
        ({"ids": "{{ params.nothing }}"}, "ids='' is a text, and no id"),
        ({"ids": "{{ ['a', 'b'] }}"}, "pass a list, or the other task's output itself instead of a template"),
        ({"ids": ["a", 1]}, "ids= has a int, or an empty text, among them"),
        ({"ids": ["a", ["b"]]}, "ids= has a list, or an empty text, among them"),
        # of a mapped send, of which one had too many
        ({"ids": [{"message_ids": ["a"]}, {"message_ids": None}]}, "of over 100 messages does not name them"),
        ({"ids": 17}, "ids= is a int, and must be a list of ids"),
        ({"ids": {"message_ids": None}}, "a DelayedSendOperator of over 100 messages does not name them"),
        ({"due_from": "2030-01-01T00:00"}, "due_from: 2030-01-01 00:00:00 has no time zone"),
        ({"due_until": datetime(2030, 1, 1)}, "due_until: 2030-01-01 00:00:00 has no time zone"),
        ({"due_until": "soon"}, "due_until: 'soon' is not a time"),
        ({"sent_by": {"run_id": "r"}}, "sent_by= must be a dictionary with dag_id, and may have run_id, task_id, map_"),
        ({"sent_by": {"dag_id": "d", "run": "r"}}, "sent_by= must be a dictionary with dag_id"),
        ({"sent_by": {"dag_id": "d", "run_id": None}}, "sent_by= has None as its run_id; leave it out"),
        ({"sent_by": {"dag_id": "d", "run_id": "{{ params.nothing }}"}}, "sent_by run_id= is ''"),
        ({"sent_by": {"dag_id": "d", "map_index": "x"}}, "sent_by= has 'x' as its map_index, which is no number"),
        ({"tag": "t", "dry_run": "{{ params.nothing }}"}, "dry_run='' is neither true nor false"),
    ],
)
def test_what_a_template_renders_to_is_checked_before_anything_is_changed(delayed: Delayed, kind, options, text):
    with DAG("d", schedule=None, params={"nothing": ""}):
        task = task_of(kind, **options)
    with pytest.raises(AirflowFailException) as caught:
        delayed.run(task)
    assert text in str(caught.value)


@pytest.mark.parametrize("options", [{"delay": "soon"}, {"due_at": "2030-01-01T00:00"}, {"delay": -1}])
def test_a_due_time_that_is_none_is_an_error(delayed: Delayed, options):
    task = DelayedRescheduleOperator(task_id="change", store_conn_id="store", tag="t", **options)
    with pytest.raises(AirflowFailException, match=r"(delay|due_at): "):
        delayed.run(task)


def three(delayed: Delayed) -> list[str]:
    """Store three messages of three customers, and return their ids."""
    both = {"conn_id": "any", "store_conn_id": "store"}
    rows = [{"value": name, "tag": name} for name in ("ann", "bob", "eve")]
    send = DelayedSendOperator(task_id="send", **both, destination="q", messages=rows, delay=DAY)
    return delayed.run(send)["message_ids"]


@pytest.mark.parametrize("kind", OPERATORS)
@pytest.mark.parametrize("name", ["ids", *CRITERIA])
def test_a_criterion_that_is_none_changes_nothing(delayed: Delayed, kind: type, name: str):
    """As a null of a mapped task's row, or a template that renders to nothing in native types."""
    three(delayed)
    before = delayed.stored
    other = {"destination": "q"} if name != "destination" else {"tag": "ann"}
    with DAG("native", schedule=None, render_template_as_native_obj=True):
        native = task_of(kind, **{**({} if name == "ids" else other), name: "{{ none }}"})
    for task in (native, *([] if name == "ids" else [task_of(kind, **{**other, name: None})])):
        with pytest.raises(AirflowFailException, match=f"^{name}= is None, which would select more messages, so noth"):
            delayed.run(task)
    assert delayed.stored == before


def test_a_retry_of_a_reschedule_moves_no_message_again(delayed: Delayed, monkeypatch: pytest.MonkeyPatch):
    three(delayed)
    task = task_of(DelayedRescheduleOperator, destination="q", delay=3600, retries=3)
    run = Run(monkeypatch)
    run.try_number, run.max_tries = 1, 3
    due = delayed.now + timedelta(hours=1)
    first = task.execute(run.context)
    assert (first["outcomes"], first["due_at"]) == ({"rescheduled": 3}, due.isoformat())
    # its worker was lost, and is tried again five minutes later
    delayed.advance(300)
    run.try_number = 2
    again = task.execute(run.context)
    assert (again["due_at"], again["changed"]) == (due.isoformat(), 0)
    assert {one.due_at for one in delayed.stored} == {due}
    # a person who clears the task means another hour
    delayed.advance(300)
    run.try_number, run.max_tries = 3, 5
    cleared = task.execute(run.context)
    assert cleared["outcomes"] == {"rescheduled": 3}
    assert {one.due_at for one in delayed.stored} == {due + timedelta(minutes=10)}


@pytest.mark.parametrize("kind", OPERATORS)
def test_the_reason_is_in_the_audit(delayed: Delayed, kind: type):
    with DAG("d", schedule=None, params={"by": "Ann"}):
        task = task_of(kind, tag="nobody", because="{{ params.by }} asked on {{ ds }}")
    delayed.run(task)
    delayed.run(task_of(kind, tag="nobody", because="{{ none }}"))
    with closing(DelayedStoreHook("store")) as hook:
        assert [one.because for one in hook.audit()] == [None, f"Ann asked on {delayed.now.date()}"]


@pytest.mark.parametrize("kind", OPERATORS)
@pytest.mark.parametrize("conn_type", ["aws", "rabbitmq", "amqp"])
def test_what_a_broker_has_cannot_be_changed(connect, kind, conn_type):
    connect("broker", conn_type=conn_type, host="127.0.0.1", port=1)
    task = task_of(kind, store_conn_id="broker", tag="t")
    with pytest.raises(AirflowFailException) as caught:
        task.execute({})
    assert f"connection 'broker' is of type '{conn_type}', and no store" in str(caught.value)
    assert "Send with store_conn_id=" in str(caught.value)
    assert "a store is store_conn_id= (on the command line --store-conn-id), conn_id= is the connection that" in str(
        caught.value
    )


def test_one_default_args_fits_all_tasks_of_a_dag(delayed):
    both = {"conn_id": delayed.connection("broker", "rabbitmq"), "store_conn_id": "db", "destination": "mail"}
    with DAG("reminders", schedule=None, default_args=both):
        install = TopologyInstallOperator(task_id="install", destinations=["mail"])
        send = DelayedSendOperator(task_id="send", value="x", delay=DAY)
        later = DelayedRescheduleOperator(task_id="later", delay=2 * DAY)
        dispatch = StoreDispatchOperator(task_id="dispatch", deliver_conn_ids=["broker"])
        retry = DelayedRetryOperator(task_id="retry")
        cancel = DelayedCancelOperator(task_id="cancel")
    assert install.conn_id == send.conn_id == "broker"
    assert {one.store_conn_id for one in (send, later, dispatch, retry, cancel)} == {"db"}
    delayed.run(send)
    (waiting,) = delayed.stored
    assert (waiting.store_conn_id, waiting.conn_id) == ("db", "broker")
    assert delayed.run(later)["outcomes"] == {"rescheduled": 1}
    assert delayed.run(cancel)["outcomes"] == {"cancelled": 1}


def send_through(**connections: str) -> None:
    task = DelayedSendOperator(task_id="t", destination="q", value="x", delay=60, **connections)
    with pytest.MonkeyPatch.context() as patch:
        Delayed(patch).run(task)


NO_STORE = "'broker' is of type 'rabbitmq', and no store: .* a store is store_conn_id="


@pytest.mark.parametrize(
    "work, words",
    [
        (
            lambda: send_through(conn_id="db", store_conn_id="broker"),
            "conn_id='db' is the connection that delivers, and stores its messages itself.*pass it as store_conn_id=",
        ),
        (lambda: send_through(conn_id="broker", store_conn_id="broker"), NO_STORE),
        (
            lambda: StoreDispatchOperator(task_id="t", store_conn_id="broker", deliver_conn_ids="x").execute({}),
            NO_STORE,
        ),
        (
            lambda: FifoCycleSensor(task_id="t", conn_id="db", destination="q").poke({}),
            "'db' is of type 'sqlite', .* of type aws: name that as conn_id=.*; a store is store_conn_id=",
        ),
        (
            lambda: RabbitMQDelayHook("db").waiting(),
            "'db' is of type 'sqlite', .* of type rabbitmq, amqp, amqps: name that as conn_id=",
        ),
        (
            lambda: SqsDelayHook("broker").install(["q"]),
            "'broker' is of type 'rabbitmq', .* of type aws: name that as conn_id=",
        ),
    ],
)
def test_a_connection_of_the_wrong_type_is_an_error_that_names_the_parameter(connect, tmp_path, work, words):
    connect("broker", conn_type="rabbitmq", host="127.0.0.1", port=1)
    connect("db", conn_type="sqlite", host=str(tmp_path / "store.db"))
    with pytest.raises((AirflowFailException, DelayedError), match=words):
        work()
