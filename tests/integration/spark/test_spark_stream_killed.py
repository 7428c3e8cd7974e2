"""A stream whose driver is killed again and again, compared with a reference: its rows, and what arrived.

`make test-long` plays it on a cluster of two workers, where executors and a dispatcher are killed too, and the broker
is stopped once.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from itertools import cycle, islice
from pathlib import Path

import pytest
from sqlalchemy import func, select
from support.lengths import LONG, TABLES, length
from support.rabbitmq import VirtualHost, eventually
from support.spark import Connections, environment

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.message import utcnow
from services import java, rabbitmq
from services import spark as service

pytestmark = pytest.mark.long

VICTIMS = length("victims of a stream", ("driver",), ("driver", "executor", "dispatcher"))
KILLS = length("kills while a stream runs", 1, 20)
BATCHES = length("batches of a stream", 4, 200)
ROWS = length("rows of each of these batches", 400, 5_000)
#: The kinds of a batch's rows, in turn: due at once, in hours, and while the stream runs, for a dispatcher.
KINDS = length("kinds of these rows", ("near", "far"), ("near", "far", "soon", "far"))
LINES = TABLES.setdefault("a stream whose parts are killed", [])
SCHEMA = "message_id string, value string, due_at timestamp"
#: What a kill sends twice at most: what a dispatcher has claimed; what a task has written, before and after the kill.
CLAIMED, WRITTEN = 10_000, length("messages that a kill of a stream repeats at most", 100, 2 * 100)


class Stream:
    """The ready job as a stream, in a process of its own."""

    def __init__(self, folder: Path, connections: Connections, cluster: service.Cluster | None) -> None:
        self.folder = folder
        self._driver: subprocess.Popen[bytes] | None = None
        options = {
            "deliver": "broker",
            "store": "waits",
            "hold_over": 10,
            "destination": "mail",
            "past_due": "send",
            "rejects": folder / "rejects",
            "manifest": folder / "counts",
            "connections_file": connections.path,
            "batch_rows": 100,
        }
        self._command = [sys.executable, "-m", "airflow_delayed.spark.job", "--source", str(folder / "rows")]
        self._command += ["--format", "json", "--schema", SCHEMA, "--read", "maxFilesPerTrigger=1"]
        self._command += ["--checkpoint", str(folder / "checkpoint")]
        self._command += [word for name, value in options.items() for word in ("--set", f"{name}={value}")]
        self._conf = {"spark.ui.enabled": "false", "spark.sql.session.timeZone": "UTC"}
        self._master = "local[2]"
        if cluster is not None:
            self._master = cluster.url
            self._conf |= {"spark.executor.cores": "2", "spark.executor.memory": "512m", "spark.cores.max": "4"}
            self._conf |= {"spark.driver.host": "127.0.0.1"}

    def start(self) -> None:
        java.require()
        conf = " ".join(f"--conf {name}={value}" for name, value in self._conf.items())
        submit = {"PYSPARK_SUBMIT_ARGS": f"--master {self._master} {conf} pyspark-shell"}
        self._driver = begin(self._command, self.folder / "log", environment() | submit)

    def kill(self) -> None:
        if self._driver is not None:
            kill(self._driver)

    def finish(self) -> None:
        """Run it to its end, with two retries, as of a task that had no broker for a while."""
        for _ in range(3 if LONG else 1):
            if not self.runs:
                self.start()
            if self._driver is not None and self._driver.wait(timeout=6000) == 0:
                return
        pytest.fail((self.folder / "log").read_text()[-3000:])

    @property
    def runs(self) -> bool:
        return self._driver is not None and self._driver.poll() is None

    def committed(self) -> int:
        """Return how many batches Spark has noted as done; it keeps the notes of the last hundred."""
        done = (self.folder / "checkpoint/commits").glob("[0-9]*")
        return max((int(file.name) + 1 for file in done), default=0)


def begin(command: list[str], log: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a process with a group of its own."""
    with log.open("ab") as out:
        return subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)


def kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Dispatcher:
    """``airflow delayed dispatcher``, in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "dispatcher.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        words = ["delayed", "dispatcher", "--store-conn-id", "waits", "--deliver-conn-ids", "broker"]
        self._process = begin([sys.executable, "-m", "airflow", *words], self._log, dict(os.environ))

    def kill(self) -> None:
        if self._process is not None:
            kill(self._process)

    def replace(self) -> None:
        self.kill()
        self.start()


def until_in_a_batch(stream: Stream, least: int, far: Callable[[], int]) -> bool:
    """Wait until messages of a batch are stored that the stream has not noted as done; False: it ended before.

    :param least: batches that are noted as done by then.
    """
    deadline = time.monotonic() + 300
    while stream.runs and time.monotonic() < deadline:
        done = stream.committed()
        if done >= least and far() > done * ROWS // 2:
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(name="host")
def host_fixture(request: pytest.FixtureRequest) -> VirtualHost:
    """Of a broker that may be stopped, if the test does that."""
    host: VirtualHost = request.getfixturevalue("own_vhost" if LONG else "vhost")
    return host


@pytest.fixture(name="own")
def own_fixture(request: pytest.FixtureRequest) -> rabbitmq.Broker | None:
    return request.getfixturevalue("own_broker") if LONG else None


@pytest.fixture(name="cluster")
def cluster_fixture() -> Iterator[service.Cluster | None]:
    if not LONG:
        yield None
        return
    with service.running(env=environment()) as running:
        yield running


def write_rows(folder: Path) -> dict[str, set[str]]:
    """Write a file for each batch; return the ids by kind."""
    folder.mkdir()
    now, numbers = utcnow(), list(range(BATCHES * ROWS))
    random.Random(1).shuffle(numbers)
    ids: dict[str, set[str]] = {kind: set() for kind in KINDS}
    for batch in range(BATCHES):
        lines = []
        # a batch of the long run takes some seconds
        dues = {"near": 0, "far": 24 * 3600, "soon": 60 + 3 * batch}
        for number in numbers[batch * ROWS : (batch + 1) * ROWS]:
            kind = KINDS[number % len(KINDS)]
            ids[kind].add(name := f"{kind}-{number}")
            due = now + timedelta(seconds=dues[kind])
            lines.append(json.dumps({"message_id": name, "value": name, "due_at": due.isoformat()}))
        (folder / f"{batch:04}.json").write_text("\n".join(lines))
    return ids


@pytest.mark.timeout(7200)
def test_nothing_is_lost_and_nothing_is_stored_twice(
    store: DelayedStoreHook,
    host: VirtualHost,
    own: rabbitmq.Broker | None,
    cluster: service.Cluster | None,
    connections: Connections,
    connect: Callable[..., str],
    tmp_path: Path,
) -> None:
    connect(connections.add("broker", **host.connection), **host.connection)
    host.declare("mail")
    ids = write_rows(tmp_path / "rows")
    soon = ids.get("soon", set())
    stream, dispatcher = Stream(tmp_path, connections, cluster), Dispatcher(tmp_path)
    table = store.tables.messages

    def waiting(kind: str) -> int:
        with store.engine.connect() as connection:
            return int(connection.execute(select(func.count()).where(table.c.Id.startswith(kind))).scalar_one())

    kills = {"driver": stream.kill, "dispatcher": dispatcher.replace}
    if cluster is not None:
        kills["executor"] = cluster.kill_executor
    with ExitStack() as stack:
        stack.callback(dispatcher.kill)
        stack.callback(stream.kill)
        if soon:
            dispatcher.start()
        killed: Counter[str] = Counter()
        least = stops = 0
        for number, victim in enumerate(islice(cycle(VICTIMS), KILLS)):
            if not stream.runs:
                stream.start()
            if not until_in_a_batch(stream, least, lambda: waiting("far")):
                continue
            killed[victim] += 1
            least = stream.committed() + 1
            kills[victim]()
            if own is not None and number == KILLS // 2:
                own.stop()
                time.sleep(10)
                own.start()
                stops += 1
        assert killed.keys() == {*VICTIMS}
        assert bool(stops) == (own is not None)
        stream.finish()
        if soon:
            eventually(lambda: not waiting("soon"), 300)

    assert stream.committed() == BATCHES
    with store.engine.connect() as connection:
        assert set(connection.execute(select(table.c.Id)).scalars()) == ids["far"]
    arrived: Counter[str] = Counter()
    while host.count("mail"):
        arrived.update(one.message_id for one in host.collect("mail", enough=1, more=1))
    assert arrived.keys() == ids["near"] | soon
    of_soon = sum(many - 1 for name, many in arrived.items() if name in soon)
    twice = arrived.total() - len(arrived)
    LINES.append(f"killed {dict(killed)}: {len(arrived):,} arrived, twice {twice:,}, of stored ones {of_soon:,}")
    assert of_soon <= (killed["dispatcher"] + stops) * CLAIMED
    assert twice - of_soon <= (killed["driver"] + killed["executor"] + stops) * WRITTEN
    files = list((tmp_path / "counts").glob("*/*.json"))
    assert sum(json.loads(file.read_text())["summary"]["rows"] for file in files) == BATCHES * ROWS
    assert not (tmp_path / "rejects").exists()
