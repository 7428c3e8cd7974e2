"""Calls somebody when a DAG is still red after half an hour: a failure sends a delayed message, a success cancels it.

Connection: `delayed_store` (sqlite, postgres, ...); no broker.

Run: unpause and trigger `escalation_desk`, then trigger `escalation`, which fails if its parameter `fail` is true.
Clear its task within half an hour, and nobody is called.
"""

from __future__ import annotations

import logging
from datetime import timedelta

from airflow.providers.common.compat.sdk import AirflowSkipException
from airflow.sdk import DAG, BaseHook, Param, task
from airflow.sdk.types import RuntimeTaskInstanceProtocol

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
    params={"fail": Param(True, type="boolean")},
    on_failure_callback=DelayedNotifier(conn_id=DB, store_conn_id=DB, destination=QUEUE, delay=AFTER),
    # a success of the same run, after a clear
    on_success_callback=DelayedCancelNotifier(store_conn_id=DB),
):

    @task
    def work(params: dict[str, bool] | None = None, ti: RuntimeTaskInstanceProtocol | None = None) -> None:
        """Fail in the first try if the parameter `fail` is true; clear the task for another."""
        if (params or {})["fail"] and ti is not None and ti.try_number == 1:
            raise RuntimeError("this run is red until its task is cleared")

    work()


@task
def call() -> list[str]:
    """Take all escalations from the queue table, and return them; your desk calls somebody here.

    It is skipped where there is none.
    """
    database = BaseHook.get_hook(DB)
    rows = database.get_records("SELECT seq, body FROM escalations ORDER BY seq")
    if not rows:
        raise AirflowSkipException("no DAG has been red for too long")
    bodies = [bytes(body).decode() for _, body in rows]
    for body in bodies:
        logging.getLogger("airflow.task").error("STILL RED: %s", body)
    last = int(rows[-1][0])
    database.run(f"DELETE FROM escalations WHERE seq <= {last}", autocommit=True)  # noqa: S608 - a number
    return bodies


with DAG("escalation_desk", schedule="* * * * *", catchup=False, max_active_runs=1, doc_md=__doc__, tags=TAGS):
    install = TopologyInstallOperator(task_id="install", conn_id=DB, destinations=[QUEUE], create_destinations=True)
    # it waits in the triggerer until the next run begins, so that a message is delivered at its second
    dispatch = StoreDispatchOperator(
        task_id="dispatch", store_conn_id=DB, deliver_conn_ids=[DB], until=timedelta(minutes=1), deferrable=True
    )
    install >> dispatch >> call()
