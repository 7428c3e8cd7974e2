"""A function and a query that give other rows each time; the worker of the first try is killed in the middle."""

from __future__ import annotations

import os
import signal
from datetime import datetime, timedelta
from pathlib import Path
from uuid import uuid4

from airflow.sdk import DAG, get_current_context, task

from airflow_delayed.message import utcnow
from airflow_delayed.operators.send import DelayedSendOperator
from airflow_delayed.sources import SqlSource

ROWS = 6000
_asked = 0


def mortal_clock() -> datetime:
    """Kill the first try's worker when some of its messages are confirmed: a send asks for the time again and again."""
    global _asked
    _asked += 1
    if _asked > 20 and get_current_context()["ti"].try_number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return utcnow()


# a task runs in a process of its own, which reads this file alone
DelayedSendOperator.clock = staticmethod(mortal_clock)

with DAG("spooled", schedule=None, catchup=False):
    common = {"conn_id": "delayed_rabbitmq", "destination": "spooled", "delay": 0}
    common |= {"retries": 1, "retry_delay": timedelta(0)}

    @task.delayed_send(**common)
    def yields(folder, rows, dag_run=None):
        with Path(folder, "runs").open("a") as runs:
            runs.write(f"{dag_run.dag_id}\n")
        for _ in range(rows):
            yield {"value": f"function {uuid4()}"}

    yields("{{ dag_run.conf.folder }}", ROWS)
    DelayedSendOperator(
        task_id="selects",
        source=SqlSource(
            "SELECT 'query ' || gen_random_uuid() AS value FROM generate_series(1, %(rows)s)",
            "delayed_store",
            parameters={"rows": ROWS},
        ),
        **common,
    )
