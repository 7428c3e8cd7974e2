"""Makes what messages need on each transport: RabbitMQ's delay levels, the queues of SQS, the tables of the store.

Connections: `delayed_rabbitmq` (rabbitmq), `delayed_sqs` (aws) and `delayed_store` (sqlite, postgres, ...).

Run: trigger it with `dry_run` and read in the log what it would make, then without; again after each upgrade.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, Param

from airflow_delayed.operators.topology import TopologyInstallOperator
from airflow_delayed.sqs.settings import QueueSettings

# Change them and run it again: a queue that exists stays. One that differs fails the task, and the log names it.
QUEUES = ["invoices", "reminders"]
EACH: dict[str, Any] = {"dry_run": "{{ params.dry_run }}"}

with DAG(
    "install_topology",
    schedule=None,
    doc_md=__doc__,
    params={"dry_run": Param(True, type="boolean", description="make nothing, log what would be made")},
    tags=["airflow_delayed", "example"],
):
    TopologyInstallOperator(
        task_id="rabbitmq", conn_id="delayed_rabbitmq", destinations=QUEUES, create_destinations=True, **EACH
    )
    TopologyInstallOperator(
        task_id="sqs",
        conn_id="delayed_sqs",
        destinations=QUEUES,
        create_destinations=True,
        # a message that is received five times and not deleted goes to the dead-letter queue
        settings=QueueSettings(retention=timedelta(days=14), dead_letter_queue="dead-letters", max_receive_count=5),
        **EACH,
    )
    # a store that only holds messages needs no queues
    TopologyInstallOperator(task_id="store", conn_id="delayed_store", destinations=[], **EACH)
