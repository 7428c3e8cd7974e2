"""Watches a queue table; its runs do nothing, and are known by their events."""

from __future__ import annotations

from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG, Asset, AssetWatcher

from airflow_delayed.triggers.queue_table import QueueTableTrigger

rows = QueueTableTrigger("delayed_store", "watched_rows", batch_size=10_000, pause=5)

with DAG(
    "rows",
    schedule=[Asset("rows", watchers=[AssetWatcher(name="table", trigger=rows)])],
    catchup=False,
    max_active_runs=99,
):
    EmptyOperator(task_id="nothing")
