"""Dispatches the messages of a store every 10 minutes, 15 minutes ahead; the broker then delivers each at its second.

Connections: `delayed_store` (sqlite, postgres, ...), where the messages wait, and `delayed_sqs` (aws), which delivers.

Run: make its pool by `airflow pools set delayed_dispatch 1 "Dispatchers of the store"`, and unpause it.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, DeadlineAlert, DeadlineReference, SyncCallback

from airflow_delayed.operators.dispatch import StoreDispatchOperator

# A run sends what is due within LOOKAHEAD, with the delay that then remains. The difference of the two is the time that
# a run may begin or end late; after that messages may be late, and the alert reports it.
EVERY, LOOKAHEAD = timedelta(minutes=10), timedelta(minutes=15)

with DAG(
    "dispatch_store",
    schedule="*/10 * * * *",
    catchup=False,
    max_active_runs=1,
    doc_md=__doc__,
    tags=["airflow_delayed", "example"],
    # needs Airflow 3.2; on 3.1 leave it out
    deadline=DeadlineAlert(
        name="messages may be late",
        reference=DeadlineReference.DAGRUN_QUEUED_AT,
        interval=LOOKAHEAD - EVERY,
        # a function of alerts/late.py beside this file; yours may call somebody
        callback=SyncCallback("alerts.late.report"),
    ),
):
    StoreDispatchOperator(
        task_id="dispatch",
        store_conn_id="delayed_store",
        deliver_conn_ids=["delayed_sqs"],
        lookahead=LOOKAHEAD,
        # so that other tasks do not take its place
        pool="delayed_dispatch",
        # for faults that pass in seconds; after longer ones comes the next run
        retries=2,
        retry_delay=timedelta(seconds=20),
    )
