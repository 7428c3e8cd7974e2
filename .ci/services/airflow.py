"""A real Airflow for the tests: api-server, scheduler, dag-processor and triggerer, and a client of its REST API."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx

from services import airflow_programs, java, process

PARTS = ("api-server", "dag-processor", "scheduler", "triggerer")
ENDED = ("success", "failed")
#: Who can log in, each with a role of the same name.
USERS = ("admin", "op", "user", "viewer")
#: The fields of a connection to a Spark on this machine.
LOCAL_SPARK = {
    "conn_type": "spark",
    "host": "local[2]",
    "extra": {"deploy-mode": "client", "spark-binary": "spark-submit"},
}


def environment(home: Path, dags: Path, connections: Mapping[str, Mapping[str, object]]) -> dict[str, str]:
    """Return the environment of an Airflow with a home, DAGs and connections of its own."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {
        "PATH": path,  # where tasks find spark-submit
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        **java.options(),
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__DAGS_FOLDER": str(dags),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__DATABASE__LOAD_DEFAULT_CONNECTIONS": "False",
        "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
        **{f"AIRFLOW_CONN_{name.upper()}": json.dumps(fields) for name, fields in connections.items()},
    }


def without_the_users(env: Mapping[str, str]) -> list[str]:
    """Return a command's beginning that hides what would point Airflow or Spark at others of the user's."""
    theirs = ("AIRFLOW", "SPARK_", "PYSPARK_", "HADOOP_", "YARN_")
    hidden = [name for name in os.environ if name.startswith(theirs) and name not in env]
    return ["env", *(option for name in hidden for option in ("-u", name))]


class Airflow:
    """A running Airflow by its REST API; ``call`` and what goes by it is its admin."""

    def __init__(
        self, url: str, folder: Path, passwords: Mapping[str, str], programs: airflow_programs.Programs
    ) -> None:
        self.url = url
        self.folder = folder
        #: Of its users.
        self.passwords = passwords
        #: The running processes: api-server, dag-processor, scheduler, triggerer.
        self.parts: dict[str, airflow_programs.Program] = {}
        self._programs = programs
        self._http = httpx.Client(base_url=url, timeout=60)

    def start(self, part: str, **more: str) -> None:
        """Start a part, also again when it has ended; ``more`` is added to its environment."""
        command = ["airflow", part, *(["--skip-serve-logs"] if part in ("scheduler", "triggerer") else [])]
        self.parts[part] = self._programs.start(command, self.folder / f"{part}.log", more)

    def begin(self, *argv: str, **more: str) -> airflow_programs.Program:
        """Start a program that stays, with this Airflow's environment and ``more``; its caller stops it."""
        return self._programs.start(argv, self.folder / f"program-{secrets.token_hex(4)}.log", more)

    def stop(self, part: str) -> None:
        """End a part as a service manager does."""
        self.parts[part].stop()

    def kill(self, part: str) -> None:
        """End a part and its children at once, as kill -9 does."""
        self.parts[part].kill()

    def stop_all(self) -> None:
        """Ask all parts to end before the first is waited for."""
        for part in self.parts.values():
            part.signal(signal.SIGTERM)
        for part in self.parts.values():
            part.stop()

    def run(self, *argv: str) -> str:
        """Run "airflow" or a Python script with this Airflow's environment, and return what it prints."""
        number = secrets.token_hex(4)
        log = self.folder / f"run-{number}.log"
        if code := self._programs.start(argv, log).wait():
            raise RuntimeError(f"{' '.join(argv)} ended with {code}:\n{log.read_text()[-3000:]}")
        return log.read_text()

    def client(self, user: str = "admin") -> httpx.Client:
        """Return a client that is logged in; raises httpx.HTTPError while the server is not up."""
        login = {"username": user, "password": self.passwords[user]}
        with httpx.Client(base_url=self.url, timeout=60) as http:
            token = http.post("/auth/token", json=login).raise_for_status().json()["access_token"]
        return httpx.Client(base_url=self.url, timeout=60, headers={"Authorization": f"Bearer {token}"})

    def log_in(self) -> bool:
        """Become its admin; raises httpx.HTTPError while the server is not up."""
        self._http = self.client()
        return True

    def call(self, method: str, path: str, **body: object) -> Any:
        """Call the API; returns the parsed answer and raises with the server's own words."""
        answer = self._http.request(method, f"/api/v2{path}", **({"json": body} if body else {}))
        if answer.is_error:
            raise RuntimeError(f"{method} {path}: {answer.status_code} {answer.text[:1000]}")
        return answer.json() if answer.content else None

    def healthy(self) -> bool:
        """Whether all four processes have reported."""
        health = self.call("GET", "/monitor/health")
        return all(health[part]["status"] == "healthy" for part in ("scheduler", "triggerer", "dag_processor"))

    def has(self, dag_id: str) -> bool:
        """Whether a DAG has been read; raises with its import errors."""
        errors = self.call("GET", "/importErrors")["import_errors"]
        if errors:
            raise RuntimeError(errors[0]["stack_trace"])
        return any(dag["dag_id"] == dag_id for dag in self.call("GET", "/dags")["dags"])

    def unpause(self, dag_id: str) -> None:
        """Unpause a DAG, and have its file read again at once."""
        self.call("PATCH", f"/dags/{dag_id}", is_paused=False)
        token = self.call("GET", f"/dags/{dag_id}/details")["file_token"]
        self.call("PUT", f"/parseDagFile/{token}")

    def trigger(self, dag_id: str, **conf: object) -> str:
        """Start a run without a logical date and return its id."""
        run = self.call("POST", f"/dags/{dag_id}/dagRuns", logical_date=None, conf=conf)
        return str(run["dag_run_id"])

    def wait(self, dag_id: str, run_id: str, *, seconds: float = 240) -> str:
        """Wait for a run to end and return its state."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            state = self.call("GET", f"/dags/{dag_id}/dagRuns/{run_id}")["state"]
            if state in ENDED:
                return str(state)
            time.sleep(0.5)
        raise TimeoutError(f"{run_id} has not ended after {seconds:.0f} s: {self.states(dag_id, run_id)}")

    def runs(self, dag_id: str, **wanted: object) -> list[dict[str, Any]]:
        """Return a DAG's runs, those with these fields."""
        runs = self.call("GET", f"/dags/{dag_id}/dagRuns")["dag_runs"]
        return [run for run in runs if all(run[name] == value for name, value in wanted.items())]

    def states(self, dag_id: str, run_id: str) -> dict[str, str]:
        """Return the state of each task of a run."""
        found = self.call("GET", f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances")["task_instances"]
        return {ti["task_id"]: ti["state"] for ti in found}

    def deferred(self, dag_id: str, run_id: str, task_id: str) -> bool:
        """Whether a task waits in the triggerer, and the scheduler has heard that its worker ended.

        Airflow takes a task for killed that is resumed on the same try before that. The line that is looked for comes
        for each task; "TaskInstance Finished" does not where another transaction keeps the task's row locked.

        :raises RuntimeError: the task has ended instead.
        """
        state = self.states(dag_id, run_id)[task_id]
        if state in ENDED:
            raise RuntimeError(f"{task_id} is {state}:\n{self.why(dag_id, run_id, task_id)}")
        key = f"TaskInstanceKey(dag_id={dag_id!r}, task_id={task_id!r}, run_id={run_id!r},"
        heard = f"Received executor event with state success for task instance {key}"
        return state == "deferred" and heard in (self.folder / "scheduler.log").read_text(errors="replace")

    def asset_events(self, **fields: str) -> list[dict[str, Any]]:
        """Return the first 100 asset events, those with these fields."""
        path = "/assets/events?" + urlencode({"limit": 100, **fields})
        for _ in range(600):
            # Airflow 3.3.2 answers 500 while a run that an event has made is queued: its model wants a start date
            with contextlib.suppress(RuntimeError):
                return list(self.call("GET", path)["asset_events"])
            time.sleep(0.1)
        return list(self.call("GET", path)["asset_events"])

    def result(self, dag_id: str, run_id: str, task_id: str) -> Any:
        """Return what a task returned."""
        where = f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/xcomEntries/return_value?deserialize=true"
        return self.call("GET", where)["value"]

    def log(self, dag_id: str, run_id: str, task_id: str, *, number: int | None = None) -> str:
        """Return the log of a task's try, by default the last."""
        where = f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}"
        tries = number or self.call("GET", where)["try_number"]
        content = self.call("GET", f"{where}/logs/{tries}?full_content=true")["content"]
        return "\n".join(line if isinstance(line, str) else json.dumps(line) for line in content)

    def why(self, dag_id: str, run_id: str, task_id: str) -> str:
        """Return what Airflow and the task tell of its last try: the scheduler may end a task without its log."""
        events = self.call("GET", f"/eventLogs?dag_id={dag_id}&task_id={task_id}")["event_logs"]
        mine = [f"{one['when']} {one['event']}: {one['extra']}" for one in events if one["run_id"] == run_id]
        return "\n".join([*mine, self.log(dag_id, run_id, task_id)])

    def clear(self, dag_id: str, run_id: str, task_ids: Sequence[str]) -> None:
        """Clear tasks of a run that has ended, so that they run again."""
        self.call(
            "POST",
            f"/dags/{dag_id}/clearTaskInstances",
            dry_run=False,
            dag_run_id=run_id,
            task_ids=list(task_ids),
            only_failed=False,
            reset_dag_runs=True,
        )

    def backfill(self, dag_id: str, first: str, last: str, **conf: object) -> None:
        """Start a backfill from one day to another, both included."""
        self.call(
            "POST",
            "/backfills",
            dag_id=dag_id,
            from_date=f"{first}T00:00:00Z",
            to_date=f"{last}T00:00:00Z",
            dag_run_conf=conf,
            max_active_runs=1,
        )

    def close(self) -> None:
        """Close the connections to the API."""
        self._http.close()


@contextlib.contextmanager
def running(
    dags: Path,
    *,
    database: str,
    connections: Mapping[str, Mapping[str, object]],
    home: Path | None = None,
    **more: str,
) -> Iterator[Airflow]:
    """Run an Airflow until the block ends.

    ``database`` is an empty one (sqlite:///..., postgresql://...), ``home`` an empty folder, of its own by default;
    ``more`` is added to the environment. Nothing runs by its schedule: what is wanted is started.
    """
    port = process.free_port()
    url = f"http://127.0.0.1:{port}"
    own = tempfile.TemporaryDirectory(prefix="live-airflow-") if home is None else contextlib.nullcontext(str(home))
    with own as name:
        folder = Path(name)
        passwords = {user: secrets.token_urlsafe(9) for user in USERS}
        kept = folder / "passwords.json"
        kept.touch(mode=0o600)
        kept.write_text(json.dumps(passwords))
        env = {
            **environment(folder, dags, connections),
            "AIRFLOW__API__HOST": "127.0.0.1",
            "AIRFLOW__API__PORT": str(port),
            "AIRFLOW__API__BASE_URL": url,
            "AIRFLOW__API__WORKERS": "1",
            "AIRFLOW__API__SECRET_KEY": secrets.token_hex(16),
            "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_hex(32),
            "AIRFLOW__CORE__AUTH_MANAGER": (
                "airflow.api_fastapi.auth.managers.simple.simple_auth_manager.SimpleAuthManager"
            ),
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": ",".join(f"{user}:{user}" for user in USERS),
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(kept),
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{url}/execution/",
            "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
            "AIRFLOW__CORE__PARALLELISM": "4",
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": database.replace("postgresql://", "postgresql+psycopg2://", 1),
            "AIRFLOW__SCHEDULER__USE_JOB_SCHEDULE": "False",
            # files do not change; one is read again when it is asked for
            "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "3600",
            # a machine that has much else to do is slow, and not broken
            "AIRFLOW__WORKERS__EXECUTION_API_TIMEOUT": "60",
            "AIRFLOW__CORE__DAGBAG_IMPORT_TIMEOUT": "180",
            "AIRFLOW__DAG_PROCESSOR__DAG_FILE_PROCESSOR_TIMEOUT": "200",
            **more,
        }
        with airflow_programs.running(env, folder, without_the_users(env)) as programs:
            live = Airflow(url, folder, passwords, programs)
            live.run("airflow", "db", "migrate")
            try:
                for part in PARTS:
                    live.start(part)
                process.wait_for("Airflow's API", live.log_in, seconds=180, log=folder / "api-server.log")
                process.wait_for("Airflow", live.healthy, seconds=120, log=folder / "scheduler.log")
                yield live
            finally:
                live.stop_all()
                live.close()
