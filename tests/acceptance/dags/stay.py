"""A dispatcher that stays in the triggerer until nothing is left, for queue tables of the store's own database."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG

from airflow_delayed.operators.dispatch import StoreDispatchOperator

with DAG("stay", schedule=None, catchup=False):
    StoreDispatchOperator(
        task_id="stay",
        store_conn_id="delayed_store",
        deliver_conn_ids=["delayed_store"],
        lookahead=timedelta(0),
        until="empty",
        table="stay_messages",
        deferrable=True,
    )
