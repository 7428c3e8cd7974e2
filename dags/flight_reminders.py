"""Sends a reminder two hours before each of a day's flights from New York: Spark computes, Amazon SQS delivers.

Connections: `spark_default` (spark), `delayed_sqs` (aws), and `delayed_store` (sqlite, postgres, ...), where reminders
wait that are due later.

Run: trigger it. The day passes in `replay_seconds`, so that nobody has to wait for 24 hours; `make demo` runs it too.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import DAG, Param

from airflow_delayed.operators.dispatch import StoreDispatchOperator
from airflow_delayed.operators.send import DelayedSendOperator
from airflow_delayed.operators.topology import TopologyInstallOperator

QUEUE = "flight-reminders"
# Spark and Airflow's workers must share this folder.
FOLDER = os.environ.get("FLIGHT_REMINDERS_FOLDER", f"{Path.home()}/flight_reminders")
# a folder for each run; Spark takes no colon in its name
REMINDERS = FOLDER + "/{{ run_id | replace(':', '-') | replace('+', '-') }}/reminders"
# What is due within this time goes to SQS at once. For days of 24 hours take 15 minutes, the longest delay of SQS.
AHEAD = timedelta(seconds=12)

with DAG(
    "flight_reminders",
    schedule="@daily",
    catchup=False,
    max_active_runs=1,
    doc_md=__doc__,
    tags=["airflow_delayed", "example"],
    default_args={"retries": 3},
    params={
        "day": Param(None, type=["null", "string"], format="date", description="which day; empty: the day of the run"),
        "replay_seconds": Param(20, type="number", minimum=0, description="how long the day takes; 0: 24 hours"),
    },
):
    install_sqs = TopologyInstallOperator(
        task_id="install_sqs", conn_id="delayed_sqs", destinations=[QUEUE], create_destinations=True, retries=0
    )
    install_store = TopologyInstallOperator(task_id="install_store", conn_id="delayed_store", destinations=[])
    compute = SparkSubmitOperator(
        task_id="compute",
        conn_id="spark_default",
        # also while SQS is away: what is due later is stored nevertheless
        trigger_rule="all_done",
        application=str(Path(__file__).parent / "jobs/flight_reminders_job.py"),
        application_args=[
            *("--day", "{{ params.day or dag_run.run_after | ds }}"),
            *("--replay-seconds", "{{ params.replay_seconds }}"),
            *("--output", REMINDERS),
        ],
    )
    send = DelayedSendOperator(
        task_id="send",
        conn_id="delayed_sqs",
        store_conn_id="delayed_store",
        source=REMINDERS,
        destination=QUEUE,
        # What names a flight. A row's number does not: a Spark job that runs again returns its rows in another order.
        id_columns=["departs", "carrier", "flight", "origin"],
        hold_over=AHEAD,
    )
    # For days of 24 hours leave this task out, and run dispatch_store.py, which occupies no worker in between.
    dispatch = StoreDispatchOperator(
        task_id="dispatch",
        store_conn_id="delayed_store",
        deliver_conn_ids=["delayed_sqs"],
        lookahead=AHEAD,
        until="empty",
    )
    [install_sqs, install_store] >> compute >> send >> dispatch
