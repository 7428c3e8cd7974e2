"""Nights of a live Airflow whose runs fail and recover: what comes is what is red, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import create_engine
from support.lengths import TABLES
from support.nights import FOLDERS, QUEUE, Nights, Round, Run, play
from support.silent import Silent

from acceptance.conftest import connection_fields, create_database
from airflow_delayed.hooks.store import DelayedStoreHook
from services import airflow, postgres, process

HERE = Path(__file__).parent / "nights"
#: It names the ways in which an escalation is lost, or comes although the run is green.
PAGE = Path(__file__).parents[2] / "docs/airflow/notifiers.md"
DAGS = (
    "night",
    "customers",
    "late",
    "parts",
    "garbled",
    "racing",
    "silent",
    "released",
    "late_sync",
    "queued",
    "alone",
)
ROUNDS, DAYS = 8, 6
# another live Airflow, whose figures a busy machine makes late
pytestmark = [pytest.mark.timeout(3600), pytest.mark.long]


@pytest.fixture(scope="module")
def silent() -> Iterator[Silent]:
    with closing(Silent()) as made:
        yield made


@pytest.fixture(scope="module")
def nights(silent: Silent, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nights]:
    """A live Airflow with two DAG processors, and two bundles: one of them has two versions.

    With KEEP_NIGHTS=folder its logs are kept there.
    """
    folder = tmp_path_factory.mktemp("nights")
    for name in FOLDERS:
        (folder / name).mkdir()
    shutil.copytree(HERE / "dags", folder / "dags")
    for version in ("1", "2"):
        shutil.copytree(HERE / "released", folder / "releases" / version)
    (folder / "releases" / "current").write_text("1")
    bundles = [
        {"name": "nights", "classpath": "airflow.dag_processing.bundles.local.LocalDagBundle", "kwargs": {}},
        {"name": "releases", "classpath": "releases.Releases", "kwargs": {"folder": str(folder / "releases")}},
    ]
    with postgres.running() as server, pytest.MonkeyPatch.context() as monkeypatch:
        metadata = create_database(server.url, "metadata")
        fields = {"conn_type": "postgres", "host": "127.0.0.1", "login": "a", "password": "b", "schema": "c"}
        connections = {
            "night_store": connection_fields(server.url),
            "silent": {**fields, "port": silent.port},
        }
        monkeypatch.setenv("AIRFLOW_CONN_NIGHT_STORE", json.dumps(connections["night_store"]))
        settings = {
            "PYTHONPATH": str(HERE),
            "NIGHTS": str(folder),
            "NIGHTS_ROUNDS": str(ROUNDS),
            "NIGHTS_DAYS": str(DAYS),
            "AIRFLOW__CORE__PARALLELISM": "12",
            "AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST": json.dumps(bundles),
            "AIRFLOW__DAG_PROCESSOR__DAG_FILE_PROCESSOR_TIMEOUT": "1200",
            "AIRFLOW__SCHEDULER__USE_JOB_SCHEDULE": "True",
        }
        with (
            closing(DelayedStoreHook("night_store")) as store,
            airflow.running(folder / "dags", database=metadata, connections=connections, **settings) as live,
        ):
            store.install([QUEUE], create_destinations=True)
            second = live.begin("airflow", "dag-processor", NIGHTS_PROCESSOR="two")
            engine = create_engine(metadata)
            made = Nights(live, folder, engine, store, second)
            try:
                log = live.folder / "dag-processor.log"
                for dag in DAGS:
                    process.wait_for(dag, lambda dag=dag: live.has(dag), seconds=180, log=log)
                    live.call("PATCH", f"/dags/{dag}", is_paused=False)
                yield made
            finally:
                made.thaw_all()
                made.second.kill()
                engine.dispose()
                if os.environ.get("KEEP_NIGHTS"):
                    shutil.copytree(live.folder, os.environ["KEEP_NIGHTS"], dirs_exist_ok=True)


def rounds() -> Iterator[Round]:
    """Return the rounds: runs of each fate in DAGs of each kind; about a quarter red, a tenth mended."""
    for number in range(ROUNDS):
        odd = bool(number % 2)
        yield Round(
            number=number,
            reordered=odd,
            night=[
                *("overlapping", "red", "cleared", "again" if odd else "retried", "twice" if odd else "marked"),
                *("cleared", "green", "green", "green", "green"),
            ],
            days=["red", "overlapping", "green", "green", "green", "green" if odd else "red"],
            past=["red" if odd else "green", "green"],
            customers=["red", "overlapping", "green", "green"],
            parts=["red" if odd else "green"],
            late=["overlapping", "late"],
            queued=["overlapping", "behind"] if odd else [],
            garbled=[] if odd else ["red"],
            late_sync=[] if odd else ["late"],
            silent=["red"] if number == 0 else [],
        )


def done(nights: Nights) -> None:
    """Compare, and keep what was counted so far for the end of the run."""
    nights.judge()
    TABLES["escalations of nights"] = nights.table()
    print("", *nights.table(), sep="\n")
    verdicts, nights.verdicts = nights.verdicts, []
    assert not verdicts, "\n".join(verdicts)
    page = PAGE.read_text()
    assert [way for way in nights.by_way if f"\n| {way} |" not in page] == []


def test_what_is_red_escalates_and_nothing_else(nights: Nights, silent: Silent) -> None:
    for a_round in rounds():
        play(nights, a_round)
    done(nights)
    # the first of five notifiers waits for it in vain, those behind it do not, and the callback behind these is called
    assert len(silent.connections) == 1


def test_a_failure_and_the_success_that_followed_have_callbacks_in_two_versions_of_the_file(nights: Nights) -> None:
    run = nights.start("released", "versions", "cleared")
    nights.put("gates", run.place)
    nights.end([run])
    nights.until("the failure's callback", lambda: nights.there("at_gate", run.place))
    (nights.folder / "releases/current").write_text("2")
    nights.live.unpause("released")
    newest = "SELECT count(*) FROM dag WHERE dag_id = 'released' AND bundle_version = '2'"
    nights.until("the second version", lambda: nights.number(newest))
    nights.remove("red", run.place)
    nights.clear(run, run_on_latest_version=True)
    nights.end([run])
    assert nights.rows()[run.key].bundle_version == "2"
    nights.settle(success=[run])
    nights.remove("gates", run.place)
    nights.settle()
    done(nights)


def test_a_task_that_is_green_again_takes_back_its_own_message_alone(nights: Nights) -> None:
    run = Run("alone", "instances", "instances")
    for index in range(4):
        nights.put("red", f"{run.place}.{index}")
    nights.start("alone", "instances")
    nights.end([run])
    nights.settle()
    assert sorted(one["map_index"] for one in nights.waiting()) == [0, 1, 2, 3]
    for index in (1, 2):
        nights.remove("red", f"{run.place}.{index}")
    nights.clear(run, task_ids=[["part", 1], ["part", 2]])
    nights.expected[(*run.key, "task success")] += 2
    nights.settle()
    assert sorted(one["map_index"] for one in nights.waiting()) == [0, 3]
    nights.until("the end", lambda: nights.rows()[run.key].state == "failed")
    done(nights)


def test_a_scheduled_run_that_a_backfill_plays_again(nights: Nights) -> None:
    (run,) = nights.by_schedule("reprocessed", {"2026-01-10": "red"}, {})
    nights.end([run])
    nights.settle()
    nights.remove("red", run.place)
    day = "2026-01-10T00:00:00Z"
    again = {"dag_id": run.dag, "from_date": day, "to_date": day, "reprocess_behavior": "failed"}
    nights.live.call("POST", "/backfills", **again)
    assert nights.rows()[run.key].run_type == "backfill"
    nights.end([run])
    nights.settle()
    done(nights)


def test_runs_that_end_about_when_their_deadline_passes(nights: Nights) -> None:
    deadline_of = (
        "SELECT extract(epoch FROM deadline_time) FROM deadline JOIN dag_run ON dag_run.id = dagrun_id"
        " WHERE dag_id = 'racing' AND run_id = '{}'"
    )
    for batch in range(3):
        offsets = {nights.start("racing", f"{batch}-{n}", "overlapping"): n / 2 - 1 for n in range(4)}
        for run in offsets:
            nights.until("the task", lambda run=run: nights.there("began", run.place))
        ends = {run: nights.number(deadline_of.format(run.run_id)) + offset for run, offset in offsets.items()}
        for run, end in sorted(ends.items(), key=lambda item: item[1]):
            # as close to its deadline as this machine allows; what comes of it must be right at any time
            time.sleep(max(0.0, end - time.time()))
            nights.remove("waits", run.place)
        nights.end(offsets)
    nights.settle()
    done(nights)


TASK_KILLED = "the task's process is killed by the kernel (out of memory)"
PROCESSOR_ENDED = "the DAG processor is killed or restarted after it took the callback"
SCHEDULER_KILLED = "the scheduler is killed between the end of a run and its request for the callback"


def test_killed_tasks(nights: Nights) -> None:
    run, part = nights.start("night", "task-killed", "killed"), nights.start("parts", "task-killed", "killed")
    nights.end([run, part])
    nights.lose(part, TASK_KILLED, "task failure")
    nights.settle()
    done(nights)


def lose_in_hand(nights: Nights, name: str, end: Callable[[], None]) -> list[Run]:
    """End a DAG processor that has taken the callbacks of three failures and a success; return these runs."""
    mended = nights.start("night", f"{name}-green", "cleared")
    nights.end([mended])
    nights.settle()
    nights.freeze("two")
    nights.put("gates", "one")
    nights.put("gates", f"success.{mended.place}")
    red = [nights.start("night", f"{name}-{n}", "red") for n in range(3)]
    nights.mend([mended])
    nights.end([*red, mended])
    gates = ("one", f"success.{mended.place}")
    nights.until("a callback at a gate", lambda: any(nights.there("at_gate", gate) for gate in gates))
    nights.until("the other callbacks", lambda: not nights.pending())
    end()
    for run in red:
        nights.lose(run, PROCESSOR_ENDED)
    nights.lose(mended, PROCESSOR_ENDED, "success")
    # what it had not taken
    after = nights.start("night", f"{name}-after", "red")
    nights.end([after])
    nights.until("the scheduler's request", nights.pending)
    for gate in gates:
        nights.remove("gates", gate)
        nights.remove("at_gate", gate)
    return [*red, mended]


@pytest.mark.parametrize("ends", ["kill", "stop"])
def test_a_dag_processor_that_ends(nights: Nights, ends: str) -> None:
    lose_in_hand(nights, f"processor-{ends}", lambda: getattr(nights.live, ends)("dag-processor"))
    nights.live.start("dag-processor")
    nights.thaw("two")
    nights.settle()
    done(nights)


def test_a_killed_scheduler(nights: Nights) -> None:
    mended = nights.start("night", "scheduler-green", "cleared")
    nights.end([mended])
    nights.settle()

    # between the commit of the runs' end and the request for their callbacks
    for run, fate in ((nights.start("night", "scheduler-between", "red"), "failure"), (mended, "success")):
        if run is mended:
            nights.mend([mended])
        with nights.locked(nights.metadata, "callback") as awaited:
            nights.end([run])
            nights.until("the scheduler's request", awaited)
            nights.live.kill("scheduler")
        nights.lose(run, SCHEDULER_KILLED, fate)
        # it looks soon for what another one was at work on
        nights.live.start("scheduler", AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL="5")

    # with its workers, while tasks are at work
    runs = [nights.start("night", "scheduler-killed", "late"), nights.start("parts", "scheduler-killed", "late")]
    for n in range(4):
        nights.until("the parts", lambda n=n: nights.there("began", f"{runs[1].place}.{n}.1"))
    nights.until("the task", lambda: nights.there("began", runs[0].place))
    nights.live.kill("scheduler")
    for run in runs:
        nights.remove("waits", run.place)
    nights.live.start("scheduler", AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL="5")
    nights.end(runs)
    nights.settle()
    done(nights)


def test_a_killed_triggerer(nights: Nights) -> None:
    runs = [nights.start("late", f"triggerer-{n}", "late") for n in range(2)]
    with nights.locked(nights.store.engine, "delayed_messages") as awaited:
        nights.until("the notifier", awaited)
        nights.live.kill("triggerer")
    nights.live.start("triggerer")
    nights.missed(2, frozen=False)
    for run in runs:
        nights.remove("waits", run.place)
    nights.end(runs)
    nights.settle()
    done(nights)


def test_the_listener_hears_what_no_callback_does(nights: Nights) -> None:
    """What a person marks, and what was lost with a DAG processor. The last test, for Airflow goes on with it."""
    live = nights.live
    live.close()
    for part in ("api-server", "scheduler", "one", "two"):
        nights.restart(part, AIRFLOW__DELAYED__LISTENER="True")
    process.wait_for("Airflow's API", live.log_in, seconds=180, log=live.folder / "api-server.log")
    for dag in ("night", "alone"):
        path = f"/dags/{dag}/details"
        kept = lambda path=path: "airflow_delayed.notifiers" in live.call("GET", path)["default_args"]  # noqa: E731
        nights.until(f"the notifiers of {dag}", kept, nudge=True)

    def waits(run: Run) -> int:
        return sum((one["dag_id"], one["run_id"]) == run.key for one in nights.waiting())

    # marked as success; while at work, as failed; and as failed although it was green
    red, green = nights.start("night", "listener-red", "red"), nights.start("night", "listener-green")
    stopped = nights.start("night", "listener-stopped", "overlapping")
    tasks = nights.start("alone", "listener", "red")
    nights.until("the task", lambda: nights.there("began", stopped.place))
    nights.end([red, green, tasks])
    nights.settle()
    nights.mark(red, "success")
    nights.mark(stopped, "failed")
    nights.mark(green, "failed")
    nights.live.call("PATCH", f"/dags/alone/dagRuns/{tasks.run_id}/taskInstances/part/2", new_state="success")
    nights.until("what is taken back", lambda: not waits(red))
    nights.until("the task's", lambda: waits(tasks) == 3)
    nights.until("what is stored", lambda: waits(stopped))
    nights.ways[green.key] = "a person marks a green run as failed"

    lost = lose_in_hand(nights, "heard", lambda: nights.live.kill("dag-processor"))
    nights.live.start("dag-processor", AIRFLOW__DELAYED__LISTENER="True")
    nights.thaw("two")
    nights.settle()
    *failed, mended = lost
    nights.until("what the DAG processor has lost", lambda: all(map(waits, failed)) and not waits(mended))
    for run in lost:
        del nights.ways[run.key]
    done(nights)
