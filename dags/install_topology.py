"""Makes what messages need on each transport: RabbitMQ's delay levels, SQS's queues, the store's tables.

Run it after each change of the queues below, or of this package. It may run at any time: what is there stays as it is,
and what differs fails its task and is named in the log. With the parameter `dry_run`, as long as you do not take it
away, nothing is made, and the log says what would be.

Connections: `delayed_rabbitmq` (rabbitmq), `delayed_sqs` (aws), `delayed_store` (sqlite, postgres, ...).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, Param

from airflow_delayed.operators.topology import TopologyInstallOperator
from airflow_delayed.sqs.settings import QueueSettings

QUEUES = ["invoices", "reminders"]
EACH: dict[str, Any] = {"dry_run": "{{ params.dry_run }}"}

with DAG(
    "install_topology",
    schedule=None,
    doc_md=__doc__,
    params={"dry_run": Param(True, type="boolean", description="only tell what would be made")},
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
        # what is read five times and not deleted goes to a queue beside, where somebody looks
        settings=QueueSettings(retention=timedelta(days=14), dead_letter_queue="dead-letters", max_receive_count=5),
        **EACH,
    )
    # a store that only holds messages needs no queues
    TopologyInstallOperator(task_id="store", conn_id="delayed_store", destinations=[], **EACH)
