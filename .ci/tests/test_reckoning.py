"""The demo's own arithmetic: it must see what it is there to see."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from reckoning import Arrival, computed, reckon
from support.spark_times import MOMENTS

DUE = {"a": 100.0, "b": 200.0}


@pytest.mark.parametrize(
    "arrivals, wanted",
    [
        ([("a", 100.0), ("b", 200.5)], {"arrived": 2}),
        ([("a", 100.5)], {"arrived": 1, "missing": 1}),
        ([("a", 99.999), ("b", 200.5)], {"arrived": 2, "early": 1}),
        # a late copy does not hide an early one
        ([("a", 101.0), ("a", 99.0), ("b", 201.0)], {"arrived": 2, "early": 1, "twice": 1}),
        ([("a", 100.0), ("b", 200.0), ("c", 1.0)], {"arrived": 2, "strange": 1}),
    ],
)
def test_reckon(arrivals: list[tuple[str, float]], wanted: dict[str, int]) -> None:
    result = reckon(DUE, [Arrival(id="1", body=body, arrived=when) for body, when in arrivals])
    everything = {"computed": 2, "arrived": 0, "early": 0, "missing": 0, "twice": 0, "strange": 0} | wanted
    assert {name: getattr(result, name) for name in everything} == everything
    assert result.kept == (wanted == {"arrived": 2})


@pytest.mark.parametrize("kind", ["default", "micros"])
def test_what_spark_computed_is_read_in_utc(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    shutil.copy(here / "tests/unit/intake/spark_files/4.2.0" / f"{kind}.parquet", tmp_path)
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        assert computed(tmp_path) == {str(moment): float(moment) for moment in MOMENTS}
    finally:
        monkeypatch.undo()
        time.tzset()


def test_quantiles_are_latenesses_that_occurred() -> None:
    due = {str(i): 0.0 for i in range(1, 101)}
    result = reckon(due, [Arrival(id=str(i), body=str(i), arrived=float(i)) for i in range(1, 101)])
    assert [result.quantile(share) for share in (0.5, 0.99, 1)] == [50, 99, 100]


def test_nothing_computed_is_no_success() -> None:
    assert not reckon({}, []).kept
