"""df.writeStream.format("delayed") in local mode: batches that are replayed, rows that are rejected, modes."""

from __future__ import annotations

import json
import os
from collections import Counter
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from support.rabbitmq import VirtualHost
from support.spark import Connections

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.message import utcnow

HOUR = timedelta(hours=1)
SCHEMA = "number long, value string, due_at timestamp"


class Source:
    """A folder of JSON files, each of which becomes a batch, with its checkpoint and what the sink writes."""

    def __init__(self, spark: SparkSession, folder: Path, connections: Connections) -> None:
        self.spark = spark
        self.folder = folder
        self._connections = connections
        self._files = 0
        (folder / "rows").mkdir()

    def add(self, *rows: dict) -> None:
        """Write a file, which is newer than those before it: a stream takes the oldest first."""
        lines = "".join(json.dumps(row, default=str) + "\n" for row in rows)
        file = self.folder / f"{self._files:03}.json"
        file.write_text(lines)
        moment = 1_700_000_000 + self._files
        os.utime(file, (moment, moment))
        # a stream takes a file as it finds it
        file.rename(self.folder / "rows" / file.name)
        self._files += 1

    def rows(self) -> DataFrame:
        reader = self.spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1)
        return reader.json(str(self.folder / "rows"))

    def run(self, frame: DataFrame | None = None, mode: str = "append", **options: object) -> None:
        """Send all that is new, as a user does."""
        frame = self.rows().drop("number").withColumn("tag", F.col("value")) if frame is None else frame
        given = {
            "deliver": "broker",
            "destination": "mail",
            "past_due": "send",
            "rejects": self.folder / "rejects",
            "manifest": self.folder / "counts",
            "connections_file": self._connections.path,
            "checkpointLocation": self.folder / "checkpoint",
            **options,
        }
        writer = frame.writeStream.format("delayed").outputMode(mode).trigger(availableNow=True)
        for name, value in given.items():
            if value is not None:
                writer = writer.option(name, str(value))
        writer.start().awaitTermination()

    @property
    def query(self) -> str:
        return json.loads((self.folder / "checkpoint/metadata").read_text())["id"]

    def forget_commits(self) -> None:
        """Let Spark replay the last batch, as after a driver that was killed before it noted its commit."""
        last = max((self.folder / "checkpoint/commits").glob("[0-9]*"), key=lambda path: int(path.name))
        last.unlink()
        last.with_name(f".{last.name}.crc").unlink(missing_ok=True)

    def counts(self) -> list[dict]:
        files = sorted((self.folder / "counts" / self.query).iterdir())
        return [json.loads(file.read_text())["summary"] for file in files]


@pytest.fixture
def source(spark: SparkSession, tmp_path: Path, connections: Connections, vhost: VirtualHost) -> Source:
    connections.add("broker", **vhost.connection)
    vhost.declare("mail")
    return Source(spark, tmp_path, connections)


def rows(*numbers: int, due: timedelta = HOUR) -> list[dict]:
    return [{"number": number, "value": f"body {number}", "due_at": utcnow() + due} for number in numbers]


@pytest.mark.timeout(600)
def test_batches_a_replay_and_rows_that_cannot_be_sent(source: Source, store: DelayedStoreHook) -> None:
    source.add(*rows(*range(20)))
    source.add({"number": 20, "due_at": utcnow() + HOUR}, *rows(*range(21, 30)))
    source.run(store="waits")
    first = {one.message_id: one.tag for one in store.list(limit=100)}
    assert sorted(first.values()) == sorted(f"body {number}" for number in range(30) if number != 20)
    (rejected,) = (source.folder / "rejects" / source.query / "000000001").glob("*.jsonl")
    (row,) = map(json.loads, rejected.read_text().splitlines())
    assert row["rejected"]["column"] == "value"

    # the last batch once more, in another session's query
    source.forget_commits()
    source.run(store="waits")
    assert {one.message_id: one.tag for one in store.list(limit=100)} == first
    counts = source.counts()
    assert [(one["rows"], one["stored"], one["duplicates"], one.get("rejected", 0)) for one in counts] == [
        (20, 20, 0, 0),
        (10, 0, 9, 1),
    ]
    # the rows of a file that has not been read yet, and no other
    source.add(*rows(30))
    source.run(store="waits")
    assert [one["rows"] for one in source.counts()] == [20, 10, 1]
    assert store.count() == 30


@pytest.mark.timeout(600)
def test_a_broker_alone_gets_a_replayed_batch_again_with_the_same_ids(source: Source, vhost: VirtualHost) -> None:
    source.add(*rows(*range(5), due=timedelta(0)))
    source.run()
    source.forget_commits()
    source.run()
    assert vhost.count("mail") == 10
    ids = Counter(one.message_id for one in vhost.collect("mail", enough=5, more=1))
    assert list(ids.values()) == [2] * 5


@pytest.mark.timeout(600)
def test_a_delay_counts_from_when_its_batch_was_planned_also_in_a_replay(
    source: Source, store: DelayedStoreHook
) -> None:
    source.add(*rows(1))
    # Spark keeps it with the batch
    frame = source.rows().select("value", F.current_timestamp().alias("planned"))
    before = datetime.now(timezone.utc) - timedelta(seconds=1)
    options = {"store": "waits", "until_due": "true", "delay": "PT30M", "delay_from": "planned"}
    source.run(frame, **options)
    source.forget_commits()
    source.run(frame, **options)
    (found,) = store.list()
    assert before <= found.due_at - timedelta(minutes=30) <= utcnow()


@pytest.mark.timeout(600)
def test_what_no_stream_can_be(source: Source) -> None:
    source.add(*rows(1))
    counted = source.rows().groupBy("value").count()
    counted = counted.select("value", F.current_timestamp().alias("due_at"))
    with pytest.raises(StreamingQueryException, match=r"use outputMode\('append'\) instead of 'complete'"):
        source.run(counted, mode="complete")
    with pytest.raises(Exception, match="does not support Update mode"):
        source.run(counted, mode="update", checkpointLocation=source.folder / "update")
    with pytest.raises(AnalysisException, match="checkpointLocation must be specified"):
        source.run(checkpointLocation=None)
    with pytest.raises(StreamingQueryException, match="a stream needs the option past_due"):
        source.run(past_due=None, checkpointLocation=source.folder / "options")
