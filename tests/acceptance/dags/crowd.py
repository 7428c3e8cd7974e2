"""A send in the midst of which a test kills the worker, and two that are marked failed and cleared while they wait."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG

from airflow_delayed.operators.send import DelayedSendOperator

with DAG("crowd", schedule=None, catchup=False):
    DelayedSendOperator(
        task_id="send",
        conn_id="delayed_rabbitmq",
        destination="crowd",
        source="{{ dag_run.conf.source }}",
        delay=0,
        retries=1,
        retry_delay=timedelta(0),
    )

with DAG("cleared", schedule=None, catchup=False):
    for on_clear in ("same_ids", "new_ids"):
        DelayedSendOperator(
            task_id=on_clear,
            conn_id="delayed_rabbitmq",
            destination="cleared",
            value=on_clear,
            delay=40,
            lead=timedelta(seconds=1),
            deferrable=True,
            on_clear=on_clear,
        )
