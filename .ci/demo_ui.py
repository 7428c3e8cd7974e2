"""What `make demo-ui` runs: `airflow standalone` with the operations page, and messages in every state, until Ctrl-C.

Real parts: Airflow, RabbitMQ, SQLite as the store; SQS is an emulator. All that it writes is in .run/demo-ui, and all
that it starts is stopped. Its first data is what a night's run of dags/nightly_reminders.py has sent.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import httpx

from services import airflow, process, rabbitmq, sqs

ROOT = Path(__file__).resolve().parent.parent
#: Who can log in, each with a role of the same name.
USERS = ("admin", "op", "viewer")
DAG = "nightly_reminders"
APPOINTMENTS = 400
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PAGE = "/plugin/delayed-deliveries"


class Demo:
    """A running Airflow, by its address and its users' passwords."""

    def __init__(
        self, url: str, passwords: Mapping[str, str], env: Mapping[str, str], folder: Path, broker: rabbitmq.Broker
    ) -> None:
        self.url = url
        self.passwords = passwords
        self.env = env
        self.folder = folder
        self.broker = broker

    def client(self, user: str = "admin") -> httpx.Client:
        """Return a client that is logged in; raises httpx.HTTPError while the server is not up."""
        login = {"username": user, "password": self.passwords[user]}
        with httpx.Client(base_url=self.url, timeout=60) as http:
            token = http.post("/auth/token", json=login).raise_for_status().json()["access_token"]
        return httpx.Client(base_url=self.url, timeout=60, headers={"Authorization": f"Bearer {token}"})

    def run_dag(self, dag_id: str, *, seconds: float = 180) -> str:
        """Run a DAG once, and return the run's id."""
        with self.client() as http:
            dag = f"/api/v2/dags/{dag_id}"
            process.wait_for(f"DAG {dag_id}", lambda: http.get(dag).raise_for_status(), seconds=120)
            http.patch(dag, json={"is_paused": False}).raise_for_status()
            runs = f"{dag}/dagRuns"
            run = http.post(runs, json={"logical_date": None}).raise_for_status().json()["dag_run_id"]
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                state = http.get(f"{runs}/{run}").raise_for_status().json()["state"]
                if state in airflow.ENDED:
                    # nothing goes on by itself: what is shown is there until somebody acts on it
                    http.patch(dag, json={"is_paused": True}).raise_for_status()
                    if state == "failed":
                        raise RuntimeError(f"DAG {dag_id} failed; see {self.folder / 'airflow.log'}")
                    return str(run)
                time.sleep(0.5)
        raise TimeoutError(f"DAG {dag_id} has not ended after {seconds:.0f} s")

    def python(self, *arguments: str) -> str:
        """Run a script with this Airflow's connections and configuration, and return what it prints."""
        done = subprocess.run(
            [*airflow.without_the_users(self.env), sys.executable, *arguments],
            env={**os.environ, **self.env},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{arguments[0]} failed:\n{done.stderr[-3000:]}")
        return done.stdout


@contextlib.contextmanager
def running(folder: Path, connections: Mapping[str, Mapping[str, Any]] | None = None, **more: str) -> Iterator[Demo]:
    """Run an `airflow standalone` with the page until the block ends; without any message yet.

    :param connections: further ones.
    :param more: further environment.
    """
    port = process.free_port()
    url = f"http://127.0.0.1:{port}"
    home = folder / "airflow"
    home.mkdir(parents=True)
    passwords = {user: secrets.token_urlsafe(9) for user in USERS}
    kept = home / "passwords.json"
    kept.write_text(json.dumps(passwords))
    kept.chmod(0o600)
    with contextlib.ExitStack() as stack:
        queues = stack.enter_context(sqs.running())
        broker = stack.enter_context(rabbitmq.running())
        given = {
            "delayed_sqs": sqs.connection(queues.url),
            "delayed_store": {"conn_type": "sqlite", "host": str(folder / "store.db")},
            "delayed_rabbitmq": rabbitmq_connection(broker.url),
            **(connections or {}),
        }
        env = {
            **airflow.environment(home, ROOT / "dags", given),
            "NIGHTLY_REMINDERS_FILE": str(folder / "appointments.csv"),
            "AIRFLOW__API__HOST": "127.0.0.1",
            "AIRFLOW__API__PORT": str(port),
            "AIRFLOW__API__BASE_URL": url,
            "AIRFLOW__API__WORKERS": "1",
            "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": str(process.free_port()),
            "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": str(process.free_port()),
            "AIRFLOW__API__SECRET_KEY": secrets.token_hex(16),
            "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_hex(32),
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{url}/execution/",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": ",".join(f"{user}:{user}" for user in USERS),
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(kept),
            "AIRFLOW__CORE__PARALLELISM": "4",
            "AIRFLOW__SCHEDULER__USE_JOB_SCHEDULE": "False",
            "AIRFLOW__DELAYED__PAGE_STORES": "delayed_store",
            "AIRFLOW__DELAYED__PAGE_RABBITMQ": "delayed_rabbitmq",
            "AIRFLOW__DELAYED__PAGE_SQS": "delayed_sqs:appointment-reminders",
            **more,
        }
        command = [*airflow.without_the_users(env), str(Path(sys.executable).with_name("airflow")), "standalone"]
        log = folder / "airflow.log"
        stack.enter_context(process.running(command, log=log, env=env))
        demo = Demo(url, passwords, env, folder, broker)
        process.wait_for("Airflow", lambda: demo.client().close() or True, seconds=240, log=log)
        yield demo


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
    run = demo.run_dag(DAG)
    demo.python(str(ROOT / ".ci/demo_ui_data.py"), demo.broker.url)
    return run


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    folder = ROOT / ".run" / "demo-ui"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    for number in STOPS:
        signal.signal(number, stop)
    try:
        print("starts Airflow, RabbitMQ and an SQS emulator (about a minute) ...", flush=True)
        with running(folder) as demo:
            print("runs dags/nightly_reminders.py, and makes messages that failed, expired or are late ...", flush=True)
            fill(demo)
            print(f"\n  {demo.url}{PAGE}\n", flush=True)
            for user in USERS:
                print(f"  login {user:<8} password {demo.passwords[user]}")
            print("\nadmin and op may act, viewer sees figures only. Ctrl-C stops everything.", flush=True)
            while True:
                time.sleep(3600)
    except KeyboardInterrupt:
        print("\nstopped; what it wrote is in .run/demo-ui", flush=True)
    except (RuntimeError, TimeoutError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
