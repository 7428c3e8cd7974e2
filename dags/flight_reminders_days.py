"""Computes and stores the reminders of several days' flights: one Spark job and one send for each day, side by side.

Connections: `spark_default` (spark), `delayed_store` (sqlite, postgres, ...), where the reminders wait, and
`delayed_sqs` (aws), which delivers them.

Run: trigger it with the first day and the number of days, and run `dispatch_store`, which sends what falls due.
"""

from __future__ import annotations

import os
import re
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import DAG, Param, task, task_group

from airflow_delayed.operators.send import DelayedSendOperator
from airflow_delayed.operators.topology import TopologyInstallOperator

QUEUE = "flight-reminders"
# Spark and Airflow's workers must share this folder.
FOLDER = os.environ.get("FLIGHT_REMINDERS_FOLDER", f"{Path.home()}/flight_reminders")


# also while SQS is away: what is due later is stored nevertheless
@task(trigger_rule="all_done")
def plan(first: str, days: str, dag_run: Any = None) -> list[dict[str, str]]:
    """Return each day, and the folder for its reminders."""
    start = date.fromisoformat(first) if first else dag_run.run_after.date() + timedelta(days=1)
    each = [(start + timedelta(days=number)).isoformat() for number in range(int(days))]
    # Spark takes no colon in a folder's name
    run = re.sub(r"[:+]", "-", dag_run.run_id)
    return [{"day": day, "output": f"{FOLDER}/{run}/{day}/reminders"} for day in each]


@task_group
def one_day(day: str, output: str) -> None:
    """Compute and store the reminders of one day; if that fails, the other days' are stored all the same."""
    compute = SparkSubmitOperator(
        task_id="compute",
        conn_id="spark_default",
        application=str(Path(__file__).parent / "jobs/flight_reminders_job.py"),
        application_args=[
            *("--day", day),
            *("--hours-before", "{{ params.hours_before }}"),
            # the real time of day
            *("--replay-seconds", "0"),
            *("--output", output),
        ],
    )
    send = DelayedSendOperator(
        task_id="send",
        conn_id="delayed_sqs",
        store_conn_id="delayed_store",
        source=output,
        destination=QUEUE,
        # what names a flight
        id_columns=["departs", "carrier", "flight", "origin"],
        # if a day is computed again, reminders that have changed replace those that wait
        on_conflict="replace",
        # of today, the flights that have left need no reminder
        past_due="skip",
        max_past=timedelta(0),
    )
    compute >> send


with DAG(
    "flight_reminders_days",
    schedule=None,
    max_active_runs=1,
    doc_md=__doc__,
    tags=["airflow_delayed", "example"],
    default_args={"retries": 3},
    params={
        "first": Param(None, type=["null", "string"], format="date", description="empty: the day after the run's"),
        "days": Param(3, type="integer", minimum=1, maximum=31, description="how many days"),
        "hours_before": Param(2, type="number", minimum=0, description="how long before its flight a reminder is due"),
    },
):
    install_sqs = TopologyInstallOperator(
        task_id="install_sqs", conn_id="delayed_sqs", destinations=[QUEUE], create_destinations=True, retries=0
    )
    install_store = TopologyInstallOperator(task_id="install_store", conn_id="delayed_store", destinations=[])
    planned = plan("{{ params.first or '' }}", "{{ params.days }}")
    [install_sqs, install_store] >> planned
    one_day.expand_kwargs(planned)
