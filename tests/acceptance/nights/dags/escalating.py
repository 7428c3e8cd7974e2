"""DAGs that escalate in different ways; how their runs end is in playing.py."""

from __future__ import annotations

import os
import signal
from datetime import datetime, timedelta, timezone
from typing import Any

from airflow.sdk import DAG, AsyncCallback, DeadlineAlert, DeadlineReference, SyncCallback, task
from airflow.sdk.exceptions import AirflowFailException
from playing import (
    DELAY,
    FOLDER,
    INSTANCES,
    STORE,
    TASK_NAMES,
    callbacks,
    called,
    name_of,
    note,
    stay_while,
    there,
    work_of,
)

from airflow_delayed.notifications.notifiers import DelayedCancelNotifier, DelayedNotifier

ON_SUCCESS = callbacks()["on_success_callback"]
#: Two customers of the nightly DAGs with odd numbers.
PARITY = "{{ 'odd' if logical_date.day % 2 else 'even' }}"


def deadline(interval: timedelta, kind: Any = AsyncCallback) -> DeadlineAlert:
    arguments = {
        "conn_id": "night_store",
        "destination": "desk",
        "delay": DELAY.total_seconds(),
        "value": {"dag": "{{ dag_run.dag_id }}", "run": "{{ dag_run.dag_run_id }}"},
        **STORE,
    }
    callback = kind(DelayedNotifier, kwargs=arguments)
    return DeadlineAlert(reference=DeadlineReference.DAGRUN_QUEUED_AT, interval=interval, callback=callback)


with DAG("night", schedule=None, max_active_runs=32, **callbacks()):
    work_of("night")

with DAG("customers", schedule=None, max_active_runs=32, **callbacks(per="dag", key="{{ dag_run.conf.customer }}")):
    work_of("customers")

for number in range(int(os.environ["NIGHTS_ROUNDS"])):
    with DAG(
        f"nightly_{number}",
        schedule="@daily",
        start_date=datetime(2026, 1, 10, tzinfo=timezone.utc),
        end_date=datetime(2026, 1, 9 + int(os.environ["NIGHTS_DAYS"]), tzinfo=timezone.utc),
        catchup=True,
        max_active_runs=32,
        **callbacks(per="dag", **({"key": PARITY} if number % 2 else {})),
    ):
        work_of(f"nightly_{number}")

with DAG(
    "reprocessed",
    schedule="@daily",
    start_date=datetime(2026, 1, 10, tzinfo=timezone.utc),
    end_date=datetime(2026, 1, 10, tzinfo=timezone.utc),
    catchup=True,
    **callbacks(per="dag"),
):
    work_of("reprocessed")

for name, kind in (("late", AsyncCallback), ("late_sync", SyncCallback)):
    with DAG(
        name,
        schedule=None,
        max_active_runs=32,
        deadline=deadline(timedelta(seconds=1), kind),
        on_failure_callback=called("failure"),
        on_success_callback=ON_SUCCESS,
    ):
        work_of(name)

# its deadline passes while the run before is at work
with DAG(
    "queued",
    schedule=None,
    max_active_runs=1,
    deadline=deadline(timedelta(seconds=1)),
    on_failure_callback=called("failure"),
    on_success_callback=ON_SUCCESS,
):
    work_of("queued")

with DAG(
    "racing",
    schedule=None,
    max_active_runs=32,
    deadline=deadline(timedelta(seconds=20)),
    on_success_callback=ON_SUCCESS,
):
    work_of("racing")

# the instances of a task in one run, together and each by itself
for name, per in (("parts", "run"), ("alone", "task")):
    with DAG(name, schedule=None, max_active_runs=1, on_success_callback=ON_SUCCESS):

        @task(
            on_failure_callback=[note(value=TASK_NAMES, per=per), called("task failure")],
            on_success_callback=[DelayedCancelNotifier(per=per, **STORE), called("task success")]
            if per == "task"
            else None,
        )
        def part(number: int, ti: Any = None, dag_run: Any = None) -> None:
            place = f"{ti.dag_id}.{name_of(dag_run)}"
            (FOLDER / "began" / f"{place}.{number}.{ti.try_number}").touch()
            if ti.try_number == 1:
                # all at once
                stay_while(lambda: len(list((FOLDER / "began").glob(f"{place}.*.1"))) < INSTANCES)
            stay_while(lambda: there("waits", place))
            if there("killed", place):
                os.kill(os.getpid(), signal.SIGKILL)
            if there("red", f"{place}.{number}") or there("red", place):
                raise AirflowFailException("red")

        part.expand(number=list(range(INSTANCES)))

# a template that nothing can render
with DAG("garbled", schedule=None, on_failure_callback=[note(value="{{ ti.no.such.name }}"), called("failure")]):
    work_of("garbled")
