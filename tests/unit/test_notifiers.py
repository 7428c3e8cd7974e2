"""DelayedNotifier and DelayedCancelNotifier without a store: their arguments, tags and ids."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest

from airflow_delayed.errors import InvalidMessage
from airflow_delayed.notifications.callback_run import CallbackRun, ids_of
from airflow_delayed.notifications.notifiers import DelayedCancelNotifier, DelayedNotifier

END = datetime(2026, 5, 6, 7, tzinfo=timezone.utc)


@pytest.mark.parametrize("kind", [DelayedNotifier, DelayedCancelNotifier])
def test_without_a_store_it_says_what_it_needs(kind) -> None:
    more: dict[str, Any] = {"conn_id": "r", "destination": "q", "delay": 1} if kind is DelayedNotifier else {}
    with pytest.raises(
        ValueError, match=r"needs store_conn_id=, .*at once.*TopologyInstallOperator.*StoreDispatchOperator"
    ):
        kind(**more)
    with pytest.raises(ValueError, match="per='week' is none of 'run', 'dag', 'task'"):
        kind(**more, store_conn_id="db", per="week")


def test_a_delay_that_cannot_be_is_an_error_when_the_dag_is_parsed() -> None:
    for delay in (-1, "soon"):
        with pytest.raises(InvalidMessage, match="delay: "):
            DelayedNotifier(conn_id="r", store_conn_id="db", destination="q", delay=delay)
    DelayedNotifier(conn_id="r", store_conn_id="db", destination="q", delay="{{ params.delay }}")


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"destination": ""}, "destination= must be the name of a queue"),
        ({"destination": "x" * 201}, "destination= has 201 characters; the store keeps up to 200"),
        (
            {"conn_id": "db", "destination": "x" * 64},
            "destination= has 64 bytes; the name of a queue table has up to 63",
        ),
        ({"value": {"when": END}}, "value= cannot be written as JSON"),
        ({"value": 3}, "value= must be text, bytes, or a list or dictionary"),
        ({"value": {"when": END, "run": "{{ run_id }}"}}, "value= cannot be written as JSON"),
        ({"headers": {"n": 3}}, "headers= the value of 'n' must be text, not int"),
        ({"headers": ["n"]}, "headers= must be text by text, not list"),
        ({"conn_id": ""}, "conn_id= must be the id of a connection"),
        ({"key": ""}, "key='' must be text that is not empty"),
    ],
)
def test_a_literal_that_cannot_be_is_an_error_when_the_dag_is_parsed(wrong: dict[str, Any], text: str) -> None:
    arguments = {"conn_id": "r", "store_conn_id": "db", "destination": "q", "delay": 1, **wrong}
    with pytest.raises(ValueError, match=re.escape(text)):
        DelayedNotifier(**arguments)
    # Airflow makes a deadline's after the deadline, where an error would lose the escalation
    if "key" not in wrong:
        DelayedNotifier(**arguments, context={"deadline": {}})


def test_templates_are_not_checked_when_the_dag_is_parsed() -> None:
    fields = ("conn_id", "destination", "value", "headers", "key")
    for name in fields:
        value = {"n": "{{ params.n }}"} if name == "headers" else "{{ params.n }}"
        arguments = {"conn_id": "r", "store_conn_id": "db", "destination": "q", "delay": 1, name: value}
        assert getattr(DelayedNotifier(**arguments), name) == value


def run_of(**fields: Any) -> CallbackRun:
    values: dict[str, Any] = {"dag_id": "etl", "run_id": "a", "start_date": None, "end_date": END, **fields}
    return CallbackRun.of({"dag_run": SimpleNamespace(**values), "ti": fields.get("ti")})


def test_a_failure_has_one_name_and_the_next_another() -> None:
    assert run_of().failure == run_of().failure
    later = run_of(end_date=END.replace(hour=8))
    assert (later.failure != run_of().failure, later.failed_at.hour) == (True, 8)
    first, second = (run_of(end_date=None, ti=SimpleNamespace(id=name, end_date=END)) for name in "xy")
    assert (first.failure != second.failure, first.failed_at) == (True, END)


def tags(run: CallbackRun, key: str | None = None) -> list[str]:
    return [run.attempt(per, key).tag for per in ("run", "dag", "task")]


def test_tags_are_told_apart_and_fit() -> None:
    task = {"ti": SimpleNamespace(id="x", task_id="load", map_index=3)}
    night = run_of(run_type="scheduled", run_after=END, **task)
    assert tags(night) == ["notifier:etl/a", "notifier:etl", "notifier:etl/a/load/3"]
    assert tags(night, "ACME/EU") == [
        "notifier:etl@ACME%2FEU/a",
        "notifier:etl@ACME%2FEU",
        "notifier:etl@ACME%2FEU/a/load/3",
    ]
    for kind in ("manual", "backfill", "asset_triggered"):
        assert tags(run_of(run_type=kind, run_after=END))[:2] == ["notifier:etl/a"] * 2
    long = [tags(run_of(dag_id="d" * 250, run_id="r" * 249 + letter))[0] for letter in "xy"]
    assert (len(set(long)), max(map(len, long)) <= 250) == (2, True)
    assert len({ids_of(tag) for tag in (*long, *tags(night), *tags(night, "b"))}) == 8


def test_a_scheduled_run_is_recognised_by_its_id_where_airflow_passes_no_run() -> None:
    context = {"dag": SimpleNamespace(dag_id="etl"), "run_id": "scheduled__2026-05-06T07:00:00+00:00"}
    attempt = CallbackRun.of(context).attempt("dag")
    assert (attempt.tag, attempt.run_after, attempt.started_at) == ("notifier:etl", END, None)
    context["run_id"] = "scheduled__by_hand"
    assert CallbackRun.of(context).attempt("dag").tag == "notifier:etl/scheduled__by_hand"


def test_a_try_began_when_airflow_made_its_id_whatever_the_worker_s_clock_says() -> None:
    made = UUID("019df9f0-5300-7abc-8def-0123456789ab")
    ti = {"task_id": "load", "map_index": -1, "start_date": END.replace(year=2030)}
    runs = [run_of(end_date=None, ti=SimpleNamespace(id=name, **ti)) for name in (made, str(made), uuid4(), "x")]
    began = [one.attempt("task").started_at for one in runs]
    assert began == [datetime.fromtimestamp((made.int >> 80) / 1000, timezone.utc)] * 2 + [ti["start_date"]] * 2
