"""Reminders of appointments, computed anew every night; what has changed since replaces what waits.

`nightly_reminders` reads all appointments, and stores a reminder of each, due two hours before. One that has moved
moves its reminder; one that was called off takes its reminder away; what stays the same is counted as a duplicate. So
the job need not know what it did the night before. `cancel_reminders` takes away all reminders of one customer at once.
`dispatch_store` hands over what is due.

Connections: `delayed_store` (sqlite, postgres, ...) holds, `delayed_sqs` (aws) delivers. The appointments are a CSV
file with the columns `appointment`, `customer`, `starts` (ISO 8601 with an offset) and `called_off` (yes or no), named
by NIGHTLY_REMINDERS_FILE.
"""

from __future__ import annotations

import csv
import os
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, Param, task

from airflow_delayed.hooks.store import DelayedStoreHook
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


@task
def compute() -> list[dict[str, Any]]:
    """Return a reminder of each appointment that is to be."""
    return [
        {
            # the appointment's own number: the same every night
            "message_id": f"appointment-{row['appointment']}",
            "due_at": (datetime.fromisoformat(row["starts"]) - BEFORE).isoformat(),
            "tag": row["customer"],
            "value": {"customer": row["customer"], "starts": row["starts"]},
        }
        for row in appointments()
        if row["called_off"] != "yes"
    ]


@task
def cancel_called_off() -> dict[str, int]:
    """Take away the reminders of what was called off, and return how many there were of which outcome."""
    gone = [f"appointment-{row['appointment']}" for row in appointments() if row["called_off"] == "yes"]
    if not gone:
        return {}
    with closing(DelayedStoreHook("delayed_store", "delayed_sqs")) as store:
        return {str(outcome.value): count for outcome, count in store.cancel(gone).counts.items()}


with DAG("nightly_reminders", schedule="0 2 * * *", catchup=False, max_active_runs=1, doc_md=__doc__, tags=TAGS):
    install = [
        TopologyInstallOperator(
            task_id="install_sqs", conn_id="delayed_sqs", destinations=[QUEUE], create_destinations=True
        ),
        TopologyInstallOperator(task_id="install_store", conn_id="delayed_store", destinations=[]),
    ]
    send = DelayedSendOperator(
        task_id="send",
        conn_id="delayed_sqs",
        destination=QUEUE,
        messages=compute(),
        store_conn_id="delayed_store",
        on_conflict="replace",
        # reminders of last week are no input error
        past_due="skip",
        max_past=timedelta(0),
    )
    install >> send
    install >> cancel_called_off()


@task
def cancel(customer: str) -> dict[str, int]:
    """Take away all reminders of a customer, and return how many there were of which outcome."""
    with closing(DelayedStoreHook("delayed_store", "delayed_sqs")) as store:
        return {str(outcome.value): count for outcome, count in store.cancel(tag=customer).counts.items()}


with DAG(
    "cancel_reminders",
    schedule=None,
    doc_md=__doc__,
    tags=TAGS,
    params={"customer": Param("", type="string", minLength=1, description="whose reminders are no longer wanted")},
):
    cancel("{{ params.customer }}")
