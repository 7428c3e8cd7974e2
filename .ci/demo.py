"""What `make demo` runs: the example DAG from Spark to a consumer outside Airflow, and a table of what arrived when.

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

from reckoning import Consumer, Reckoning, computed, consuming, reckon

from services import airflow, airflow_programs, java, sqs
from services.airflow_programs import Programs

ROOT = Path(__file__).resolve().parent.parent
DAG, QUEUE = "flight_reminders", "flight-reminders"
#: How long after the last due time a reminder counts as missing, in seconds.
PATIENCE = 15
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STEPS = {
    "install_sqs": "Airflow: makes the queues and the store",
    "compute": "Airflow: SparkSubmitOperator computes the reminders of a day's flights",
    "send": "Airflow: DelayedSendOperator checks them, sends what is due soon, holds the others in the store",
    "dispatch": "Airflow: StoreDispatchOperator hands those over as they come near, until the store is empty",
}


class Failed(Exception):
    """The demo cannot go on; the text says why."""


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGAN:5.0f} s  {text}", flush=True)


def shown(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def migrate(programs: Programs, log: Path) -> None:
    if programs.start(["airflow", "db", "migrate"], log).wait():
        raise Failed(f"'airflow db migrate' failed; see {shown(log)}")


def run_dag(programs: Programs, folder: Path, consumer: Consumer) -> None:
    """Run the DAG and say which task is at work, and what has arrived meanwhile."""
    log = folder / "airflow.log"
    log.touch()
    told: list[str] = []
    due: dict[str, float] = {}
    tell_again = 0.0
    run = programs.start(["airflow", "dags", "test", DAG], log)
    while not run.ended(seconds=0.2):
        for task in re.findall(r"starting task_id=(\w+)", log.read_text(errors="replace")):
            if task in STEPS and task not in told:
                told.append(task)
                say(STEPS[task])
        if "send" in told and not due:
            due = computed(reminders(folder))
            first, last = (round(moment - time.time()) for moment in (min(due.values()), max(due.values())))
            say(f"  of {len(due):,} reminders the first is due in {first} s, the last in {last} s")
        if due and time.monotonic() > tell_again:
            tell_again = time.monotonic() + 5
            say(f"  {len(consumer.arrivals()):,} have arrived")
    if run.wait():
        raise Failed(f"the DAG failed; see {shown(log)}")


def reminders(folder: Path) -> Path:
    """Return where the one run's Spark job has written."""
    [run] = (folder / "reminders").iterdir()
    return run / "reminders"


def sent_and_held(home: Path) -> tuple[int, int]:
    """Return what DelayedSendOperator says of itself."""
    with contextlib.closing(sqlite3.connect(home / "airflow.db")) as database:
        row = database.execute("select value from xcom where task_id = 'send' and key = 'return_value'").fetchone()
    summary = json.loads(row[0])
    summary = json.loads(summary) if isinstance(summary, str) else summary
    return int(summary["sent"]), int(summary["held"])


def play(folder: Path) -> tuple[Reckoning, int, int]:
    """Run everything, and return how it went, and how many were sent at once and held."""
    home = folder / "airflow"
    home.mkdir(parents=True)
    say("starts an SQS emulator (ministack) and a consumer outside Airflow")
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
        say("makes an Airflow home of its own")
        hidden = airflow.without_the_users(env)
        programs = stack.enter_context(airflow_programs.running(env, folder / "airflow", hidden))
        migrate(programs, folder / "airflow-db.log")
        run_dag(programs, folder, consumer)
        due = computed(reminders(folder))
        say("waits for what is still on its way")
        give_up = max(due.values()) + PATIENCE
        while (result := reckon(due, consumer.arrivals())).missing and time.time() < give_up:
            time.sleep(0.2)
    return result, *sent_and_held(home)


def table(result: Reckoning, sent: int, held: int) -> str:
    """Return what a newcomer sees at the end."""
    rows = [
        ("reminders computed", f"{result.computed:,}", "by Spark, counted in its Parquet files"),
        ("sent at once", f"{sent:,}", "to SQS, with a delay of their own"),
        ("held in the store", f"{held:,}", "and handed to SQS when they came near"),
        ("arrived", f"{result.arrived:,}", "at a consumer outside Airflow"),
        ("early", f"{result.early:,}", "before their due time"),
        ("missing", f"{result.missing:,}", ""),
        ("twice", f"{result.twice:,}", "SQS delivers at least once; a duplicate has the same id"),
        *((["of unknown origin", f"{result.strange:,}", ""],) if result.strange else ()),
        ("lateness p50", f"{result.quantile(0.5):.2f} s", "SQS counts in whole seconds, so up to 1 s is its unit"),
        ("lateness p99", f"{result.quantile(0.99):.2f} s", ""),
        ("lateness max", f"{result.quantile(1):.2f} s", ""),
    ]
    return "\n".join(f"  {name:<20}{value:>9}   {remark}".rstrip() for name, value, remark in rows)


NEXT = """What to try next:
  dags/flight_reminders.py           the DAG that just ran: copy it
  dags/jobs/flight_reminders_job.py  its Spark job, and the columns that are read from it
  README.md                          ten lines for each transport: SQS, RabbitMQ, a SQL database
  make test                          the same on a real RabbitMQ, PostgreSQL and a live Airflow"""


def interrupt(signum: int, frame: object) -> None:
    """Stop what was started, whoever asks; asking again does not stop that."""
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
        print("A day's flights from New York, replayed in 30 seconds: each passenger's reminder at its due second.\n")
        java.require()
        result, sent, held = play(folder)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except (Failed, RuntimeError) as problem:
        print(f"\n{problem}", file=sys.stderr)
        return 1
    (folder / "summary.json").write_text(
        json.dumps({**vars(result), "lateness": None, "sent": sent, "held": held, "p99": result.quantile(0.99)})
    )
    print(f"\n{table(result, sent, held)}\n")
    if not result.kept:
        print(f"A promise was broken. What happened is in {shown(folder)}.", file=sys.stderr)
        return 1
    print(NEXT)
    return 0


BEGAN = time.monotonic()

if __name__ == "__main__":
    sys.exit(main())
