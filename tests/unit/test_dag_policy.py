"""What is done with a DAG when it is parsed: its notifiers are checked, and kept where the listener is on."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from airflow.dag_processing.dagbag import DagBag
from airflow.exceptions import AirflowClusterPolicyViolation
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG, Asset, AssetOrTimeSchedule, BaseOperator, CronTriggerTimetable
from airflow.serialization.serialized_objects import DagSerialization

from airflow_delayed.errors import InvalidMessage
from airflow_delayed.notifications.callback_run import CallbackRun
from airflow_delayed.notifications.dag_notifiers import NOTIFIERS, kept_notifiers
from airflow_delayed.notifications.dag_policy import dag_policy
from airflow_delayed.notifications.missed_run import MissedRunNotifier
from airflow_delayed.notifications.notifiers import DelayedCancelNotifier, DelayedNotifier

STORE: dict[str, Any] = {"store_conn_id": "db"}
QUEUE: dict[str, Any] = {"conn_id": "broker", "destination": "desk", **STORE}
START = datetime(2026, 1, 1, tzinfo=timezone.utc)


@pytest.fixture
def listener(monkeypatch):
    monkeypatch.setenv("AIRFLOW__DELAYED__LISTENER", "True")


def missed(**options: Any) -> MissedRunNotifier:
    return MissedRunNotifier(**{**QUEUE, "within": timedelta(hours=2), **options})


@pytest.mark.parametrize("schedule", [None, "@once", "@continuous", [Asset("orders")]])
def test_a_schedule_without_times_needs_every(schedule):
    def dag(**options: Any) -> DAG:
        once = {"max_active_runs": 1} if schedule == "@continuous" else {}
        return DAG("etl", schedule=schedule, start_date=START, on_success_callback=missed(**options), **once)

    with pytest.raises(AirflowClusterPolicyViolation, match=r"of DAG 'etl' needs every=, such as every=timedelta"):
        dag_policy(dag())
    dag_policy(dag(every=timedelta(days=1)))


@pytest.mark.parametrize(
    "schedule",
    [
        "@daily",
        "0 3 * * 1",
        timedelta(hours=6),
        AssetOrTimeSchedule(timetable=CronTriggerTimetable("0 3 * * *", timezone="UTC"), assets=[Asset("orders")]),
    ],
)
def test_a_schedule_with_times_needs_no_more(schedule):
    dag_policy(DAG("etl", schedule=schedule, start_date=START, on_success_callback=[print, missed()]))


def test_it_is_a_callback_of_the_dag_for_success_alone():
    with pytest.raises(AirflowClusterPolicyViolation, match="of DAG 'etl' is no on_success_callback of a DAG"):
        dag_policy(DAG("etl", schedule="@daily", on_failure_callback=missed()))
    with DAG("etl", schedule="@daily", default_args={"on_success_callback": missed()}) as dag:
        EmptyOperator(task_id="a")
    with pytest.raises(
        AirflowClusterPolicyViolation, match="of DAG 'etl', task 'a', is no on_success_callback of a DAG"
    ):
        dag_policy(dag)


def test_airflow_shows_the_error_as_an_import_error(tmp_path: Path):
    (tmp_path / "etl.py").write_text(
        "from airflow.sdk import DAG\n"
        "from airflow_delayed.notifications.missed_run import MissedRunNotifier\n"
        "missed = MissedRunNotifier(conn_id='db', store_conn_id='db', destination='desk', within=60)\n"
        "dag = DAG('etl', schedule=None, on_success_callback=missed)\n"
    )
    bag = DagBag(tmp_path, safe_mode=False)
    (error,) = bag.import_errors.values()
    assert "MissedRunNotifier of DAG 'etl' needs every=" in error


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"within": "{{ params.span }}"}, "within='{{ params.span }}': it is no template"),
        ({"within": -1}, "within: -1 is negative"),
        ({"within": 0}, "within=0: a run needs some time"),
        ({"every": "{{ params.span }}"}, "every='{{ params.span }}': it is no template"),
        ({"store_conn_id": None}, "MissedRunNotifier needs store_conn_id="),
        ({"destination": ""}, "destination= must be the name of a queue"),
    ],
)
def test_a_wrong_argument_is_an_error_when_the_dag_is_parsed(options, problem):
    with pytest.raises((ValueError, InvalidMessage), match=problem):
        missed(**options)


def watched() -> DAG:
    failed = DelayedNotifier(
        **QUEUE,
        delay=timedelta(minutes=30),
        value="s3cret {{ run_id }}",
        headers={"token": "s3cret"},
        per="dag",
        key="{{ params.customer }}",
    )
    ended = DelayedCancelNotifier(**STORE, per="dag", key="{{ params.customer }}")
    with DAG(
        "etl",
        schedule="@daily",
        start_date=START,
        default_args={"retries": 2, "on_failure_callback": DelayedNotifier(**QUEUE, delay=60, per="task")},
        on_failure_callback=[print, failed],
        on_success_callback=[ended, missed(value="s3cret")],
    ) as dag:
        EmptyOperator(task_id="a")
        EmptyOperator(task_id="b", on_success_callback=DelayedCancelNotifier(**STORE, per="task"))
        EmptyOperator.partial(task_id="c").expand(doc=["x", "y"])
    return dag


def test_without_the_listener_a_dag_stays_as_it_is():
    dag = watched()
    dag_policy(dag)
    assert NOTIFIERS not in dag.default_args


def test_with_the_listener_the_serialized_dag_has_its_notifiers_without_bodies_and_headers(listener):
    dag = watched()
    dag_policy(dag)
    serialized = DagSerialization.to_dict(dag)
    assert "s3cret" not in json.dumps(serialized)
    read = DagSerialization.from_dict(json.loads(json.dumps(serialized)))
    # whoever reads it has the file of the DAG not at all
    assert read.default_args["retries"] == 2
    text = read.default_args[NOTIFIERS]
    found = {
        (task, state): [type(one).__name__ for one in kept_notifiers(text, task, state)]
        for task in (None, "a", "b", "c")
        for state in ("success", "failed", "running")
    }
    assert {place: names for place, names in found.items() if names} == {
        (None, "failed"): ["DelayedNotifier"],
        (None, "success"): ["DelayedCancelNotifier", "MissedRunNotifier"],
        ("a", "failed"): ["DelayedNotifier"],
        ("b", "failed"): ["DelayedNotifier"],
        ("b", "success"): ["DelayedCancelNotifier"],
        ("c", "failed"): ["DelayedNotifier"],
    }


def test_what_is_kept_makes_the_same_message_ids(listener):
    dag = watched()
    dag_policy(dag)
    text = dag.default_args[NOTIFIERS]
    run = CallbackRun.of({"dag": dag, "run_id": "scheduled__2026-01-05T00:00:00+00:00", "dag_run": {"end_date": START}})
    written = dag.on_failure_callback[1]
    (kept,) = kept_notifiers(text, None, "failed")

    def message_id(notifier: Any) -> str:
        rendered = notifier.rendered({"params": {"customer": "a"}, "run_id": run.run_id})
        return notifier._escalation(run, run.attempt("dag", "a"), rendered).message.message_id

    assert message_id(kept) == message_id(written)
    assert kept.delay == 1800


def test_parsing_a_dag_again_changes_nothing(listener):
    first, second = watched(), watched()
    for dag in (first, second):
        dag_policy(dag)
    assert first.default_args[NOTIFIERS] == second.default_args[NOTIFIERS]


class Mine(DelayedNotifier):
    """A notifier of a DAG's author, which no scheduler can import."""


def test_a_class_of_the_dags_author_is_not_kept(listener):
    dag = DAG("etl", on_failure_callback=Mine(**QUEUE, delay=60))
    dag_policy(dag)
    assert kept_notifiers(dag.default_args[NOTIFIERS], None, "failed") == []


def test_no_operator_has_a_parameter_of_the_name_of_what_is_kept():
    assert not NOTIFIERS.isidentifier()
    with DAG("etl", default_args={NOTIFIERS: "{}"}):
        assert BaseOperator(task_id="a").task_id == "a"
