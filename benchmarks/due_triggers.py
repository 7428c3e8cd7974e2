"""How late waits end in a real triggerer, and what they cost: DueTimeTrigger beside Airflow's DateTimeTrigger.

    python benchmarks/due_triggers.py [--waits 10000] [--spread 60] [--rounds 1]

A private PostgreSQL as Airflow's database holds that many deferred task instances, one trigger each; one `airflow
triggerer` process with the capacity for all runs them, nothing else of Airflow does. When all are loaded, which takes
it minutes, each waits for its own moment, spread evenly over a minute. Late is what passes from a trigger's moment
until its run() goes on, by the triggerer's own clock.

The limit beside it, in the same run: a process with nothing but an asyncio loop and call_later for as many moments,
which looks at the clock before it calls.

CPU is user and system time of the triggerer's processes, supervisor and runner, from when all are loaded until the last
has fired; net of as many triggers that return at once, in a triggerer that then runs on for as long.
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
from datetime import datetime, timezone
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from timed_triggers import FIRING, HEAD_START

from services import airflow, postgres, process

#: Seconds after which it is given up.
PATIENCE = 1500
BARE, OURS, CORE, AT_ONCE = "bare timer heap", "DueTimeTrigger", "DateTimeTrigger", "returns at once"
KINDS = {OURS: "DueTime", CORE: "DateTime", AT_ONCE: "AtOnce"}


@dataclass
class Result:
    #: Milliseconds after the moment, sorted.
    late: list[float]
    #: Seconds of CPU, supervisor and runner.
    cpu: float
    runner: float

    def part(self, share: float) -> float:
        return self.late[min(len(self.late) - 1, int(len(self.late) * share))]


def moments(first: float, count: int, spread: float) -> list[float]:
    return [first + spread * number / count for number in range(count)]


def bare(count: int, spread: float, answer: Connection) -> None:
    """Wait on an asyncio loop alone, and tell how many milliseconds late each moment was, and the CPU that it took."""
    late: list[float] = []

    async def wait() -> None:
        loop = asyncio.get_running_loop()
        over = asyncio.Event()

        def fire(moment: float) -> None:
            if (left := moment - time.time()) > 0:
                loop.call_later(left, fire, moment)
                return
            late.append((time.time() - moment) * 1000)
            if len(late) == count:
                over.set()

        for moment in moments(time.time() + 2, count, spread):
            loop.call_later(moment - time.time(), fire, moment)
        await over.wait()

    asyncio.run(wait())
    answer.send((late, time.process_time()))


def measure_bare(count: int, spread: float) -> Result:
    here, there = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(target=bare, args=(count, spread, there), daemon=True)
    child.start()
    if not here.poll(spread + 60):
        raise SystemExit("the bare timer heap gave no answer")
    late, cpu = here.recv()
    child.join()
    return Result(sorted(late), cpu, cpu)


class Waits:
    """Deferred task instances in a database of Airflow, and the triggerer that runs their triggers."""

    def __init__(self, url: str, home: Path) -> None:
        self._home = home
        self._firings = home / "firings"
        self.env = {
            **airflow.environment(home, home / "dags", {}),
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": url.replace("postgresql://", "postgresql+psycopg2://", 1),
            "AIRFLOW__TRIGGERER__MAX_TRIGGER_TO_SELECT_PER_LOOP": "100000",
            "AIRFLOW__CORE__FERNET_KEY": "",
            "DUE_TRIGGERS_FILE": str(self._firings),
            # where the triggerer and the program that fills the database find this folder, and the package
            "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parents[1])]),
        }
        (home / "dags").mkdir()
        self._airflow = [*airflow.without_the_users(self.env), str(Path(sys.executable).with_name("airflow"))]
        subprocess.run(
            [*self._airflow, "db", "migrate"], env={**os.environ, **self.env}, check=True, stdout=subprocess.DEVNULL
        )

    def measure(self, name: str, count: int, spread: float) -> Result:
        self._firings.write_bytes(b"")
        env = {**os.environ, **self.env}
        subprocess.run([sys.executable, __file__, "--fill", KINDS[name], str(count), repr(spread)], env=env, check=True)
        log = self._home / f"{KINDS[name]}.log"
        command = [*self._airflow, "triggerer", "--skip-serve-logs", "--capacity", str(count + 1)]
        with process.running(command, log=log, env=self.env) as triggerer:
            self._wait_for(1, log)
            before = cpu_of(triggerer.pid)
            loaded = time.monotonic()
            self._wait_for(1 + count, log)
            # as long for those that return at once: an idle triggerer takes something too
            time.sleep(max(0.0, loaded + HEAD_START + spread - time.monotonic()))
            after = cpu_of(triggerer.pid)
        _, *firings = FIRING.iter_unpack(self._firings.read_bytes())
        late = sorted((at - moment) * 1000 for moment, at in firings)
        return Result(late, after[0] - before[0], after[1] - before[1])

    def _wait_for(self, records: int, log: Path) -> None:
        deadline = time.monotonic() + PATIENCE
        while self._firings.stat().st_size < records * FIRING.size:
            if time.monotonic() > deadline:
                raise SystemExit(f"not all have fired\n{log.read_text()[-3000:]}")
            time.sleep(0.1)


def cpu_of(pid: int) -> tuple[float, float]:
    """Return the CPU seconds of a triggerer in all, and of its runner."""
    parent = psutil.Process(pid)
    spent = [sum(one.cpu_times()[:2]) for one in (parent, *parent.children(recursive=True))]
    return sum(spent), sum(spent[1:])


def fill(kind: str, count: int, spread: float) -> None:
    """Put the deferred task instances into Airflow's database, in place of those of an earlier round."""
    from airflow.dag_processing.bundles.manager import DagBundlesManager
    from airflow.dag_processing.dagbag import DagBag, sync_bag_to_db
    from airflow.models.dagbag import DBDagBag
    from airflow.models.taskinstance import TaskInstance
    from airflow.models.trigger import Trigger
    from airflow.providers.standard.operators.empty import EmptyOperator
    from airflow.sdk import DAG
    from airflow.utils.session import create_session
    from airflow.utils.types import DagRunTriggeredByType, DagRunType
    from sqlalchemy import insert, text
    from timed_triggers import Timed

    with DAG("waits", schedule=None) as dag:
        EmptyOperator(task_id="wait")
    bag = DagBag(os.devnull)
    bag.bag_dag(dag)
    DagBundlesManager().sync_bundles_to_db()
    sync_bag_to_db(bag, "dags-folder", None)
    now = datetime.now(timezone.utc)
    rows: list[dict[str, Any]] = []
    for number, after in enumerate(moments(0.0, count, spread), 1):
        path, arguments = Timed(kind, after, count).serialize()
        kept = Trigger.encrypt_kwargs(arguments)
        rows.append({"id": number, "classpath": path, "encrypted_kwargs": kept, "created_date": now})
    with create_session() as session:
        for table in ("task_instance", "trigger", "dag_run"):
            session.execute(text(f"DELETE FROM {table}"))
        session.execute(insert(Trigger), rows)
        kept_dag = DBDagBag().get_latest_version_of_dag("waits", session=session)
        assert kept_dag is not None
        kept_dag.create_dagrun(
            run_id="manual__waits",
            run_after=now,
            run_type=DagRunType.MANUAL,
            triggered_by=DagRunTriggeredByType.TEST,
            state="running",
            session=session,
        )
        session.flush()
        session.execute(
            text(
                "UPDATE task_instance SET state = 'deferred', next_method = 'resume', trigger_id = 1, map_index = 1,"
                " try_number = 1"
            )
        )
        own = {"id": "gen_random_uuid()", "map_index": "number", "trigger_id": "number"}
        names = [column.name for column in TaskInstance.__table__.columns]
        session.execute(
            text(
                f"INSERT INTO task_instance ({', '.join(names)})"
                f" SELECT {', '.join(own.get(name, name) for name in names)}"
                f" FROM task_instance, generate_series(2, {count}) AS number"
            )
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--waits", type=int, default=10_000)
    parser.add_argument("--spread", type=float, default=60.0, help="seconds over which their moments are spread")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--fill", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fill:
        kind, count, spread = options.fill
        fill(kind, int(count), float(spread))
        return 0
    results: dict[str, list[Result]] = {name: [] for name in (BARE, OURS, CORE, AT_ONCE)}
    with postgres.running() as server, tempfile.TemporaryDirectory(prefix="due-triggers-") as home:
        waits = Waits(server.url, Path(home))
        for number in range(1, options.rounds + 1):
            for name in results if number % 2 else reversed(results):
                if name == BARE:
                    result = measure_bare(options.waits, options.spread)
                else:
                    result = waits.measure(name, options.waits, options.spread)
                results[name].append(result)
                print(
                    f"round {number}: {name}: p99 {result.part(0.99):.1f} ms, CPU {result.cpu:.1f} s", file=sys.stderr
                )
    report(results, options.waits)
    return 0


def report(results: dict[str, list[Result]], count: int) -> None:
    print(f"\n{f'{count:,} waits, ms late':24}{'p50':>9}{'p99':>9}{'max':>9}{'early':>7}{'CPU s':>8}{'runner':>8}")
    for name, found in results.items():
        if name == AT_ONCE:
            p50 = p99 = most = float("nan")
            early = 0
        else:
            p50, p99, most = (statistics.median(each.part(share) for each in found) for share in (0.5, 0.99, 1))
            early = sum(late < 0 for each in found for late in each.late)
        cpu, runner = statistics.median(each.cpu for each in found), statistics.median(each.runner for each in found)
        print(f"{name:24}{p50:9.1f}{p99:9.1f}{most:9.1f}{early:7}{cpu:8.1f}{runner:8.1f}")
    print("\nmedian of the rounds' ratios")
    for what, one, other, target in (
        ("p99", OURS, BARE, 2.0),
        ("p99", OURS, CORE, 1 / 20),
        ("net CPU", OURS, CORE, 1 / 8),
    ):
        ratios = []
        for first, second, base in zip(results[one], results[other], results[AT_ONCE], strict=True):
            if what == "p99":
                ratios.append(first.part(0.99) / second.part(0.99))
            else:
                ratios.append((first.cpu - base.cpu) / (second.cpu - base.cpu))
        print(f"{statistics.median(ratios):8.3f} {what} {one} / {other} (wanted: at most {target})")


if __name__ == "__main__":
    sys.exit(main())
