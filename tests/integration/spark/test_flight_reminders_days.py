"""dags/flight_reminders_days.py: a Spark job and a send for each day; SQS is not real.

In a long run Spark is. In a short one the rows of its job are written without it: the job has tests of its own, and
the demo runs it under SparkSubmitOperator.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from support import flights
from support.examples import dags_of
from support.lengths import length

from services import airflow, java

pytestmark = pytest.mark.long

SPARK = length("Spark jobs of flight_reminders_days", 0, 2)


def without_spark(operator: Any, context: Any) -> None:
    """Write what the job would, by the job's own reading of its arguments."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sys, "argv", [operator.application, *operator.application_args])
        args = runpy.run_path(operator.application)["arguments"]()
    assert (operator._conn_id, args.replay_seconds, args.flights) == ("spark_default", 0, None)
    departure = partial(flights.in_new_york, args.day)
    flights.write_reminders(Path(args.output), args.day, departure, timedelta(hours=args.hours_before))


def test_each_days_reminders_wait_for_their_flights(
    here: Path,
    tmp_path: Path,
    delayed,
    connect,
    spark_submit: None,
    run_dag: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
):
    if SPARK:
        java.require()
        for name in ("SPARK_HOME", "FLIGHTS_IN_ANY_ORDER"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        for name, value in {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1", **java.options()}.items():
            monkeypatch.setenv(name, value)
    else:
        monkeypatch.setattr(SparkSubmitOperator, "execute", without_spark)
    monkeypatch.setenv("FLIGHT_REMINDERS_FOLDER", str(tmp_path))
    connect("spark_default", **airflow.LOCAL_SPARK)
    delayed.connection("delayed_sqs", "aws")
    # the clocks of New York go forward at 2:00 on 8 March 2026: five hours before six is midnight
    delayed.move_to(datetime(2026, 3, 6, 12, tzinfo=timezone.utc))
    dag = dags_of(here / "dags/flight_reminders_days.py", monkeypatch)["flight_reminders_days"]
    run = run_dag(dag, run_conf={"first": "2026-03-07", "days": 2, "hours_before": 5})
    assert run.state == "success"

    wanted = {}
    for day in (date(2026, 3, 7), date(2026, 3, 8)):
        for row in flights.on(day.month, day.day):
            wanted[(day, *flights.key(row))] = flights.in_new_york(day, row) - timedelta(hours=5)
    assert len(wanted) > 1500
    assert delayed.sent == []
    assert sorted(one.due_at for one in delayed.stored) == sorted(wanted.values())
    assert {one.tag for one in delayed.stored} == {f"{carrier}{flight}" for _, carrier, flight, _ in wanted}
    assert not list(tmp_path.rglob("*.clock.json"))

    delayed.move_to(min(wanted.values()))
    assert min(one.due_at for one in delayed.dispatch()) == delayed.now
    assert [one.due_at for one in delayed.sent].count(delayed.now) == list(wanted.values()).count(delayed.now)
