"""A night: Spark computes reminders, half of them due at one second; they are stored, dispatched and counted.

    python benchmarks/night.py [--messages 100000 1000000] [--way operator spark] [--minutes 2]
        [--fault failover | kill | freeze] [--lookahead 900]

Each night has a private PostgreSQL (fsync on), a RabbitMQ, a standalone Spark with one worker, and an Airflow home, all
fresh. A SparkSubmitOperator computes the rows into Parquet, with Spark's default settings. DelayedSendOperator stores
them (way "operator"), or Spark's executors by DelayedSparkSendOperator (way "spark"), with ``hold_over`` of 30 s. Three
``airflow delayed dispatcher`` with their defaults run from the beginning, and deliver to a quorum queue. Half of the
messages are due at "nine o'clock", the others evenly within the minutes after it. A plain pika consumer counts each by
its number.

With a fault, something happens at nine o'clock. "failover": the PostgreSQL freezes (SIGSTOP to all its processes), and
its synchronous standby is promoted 5 s later. "kill": a dispatcher is killed (SIGKILL) and another begun in its place,
ten times, every 8 s. "freeze": a dispatcher stands still for 45 s, longer than its leases (30 s), and then goes on.

With --lookahead the dispatchers hand messages over to the broker so many seconds ahead, not when they are due.

Each task runs by ``airflow dags test`` in a process of its own; its CPU is that of the process, of all that it started,
and of Spark's cluster. CPU is user and system time, of a message; where few and many messages are compared, less that
of a task that only installs. Memory is the most that a process had (VmHWM), and the growth is over what the same kind
of process has without messages.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import pika
import psutil
import psycopg2
from arrivals import BROKER, STORE, cpu, server, service
from support.rabbitmq import VirtualHost, virtual_host
from support.spark import environment

from airflow_delayed.rabbitmq.declare import apply, plan
from airflow_delayed.rabbitmq.topology import DELAYED
from services import postgres, rabbitmq
from services import spark as cluster

QUEUE = "reminders"
DISPATCHERS = 3
#: Seconds between the freeze of the PostgreSQL and the promotion of its standby.
PROMOTED_AFTER = 5
#: How often a dispatcher is killed, and seconds between two kills; seconds for which one stands still.
KILLS, KILLED_EVERY = 10, 8
FROZEN = 45
#: Seconds without an arrival after which what has not come counts as lost.
STUCK = 120
#: Rows a second that are computed and stored at least, from which nine o'clock is planned.
SLOWEST = 5_000
#: Times the CPU of a message, from few messages to many; MiB of a process above what it has without messages.
MOST_GROWTH, MOST_MEMORY = 1.3, 300
_NUMBER = re.compile(rb'"reminder": "(\d+)", "due": (\d+)')
#: What the command line of each kind of process has.
KINDS = {
    "dispatcher": "delayed dispatcher",
    "send task": "dags test night_",
    "Spark's Python worker": "pyspark.daemon",
    "Spark's executor (JVM)": "CoarseGrainedExecutorBackend",
    "broker": "beam.smp",
}

JOB = """
import sys
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

output, count, nine, seconds = sys.argv[1], *map(int, sys.argv[2:])
spark = SparkSession.builder.appName("night").getOrCreate()
number = F.col("id")
late = F.when(number % 2 == 0, F.lit(0)).otherwise(F.floor(F.rand(1) * seconds))
frame = spark.range(count).withColumn("due", F.lit(nine) + late)
frame.select(
    F.timestamp_seconds("due").alias("due_at"),
    F.format_string('{"reminder": "%08d", "due": %d, "text": "' + 150 * "x" + '"}', number, "due").alias("value"),
    number.alias("reminder"),
    F.lit("night").alias("tag"),
).write.parquet(output)
spark.stop()
"""

DAGS = """
import os
from datetime import timedelta
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import DAG
from airflow_delayed.operators.send import DelayedSendOperator
from airflow_delayed.operators.spark import DelayedSparkSendOperator
from airflow_delayed.operators.topology import TopologyInstallOperator

PLAN = os.environ["NIGHT"].split()
SEND = {"conn_id": "benchmark_broker", "store_conn_id": "benchmark_store", "source": PLAN[0],
        "destination": "reminders", "id_columns": ["reminder"], "hold_over": timedelta(seconds=30)}
with DAG("night_install"):
    TopologyInstallOperator(task_id="broker", conn_id="benchmark_broker", destinations=["reminders"],
                            create_destinations=True) >> TopologyInstallOperator(
        task_id="store", conn_id="benchmark_store", destinations=[])
with DAG("night_compute"):
    SparkSubmitOperator(task_id="compute", conn_id="benchmark_spark", application=os.environ["NIGHT_JOB"],
                        application_args=PLAN)
with DAG("night_operator"):
    DelayedSendOperator(task_id="send", **SEND)
with DAG("night_spark"):
    DelayedSparkSendOperator(task_id="send", spark_conn_id="benchmark_spark", **SEND)
"""


@dataclass
class Stage:
    """:param client: CPU seconds of the task, of all that it started, and of Spark; or of the dispatchers."""

    seconds: float
    client: float
    database: float
    broker: float


@dataclass
class Arrivals:
    """What a consumer counted.

    :param late: by minute of arrival after nine, how late each message came, in seconds.
    :param seconds: from nine to the last arrival.
    :param silence: the longest time between two arrivals after nine, in seconds.
    """

    late: dict[int, array[float]] = field(default_factory=dict)
    count: int = 0
    twice: int = 0
    early: int = 0
    seconds: float = 0.0
    silence: float = 0.0


@dataclass
class Night:
    """What was measured in one night.

    :param memory: by kind of process, MiB that one of them had at most, and MiB without messages (0: not known).
    :param sizes: by what it is, the bytes.
    """

    way: str
    count: int
    stages: dict[str, Stage] = field(default_factory=dict)
    memory: dict[str, tuple[float, float]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    arrivals: Arrivals = field(default_factory=Arrivals)


class Memory(threading.Thread):
    """Notes the peak memory of each process that runs below this one, by its kind."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peaks: dict[str, float] = {}
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.5):
            for child in psutil.Process().children(recursive=True):
                with suppress(psutil.Error, OSError, KeyError):
                    command = " ".join(child.cmdline())
                    for kind, part in KINDS.items():
                        if part in command:
                            self.peaks[kind] = max(self.peaks.get(kind, 0.0), most(child.pid))

    def stop(self) -> dict[str, float]:
        self._ended.set()
        self.join()
        return self.peaks


def most(pid: int) -> float:
    """MiB that a process had at most."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 1024


def consume(host: VirtualHost, count: int, nine: int, answer: Connection) -> None:
    """Count each message by its number, and answer an :class:`Arrivals`."""
    seen, arrivals, last = bytearray(count), Arrivals(), float(nine)

    def take(channel: object, method: object, properties: object, body: bytes) -> None:
        nonlocal last
        now, found = time.time(), _NUMBER.search(body)
        if found is None:
            raise ValueError(f"not a message of this night: {body!r}")
        number, due = map(int, found.groups())
        if seen[number]:
            arrivals.twice += 1
        else:
            seen[number] = 1
            arrivals.count += 1
        arrivals.early += now < due
        arrivals.late.setdefault(int(now - nine) // 60, array("f")).append(now - due)
        arrivals.silence, last = max(arrivals.silence, now - last), now

    with pika.BlockingConnection(host.parameters) as connection:
        channel = connection.channel()
        channel.basic_consume(QUEUE, take, auto_ack=True)
        answer.send("ready")
        while arrivals.count < count and time.time() - last < STUCK:
            connection.process_data_events(time_limit=1.0)
        arrivals.seconds = last - nine
        # a double may come later than the last one
        connection.process_data_events(time_limit=5.0)
    answer.send(arrivals)


class Parts:
    """The servers and Airflow's home of one night."""

    def __init__(self, stack: ExitStack, options: Sequence[str], *, failover: bool) -> None:
        #: Of the dispatchers.
        self.options = options
        self._airflow = str(Path(sys.executable).with_name("airflow"))
        #: The processes that belong to no task: the consumer and the dispatchers.
        self.others: set[int] = set()
        self.home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="airflow-delayed-")))
        self.broker = stack.enter_context(rabbitmq.running())
        self.host = stack.enter_context(virtual_host(self.broker.url))
        self.primary = stack.enter_context(postgres.running())
        self.standby = stack.enter_context(postgres.standby(self.primary)) if failover else None
        spark = stack.enter_context(cluster.running(workers=1, cores=2, env=environment()))
        hosts = [one for one in (self.primary, self.standby) if one]
        connections = {
            STORE: {
                "conn_type": "postgres",
                "host": ",".join(one.host for one in hosts),
                "login": "postgres",
                "password": self.primary.password,
                "schema": self.primary.url.rpartition("/")[2],
                "port": self.primary.port,
                # libpq takes one port for each host
                "extra": {"port": ",".join(str(one.port) for one in hosts)} if failover else {},
            },
            BROKER: self.host.connection,
            "benchmark_spark": {"conn_type": "spark", "host": spark.url},
        }
        (self.home / "dags").mkdir()
        (self.home / "dags" / "night.py").write_text(DAGS)
        (self.home / "job.py").write_text(JOB)
        os.environ |= {f"AIRFLOW_CONN_{name.upper()}": json.dumps(each) for name, each in connections.items()}
        os.environ |= {
            "AIRFLOW_HOME": str(self.home),
            "AIRFLOW__CORE__DAGS_FOLDER": str(self.home / "dags"),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "NIGHT_JOB": str(self.home / "job.py"),
            "NIGHT": "x 0 0 0",
        }
        wanted = environment()
        os.environ |= {name: wanted[name] for name in ("PATH", "PYSPARK_PYTHON", "SPARK_LOCAL_IP", "JDK_JAVA_OPTIONS")}
        self.airflow("db", "migrate")

    def airflow(self, *arguments: str) -> None:
        log = self.home / "airflow.log"
        with log.open("wb") as file:
            done = subprocess.run([self._airflow, *arguments], stdout=file, stderr=subprocess.STDOUT, check=False)
        if done.returncode:
            raise SystemExit(f"airflow {' '.join(arguments)} failed:\n{log.read_text()[-5000:]}")

    def sql(self, statement: str) -> int:
        with closing(psycopg2.connect(self.primary.url)) as connection, connection.cursor() as cursor:
            cursor.execute(statement)
            return int(cursor.fetchone()[0])

    def table_bytes(self) -> tuple[int, int]:
        """The bytes of the store's tables, and of their indexes."""
        relations = "FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace"
        return (
            self.sql(f"SELECT sum(pg_table_size(oid)) {relations}"),
            self.sql(f"SELECT sum(pg_indexes_size(oid)) {relations}"),
        )

    def commit_on_both(self) -> None:
        """Have each commit wait for the standby."""
        with closing(psycopg2.connect(self.primary.url)) as connection:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
                cursor.execute("SELECT pg_reload_conf()")

    def used(self) -> tuple[float, float, float]:
        """Seconds of CPU of the tasks and Spark's cluster; of the database; of the broker."""
        servers = [one for one in (server(self.primary.url), server(self.broker.url)) if one]
        database, broker = map(cpu, servers)
        return cpu(psutil.Process(), {*(one.pid for one in servers), *self.others}), database, broker

    @contextmanager
    def stage(self, night: Night, name: str) -> Iterator[None]:
        before, start = self.used(), time.perf_counter()
        yield
        spent = [now - was for now, was in zip(self.used(), before, strict=True)]
        night.stages[name] = Stage(time.perf_counter() - start, *spent)


def fail_over(parts: Parts, dispatchers: list[psutil.Process], stack: ExitStack) -> None:
    """Freeze the PostgreSQL, and promote its standby some seconds later."""
    primary = server(parts.primary.url)
    assert primary is not None
    assert parts.standby is not None
    for one in (primary, *primary.children()):
        one.send_signal(signal.SIGSTOP)
    time.sleep(PROMOTED_AFTER)
    parts.standby.promote()


def kill(parts: Parts, dispatchers: list[psutil.Process], stack: ExitStack) -> None:
    """Kill a dispatcher after the other, the oldest first, and begin one in place of each."""
    for _ in range(KILLS):
        dispatchers.pop(0).kill()
        dispatchers.append(psutil.Process(stack.enter_context(service(parts.home, *parts.options)).pid))
        time.sleep(KILLED_EVERY)


def freeze(parts: Parts, dispatchers: list[psutil.Process], stack: ExitStack) -> None:
    """Let a dispatcher stand still for longer than its leases."""
    dispatchers[0].suspend()
    time.sleep(FROZEN)
    dispatchers[0].resume()


FAULTS = {"failover": fail_over, "kill": kill, "freeze": freeze}


def play(way: str, count: int, seconds: int, lead: float, fault: str | None, options: Sequence[str]) -> Night:
    night, nine = Night(way, count), int(time.time() + lead) + 1
    failover = fault == "failover"
    with ExitStack() as stack:
        parts = Parts(stack, options, failover=failover)
        with pika.BlockingConnection(parts.host.parameters) as connection:
            apply(connection, plan(DELAYED, [QUEUE]))
        # before there are threads
        here, there = multiprocessing.Pipe()
        arguments = (parts.host, count, nine, there)
        consumer = multiprocessing.get_context("fork").Process(target=consume, args=arguments, daemon=True)
        consumer.start()
        parts.others = {consumer.pid or 0}
        here.recv()
        memory = Memory()
        memory.start()
        with parts.stage(night, "install"):
            parts.airflow("dags", "test", "night_install")
        if failover:
            parts.commit_on_both()
        dispatchers = [
            psutil.Process(stack.enter_context(service(parts.home, *parts.options)).pid) for _ in range(DISPATCHERS)
        ]
        parts.others |= {one.pid for one in dispatchers}
        time.sleep(1)  # until the memory of each was looked at
        idle = dict(memory.peaks)
        rows = parts.home / "rows"
        os.environ["NIGHT"] = f"{rows} {count} {nine} {seconds}"
        with parts.stage(night, "compute"):
            parts.airflow("dags", "test", "night_compute")
        night.sizes["Parquet"] = sum(one.stat().st_size for one in rows.glob("*.parquet"))
        log_before = parts.sql("SELECT pg_current_wal_lsn() - '0/0'::pg_lsn")
        with parts.stage(night, "store"):
            parts.airflow("dags", "test", f"night_{way}")
        left = nine - time.time()
        if left < 0:
            raise SystemExit(f"the messages were not stored by nine o'clock: give --lead more than {lead:.0f} seconds")
        note(night, f"{parts.sql('SELECT count(*) FROM delayed_messages'):,} stored, {left:.0f} s before nine")
        night.sizes["WAL of storing"] = parts.sql("SELECT pg_current_wal_lsn() - '0/0'::pg_lsn") - log_before
        night.sizes["tables, stored"], night.sizes["indexes, stored"] = parts.table_bytes()
        if fault is not None:
            due = threading.Timer(nine - time.time(), FAULTS[fault], (parts, dispatchers, stack))
            due.daemon = True
            due.start()
        before, spent = parts.used(), -sum(map(cpu, dispatchers))
        night.arrivals = here.recv()
        # of a dispatcher that was killed nobody knows it any more
        after, spent = parts.used(), 0.0 if fault == "kill" else spent + sum(map(cpu, dispatchers))
        night.stages["dispatch"] = Stage(night.arrivals.seconds, spent, after[1] - before[1], after[2] - before[2])
        if not failover:
            night.sizes["tables, dispatched"], night.sizes["indexes, dispatched"] = parts.table_bytes()
        disk = [file.stat().st_size for file in parts.broker.folder.rglob("*") if file.is_file()]
        night.sizes["broker's folder"] = sum(disk)
        night.memory = {kind: (peak, idle.get(kind, 0.0)) for kind, peak in memory.stop().items()}
        if failover:
            parts.primary.kill()
    return night


def note(night: Night, text: str) -> None:
    load = os.getloadavg()[0]
    print(f"{night.way}, {night.count:,}: {text} (load {load:.1f})", file=sys.stderr, flush=True)


def report(night: Night, seconds: int) -> None:
    arrivals, lost = night.arrivals, night.count - night.arrivals.count
    print(f"\n{night.count:,} messages, way {night.way!r}, half due at nine, half within {seconds} s after")
    print(f"lost {lost}, twice {arrivals.twice}, early {arrivals.early}; the last came {arrivals.seconds:.0f} s after")
    print(f"nine; the longest time without an arrival was {arrivals.silence:.1f} s\n")
    print(f"{'stage':12}{'seconds':>9}{'rows/s':>10}{'CPU us: client':>16}{'database':>10}{'broker':>8}")
    for name, stage in night.stages.items():
        costs = [each / night.count * 1e6 for each in (stage.client, stage.database, stage.broker)]
        rate = night.count / stage.seconds
        print(f"{name:12}{stage.seconds:9.1f}{rate:10,.0f}{costs[0]:16.1f}{costs[1]:10.1f}{costs[2]:8.1f}")
    print(f"\n{'minute':>6}{'arrived':>12}{'late s: p50':>13}{'p99':>8}{'most':>8}")
    for minute, late in sorted(arrivals.late.items()):
        ordered = sorted(late)
        p50, p99 = (ordered[min(len(ordered) - 1, int(len(ordered) * part))] for part in (0.5, 0.99))
        print(f"{minute:6}{len(late):12,}{p50:13.1f}{p99:8.1f}{ordered[-1]:8.1f}")
    print(f"\n{'process':28}{'MiB at most':>12}{'more than idle':>16}")
    for kind, (peak, idle) in sorted(night.memory.items()):
        print(f"{kind:28}{peak:12.0f}{peak - idle if idle else '':>16.0f}" if idle else f"{kind:28}{peak:12.0f}")
    print(f"\n{'disk':28}{'MB':>12}{'bytes a message':>16}")
    for name, size in night.sizes.items():
        print(f"{name:28}{size / 1e6:12.1f}{size / night.count:16.0f}")
    sys.stdout.flush()


def growth(few: Night, many: Night) -> bool:
    """Print how costs grow from few messages to many; return whether they are as wanted."""
    print(f"\n{few.way}: from {few.count:,} to {many.count:,} messages, times the CPU of a message")
    good = True
    for name in ("store", "dispatch"):
        costs = []
        for night in (few, many):
            stage, base = night.stages[name], night.stages["install"]
            # what Airflow takes to start is no cost of a message
            fixed = base.client if name == "store" else 0.0
            costs.append((stage.client - fixed + stage.database + stage.broker) / night.count)
        good = good and costs[1] <= MOST_GROWTH * costs[0]
        print(f"{costs[1] / costs[0]:8.2f} {name} (wanted: at most {MOST_GROWTH})")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, nargs="+", default=[100_000, 1_000_000], help="of a night")
    parser.add_argument("--way", nargs="+", choices=("operator", "spark"), default=["operator", "spark"])
    parser.add_argument("--minutes", type=float, default=2, help="within which the other half is due")
    parser.add_argument("--lead", type=float, help="seconds from a night's begin to nine o'clock")
    parser.add_argument("--fault", choices=FAULTS, help="what happens at nine o'clock")
    parser.add_argument("--lookahead", help="seconds of the dispatchers; default: auto")
    options = parser.parse_args()
    of_dispatchers = ["--lookahead", options.lookahead] if options.lookahead else []
    logging.getLogger("pika").setLevel(logging.CRITICAL)
    # ends the servers too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    good, seconds = True, int(options.minutes * 60)
    for way in options.way:
        nights = []
        for count in options.messages:
            lead = options.lead or 120 + count / SLOWEST
            night = play(way, count, seconds, lead, options.fault, of_dispatchers)
            report(night, seconds)
            arrivals = night.arrivals
            exact = arrivals.count == count and not arrivals.early and (options.fault or not arrivals.twice)
            lean = all(peak - idle <= MOST_MEMORY for peak, idle in night.memory.values() if idle)
            good = good and exact and lean
            nights.append(night)
        if len(nights) > 1:
            good = growth(nights[0], nights[-1]) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
