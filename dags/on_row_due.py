"""Starts one run of `handle_row` for each message that falls due in a queue table; no broker, no worker that waits.

Connection: `delayed_store` (postgres, mysql, sqlite).

Run: unpause all DAGs of this file and trigger `on_row_due_send`, which sends two messages, due in 20 seconds; a run's
id is its message's id, and its `conf` the message.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.providers.standard.operators.trigger_dagrun import TriggerDagRunOperator
from airflow.sdk import DAG, Asset, AssetWatcher, task

from airflow_delayed.operators.dispatch import StoreDispatchOperator
from airflow_delayed.operators.send import DelayedSendOperator
from airflow_delayed.operators.topology import TopologyInstallOperator
from airflow_delayed.triggers.queue_table import QueueTableTrigger

CONNECTION, QUEUE = "delayed_store", "on-row-due"
TAGS = ["airflow_delayed", "example"]

# A task can be mapped over [core] max_map_length rows, by default 1024, and a run may have several events.
rows = QueueTableTrigger(conn_id=CONNECTION, queue=QUEUE, batch_size=200, body=True)
due = Asset("on_row_due", watchers=[AssetWatcher(name="queue", trigger=rows)])

with DAG("on_row_due", schedule=[due], catchup=False, doc_md=__doc__, tags=TAGS):

    @task
    def messages(triggering_asset_events: Any = None) -> list[dict[str, Any]]:
        """Return the arguments of one run for each message."""
        payloads = [event.extra["payload"] for event in triggering_asset_events[due]]
        found = [message for payload in payloads for message in payload["messages"]]
        return [{"trigger_run_id": message["message_id"], "conf": message} for message in found]

    TriggerDagRunOperator.partial(
        task_id="start",
        trigger_dag_id="handle_row",
        # a logical date can have one run only, and two messages may fall due in the same microsecond
        logical_date=None,
        # a message that arrives twice has had its run
        skip_when_already_exists=True,
        retries=3,
        retry_delay=timedelta(seconds=10),
    ).expand_kwargs(messages())

with DAG("handle_row", schedule=None, doc_md=__doc__, tags=TAGS):

    @task
    def handle(dag_run: Any = None) -> str:
        """Return the message's body; your work is here."""
        return str(dag_run.conf["body"])

    handle()

with DAG("on_row_due_send", schedule=None, doc_md=__doc__, tags=TAGS):
    install = TopologyInstallOperator(
        task_id="install", conn_id=CONNECTION, destinations=[QUEUE], create_destinations=True
    )
    send = DelayedSendOperator(
        task_id="send",
        conn_id=CONNECTION,
        destination=QUEUE,
        messages=[{"value": "the first", "delay_seconds": 20}, {"value": "the second", "delay_seconds": 20}],
    )
    dispatch = StoreDispatchOperator(
        task_id="dispatch",
        store_conn_id=CONNECTION,
        deliver_conn_ids=[CONNECTION],
        lookahead=timedelta(0),
        until="empty",
        deferrable=True,
    )
    install >> send >> dispatch
