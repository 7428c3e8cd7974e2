"""What `make demo` runs: dags/flight_reminders.py, from Spark to a consumer, and a table of what arrived when.

Real parts: Airflow with its SparkSubmitOperator, Spark in local mode, SQLite as the store; SQS is an emulator. All
that it writes is in .run/demo, and all that it starts is stopped, also by Ctrl-C. Ends with 1 if a reminder was early
or is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import signal
import sqlite3
import sys
import time
from pathlib import Path

from progress import Progress
from reckoning import Consumer, Reckoning, computed, consuming, reckon

from services import airflow, airflow_programs, java, sqs
from services.airflow_programs import Program, Programs

ROOT = Path(__file__).resolve().parent.parent
DAG, QUEUE = "flight_reminders", "flight-reminders"
#: How long after the last due time a reminder counts as missing, in seconds.
PATIENCE = 15
#: How often the number of arrivals is printed, in seconds.
EVERY = 5
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTRODUCTION = """Each flight that leaves New York on this day has a reminder, due two hours before its departure.
Here the day takes 20 seconds. The DAG is dags/flight_reminders.py; Airflow and Spark are real, Amazon SQS is emulated.
"""
#: By task: the name of the step, and what it does.
STEPS = {
    "install_sqs": ("install", "Airflow creates the queue in SQS and the tables of the store, a SQLite file"),
    "compute": ("compute", "SparkSubmitOperator: a Spark job computes when each reminder is due"),
    "send": ("send", "DelayedSendOperator: reminders due soon go to SQS, the others into the store"),
    "dispatch": ("dispatch", "StoreDispatchOperator: sends those in the store to SQS shortly before they are due"),
}


class Failed(Exception):
    """The demo cannot go on; the text says why."""


class Arrivals:
    """The reminders that Spark computed, against those that the consumer got."""

    def __init__(self, folder: Path, consumer: Consumer, progress: Progress) -> None:
        # of the one run
        [run] = (folder / "reminders").iterdir()
        self._due = computed(run / "reminders")
        self._consumer = consumer
        self._progress = progress
        self._print_at = time.monotonic() + EVERY
        self._printed = 0
        first, last = (max(0, round(due - time.time())) for due in (min(self._due.values()), max(self._due.values())))
        progress.detail(f"{len(self._due):,} reminders: the first is due in {first} s, the last in {last} s")

    def result(self) -> Reckoning:
        """Return how it went so far, and print the number of arrivals now and then."""
        result = reckon(self._due, self._consumer.arrivals())
        if result.arrived != self._printed and (not result.missing or time.monotonic() > self._print_at):
            self._printed = result.arrived
            self._print_at = time.monotonic() + EVERY
            self._progress.detail(f"{result.arrived:,} of {result.computed:,} have arrived")
        return result

    def overdue(self) -> bool:
        """Whether all should have arrived long ago."""
        return time.time() > max(self._due.values()) + PATIENCE


def shown(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def migrate(programs: Programs, log: Path) -> None:
    if programs.start(["airflow", "db", "migrate"], log).wait():
        raise Failed(f"'airflow db migrate' failed; see {shown(log)}")


def watch(run: Program, log: Path, folder: Path, consumer: Consumer, progress: Progress) -> Reckoning:
    """Print which task the DAG is at and what has arrived, until all has."""
    steps = dict(STEPS)
    arrivals: Arrivals | None = None
    while not run.ended(seconds=0.2):
        for task in re.findall(r"starting task_id=(\w+)", log.read_text(errors="replace")):
            if task in steps:
                progress.step(*steps.pop(task))
        if "dispatch" not in steps:
            arrivals = arrivals or Arrivals(folder, consumer, progress)
            arrivals.result()
    if run.wait() or arrivals is None:
        raise Failed(f"the DAG failed; see {shown(log)}")
    progress.step("wait", "the DAG has ended; SQS delivers the last reminders at their due time")
    while (result := arrivals.result()).missing and not arrivals.overdue():
        time.sleep(0.2)
    return result


def sent_and_stored(home: Path) -> tuple[int, int]:
    """Return the counts that DelayedSendOperator returned."""
    with contextlib.closing(sqlite3.connect(home / "airflow.db")) as database:
        row = database.execute("select value from xcom where task_id = 'send' and key = 'return_value'").fetchone()
    summary = json.loads(row[0])
    summary = json.loads(summary) if isinstance(summary, str) else summary
    return int(summary["sent"]), int(summary["stored"])


def play(folder: Path, progress: Progress) -> tuple[Reckoning, int, int]:
    """Run everything, and return how it went, and how many were sent at once and stored."""
    home = folder / "airflow"
    home.mkdir(parents=True)
    progress.step("start", "an SQS emulator, a consumer that reads its queue outside Airflow, and Airflow")
    with contextlib.ExitStack() as stack:
        queues = stack.enter_context(sqs.running())
        consumer = stack.enter_context(consuming(QUEUE, queues.url, folder))
        env = airflow.environment(
            home,
            ROOT / "dags",
            {
                "delayed_sqs": sqs.connection(queues.url),
                "delayed_store": {"conn_type": "sqlite", "host": str(folder / "store.db")},
                "spark_default": airflow.LOCAL_SPARK,
            },
        )
        env["FLIGHT_REMINDERS_FOLDER"] = str(folder / "reminders")
        hidden = airflow.without_the_users(env)
        programs = stack.enter_context(airflow_programs.running(env, folder / "airflow", hidden))
        migrate(programs, folder / "airflow-db.log")
        log = folder / "airflow.log"
        log.touch()
        # without the path Airflow would read all example DAGs
        path = ["--dagfile-path", str(ROOT / "dags" / f"{DAG}.py")]
        run = programs.start(["airflow", "dags", "test", DAG, *path], log)
        result = watch(run, log, folder, consumer, progress)
    return result, *sent_and_stored(home)


def table(result: Reckoning, sent: int, stored: int) -> str:
    """Return what a newcomer sees at the end."""
    rows = [
        ("reminders computed", f"{result.computed:,}", "counted in the files that Spark wrote"),
        ("sent at once", f"{sent:,}", "due soon: SQS keeps each until it is due"),
        ("stored", f"{stored:,}", "due later: waited in the store, then went to SQS"),
        ("arrived", f"{result.arrived:,}", "counted by the consumer"),
        ("early", f"{result.early:,}", "arrived before the due time"),
        ("missing", f"{result.missing:,}", "never arrived"),
        ("twice", f"{result.twice:,}", "after a fault a message may arrive twice, with the same id"),
        *((["unknown", f"{result.strange:,}", "arrived, but Spark has not computed them"],) if result.strange else ()),
        ("lateness, median", f"{result.quantile(0.5):.2f} s", "SQS delays by whole seconds, so up to 1 s is normal"),
        ("lateness, 99 %", f"{result.quantile(0.99):.2f} s", ""),
        ("lateness, most", f"{result.quantile(1):.2f} s", ""),
    ]
    return "\n".join(f"  {name:<20}{value:>9}   {remark}".rstrip() for name, value, remark in rows)


NEXT = """What next?
  dags/README.md                     which example is for what
  dags/flight_reminders.py           the DAG that just ran, to copy
  dags/jobs/flight_reminders_job.py  its Spark job
  make demo-ui                       Airflow in your browser, with the page that shows what waits and what is late"""


def interrupt(signum: int, frame: object) -> None:
    """Stop all that was started; a second signal does not interrupt the stopping."""
    for asked in STOPS:
        signal.signal(asked, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / ".run" / "demo", help="where it writes; emptied first")
    folder = parser.parse_args().folder.resolve()
    for asked in STOPS:
        signal.signal(asked, interrupt)
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        print(INTRODUCTION)
        java.require()
        result, sent, stored = play(folder, progress := Progress())
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except (Failed, RuntimeError) as problem:
        print(f"\n{problem}", file=sys.stderr)
        return 1
    (folder / "summary.json").write_text(
        json.dumps({**vars(result), "lateness": None, "sent": sent, "stored": stored, "p99": result.quantile(0.99)})
    )
    print(f"\n{table(result, sent, stored)}\n\nWhere the time went:\n{progress.times()}\n")
    if not result.kept:
        print(f"Reminders were early, missing or unknown. The logs are in {shown(folder)}.", file=sys.stderr)
        return 1
    print(NEXT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
