"""Calls somebody when a DAG goes silent: a task was killed, the scheduler is down, or somebody has paused the DAG.

Connection: `delayed_store` (sqlite, postgres, ...); no broker.

Run: trigger `missed_run_install`, and start a service that is no part of Airflow: `airflow delayed dispatcher
--store-conn-id delayed_store --deliver-conn-ids delayed_store`. Unpause `missed_run`, and once: `airflow delayed arm
missed_run`. Then pause `missed_run`, or stop the scheduler: within five minutes the table `missed_runs` has a row.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from airflow.sdk import DAG, task

from airflow_delayed.notifications.missed_run import MissedRunNotifier
from airflow_delayed.operators.topology import TopologyInstallOperator

# in earnest conn_id is a broker, and who reads the queue is no DAG: all of Airflow may be down then
DB, QUEUE = "delayed_store", "missed_runs"
TAGS = ["airflow_delayed", "example"]

missed = MissedRunNotifier(conn_id=DB, store_conn_id=DB, destination=QUEUE, within=timedelta(minutes=3))

with DAG(
    "missed_run",
    schedule="* * * * *",
    start_date=datetime(2026, 1, 1, tzinfo=timezone.utc),
    catchup=False,
    doc_md=__doc__,
    tags=TAGS,
    # each good end lets the message about the next run wait, and cancels the one about its own
    on_success_callback=missed,
):
    # the first task does so for its own run, in case that nobody heard the good end before
    @task(on_execute_callback=missed.arm_own)
    def work() -> None:
        """Do what the DAG is for."""

    work()

with DAG("missed_run_install", schedule=None, doc_md=__doc__, tags=TAGS):
    TopologyInstallOperator(task_id="install", conn_id=DB, destinations=[QUEUE], create_destinations=True)
