"""Messages as Spark writes them to Parquet, with times of both nights in which clocks change; it needs pyspark alone.

``python tests/support/spark_times.py FOLDER`` writes them with the Spark that is installed, into a folder named after
its version: so tests/unit/intake/spark_files was recorded.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ZONE = "Europe/Berlin"
#: Every quarter of an hour from midnight on, as clocks go forward and back: seconds since 1970.
MOMENTS = [
    night + quarter * 900
    for night in (1_774_738_800, 1_792_879_200)  # 29 March and 25 October 2026
    for quarter in range(20)
]
#: 31 December 1889, 0:00 UTC, for which Spark's legacy mode writes another number.
OLD = -2_524_608_000
#: What each file is written with; Spark's defaults but for that.
KINDS: dict[str, dict[str, str]] = {
    "default": {},
    "micros": {"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS"},
    "ntz": {},
    "legacy": {"spark.sql.parquet.int96RebaseModeInWrite": "LEGACY"},
}


def messages(spark: SparkSession, kind: str) -> DataFrame:
    """Return a row for each moment. Its value is the moment in seconds, which no setting of a time zone changes."""
    from pyspark.sql import functions as F  # noqa: N812

    moments = [*MOMENTS, OLD] if kind == "legacy" else MOMENTS
    made = spark.createDataFrame([(moment,) for moment in moments], "moment long").coalesce(1)
    due_at = F.timestamp_seconds("moment")
    return made.select(
        F.col("moment").cast("string").alias("value"),
        # the wall clock in the session's time zone
        (due_at.cast("timestamp_ntz") if kind == "ntz" else due_at).alias("due_at"),
        F.create_map(F.lit("content-type"), F.lit("text/plain")).alias("headers"),
    )


def write(spark: SparkSession, kind: str, folder: Path) -> None:
    """Write the rows, with Spark's settings of that kind of file."""
    settings = {"spark.sql.session.timeZone": ZONE, **KINDS[kind]}
    before = {name: spark.conf.get(name, None) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        messages(spark, kind).write.parquet(str(folder))
    finally:
        for name, value in before.items():
            if value is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, value)


def record(into: Path) -> None:
    """Write one file of each kind."""
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
    into = into / spark.version
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for kind in KINDS:
            write(spark, kind, Path(scratch, kind))
            [part] = Path(scratch, kind).glob("part-*.parquet")
            shutil.copy(part, into / f"{kind}.parquet")
    spark.stop()


if __name__ == "__main__":
    record(Path(sys.argv[1]))
