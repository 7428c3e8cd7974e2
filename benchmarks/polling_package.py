"""The same with this package: what a user writes; see polling_dag.py."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from datetime import datetime

from airflow.sdk import DAG

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.message import DelayedMessage
from airflow_delayed.operators.dispatch import StoreDispatchOperator

DATABASE, AWS, QUEUE = "reminders_db", "aws_default", "reminders"


def install() -> None:
    with closing(DelayedStoreHook(DATABASE, AWS)) as store:
        store.install([])


def remind(rows: Iterable[tuple[str, str, str, datetime]]) -> None:
    """Store reminders: id, customer, body and due time of each."""
    with closing(DelayedStoreHook(DATABASE, AWS)) as store:
        store.send(
            DelayedMessage(destination=QUEUE, message_id=name, tag=customer, body=body.encode(), due_at=due_at)
            for name, customer, body, due_at in rows
        )


def take_back(customer: str) -> int:
    with closing(DelayedStoreHook(DATABASE, AWS)) as store:
        return store.cancel(tag=customer).changed


with DAG("send_reminders", schedule="*/5 * * * *", catchup=False, max_active_runs=1):
    dispatch = StoreDispatchOperator(task_id="dispatch", store_conn_id=DATABASE, deliver_conn_ids=[AWS])
