"""How late waits end in Airflow's trigger runner, and what they cost: DueTimeTrigger beside Airflow's DateTimeTrigger.

    python benchmarks/due_triggers.py [--waits 10000] [--spread 60] [--rounds 1]
    python benchmarks/due_triggers.py --live [--waits 20] [--rounds 3]

Each contestant has a process of its own with Airflow's TriggerRunner, the event loop of a triggerer, as it is; only its
supervisor is not there: what the runner would tell it is encoded and dropped, and its log lines, JSON as in a
triggerer, go through a pipe to `cat`. (A triggerer whole takes minutes to load 10,000 rows, and makes a log file of
each, for which the event loop waits.) When all triggers are loaded, each waits for its own moment, spread evenly over
a minute. Late is what passes from a trigger's moment until its run() goes on.

The limit beside it, in the same run: a process with nothing but an asyncio loop and call_later for as many moments,
which looks at the clock before it calls.

CPU is user and system time of the process from when all are loaded until the last moment: net of as many triggers that
return at once; and net of as many that are one asyncio.sleep each, since the runner itself looks at every trigger that
waits once a second, however it waits.

With --live the sensors on these triggers wait in a whole Airflow, with a scheduler, a triggerer and PostgreSQL:
DueTimeSensor beside Airflow's DateTimeSensorAsync, in turns, a moment every 1.37 s, started from the trigger and ended
by it. Late is what passes from a task's moment to its end date.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

BARE, OURS, CORE = "bare timer heap", "DueTimeTrigger", "DateTimeTrigger"
PLAIN, AT_ONCE = "one asyncio.sleep", "returns at once"
KINDS = {OURS: "due", CORE: "core", PLAIN: "plain", AT_ONCE: "at once"}
SENSORS = "DueTimeSensor", "DateTimeSensorAsync"
#: Seconds from the run's start to its first moment, and from one moment to the next.
HEAD_START, EVERY = 30.0, 1.37
LIVE_DAG = """
from airflow.providers.standard.sensors.date_time import DateTimeSensorAsync
from airflow.sdk import DAG
from airflow_delayed.sensors.due_time import DueTimeSensor

with DAG("waits", schedule=None, max_active_tasks=1000):
    for number in range(COUNT):
        for place, kind in enumerate((DueTimeSensor, DateTimeSensorAsync)):
            after = HEAD_START + EVERY * (2 * number + place)
            kind(
                task_id=f"{kind.__name__}.{number}",
                target_time="{{ (dag_run.run_after + macros.timedelta(seconds=%r)).isoformat() }}" % after,
                start_from_trigger=True,
                end_from_trigger=True,
            )
"""
#: Seconds that loading may take a wait, and how long all is waited for beyond that.
LOADING, PATIENCE = 0.05, 120


@dataclass
class Result:
    #: Milliseconds after the moment, sorted.
    late: list[float]
    cpu: float

    def part(self, share: float) -> float:
        return self.late[min(len(self.late) - 1, int(len(self.late) * share))]


def moments(first: float, count: int, spread: float) -> list[float]:
    return [first + spread * number / count for number in range(count)]


def bare(_: str, count: int, spread: float, answer: Connection) -> None:
    """Wait on an asyncio loop alone."""
    fired: list[tuple[float, float]] = []

    async def wait() -> None:
        loop = asyncio.get_running_loop()
        over = asyncio.Event()

        def fire(moment: float) -> None:
            if (left := moment - time.time()) > 0:
                loop.call_later(left, fire, moment)
                return
            fired.append((moment, time.time()))
            if len(fired) == count:
                over.set()

        for moment in moments(time.time() + 2, count, spread):
            loop.call_later(moment - time.time(), fire, moment)
        await over.wait()

    before = time.process_time()
    asyncio.run(wait())
    answer.send((fired, time.process_time() - before))


def in_runner(kind: str, count: int, spread: float, answer: Connection) -> None:
    """Wait in Airflow's TriggerRunner."""
    home = tempfile.TemporaryDirectory(prefix="due-triggers-")
    os.environ.update(AIRFLOW_HOME=home.name, AIRFLOW__CORE__FERNET_KEY="", AIRFLOW__CORE__LOAD_EXAMPLES="False")
    from airflow.executors import workloads
    from airflow.jobs.triggerer_job_runner import TriggerRunner
    from airflow.models.trigger import Trigger
    from airflow.sdk.log import configure_logging, reset_logging
    from timed_triggers import Timed

    drain = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0)
    assert drain.stdin is not None
    reset_logging()
    configure_logging(json_output=True, output=drain.stdin, sending_to_supervisor=True)

    class Runner(TriggerRunner):
        async def init_comms(self):
            self.comms_decoder = SimpleNamespace(_reader_task=asyncio.create_task(asyncio.sleep(1e6)))

        async def sync_state_to_supervisor(self, finished_ids):
            self.process_trigger_events(finished_ids).model_dump_json()
            if len(Timed.fired) == count and time.time() > Timed.first + spread:
                self.stop = True

    runner = Runner()
    for number, after in enumerate(moments(0.0, count, spread), 1):
        path, arguments = Timed(kind, after, count).serialize()
        kept = Trigger.encrypt_kwargs(arguments)
        runner.to_create.append(workloads.RunTrigger(id=number, classpath=path, encrypted_kwargs=kept, ti=None))
    runner.run()
    answer.send((Timed.fired, time.process_time() - Timed.cpu))
    drain.stdin.close()
    drain.wait()
    home.cleanup()


def measure(name: str, count: int, spread: float) -> Result:
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    work = bare if name == BARE else in_runner
    child = spawn.Process(target=work, args=(KINDS.get(name, ""), count, spread, there))
    child.start()
    try:
        if not here.poll(spread + LOADING * count + PATIENCE):
            raise SystemExit(f"{name}: not all have fired")
        fired, cpu = here.recv()
        child.join()
    finally:
        child.kill()
    return Result(sorted((at - moment) * 1000 for moment, at in fired), cpu)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--waits", type=int)
    parser.add_argument("--live", action="store_true", help="the sensors in a whole Airflow")
    parser.add_argument("--spread", type=float, default=60.0, help="seconds over which their moments are spread")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    if options.live:
        live(options.waits or 20, options.rounds)
        return 0
    options.waits = options.waits or 10_000
    results: dict[str, list[Result]] = {name: [] for name in (BARE, OURS, CORE, PLAIN, AT_ONCE)}
    for number in range(1, options.rounds + 1):
        for name in results if number % 2 else reversed(results):
            result = measure(name, options.waits, options.spread)
            results[name].append(result)
            print(f"round {number}: {name}: p99 {result.part(0.99):.1f} ms, CPU {result.cpu:.2f} s", file=sys.stderr)
    report(results, options.waits)
    return 0


def live(count: int, rounds: int) -> None:
    """Print how late tasks of both sensors end."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / ".ci"))
    from services import airflow, postgres

    rows: dict[str, list[Result]] = {name: [] for name in SENSORS}
    with tempfile.TemporaryDirectory(prefix="due-sensors-") as folder, postgres.running() as server:
        numbers = f"COUNT, HEAD_START, EVERY = {count}, {HEAD_START}, {EVERY}\n"
        Path(folder, "waits.py").write_text(numbers + LIVE_DAG)
        with airflow.running(Path(folder), database=server.url, connections={}) as running:
            while not running.has("waits"):
                time.sleep(1)
            running.call("PATCH", "/dags/waits", is_paused=False)
            for number in range(1, rounds + 1):
                for name, late in lateness(running, count).items():
                    rows[name].append(Result(sorted(late), 0))
                    print(f"round {number}: {name}: p50 {rows[name][-1].part(0.5):.2f} s", file=sys.stderr)
    print(f"{f'{rounds} x {count} tasks, s late (medians)':40}{'p50':>8}{'p90':>8}{'max':>8}{'early':>8}")
    for name, found in rows.items():
        figures = "".join(f"{statistics.median(each.part(share) for each in found):8.2f}" for share in (0.5, 0.9, 1))
        print(f"{name:40}{figures}{sum(late < 0 for each in found for late in each.late):8}")


def lateness(running: Any, count: int) -> dict[str, list[float]]:
    """Run the DAG, and return the lateness in seconds of each sensor's tasks."""
    run_id = running.trigger("waits")
    state = running.wait("waits", run_id, seconds=HEAD_START + EVERY * 2 * count + 300)
    if state != "success":
        raise SystemExit(f"the run has ended as {state}: {running.states('waits', run_id)}")
    where = f"/dags/waits/dagRuns/{run_id}"
    began = datetime.fromisoformat(running.call("GET", where)["run_after"])
    found: dict[str, list[float]] = {name: [] for name in SENSORS}
    for ti in running.call("GET", f"{where}/taskInstances?limit=1000")["task_instances"]:
        name, _, number = ti["task_id"].partition(".")
        after = HEAD_START + EVERY * (2 * int(number) + SENSORS.index(name))
        found[name].append((datetime.fromisoformat(ti["end_date"]) - began).total_seconds() - after)
    return found


def report(results: dict[str, list[Result]], count: int) -> None:
    print(f"\n{f'{count:,} waits, ms late':24}{'p50':>9}{'p99':>9}{'max':>9}{'early':>7}{'CPU s':>8}")
    for name, found in results.items():
        cpu = statistics.median(each.cpu for each in found)
        if name == AT_ONCE:
            print(f"{name:24}{'':34}{cpu:8.2f}")
            continue
        p50, p99, most = (statistics.median(each.part(share) for each in found) for share in (0.5, 0.99, 1))
        early = sum(late < 0 for each in found for late in each.late)
        print(f"{name:24}{p50:9.1f}{p99:9.1f}{most:9.1f}{early:7}{cpu:8.2f}")
    print("\nmedian of the rounds' ratios")
    ratios: dict[str, list[float]] = {}
    for free, ours, core, plain, least in zip(*results.values(), strict=True):
        for what, ratio in (
            (f"p99, {OURS} / {BARE} (wanted: at most 2)", ours.part(0.99) / free.part(0.99)),
            (f"p99, {OURS} / {CORE} (wanted: at most 0.05)", ours.part(0.99) / core.part(0.99)),
            (f"CPU net of {AT_ONCE!r}, {OURS} / {CORE}", (ours.cpu - least.cpu) / (core.cpu - least.cpu)),
            (
                f"CPU net of {PLAIN!r}, {OURS} / {CORE} (wanted: at most 0.125)",
                (ours.cpu - plain.cpu) / (core.cpu - plain.cpu),
            ),
        ):
            ratios.setdefault(what, []).append(ratio)
    for what, found in ratios.items():
        print(f"{statistics.median(found):8.3f} {what}")


if __name__ == "__main__":
    sys.exit(main())
