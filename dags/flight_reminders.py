"""Reminders for a day's flights from New York: computed by Spark, delivered by Amazon SQS at their due second.

The flights are those of 2013; the day is that of the run, or the parameter `day`. So that one need not wait a day, the
day passes in `replay_seconds`; with 0 the reminders are due at the real time of day, some hours before each flight.

Connections: `delayed_sqs` (aws) delivers, `delayed_store` (sqlite, postgres, ...) holds what is due later,
`spark_default` (spark) computes. `make demo` runs this with servers of its own.
"""

from __future__ import annotations

import os
import re
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import DAG, Param

from airflow_delayed.operators.dispatch import StoreDispatchOperator
from airflow_delayed.operators.send import DelayedSendOperator
from airflow_delayed.operators.topology import TopologyInstallOperator

if TYPE_CHECKING:
    from airflow.sdk.types import DagRunProtocol

QUEUE = "flight-reminders"
FOLDER = os.environ.get("FLIGHT_REMINDERS_FOLDER") or str(
    Path(os.environ.get("AIRFLOW_HOME", "~/airflow"), "flight_reminders").expanduser()
)
REMINDERS = FOLDER + "/{{ run_id | as_name }}/reminders"
# The replay's day is short, and so is what goes to SQS at once. Where days have 24 hours, 15 minutes are right for
# both, and the dispatcher is a DAG of its own that runs every few minutes.
AHEAD = timedelta(seconds=15)


def run_day(dag_run: DagRunProtocol) -> date:
    """Return the day that a run is for: one that was started by hand or by an asset has no logical date."""
    return (dag_run.logical_date or dag_run.run_after).date()


with DAG(
    "flight_reminders",
    schedule="@daily",
    catchup=False,
    max_active_runs=1,
    doc_md=__doc__,
    tags=["airflow_delayed", "example"],
    user_defined_filters={"as_name": lambda run_id: re.sub(r"[^\w.-]", "-", run_id)},
    user_defined_macros={"run_day": run_day},
    params={
        "day": Param(None, type=["null", "string"], format="date", description="its month and day; empty: the run's"),
        "hours_before": Param(2, type="number", minimum=0, description="how long before its flight a reminder is due"),
        "replay_seconds": Param(30, type="number", minimum=0, description="how long the day takes; 0: a real day"),
    },
):
    install = [
        TopologyInstallOperator(
            task_id="install_sqs", conn_id="delayed_sqs", destinations=[QUEUE], create_destinations=True
        ),
        TopologyInstallOperator(task_id="install_store", conn_id="delayed_store", destinations=[]),
    ]
    compute = SparkSubmitOperator(
        task_id="compute",
        conn_id="spark_default",
        application=str(Path(__file__).parent / "jobs" / "flight_reminders_job.py"),
        application_args=[
            *("--day", "{{ params.day or run_day(dag_run) }}"),
            *("--onto", "{{ run_day(dag_run) }}"),
            *("--hours-before", "{{ params.hours_before }}"),
            *("--replay-seconds", "{{ params.replay_seconds }}"),
            *("--output", REMINDERS),
        ],
    )
    send = DelayedSendOperator(
        task_id="send",
        conn_id="delayed_sqs",
        source=REMINDERS,
        destination=QUEUE,
        # the flight's own key, not its row: a job that runs again returns its rows in another order
        id_columns=["departs", "carrier", "flight", "origin"],
        store_conn_id="delayed_store",
        hold_over=AHEAD,
    )
    dispatch = StoreDispatchOperator(
        task_id="dispatch", conn_id="delayed_store", deliver_conn_ids=["delayed_sqs"], lookahead=AHEAD, until="empty"
    )
    install >> compute >> send >> dispatch
