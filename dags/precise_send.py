"""Waits with a message in the triggerer, sends it half a minute before it is due, and SQS delivers it at its second.

Connection: `delayed_sqs` (aws); it needs no `unrestricted_delay`, however long the delay is.

Run: trigger it with a text and a delay; mark the task `wait` failed while it waits, and the message is not sent.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, Asset, Param, task

from airflow_delayed.message import utcnow
from airflow_delayed.operators.send import DelayedSendOperator
from airflow_delayed.operators.topology import TopologyInstallOperator
from airflow_delayed.sensors.due_time import DueTimeSensor

QUEUE = "precise-send"
# the time for a worker's start, for a triggerer that is lost, and for retries
AHEAD = timedelta(seconds=30)

with DAG(
    "precise_send",
    schedule=None,
    doc_md=__doc__,
    params={"delay_seconds": Param(3600, type="number", minimum=0), "text": Param("it is time", type="string")},
    tags=["airflow_delayed", "example"],
):
    install = TopologyInstallOperator(
        task_id="install", conn_id="delayed_sqs", destinations=[QUEUE], create_destinations=True
    )

    @task
    def due(params: dict[str, Any]) -> dict[str, str]:
        """Return when the message is due, and when to send it. Cleared with what follows, it is another message."""
        due_at = utcnow() + timedelta(seconds=params["delay_seconds"])
        return {"due_at": due_at.isoformat(), "send_at": (due_at - AHEAD).isoformat()}

    moments = due()
    wait = DueTimeSensor(task_id="wait", target_time=moments["send_at"])
    send = DelayedSendOperator(
        task_id="send",
        conn_id="delayed_sqs",
        destination=QUEUE,
        value="{{ params.text }}",
        due_at=moments["due_at"],
        retries=3,
        retry_delay=timedelta(seconds=5),
        # the asset event has the number of messages, their queue and their due time
        outlets=[Asset("precise_send")],
    )
    install >> moments >> wait >> send
