"""What `make demo-ui` runs: an Airflow with the operations page, and messages in every state, until Ctrl-C.

Real parts: Airflow, RabbitMQ, SQLite as the store; SQS is an emulator. All that it writes is in .run/demo-ui, and all
that it starts is stopped. Most of its messages are those that a run of dags/nightly_reminders.py sends.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import httpx
from progress import Progress

from services import airflow, process, rabbitmq, sqs

ROOT = Path(__file__).resolve().parent.parent
DAG, QUEUE = "nightly_reminders", "appointment-reminders"
APPOINTMENTS = 400
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PAGE = "/plugin/delayed-deliveries"
INTRODUCTION = """The page Delayed deliveries in Airflow's UI shows what waits, what is late and what has failed.
Airflow and RabbitMQ are real, the store is a SQLite file, and Amazon SQS is emulated.
"""


class Demo:
    """A running Airflow that has the page, and what its first messages come by."""

    def __init__(self, live: airflow.Airflow, folder: Path, broker_url: str) -> None:
        self.live = live
        self.folder = folder
        #: Of the virtual host of the connection delayed_rabbitmq.
        self.broker_url = broker_url


def settings(folder: Path) -> dict[str, str]:
    """Return what the page and the DAG of the first messages have in their environment."""
    return {
        "NIGHTLY_REMINDERS_FILE": str(folder / "appointments.csv"),
        "AIRFLOW__DELAYED__PAGE_STORES": "delayed_store",
        # so that the login viewer sees how far a viewer may come
        "AIRFLOW__DELAYED__VIEWERS": "plugins",
        "AIRFLOW__DELAYED__PAGE_RABBITMQ": "delayed_rabbitmq",
        "AIRFLOW__DELAYED__PAGE_SQS": f"delayed_sqs:{QUEUE}",
    }


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Demo]:
    """Run an Airflow with the page until the block ends; without any message yet."""
    with contextlib.ExitStack() as stack:
        queues = stack.enter_context(sqs.running())
        broker = stack.enter_context(rabbitmq.running())
        connections = {
            "delayed_sqs": sqs.connection(queues.url),
            "delayed_store": {"conn_type": "sqlite", "host": str(folder / "store.db")},
            "delayed_rabbitmq": rabbitmq_connection(broker.url),
        }
        home = folder / "airflow"
        home.mkdir()
        database = f"sqlite:///{home / 'airflow.db'}"
        live = stack.enter_context(
            airflow.running(ROOT / "dags", database=database, connections=connections, home=home, **settings(folder))
        )
        yield Demo(live, folder, broker.url)


def rabbitmq_connection(url: str) -> dict[str, Any]:
    """Return the fields of an Airflow connection to a broker's first virtual host."""
    parts = httpx.URL(url)
    return {
        "conn_type": "rabbitmq",
        "host": parts.host,
        "port": parts.port,
        "login": parts.username,
        "password": parts.password,
        "schema": "/",
    }


def appointments(path: Path, count: int = APPOINTMENTS, now: datetime | None = None) -> None:
    """Write appointments over the next two days, more of them soon."""
    begin = (now or datetime.now(timezone.utc)) + timedelta(hours=2, minutes=5)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["appointment", "customer", "starts", "called_off"])
        for number in range(count):
            share = number / count
            starts = begin + timedelta(hours=47) * share**2
            off = "yes" if number % 40 == 39 else "no"
            table.writerow([number + 1, f"customer-{number % 25}", starts.isoformat(timespec="seconds"), off])


def fill(demo: Demo) -> str:
    """Have messages in every state, and return the id of the DAG run that has sent most of them."""
    appointments(demo.folder / "appointments.csv")
    live = demo.live
    process.wait_for(f"DAG {DAG}", lambda: live.has(DAG), seconds=120, log=live.folder / "dag-processor.log")
    live.call("PATCH", f"/dags/{DAG}", is_paused=False)
    run = live.trigger(DAG)
    if live.wait(DAG, run) != "success":
        raise RuntimeError(f"DAG {DAG} failed: {live.states(DAG, run)}\n{live.log(DAG, run, 'send')}")
    # nothing goes on by itself: what is shown is there until somebody acts on it
    live.call("PATCH", f"/dags/{DAG}", is_paused=True)
    live.run(str(ROOT / ".ci/demo_ui_data.py"), demo.broker_url)
    return run


def introduce(demo: Demo) -> None:
    """Print where the page is, and who can log in."""
    print(f"\nOpen it in a browser:\n  {demo.live.url}{PAGE}\n")
    rights = {"viewer": "sees the figures alone", "user": "may also cancel, reschedule and retry what a DAG sent"}
    for user, password in demo.live.passwords.items():
        may = rights.get(user, "may also cancel, reschedule, retry and erase")
        print(f"  login {user:<8} password {password}   {may}")
    print("\nCtrl-C stops everything.", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / ".run" / "demo-ui", help="where it writes; emptied first")
    folder = parser.parse_args().folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    for number in STOPS:
        signal.signal(number, stop)
    try:
        print(INTRODUCTION)
        progress = Progress()
        progress.step("start", "an SQS emulator, RabbitMQ and Airflow, which takes about a minute")
        with running(folder) as demo:
            progress.step("fill", "dags/nightly_reminders.py sends reminders; others failed, expired or are late")
            fill(demo)
            progress.step("ready", "")
            introduce(demo)
            while True:
                time.sleep(3600)
    except KeyboardInterrupt:
        print(f"\nstopped; what it wrote is in {folder}", flush=True)
    except (RuntimeError, TimeoutError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
