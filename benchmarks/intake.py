"""From Arrow to messages, and DelayedSendOperator reading Parquet: CPU a row, beside decoding alone; and a query.

    python benchmarks/intake.py [--rows 1000000] [--rounds 5]
    python benchmarks/intake.py --query [--rows 1000000] [--few 10000] [--rounds 3]

Rows of 5 columns: a body of about 200 bytes, destination, due time, id, three headers; in batches of 8192. "Decoded" is
what pyarrow asks for by itself: each column as a list of Python's values, zipped, and nothing looked at. A sink counts
the messages that RowReader makes of the same batches, as Spark's executors and the operator read them.

The operator runs with dry_run=True on one Parquet file, with a RabbitMQ connection whose broker is not asked. It reads
all rows twice: once to check everything, also RabbitMQ's limits and which ids come twice, and once to make the messages
that are sent. The last line is the memory of that, in processes of their own.

With --query the operator reads the same rows as a table of a private PostgreSQL (SqlSource, which spools them), beside
a Parquet file: time, CPU and memory of the whole, few rows and many, each in a process of its own.

CPU is user and system time of all threads. The rounds alternate; medians are shown, and ratios within a round.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / ".ci")]

import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from airflow_delayed.intake.arrow import to_batch  # noqa: E402
from airflow_delayed.intake.columns import RowRules  # noqa: E402
from airflow_delayed.intake.files import SourceFile  # noqa: E402
from airflow_delayed.intake.rows import RowReader  # noqa: E402
from services import postgres  # noqa: E402

BATCH = 8192
#: Different batches that are kept in memory, and read again and again.
DISTINCT = 8
FILE = SourceFile(path="rows", format="parquet", partition={}, version=())
RULES = RowRules(anchor=datetime(2026, 1, 1, tzinfo=timezone.utc), scope=b"benchmark")
#: The first due time: 2027, in microseconds.
FIRST = 1_800_000_000_000_000
NAMES = ["value", "destination", "due_at", "message_id", "headers"]


def records(start: int, count: int) -> pa.RecordBatch:
    numbers = range(start, start + count)
    text = "x" * 160
    headers = [[("type", "Reminder"), ("tenant", f"t{n % 50}"), ("trace", f"{n:016x}")] for n in numbers]
    return pa.RecordBatch.from_arrays(
        [
            pa.array([f'{{"order": {n:012d}, "text": "{text}"}}' for n in numbers]),
            pa.array(["mail" if n % 3 else "sms" for n in numbers]),
            pa.array([FIRST + n % 80_000_000 * 1_000_037 for n in numbers]).cast(pa.timestamp("us", tz="UTC")),
            pa.array([f"order-{n:012d}-{n * 2654435761 % (1 << 32):08x}" for n in numbers]),
            pa.array(headers, pa.map_(pa.string(), pa.string())),
        ],
        NAMES,
    )


class Sink:
    """Counts the messages made of so many rows, without some of the columns."""

    def __init__(self, batches: list[pa.RecordBatch], rows: int, without: tuple[str, ...] = ()) -> None:
        self._batches = [batch.drop_columns(list(without)) for batch in batches]
        self._rows = rows

    def _stream(self) -> Iterator[pa.RecordBatch]:
        for number in range(max(1, self._rows // BATCH)):
            yield self._batches[number % len(self._batches)]

    def ours(self) -> int:
        reader = RowReader(RULES)
        count = 0
        for batch in self._stream():
            for _ in reader.read(to_batch(batch, FILE, 1)):
                count += 1
        return count

    def decoded(self) -> int:
        count = 0
        for batch in self._stream():
            for _ in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                count += 1
        return count


class File:
    """A Parquet file of so many rows, with the columns that the operator is given."""

    def __init__(self, path: Path) -> None:
        self.path = path
        #: CPU seconds of the operator's two passes, each time that it ran.
        self.passes: dict[str, list[float]] = {"preflight": [], "deliver": []}

    def write(self, rows: int) -> None:
        with pq.ParquetWriter(self.path, records(0, 1).schema) as writer:
            for start in range(0, rows, BATCH):
                writer.write_batch(records(start, min(BATCH, rows - start)), row_group_size=BATCH * 16)

    def read(self) -> int:
        return sum(batch.num_rows for batch in pq.ParquetFile(self.path).iter_batches(batch_size=BATCH))

    def decoded(self) -> int:
        count = 0
        for batch in pq.ParquetFile(self.path).iter_batches(batch_size=BATCH):
            for _ in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                count += 1
        return count

    def operator(self, source: Any = None) -> int:
        from airflow_delayed.delivery import TopologyReport
        from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
        from airflow_delayed.operators.send import DelayedSendOperator
        from airflow_delayed.sending import Sending

        os.environ["AIRFLOW_CONN_BENCHMARK"] = json.dumps({"conn_type": "rabbitmq", "host": "localhost"})
        ti = SimpleNamespace(dag_id="dag", run_id="run", task_id="send", map_index=-1, max_tries=0, try_number=1)
        ti.xcom_push = lambda key, value: None
        task = DelayedSendOperator(task_id="send", conn_id="benchmark", source=source or str(self.path), dry_run=True)
        with (
            patch.object(RabbitMQDelayHook, "verify", lambda *_, **__: TopologyReport()),
            patch.object(Sending, "preflight", self._timed(Sending.preflight)),
            patch.object(Sending, "deliver", self._timed(Sending.deliver)),
        ):
            return int(task.execute({"ti": ti, "task_state_store": {}})["sent"])  # type: ignore[arg-type]

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            start = time.process_time()
            try:
                return method(*args, **options)
            finally:
                self.passes[method.__name__].append(time.process_time() - start)

        return timed


def cpu_us(work: Callable[[], int]) -> float:
    gc.collect()
    start = time.process_time()
    count = work()
    return (time.process_time() - start) / count * 1e6


def peak(path: Path, rows: int) -> float:
    """Return the most memory that the operator took for a file of so many rows, in MiB."""
    File(path).write(rows)
    done = subprocess.run([sys.executable, __file__, "--read", str(path)], check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def read_alone(path: str) -> None:
    print_cost(lambda: File(Path(path)).operator())


#: A query whose rows are as those of the file.
SELECT = "SELECT value, destination, due_at, message_id, headers FROM rows WHERE number < %(rows)s"


def fill(url: str, rows: int) -> None:
    """Make a table with the rows of the file."""
    import psycopg2
    from psycopg2.extras import execute_values

    columns = "value text, destination text, due_at timestamptz, message_id text, headers jsonb"
    with contextlib.closing(psycopg2.connect(url)) as database, database, database.cursor() as cursor:
        cursor.execute(f"CREATE TABLE rows (number int, {columns})")
        for start in range(0, rows, BATCH):
            batch = records(start, min(BATCH, rows - start)).to_pylist()
            found = [
                (start + index, *(row[name] for name in NAMES[:-1]), json.dumps(dict(row["headers"])))
                for index, row in enumerate(batch)
            ]
            execute_values(cursor, "INSERT INTO rows VALUES %s", found, page_size=1000)


def read_query(rows: int) -> None:
    from airflow_delayed.sources import SqlSource

    print_cost(lambda: File(Path()).operator(SqlSource(SELECT, "rows", parameters={"rows": rows})))


def print_cost(read: Callable[[], int]) -> None:
    """Print seconds, seconds of CPU and the most memory in MiB that reading took."""
    # what is imported is no cost of a row

    import airflow_delayed.hooks.rabbitmq
    import airflow_delayed.hooks.store
    import airflow_delayed.operators.send  # noqa: F401

    start, used = time.perf_counter(), time.process_time()
    read()
    took = time.perf_counter() - start, time.process_time() - used
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(*took, int(status["VmHWM"].split()[0]) / 1024)


def compare_query(rows: int, few: int, rounds: int) -> int:
    """Print what a query costs beside a file, for few rows and for many; return how the process ends."""
    peaks: dict[str, list[float]] = {"query": [], "file": []}
    with tempfile.TemporaryDirectory(prefix="delayed-intake-") as folder, postgres.running() as server:
        fill(server.url, rows)
        more = {"AIRFLOW_CONN_ROWS": server.url, "AIRFLOW__DELAYED__SPOOL_FOLDER": folder}
        for count in (few, rows):
            path = Path(folder, f"{count}.parquet")
            File(path).write(count)
            for name, arguments in (("query", ["--read-query", str(count)]), ("file", ["--read", str(path)])):
                command = [sys.executable, __file__, *arguments]
                costs = []
                for _ in range(rounds):
                    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | more)
                    costs.append([float(text) for text in done.stdout.split()[-3:]])
                seconds, cpu, memory = map(statistics.median, zip(*costs, strict=True))
                peaks[name].append(memory)
                print(
                    f"{name:6} {count:10,} rows: {seconds:6.1f} s, {count / seconds:9,.0f} rows/s,"
                    f" {cpu / count * 1e6:6.2f} us of CPU a row, {memory:.0f} MiB"
                )
    more_memory = peaks["query"][1] - peaks["query"][0]
    print(f"query: {more_memory:+.0f} MiB for {rows:,} rows beside {few:,}   wanted: at most {FLAT_MIB} more")
    return int(more_memory > FLAT_MIB)


#: How much more memory many rows may take than few, in MiB: batches are full, and ids are kept at 8 bytes each.
FLAT_MIB = 60
FIRST_PASS, SECOND_PASS = "operator, first pass: all is checked", "operator, second pass: messages"

#: What is wanted: CPU a row in microseconds, at most.
WANTED = {
    "messages, headers, given ids": 3.5,
    "messages, no headers, given ids": 1.0,
    FIRST_PASS: 1e6 / 400_000,
    SECOND_PASS: 1e6 / 400_000,
}


def contestants(batches: list[pa.RecordBatch], file: File, rows: int) -> dict[str, Callable[[], int]]:
    whole, bare = Sink(batches, rows), Sink(batches, rows, ("headers",))
    made, bare_made = Sink(batches, rows, ("message_id",)), Sink(batches, rows, ("headers", "message_id"))
    return {
        "decoded, headers": whole.decoded,
        "messages, headers, given ids": whole.ours,
        "messages, headers, content ids": made.ours,
        "decoded, no headers": bare.decoded,
        "messages, no headers, given ids": bare.ours,
        "messages, no headers, content ids": bare_made.ours,
        "Parquet read alone, once": file.read,
        "Parquet read and decoded, once": file.decoded,
        "operator, both passes": file.operator,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--query", action="store_true")
    parser.add_argument("--few", type=int, default=10_000)
    parser.add_argument("--read", help=argparse.SUPPRESS)
    parser.add_argument("--read-query", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    # one thread reads, so that a row's CPU is a row's time on one core
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    if options.read:
        read_alone(options.read)
        return 0
    if options.read_query:
        read_query(options.read_query)
        return 0
    if options.query:
        return compare_query(options.rows, options.few, options.rounds)
    batches = [records(number * BATCH, BATCH) for number in range(DISTINCT)]
    with tempfile.TemporaryDirectory(prefix="delayed-intake-") as folder:
        file = File(Path(folder, "rows.parquet"))
        file.write(options.rows)
        works = contestants(batches, file, options.rows)
        found: dict[str, list[float]] = {name: [] for name in works}
        for number in range(options.rounds + 1):
            for name, work in list(works.items())[:: 1 if number % 2 else -1]:
                taken = cpu_us(work)
                if number:  # the first round warms up
                    found[name].append(taken)
        for name, seconds in zip((FIRST_PASS, SECOND_PASS), file.passes.values(), strict=True):
            found[name] = [taken / options.rows * 1e6 for taken in seconds[1:]]
        small, large = (peak(Path(folder, f"{rows}.parquet"), rows) for rows in (options.rows // 10, options.rows))
    good = report(found)
    print(f"operator's memory for {options.rows // 10:,} rows {small:.0f} MiB, for {options.rows:,} {large:.0f} MiB")
    return 0 if good else 1


def report(found: dict[str, list[float]]) -> bool:
    middle = {name: statistics.median(taken) for name, taken in found.items()}
    good = True
    for name, taken in middle.items():
        wanted = f"   wanted: at most {WANTED[name]:.2f}" if name in WANTED else ""
        good = good and taken <= WANTED.get(name, taken)
        print(f"{name:38} {taken:6.2f} us a row, {1e6 / taken:11,.0f} rows/s of CPU{wanted}")
    for name, other in (
        ("messages, headers, given ids", "decoded, headers"),
        ("messages, no headers, given ids", "decoded, no headers"),
        ("operator, both passes", "Parquet read alone, once"),
        ("operator, both passes", "Parquet read and decoded, once"),
    ):
        ratio = statistics.median(one / two for one, two in zip(found[name], found[other], strict=True))
        print(f"{name}: {ratio:.2f} times {other}")
    for kind in ("headers", "no headers"):
        pairs = zip(found[f"messages, {kind}, content ids"], found[f"messages, {kind}, given ids"], strict=True)
        more = statistics.median(one - two for one, two in pairs)
        good = good and more <= 1.5
        print(f"content ids, {kind}: {more:+.2f} us a row   wanted: at most 1.50 more")
    return good


if __name__ == "__main__":
    sys.exit(main())
