"""What the Spark benchmarks share: rows that Spark makes, executors' sends in local[2], and one process beside them.

    spark_sink.py send DELIVER ROWS CONNECTIONS [OPTION=VALUE ...]

Run by spark_store.py and spark_rabbitmq.py in a process of its own: a warm-up of 1 % and then ROWS rows, reported as a
:class:`measured.Measured`. The clock runs from ``save()`` to its return; Spark is up by then, as in a job that has
computed before it sends. CPU is that of the process group: Spark's JVM and its Python workers. Memory is the peak
that the system keeps of each Python worker, the highest of them; they live as long as Spark does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(ROOT / ".ci"), str(ROOT / "tests"), str(HERE)]

from measured import Measured  # noqa: E402

BODY = "x" * 200
QUEUE = "orders"
PARTITIONS = 8
_TICK = os.sysconf("SC_CLK_TCK")


def run(deliver: str, rows: int, connections: Path, **options: object) -> Measured:
    """Send from executors, in a process of its own, and return what it took."""
    import json

    from support.spark import environment

    command = [sys.executable, str(HERE / "spark_sink.py"), "send", deliver, str(rows), str(connections)]
    command += [f"{name}={value}" for name, value in options.items()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    if done.returncode:
        raise SystemExit(f"Spark failed:\n{done.stderr[-3000:]}")
    found = Measured(**json.loads(done.stdout.strip().splitlines()[-1]))
    if found.count != rows:
        raise SystemExit(f"{rows} messages were asked for, and it did {found}")
    return found


def main() -> None:
    _, deliver, rows, connections, *more = sys.argv[1:]
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F  # noqa: N812

    builder = SparkSession.builder.master("local[2]").appName("benchmark")
    for name in ("spark.ui.enabled", "spark.ui.showConsoleProgress"):
        builder = builder.config(name, "false")
    spark = builder.config("spark.sql.session.timeZone", "UTC").config("spark.driver.memory", "1g").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")

    def send(first: int, count: int) -> None:
        frame = spark.range(first, first + count, 1, PARTITIONS).select(
            F.format_string("order-%08d", "id").alias("message_id"),
            F.lit(BODY).alias("value"),
            F.timestamp_seconds(F.unix_seconds(F.current_timestamp()) + 3600 + F.col("id") % 1_000_000).alias("due_at"),
        )
        writer = frame.write.format("delayed").mode("append").option("deliver", deliver).option("destination", QUEUE)
        options = dict(option.split("=", 1) for option in more)
        writer.option("connections_file", connections).options(**options).save()

    total = int(rows)
    send(total, max(total // 100, PARTITIONS))
    before, start = _cpu(), time.perf_counter()
    send(0, total)
    seconds = time.perf_counter() - start
    cpu, peak = _cpu() - before, _peak(os.getpid())
    if not peak:
        raise SystemExit("no Python worker is among the processes that Spark started")
    Measured(total, seconds, cpu, 0, peak).tell()
    spark.stop()


def _cpu() -> float:
    """Seconds of CPU of this process and all that it started, the ended ones too."""
    return _ticks(os.getpid()) / _TICK


def _ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total = sum(int(field) for field in fields[11:15])
        total += sum(map(_ticks, _children(pid)))
    except OSError:
        return 0  # it has just ended
    return total


def _peak(pid: int, field: str = "VmHWM") -> float:
    """MiB of the Python worker that had the most, of all that a process started; with VmRSS that has it now."""
    try:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        worker = b"pyspark.daemon" in Path(f"/proc/{pid}/cmdline").read_bytes()
        own = int(status[field].split()[0]) / 1024 if worker else 0
        return max([own, *(_peak(child, field) for child in _children(pid))])
    except (OSError, KeyError):
        return 0  # it has just ended


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # a thread that has just ended
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


if __name__ == "__main__":
    main()
