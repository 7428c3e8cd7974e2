"""Dispatchers side by side, killed, and with their database gone: nothing is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime, timedelta, timezone
from itertools import islice
from pathlib import Path
from uuid import uuid4

import pytest
from sqlalchemy import delete, select, text, update
from support.dispatching import dispatch
from support.forked import Child
from support.lengths import length
from support.proxy import proxy
from support.rabbitmq import VirtualHost
from support.stores import Store, Transport, message, on_postgres_only, quoted, run_sql

from airflow_delayed.errors import TransportUnavailable
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.store.dispatch.dispatcher import Dispatcher
from services import postgres

pytestmark = pytest.mark.mariadb

SECOND = timedelta(seconds=1)


#: Each on every database.
KILLS = length("kills of a dispatcher", 1, 4)
#: Moments of a kill before a commit, of a dispatcher to queue tables.
COMMITS = length("commits before which a dispatcher is killed", (2, 4), tuple(range(1, 10)))
SHARED = length("messages that three dispatchers share", 600, 3000)
#: How often one of three is killed; halfway their database is restarted.
ROUNDS = length("rounds of three dispatchers, of which one is killed", 3, 12)


@pytest.fixture
def start(store: Store, tmp_path):
    """Start dispatcher processes, which write what they send to the journal, all at once."""
    children = []

    def run(target: str, number: int = 1, **options: object) -> list[Child]:
        url = store.url().render_as_string(hide_password=False)
        arguments = {"url": url, "schema": store.schema, "target": target, "journal": str(tmp_path / "journal")}
        started = [Child(dispatch, **arguments, **options) for _ in range(number)]
        children.extend(started)
        for child in started:
            assert child.answer() == "ready"
        for child in started:
            child.say("go")
        return started

    yield run
    for child in children:
        child.close()


@pytest.fixture(scope="module")
def own_postgres() -> Iterator[postgres.Postgres]:
    """A server that tests stop and start."""
    with postgres.running() as server:
        yield server


def wait_until(reached, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, "it did not get there"
        time.sleep(0.005)


def journal(tmp_path: Path) -> list[str]:
    path = tmp_path / "journal"
    # the last line may be cut off by a kill
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    assert all(line.endswith(" in-time") for line in lines)
    return [line.split(" ")[0] for line in lines]


def test_a_killed_dispatcher_loses_nothing(store: Store, start, tmp_path):
    hook = store.installed()
    names = {f"m{n}" for n in range(KILLS * 200)}
    hook.send(message(name, hook.now() - SECOND) for name in names)
    for number in range(KILLS):
        # in the middle of its second batch of 50
        (child,) = start("broker", hangs_after=75)
        wait_until(lambda wanted=75 * (number + 1): len(journal(tmp_path)) == wanted)
        child.kill()
        left = {one.message_id for one in hook.list()}
        assert left | set(journal(tmp_path)) == names
        assert left & set(journal(tmp_path))  # it was killed while it sent
    # what the dead one leased is not sent before its lease ends, and then it is
    leases, transport = leases_of(hook), Transport()
    last = max(leases.values())
    leased = {name for name, until in leases.items() if until == last}
    # a moment before that, however long this took
    store.dispatcher(hook, transport, database_time=lambda connection: last - SECOND / 1000).run()
    assert leased
    assert not leased & set(transport.ids)
    store.dispatcher(hook, transport).run("empty")
    arrived = Counter([*journal(tmp_path), *transport.ids])
    assert set(arrived) == names
    assert hook.count() == 0
    # at least once: each kill repeats at most what was under way
    assert sum(arrived.values()) - len(names) <= KILLS * 125


def test_killed_with_messages_that_it_claimed_before_they_were_due(store: Store, start, tmp_path):
    """Beside another one: none is lost, none early, and the gap is no longer than a lease and a look."""
    hook = store.installed()
    stays = {"stays": True, "seconds": 600.0, "claim_seconds": 5}
    # killed in the middle of a send
    (killed,) = start("broker", **stays, hangs_after=20)
    names = {f"m{number:03}" for number in range(300)}
    began = hook.now()
    hook.send(message(name, began + SECOND + number * SECOND / 100) for number, name in enumerate(sorted(names)))
    wait_until(lambda: len(journal(tmp_path)) == 20)
    killed.kill()
    leased = leases_of(hook)
    start("broker", **stays)
    wait_until(lambda: set(journal(tmp_path)) == names)
    wait_until(lambda: hook.count() == 0)
    with hook.engine.connect() as connection:
        settled = {row.Id: row.At for row in connection.execute(select(hook.tables.past.c.Id, hook.tables.past.c.At))}
    # those of the dead one came free with its leases, 5 s long, and not before
    late = [name for name in leased if settled[name] >= leased[name]]
    assert late
    assert len(journal(tmp_path)) - len(names) <= len(leased)


def leases_of(hook: DelayedStoreHook) -> dict[str, datetime]:
    """Until when each message is leased."""
    past, messages = hook.tables.past, hook.tables.messages
    with hook.engine.connect() as connection:
        found = connection.execute(select(past.c.Id, past.c.ClaimedUntil).join(messages, messages.c.Id == past.c.Id))
        return {row.Id: row.ClaimedUntil for row in found}


def test_a_killed_dispatcher_delivers_to_a_queue_table_exactly_once(store: Store, start):
    hook = store.installed("q", deliver_conn_id=None)
    names = sorted(f"m{n}" for n in range(150 * len(COMMITS)))
    hook.send(message(name, hook.now() - SECOND) for name in names)
    for number in COMMITS:
        (child,) = start("queue", dies_at_commit=number)
        assert child.ended() == -signal.SIGKILL
    left = hook.count()
    assert left > 0  # none came to its end
    assert len(store.rows(hook, "q")) == len(names) - left
    store.dispatcher(hook).run("empty")
    rows = store.rows(hook, "q")
    assert sorted(json.loads(headers)["NServiceBus.MessageId"] for headers, _ in rows) == names
    assert hook.count() == 0


def test_dispatchers_side_by_side_send_nothing_twice(store: Store, start, tmp_path):
    hook = store.installed()
    names = sorted(f"m{n}" for n in range(SHARED))
    hook.send(message(name, hook.now() - SECOND) for name in names)
    children = start("broker", 3, together=True, claim_seconds=60)
    # each has some in hand before the first is sent
    for child in children:
        assert child.answer() == "claimed"
    for child in children:
        child.say("go on")
    counts = [child.answer() for child in children]
    assert sorted(journal(tmp_path)) == names
    assert sum(counts) == SHARED
    assert hook.count() == 0
    assert min(counts) > 0


def test_a_dispatcher_needs_no_airflow():
    """In an interpreter of its own: those above are forked from one that has it."""
    code = "import sys, support.dispatching; print([name for name in sys.modules if name.split('.')[0] == 'airflow'])"
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **path}, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


class Jump:
    """Time that jumps, as it does for a process that was stopped for a while: its leases end unrenewed."""

    def __init__(self, store: Store, hook: DelayedStoreHook) -> None:
        self.seconds = 0.0
        self.start = hook.now()
        self.store = store

    def dispatcher(self, transport: Transport, **options: object) -> Dispatcher:
        return self.store.dispatcher(
            self.store.hook(),
            transport,
            database_time=lambda connection: self.start + timedelta(seconds=self.seconds),
            monotonic=lambda: self.seconds,
            **options,
        )


def test_who_lost_its_lease_sends_no_more(store: Store):
    hook = store.installed()
    names = [f"m{n}" for n in range(6)]
    hook.send(message(name, hook.now() - SECOND + n * SECOND / 100) for n, name in enumerate(names))
    jump, other = Jump(store, hook), Transport()

    class Stopped(Transport):
        def send(self, messages):
            messages = iter(messages)
            taken = list(islice(messages, 1))
            if not self.sent:
                wait_until(lambda: len(store.leased(hook)) == 6)  # it has claimed ahead
                jump.seconds = 31.0
                assert jump.dispatcher(other).run().dispatched == 6
            return super().send([*taken, *messages])

    late = Stopped()
    report = jump.dispatcher(late, batch_size=3).run()
    # what it had given to its broker by then went twice, and nothing else
    assert (late.ids, other.ids) == (["m0"], names)
    assert report.dispatched == 1
    assert hook.count() == 0
    assert store.past(hook) == dict.fromkeys(names, "dispatched")


def test_a_message_changed_after_its_lease_is_not_removed_by_who_sent_it(store: Store):
    hook = store.installed()
    hook.send([message("a", hook.now() - SECOND), message("b", hook.now() - SECOND / 2)])
    jump = Jump(store, hook)
    later = jump.start + 3600 * SECOND

    class Slow(Transport):
        def send(self, messages):
            report = super().send(messages)
            wait_until(lambda: store.leased(hook) == {"a", "b"})
            with hook.engine.begin() as connection:
                connection.execute(update(hook.table).where(hook.table.c.Id.in_(["a", "b"])).values(Time=later))
                # the next claim, which is made beside this, passes over what is locked
                jump.seconds = 31.0
            return report

    transport = Slow()
    jump.dispatcher(transport, batch_size=2).run()
    assert transport.ids == ["a", "b"]
    assert [(one.message_id, one.due_at) for one in hook.list()] == [("a", later), ("b", later)]


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
def test_a_table_that_is_rewritten_meanwhile(store: Store):
    """VACUUM FULL moves each row: what is deleted by its place would be another one."""
    hook = store.installed()
    now = hook.now()
    hook.send(message(f"m{n}", now + (n % 2) * 60 * SECOND - SECOND) for n in range(20))

    class Slow(Transport):
        def send(self, messages):
            report = super().send(messages)
            with hook.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.execute(delete(hook.table).where(hook.table.c.Id == "m1"))
                connection.execute(text(f'VACUUM FULL {quoted(store.schema)}."{hook.table.name}"'))
            return report

    assert store.dispatcher(store.hook(), Slow()).run().dispatched == 10
    assert sorted(store.failures_of(hook)) == sorted(f"m{n}" for n in range(3, 20, 2))


def test_three_dispatchers_one_of_them_killed_again_and_again_and_the_database_restarted(
    own_postgres: postgres.Postgres, connect, tmp_path
):
    """Under load: what was sent is counted, what arrived, what came twice; nothing may be lost or early."""
    hook = DelayedStoreHook(connect("store_shaken", own_postgres.url), "broker", table="shaken")
    hook.install([])
    url = own_postgres.url.replace("postgresql://", "postgresql+psycopg://")
    arguments = {"url": url, "schema": None, "table": "shaken", "target": "broker"}

    def begin() -> Child:
        child = Child(dispatch, **arguments, journal=str(tmp_path / "journal"), seconds=600)
        child.say("go")
        return child

    sent: set[str] = set()
    chance = random.Random(7)
    running = [begin() for _ in range(3)]
    try:
        for number in range(ROUNDS):
            names = [f"m{number}-{n}" for n in range(200)]
            hook.send(message(name, hook.now() + n * SECOND / 300) for n, name in enumerate(names))
            sent.update(names)
            if number == ROUNDS // 2:
                own_postgres.stop()
                own_postgres.start()
                continue
            arrived = len(journal(tmp_path))
            wait_until(lambda arrived=arrived: len(journal(tmp_path)) > arrived + 50)
            victim = chance.randrange(3)
            running[victim].close()
            running[victim] = begin()
        wait_until(lambda: hook.count() == 0, seconds=150)
    finally:
        for child in running:
            child.close()
        hook.close()
    arrived = Counter(journal(tmp_path))
    assert sent == set(arrived)
    # a kill repeats at most the batch that is sent and the one before it, and a restart those of each dispatcher
    assert sum(arrived.values()) - len(arrived) <= (ROUNDS - 1) * 100 + 3 * 100


@on_postgres_only
def test_a_broker_that_hangs_holds_up_neither_the_store_nor_a_message(store: Store, vhost: VirtualHost, connect):
    """For more than twice as long as a lease: nobody else may send what it has, and nothing waits for it."""
    with proxy(vhost.port, vhost.parameters.host) as between:
        connect("broker", **{**vhost.connection, "host": "127.0.0.1", "port": between.port})
        vhost.declare("q")
        hook = store.installed()
        names = [f"m{n}" for n in range(200)]
        hook.send(message(name, hook.now() - SECOND) for name in names)
        hanging = threading.Event()

        class Hanging(RabbitMQDelayHook):
            def send(self, messages):
                def some():
                    for number, one in enumerate(messages):
                        if number == 100:
                            between.hang()
                            hanging.set()
                        yield one

                return super().send(some())

        def dispatcher(hook_type):
            return Dispatcher(
                store.hook().engine,
                hook.tables,
                conn_id="store",
                transports=lambda conn_id, clock: hook_type(conn_id, clock=clock),
                deliver_conn_ids=["broker"],
                lookahead=timedelta(0),
                claim_timeout=10 * SECOND,
            )

        reports = []
        first = threading.Thread(target=lambda: reports.append(dispatcher(Hanging).run()))
        first.start()
        assert hanging.wait(60)
        ended = time.monotonic() + 21
        number = 0
        while time.monotonic() < ended:
            number += 1
            # that this comes to an end says that it does not wait for the broker, which goes on only after it
            hook.send([message(f"new{number}", hook.now() + 3600 * SECOND)])
            assert hook.cancel([f"new{number}"]) == {f"new{number}": "cancelled"}
            assert len(list(hook.list())) == 200
            # another dispatcher finds all of it leased
            other = Transport()
            store.dispatcher(hook, other).run()
            assert other.ids == []
            time.sleep(0.7)
        assert reports == []
        between.go_on()
        first.join(60)
        assert [report.dispatched for report in reports] == [200]
        arrived = [one.message_id for one in vhost.collect("q", enough=200)]
        assert sorted(arrived) == sorted(names)
        assert hook.count() == 0


def test_the_database_goes_and_comes_back(own_postgres: postgres.Postgres, connect):
    server = own_postgres
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
        store.dispatcher(hook, transport, claim_timeout=SECOND).run()
    assert transport.ids == ["before"]
    for use in (hook.count, lambda: hook.send([message("meanwhile", hook.now())]), lambda: hook.verify([])):
        with pytest.raises(TransportUnavailable, match=r"connection 'store_down'.*refused") as caught:
            use()
        assert password not in str(caught.value)
    server.start()
    # sent, and not known to be: it is still there and goes again, with the same id
    again = Transport()
    assert store.dispatcher(hook, again).run("empty").dispatched == 1
    assert again.ids == ["before"]
    hook.close()


def test_a_busy_sqlite_is_unavailable_in_the_end(tmp_path, connect, monkeypatch):
    monkeypatch.setattr("airflow_delayed.store.dialects.SQLITE_BUSY_SECONDS", 0.1)
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
    zone, glue = f"zone_{uuid4().hex[:8]}", "&" if "?" in postgres_url else "?"
    connect("store_zone", f"{postgres_url}{glue}options=-c%20timezone%3DAsia%2FTokyo%20-c%20search_path%3D{zone}")
    run_sql(postgres_url, f"CREATE SCHEMA {zone}")
    try:
        with closing(DelayedStoreHook("store_zone", "broker")) as hook:
            hook.install([])
            last = datetime.max.replace(tzinfo=timezone.utc)
            hook.send([message("a", last)])
            assert [one.due_at for one in hook.list()] == [last]
    finally:
        run_sql(postgres_url, f"DROP SCHEMA {zone} CASCADE")
