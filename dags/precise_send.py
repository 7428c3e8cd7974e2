"""A message that is in no broker until half a minute before it is due, and arrives at its second.

`precise_send` waits in the triggerer, which costs no worker. Mark the task failed while it waits, and the message was
never sent; clear it, and it is another message, due as long after that. Change the due time by the run's parameters.

Half a minute is for a worker's start, for a triggerer that is lost, and for the task's retries; SQS then holds the
message back until its second.

Connection: `delayed_sqs` (aws), which needs no `unrestricted_delay` for this, however far off the due time is.
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
        lead=timedelta(seconds=30),
        deferrable=True,
        on_clear="new_ids",
        retries=3,
        retry_delay=timedelta(seconds=5),
        # its event says how many were sent, where to and for when
        outlets=[Asset("precise_send")],
    )
    install >> send
