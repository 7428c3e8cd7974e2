"""Nights of a live Airflow with two DAG processors, whose runs fail and recover, and what became of their escalations.

What Airflow's database says of a run is compared with what its messages came to. The verdict does not depend on how
fast the machine is: everything is waited for, frozen and let go by conditions; no message becomes due by itself; and
what shall be dispatched is made due in the store.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, text

from airflow_delayed.hooks.store import DelayedStoreHook
from services import airflow, airflow_programs

QUEUE = "desk"
ENDED = ("success", "failed")
FOLDERS = ("waits", "red", "retried", "killed", "gates", "at_gate", "began")
#: By the fate of a run, what its task does: see acceptance/nights/playing.py. A run that overlaps is at work until the
#: others have ended, and is green then; one behind it begins after that. A cleared run is green the second time, and
#: one that is red again is cleared once more; "twice" is cleared, and red as before.
FATES: Mapping[str, Sequence[str]] = {
    "green": (),
    "behind": (),
    "overlapping": ("waits",),
    "red": ("red",),
    "late": ("waits", "red"),
    "retried": ("retried",),
    "cleared": ("red",),
    "again": ("red",),
    "twice": ("red",),
    "marked": ("red",),
    "killed": ("killed",),
}
#: By fate or DAG, the ways in which an escalation may be lost, or come though the run is green.
WAYS = {
    "marked": "a person marks a red run as success",
    "silent": "the store cannot be reached for longer than the 10 seconds",
}
#: How long something is waited for that must come, in seconds.
PATIENCE = 420
#: After so many seconds without a call, the DAG files are read again: Airflow forgets the callbacks of a file that it
#: was at work on when they came, until then.
NUDGE = 3


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a DAG. Its name is that of the plan: of its conf, or its day."""

    dag: str
    run_id: str
    name: str

    @property
    def place(self) -> str:
        return f"{self.dag}.{self.name}"

    @property
    def key(self) -> tuple[str, str]:
        return self.dag, self.run_id


@dataclass
class Row:
    """A run as Airflow's database has it."""

    state: str
    run_type: str
    run_after: Any
    start_date: Any
    bundle_version: str | None


@dataclass
class Tally:
    """What was counted of the runs of a DAG."""

    runs: int = 0
    red: int = 0
    #: Messages that came for red runs.
    came: int = 0
    #: Red runs whose escalation did not come, and green ones whose came.
    missing: int = 0
    false: int = 0
    #: Messages of one run beyond the first.
    more: int = 0


@dataclass
class Nights:
    """The live Airflow, its files and its store."""

    live: airflow.Airflow
    folder: Path
    metadata: Engine
    store: DelayedStoreHook
    second: airflow_programs.Program
    #: How often Airflow must have called the callbacks of each run, by DAG, run and kind.
    expected: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    #: The way in which a run's escalation may be lost, or come though it is green.
    ways: dict[tuple[str, str], str] = field(default_factory=dict)
    tallies: dict[str, Tally] = field(default_factory=dict)
    #: By way: how many were lost or came by it, and how many not.
    by_way: dict[str, Counter[bool]] = field(default_factory=dict)
    #: Of the store, at each dispatch.
    armed: int = 0
    taken_back: int = 0
    verdicts: list[str] = field(default_factory=list)
    _open: dict[tuple[str, str], Run] = field(default_factory=dict)
    _late: int = 0

    # what is planned

    def put(self, kind: str, place: str) -> None:
        (self.folder / kind / place).touch()

    def remove(self, kind: str, place: str) -> None:
        (self.folder / kind / place).unlink(missing_ok=True)

    def there(self, kind: str, place: str) -> bool:
        return (self.folder / kind / place).exists()

    def plan(self, place: str, fate: str) -> None:
        """Have a run end by its fate: see FATES."""
        for kind in FATES[fate]:
            self.put(kind, place)

    # runs

    def start(self, dag: str, name: str, fate: str = "green", **conf: object) -> Run:
        """Start a run."""
        run = Run(dag, name, name)
        self.plan(run.place, fate)
        conf = {"name": name, **conf}
        self.live.call("POST", f"/dags/{dag}/dagRuns", dag_run_id=name, logical_date=None, conf=conf)
        return self._opened(run)

    def by_schedule(self, dag: str, fates: Mapping[str, str], past: Mapping[str, str]) -> list[Run]:
        """Have the scheduler catch up days, and a backfill make those of the past."""
        for day, fate in {**fates, **past}.items():
            self.plan(f"{dag}.{day}", fate)
        self.live.call("PATCH", f"/dags/{dag}", is_paused=False)
        if past:
            self.live.backfill(dag, min(past), max(past))
        days = {**fates, **past}
        self.until(f"the runs of {dag}", lambda: len([1 for name, _ in self.rows() if name == dag]) == len(days))
        runs = [Run(dag, run_id, run_id.partition("__")[2][:10]) for name, run_id in self.rows() if name == dag]
        assert {run.name for run in runs} == set(days)
        return [self._opened(run) for run in runs]

    def _opened(self, run: Run) -> Run:
        self._open[run.key] = run
        return run

    def clear(self, run: Run, **more: object) -> None:
        """Clear all tasks of a run that has ended."""
        self.live.call(
            "POST",
            f"/dags/{run.dag}/clearTaskInstances",
            dry_run=False,
            dag_run_id=run.run_id,
            only_failed=False,
            reset_dag_runs=True,
            **more,
        )
        self._opened(run)

    def mend(self, runs: Iterable[Run]) -> None:
        """Clear runs, which are green then."""
        for run in runs:
            self.remove("red", run.place)
            self.clear(run)

    def mark(self, run: Run, state: str) -> None:
        """Mark a run as a person does."""
        self.live.call("PATCH", f"/dags/{run.dag}/dagRuns/{run.run_id}", state=state)

    def rows(self) -> dict[tuple[str, str], Row]:
        """Return what Airflow's database has of each run."""
        query = "SELECT dag_id, run_id, state, run_type, run_after, start_date, bundle_version FROM dag_run"
        with self.metadata.connect() as connection:
            return {(row[0], row[1]): Row(*row[2:]) for row in connection.execute(text(query))}

    def number(self, query: str) -> int:
        with self.metadata.connect() as connection:
            return int(connection.execute(text(query)).scalar_one())

    def end(self, runs: Iterable[Run]) -> None:
        """Wait for runs to end, and expect the callbacks of these ends."""
        runs = list(runs)

        def ended() -> bool:
            rows = self.rows()
            return all(run.key in rows and rows[run.key].state in ENDED for run in runs)

        self.until("the end of runs", ended)
        rows = self.rows()
        for run in runs:
            red = rows[run.key].state == "failed"
            if run.dag in ("parts", "alone") and red:
                self.expected[(*run.key, "task failure")] += 4
            else:
                self.expected[(*run.key, "failure" if red else "success")] += 1

    # processes

    def restart(self, part: str, **more: str) -> None:
        """End a process as a service manager does, and start it again; ``more`` is added to its environment."""
        if part == "two":
            self.second.stop()
            self.second = self.live.begin("airflow", "dag-processor", NIGHTS_PROCESSOR="two", **more)
        else:
            part = {"one": "dag-processor"}.get(part, part)
            self.live.stop(part)
            self.live.start(part, **more)

    @property
    def parts(self) -> dict[str, airflow_programs.Program]:
        parts = self.live.parts
        return {"one": parts["dag-processor"], "two": self.second, **parts}

    def freeze(self, part: str) -> None:
        """Stop a process and its children where they are."""
        self.parts[part].signal(signal.SIGSTOP, group=True)

    def thaw(self, part: str) -> None:
        """Let them go on."""
        self.parts[part].signal(signal.SIGCONT, group=True)

    def thaw_all(self) -> None:
        for part in self.parts:
            self.thaw(part)

    def pending(self) -> int:
        """How many callbacks no DAG processor has taken."""
        return self.number("SELECT count(*) FROM callback WHERE type = 'dag_processor'")

    def take(self, processor: str) -> None:
        """Wait until a DAG processor, before whose gate the first stands, has taken all failures; and freeze it."""
        self.until("a callback at the gate", lambda: self.there("at_gate", processor))
        self.until("the other callbacks", lambda: not self.pending())
        self.freeze(processor)
        self.remove("gates", processor)
        self.remove("at_gate", processor)

    def lose(self, run: Run, way: str, kind: str = "failure") -> None:
        """Expect a run's last callback no more, for it is lost in this way."""
        self.ways[run.key] = way
        self.expected[(*run.key, kind)] -= 4 if kind == "task failure" else 1

    @contextmanager
    def locked(self, engine: Engine, table: str) -> Iterator[Callable[[], bool]]:
        """Keep others from writing to a table; gives a question whether somebody waits for it."""
        with engine.connect() as connection, connection.begin():
            connection.execute(text(f"LOCK TABLE {table} IN EXCLUSIVE MODE"))
            query = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = CAST(:name AS regclass)"

            def awaited() -> bool:
                return bool(connection.execute(text(query), {"name": table}).scalar_one())

            yield awaited

    # what came of it

    def calls(self) -> Counter[tuple[str, str, str]]:
        """Return how often Airflow has called the callbacks of each run."""
        file = self.folder / "calls"
        lines = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
        return Counter((line["dag"], line["run"], line["kind"]) for line in lines)

    def uncalled(self) -> Counter[tuple[str, str, str]]:
        """Return the calls that have not come."""
        return self.expected - self.calls()

    def settle(self, *, success: Iterable[Run] | None = None) -> None:
        """Wait until Airflow has called all that it has to call; or what it calls at the success of these runs."""
        keys = None if success is None else {(*run.key, "success") for run in success}
        self.until(
            "callbacks",
            lambda: not [key for key in self.uncalled() if keys is None or key in keys],
            nudge=True,
            explain=lambda: str(dict(self.uncalled())),
        )
        if keys is None:
            self.until("deadlines", lambda: not self.deadlines("queued", "pending", "running"))

    def missed(self, runs: int, *, frozen: bool) -> None:
        """Wait until so many more runs have missed their deadline, and escalate unless the triggerer is frozen."""
        self._late += runs
        states = ("success", "failed", *(("queued", "pending", "running") if frozen else ()))
        self.until("missed deadlines", lambda: self.deadlines(*states) >= self._late)

    def deadlines(self, *states: str) -> int:
        """How many callbacks of deadlines have one of these states."""
        among = ", ".join(f"'{state}'" for state in states)
        return self.number(
            f"SELECT count(*) FROM callback WHERE type IN ('triggerer', 'executor') AND state IN ({among})"
        )

    def until(
        self,
        what: str,
        true: Callable[[], object],
        *,
        seconds: float = PATIENCE,
        nudge: bool = False,
        explain: Callable[[], str] = str,
    ) -> None:
        """Wait for a condition."""
        began = nudged = time.monotonic()
        while not true():
            now = time.monotonic()
            assert now < began + seconds, f"{what}: not within {seconds:.0f} s {explain()}"
            if nudge and now > nudged + NUDGE:
                self.nudge()
                nudged = now
            time.sleep(0.1)
        # shown where a test fails
        print(f"{time.monotonic() - began:5.1f} s for {what}")

    def nudge(self) -> None:
        """Have both DAG processors read the DAG files again."""
        for file in (self.folder / "dags").glob("*.py"):
            os.utime(file)

    def count(self, table: str) -> int:
        with self.store.engine.connect() as connection:
            return int(connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one())

    def waiting(self) -> list[dict[str, Any]]:
        """Return the failures that the messages in the store stand for."""
        with self.store.engine.connect() as connection:
            headers = connection.execute(text('SELECT "Headers" FROM delayed_messages')).scalars()
            return [
                one for text in headers for one in json.loads(json.loads(bytes(text))["airflow-escalation"])["latest"]
            ]

    def dispatch(self) -> list[dict[str, str]]:
        """Make all that waits due, dispatch it, and return the headers."""
        self.armed += self.count("delayed_messages")
        self.taken_back += self.count("delayed_messages_cancelled")
        with self.store.engine.begin() as connection:
            due = "now() AT TIME ZONE 'utc' - interval '1 second'"
            connection.execute(text(f'UPDATE delayed_messages SET "Time" = {due}, "NextTry" = {due}'))
            connection.execute(text("DELETE FROM delayed_messages_cancelled"))
        report = self.store.dispatcher([self.store.conn_id], lambda name, clock: self.store).run()
        assert not self.count("delayed_messages"), report
        with self.store.engine.begin() as connection:
            headers = connection.execute(text(f"DELETE FROM {QUEUE} RETURNING headers")).scalars()
            return [json.loads(one) for one in headers]

    def judge(self) -> None:
        """Dispatch, and compare what came with the state of each run that has ended since the last time."""
        came: Counter[tuple[str, str]] = Counter()
        for message in self.dispatch():
            # once for each run that it stands for
            named = json.loads(message["airflow-escalation"])
            assert named["failures"] == len(named["latest"]), named
            came.update({(one["dag_id"], one["run_id"]) for one in named["latest"]})
        rows = self.rows()
        for key, run in self._open.items():
            row = rows[key]
            tally = self.tallies.setdefault(run.dag.rstrip("_0123456789"), Tally())
            tally.runs += 1
            tally.red += row.state == "failed"
            red = row.state == "failed" and not self.replaced(run, rows)
            wrong = (came[key] == 0) if red else (came[key] > 0)
            if way := self.ways.get(key):
                self.by_way.setdefault(way, Counter())[wrong] += 1
                continue
            if wrong:
                self.verdicts.append(
                    f"{run.dag} {run.run_id}: {row.state}, {came[key]} messages came, called {self.called(run)}"
                )
            tally.missing += red and wrong
            tally.false += not red and wrong
            tally.came += came[key] if red else 0
            tally.more += max(0, came[key] - self.most(run))
        self._open.clear()

    def most(self, run: Run) -> int:
        """How many messages may come for a run: one, or one for each task that is by itself."""
        return 4 if run.dag == "alone" else 1

    def called(self, run: Run) -> dict[str, int]:
        return {kind: count for (dag, run_id, kind), count in self.calls().items() if (dag, run_id) == run.key}

    def replaced(self, run: Run, rows: Mapping[tuple[str, str], Row]) -> bool:
        """Whether a later run of the schedule that succeeded ends the escalation of this one."""
        dag, number = run.dag.rstrip("_0123456789"), run.dag.rpartition("_")[2]
        mine = rows[run.key]
        if dag != "nightly" or mine.run_type != "scheduled":
            return False
        return any(
            row.state == "success"
            and row.run_type == "scheduled"
            and row.run_after > mine.run_after
            # two customers, where the number is odd
            and (int(number) % 2 == 0 or (row.run_after - mine.run_after).days % 2 == 0)
            for (other, _), row in rows.items()
            if other == run.dag
        )

    def table(self) -> list[str]:
        """Return the lines of a table of what was counted."""
        columns = ("runs", "red", "came", "missing", "false", "more")
        titles = (
            "DAG",
            "runs",
            "red",
            "messages that came for them",
            "red, none came",
            "green, and came",
            "one run's further",
        )
        tallies = {**self.tallies, "all": _sum(self.tallies.values())}
        lines = [" | ".join(titles)]
        for dag, tally in tallies.items():
            lines.append(" | ".join([dag, *(str(getattr(tally, name)) for name in columns)]))
        lines.append(f"in the store at the dispatches: {self.armed} armed, {self.taken_back} taken back")
        for way, counts in sorted(self.by_way.items()):
            lines.append(
                f"{way}: {counts.total()} runs, of which {counts[True]} lost their escalation or had one too many"
            )
        return [*lines, *self.verdicts]


def _sum(tallies: Iterable[Tally]) -> Tally:
    total = Tally()
    for tally in tallies:
        for name in vars(total):
            setattr(total, name, getattr(total, name) + getattr(tally, name))
    return total


@dataclass(frozen=True, kw_only=True)
class Round:
    """The runs of a round, by their fates.

    :param reordered: DAG processors and the triggerer are frozen, so that failures' callbacks come after those of the
        ends that followed.
    """

    number: int
    reordered: bool
    night: Sequence[str]
    days: Sequence[str]
    past: Sequence[str]
    customers: Sequence[str]
    parts: Sequence[str]
    alone: Sequence[str] = ()
    late: Sequence[str] = ()
    late_sync: Sequence[str] = ()
    garbled: Sequence[str] = ()
    silent: Sequence[str] = ()
    queued: Sequence[str] = ()


def play(nights: Nights, a_round: Round) -> None:
    """Play a round: runs fail, with others at work; then some recover, and the others end."""
    # they change places from one reordered round to the next
    one, other = ("one", "two") if a_round.number % 4 < 2 else ("two", "one")
    if a_round.reordered:
        for part in (other, "triggerer"):
            nights.freeze(part)
        nights.put("gates", one)
    runs = _started(nights, a_round)
    at_work = [*runs["overlapping"], *runs["late"], *runs["behind"]]
    nights.end([run for those in runs.values() for run in those if run not in at_work])
    alerts = (*a_round.late, *a_round.late_sync, *a_round.queued)
    nights.missed(len(alerts), frozen=a_round.reordered)
    if a_round.reordered:
        nights.take(one)
        nights.thaw(other)
    else:
        nights.settle()

    mended = [*runs["cleared"], *runs["again"]]
    nights.mend(mended)
    for run in at_work:
        nights.remove("waits", run.place)
    for run in runs["marked"]:
        nights.mark(run, "success")
    nights.end([*mended, *at_work])
    nights.settle(success=[*mended, *runs["overlapping"], *runs["behind"]])
    for run in runs["again"]:
        nights.put("red", run.place)
    again = [*runs["again"], *runs["twice"]]
    for run in again:
        nights.clear(run)
    nights.end(again)
    nights.thaw_all()
    nights.settle()
    nights.judge()


def _started(nights: Nights, a_round: Round) -> Mapping[str, Sequence[Run]]:
    """Start the runs of a round, and return them by their fates."""
    runs = defaultdict[str, list[Run]](list)
    for dag in ("night", "late", "late_sync", "customers", "parts", "alone", "garbled", "silent", "queued"):
        for index, fate in enumerate(getattr(a_round, dag)):
            name = f"{a_round.number}-{index}-{fate}"
            run = nights.start(dag, name, fate, customer=f"customer-{index % 2}")
            runs[fate].append(run)
            if way := WAYS.get(fate) or WAYS.get(dag):
                nights.ways[run.key] = way
    days = {f"2026-01-{10 + index}": fate for index, fate in enumerate(a_round.days)}
    past = {f"2026-01-0{1 + index}": fate for index, fate in enumerate(a_round.past)}
    for run in nights.by_schedule(f"nightly_{a_round.number}", days, past):
        runs[{**days, **past}[run.name]].append(run)
    return runs
