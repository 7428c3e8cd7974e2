"""Starts a DAG at the second at which a message falls due on RabbitMQ; no worker waits for it.

Connection: `delayed_rabbitmq` (rabbitmq).

Run: trigger `on_message_due_send`, which makes the queue and sends two messages, due in 20 seconds, then unpause
`on_message_due`; while that is paused, messages wait in the queue.
"""

from __future__ import annotations

from typing import Any

from airflow.sdk import DAG, Asset, AssetWatcher, task

from airflow_delayed.operators.send import DelayedSendOperator
from airflow_delayed.operators.topology import TopologyInstallOperator
from airflow_delayed.triggers.rabbitmq_message import RabbitMQMessageTrigger

QUEUE = "on-message-due"
TAGS = ["airflow_delayed", "example"]

due = Asset(
    "on_message_due",
    watchers=[AssetWatcher(name="queue", trigger=RabbitMQMessageTrigger(conn_id="delayed_rabbitmq", queue=QUEUE))],
)

with DAG("on_message_due", schedule=[due], catchup=False, doc_md=__doc__, tags=TAGS):

    @task
    def handle(triggering_asset_events: Any = None) -> dict[str, str]:
        """Return when each message was due, by its id; messages that arrive together are in one run."""
        payloads = [event.extra["payload"] for event in triggering_asset_events[due]]
        # a message may arrive twice, with the same id
        return {message["message_id"]: message["due_at"] for payload in payloads for message in payload["messages"]}

    handle()

with DAG("on_message_due_send", schedule=None, doc_md=__doc__, tags=TAGS):
    install = TopologyInstallOperator(
        task_id="install", conn_id="delayed_rabbitmq", destinations=[QUEUE], create_destinations=True
    )
    send = DelayedSendOperator(
        task_id="send",
        conn_id="delayed_rabbitmq",
        destination=QUEUE,
        messages=[{"value": "the first", "delay_seconds": 20}, {"value": "the second", "delay_seconds": 20}],
    )
    install >> send
