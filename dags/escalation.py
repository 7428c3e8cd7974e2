"""Calls somebody when a run is still red after half an hour: its failure stores a message, its success takes it back.

Connection: `delayed_store` (sqlite, postgres, mysql); no broker.

Run: unpause all DAGs of this file and trigger `escalation`, which fails; cleared within half an hour, it succeeds.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, Asset, AssetWatcher, Param, task

from airflow_delayed.notifications.notifiers import DelayedCancelNotifier, DelayedNotifier
from airflow_delayed.operators.dispatch import StoreDispatchOperator
from airflow_delayed.operators.topology import TopologyInstallOperator
from airflow_delayed.triggers.queue_table import QueueTableTrigger

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
    # each run is red by itself: no other run's success takes its message back
    on_failure_callback=DelayedNotifier(conn_id=DB, store_conn_id=DB, destination=QUEUE, delay=AFTER, per="run"),
    on_success_callback=DelayedCancelNotifier(store_conn_id=DB, per="run"),
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

# The watcher makes a run of the desk within seconds, and deletes the rows of which it has stored an event. Who may see
# assets can read their bodies there: here the DAG, the run, the task, the times and links, and no secret.
rows = QueueTableTrigger(conn_id=DB, queue=QUEUE, body=True)
red = Asset("escalations", watchers=[AssetWatcher(name="queue", trigger=rows)])

with DAG("escalation_desk", schedule=[red], catchup=False, doc_md=__doc__, tags=TAGS):

    @task
    def call(triggering_asset_events: Any = None) -> list[str]:
        """Return all escalations of this run's events; your desk calls somebody here."""
        messages = [message for event in triggering_asset_events[red] for message in event.extra["payload"]["messages"]]
        bodies = [str(message["body"]) for message in messages]
        for body in bodies:
            logging.getLogger("airflow.task").error("STILL RED: %s", body)
        return bodies

    call()
