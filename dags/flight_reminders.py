"""Reminders for flights from New York: computed by Spark, delivered by Amazon SQS at their due second.

The flights are those of 2013. `flight_reminders` is one day's: that of the run, or of the parameter `day`. So that one
need not wait a day, the day passes in `replay_seconds`; with 0 the reminders are due at the real time of day, some
hours before each flight. `flight_reminders_days` is that for several days to come: a Spark job and a send for each,
side by side. All waits in the store, for which `dispatch_store` comes.

Connections: `delayed_sqs` (aws) delivers, `delayed_store` (sqlite, postgres, ...) holds what is due later,
`spark_default` (spark) computes. `make demo` runs this with servers of its own.
"""

from __future__ import annotations

import os
import re
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import DAG, Param, task, task_group

from airflow_delayed.operators.dispatch import StoreDispatchOperator
from airflow_delayed.operators.send import DelayedSendOperator
from airflow_delayed.operators.topology import TopologyInstallOperator

if TYPE_CHECKING:
    from airflow.sdk.types import DagRunProtocol

QUEUE = "flight-reminders"
FOLDER = os.environ.get("FLIGHT_REMINDERS_FOLDER") or str(
    Path(os.environ.get("AIRFLOW_HOME", "~/airflow"), "flight_reminders").expanduser()
)
JOB = str(Path(__file__).parent / "jobs" / "flight_reminders_job.py")
# the flight's own key, not its row: a job that runs again returns its rows in another order
KEY = ["departs", "carrier", "flight", "origin"]
HOURS_BEFORE = Param(2, type="number", minimum=0, description="how long before its flight a reminder is due")
# The replay's day is short, and so is what goes to SQS at once. Where days have 24 hours, 15 minutes are right for
# both, and the dispatcher is a DAG of its own that runs every few minutes.
AHEAD = timedelta(seconds=15)


def as_name(run_id: str) -> str:
    """Return a run's id as the name of a folder."""
    return re.sub(r"[^\w.-]", "-", run_id)


REMINDERS = FOLDER + "/{{ run_id | as_name }}/reminders"


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
    user_defined_filters={"as_name": as_name},
    user_defined_macros={"run_day": run_day},
    params={
        "day": Param(None, type=["null", "string"], format="date", description="its month and day; empty: the run's"),
        "hours_before": HOURS_BEFORE,
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
        application=JOB,
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
        id_columns=KEY,
        store_conn_id="delayed_store",
        hold_over=AHEAD,
    )
    dispatch = StoreDispatchOperator(
        task_id="dispatch", conn_id="delayed_store", deliver_conn_ids=["delayed_sqs"], lookahead=AHEAD, until="empty"
    )
    install >> compute >> send >> dispatch


@task
def plan(first: str, days: str, dag_run: Any = None) -> list[dict[str, str]]:
    """Return each day, and the folder for its reminders."""
    start = date.fromisoformat(first) if first else run_day(dag_run) + timedelta(days=1)
    each = [(start + timedelta(days=number)).isoformat() for number in range(int(days))]
    return [{"day": day, "output": f"{FOLDER}/{as_name(dag_run.run_id)}/{day}/reminders"} for day in each]


@task_group
def one_day(day: str, output: str) -> None:
    """Compute and send a day's reminders; a day that fails keeps no other from being sent."""
    compute = SparkSubmitOperator(
        task_id="compute",
        conn_id="spark_default",
        application=JOB,
        application_args=[
            *("--day", day),
            *("--hours-before", "{{ params.hours_before }}"),
            *("--replay-seconds", "0"),
            *("--output", output),
        ],
    )
    send = DelayedSendOperator(
        task_id="send",
        conn_id="delayed_sqs",
        source=output,
        destination=QUEUE,
        id_columns=KEY,
        store_conn_id="delayed_store",
        # a day that is computed anew changes nothing that is the same
        on_conflict="replace",
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
    params={
        "first": Param(None, type=["null", "string"], format="date", description="empty: the day after the run's"),
        "days": Param(3, type="integer", minimum=1, maximum=31),
        "hours_before": HOURS_BEFORE,
    },
):
    install_all = [
        TopologyInstallOperator(
            task_id="install_sqs", conn_id="delayed_sqs", destinations=[QUEUE], create_destinations=True
        ),
        TopologyInstallOperator(task_id="install_store", conn_id="delayed_store", destinations=[]),
    ]
    planned = plan("{{ params.first or '' }}", "{{ params.days }}")
    install_all >> planned
    one_day.expand_kwargs(planned)
