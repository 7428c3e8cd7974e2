"""A standalone Spark cluster and its faults: what arrived, what twice, and that nothing is lost or unknown."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest
from pyspark.sql import DataFrame, SparkSession
from support.rabbitmq import VirtualHost
from support.spark import Connections, environment, rows, send, session
from support.stores import run_sql

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.message import utcnow
from services import spark as service

#: A cluster starts in seconds, or in minutes on a machine that has much else to do.
pytestmark = [pytest.mark.timeout(900), pytest.mark.long]

#: Of a job, and so many tasks at a time; half of them are for the broker, half for the store.
PARTITIONS = 4
#: Rows of each half, and of an Arrow batch, of which a partition has eight.
BATCH = 125
ROWS = PARTITIONS // 2 * 8 * BATCH
HOUR = timedelta(hours=1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[service.Cluster]:
    with service.running(env=environment()) as running:
        yield running


@contextmanager
def application(cluster: service.Cluster, **conf: str) -> Iterator[SparkSession]:
    made = session(
        cluster.url,
        **{
            # two executors
            "spark.executor.cores": str(PARTITIONS // 2),
            "spark.executor.memory": "512m",
            "spark.cores.max": str(PARTITIONS),
            # both executors are there before the first task is given to one
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
            "spark.driver.host": "127.0.0.1",
            "spark.sql.execution.arrow.maxRecordsPerBatch": str(BATCH),
            # batches go to Python as they come
            "spark.buffer.size": "4096",
            "spark.speculation": "false",
            **conf,
        },
    )
    try:
        yield made
    finally:
        made.stop()


@dataclass
class World:
    """A broker that takes what is due now, and a store for what is due in an hour."""

    vhost: VirtualHost
    store: DelayedStoreHook
    connections: Connections
    folder: Path
    jobs: int = 0

    def frame(self, spark: SparkSession, fault: Callable) -> DataFrame:
        """Half of the rows for the broker, half for the store; ``fault`` sees each Arrow batch on its way."""
        now = utcnow()
        self.jobs += 1
        near = rows(spark, ROWS, due_at=now, prefix=f"near{self.jobs}-", partitions=PARTITIONS // 2)
        far = rows(spark, ROWS, due_at=now + HOUR, prefix=f"far{self.jobs}-", partitions=PARTITIONS // 2)
        both = near.union(far)
        return both.mapInArrow(fault, both.schema)

    def send(self, frame: DataFrame) -> dict:
        manifest = self.folder / "manifest.json"
        options = {"store": "waits", "hold_over": 600, "batch_rows": BATCH, "attempts": self.folder / "attempts"}
        send(frame, self.connections, "broker", manifest=manifest, **options)
        return json.loads(manifest.read_text())

    def check(self, told: dict) -> Counter:
        """Count what arrived; return what came more than once from the broker."""
        arrived: Counter = Counter()
        while self.vhost.count("mail"):
            arrived.update(one.message_id for one in self.vhost.collect("mail", enough=1, more=1))
        wanted = {f"near{self.jobs}-{number}" for number in range(ROWS)}
        assert wanted - arrived.keys() == set()  # lost
        assert arrived.keys() - wanted == set()  # unknown
        table = self.store.tables.messages
        with self.store.engine.connect() as connection:
            stored = Counter(connection.execute(table.select().with_only_columns(table.c.Id)).scalars())
        # neither lost nor unknown nor twice
        assert stored == Counter(f"far{job + 1}-{number}" for job in range(self.jobs) for number in range(ROWS))
        summary = told["summary"]
        assert summary["rows"] == summary["sent"] + summary["stored"] + summary["duplicates"] == 2 * ROWS
        # what attempts told before they ended, they had done
        assert summary["sent"] + told["other_attempts"]["sent"] <= arrived.total()
        return arrived - Counter(wanted)


@pytest.fixture
def world(vhost: VirtualHost, postgres_url: str, connections: Connections, connect, tmp_path: Path) -> Iterator[World]:
    connections.add("broker", **vhost.connection)
    connect("broker", **vhost.connection)
    vhost.declare("mail")
    schema = f"spark_{uuid4().hex[:8]}"
    run_sql(postgres_url, f'CREATE SCHEMA "{schema}"')
    connections.add_postgres("waits", postgres_url, schema)
    connect("waits", connections.json("waits"))
    store = DelayedStoreHook("waits", "broker")
    store.install([])
    yield World(vhost, store, connections, tmp_path)
    store.close()
    run_sql(postgres_url, f'DROP SCHEMA "{schema}" CASCADE')


# Spark takes functions within functions along; those of this module its executors would look for


def waiting_half_way(fault: str) -> Callable:
    """Hold the first attempt at each partition, when half of its rows are through, until the fault has been made.

    :param fault: the path of a file that is there then.
    """

    def let_through(batches):
        from pyspark import TaskContext

        deadline = time.monotonic() + 150
        for number, batch in enumerate(batches):
            stopped = number >= 4 and TaskContext.get().attemptNumber() == 0
            while stopped and not os.path.exists(fault) and time.monotonic() < deadline:
                time.sleep(0.05)
            yield batch

    return let_through


def failing_half_way() -> Callable:
    """Fail the first attempt at each partition when half of its rows are through."""

    def let_through(batches):
        from pyspark import TaskContext

        for number, batch in enumerate(batches):
            if number == 4 and TaskContext.get().attemptNumber() == 0:
                raise RuntimeError("made to fail")
            yield batch

    return let_through


def straggling() -> Callable:
    """Let the first attempt at two of the partitions hang when half of its rows are through."""

    def let_through(batches):
        from pyspark import TaskContext

        context = TaskContext.get()
        for number, batch in enumerate(batches):
            if number == 4 and context.attemptNumber() == 0 and context.partitionId() in (0, 2):
                time.sleep(600)
            yield batch

    return let_through


def test_an_executor_is_killed_and_a_task_fails(cluster: service.Cluster, world: World, tmp_path: Path) -> None:
    with application(cluster) as spark:
        killed: list[int] = []
        over = threading.Event()
        fault = tmp_path / "killed"

        def kill() -> None:
            # when some have arrived and some are stored; no task ends before
            while not (world.store.count() and world.vhost.count("mail")):
                if over.wait(0.5):
                    return
            killed.append(cluster.kill_executor())
            fault.touch()

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            told = world.send(world.frame(spark, waiting_half_way(str(fault))))
        finally:
            over.set()
            killer.join()
        assert killed
        assert killed[0] not in cluster.executors()
        assert told["repeated"] > 0
        world.check(told)

        told = world.send(world.frame(spark, failing_half_way()))
        assert (told["partitions"], told["repeated"]) == (PARTITIONS, PARTITIONS)
        assert world.check(told).total() <= ROWS // 2


@pytest.mark.long
def test_speculation(cluster: service.Cluster, world: World) -> None:
    conf = {
        "spark.speculation": "true",
        "spark.speculation.interval": "100ms",
        "spark.speculation.quantile": "0.5",
        # when half of the tasks have ended, the others are stragglers, however long that took
        "spark.speculation.multiplier": "0.01",
        "spark.speculation.efficiency.enabled": "false",
    }
    with application(cluster, **conf) as spark:
        told = world.send(world.frame(spark, straggling()))
    # a copy of each straggler won; half of its rows the straggler itself had let through at most
    assert (told["partitions"], told["repeated"]) == (4, 2)
    assert world.check(told).total() <= ROWS // 4
