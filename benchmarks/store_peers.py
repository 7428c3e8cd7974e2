"""What the benchmarks of the store share: one PostgreSQL, a database for each contestant, workers, and the report.

A worker is a script that is called with an action, the database's URL, how many messages, and the process id of the
server; it tells a :class:`measured.Measured`. Each runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(ROOT / ".ci"), str(HERE)]

import peers  # noqa: E402
import psycopg2  # noqa: E402
from measured import Measured  # noqa: E402

from services import postgres  # noqa: E402

OURS, PROCRASTINATE, PGQUEUER, PGMQ = "ours", "procrastinate", "pgqueuer", "pgmq"
WORKERS = {
    OURS: "store_worker.py",
    PROCRASTINATE: "peer_procrastinate.py",
    PGQUEUER: "peer_pgqueuer.py",
    PGMQ: "peer_pgmq.py",
}


@dataclass(frozen=True)
class Server:
    url: str
    pid: int

    @contextmanager
    def database(self, name: str | None = None) -> Iterator[str]:
        """Make a database, and drop it at the end."""
        name = name or f"bench_{uuid4().hex[:12]}"
        self.run(f'CREATE DATABASE "{name}"')
        try:
            yield f"{self.url.rpartition('/')[0]}/{name}"
        finally:
            self.run(f'DROP DATABASE "{name}" WITH (FORCE)')

    def run(self, *statements: str, url: str | None = None) -> None:
        """Run statements that want no transaction."""
        with closing(psycopg2.connect(url or self.url)) as connection:
            connection.autocommit = True
            with connection.cursor() as cursor:
                for statement in statements:
                    cursor.execute(statement)

    def settle(self, url: str) -> None:
        """Do now what would come in the middle of the measurement."""
        self.run("VACUUM ANALYZE", "CHECKPOINT", url=url)


@contextmanager
def server() -> Iterator[Server]:
    """Run a private PostgreSQL, fsync on."""
    with postgres.running() as running, closing(psycopg2.connect(running.url)) as connection:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_read_file('postmaster.pid')")
            pid = int(cursor.fetchone()[0].split()[0])
        connection.rollback()
        yield Server(running.url, pid)


@contextmanager
def long_snapshot(url: str) -> Iterator[None]:
    """Hold a transaction open that keeps all that is removed from being cleared away."""
    with closing(psycopg2.connect(url)) as connection:
        connection.set_session(isolation_level="REPEATABLE READ", readonly=True)
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_class")
            yield


def work(
    name: str, action: str, url: str, count: int, server: Server, *more: str, root: Path = ROOT
) -> Measured | None:
    """Run a contestant's worker and return what it measured; None when it only fills.

    :param root: the checkout whose worker runs.
    """
    python = sys.executable if name == OURS else peers.python()
    command = [python, str(root / "benchmarks" / WORKERS[name]), action, url, str(count), str(server.pid), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=_env())
    if done.returncode:
        raise SystemExit(f"{name} {action} failed:\n{done.stderr[-3000:]}")
    # Airflow logs to the same stream
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return Measured(**json.loads(lines[-1])) if lines else None


def measured(name: str, action: str, url: str, count: int, server: Server, *more: str, root: Path = ROOT) -> Measured:
    """Run a contestant's worker, and insist on its having done all."""
    found = work(name, action, url, count, server, *more, root=root)
    if found is None or found.count != count:
        raise SystemExit(f"{name} {action}: {count} messages were asked for, and it did {found}")
    return found


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(HERE)}


class Rounds:
    """Results of each contestant by round; the first round, number 0, only warms up."""

    def __init__(self) -> None:
        self.found: dict[str, list[Measured]] = {}

    def note(self, number: int, name: str, result: Measured) -> None:
        print(f"round {number}: {name}: {result.rate:,.0f}/s", file=sys.stderr, flush=True)
        if number:
            self.found.setdefault(name, []).append(result)

    def table(self) -> None:
        print(f"\n{'':44}{'messages/s':>12}{'client CPU us':>15}{'server CPU us':>15}   (medians; a message)")
        for name, results in self.found.items():
            columns = ("rate", "client_us", "server_us")
            rate, client, used = (statistics.median(getattr(each, column) for each in results) for column in columns)
            print(f"{name:44}{rate:12,.0f}{client:15.1f}{used:15.1f}")
        print("\nmedian of the rounds' ratios")

    def ratio(self, one: str, other: str, wanted: float | None, text: str, factor: float = 1) -> bool:
        """Print how one's rate stands to another's, round by round, and return whether that is as wanted."""
        pairs = zip(self.found[one], self.found[other], strict=True)
        return verdict([factor * first.rate / second.rate for first, second in pairs], wanted, text)


def verdict(ratios: Sequence[float], wanted: float | None, text: str) -> bool:
    """Print a median with its range and the least that is wanted, and return whether it is reached."""
    median = statistics.median(ratios)
    aim = "no target" if wanted is None else f"wanted: {wanted:.3g}"
    print(f"{median:8.2f} {text} ({min(ratios):.2f} to {max(ratios):.2f}; {aim})")
    return wanted is None or median >= wanted


def alternating(number: int, contestants: Sequence[Callable[[], None]]) -> None:
    """Run each; every other round the other way round, so that each comes before and after each other one."""
    for contestant in contestants if number % 2 else list(reversed(contestants)):
        contestant()
