"""The fixture `delayed`, with which a DAG's author tests it: no broker, no connection, a clock that is moved."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing, nullcontext
from datetime import datetime, timedelta, timezone

import pytest
from airflow.sdk import DAG, Asset, CronDataIntervalTimetable, Param, task
from airflow.sdk.exceptions import AirflowFailException
from jinja2 import UndefinedError
from support.examples import dags_of, result

from airflow_delayed.errors import NaiveTime
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.message import DelayedMessage, utcnow
from airflow_delayed.notifications.notifiers import DelayedCancelNotifier, DelayedNotifier
from airflow_delayed.operators.dispatch import StoreDispatchOperator
from airflow_delayed.operators.send import DelayedSendOperator
from airflow_delayed.operators.topology import TopologyInstallOperator
from airflow_delayed.sensors.due_time import DueTimeSensor
from airflow_delayed.sensors.fifo_cycle import FifoCycleSensor

HOUR = timedelta(hours=1)


def send(**arguments) -> DelayedSendOperator:
    return DelayedSendOperator(
        **{"task_id": "send", "conn_id": "anywhere", "destination": "mail", "value": "hello", **arguments}
    )


def test_until_it_is_used_it_costs_nothing():
    code = "import airflow_delayed.testing.plugin, sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) & {"airflow", "sqlalchemy", "boto3", "pika"} == set()


def test_what_is_sent_is_recorded_with_its_due_time(delayed):
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
    delayed.advance(HOUR - timedelta(microseconds=1))
    assert delayed.now < sent.due_at
    delayed.move_to(sent.due_at)
    assert delayed.now == sent.due_at
    with pytest.raises(NaiveTime):
        delayed.move_to(datetime(2030, 1, 1))


#: What a template renders to in a run of 5 June 2026, 07:30 in UTC.
RENDERED = {
    "{{ ts }} {{ ds_nodash }}": "2026-06-05T07:30:00+00:00 20260605",
    "{{ logical_date.add(hours=2) }}": "2026-06-05 09:30:00+00:00",
    "{{ data_interval_start.to_date_string() }}": "2026-06-04",
    "{{ data_interval_end.subtract(minutes=1).time() }}": "23:59:00",
    "{{ macros.ds_add(ds, -5) }}": "2026-05-31",
    "{{ var.value.customer }} {{ var.json.limits.low }} {{ var.value.get('none', 'default') }}": "acme 3 default",
    "{{ conn.mine.host }}": "desk",
    "{{ dag_run.dag_id }} {{ dag_run.run_type.value }}": "nightly manual",
    "{{ ti.task_id }} {{ ti.try_number }} {{ task_instance.map_index }}": "send 1 -1",
    "{{ run_id }} {{ task_instance_key_str }}": "run-1 nightly__send__20260605",
    "{{ params.shop }} {{ params.level }}": "1 low",
    "{{ own }} {{ task.task_id }} {{ dag.dag_id }}": "macro send nightly",
}


def test_templates_have_the_names_that_airflow_gives_them(delayed, monkeypatch):
    monkeypatch.setenv("AIRFLOW_VAR_CUSTOMER", "acme")
    monkeypatch.setenv("AIRFLOW_VAR_LIMITS", '{"low": 3}')
    monkeypatch.setenv("AIRFLOW_CONN_MINE", "amqp://desk")
    timetable = CronDataIntervalTimetable("@daily", "UTC")
    params = {"shop": Param(1, type="integer"), "level": "low"}
    with DAG("nightly", schedule=timetable, params=params, user_defined_macros={"own": "macro"}):
        operator = send(value="\n".join(RENDERED), delay=60)
    delayed.move_to(datetime(2026, 6, 5, 7, 30, tzinfo=timezone.utc))
    delayed.run(operator)
    assert delayed.sent[0].body.decode().split("\n") == list(RENDERED.values())


@pytest.mark.parametrize("in_dag", [True, False])
def test_a_name_that_airflow_does_not_have_is_an_error_as_in_airflow(delayed, in_dag):
    with DAG("d", schedule=None) if in_dag else nullcontext():
        wrong, right = (
            send(value="{{ data_interval }}", delay=60),
            send(task_id="right", delay=60, value="{{ ds }} {{ dag.dag_id }}"),
        )
    with pytest.raises(UndefinedError, match="'data_interval' is undefined"):
        delayed.run(wrong)
    delayed.run(right)
    assert delayed.sent[0].body.decode() == f"{delayed.now:%Y-%m-%d} {'d' if in_dag else 'test'}"


def test_each_call_is_a_run_of_its_own(delayed):
    operator = send(value="hello", delay=HOUR, store_conn_id="db")
    assert [delayed.run(operator)["stored"] for _ in range(2)] == [1, 1]
    assert len({one.message_id for one in delayed.stored}) == 2
    with closing(DelayedStoreHook("db")) as store:
        assert {one.origin.run_id for one in store.list()} == {"run-1", "run-2"}


def test_what_only_an_airflow_knows_is_an_error_that_says_so(delayed):
    for template in ("{{ ti.get_ti_count('d') }}", "{{ ti.xcom_pull('other') }}", "{{ prev_start_date_success }}"):
        with pytest.raises(NotImplementedError, match=r"`delayed` has no answer to Get.*; use dag\.test\(\)"):
            delayed.run(send(value=template, delay=60))
    with DAG("d", schedule=None) as dag:
        DelayedSendOperator.partial(task_id="mapped", conn_id="c", destination="q").expand(value=["a"])

        @task
        def compute():
            return [{"value": "a", "delay_seconds": 60}]

        send(value=None, messages=compute())
    with pytest.raises(TypeError, match=r"mapped is mapped, .* use dag\.test\(\)"):
        delayed.run(dag.get_task("mapped"))
    with pytest.raises(NotImplementedError, match=r"GetXCom.*use dag\.test\(\)"):
        delayed.run(dag.get_task("send"))
    assert delayed.sent == []


def test_an_escalation_arrives_or_is_taken_back(delayed):
    red = DelayedNotifier(conn_id="broker", destination="desk", delay=HOUR, store_conn_id="store")
    green = DelayedCancelNotifier(store_conn_id="store")
    dispatch = StoreDispatchOperator(task_id="d", store_conn_id="store", deliver_conn_ids=["broker"])
    delayed.call(red, "monday")
    (waits,) = delayed.stored
    assert (waits.destination, waits.due_at) == ("desk", delayed.now + HOUR)
    delayed.advance(60)
    delayed.call(green, "monday")
    assert delayed.stored == []
    delayed.advance(60)
    delayed.call(red, "tuesday")
    delayed.advance(HOUR - timedelta(seconds=1))
    delayed.run(dispatch)
    assert (len(delayed.stored), delayed.sent) == (1, [])
    delayed.advance(1)
    delayed.run(dispatch)
    (sent,) = delayed.sent
    assert (sent.destination, sent.due_at) == ("desk", delayed.now)
    assert b'"run_id":"tuesday"' in sent.body


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
    assert [one.body for one in delayed.sent] == [b"0", b"5"]
    assert [one.body for one in delayed.stored] == [b"48"]


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
    assert [(one.conn_id, one.destination, one.body) for one in delayed.sent] == [(db, "mail", b"hello")]


def test_a_wait_moves_the_clock_to_half_a_minute_before_the_message_is_due(delayed, run_dag, here, monkeypatch):
    dag = dags_of(here / "dags/precise_send.py", monkeypatch)["precise_send"]
    delayed.connection("delayed_sqs", "aws")
    began = delayed.now
    run = run_dag(dag, run_conf={"delay_seconds": 240 * 3600, "text": "it is time"})
    assert result(run, "send")["sent"] == 1
    assert delayed.now == began + 240 * HOUR - timedelta(seconds=30)
    assert [(one.body, one.due_at) for one in delayed.sent] == [(b"it is time", began + 240 * HOUR)]


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
        assert delayed.now == began + 48 * HOUR - timedelta(minutes=15)
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
        wait = DueTimeSensor(task_id="wait", target_time=delayed.now + 29 * HOUR)
        last = send(task_id="last", due_at=delayed.now + 30 * HOUR, outlets=[Asset("sent")])
        dispatch = StoreDispatchOperator(
            task_id="dispatch", store_conn_id="delayed_store", deliver_conn_ids=["delayed_sqs"], until="empty"
        )
        install >> first >> cancel() >> by_hook() >> dispatch >> wait >> last
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


def test_what_it_does_not_play_says_so(delayed):
    with pytest.raises(NotImplementedError, match="`delayed` has no broker for this method of 'rabbit'"):
        RabbitMQDelayHook("rabbit").waiting()
    with pytest.raises(NotImplementedError, match="'sqs'"):
        delayed.run(FifoCycleSensor(task_id="cycle", conn_id="sqs", destination="mail"))


def test_a_store_with_a_schema_and_a_table_of_its_own(delayed):
    with closing(DelayedStoreHook("db", "anywhere", table="later", schema="jobs")) as store:
        store.send([DelayedMessage(destination="q", body=b"", due_at=delayed.now, message_id="m")])
    assert [one.message_id for one in delayed.stored] == ["m"]
    assert [one.message_id for one in delayed.dispatch()] == ["m"]
