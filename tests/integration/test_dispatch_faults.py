"""Dispatchers side by side, killed, and with their database gone: nothing is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from support.stores import Store, Transport, message, run_sql, store_fixture  # noqa: F401 - a fixture

from airflow_delayed.errors import TransportUnavailable
from airflow_delayed.hooks.store import DelayedStoreHook
from services import postgres

SECOND = timedelta(seconds=1)


@pytest.fixture
def start(here, store: Store, tmp_path):
    """Start dispatcher processes, which write what they send to the journal, all at once."""
    processes = []

    def run(target: str, number: int = 1) -> list[subprocess.Popen[str]]:
        url = store.hook().engine.url.render_as_string(hide_password=False)
        arguments = {"url": url, "schema": store.schema, "target": target, "journal": str(tmp_path / "journal")}
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "support.dispatching", json.dumps(arguments)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here / "tests")])},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(number)
        ]
        processes.extend(started)
        for process in started:
            assert process.stdout.readline() == "ready\n"
        for process in started:
            process.stdin.write("go\n")
            process.stdin.flush()
        return started

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def wait_until(reached, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, "it did not get there"
        time.sleep(0.005)


def journal(tmp_path: Path) -> list[str]:
    path = tmp_path / "journal"
    # the last line may be cut off by a kill
    return path.read_text().split("\n")[:-1] if path.exists() else []


def test_a_killed_dispatcher_loses_nothing(store: Store, start, tmp_path):
    hook = store.installed()
    names = {f"m{n}" for n in range(600)}
    hook.send(message(name, hook.now() - SECOND) for name in names)
    for _ in range(2):
        (process,) = start("broker")
        begun = len(journal(tmp_path))
        wait_until(lambda begun=begun: len(journal(tmp_path)) > begun + 70)  # in the middle of its second batch of 50
        process.kill()
        process.wait(30)
        left = {one.message_id for one in hook.list()}
        assert left | set(journal(tmp_path)) == names
        assert left & set(journal(tmp_path))  # it was killed while it sent
    transport = Transport()
    store.dispatcher(hook, transport).run("empty")  # what the dead one held is free at once
    arrived = Counter([*journal(tmp_path), *transport.ids])
    assert set(arrived) == names
    assert hook.count() == 0
    # at least once: each kill repeats at most the batch that was under way
    assert sum(arrived.values()) - len(names) <= 100


def test_a_killed_dispatcher_delivers_to_a_queue_table_exactly_once(store: Store, start):
    hook = store.installed("q", deliver_conn_id=None)
    names = sorted(f"m{n}" for n in range(6000))
    hook.send(message(name, hook.now() - SECOND) for name in names)
    (process,) = start("queue")
    wait_until(lambda: hook.count() < 5500)
    process.kill()
    process.wait(30)
    assert hook.count() > 0  # it did not come to its end
    store.dispatcher(hook).run("empty")
    rows = store.rows(hook, "q")
    assert sorted(json.loads(headers)["NServiceBus.MessageId"] for headers, _ in rows) == names
    assert hook.count() == 0


def test_dispatchers_side_by_side_send_nothing_twice(store: Store, start, tmp_path):
    hook = store.installed()
    names = sorted(f"m{n}" for n in range(900))
    hook.send(message(name, hook.now() - SECOND) for name in names)
    outputs = [process.communicate(timeout=120)[0] for process in start("broker", 3)]
    counts = [int(output.splitlines()[-1]) for output in outputs]
    assert sorted(journal(tmp_path)) == names
    assert sum(counts) == 900
    assert hook.count() == 0
    if store.schema is not None:  # on SQLite the lock goes to whoever asks at the right moment
        assert min(counts) > 0


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
def test_a_dispatcher_passes_over_what_another_holds(store: Store):
    """On SQLite the second waits instead, which the test before this one covers."""
    hook = store.installed()
    names = [f"m{n}" for n in range(10)]
    hook.send(message(name, hook.now() - SECOND + n * SECOND / 100) for n, name in enumerate(names))
    holding, go_on = threading.Event(), threading.Event()

    class Slow(Transport):
        def send(self, messages):
            report = super().send(messages)
            holding.set()
            assert go_on.wait(60)
            return report

    slow, quick = Slow(), Transport()
    first = threading.Thread(target=store.dispatcher(store.hook(), slow, batch_size=4).run)
    first.start()
    assert holding.wait(60)
    assert store.dispatcher(hook, quick, batch_size=4).run().dispatched == 6
    assert quick.ids == names[4:]
    assert hook.send([message("new", hook.now())]).sent == 1  # storing goes on meanwhile
    assert len(list(hook.list())) == 5
    go_on.set()
    first.join(60)
    assert slow.ids == [*names[:4], "new"]
    assert hook.count() == 0


def test_cancelling_waits_for_a_dispatcher_at_work(store: Store):
    hook = store.installed()
    hook.send([message("a", hook.now() - SECOND), message("b", hook.now() + 60 * SECOND)])
    outcome: dict[str, str] = {}
    canceller = threading.Thread(target=lambda: outcome.update(store.hook().cancel(["a", "b"])))

    class Observed(Transport):
        def send(self, messages):
            canceller.start()
            canceller.join(0.3)
            assert outcome == {}  # not said yet
            return super().send(messages)

    transport = Observed()
    store.dispatcher(hook, transport).run()
    canceller.join(60)
    assert transport.ids == ["a"]
    assert outcome == {"a": "absent", "b": "cancelled"}


def test_the_database_goes_and_comes_back(connect):
    with postgres.running() as server:
        connect("store_down", server.url)
        hook = DelayedStoreHook("store_down", "broker")
        hook.install([])
        hook.send([message("before", hook.now() - SECOND)])
        store = Store("store_down", None)

        class Stopping(Transport):
            def send(self, messages):
                report = super().send(messages)
                server.stop()
                return report

        transport = Stopping()
        password = server.url.split(":")[2].split("@")[0]
        with pytest.raises(TransportUnavailable, match="connection 'store_down'") as caught:
            store.dispatcher(hook, transport).run()
        assert transport.ids == ["before"]
        for use in (hook.count, lambda: hook.send([message("meanwhile", hook.now())]), lambda: hook.verify([])):
            with pytest.raises(TransportUnavailable, match=r"connection 'store_down'.*refused") as caught:
                use()
            assert password not in str(caught.value)
        server.start()
        # sent, and not known to be: it is still there and goes again, with the same id
        again = Transport()
        assert store.dispatcher(hook, again).run().dispatched == 1
        assert again.ids == ["before"]
        hook.close()


def test_a_busy_sqlite_is_unavailable_in_the_end(tmp_path, connect, monkeypatch):
    monkeypatch.setattr("airflow_delayed.store.engine.SQLITE_BUSY_SECONDS", 0.1)
    connect("store_busy", conn_type="sqlite", host=str(tmp_path / "busy.db"))
    hook = DelayedStoreHook("store_busy", "broker")
    hook.install([])
    with hook.engine.begin():
        other = DelayedStoreHook("store_busy", "broker")
        assert other.count() == 0  # reading goes on
        with pytest.raises(TransportUnavailable, match="connection 'store_busy': database is locked"):
            other.send([message("a", hook.now())])
        other.close()
    hook.close()


def test_the_connections_extras_reach_the_database(postgres_url, connect):
    """A session in another time zone reads the same times, the last of all included."""
    connect("store_zone", f"{postgres_url}?options=-c%20timezone%3DAsia%2FTokyo%20-c%20search_path%3Dzone")
    run_sql(postgres_url, "CREATE SCHEMA zone")
    hook = DelayedStoreHook("store_zone", "broker")
    hook.install([])
    last = datetime.max.replace(tzinfo=timezone.utc)
    hook.send([message("a", last)])
    assert [one.due_at for one in hook.list()] == [last]
    hook.close()
    run_sql(postgres_url, "DROP SCHEMA zone CASCADE")
