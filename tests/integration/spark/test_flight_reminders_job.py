"""The example's Spark job, in the tests' session: under spark-submit the demo and the live Airflow run it."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from pyspark.sql import SparkSession
from support.flights import flights as all_flights
from support.flights import key, second

ROOT = Path(__file__).resolve().parents[3]
JOB = ROOT / "dags/jobs/flight_reminders_job.py"
KEY = ("departs", "carrier", "flight", "origin")

Run = Callable[..., list[dict]]


@pytest.fixture(scope="module")
def flights() -> list[dict[str, str]]:
    return all_flights()


@pytest.fixture
def job(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the job with arguments, and return its rows in the order in which they were written."""
    monkeypatch.delenv("FLIGHTS_IN_ANY_ORDER", raising=False)
    # it ends its session as it ends; other tests go on with this one
    monkeypatch.setattr(SparkSession, "stop", lambda session: None)

    def run(output: Path, *arguments: str) -> list[dict]:
        monkeypatch.setattr(sys, "argv", [str(JOB), "--output", str(output), *arguments])
        runpy.run_path(str(JOB), run_name="__main__")
        written = parquet.read_table(output, coerce_int96_timestamp_unit="us")
        for name in ("due_at", "departs"):
            # of Spark's timestamps pyarrow reads UTC, and no time zone
            moments = written[name].cast(pa.timestamp("us", tz="UTC"))
            written = written.set_column(written.schema.get_field_index(name), name, moments)
        return written.to_pylist(maps_as_pydicts="strict")

    return run


def of_day(flights: list[dict[str, str]], month: int, day: int) -> list[dict[str, str]]:
    return [row for row in flights if (int(row["month"]), int(row["day"])) == (month, day)]


def test_a_replayed_day_begins_when_it_is_computed(flights: list[dict[str, str]], job: Run, tmp_path: Path) -> None:
    output = tmp_path / "reminders"
    before = datetime.now(timezone.utc)
    first = job(output, "--day", "2026-06-14", "--hours-before", "2", "--replay-seconds", "24", "--lead", "5")
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
