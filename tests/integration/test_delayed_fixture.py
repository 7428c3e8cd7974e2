"""The fixture `delayed`, with which a DAG's author tests it: no broker, no connection, a clock that is moved."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest
from airflow.sdk import DAG, Asset, task
from airflow.sdk.exceptions import AirflowFailException

from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.message import DelayedMessage, utcnow
from airflow_delayed.notifications.notifiers import DelayedCancelNotifier, DelayedNotifier
from airflow_delayed.operators.dispatch import StoreDispatchOperator
from airflow_delayed.operators.send import DelayedSendOperator
from airflow_delayed.operators.topology import TopologyInstallOperator
from airflow_delayed.replies import Reply
from airflow_delayed.sensors.fifo_cycle import FifoCycleSensor
from airflow_delayed.sensors.reply import ReplySensor

HOUR = timedelta(hours=1)


def send(**arguments) -> DelayedSendOperator:
    return DelayedSendOperator(
        **{"task_id": "send", "conn_id": "anywhere", "destination": "mail", "value": "hello", **arguments}
    )


def test_until_it_is_used_it_costs_nothing():
    code = "import airflow_delayed.testing.plugin, sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) & {"airflow", "sqlalchemy", "boto3", "pika"} == set()


def test_what_is_sent_arrives_when_the_clock_says_so(delayed):
    summary = delayed.run(send(delay=HOUR, headers={"k": "v"}, tag="t"))
    assert summary["sent"] == 1
    (sent,) = delayed.sent
    assert (sent.conn_id, sent.destination, sent.body, sent.headers, sent.tag) == (
        "anywhere",
        "mail",
        b"hello",
        {"k": "v"},
        "t",
    )
    assert sent.due_at == delayed.now + HOUR
    assert delayed.arrived("mail") == []
    delayed.advance(HOUR - timedelta(microseconds=1))
    assert delayed.arrived("mail") == []
    delayed.move_to(sent.due_at)
    assert delayed.arrived("mail") == delayed.arrived() == [sent]
    assert delayed.arrived("other") == []


def test_an_escalation_arrives_or_is_taken_back(delayed):
    notifier = DelayedNotifier(conn_id="broker", store_conn_id="store", destination="desk", delay=HOUR)
    dispatch = StoreDispatchOperator(task_id="d", store_conn_id="store", deliver_conn_ids=["broker"])

    def context(run: str) -> dict[str, object]:
        ended = SimpleNamespace(dag_id="etl", run_id=run, start_date=delayed.now - HOUR, end_date=delayed.now)
        return {"dag": DAG("etl", schedule=None), "dag_run": ended, "run_id": run}

    notifier(context("red"))
    delayed.advance(60)
    DelayedCancelNotifier(store_conn_id="store")(context("red"))
    assert delayed.stored == []
    notifier(context("red again"))
    delayed.advance(HOUR - timedelta(seconds=1))
    delayed.run(dispatch)
    assert (len(delayed.stored), delayed.sent) == (1, [])
    delayed.advance(1)
    delayed.run(dispatch)
    (sent,) = delayed.arrived("desk")
    assert b'"run_id":"red again"' in sent.body


def test_the_clock_is_the_packages_own_and_is_put_back():
    with pytest.MonkeyPatch.context() as patch:
        from airflow_delayed.testing.stand_ins import played

        delayed = played(patch, None)
        delayed.move_to(datetime(2030, 1, 1, tzinfo=timezone(HOUR)))
        assert utcnow() == delayed.now == datetime(2029, 12, 31, 23, tzinfo=timezone.utc)
    assert abs(utcnow() - datetime.now(timezone.utc)) < HOUR


def test_what_a_store_holds_is_dispatched_by_hand(delayed):
    due = [{"value": str(hours), "delay_seconds": 3600 * hours} for hours in (0, 5, 48)]
    summary = delayed.run(send(value=None, messages=due, store_conn_id="reminders_db"))
    assert (summary["sent"], summary["stored"]) == (1, 2)
    assert [(one.body, one.store_conn_id, one.conn_id) for one in delayed.stored] == [
        (b"5", "reminders_db", "anywhere"),
        (b"48", "reminders_db", "anywhere"),
    ]
    assert delayed.dispatch() == []
    delayed.advance(4 * HOUR)
    assert delayed.dispatch() == []
    assert [one.body for one in delayed.dispatch(lookahead=HOUR)] == [b"5"]
    assert [one.body for one in delayed.arrived()] == [b"0"]
    delayed.advance(HOUR)
    assert [one.body for one in delayed.arrived()] == [b"0", b"5"]
    assert [one.body for one in delayed.stored] == [b"48"]


def test_what_waits_can_be_cancelled_as_ever(delayed):
    delayed.run(send(delay=HOUR, store_conn_id="reminders_db", tag="customer-7"))
    with closing(DelayedStoreHook("reminders_db")) as store:
        assert str(store.cancel(tag="customer-7").counts) != "{}"
    delayed.advance(HOUR)
    assert (delayed.dispatch(), delayed.stored) == ([], [])


def test_conflicts_and_past_due_are_errors_as_ever(delayed):
    delayed.run(send(message_id="m", delay=HOUR, store_conn_id="reminders_db"))
    with pytest.raises(AirflowFailException, match="m"):
        delayed.run(send(message_id="m", value="other", delay=HOUR, store_conn_id="reminders_db"))
    with pytest.raises(AirflowFailException, match="past"):
        delayed.run(send(due_at=delayed.now - 2 * HOUR))
    assert delayed.sent == []


@pytest.mark.parametrize(
    "conn_type, extra, delay, good",
    [
        ("aws", {}, timedelta(seconds=900), True),
        ("aws", {}, timedelta(seconds=901), False),
        ("aws", {"unrestricted_delay": True}, timedelta(days=400), True),
        ("rabbitmq", {}, timedelta(seconds=268_435_455), True),
        ("rabbitmq", {}, timedelta(seconds=268_435_456), False),
    ],
)
def test_a_connections_type_says_which_limits_count(delayed, conn_type, extra, delay, good):
    conn_id = delayed.connection("broker", conn_type, **extra)
    if good:
        delayed.run(send(conn_id=conn_id, delay=delay))
    else:
        with pytest.raises(AirflowFailException):
            delayed.run(send(conn_id=conn_id, delay=delay))
    assert [one.conn_id for one in delayed.sent] == ["broker"] * good


def test_well_known_connections_and_the_environments_have_their_type(delayed, monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_MINE", "amqp://localhost")
    for conn_id, delay in {"aws_default": timedelta(seconds=901), "mine": timedelta(days=9000)}.items():
        with pytest.raises(AirflowFailException):
            delayed.run(send(conn_id=conn_id, delay=delay))


def test_a_sql_connection_delivers_into_its_own_queue_tables(delayed):
    db = delayed.connection("reminders_db", "postgres")
    delayed.run(send(conn_id=db, delay=HOUR))
    dispatch = StoreDispatchOperator(task_id="dispatch", store_conn_id=db, deliver_conn_ids=[db])
    assert delayed.run(dispatch)["dispatched"] == 0
    delayed.advance(HOUR)
    assert delayed.run(dispatch)["dispatched"] == 1
    assert [(one.conn_id, one.destination, one.body) for one in delayed.arrived()] == [(db, "mail", b"hello")]


@pytest.mark.parametrize("deferrable", [True, False])
def test_a_wait_moves_the_clock(delayed, deferrable):
    began = delayed.now
    delayed.run(send(delay=240 * HOUR, lead=timedelta(seconds=30), deferrable=deferrable))
    assert delayed.now == began + 240 * HOUR - timedelta(seconds=30)
    assert [one.due_at for one in delayed.sent] == [began + 240 * HOUR]


@pytest.mark.parametrize("deferrable", [True, False])
@pytest.mark.parametrize("until", ["empty", timedelta(days=3)])
def test_a_dispatcher_that_stays_moves_the_clock(delayed, deferrable, until):
    began = delayed.now
    delayed.run(send(delay=48 * HOUR, store_conn_id="reminders_db"))
    dispatch = StoreDispatchOperator(
        task_id="dispatch",
        store_conn_id="reminders_db",
        deliver_conn_ids=["anywhere"],
        until=until,
        deferrable=deferrable,
    )
    assert delayed.run(dispatch)["dispatched"] == 1
    if until == "empty":
        assert delayed.now == began + 48 * HOUR - dispatch.lookahead
    else:
        assert delayed.now == began + until
    assert [one.due_at for one in delayed.sent] == [began + 48 * HOUR]


def test_dag_test_runs_a_dag_as_it_is(delayed, run_dag):
    with DAG("played", schedule=None) as dag:
        install = [
            TopologyInstallOperator(task_id="install", conn_id="delayed_sqs", destinations=["mail"]),
            TopologyInstallOperator(task_id="install_store", conn_id="delayed_store", destinations=[]),
        ]

        @task
        def compute():
            return [{"value": f"{hours} h", "delay_seconds": 3600 * hours} for hours in (0, 24)]

        @task
        def cancel():
            with closing(DelayedStoreHook("delayed_store")) as store:
                return str(store.cancel(["no such"]))

        @task
        def by_hook():
            due = utcnow() + HOUR
            message = DelayedMessage(destination="q", body=b"", due_at=due, message_id="by-hook")
            with closing(RabbitMQDelayHook("not_defined")) as hook:
                hook.send([message])

        first = send(value=None, conn_id="delayed_sqs", messages=compute(), store_conn_id="delayed_store")
        waits = send(task_id="waits", delay=30 * HOUR, lead=HOUR, deferrable=True, outlets=[Asset("sent")])
        dispatch = StoreDispatchOperator(
            task_id="dispatch", store_conn_id="delayed_store", deliver_conn_ids=["delayed_sqs"], until="empty"
        )
        install >> first >> cancel() >> by_hook() >> dispatch >> waits
    delayed.connection("delayed_sqs", "aws")
    began = delayed.now
    run = run_dag(dag)
    assert {one.task_id: one.state for one in run.get_task_instances()} == dict.fromkeys(dag.task_ids, "success")
    assert [(one.conn_id, one.body) for one in delayed.sent] == [
        ("delayed_sqs", b"0 h"),
        ("not_defined", b""),
        ("delayed_sqs", b"24 h"),
        ("anywhere", b"hello"),
    ]
    assert began + 24 * HOUR < delayed.now
    delayed.advance(2 * HOUR)
    assert len(delayed.arrived()) == 4


def test_what_it_does_not_play_says_so(delayed):
    with pytest.raises(NotImplementedError, match=r"'rabbit'.*delayed"):
        RabbitMQDelayHook("rabbit").waiting()
    with pytest.raises(NotImplementedError, match="'sqs'"):
        delayed.run(FifoCycleSensor(task_id="cycle", conn_id="sqs", destination="mail"))
    wait = ReplySensor(
        task_id="wait",
        conn_id=delayed.connection("asked", "rabbitmq"),
        reply_to="results",
        message_id="m",
        on_reply=lambda reply: reply.body,
    )
    with pytest.raises(NotImplementedError, match="'asked'"):
        delayed.run(wait)
    assert wait.on_reply(Reply(message_id="r", answers="m", body=b"yes", headers={})) == b"yes"


def test_a_store_with_a_schema_and_a_table_of_its_own(delayed):
    with closing(DelayedStoreHook("db", "anywhere", table="later", schema="jobs")) as store:
        store.send([DelayedMessage(destination="q", body=b"", due_at=delayed.now, message_id="m")])
    assert [one.message_id for one in delayed.stored] == ["m"]
    assert [one.message_id for one in delayed.dispatch()] == ["m"]
