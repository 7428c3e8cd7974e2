"""Messages due in over 15 minutes through Amazon SQS alone, without a store.

`sqs_long_delays` makes the queues and sends one message of each kind: one that SQS itself holds back, in its
destination, and one that is further off than SQS can delay and waits in `long-delays-delay.fifo`.

`sqs_long_delays_cycle` is what sends the second one on, every 15 minutes, and has to run for as long as messages wait:
without it they are late, and lost after 14 days. Unpause it after a run of the other.

Connection: `delayed_sqs` (aws) with `"unrestricted_delay": true` in its extra, the choice to delay in this way.
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
            {"value": "in 14 minutes and 5 seconds", "delay_seconds": 845},
            {"value": "in 32 minutes and 5 seconds", "delay_seconds": 1925},
        ],
    )
    install >> send

# A run ends after a while and the next one begins at once: logs and XComs stay small, and a new version of this file is
# taken up. Between two runs messages wait for some seconds more; shorter runs mean more such moments.
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
        # a failed run would be followed by the next at once, and that by another
        retries=5,
        retry_delay=timedelta(minutes=1),
    )
