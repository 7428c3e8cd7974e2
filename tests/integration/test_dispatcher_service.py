"""``airflow delayed dispatcher``: a process that stays, is rolled, and outlives its database and brokers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from datetime import timedelta
from http.client import HTTPConnection
from pathlib import Path
from socket import create_connection
from threading import active_count
from typing import Any
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support import statsd_exporter
from support.forked import Child
from support.proxy import proxy
from support.rabbitmq import eventually
from support.serving import serve
from support.stores import Store, message, on_postgres_too

from airflow_delayed.cli import service
from airflow_delayed.cli.service import MAX_CONNECTIONS, ProbeServer, health
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.store.policy import DispatchPolicy
from services import postgres
from services.process import free_port

SECOND = timedelta(seconds=1)
#: Seconds for what happens at once, and may take longer on a slow machine.
PATIENCE = 120
#: Seconds by which a message may be late while replicas are rolled: less than a lease, which none has to wait for.
LATE = 20.0

on_sqlite = pytest.mark.parametrize("store", ["sqlite"], indirect=True)


def ask(port: int, path: str) -> tuple[int, str]:
    """Status and text of an answer; 0 if nobody listens."""
    with closing(HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as connection:
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except ConnectionError:
            return 0, ""


@dataclass
class Replica:
    """One process of the command."""

    child: Child
    port: int
    log: Path

    def status(self, path: str) -> int:
        return ask(self.port, path)[0]

    def become(self, path: str, status: int) -> None:
        eventually(lambda: self.status(path) == status, PATIENCE)


@dataclass
class Replicas:
    """Starts processes of the command, all with one journal of what they send."""

    folder: Path
    started: list[Replica] = field(default_factory=list)

    def start(
        self, conn_id: str, schema: str | None, *words: str, names: tuple[str, ...] = ("broker",), **more
    ) -> Replica:
        port, log = free_port(), self.folder / f"log{len(self.started)}"
        arguments = [
            "--store-conn-id",
            conn_id,
            "--deliver-conn-ids",
            *names,
            "--port",
            str(port),
            "--lookahead",
            "0",
            *words,
        ]
        if schema is not None:
            arguments += ["--schema", schema]
        child = Child(serve, arguments=arguments, journal=str(self.folder / "journal"), log=str(log), **more)
        self.started.append(Replica(child, port, log))
        return self.started[-1]

    def sent(self) -> list[str]:
        return [message_id for message_id, _ in self._lines()]

    def lateness(self) -> list[float]:
        return [float(seconds) for _, seconds in self._lines()]

    def _lines(self) -> list[list[str]]:
        journal = self.folder / "journal"
        return [line.split() for line in journal.read_text().splitlines()] if journal.exists() else []


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[Replicas]:
    made = Replicas(tmp_path)
    yield made
    for replica in made.started:
        replica.child.close()


@on_postgres_too
def test_replicas_are_rolled_while_messages_come_due(store: Store, replicas: Replicas):
    hook = store.installed()
    running = [replicas.start(store.conn_id, store.schema) for _ in range(2)]
    for replica in running:
        replica.become("/ready", 200)
    names = [f"m{number:03}" for number in range(200)]
    # some for each roll, however long the one before took
    for batch in (names[:100], names[100:]):
        old = running.pop(0)
        before, start = len(replicas.sent()), hook.now()
        hook.send(message(name, start + SECOND / 2 + number * SECOND / 50) for number, name in enumerate(batch))
        eventually(lambda wanted=before + 20: len(replicas.sent()) >= wanted, PATIENCE)
        old.child.signal(signal.SIGTERM)
        assert old.child.ended() == 0
        running.append(replicas.start(store.conn_id, store.schema))
        running[-1].become("/ready", 200)
    eventually(lambda: hook.count() == 0, PATIENCE)
    for replica in running:
        replica.child.signal(signal.SIGINT)
        assert replica.child.ended() == 0
    # lost none, sent none twice, none early
    assert sorted(replicas.sent()) == names
    assert min(replicas.lateness()) >= 0
    assert max(replicas.lateness()) < LATE


@on_postgres_too
def test_a_signal_in_the_middle_of_a_send_ends_it_and_frees_the_rest(store: Store, replicas: Replicas):
    hook = store.installed()
    names = [f"m{number:04}" for number in range(2000)]
    hook.send(message(name, hook.now() - SECOND) for name in names)
    replica = replicas.start(store.conn_id, store.schema)
    eventually(lambda: len(replicas.sent()) >= 50, PATIENCE)
    replica.child.signal(signal.SIGTERM)
    assert replica.child.ended() == 0
    sent = replicas.sent()
    assert 50 <= len(sent) < 2000
    assert len(set(sent)) == len(sent)
    assert store.leased(hook) == set()
    assert {one.message_id for one in hook.list()} == set(names) - set(sent)
    # it has recorded in the store that it has ended
    assert [one.ended_at is not None for one in hook.dispatchers()] == [True]


@on_sqlite
@pytest.mark.parametrize("grace, reason", [(0.2, "did not end within 0.2 s"), (None, "ended by a second signal, 2")])
def test_a_send_that_does_not_end(store: Store, replicas: Replicas, grace: float | None, reason: str):
    hook = store.installed()
    names = [f"m{number:02}" for number in range(20)]
    hook.send(message(name, hook.now() - SECOND) for name in names)
    replica = replicas.start(store.conn_id, None, "--claim-timeout", "6", hangs_after=5, grace=grace)
    eventually(lambda: len(replicas.sent()) == 5, PATIENCE)
    replica.become("/ready", 200)
    replica.child.signal(signal.SIGTERM)
    if grace is None:
        eventually(lambda: replica.status("/ready") == 503, PATIENCE)
        assert replica.status("/live") == 200
        replica.child.signal(signal.SIGINT)
    assert replica.child.ended() == 1
    log = replica.log.read_text()
    assert reason in log
    assert "20 messages are leased, which others send when their leases end: some may come twice" in log
    # some seconds later they are free, and none is lost
    second = replicas.start(store.conn_id, None)
    eventually(lambda: hook.count() == 0, PATIENCE)
    second.child.signal(signal.SIGTERM)
    assert second.child.ended() == 0
    assert set(replicas.sent()) == set(names)
    assert len(replicas.sent()) == 25


@on_sqlite
def test_a_broker_that_is_away_holds_up_no_other(store: Store, replicas: Replicas, tmp_path: Path):
    hook = store.installed("q", deliver_conn_id=None)
    away = tmp_path / "away"
    away.touch()
    store.hook("broker").send([message("waits", hook.now() - SECOND)])
    words = ["--give-up-after", "0"]
    names = (store.conn_id, "broker")
    replica = replicas.start(store.conn_id, None, *words, names=names, away={"broker": str(away)})
    replica.become("/ready", 200)
    eventually(lambda: "connection refused" in replica.log.read_text(), PATIENCE)
    hook.send([message("other", hook.now())])
    eventually(lambda: len(store.rows(hook, "q")) == 1, PATIENCE)
    assert replica.status("/live") == 200
    assert replicas.sent() == []
    away.unlink()
    eventually(lambda: replicas.sent() == ["waits"], PATIENCE)
    replica.become("/ready", 200)


@on_sqlite
def test_one_that_delivers_nothing_of_what_is_due_is_not_ready_and_says_so(
    store: Store, replicas: Replicas, tmp_path: Path
):
    hook = store.installed()
    away = tmp_path / "away"
    hook.send([message("soon", hook.now())])
    words = ["--give-up-after", "0"]
    replica = replicas.start(store.conn_id, None, *words, stalled=1.0, away={"broker": str(away)})
    eventually(lambda: replicas.sent() == ["soon"], PATIENCE)
    replica.become("/ready", 200)
    away.touch()
    hook.send([message(f"waits{number}", hook.now() - 60 * SECOND) for number in range(3)])
    replica.become("/ready", 503)
    assert json.loads(ask(replica.port, "/ready")[1])["stalled"] == ["broker"]
    line = r"1 messages dispatched so far, 3 overdue, broker fails since \d\d:\d\d:\d\d UTC"
    eventually(lambda: re.search(line, replica.log.read_text()), PATIENCE)
    assert replica.status("/live") == 200
    away.unlink()
    replica.become("/ready", 200)


def test_it_outlives_its_database(connect, replicas: Replicas):
    with postgres.running() as server:
        connect("store_down", server.url)
        with closing(DelayedStoreHook("store_down", "broker")) as hook:
            hook.install([])
            replica = replicas.start("store_down", None)
            replica.become("/ready", 200)
            hook.send([message("before", hook.now())])
            eventually(lambda: replicas.sent() == ["before"], PATIENCE)
            server.stop()
            replica.become("/ready", 503)
            assert json.loads(ask(replica.port, "/ready")[1])["database"] is False
            assert replica.status("/live") == 200
            server.start()
            replica.become("/ready", 200)
            hook.send([message("after", hook.now())])
            eventually(lambda: replicas.sent() == ["before", "after"], PATIENCE)
            replica.child.signal(signal.SIGTERM)
            assert replica.child.ended() == 0
        log = replica.log.read_text()
        assert "the store's database does not answer, and is asked again: connection 'store_down'" in log
        assert "the store's database answers again" in log
        assert server.url.split(":")[2].split("@")[0] not in log


def test_a_database_that_falls_silent_is_logged(postgres_url: str, connect, replicas: Replicas):
    """As when its host is gone: no connection is refused, and nothing comes."""
    server = urlsplit(postgres_url)
    with proxy(server.port or 5432, server.hostname or "127.0.0.1") as between:
        connect("silent", server._replace(netloc=f"{server.netloc.rpartition(':')[0]}:{between.port}").geturl())
        # one that lacks its tables asks nevertheless
        replica = replicas.start("silent", None, reachable=3.0, grace=0.1)
        eventually(lambda: '"database": true' in ask(replica.port, "/ready")[1], PATIENCE)
        between.hang()
        eventually(
            lambda: "does not answer, and is asked again: nothing came for 3 s" in replica.log.read_text(), PATIENCE
        )
        eventually(lambda: '"database": false' in ask(replica.port, "/ready")[1], PATIENCE)
        assert replica.status("/live") == 200
        between.go_on()
        eventually(lambda: "the store's database answers again" in replica.log.read_text(), PATIENCE)


@on_sqlite
def test_a_store_without_tables_is_waited_for(store: Store, replicas: Replicas):
    hook = store.hook()
    replica = replicas.start(store.conn_id, None)
    eventually(lambda: replica.log.exists() and "TopologyInstallOperator" in replica.log.read_text(), PATIENCE)
    assert (replica.status("/live"), replica.status("/ready")) == (200, 503)
    hook.install([])
    hook.send([message("a", hook.now())])
    eventually(lambda: replicas.sent() == ["a"], PATIENCE)
    replica.become("/ready", 200)


@on_sqlite
def test_the_real_program_dispatches_and_reports_to_airflows_stats(store: Store, here: Path, tmp_path: Path):
    hook = store.installed("q", deliver_conn_id=None)
    hook.send([message("a", hook.now()), message("later", hook.now() + timedelta(hours=1))])
    port, statsd = free_port(), free_port()
    settings = {"ON": "True", "HOST": "127.0.0.1", "PORT": str(statsd), "INFLUXDB_ENABLED": "True"}
    words = ["--store-conn-id", store.conn_id, "--deliver-conn-ids", store.conn_id, "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])}
    environment |= {f"AIRFLOW__METRICS__STATSD_{name}": value for name, value in settings.items()}
    command = [sys.executable, "-m", "airflow", "delayed", "dispatcher", *words]
    mapping = here / "docs/operations/monitoring/statsd-mapping.yml"
    with statsd_exporter.running(statsd, mapping) as exporter, (tmp_path / "log").open("w+") as log:

        def values() -> dict[str, float]:
            _, text = ask(int(exporter.rpartition(":")[2]), "/metrics")
            samples = [one for each in text_string_to_metric_families(text) for one in each.samples]
            return {one.name: one.value for one in samples if one.labels["store_conn_id"] == store.conn_id}

        wanted = {"delayed_dispatched_total": 1, "delayed_lateness_seconds_count": 1, "delayed_store_waiting": 1}
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            eventually(lambda: process.poll() is not None or ask(port, "/ready")[0] == 200, PATIENCE)
            eventually(lambda: len(store.rows(hook, "q")) == 1, PATIENCE)
            eventually(lambda: wanted.items() <= values().items(), PATIENCE)
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        assert "1 messages dispatched" in log.read()


@pytest.fixture
def delayed(monkeypatch) -> Callable[..., Any]:
    """The command in this process, from the parser on."""
    from airflow.cli import cli_parser

    monkeypatch.setenv("_AIRFLOW_PROCESS_CONTEXT", "server")

    def run(*words: str) -> None:
        args = cli_parser.get_parser().parse_args(["delayed", "dispatcher", *words])
        args.func(args)

    return run


@on_sqlite
def test_a_dry_run_says_what_is_due(store: Store, delayed, capsys):
    hook = store.installed(deliver_conn_id=None)
    hook.send(message(name, hook.now() + hours * timedelta(hours=1)) for name, hours in (("a", -1), ("b", 1)))
    delayed("--store-conn-id", store.conn_id, "--deliver-conn-ids", store.conn_id, "--dry-run", "-o", "json")
    (row,) = json.loads(capsys.readouterr().out)
    assert row == {"connection": store.conn_id, "lookahead": 0, "due": 1, "waiting": 1}
    assert (store.leased(hook), hook.dispatchers()) == (set(), [])


@on_sqlite
@pytest.mark.parametrize(
    "words, reason",
    [
        ((), "option deliver_conn_ids in section [delayed]"),
        (("--deliver-conn-ids", "nowhere", "--dry-run"), "connection 'nowhere' is not available"),
        (("--deliver-conn-ids", "broker", "--batch-size", "0"), "batch_size=0"),
    ],
)
def test_what_cannot_be_is_an_error_at_the_start(store: Store, delayed, words: tuple[str, ...], reason: str):
    store.installed()
    with pytest.raises(SystemExit) as caught:
        delayed("--store-conn-id", store.conn_id, *words)
    assert reason in str(caught.value)


@on_sqlite
def test_an_undefined_connection_is_looked_for_with_growing_pauses(store: Store, connect, caplog, monkeypatch):
    """It holds up nothing, and is used once it is there."""
    hook = store.installed()
    pauses: list[float] = []
    loop = service.ConnectionLoop("typo", DispatchPolicy(), store.hook, None, lambda: None)

    def wait(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 8:
            loop.stop()

    monkeypatch.setattr(loop._stop, "wait", wait)
    loop._run()
    assert pauses[0] <= 2 < pauses[-1] <= 60
    lines = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(lines) == len(pauses)
    text = "connection 'typo' is not defined in Airflow: add it, or correct --deliver-conn-ids; the next look is in "
    assert all(line.startswith(text) for line in lines), lines
    assert hook.dispatchers() == []


@on_sqlite
def test_max_rate_is_of_all_connections_together(store: Store, replicas: Replicas):
    hook = store.installed()
    names = ("broker", "other")
    for name in names:
        store.hook(name).send(message(f"{name}{n}", hook.now() - SECOND) for n in range(3))
    # one at once, and another one only in half an hour
    replica = replicas.start(store.conn_id, None, "--max-rate", "0.0005", names=names)
    eventually(lambda: len(replicas.sent()) == 1, PATIENCE)
    replica.become("/ready", 200)
    eventually(lambda: '"other"' in ask(replica.port, "/ready")[1], PATIENCE)
    replica.child.signal(signal.SIGTERM)
    assert replica.child.ended() == 0
    assert len(replicas.sent()) == 1
    assert hook.count() == 5


@pytest.mark.parametrize("host, place", [("::1", "[::1]"), ("127.0.0.1", "127.0.0.1"), ("localhost", "localhost")])
def test_probes_answer_at_addresses_of_each_family(host: str, place: str):
    with ProbeServer(host, 0, {"/live": lambda: health(True, {})}) as probes:
        assert probes.url == f"http://{place}:{probes.port}"
        with closing(HTTPConnection(host, probes.port, timeout=PATIENCE)) as connection:
            connection.request("GET", "/live")
            assert connection.getresponse().status == 200


def test_clients_that_never_end_their_request_keep_no_probe_waiting(monkeypatch: pytest.MonkeyPatch):
    # no request ends by itself
    monkeypatch.setattr("airflow_delayed.cli.service._Handler.timeout", 2 * PATIENCE)
    threads = active_count()
    with ExitStack() as stack:
        probes = stack.enter_context(ProbeServer("127.0.0.1", 0, {"/live": lambda: health(True, {})}))
        for _ in range(3 * MAX_CONNECTIONS):
            stack.enter_context(create_connection(("127.0.0.1", probes.port))).sendall(b"GET /li")
        connection = stack.enter_context(closing(HTTPConnection("127.0.0.1", probes.port, timeout=PATIENCE)))
        connection.request("GET", "/live")
        assert connection.getresponse().status == 200
        # each thread that is left, and the server's own
        eventually(lambda: active_count() <= threads + MAX_CONNECTIONS + 1)


@on_sqlite
def test_a_port_that_is_in_use_is_an_error_at_the_start(store: Store, delayed, monkeypatch):
    from socket import create_server

    store.installed()
    monkeypatch.setenv("AIRFLOW__DELAYED__DELIVER_CONN_IDS", store.conn_id)
    with create_server(("127.0.0.1", 0)) as other, pytest.raises(SystemExit) as caught:
        delayed("--store-conn-id", store.conn_id, "--port", str(other.getsockname()[1]))
    assert "choose another --port" in str(caught.value)
