"""Stores a reminder of each appointment, every night again: changes replace the reminders of the night before.

Connections: `delayed_store` (sqlite, postgres, ...), where they wait, and `delayed_sqs` (aws), which delivers them.

Run: let NIGHTLY_REMINDERS_FILE in the environment of Airflow's workers name a CSV file with the columns `appointment`,
`customer`, `starts` (ISO 8601 with an offset) and `called_off` (yes or no); unpause this DAG and `dispatch_store`.
"""

from __future__ import annotations

import csv
import os
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, Param, task

from airflow_delayed.operators.change import DelayedCancelOperator
from airflow_delayed.operators.send import DelayedSendOperator
from airflow_delayed.operators.topology import TopologyInstallOperator

QUEUE = "appointment-reminders"
FILE = os.environ.get("NIGHTLY_REMINDERS_FILE", "appointments.csv")
BEFORE = timedelta(hours=2)
TAGS = ["airflow_delayed", "example"]


def appointments() -> list[dict[str, str]]:
    """Return all appointments."""
    with Path(FILE).open(newline="") as file:
        return list(csv.DictReader(file))


# also while SQS is away: what is due later is stored nevertheless
@task(trigger_rule="all_done")
def compute() -> list[dict[str, Any]]:
    """Return a reminder of each appointment that was not called off."""
    return [
        {
            # the same every night, so that an appointment has one reminder, however often it moves
            "message_id": f"appointment-{row['appointment']}",
            "due_at": (datetime.fromisoformat(row["starts"]) - BEFORE).isoformat(),
            "tag": row["customer"],
            "value": {"customer": row["customer"], "starts": row["starts"]},
        }
        for row in appointments()
        if row["called_off"] != "yes"
    ]


@task
def called_off() -> list[str]:
    """Return the ids of reminders of appointments that were called off."""
    return [f"appointment-{row['appointment']}" for row in appointments() if row["called_off"] == "yes"]


with DAG(
    "nightly_reminders",
    schedule="0 2 * * *",
    catchup=False,
    max_active_runs=1,
    doc_md=__doc__,
    tags=TAGS,
    default_args={"retries": 3},
):
    install_sqs = TopologyInstallOperator(
        task_id="install_sqs", conn_id="delayed_sqs", destinations=[QUEUE], create_destinations=True, retries=0
    )
    install_store = TopologyInstallOperator(task_id="install_store", conn_id="delayed_store", destinations=[])
    computed = compute()
    send = DelayedSendOperator(
        task_id="send",
        conn_id="delayed_sqs",
        destination=QUEUE,
        messages=computed,
        store_conn_id="delayed_store",
        on_conflict="replace",
        # the file also has appointments of the past
        past_due="skip",
        max_past=timedelta(0),
    )
    cancel_called_off = DelayedCancelOperator(
        task_id="cancel_called_off",
        store_conn_id="delayed_store",
        ids=called_off(),
        # an appointment that was called off before its first night has no reminder
        on_missing="ignore",
    )
    [install_sqs, install_store] >> computed >> send
    install_store >> cancel_called_off


# cancels all reminders of one customer at once
with DAG(
    "cancel_reminders",
    schedule=None,
    doc_md=__doc__,
    tags=TAGS,
    params={"customer": Param("", type="string", minLength=1, description="whose reminders are no longer wanted")},
):
    DelayedCancelOperator(task_id="cancel", store_conn_id="delayed_store", tag="{{ params.customer }}")
