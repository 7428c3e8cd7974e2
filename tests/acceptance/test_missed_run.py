"""A missed run escalates whatever is killed, and what a person marks reaches the notifiers, on a live Airflow."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from acceptance.conftest import World, by_schedule
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.message import utcnow

pytestmark = [pytest.mark.timeout(1500), pytest.mark.long]
TAG = "missed-run:missed"


def become(true: Callable[[], Any], what: str, *, seconds: float = 300) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.2)
    return found


@dataclass
class Watch:
    """The DAG "missed", and the message about its next run."""

    world: World
    store: DelayedStoreHook
    folder: Path

    @property
    def waiting(self) -> list[datetime]:
        """The runs that messages wait for, by their scheduled times."""
        contents = [self.store.content(one.message_id, body_limit=10_000) for one in self.store.list(tag=TAG)]
        bodies = [json.loads(one.body) for one in contents if one is not None]
        return sorted(datetime.fromisoformat(body["run_after"]) for body in bodies)

    @property
    def delivered(self) -> list[dict[str, Any]]:
        with self.store.engine.connect() as connection:
            bodies = connection.execute(text("SELECT body FROM missed_queue ORDER BY seq")).scalars()
            return [json.loads(bytes(body)) for body in bodies]

    def moves(self) -> datetime:
        """Wait until a run ends well, and return which run is watched then."""
        before = max(self.waiting, default=None)
        become(lambda: self.waiting and (before is None or self.waiting[0] > before), f"a good end after {before}")
        return self.waiting[0]

    def becomes_due(self) -> dict[str, Any]:
        """Bring the next message's due time forward, and return what the dispatcher delivers."""
        before = len(self.delivered)
        (first, *_) = self.store.list(tag=TAG)
        self.store.reschedule(first.message_id, delay=0)
        become(lambda: len(self.delivered) > before, "delivered")
        return self.delivered[before]

    def runs(self, state: str) -> list[dict[str, Any]]:
        query = f"/dags/missed/dagRuns?state={state}&order_by=-run_after&limit=5"
        return list(self.world.live.call("GET", query)["dag_runs"])


@pytest.fixture(scope="module")
def watch(world: World) -> Iterator[Watch]:
    live, folder = world.live, world.reminders.parent / "missed"
    folder.mkdir()
    fields = {name: value for name, value in world.connections["delayed_store"].items() if name != "extra"}
    # in Airflow's own database, where the process of a callback asks for it
    live.call("POST", "/connections", connection_id="missed_store", **fields)
    become(lambda: live.has("missed"), "the DAG")
    with pytest.MonkeyPatch.context() as patch, closing(DelayedStoreHook("missed_store")) as store:
        patch.setenv("AIRFLOW_CONN_MISSED_STORE", json.dumps(fields))
        store.install(["missed_queue"], create_destinations=True)
        yield Watch(world, store, folder)
    live.call("DELETE", "/connections/missed_store")


@contextlib.contextmanager
def silent_server() -> Iterator[int]:
    """Accept connections and never answer; yields the port."""
    with socket.create_server(("127.0.0.1", 0), backlog=200) as server:
        yield server.getsockname()[1]


@pytest.mark.long
def test_silence_escalates_whatever_is_killed(watch: Watch) -> None:
    live, store, folder = watch.world.live, watch.store, watch.folder
    service = live.begin(
        *("airflow", "delayed", "dispatcher", "--store-conn-id", "missed_store", "--deliver-conn-ids", "missed_store"),
        *("--port", "0"),
    )
    with by_schedule(watch.world):
        live.call("PATCH", "/dags/missed", is_paused=False)
        # the message about the first run is stored by the command, whatever the first run does
        (folder / "kill").touch()
        (armed,) = json.loads(live.run("airflow", "delayed", "arm", "missed", "--output", "json"))
        assert armed["outcome"] in ("stored", "waits", "known")

        # kill -9 of the task, run after run: no callback of the task is called, and no good end moves the message
        become(lambda: watch.runs("failed"), "a run whose task was killed")
        assert watch.becomes_due()["reason"] == "missed"
        (folder / "kill").unlink()
        watch.moves()
        delivered = len(watch.delivered)

        # kill -9 of the triggerer: runs go on, and so does the message
        live.kill("triggerer")
        watch.moves()
        watch.moves()
        assert len(watch.delivered) == delivered
        live.start("triggerer")

        # kill -9 of the scheduler before the next run begins
        watched = watch.moves()
        live.kill("scheduler")
        body = watch.becomes_due()
        assert datetime.fromisoformat(body["run_after"]) >= watched
        live.start("scheduler", AIRFLOW__SCHEDULER__USE_JOB_SCHEDULE="True")
        watch.moves()

        # kill -9 of the DAG processor after it took the callback of a good end: nobody hears of that, so the message
        # about that run is delivered (too many, never none), and the next run's first task stores its own
        (folder / "lose").touch()
        become(lambda: (folder / "held").exists(), "the callback of a good end")
        live.kill("dag-processor")
        for name in ("lose", "hold"):
            (folder / name).unlink()
        lost = watch.becomes_due()
        live.start("dag-processor")
        ended = {run["run_after"]: run["state"] for run in watch.runs("success")}
        assert ended[lost["run_after"].replace("+00:00", "Z")] == "success"
        watch.moves()

        # a pause, in which no run begins
        delivered = len(watch.delivered)
        live.call("PATCH", "/dags/missed", is_paused=True)
        become(lambda: not watch.runs("running") and not watch.runs("queued"), "the last run")
        body = watch.becomes_due()
        assert body["reason"] == "missed"
        assert len(watch.delivered) == delivered + 1

        # without the service nobody hears, and doctor says so
        assert "no-service" not in [one.code for one in store.health()]
        live.call("PATCH", "/dags/missed", is_paused=False)
        watch.moves()
        live.call("PATCH", "/dags/missed", is_paused=True)
        service.kill()
        become(lambda: "no-service" in [one.code for one in store.health()], "the finding")
    store.cancel(tag=TAG)


@pytest.mark.long
def test_what_a_person_marks_reaches_the_notifiers_and_a_silent_store_holds_up_no_scheduler(watch: Watch) -> None:
    live, store, folder = watch.world.live, watch.store, watch.folder
    with silent_server() as port:
        silent = {"conn_type": "postgres", "host": "127.0.0.1", "port": port, "login": "a", "password": "b"}
        live.call("POST", "/connections", connection_id="silent_store", **silent, schema="c")
        for part in ("dag-processor", "scheduler", "api-server"):
            live.stop(part)
        read = f"{utcnow():%Y-%m-%dT%H:%M:%S}"
        for part in ("api-server", "scheduler", "dag-processor"):
            live.start(part, AIRFLOW__DELAYED__LISTENER="True")

        def answers() -> bool:
            with contextlib.suppress(Exception):
                live.close()
                return live.log_in() and live.healthy()
            return False

        become(answers, "Airflow with the listener")
        for dag in ("marked", "silent"):
            # the DAG processor has read the file again: with the notifiers
            path = f"/dags/{dag}/details"
            become(lambda path=path: "airflow_delayed.notifiers" in live.call("GET", path)["default_args"], dag)
            live.call("PATCH", f"/dags/{dag}", is_paused=False)
        # which refuses no task with end_from_trigger=True, as Airflow does in a process with a listener
        become(lambda: live.call("GET", "/dags/waits")["last_parsed_time"] > read, "the file of such a task")
        assert live.has("waits")

        def armed(run: str) -> list[str]:
            return [one.message_id for one in store.list(tag=f"notifier:marked/{run}")]

        red = live.trigger("marked")
        assert live.wait("marked", red) == "failed"
        become(lambda: len(armed(red)) == 1, "the escalation")
        live.call("PATCH", f"/dags/marked/dagRuns/{red}", state="success")
        become(lambda: armed(red) == [], "taken back")

        (folder / "stay").touch()
        stopped = live.trigger("marked")
        become(lambda: live.states("marked", stopped).get("fail_or_stay") == "running", "the run")
        live.call("PATCH", f"/dags/marked/dagRuns/{stopped}", state="failed")
        become(lambda: len(armed(stopped)) == 1, "the escalation of a mark")
        (folder / "stay").unlink()

        # the scheduler's thread is held by the silent store, and the scheduler is not
        for _ in range(3):
            assert live.wait("silent", live.trigger("silent")) == "success"
        beat = live.call("GET", "/monitor/health")["scheduler"]["latest_scheduler_heartbeat"]
        after = datetime.fromisoformat(beat) + timedelta(seconds=15)

        def beats() -> bool:
            health = live.call("GET", "/monitor/health")["scheduler"]
            return (
                health["status"] == "healthy" and datetime.fromisoformat(health["latest_scheduler_heartbeat"]) > after
            )

        become(beats, "heartbeats while the store is silent")
    live.call("DELETE", "/connections/silent_store")
    for part in ("dag-processor", "scheduler", "api-server"):
        live.stop(part)
    for part in ("api-server", "scheduler", "dag-processor"):
        live.start(part)
    become(answers, "Airflow without the listener")
    store.cancel(tag=f"notifier:marked/{stopped}")
