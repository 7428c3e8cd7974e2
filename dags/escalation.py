"""Calls somebody when a run is still red after half an hour: its failure stores a message, its success cancels it.

Connection: `delayed_store` (sqlite, postgres, mysql); no broker.

Run: unpause all DAGs of this file and trigger `escalation`, which fails; cleared within half an hour, it succeeds.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, BaseHook, Param, task

from airflow_delayed.notifications.notifiers import DelayedCancelNotifier, DelayedNotifier
from airflow_delayed.operators.dispatch import StoreDispatchOperator
from airflow_delayed.operators.topology import TopologyInstallOperator

DB, QUEUE = "delayed_store", "escalations"
# to see it sooner, make this shorter
AFTER = timedelta(minutes=30)
TAGS = ["airflow_delayed", "example"]

with DAG(
    "escalation",
    schedule=None,
    doc_md=__doc__,
    tags=TAGS,
    params={"failures": Param(1, type="integer", description="so many tries fail, counted over clears")},
    on_failure_callback=DelayedNotifier(conn_id=DB, store_conn_id=DB, destination=QUEUE, delay=AFTER),
    on_success_callback=DelayedCancelNotifier(store_conn_id=DB),
):

    @task
    def work(params: dict[str, int] | None = None, ti: Any = None) -> None:
        """Fail, as often as the parameter says."""
        if ti.try_number <= (params or {})["failures"]:
            raise RuntimeError("this run is red until this task is cleared and succeeds")

    work()

with DAG("escalation_dispatch", schedule="@continuous", catchup=False, max_active_runs=1, doc_md=__doc__, tags=TAGS):
    install = TopologyInstallOperator(task_id="install", conn_id=DB, destinations=[QUEUE], create_destinations=True)
    # it waits in the triggerer, and puts each message into the queue table within a second or two after it is due
    dispatch = StoreDispatchOperator(
        task_id="dispatch", store_conn_id=DB, deliver_conn_ids=[DB], until=timedelta(hours=6), deferrable=True
    )
    install >> dispatch

with DAG("escalation_desk", schedule="* * * * *", catchup=False, max_active_runs=1, doc_md=__doc__, tags=TAGS):

    @task
    def call() -> list[str]:
        """Return the escalations that have arrived; your desk calls somebody here."""
        table, called = BaseHook.get_hook(DB), list[str]()
        for seq, body in table.get_records("SELECT seq, body FROM escalations ORDER BY seq"):
            called.append(bytes(body).decode())
            logging.getLogger("airflow.task").error("STILL RED: %s", called[-1])
            # a call that fails is made again
            table.run(f"DELETE FROM escalations WHERE seq = {int(seq)}")  # noqa: S608 - a number
        return called

    call()
