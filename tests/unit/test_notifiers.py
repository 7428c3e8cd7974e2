"""DelayedNotifier and DelayedCancelNotifier without a store: their arguments and limits."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_delayed.errors import InvalidMessage
from airflow_delayed.fields import MAX_TAG
from airflow_delayed.notifications import notifiers
from airflow_delayed.notifications.notifiers import CallbackRun, DelayedCancelNotifier, DelayedNotifier

END = datetime(2026, 5, 6, 7, tzinfo=timezone.utc)
TO: dict[str, Any] = {"conn_id": "r", "store_conn_id": "db", "destination": "q", "delay": 1}


@pytest.mark.parametrize("kind", [DelayedNotifier, DelayedCancelNotifier])
def test_without_a_store_it_says_what_it_needs(kind) -> None:
    more: dict[str, Any] = {"conn_id": "r", "destination": "q", "delay": 1} if kind is DelayedNotifier else {}
    with pytest.raises(
        ValueError, match=r"needs store_conn_id=, .*at once.*TopologyInstallOperator.*StoreDispatchOperator"
    ):
        kind(**more)
    with pytest.raises(ValueError, match="per='dag' is none of 'run', 'task'"):
        kind(**more, store_conn_id="db", per="dag")
    with pytest.raises(InvalidMessage, match="key: must be text, and not empty"):
        kind(**more, store_conn_id="db", key="")


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"delay": -1}, "delay: "),
        ({"delay": "soon"}, "delay: "),
        ({"destination": ""}, "destination: must be text, and not empty"),
        ({"conn_id": ""}, "conn_id: must be text, and not empty"),
        ({"value": {"when": END}}, "cannot be written as JSON"),
        ({"value": 3}, "must be text, bytes, or a list or dictionary"),
        ({"headers": {"n": 3}}, "the value of 'n' must be text, not int"),
        ({"headers": ["n"]}, "must be text by text, not list"),
    ],
)
def test_a_literal_that_cannot_be_is_an_error_when_the_dag_is_parsed(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidMessage, match=re.escape(text)):
        DelayedNotifier(**{**TO, **wrong})
    # Airflow makes a deadline's after the deadline, where an error would lose the escalation
    DelayedNotifier(**{**TO, **wrong}, context={"deadline": {}})


@pytest.mark.parametrize("name", ["conn_id", "destination", "delay", "value", "headers", "key"])
def test_templates_are_not_checked_when_the_dag_is_parsed(name: str) -> None:
    value = {"n": "{{ params.n }}"} if name in ("headers", "value") else "{{ params.n }}"
    assert getattr(DelayedNotifier(**{**TO, name: value}), name) == value


def test_a_callback_waits_ten_seconds() -> None:
    assert notifiers.CALL_SECONDS == 10


def test_an_id_has_the_run_and_its_clears_and_a_tag_fits() -> None:
    def of(run_id: str, clears: int = 0, **ti: Any) -> CallbackRun:
        run = SimpleNamespace(dag_id="d" * 250, run_id=run_id, clear_number=clears, end_date=END)
        return CallbackRun.of({"dag_run": run, "ti": SimpleNamespace(**ti) if ti else None})

    twice = of("r", 2, task_id="load", map_index=3)
    every = [twice.ids(per, key) for per in ("run", "task") for key in (None, "manager")]
    assert (len({one for some in every for one in some}), {len(some) for some in every}) == (12, {3})
    assert of("r", 1).ids("run", None) == twice.ids("run", None)[:2]
    assert of("r").ids("task", None) == of("r").ids("run", None)
    long = {of("r" * 249 + letter).tag for letter in "xy"}
    assert (len(long), max(map(len, long)) <= MAX_TAG) == (2, True)
