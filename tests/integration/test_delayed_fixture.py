"""The fixture `delayed`, with which a DAG's author tests it: no broker, no connection, a clock that is moved."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing, nullcontext
from datetime import datetime, timedelta, timezone

import pytest
from airflow.sdk import DAG, Asset, CronDataIntervalTimetable, Param, get_current_context, task
from airflow.sdk.exceptions import AirflowFailException, ParamValidationError
from jinja2 import UndefinedError
from support.examples import dags_of, result

from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.message import DelayedMessage, utcnow
from airflow_delayed.notifications.notifiers import DelayedCancelNotifier, DelayedNotifier
from airflow_delayed.operators.change import DelayedCancelOperator
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


#: What a template renders to in a run of 5 June 2026, 07:30 in UTC.
RENDERED = {
    "{{ ts }}": "2026-06-05T07:30:00+00:00",
    "{{ ts_nodash }}": "20260605T073000",
    "{{ ts_nodash_with_tz }}": "20260605T073000+0000",
    "{{ ds_nodash }}": "20260605",
    "{{ logical_date.add(hours=2) }}": "2026-06-05 09:30:00+00:00",
    "{{ data_interval_start.to_date_string() }}": "2026-06-04",
    "{{ data_interval_end.subtract(minutes=1).time() }}": "23:59:00",
    "{{ macros.ds_add(ds, -5) }}": "2026-05-31",
    "{{ var.value.customer }} {{ var.json.limits.low }} {{ var.value.get('none', 'default') }}": "acme 3 default",
    "{{ conn.mine.host }}": "desk",
    "{{ prev_data_interval_end_success }} {{ prev_start_date_success }}": "None None",
    "{{ dag_run.dag_id }} {{ dag_run.run_type.value }} {{ dag_run.conf.shop }}": "nightly manual 7",
    "{{ ti.task_id }} {{ ti.try_number }} {{ task_instance.map_index }}": "send 1 -1",
    "{{ task_instance_key_str }}": "nightly__send__20260605",
    "{{ run_id }}": "monday",
    "{{ params.shop }} {{ params.level }}": "7 low",
    "{{ ti.xcom_pull('compute')['total'] + 1 }}": "43",
    "{{ ti.xcom_pull('compute', key='other') }} {{ ti.xcom_pull(['a', 'compute'])[1].total }}": "None 42",
    "{{ own }} {{ task.task_id }} {{ dag.dag_id }} {{ mine }}": "macro send nightly mine",
}


def test_templates_have_all_names_that_airflow_gives_them(delayed, monkeypatch):
    monkeypatch.setenv("AIRFLOW_VAR_CUSTOMER", "acme")
    monkeypatch.setenv("AIRFLOW_VAR_LIMITS", '{"low": 3}')
    monkeypatch.setenv("AIRFLOW_CONN_MINE", "amqp://desk")
    timetable = CronDataIntervalTimetable("@daily", "UTC")
    params = {"shop": Param(1, type="integer"), "level": "low"}
    with DAG("nightly", schedule=timetable, params=params, user_defined_macros={"own": "macro"}):
        operator = send(value="\n".join(RENDERED), delay=60)
    delayed.run(
        operator,
        run_id="monday",
        logical_date=datetime(2026, 6, 5, 7, 30, tzinfo=timezone.utc),
        params={"shop": 7},
        xcoms={"compute": {"total": 42}},
        mine="mine",
    )
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
    # a run of an asset has no date
    with pytest.raises(UndefinedError, match="'ds' is undefined"):
        delayed.run(right, logical_date=None)


def test_params_are_checked_as_airflow_checks_them(delayed):
    operator = send(value="{{ params.shop }}", delay=60, params={"shop": Param(type="integer", maximum=9)})
    with pytest.raises(ParamValidationError, match="No value passed"):
        delayed.run(operator)
    with pytest.raises(ParamValidationError, match="10 is greater than the maximum of 9"):
        delayed.run(operator, params={"shop": 10})
    delayed.run(operator, params={"shop": 9})
    assert delayed.sent[0].body == b"9"


def test_tasks_of_one_run_pull_what_the_earlier_ones_returned(delayed):
    with DAG("d", schedule=None) as dag:

        @task
        def compute():
            context = get_current_context()
            context["ti"].xcom_push("count", 2)
            return [{"value": context["run_id"], "delay_seconds": 7200}, {"value": "b", "delay_seconds": 7200}]

        summary = send(value=None, messages=compute(), store_conn_id="db").output
        cancel = DelayedCancelOperator(task_id="cancel", store_conn_id="db", ids=summary)
    delayed.run(dag.get_task("compute"), run_id="one")
    assert delayed.run(dag.get_task("send"), run_id="one")["stored"] == 2
    assert {message.body for message in delayed.stored} == {b"one", b"b"}
    count = send(task_id="count", delay=60, value="{{ ti.xcom_pull('compute', key='count') }}", dag=dag)
    delayed.run(count, run_id="one")
    delayed.run(count, run_id="two")
    assert [message.body for message in delayed.sent] == [b"2", b"None"]
    assert delayed.run(cancel, run_id="one")["changed"] == 2
    # in another run there is nothing to pull, and the audit names the run that changed it
    with pytest.raises(AirflowFailException, match="ids= is None"):
        delayed.run(cancel)
    with closing(DelayedStoreHook("db")) as store:
        assert next(store.audit()).who == "task d.cancel, run one"


def test_what_only_an_airflow_knows_is_an_error_that_says_so(delayed):
    with pytest.raises(NotImplementedError, match=r"asks Airflow by GetTICount, .* use dag\.test\(\)"):
        delayed.run(send(value="{{ ti.get_ti_count('d') }}", delay=60))
    with DAG("d", schedule=None) as dag:
        DelayedSendOperator.partial(task_id="mapped", conn_id="c", destination="q").expand(value=["a"])
    with pytest.raises(TypeError, match=r"mapped is mapped, .* use dag\.test\(\)"):
        delayed.run(dag.get_task("mapped"))


def test_an_escalation_arrives_or_is_taken_back(delayed):
    arguments = {"store_conn_id": "store"}
    red = DelayedNotifier(conn_id="broker", destination="desk", delay=HOUR, **arguments)
    green = [DelayedCancelNotifier(**arguments)]
    with DAG("etl", schedule=None, on_failure_callback=red, on_success_callback=green) as dag:
        send()
    dispatch = StoreDispatchOperator(task_id="d", store_conn_id="store", deliver_conn_ids=["broker"])
    delayed.call(dag.on_failure_callback, dag, run_id="monday", reason="task_failure")
    (waits,) = delayed.stored
    assert (waits.destination, waits.due_at) == ("desk", delayed.now + HOUR)
    delayed.advance(60)
    delayed.call(dag.on_success_callback, dag, run_id="monday")
    assert delayed.stored == []
    delayed.advance(60)
    delayed.call(red, dag.get_task("send"), run_id="tuesday", exception=ValueError("no"))
    delayed.advance(HOUR - timedelta(seconds=1))
    delayed.run(dispatch)
    assert (len(delayed.stored), delayed.sent) == (1, [])
    delayed.advance(1)
    delayed.run(dispatch)
    (sent,) = delayed.arrived("desk")
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
    delayed.advance(2 * HOUR)
    assert len(delayed.arrived()) == 4


def test_what_it_does_not_play_says_so(delayed):
    with pytest.raises(NotImplementedError, match=r"'rabbit'.*delayed"):
        RabbitMQDelayHook("rabbit").waiting()
    with pytest.raises(NotImplementedError, match="'sqs'"):
        delayed.run(FifoCycleSensor(task_id="cycle", conn_id="sqs", destination="mail"))


def test_a_store_with_a_schema_and_a_table_of_its_own(delayed):
    with closing(DelayedStoreHook("db", "anywhere", table="later", schema="jobs")) as store:
        store.send([DelayedMessage(destination="q", body=b"", due_at=delayed.now, message_id="m")])
    assert [one.message_id for one in delayed.stored] == ["m"]
    assert [one.message_id for one in delayed.dispatch()] == ["m"]
