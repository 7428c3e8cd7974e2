"""Sends with cancel_on_kill that are marked failed, or whose worker shuts down; and sends without backfills."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone

from airflow.sdk import DAG

from airflow_delayed.message import utcnow
from airflow_delayed.operators.send import DelayedSendOperator


class SlowSend(DelayedSendOperator):
    """A send that takes its time: it asks for the present before each block of messages."""

    @staticmethod
    def clock() -> datetime:
        time.sleep(0.5)
        return utcnow()


for dag_id, retries in (("marked_failed", 0), ("shut_down", 1)):
    with DAG(dag_id, schedule=None, catchup=False):
        SlowSend(
            task_id="send",
            conn_id="delayed_rabbitmq",
            store_conn_id="delayed_store",
            destination="killed",
            source="{{ dag_run.conf.source }}",
            delay="P1D",
            tag=dag_id,
            cancel_on_kill=True,
            retries=retries,
            retry_delay=timedelta(0),
        )

with DAG("no_backfill", schedule="@daily", start_date=datetime(2026, 1, 1, tzinfo=timezone.utc), catchup=False):
    for on_backfill in ("skip", "fail"):
        DelayedSendOperator(
            task_id=on_backfill,
            conn_id="delayed_rabbitmq",
            destination="killed",
            value=on_backfill,
            delay="PT1S",
            on_backfill=on_backfill,
        )
