"""What Spark writes with its default settings, both nights in which clocks change, read by the send operator."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from airflow.sdk.exceptions import AirflowFailException
from pyspark.sql import SparkSession
from support.send_runs import Run
from support.spark_times import MOMENTS, OLD, ZONE, write


def times(run: Run, folder: Path, **options: object) -> list[tuple[int, int]]:
    """Send a folder's rows; return the moment that each body names, and the one at which its message is due."""
    run.execute(source=str(folder), past_due="send", **options)
    start = datetime(1970, 1, 1, tzinfo=timezone.utc)
    return [(int(message.body), (message.due_at - start) // timedelta(seconds=1)) for message in run.transport.sent]


@pytest.mark.parametrize("kind", ["default", "micros"])
def test_each_timestamp_is_the_true_instant(run: Run, spark: SparkSession, tmp_path: Path, kind: str) -> None:
    write(spark, kind, tmp_path / "out")
    assert times(run, tmp_path / "out") == [(moment, moment) for moment in MOMENTS]


def test_each_wall_clock_is_read_in_its_zone(run: Run, spark: SparkSession, tmp_path: Path) -> None:
    write(spark, "ntz", tmp_path / "out")
    with pytest.raises(AirflowFailException, match=r"due_at has no time zone \(timestamp_ntz in Spark's schema\)"):
        times(run, tmp_path / "out")
    sent = times(run, tmp_path / "out", timezone=ZONE)
    # the clock shows an hour of the second night twice, and the first counts
    assert {moment - due for moment, due in sent} == {0, 3600}
    assert sum(moment != due for moment, due in sent) == 4


def test_a_time_before_1900_in_the_old_calendar_is_refused(run: Run, spark: SparkSession, tmp_path: Path) -> None:
    write(spark, "legacy", tmp_path / "out")
    with pytest.raises(AirflowFailException, match=rf"row {len(MOMENTS) + 1}, column due_at: is before 1900"):
        times(run, tmp_path / "out")
    sent = times(run, tmp_path / "out", rejects=str(tmp_path / "rejects.jsonl"))
    assert sent == [(moment, moment) for moment in MOMENTS]
    assert str(OLD) in (tmp_path / "rejects.jsonl").read_text()
