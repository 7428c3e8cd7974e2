"""What the DAGs of the nights share: tasks that end as a test has planned, and callbacks that escalate.

A run's name is that of its conf, or its day. A file of the folder NIGHTS decides: ``waits/<dag>.<name>`` keeps its task
at work, ``red/<dag>.<name>`` makes it fail, ``retried/...`` fail on its first try alone, ``killed/...`` end as the
kernel ends a process that takes too much memory. ``gates/<processor>`` and ``gates/<dag>.<name>`` stop a failure's
callback before the notifier, ``gates/success.<dag>.<name>`` a success's.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import task
from airflow.sdk.exceptions import AirflowFailException

from airflow_delayed.notifications.notifiers import DelayedCancelNotifier, DelayedNotifier

FOLDER = Path(os.environ["NIGHTS"])
#: Of the DAG processor that this is a child of, see support.nights.
PROCESSOR = os.environ.get("NIGHTS_PROCESSOR", "one")
STORE = {"store_conn_id": "night_store"}
#: Nothing becomes due by itself.
DELAY = timedelta(days=1)
#: Tasks and callbacks that nobody lets go end after so many seconds.
LONGEST = 1200
INSTANCES = 4
NAMES = {"dag": "{{ dag.dag_id }}", "run": "{{ run_id }}"}
TASK_NAMES = {**NAMES, "task": "{{ ti.task_id }}", "map_index": "{{ ti.map_index }}"}


def note(**more: Any) -> DelayedNotifier:
    arguments = {"conn_id": "night_store", "destination": "desk", "delay": DELAY, "value": NAMES, **STORE, **more}
    return DelayedNotifier(**arguments)


def there(kind: str, name: str) -> bool:
    return (FOLDER / kind / name).exists()


def stay_while(true: Callable[[], bool]) -> None:
    end = time.monotonic() + LONGEST
    while true() and time.monotonic() < end:
        time.sleep(0.05)


def name_of(dag_run: Any) -> str:
    return str((dag_run.conf or {}).get("name") or f"{dag_run.logical_date:%Y-%m-%d}")


def gate(context: Any) -> None:
    """Stop a failure's callback before the notifier while the processor's file, or that of the run, is there."""
    _stop_at(PROCESSOR, _place(context))


def success_gate(context: Any) -> None:
    """Stop a success's callback likewise."""
    _stop_at(f"success.{_place(context)}")


def _place(context: Any) -> str:
    return f"{context['dag'].dag_id}.{name_of(context['dag_run'])}"


def _stop_at(*names: str) -> None:
    if any(there("gates", name) for name in names):
        for name in names:
            (FOLDER / "at_gate" / name).touch()
        stay_while(lambda: any(there("gates", name) for name in names))


def called(kind: str) -> Callable[[Any], None]:
    """Return a callback that writes that Airflow has called it, after what stands before it in the list."""

    def witness(context: Any) -> None:
        ti = context.get("ti")
        line = {"kind": kind, "dag": context["dag"].dag_id, "run": context["run_id"], "processor": PROCESSOR}
        if ti is not None:
            line |= {"task": ti.task_id, "map_index": ti.map_index}
        with (FOLDER / "calls").open("a") as file:
            file.write(json.dumps(line) + "\n")

    return witness


def play(dag_id: str, dag_run: Any, try_number: int, instance: str = "") -> None:
    """End as planned."""
    place = f"{dag_id}.{name_of(dag_run)}{instance}"
    (FOLDER / "began" / place).touch()
    stay_while(lambda: there("waits", place))
    if there("killed", place):
        os.kill(os.getpid(), signal.SIGKILL)
    if there("retried", place) and try_number == 1:
        raise RuntimeError("red on its first try")
    if there("red", place):
        raise AirflowFailException("red")


def work_of(dag_id: str) -> None:
    @task(retries=1, retry_delay=timedelta(0))
    def work(ti: Any = None, dag_run: Any = None) -> None:
        play(dag_id, dag_run, ti.try_number)

    work()


def callbacks(**scope: Any) -> dict[str, Any]:
    """Return a DAG's callbacks.

    :param scope: ``per`` and ``key`` of both notifiers.
    """
    return {
        "on_failure_callback": [gate, note(**scope), called("failure")],
        "on_success_callback": [success_gate, DelayedCancelNotifier(**STORE, **scope), called("success")],
    }
