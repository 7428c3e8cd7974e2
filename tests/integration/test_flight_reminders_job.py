"""The example's Spark job, run by spark-submit as Airflow runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone
from pathlib import Path

import pyarrow.dataset as parquet
import pytest
from support.flights import flights as all_flights
from support.flights import key, second

from services import java

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "dags/jobs/flight_reminders_job.py"
KEY = ("departs", "carrier", "flight", "origin")

Submit = Callable[..., list[dict]]


@pytest.fixture(scope="module")
def flights() -> list[dict[str, str]]:
    return all_flights()


def submit(output: Path, *arguments: str) -> list[dict]:
    """Run the job and return its rows in the order in which they were written."""
    java.require()
    env = {name: value for name, value in os.environ.items() if name not in ("SPARK_HOME", "FLIGHTS_IN_ANY_ORDER")}
    env |= {"PATH": f"{Path(sys.executable).parent}:{env['PATH']}", "PYSPARK_PYTHON": sys.executable}
    env |= {"SPARK_LOCAL_IP": "127.0.0.1"}
    done = subprocess.run(
        ["spark-submit", "--master", "local[2]", str(JOB), "--output", str(output), *arguments],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return parquet.dataset(output).to_table().to_pylist(maps_as_pydicts="strict")


def of_day(flights: list[dict[str, str]], month: int, day: int) -> list[dict[str, str]]:
    return [row for row in flights if (int(row["month"]), int(row["day"])) == (month, day)]


def test_carrier_flight_and_origin_name_a_days_flight(flights: list[dict[str, str]]) -> None:
    keys = {(row["month"], row["day"], *key(row)) for row in flights}
    assert len(flights) == len(keys) == 336_776


def test_a_replayed_day_begins_when_it_is_computed(flights: list[dict[str, str]], tmp_path: Path) -> None:
    output = tmp_path / "reminders"
    before = datetime.now(timezone.utc)
    first = submit(output, "--day", "2026-06-14", "--hours-before", "2", "--replay-seconds", "24", "--lead", "5")
    after = datetime.now(timezone.utc)
    assert (output / "_SUCCESS").exists()
    assert [*first[0]] == ["due_at", "value", "headers", "tag", *KEY]

    # 24 seconds for 24 hours: an hour a second, from two hours before midnight
    starts = datetime.fromisoformat(json.loads(Path(f"{output}.clock.json").read_text())["starts"])
    assert before < starts - timedelta(seconds=5) < after
    wanted = {key(row): timedelta(seconds=second(row)) / 3600 for row in of_day(flights, 6, 14)}
    assert len(first) == len(wanted) == 989
    for row in first:
        assert abs(row["due_at"] - starts - wanted[row["carrier"], row["flight"], row["origin"]]) < timedelta(
            seconds=1e-3
        )
        assert row["departs"] - row["due_at"] == timedelta(seconds=2)
        assert row["tag"] == f"{row['carrier']}{row['flight']}"
    assert json.loads(first[0]["value"]).keys() == {"flight", "carrier", "origin", "dest", "departs"}


def test_a_leap_day_shows_the_day_before() -> None:
    sys.path.insert(0, str(JOB.parent))
    try:
        from flight_reminders_job import day_of_2013
    finally:
        sys.path.remove(str(JOB.parent))
    assert day_of_2013(date(2028, 2, 29)) == date(2013, 2, 28)
    assert day_of_2013(date(2026, 12, 31)) == date(2013, 12, 31)
