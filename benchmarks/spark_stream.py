"""One batch of the same rows as stream and as batch into the PostgreSQL store; and the memory of many batches.

    python benchmarks/spark_stream.py [--rounds 3] [--messages 1000000] [--batches 200]

local[2], eight Parquet files, bodies of 200 bytes, ids given. A private PostgreSQL with fsync on, and a database of its
own for each in each round; the rounds alternate. The clock runs from the start of a query, or of a write, to its end.

Then so many batches of 5,000 rows in one query: the largest Python worker after each, on average over the second
quarter and over the last quarter of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import spark_sink
from measured import Measured
from spark_store import connections_of, install
from store_peers import Rounds, Server, alternating, verdict
from store_peers import server as running

STREAM, BATCH = "a stream of one batch", "the same rows as a batch"
ROWS_A_BATCH = 5_000


def run(way: str, folder: str, connections: Path, rows: int, batches: int = 1) -> dict:
    """Send in a process of its own, and return what it measured."""
    from support.spark import environment

    command = [sys.executable, __file__, "--work", way, folder, str(connections), str(rows), str(batches)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    if done.returncode:
        raise SystemExit(f"Spark failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def work(way: str, folder: str, connections: str, rows: int, batches: int) -> None:
    """Make rows, send a few for a start, and then all."""

    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F  # noqa: N812

    builder = SparkSession.builder.master("local[2]").appName("benchmark")
    for name in ("spark.ui.enabled", "spark.ui.showConsoleProgress"):
        builder = builder.config(name, "false")
    spark = builder.config("spark.sql.session.timeZone", "UTC").config("spark.driver.memory", "1g").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    options = {"deliver": "broker", "store": "store", "until_due": "true", "destination": spark_sink.QUEUE}
    options |= {"connections_file": connections, "past_due": "send"}

    def make(name: str, count: int, files: int) -> str:
        frame = spark.range(0, count, 1, files).select(
            F.format_string(f"{name}-%08d", "id").alias("message_id"),
            F.lit(spark_sink.BODY).alias("value"),
            F.timestamp_seconds(F.unix_seconds(F.current_timestamp()) + 3600 + F.col("id") % 1_000_000).alias("due_at"),
        )
        frame.write.mode("append").parquet(f"{folder}/{name}")
        return f"{folder}/{name}"

    def send(source: str, files: int) -> None:
        if way == "batch":
            spark.read.parquet(source).write.format("delayed").mode("append").options(**options).save()
            return
        schema = spark.read.parquet(source).schema
        stream = spark.readStream.schema(schema).option("maxFilesPerTrigger", files).parquet(source)
        writer = stream.writeStream.format("delayed").trigger(availableNow=True).options(**options)
        writer = writer.option("checkpointLocation", f"{source}-checkpoint").option("rejects", f"{source}-rejects")
        writer.start().awaitTermination()

    few = make("few", max(rows // 100, 8), 8)
    files = 8 if batches == 1 else batches
    many = make("many", rows, files)
    send(few, 8)
    sizes: list[float] = []
    done = threading.Event()

    def sample() -> None:
        commits = Path(f"{many}-checkpoint/commits")
        while not done.wait(0.2):
            # Spark keeps the notes of the last hundred batches
            number = max((int(file.name) + 1 for file in commits.glob("[0-9]*")), default=0)
            sizes.extend([spark_sink._peak(os.getpid(), "VmRSS")] * (number - len(sizes)))

    sampler = threading.Thread(target=sample)
    sampler.start()
    before, start = spark_sink._cpu(), time.perf_counter()
    send(many, 8 if batches == 1 else 1)
    seconds = time.perf_counter() - start
    done.set()
    sampler.join()
    cpu, peak = spark_sink._cpu() - before, spark_sink._peak(os.getpid())
    print(json.dumps({"count": rows, "seconds": seconds, "cpu": cpu, "peak": peak, "sizes": sizes}))
    spark.stop()


def one(server: Server, rounds: Rounds, number: int, *, name: str, way: str, count: int) -> None:
    with server.database() as url, tempfile.TemporaryDirectory() as folder:
        install(url)
        found = run(way, folder, connections_of(folder, url), count)
        rounds.note(number, name, Measured(count, found["seconds"], found["cpu"], 0, found["peak"]))


def main() -> int:
    if "--work" in sys.argv:
        way, folder, connections, rows, batches = sys.argv[2:]
        work(way, folder, connections, int(rows), int(batches))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--batches", type=int, default=200)
    options = parser.parse_args()
    rounds, good = Rounds(), True
    with tempfile.TemporaryDirectory(prefix="airflow-delayed-") as home, running() as server:
        os.environ["AIRFLOW_HOME"] = home
        contestants = [
            partial(one, server, rounds, name=STREAM, way="stream", count=options.messages),
            partial(one, server, rounds, name=BATCH, way="batch", count=options.messages),
        ]
        for number in range(1, options.rounds + 1):
            alternating(number, [partial(contestant, number) for contestant in contestants])
        if options.rounds:
            rounds.table()
            good = rounds.ratio(STREAM, BATCH, 0.8, "of the rate of a batch")
        if options.batches:
            with server.database() as url, tempfile.TemporaryDirectory() as folder:
                install(url)
                rows = options.batches * ROWS_A_BATCH
                sizes = run("stream", folder, connections_of(folder, url), rows, options.batches)["sizes"]
            quarter = options.batches // 4
            early, late = statistics.mean(sizes[quarter : 2 * quarter]), statistics.mean(sizes[3 * quarter :])
            print(f"{early:8.1f} MiB and {late:.1f} MiB: the largest Python worker, second and last quarter of batches")
            good = verdict([early / late], 0.95, "of its memory in the last quarter it had in the second") and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
