"""flight_reminders_days of dags/flight_reminders.py: a Spark job and a send for each day; Spark is real, SQS is not."""

from __future__ import annotations

import gc
import os
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from support.examples import dags_of
from support.flights import flights, key, second

from services import airflow, java

NEW_YORK = ZoneInfo("America/New_York")


# SparkSubmitHook leaves the pipe to spark-submit open
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_each_days_reminders_wait_for_their_flights(here: Path, tmp_path: Path, delayed, connect, run_dag, monkeypatch):
    java.require()
    for name in ("SPARK_HOME", "FLIGHTS_IN_ANY_ORDER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    monkeypatch.setenv("FLIGHT_REMINDERS_FOLDER", str(tmp_path))
    connect("spark_default", **airflow.LOCAL_SPARK)
    delayed.connection("delayed_sqs", "aws")
    # the clocks of New York go forward at 2:00 on 8 March 2026: five hours before six is midnight
    delayed.move_to(datetime(2026, 3, 6, 12, tzinfo=timezone.utc))
    dag = dags_of(here / "dags/flight_reminders.py", monkeypatch)["flight_reminders_days"]
    run = run_dag(dag, run_conf={"first": "2026-03-07", "days": 2, "hours_before": 5})
    assert run.state == "success"
    # and not in another test, which would be blamed
    gc.collect()

    wanted = {}
    for row in flights():
        if row["month"] == "3" and row["day"] in ("7", "8"):
            departs = datetime(2026, 3, int(row["day"])) + timedelta(seconds=second(row))
            due = departs.replace(tzinfo=NEW_YORK).astimezone(timezone.utc) - timedelta(hours=5)
            wanted[(row["day"], *key(row))] = due
    assert len(wanted) > 1500
    assert delayed.sent == []
    assert sorted(one.due_at for one in delayed.held) == sorted(wanted.values())
    assert {one.tag for one in delayed.held} == {f"{carrier}{flight}" for _, carrier, flight, _ in wanted}
    assert not list(tmp_path.rglob("*.clock.json"))

    delayed.move_to(min(wanted.values()))
    assert min(one.due_at for one in delayed.dispatch()) == delayed.now
    assert len(delayed.arrived("flight-reminders")) == list(wanted.values()).count(delayed.now)
