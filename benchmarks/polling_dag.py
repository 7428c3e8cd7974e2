"""A table and a DAG every five minutes, beside this package: lateness, kill -9, taking back, and lines of code.

    python benchmarks/polling_dag.py [--rounds 3] [--hours 0.5] [--rate 1] [--messages 100000]
    python benchmarks/polling_dag.py --hours 0 --messages 1000000    # only taking back, of a million

All contestants use one private PostgreSQL with fsync on and one SQS emulator, with a database and a queue of their own
in each round; the rounds alternate. Each runs its DAG's task every five minutes, in a process that is forked from a
ready one, so the start of a worker and the delays of Airflow's scheduler are in no figure. All have batches of 500.

- mark-after: ``polling_peer.py`` sends a batch that is due, and marks its rows in the same transaction.
- mark-before: the same, but it marks the rows, commits, and then sends.
- ahead: as mark-after, but it takes what falls due in the next 15 minutes, and SQS holds it back (DelaySeconds). This
  is the best of the three, and needs a broker that can delay a message.
- package: ``polling_package.py``, which looks 15 minutes ahead by default.

Nobody waits five minutes: the emulator's clock is moved, and before each run every time in the database is moved back
by as much, which is the same as a later clock there. Messages fall due together every 20 s or so. A consumer looks at
that moment by the emulator's clock, in the seconds after it, and all the time while a run sends; late is what passes
from when a message is due until the consumer has it. Both clocks go on while a task works, so a busy machine makes
messages of ``ahead`` later, by up to the time that a batch takes: it computes the delays when it selects the rows.

With kills, every other run is killed by ``kill -9`` at a random place in its first messages, and the next run by the
schedule goes on. Taking back is one call, by a customer to whom half of the rows belong, while nothing else runs.
Lines of code are those of the two files without comments, docstrings and blank lines.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import boto3
import psycopg2
from measured import Measured
from polling_worker import AFTER, AHEAD, BEFORE, PACKAGE
from store_fill import fill
from store_lateness import percentile
from store_peers import HERE, Server, alternating, verdict
from store_peers import server as running

from services import sqs

CONTESTANTS = (AFTER, BEFORE, AHEAD, PACKAGE)
QUEUE, CUSTOMER = "reminders", "customer-7"
KEYS = MappingProxyType({"aws_access_key_id": "emulator", "aws_secret_access_key": "emulator"})
#: Seconds between two runs of the DAG.
GAP = 300
#: Runs after the last message was due; the last one sends what a killed run left.
MORE_RUNS = 2
#: Seconds between the moments at which messages fall due, and by how much they differ from that.
EVERY, VARYING = 20, 15
#: Seconds after such a moment at which the consumer looks; delays are whole seconds, rounded up.
LOOKS = (0.0, 1.1, 2.1, 3.1, 4.1, 6.1, 8.1, 10.1)
FILES = MappingProxyType({AFTER: "polling_peer.py", PACKAGE: "polling_package.py"})


@dataclass
class Arrivals:
    """The messages of one simulated time: when each was due, and when it came."""

    due: dict[str, datetime]
    came: list[tuple[str, datetime]] = field(default_factory=list)
    kills: int = 0

    @property
    def late(self) -> list[float]:
        """Seconds, of each message that came, the first time it did."""
        first: dict[str, datetime] = {}
        for name, at in self.came:
            first.setdefault(name, at)
        return [(at - self.due[name]).total_seconds() for name, at in first.items()]

    @property
    def twice(self) -> int:
        return sum(count - 1 for count in Counter(name for name, _ in self.came).values())

    @property
    def lost(self) -> int:
        return len(self.due) - len({name for name, _ in self.came})

    @property
    def early(self) -> int:
        return sum(at < self.due[name] for name, at in self.came)

    def __str__(self) -> str:
        late = ", ".join(f"{percentile(self.late, part):.1f}" for part in (0.5, 0.99, 1))
        return (
            f"{self.kills} kills, late by {late} s (median, p99, max), {self.early} early, {self.twice} twice,"
            f" {self.lost} lost"
        )


class World:
    """The database and the queue of one contestant, on a clock that is moved."""

    def __init__(self, emulator: sqs.Sqs, url: str, client: Any, queue: str) -> None:
        self._emulator = emulator
        self._url = url
        self._client = client
        self._queue = queue
        self._rows_moved = emulator.offset
        self.environment = environment(url, emulator)

    def now(self) -> datetime:
        return self._emulator.now()

    def move_to(self, moment: datetime) -> None:
        """Move the broker's clock."""
        self._emulator.advance(max(0.0, (moment - self.now()).total_seconds()))

    def move_rows(self) -> None:
        """Move all times in the database back by what the broker's clock was moved."""
        span = self._emulator.offset - self._rows_moved
        self._rows_moved = self._emulator.offset
        columns: dict[str, list[str]] = {}
        with closing(psycopg2.connect(self._url)) as connection, connection, connection.cursor() as cursor:
            cursor.execute(
                "SELECT table_name, column_name FROM information_schema.columns"
                " WHERE table_schema = 'public' AND data_type LIKE 'timestamp%'"
            )
            for table, column in cursor.fetchall():
                columns.setdefault(table, []).append(f'"{column}" = "{column}" - %(span)s')
            for table, changes in columns.items():
                cursor.execute(f'UPDATE "{table}" SET {", ".join(changes)}', {"span": span})

    def sent(self) -> int:
        """How many messages the queue holds."""
        kinds = ("", "Delayed", "NotVisible")
        names = [f"ApproximateNumberOfMessages{kind}" for kind in kinds]
        found = self._client.get_queue_attributes(QueueUrl=self._queue, AttributeNames=names)["Attributes"]
        return sum(int(found[name]) for name in names)

    def consume(self, arrivals: Arrivals) -> None:
        """Receive and delete all that is visible."""
        while received := self._client.receive_message(QueueUrl=self._queue, MaxNumberOfMessages=10).get("Messages"):
            at = self.now()
            arrivals.came += [(message["Body"], at) for message in received]
            entries = [{"Id": str(n), "ReceiptHandle": one["ReceiptHandle"]} for n, one in enumerate(received)]
            self._client.delete_message_batch(QueueUrl=self._queue, Entries=entries)


@dataclass(frozen=True)
class Servers:
    """What all contestants share."""

    database: Server
    emulator: sqs.Sqs
    workers: Workers


class Workers:
    """Runs tasks of contestants, one at a time, each in a process of its own; see polling_worker.py."""

    def __init__(self, errors: IO[str]) -> None:
        self._errors = errors
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "polling_worker.py")],
            stdin=pipe,
            stdout=pipe,
            stderr=errors,
            text=True,
            env={**os.environ, "PYTHONPATH": str(HERE)},
        )
        self._heard: list[str] = []
        self._rest = ""
        self._pid = 0

    def begin(self, name: str, action: str, environment: Mapping[str, str], argument: Any = None) -> None:
        """Start a task."""
        self._process.stdin.write(json.dumps([name, action, environment, argument]) + "\n")
        self._process.stdin.flush()
        self._heard, self._pid = [], 0
        while not self._pid:
            self._read(1)
            self._pid = next((int(line.split()[1]) for line in self._heard if line.startswith("started ")), 0)

    def ended(self, wait: float = 0, *, code: int = 0) -> bool:
        """Whether it has ended; it is an error if it ended with another code."""
        self._read(wait)
        for line in self._heard:
            if line.startswith("ended "):
                if line != f"ended {code}":
                    self._fail(line)
                return True
        return False

    def finish(self) -> list[str]:
        """Wait until it has ended, and return what it printed."""
        while not self.ended(1):
            pass
        return self._heard

    def kill(self) -> bool:
        """Kill it with SIGKILL; return False if it had ended before."""
        os.kill(self._pid, signal.SIGKILL)
        while not any(line.startswith("ended ") for line in self._heard):
            self._read(1)
        return f"ended {-signal.SIGKILL}" in self._heard

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()

    def _read(self, wait: float) -> None:
        if self._process.poll() is not None:
            self._fail("the workers ended")
        output = self._process.stdout
        # each line is written at once
        while select.select([output.fileno()], [], [], wait)[0]:
            wait = 0
            data = os.read(output.fileno(), 65_536)
            if not data:
                break
            self._rest += data.decode()
        *lines, self._rest = self._rest.split("\n")
        self._heard += lines

    def _fail(self, text: str) -> None:
        self._errors.seek(0)
        raise SystemExit(f"{text}:\n{self._errors.read()[-3000:]}")


def environment(url: str, emulator: sqs.Sqs | None) -> dict[str, str]:
    found = {"AIRFLOW_CONN_REMINDERS_DB": url}
    if emulator is not None:
        found["AIRFLOW_CONN_AWS_DEFAULT"] = json.dumps(sqs.connection(emulator.url))
    return found


@contextmanager
def world(server: Server, emulator: sqs.Sqs) -> Iterator[World]:
    client = boto3.client("sqs", endpoint_url=emulator.url, region_name=sqs.REGION, **KEYS)
    url = client.create_queue(QueueName=QUEUE)["QueueUrl"]
    try:
        with server.database() as database:
            yield World(emulator, database, client, url)
    finally:
        client.delete_queue(QueueUrl=url)


def simulate(servers: Servers, name: str, hours: float, rate: float, seed: int | None) -> Arrivals:
    """Play some hours; with a seed, kill every other run somewhere in the messages that it sends."""
    # the same due times for all
    chance, places, span = random.Random(1), random.Random(seed), hours * 3600
    workers = servers.workers
    with world(servers.database, servers.emulator) as own:
        began = own.now()
        moments = [
            began + timedelta(seconds=GAP + number * EVERY + chance.uniform(0, VARYING))
            for number in range(int(span / EVERY))
        ]
        arrivals = Arrivals({f"{n:04}-{m:04}": at for n, at in enumerate(moments) for m in range(round(rate * EVERY))})
        # the database's clock is the machine's, and the broker's is ahead of it by what it was moved
        ahead = own.now() - datetime.now().astimezone()
        rows = [(one, CUSTOMER, one, (at - ahead).isoformat()) for one, at in arrivals.due.items()]
        workers.begin(name, "store", own.environment, rows)
        workers.finish()
        for run in range(int(span / GAP) + 1 + MORE_RUNS):
            start = began + timedelta(seconds=run * GAP)
            own.move_to(start)
            own.move_rows()
            workers.begin(name, "run", own.environment)
            if seed is not None and run % 2 and killed(own, workers, places.uniform(0.05, 0.95) * rate * GAP):
                arrivals.kills += 1
            else:
                while not workers.ended():
                    own.consume(arrivals)
            own.consume(arrivals)
            for moment in moments:
                if start <= moment < start + timedelta(seconds=GAP):
                    for after in LOOKS:
                        own.move_to(moment + timedelta(seconds=after))
                        own.consume(arrivals)
    return arrivals


def killed(own: World, workers: Workers, place: float) -> bool:
    """Kill a task when it has sent so many messages; return False if it ended before."""
    before = own.sent()
    while own.sent() - before < place:
        if workers.ended():
            return False
    return workers.kill()


def take_back(servers: Servers, name: str, count: int) -> Measured:
    """Take back half of twice as many rows."""
    server, workers = servers.database, servers.workers
    with server.database() as url:
        workers.begin(name, "store", environment(url, None))
        workers.finish()
        customer = f"CASE WHEN number % 2 = 0 THEN '{CUSTOMER}' ELSE 'other-' || number END"
        if name == PACKAGE:
            fill(url, "delayed_messages", "aws_default", 2 * count, ahead=3600, columns={"Tag": customer})
        else:
            rows = (
                f"SELECT md5(number::text), {customer}, repeat('x', 200), now() + make_interval(secs => 3600 + number)"
                f" FROM generate_series(0, {2 * count} - 1) AS number"
            )
            server.run(f"INSERT INTO reminders (id, customer, body, due_at) {rows}", url=url)
        server.settle(url)
        workers.begin(name, "take-back", environment(url, None), [CUSTOMER, server.pid])
        answer = next(line for line in workers.finish() if line.startswith("{"))
    found = Measured(**json.loads(answer))
    if found.count != count:
        raise SystemExit(f"{name}: {count} messages were to be taken back, and {found.count} were")
    return found


def lines(path: Path) -> int:
    """Count the lines of a file without comments, docstrings and blank lines."""
    tree = ast.parse(path.read_text())
    found: set[int] = set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING):
                found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node) is not None:
            found -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--hours", type=float, default=0.5, help="simulated, of each contestant in each round; 0: only take back"
    )
    parser.add_argument("--rate", type=float, default=1, help="messages that fall due in a second")
    parser.add_argument("--messages", type=int, default=100_000, help="to take back")
    options = parser.parse_args()
    quiet: dict[str, list[Arrivals]] = {name: [] for name in CONTESTANTS if name != BEFORE}
    with_kills: dict[str, list[Arrivals]] = {name: [] for name in CONTESTANTS}
    taken: dict[str, list[Measured]] = {name: [] for name in FILES}

    def play(number: int, name: str, *, kill: bool) -> None:
        found = simulate(servers, name, options.hours, options.rate, number if kill else None)
        (with_kills if kill else quiet)[name].append(found)
        note(number, name, str(found))

    def take(number: int, name: str) -> None:
        found = take_back(servers, name, options.messages)
        taken[name].append(found)
        note(number, name, f"{found.count} taken back in {found.seconds:.1f} s")

    with running() as server, sqs.running() as emulator, tempfile.TemporaryFile("w+") as errors, ExitStack() as stack:
        servers = Servers(server, emulator, Workers(errors))
        stack.callback(servers.workers.close)
        for number in range(1, options.rounds + 1):
            tasks: list[Callable[[], None]] = []
            if options.hours:
                # without kills, the order of mark and send shows nothing
                tasks += [partial(play, number, name, kill=False) for name in CONTESTANTS if name != BEFORE]
                tasks += [partial(play, number, name, kill=True) for name in CONTESTANTS]
            tasks += [partial(take, number, name) for name in taken]
            alternating(number, tasks)
    return 0 if report(quiet, with_kills, taken) else 1


def note(number: int, name: str, text: str) -> None:
    print(f"round {number}: {name}: {text}", file=sys.stderr, flush=True)


def report(
    quiet: dict[str, list[Arrivals]], with_kills: dict[str, list[Arrivals]], taken: dict[str, list[Measured]]
) -> bool:
    for title, played in (("no kills", quiet), ("every other run killed", with_kills)):
        if not played[PACKAGE]:
            continue
        print(
            f"\n{title:24}{'late p50':>10}{'p99':>8}{'max':>8}{'early':>7}{'kills':>7}{'sent':>8}{'arrived':>9}", end=""
        )
        print(f"{'twice':>7}{'lost':>7}   (seconds: medians of the rounds; counts: of all rounds)")
        for name, found in played.items():
            middle, p99, most = (
                statistics.median(percentile(each.late, part) for each in found) for part in (0.5, 0.99, 1)
            )
            early, kills, sent, came, twice, lost = (
                sum(each)
                for each in zip(
                    *((one.early, one.kills, len(one.due), len(one.came), one.twice, one.lost) for one in found),
                    strict=True,
                )
            )
            print(f"{name:24}{middle:10.1f}{p99:8.1f}{most:8.1f}{early:7}{kills:7}{sent:8}{came:9}{twice:7}{lost:7}")
        for name, found in played.items():
            each = [percentile(one.late, 1) for one in found]
            twice, lost = [one.twice for one in found], [one.lost for one in found]
            print(
                f"  {name}: in a round late by {min(each):.1f} to {max(each):.1f} s at most,"
                f" {min(twice)} to {max(twice)} twice, {min(lost)} to {max(lost)} lost"
            )
    print(f"\n{'take back':24}{'messages':>10}{'seconds':>9}{'range':>16}{'client CPU us':>15}{'server CPU us':>15}")
    for name, found in taken.items():
        seconds = [one.seconds for one in found]
        client, used = (
            statistics.median(getattr(one, column) for one in found) for column in ("client_us", "server_us")
        )
        span = f"{min(seconds):.2f} to {max(seconds):.2f}"
        print(
            f"{FILES[name]:24}{found[0].count:10}{statistics.median(seconds):9.2f}{span:>16}{client:15.1f}{used:15.1f}"
        )
    pairs = zip(taken[PACKAGE], taken[AFTER], strict=True)
    verdict(
        [one.seconds / other.seconds for one, other in pairs],
        None,
        f"times as long by {FILES[PACKAGE]} as by {FILES[AFTER]}",
    )
    print("\nlines of code: " + ", ".join(f"{file} {lines(HERE / file)}" for file in FILES.values()))
    ours = [*quiet[PACKAGE], *with_kills[PACKAGE]]
    wrong = sum(one.lost + one.early for one in ours)
    print(f"{wrong} lost or early by {PACKAGE} (wanted: 0)")
    return not wrong


if __name__ == "__main__":
    sys.exit(main())
