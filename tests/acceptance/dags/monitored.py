"""Sends and dispatches, so that each metric of a task is there."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG

from airflow_delayed.operators.dispatch import StoreDispatchOperator
from airflow_delayed.operators.send import DelayedSendOperator

with DAG("monitored", schedule=None, catchup=False):
    send = DelayedSendOperator(
        task_id="send",
        conn_id="delayed_rabbitmq",
        store_conn_id="monitored_store",
        destination="monitored",
        messages=[{"value": "now", "delay_seconds": 1}, {"value": "later", "delay_seconds": 3600}],
    )
    dispatch = StoreDispatchOperator(
        task_id="dispatch",
        store_conn_id="monitored_store",
        deliver_conn_ids=["delayed_rabbitmq"],
        lookahead=timedelta(hours=2),
    )
    send >> dispatch
