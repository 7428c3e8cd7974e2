"""A DAG that starts when a message falls due, at that second, without a worker or a poll that waits for it.

`on_message_due` watches the queue `on-message-due`. `on_message_due_send` makes that queue and sends two messages to
it, due in 20 seconds: run it, and see the other start. Unpause `on_message_due` first; while it is paused, messages
wait in the queue.

Connection: `delayed_rabbitmq` (rabbitmq).
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
        """Return when each message was due, by its id; messages that come together are one run's."""
        payloads = [event.extra["payload"] for event in triggering_asset_events[due]]
        # a message may come twice, with the same id
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
