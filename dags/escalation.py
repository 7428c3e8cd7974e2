"""Calls somebody when a run is still red after half an hour: its failure stores a message, its success cancels it.

Connection: `delayed_store` (sqlite, postgres, mysql); no broker.

Run: unpause all DAGs of this file and trigger `escalation`, which fails; cleared within half an hour, it succeeds.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, BaseHook, Param, task
from sqlalchemy import text

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

with DAG(
    "escalation_desk",
    schedule=timedelta(minutes=1),
    catchup=False,
    max_active_runs=1,
    doc_md=__doc__,
    tags=TAGS,
):
    install = TopologyInstallOperator(task_id="install", conn_id=DB, destinations=[QUEUE], create_destinations=True)
    # puts each message that is due into the queue table
    dispatch = StoreDispatchOperator(task_id="dispatch", store_conn_id=DB, deliver_conn_ids=[DB])

    @task
    def call() -> list[str]:
        """Return all escalations of the queue table; your desk calls somebody here."""
        with BaseHook.get_hook(DB).get_sqlalchemy_engine().begin() as desk:
            rows = desk.execute(text("SELECT seq, body FROM escalations ORDER BY seq")).all()
            bodies = [bytes(row.body).decode() for row in rows]
            for body in bodies:
                logging.getLogger("airflow.task").error("STILL RED: %s", body)
            # last of all: if the task fails before, its next run calls once more
            for row in rows:
                desk.execute(text("DELETE FROM escalations WHERE seq = :seq"), {"seq": row.seq})
        return bodies

    install >> dispatch >> call()
