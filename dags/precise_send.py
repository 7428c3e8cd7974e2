"""Waits with a message in the triggerer, sends it half a minute before it is due, and SQS delivers it at its second.

Connection: `delayed_sqs` (aws); it needs no `unrestricted_delay`, however long the delay is.

Run: trigger it with a text and a delay; mark the task failed while it waits, and the message is not sent.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, Asset, Param

from airflow_delayed.operators.send import DelayedSendOperator
from airflow_delayed.operators.topology import TopologyInstallOperator

QUEUE = "precise-send"

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
    send = DelayedSendOperator(
        task_id="send",
        conn_id="delayed_sqs",
        destination=QUEUE,
        value="{{ params.text }}",
        delay="{{ params.delay_seconds }}",
        # the time for a worker's start, for a triggerer that is lost, and for retries
        lead=timedelta(seconds=30),
        deferrable=True,
        # if the task is cleared, it sends another message, due after the same delay
        on_clear="new_ids",
        retries=3,
        retry_delay=timedelta(seconds=5),
        # the asset event has the number of messages, their queue and their due time
        outlets=[Asset("precise_send")],
    )
    install >> send
