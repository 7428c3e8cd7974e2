"""Sends messages that are due in more than 15 minutes through Amazon SQS alone, without a store.

Connection: `delayed_sqs` (aws) with `"unrestricted_delay": true` in its extra, which allows this kind of delay.

Run: trigger `sqs_long_delays`, then unpause `sqs_long_delays_cycle` for as long as messages wait; without it they are
late, and after 14 days lost.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG

from airflow_delayed.operators.send import DelayedSendOperator
from airflow_delayed.operators.topology import TopologyInstallOperator
from airflow_delayed.sensors.fifo_cycle import FifoCycleSensor

QUEUE = "long-delays"
TAGS = ["airflow_delayed", "example"]

with DAG("sqs_long_delays", schedule=None, doc_md=__doc__, tags=TAGS):
    install = TopologyInstallOperator(
        task_id="install", conn_id="delayed_sqs", destinations=[QUEUE], create_destinations=True
    )
    send = DelayedSendOperator(
        task_id="send",
        conn_id="delayed_sqs",
        destination=QUEUE,
        messages=[
            # SQS delays the first in its destination; the second is too far off and waits in `long-delays-delay.fifo`
            {"value": "in 14 minutes and 5 seconds", "delay_seconds": 845},
            {"value": "in 32 minutes and 5 seconds", "delay_seconds": 1925},
        ],
    )
    install >> send

# Every 15 minutes it sends the waiting messages on. A run ends after six hours and the next one begins at once, so that
# logs stay small and a new version of this file takes effect. Between two runs messages wait for some seconds longer.
with DAG(
    "sqs_long_delays_cycle",
    schedule="@continuous",
    max_active_runs=1,
    catchup=False,
    doc_md=__doc__,
    tags=TAGS,
):
    cycle = FifoCycleSensor(
        task_id="cycle",
        conn_id="delayed_sqs",
        destination=[QUEUE],
        until=timedelta(hours=6),
        deferrable=True,
        max_late=timedelta(minutes=1),
        # without a pause between retries failing runs would follow each other at once
        retries=5,
        retry_delay=timedelta(minutes=1),
    )
