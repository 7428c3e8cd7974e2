"""DAGs that escalate: one fails as often as its run's conf says, one misses its deadline; another that delivers."""

from __future__ import annotations

import time
from contextlib import closing
from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, AsyncCallback, DeadlineAlert, DeadlineReference, task

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.notifications.notifiers import DelayedCancelNotifier, DelayedNotifier
from airflow_delayed.operators.dispatch import StoreDispatchOperator

with DAG(
    "escalate",
    schedule=None,
    on_failure_callback=DelayedNotifier(
        conn_id="escalate_store",
        store_conn_id="escalate_store",
        destination="escalate_queue",
        delay="{{ dag_run.conf['delay'] }}",
        value="{{ run_id }} is red",
    ),
    on_success_callback=DelayedCancelNotifier(store_conn_id="escalate_store"),
):

    @task
    def work(ti: Any = None, dag_run: Any = None) -> None:
        if ti.try_number <= dag_run.conf["failures"]:
            raise RuntimeError("as often as conf says")

    work()

with DAG("escalate_dispatch", schedule=None):
    StoreDispatchOperator(task_id="dispatch", store_conn_id="escalate_store", deliver_conn_ids=["escalate_store"])

with DAG(
    "escalate_late",
    schedule=None,
    deadline=DeadlineAlert(
        reference=DeadlineReference.DAGRUN_QUEUED_AT,
        interval=timedelta(seconds=1),
        callback=AsyncCallback(
            DelayedNotifier,
            kwargs={
                "conn_id": "escalate_store",
                "store_conn_id": "escalate_store",
                "destination": "escalate_queue",
                "delay": 3600,
                "value": "{{ dag_run.dag_run_id }} is late",
            },
        ),
    ),
    on_success_callback=DelayedCancelNotifier(store_conn_id="escalate_store"),
):

    @task
    def late(run_id: str | None = None) -> list[str]:
        """Go on until the missed deadline has stored its message."""
        with closing(DelayedStoreHook("escalate_store")) as store:
            for _ in range(600):
                if found := [one.message_id for one in store.list(tag=f"notifier:escalate_late/{run_id}")]:
                    return found
                time.sleep(0.2)
        raise RuntimeError("no message of the deadline within two minutes")

    late()
