"""When the run is due that follows another one, by the DAG's schedule."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import (
    DAG,
    Asset,
    AssetOrTimeSchedule,
    CronDataIntervalTimetable,
    CronTriggerTimetable,
    DeltaDataIntervalTimetable,
    MultipleCronTriggerTimetable,
)

from airflow_delayed.notifications.missed_run import _next_time


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=timezone.utc)


@pytest.mark.parametrize("catchup", [True, False])
@pytest.mark.parametrize(
    "schedule, run_after, following",
    [
        ("@daily", "2026-01-05T00:00", "2026-01-06T00:00"),
        # a run of the second day of a week, weekly
        ("0 3 * * 1", "2026-01-05T03:00", "2026-01-12T03:00"),
        (timedelta(hours=6), "2026-01-05T01:23", "2026-01-05T07:23"),
        # an interval ends when its run is due
        (CronDataIntervalTimetable("0 * * * *", timezone="UTC"), "2026-01-05T10:00", "2026-01-05T11:00"),
        (DeltaDataIntervalTimetable(timedelta(hours=2)), "2026-01-05T10:00", "2026-01-05T12:00"),
        (
            MultipleCronTriggerTimetable("0 3 * * *", "0 9 * * *", timezone="UTC"),
            "2026-01-05T03:00",
            "2026-01-05T09:00",
        ),
        (
            AssetOrTimeSchedule(timetable=CronTriggerTimetable("0 3 * * *", timezone="UTC"), assets=[Asset("orders")]),
            "2026-01-05T03:00",
            "2026-01-06T03:00",
        ),
        # both nights in which the clocks change
        (CronTriggerTimetable("0 3 * * *", timezone="Europe/Berlin"), "2026-03-28T02:00", "2026-03-29T01:00"),
        (CronTriggerTimetable("0 3 * * *", timezone="Europe/Berlin"), "2026-10-24T01:00", "2026-10-25T02:00"),
    ],
)
def test_the_next_time_is_that_of_the_schedule_whatever_time_it_is_now(
    schedule: Any, run_after: str, following: str, catchup: bool
) -> None:
    dag = DAG("etl", schedule=schedule, catchup=catchup, start_date=at("2026-01-01"))
    assert _next_time(dag, at(run_after), None) == at(following)


def test_the_data_interval_of_the_run_counts_where_airflow_passes_it() -> None:
    dag = DAG("etl", schedule=CronDataIntervalTimetable("0 0 * * *", timezone="UTC"), start_date=at("2026-01-01"))
    run = SimpleNamespace(data_interval_start=at("2026-01-04"), data_interval_end=at("2026-01-05"))
    assert _next_time(dag, at("2026-01-05"), run) == at("2026-01-06")


def test_no_run_follows_the_end_of_a_dag() -> None:
    dag = DAG("etl", schedule="@daily", start_date=at("2026-01-01"), end_date=at("2026-01-05T12:00"))
    assert _next_time(dag, at("2026-01-04"), None) == at("2026-01-05")
    assert _next_time(dag, at("2026-01-05"), None) is None
