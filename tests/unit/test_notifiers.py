"""DelayedNotifier and DelayedCancelNotifier without a store: their arguments, tags and ids."""

from __future__ import annotations

from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

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
    with pytest.raises(ValueError, match="per='task' is neither 'dag' nor 'run'"):
        kind(**more, store_conn_id="db", per="task")


def test_a_delay_that_cannot_be_is_an_error_when_the_dag_is_parsed() -> None:
    for delay in (-1, "soon"):
        with pytest.raises(InvalidMessage, match="delay: "):
            DelayedNotifier(conn_id="r", store_conn_id="db", destination="q", delay=delay)
    DelayedNotifier(conn_id="r", store_conn_id="db", destination="q", delay="{{ params.delay }}")


def run_of(**fields: Any) -> CallbackRun:
    values: dict[str, Any] = {"dag_id": "etl", "run_id": "a", "start_date": None, "end_date": END, **fields}
    return CallbackRun.of({"dag_run": SimpleNamespace(**values), "ti": fields.get("ti")})


def test_a_failure_has_one_name_and_the_next_another() -> None:
    assert run_of().failure == run_of().failure
    later = run_of(end_date=END.replace(hour=8))
    assert (later.failure != run_of().failure, later.failed_at.hour) == (True, 8)
    first, second = (run_of(end_date=None, ti=SimpleNamespace(id=name, end_date=END)) for name in "xy")
    assert (first.failure != second.failure, first.failed_at) == (True, END)


def test_tags_are_told_apart_and_fit() -> None:
    run = run_of()
    assert (run.tag("dag"), run.tag("run")) == ("notifier:etl", "notifier:etl/a")
    long = [run_of(dag_id="d" * 250, run_id="r" * 249 + letter).tag("run") for letter in "xy"]
    assert (len(set(long)), max(map(len, long)) <= 250) == (2, True)
    assert len({ids_of(tag) for tag in (*long, run.tag("dag"), run.tag("run"))}) == 4
