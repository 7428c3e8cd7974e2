"""How long after a run the next one comes, if the DAG's timetable says so."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any


def until_next_run(timetable: Any, after: datetime) -> timedelta | None:
    """Return the time from a run to the next that its timetable makes; None: that is not known.

    Known are schedules of a fixed timedelta, and cron expressions.

    :param timetable: of a DAG, as its author writes it.
    :param after: when the run was due, aware.
    """
    delta = getattr(timetable, "delta", None)
    if delta is not None:
        # a relativedelta, such as a month, has not the same length each time
        return after + delta - after  # type: ignore[no-any-return]
    expression, zone = getattr(timetable, "expression", None), getattr(timetable, "timezone", None)
    if expression is None or zone is None:
        return None
    from airflow.timetables.base import DataInterval, TimeRestriction
    from airflow.timetables.trigger import CronTriggerTimetable
    from pendulum import instance

    found = CronTriggerTimetable(expression, timezone=zone).next_dagrun_info(
        last_automated_data_interval=DataInterval.exact(instance(after)),
        restriction=TimeRestriction(earliest=None, latest=None, catchup=True),
    )
    return None if found is None else timedelta(seconds=found.run_after.timestamp() - after.timestamp())


def scheduled(context: Mapping[str, Any]) -> tuple[Any, datetime] | None:
    """Return the timetable of the run that a task belongs to, and when it was due.

    None if no timetable made the run: it was started by hand or by another DAG.
    """
    dag, run = context.get("dag"), context.get("dag_run")
    if dag is None or run is None or getattr(run.run_type, "value", run.run_type) != "scheduled":
        return None
    return dag.timetable, run.run_after
