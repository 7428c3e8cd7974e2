"""Sends whose worker is killed in the middle or at the end; that are marked failed while they send."""

from __future__ import annotations

import os
import signal
import time
from datetime import datetime, timedelta

from airflow.sdk import DAG

from airflow_delayed.message import utcnow
from airflow_delayed.operators.send import DelayedSendOperator


class LostAfterwards(DelayedSendOperator):
    """The worker of its first try is lost when all is sent, before Airflow knows of it."""

    def execute(self, context):
        summary = super().execute(context)
        if context["ti"].try_number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return summary


class SlowSend(DelayedSendOperator):
    """A send that takes its time: it asks for the present before each block of messages."""

    @staticmethod
    def clock() -> datetime:
        time.sleep(0.5)
        return utcnow()


with DAG("crowd", schedule=None, catchup=False):
    DelayedSendOperator(
        task_id="send",
        conn_id="delayed_rabbitmq",
        destination="crowd",
        source="{{ dag_run.conf.source }}",
        delay=0,
        retries=1,
        retry_delay=timedelta(0),
    )

with DAG("lost", schedule=None, catchup=False):
    LostAfterwards(
        task_id="send",
        conn_id="delayed_rabbitmq",
        destination="lost",
        messages=[{"value": f"{number}", "delay_seconds": 0} for number in range(100)],
        retries=1,
        retry_delay=timedelta(0),
    )

with DAG("ended", schedule=None, catchup=False):
    SlowSend(
        task_id="send",
        conn_id="delayed_rabbitmq",
        destination="ended",
        source="{{ dag_run.conf.source }}",
        delay=0,
    )
