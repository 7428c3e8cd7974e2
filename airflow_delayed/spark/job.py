"""A ready Spark application: reads a table, a query or files, and sends the rows as delayed messages.

    spark-submit .../airflow_delayed/spark/job.py --source s3a://bucket/reminders --format parquet \\
        --set deliver=broker --set destination=mail --set manifest=s3a://bucket/runs/1.json
    python -m airflow_delayed.spark.job --query "SELECT * FROM shop.reminders WHERE day = '2026-01-31'" --set ...

It needs no Airflow. ``--set`` takes the options of :class:`airflow_delayed.spark.sink.DelayedDataSource`.
DelayedSparkSendOperator runs it. Its log tells how many partitions are done, every ten seconds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager

from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession

from airflow_delayed.spark.reporting import EVERY, logger
from airflow_delayed.threads import Ticker


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="airflow_delayed.spark.job", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", help="a table of Spark's catalog")
    parser.add_argument("--source", help="files, by their path or URL; in --query they are the view `source`")
    parser.add_argument("--query", help="a query in Spark's SQL, over tables or over the view `source`")
    parser.add_argument("--format", default="parquet", help="the format of the files: parquet, json, csv, orc, ...")
    parser.add_argument("--schema", help="the files' columns, such as 'value string, due_at timestamp'")
    parser.add_argument(
        "--read", action="append", default=[], type=_pair, metavar="NAME=VALUE", help="an option of the format"
    )
    parser.add_argument(
        "--set", action="append", default=[], type=_pair, metavar="NAME=VALUE", help="an option of the sending"
    )
    parser.add_argument(
        "--partitions", type=int, help="send from so many partitions, and so over no more connections at a time"
    )
    parser.add_argument("--check-first", action="store_true", help="read and check all rows before the first is sent")
    args = parser.parse_args(given)
    if (args.table and (args.source or args.query)) or not (args.table or args.source or args.query):
        parser.error("give --table, --source, --query, or --source with a --query over it")
    if args.partitions is not None and args.partitions < 1:
        parser.error("--partitions must be 1 or more")
    return args


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{name!r} is not NAME=VALUE")
    return name, value


def read(spark: SparkSession, args: argparse.Namespace) -> DataFrame:
    """Return the rows."""
    if args.table:
        frame = spark.read.table(args.table)
    if args.source:
        reader = spark.read.format(args.format).options(**dict(args.read))
        frame = (reader.schema(args.schema) if args.schema else reader).load(args.source)
        frame.createOrReplaceTempView("source")
    if args.query:
        frame = spark.sql(args.query)
    # a shuffle, but of an even spread: to coalesce would have fewer tasks read as well
    return frame.repartition(args.partitions) if args.partitions else frame


def send(frame: DataFrame, options: Mapping[str, str]) -> None:
    """Send the rows."""
    frame.write.format("delayed").mode("append").options(**options).save()


@contextmanager
def progress(context: SparkContext, doing: str, *, every: float = EVERY) -> Iterator[None]:
    """Log every ten seconds, within the block, how many partitions are done."""
    tracker = context.statusTracker()

    def log_stages() -> None:
        for stage in tracker.getActiveStageIds():
            info = tracker.getStageInfo(stage)
            if info is not None:
                logger().info(
                    "%s: %s of %s partitions done, %s at work (stage %s)",
                    doing,
                    f"{info.numCompletedTasks:,}",
                    f"{info.numTasks:,}",
                    f"{info.numActiveTasks:,}",
                    stage,
                )

    with closing(Ticker("delayed-progress", every, log_stages)):
        yield


def main(given: Sequence[str] | None = None) -> None:
    """Read and send."""
    args = arguments(given)
    spark = SparkSession.builder.getOrCreate()
    frame = read(spark, args)
    options = dict(args.set)
    if args.check_first:
        with progress(spark.sparkContext, "checking"):
            send(frame, {name: value for name, value in options.items() if name != "manifest"} | {"dry_run": "true"})
    with progress(spark.sparkContext, "sending"):
        send(frame, options)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
