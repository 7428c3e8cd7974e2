"""The primary of a store's PostgreSQL is killed or falls silent while messages are stored and dispatched.

At the end of a run stands a table of these tests: what was confirmed, arrived, came twice, was lost or early, how late
it came, the longest time without an arrival, the time from the fault to the first warning, and what it says.
"""

from __future__ import annotations

import itertools
import logging
import random
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import datetime, timedelta, timezone

import psycopg
import pytest
from support.chaos import Outcome, table
from support.lengths import TABLES
from support.proxy import proxy

from airflow_delayed.cli import service
from airflow_delayed.cli.service import ConnectionLoop
from airflow_delayed.delivery import SendReport
from airflow_delayed.errors import DelayedError
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.message import DelayedMessage
from airflow_delayed.store.policy import DispatchPolicy
from services import postgres, rabbitmq_cluster
from services.postgres import Postgres

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
TITLE = "A store's PostgreSQL whose primary fails, in seconds"
UTC = timezone.utc
#: Messages of a run, of one transaction, and per second.
COUNT, BATCH, RATE = 10_000, 20, 400
#: Seconds from the first message to the fault, and from the fault to the promotion.
BEFORE, PROMOTED_AFTER = 10.0, 5.0
#: Seconds for which a silent server is silent.
SILENT = 60.0
#: Seconds without an arrival after which what is still to come counts as lost.
STUCK = 60.0
OUTCOMES: list[Outcome] = []
Connect = Callable[..., str]


class Broker:
    """Confirms each message, and notes when it came: its id, the time, and the seconds after its due time."""

    horizon = timedelta(days=1)

    def __init__(self) -> None:
        self.arrivals: list[tuple[str, float, float]] = []

    def check(self, message: DelayedMessage, now: datetime) -> None:
        """Nothing is too long."""

    def send(self, messages) -> SendReport:
        report = SendReport()
        for message in messages:
            late = (datetime.now(UTC) - message.due_at).total_seconds()
            self.arrivals.append((message.message_id, time.time(), late))
            report.add(message)
        return report

    def close(self) -> None:
        """There is nothing to close."""


class Run:
    """A sender and two dispatchers as services, on one store."""

    def __init__(self, conn_id: str, broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
        self._conn_id, self._broker, self._caplog = conn_id, broker, caplog
        self._confirmed: set[str] = set()
        self._errors: list[str] = []

    def play(self, name: str, fault: Callable[[], None]) -> Outcome:
        """Store messages, make a fault some seconds later, and wait for all arrivals."""
        ended = threading.Event()
        loops = [
            ConnectionLoop("broker", DispatchPolicy(lookahead=timedelta(0)), self._store, None, ended.set)
            for _ in range(2)
        ]
        sender = threading.Thread(target=self._send, daemon=True)
        for each in (*loops, sender):
            each.start()
        time.sleep(BEFORE)
        began = time.time()
        fault()
        sender.join(300)
        self._wait()
        for loop in loops:
            loop.stop()
        while any(loop.running for loop in loops):
            time.sleep(0.1)
        outcome = self._outcome(name, began)
        OUTCOMES.append(outcome)
        TABLES[TITLE] = table(OUTCOMES)
        return outcome

    def _store(self) -> DelayedStoreHook:
        return DelayedStoreHook(self._conn_id, "broker")

    def _send(self) -> None:
        """Store messages at a rate; after an error again what was not confirmed, as a task's retry does."""
        choose, start = random.Random(1), time.monotonic()
        with closing(self._store()) as hook:
            for first in range(0, COUNT, BATCH):
                time.sleep(max(0.0, start + first / RATE - time.monotonic()))
                due = datetime.now(UTC) + timedelta(seconds=choose.uniform(0, 5))
                batch = [
                    DelayedMessage(destination="orders", body=b"%d" % n, due_at=due, message_id=f"m{n}")
                    for n in range(first, first + BATCH)
                ]
                while True:
                    try:
                        hook.send(batch)
                        break
                    except DelayedError as error:
                        self._errors.append(str(error))
                        time.sleep(0.5)
                self._confirmed.update(message.message_id for message in batch)

    def _wait(self) -> None:
        came, since = 0, time.monotonic()
        while self._confirmed - {name for name, _, _ in list(self._broker.arrivals)}:
            if len(self._broker.arrivals) > came:
                came, since = len(self._broker.arrivals), time.monotonic()
            if time.monotonic() - since > STUCK:
                return
            time.sleep(0.5)

    def _outcome(self, name: str, began: float) -> Outcome:
        arrivals = self._broker.arrivals
        counts = Counter(each for each, _, _ in arrivals)
        late = sorted(seconds for _, _, seconds in arrivals)
        times = sorted(at for _, at, _ in arrivals)
        records = [
            one
            for one in self._caplog.get_records("call")
            if one.name.startswith("airflow_delayed") and one.levelno >= logging.WARNING and one.created >= began
        ]
        log = [f"log after {one.created - began:.1f} s: {one.getMessage()}" for one in records]
        return Outcome(
            name,
            confirmed=len(self._confirmed),
            arrived=len(counts),
            twice=sum(counts.values()) - len(counts),
            lost=len(self._confirmed - counts.keys()),
            early=sum(seconds < 0 for seconds in late),
            late=" / ".join(f"{late[int(part * (len(late) - 1))]:.1f}" for part in (0.5, 0.99, 1)),
            silence=f"{max(b - a for a, b in itertools.pairwise(times)):.1f}",
            named=round(records[0].created - began, 1) if records else None,
            notes=[f"    {note[:240]}" for note in (*log[:4], *(f"send(): {error}" for error in self._errors[:2]))],
        )


@pytest.fixture
def start(connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[..., Run]:
    """Start a run on these servers, of which the first is the primary."""

    def run(*servers: Postgres) -> Run:
        broker = Broker()
        monkeypatch.setattr(service, "delivery_for", lambda conn_id, clock: broker)
        caplog.handler.setLevel(logging.WARNING)
        conn_id = connect(
            "store",
            conn_type="postgres",
            host=",".join(server.host for server in servers),
            login="postgres",
            password=servers[0].password,
            schema="delayed",
            extra={"port": ",".join(str(server.port) for server in servers)},
        )
        with closing(DelayedStoreHook(conn_id, "broker")) as hook:
            hook.install([])
        return Run(conn_id, broker, caplog)

    return run


def wait_for_standby(primary: Postgres) -> None:
    """Let each commit of a primary wait for its standby."""
    with psycopg.connect(primary.url, autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
        connection.execute("SELECT pg_reload_conf()")


@pytest.mark.parametrize("lag", ["synchronous", 0, 2])
def test_a_standby_takes_over(start: Callable[..., Run], lag: str | int) -> None:
    """The primary is killed; its standby has all, or what it received until so many seconds before."""
    with ExitStack() as stack:
        primary = stack.enter_context(postgres.running())
        between = stack.enter_context(proxy(primary.port, primary.host))
        standby = stack.enter_context(postgres.standby(primary, port=between.port))
        if lag == "synchronous":
            wait_for_standby(primary)

        def fault() -> None:
            if lag and lag != "synchronous":
                between.fall_silent()
                time.sleep(float(lag))
            primary.kill()
            time.sleep(PROMOTED_AFTER)
            standby.promote()

        behind = lag if lag == "synchronous" else f"asynchronous, {lag} s behind"
        outcome = start(primary, standby).play(f"primary killed, standby {behind}", fault)
    assert (outcome.confirmed, outcome.early) == (COUNT, 0)
    if lag == "synchronous":
        assert (outcome.lost, outcome.twice) == (0, 0)


@pytest.fixture
def apart() -> Iterator[tuple[Postgres, Callable[[bool], None]]]:
    """A server in a network of its own, and what loses its answers: no reset ever comes."""
    if why := rabbitmq_cluster.why_no_partition():
        TABLES["a silent PostgreSQL"] = [f"not played: {why}"]
        pytest.skip(why)
    with (
        rabbitmq_cluster.networks() as (network, *_),
        postgres.running(host=network.host, within=network.within) as server,
    ):
        client = network.host.rpartition(".")[0] + ".254"

        def silence(on: bool) -> None:
            nowhere = ["replace", client, "lladdr", "02:00:00:00:00:fe", "nud", "permanent"]
            command = nowhere if on else ["delete", client]
            subprocess.run(["ip", "-netns", network.namespace, "neighbour", *command, "dev", "eth0"], check=True)

        yield server, silence


def test_a_silent_server_that_comes_back(start: Callable[..., Run], apart) -> None:
    server, silence = apart

    def fault() -> None:
        silence(True)
        time.sleep(SILENT)
        silence(False)

    outcome = start(server).play(f"server silent for {SILENT:g} s", fault)
    assert (outcome.confirmed, outcome.lost, outcome.early) == (COUNT, 0, 0)


def test_a_silent_server_whose_standby_takes_over(start: Callable[..., Run], apart) -> None:
    server, silence = apart
    with postgres.standby(server) as standby:
        wait_for_standby(server)

        def fault() -> None:
            silence(True)
            time.sleep(PROMOTED_AFTER)
            standby.promote()

        outcome = start(server, standby).play("server silent, its synchronous standby promoted", fault)
    assert (outcome.confirmed, outcome.lost, outcome.early) == (COUNT, 0, 0)
