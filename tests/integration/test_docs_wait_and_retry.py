"""docs/airflow/wait-and-retry.md is run as it stands, with the fixture that needs no broker; its figures are ours."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
from support import pages
from support.examples import note_dags, result

from airflow_delayed.clock import EXACT, LONGEST, pause
from airflow_delayed.operators.send import DelayedSendOperator
from airflow_delayed.testing.delayed import Delayed

pytestmark = [
    pytest.mark.long,
    # Airflow's own @task.sensor imports it
    pytest.mark.filterwarnings("ignore:The `airflow.utils.operator_helpers.determine_kwargs` attribute is deprecated"),
]

PAGE = Path(__file__).resolve().parents[2] / "docs/airflow/wait-and-retry.md"


def test_its_code_waits_sends_and_cancels(
    delayed: Delayed, run_dag: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = note_dags(monkeypatch)
    began = delayed.now
    # what the page prints in the end is compared
    blocks = pages.run(PAGE)
    next(blocks)
    # the run that the page cancels
    monkeypatch.setattr("airflow.models.dagrun.DagRun.generate_run_id", lambda **_: "manual__2030-05-06")
    run = run_dag(made[0], run_after=began)
    # in the triggerer, until five minutes before the first is due
    assert delayed.now == began + timedelta(hours=3, minutes=-5)
    summary = result(run, "send")
    assert (summary["sent"], summary["stored"]) == (1, 1)
    assert [message.due_at for message in delayed.sent] == [began + timedelta(hours=3)]
    for _ in range(3):
        next(blocks)
    assert list(blocks) == [None]
    assert delayed.stored == []


def test_a_sensor_waits_until_a_time_of_its_template(delayed: Delayed) -> None:
    names: dict[str, Any] = {}
    exec(compile(pages.blocks(PAGE)[1][1], PAGE.name, "exec"), names)
    wait = names["dag"].get_task("wait")
    began = delayed.now
    assert delayed.run(wait) is None
    assert delayed.now == began + timedelta(hours=2)


def test_a_task_waits_for_the_messages_of_its_run(delayed: Delayed) -> None:
    names: dict[str, Any] = {}
    exec(compile(pages.blocks(PAGE)[2][1], PAGE.name, "exec"), names)
    send = names["reminders"].get_task("send")
    delayed.run(send)
    look = SimpleNamespace(dag_id=send.dag_id, run_id="run-1")
    assert not names["wait"].function(look).is_done
    delayed.advance(timedelta(hours=2))
    delayed.dispatch()
    found = names["wait"].function(look)
    assert (found.is_done, found.xcom_value["dispatched"]) == (True, 2)


def test_an_operator_of_ones_own_waits(delayed: Delayed) -> None:
    names: dict[str, Any] = {}
    exec(compile(pages.blocks(PAGE)[3][1], PAGE.name, "exec"), names)
    moment = delayed.now + timedelta(days=2, microseconds=1)
    delayed.run(names["WaitUntil"](task_id="wait", moment=moment.isoformat()))
    assert delayed.now == moment
    # past, it does not wait at all
    delayed.run(names["WaitUntil"](task_id="past", moment=(moment - timedelta(days=1)).isoformat()))
    assert delayed.now == moment


def test_its_figures_and_names_are_ours() -> None:
    text = " ".join(PAGE.read_text().split())
    assert "at most 2,500 messages come twice" in text
    assert (EXACT, LONGEST, pause(36_000), pause(EXACT)) == (60, 3600, 3600, EXACT)
    assert pause(6_000) == 600
    hints = get_type_hints(DelayedSendOperator.__init__, include_extras=True, localns={"Clock": Any})
    assert all(f'`"{choice}"`' in text for choice in get_args(hints["on_clear"]))
    assert inspect.signature(DelayedSendOperator).parameters["on_clear"].default == "same_ids"
