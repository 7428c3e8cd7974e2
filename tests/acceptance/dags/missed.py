"""A DAG that is watched for missed runs. Files in a folder say what its runs do, and hold up who reads this file."""

from __future__ import annotations

import inspect
import os
import signal
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

from airflow.sdk import DAG, task

from airflow_delayed.notifications.missed_run import MissedRunNotifier
from airflow_delayed.notifications.notifiers import DelayedCancelNotifier, DelayedNotifier

FOLDER = Path(os.environ["FLIGHT_REMINDERS_FOLDER"]).parent / "missed"
QUEUE = {"conn_id": "missed_store", "store_conn_id": "missed_store", "destination": "missed_queue"}
#: While it is there, the process of a callback waits here: Airflow has deleted the request for the callback by then.
HOLD, HELD = FOLDER / "hold", FOLDER / "held"

if HOLD.exists() and any("dag_processing/processor.py" in frame.filename for frame in inspect.stack()):
    HELD.touch()
    while HOLD.exists():
        time.sleep(0.1)

missed = MissedRunNotifier(**QUEUE, within=timedelta(hours=1))
with DAG(
    "missed",
    schedule=timedelta(seconds=10),
    start_date=datetime(2026, 1, 1, tzinfo=timezone.utc),
    catchup=False,
    max_active_runs=1,
    on_success_callback=missed,
):

    @task(on_execute_callback=missed.arm_own)
    def work() -> None:
        if (FOLDER / "kill").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        if (FOLDER / "lose").exists():
            # whoever calls back for this run is held up
            HOLD.touch()

    work()

with DAG(
    "marked",
    schedule=None,
    on_failure_callback=DelayedNotifier(**QUEUE, delay=timedelta(hours=1)),
    on_success_callback=DelayedCancelNotifier(store_conn_id="missed_store"),
):

    @task
    def fail_or_stay() -> None:
        """Fail, or go on until somebody marks the run."""
        while (FOLDER / "stay").exists():
            time.sleep(0.2)
        raise RuntimeError("it is red")

    fail_or_stay()

with DAG("silent", schedule=None, on_success_callback=DelayedCancelNotifier(store_conn_id="silent_store")):

    @task
    def succeed() -> None:
        """End well; the store of the callback says nothing."""

    succeed()
