"""Hands over what the store holds, every 10 minutes and 15 minutes ahead; the broker then delivers to the second.

So no process runs all day. A run takes what is due within 15 minutes, with the delay that then remains: 5 minutes are
left for a run that begins late. If one has not ended by then, messages may be late, and the deadline alert tells.

Connections: `delayed_store` (sqlite, postgres, ...) holds, `delayed_sqs` (aws) delivers. The pool `delayed_dispatch`
keeps other tasks from taking its place: `airflow pools set delayed_dispatch 1 "Dispatchers of the store"`.

The deadline needs Airflow 3.2; on 3.1 leave it out.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, DeadlineAlert, DeadlineReference, SyncCallback

from airflow_delayed.operators.dispatch import StoreDispatchOperator

EVERY, LOOKAHEAD = timedelta(minutes=10), timedelta(minutes=15)

with DAG(
    "dispatch_store",
    schedule="*/10 * * * *",
    catchup=False,
    max_active_runs=1,
    doc_md=__doc__,
    tags=["airflow_delayed", "example"],
    deadline=DeadlineAlert(
        name="messages may be late",
        reference=DeadlineReference.DAGRUN_QUEUED_AT,
        interval=LOOKAHEAD - EVERY,
        # a function of alerts/late.py beside this file; yours may call somebody
        callback=SyncCallback("alerts.late.tell"),
    ),
):
    StoreDispatchOperator(
        task_id="dispatch",
        conn_id="delayed_store",
        deliver_conn_ids=["delayed_sqs"],
        lookahead=LOOKAHEAD,
        pool="delayed_dispatch",
        # a run that failed is soon followed by the next; this is for what passes in seconds
        retries=2,
        retry_delay=timedelta(seconds=20),
    )
