"""When a task's first try began: what relative delays count from, and what "past due" is measured by."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from airflow_delayed.delivery import Clock
from airflow_delayed.message import utc

if TYPE_CHECKING:
    from airflow.sdk import Context

_KEY = "airflow_delayed.first_try"


def first_try(context: Context, clock: Clock) -> datetime:
    """Return the moment at which this task instance's first try began, also after a retry or a clear.

    It is kept in Airflow's task state store, whose rows go with the DAG run; the first call makes it.
    """
    from airflow.sdk.execution_time.context import NEVER_EXPIRE

    states = context["task_state_store"]
    kept = states.get(_KEY)
    if isinstance(kept, str):
        return utc(_KEY, datetime.fromisoformat(kept))
    now = clock()
    states.set(_KEY, now.isoformat(), retention=NEVER_EXPIRE)
    return now
