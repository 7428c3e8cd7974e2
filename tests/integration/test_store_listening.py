"""PostgreSQL wakes a dispatcher that sleeps, through either driver of Airflow's connection."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from datetime import timedelta
from urllib.parse import unquote, urlsplit

import pytest
from sqlalchemy import create_engine, text
from support.proxy import Proxy, proxy
from support.rabbitmq import eventually
from support.stores import Store, choose_driver, message

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.store import notify
from airflow_delayed.store.api import engine_options, prepare
from airflow_delayed.store.network import Watchdog
from airflow_delayed.store.notify import Listener, Poller, waiter_for

pytestmark = pytest.mark.parametrize("store", ["postgres"], indirect=True)

#: Longer than any test: nothing but a notice ends such a wait.
LONG = 3600.0
HOUR = timedelta(hours=1)


class Clock:
    """A monotonic clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=["psycopg", "psycopg2"])
def hook(request, store: Store, monkeypatch) -> DelayedStoreHook:
    choose_driver(monkeypatch, request.param)
    made = store.installed()
    assert made.engine.dialect.driver == request.param
    return made


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def listener(hook: DelayedStoreHook, clock: Clock) -> Iterator[Listener]:
    made = Listener(hook.engine, hook.table, watch=nullcontext, poll=1.0, safety=60.0, proof=5.0, monotonic=clock)
    yield made
    made.close()


@pytest.fixture
def between(hook: DelayedStoreHook, postgres_url: str) -> Iterator[Proxy]:
    """A proxy that stands between the hook and the database from now on."""
    url = urlsplit(postgres_url)
    with proxy(url.port, url.hostname) as made:
        there = hook.engine.url.set(username=url.username, password=unquote(url.password or ""))
        hook.engine.dispose()
        hook.engine = prepare(
            create_engine(there.set(host="127.0.0.1", port=made.port), **engine_options("postgresql"))
        )
        yield made
        made.go_on()


def proven(listener: Listener) -> Listener:
    """Wait for the notice that it gives itself."""
    # each wait is a second at most, in vain where the server takes longer
    for _ in range(120):
        if listener.longest == 60.0:
            break
        listener.wait(LONG)
    assert listener.longest == 60.0
    return listener


def later(do: Callable[[], object]) -> threading.Thread:
    """Do something a little later, beside."""

    def work() -> None:
        time.sleep(0.1)
        do()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def listening(hook: DelayedStoreHook) -> list[int]:
    """The servers' processes of connections that LISTEN to this store."""
    with hook.engine.connect() as connection:
        # others may listen to theirs
        name = notify.channel(connection, hook.table)
        found = connection.execute(
            text("SELECT pid FROM pg_stat_activity WHERE starts_with(query, :begin)"), {"begin": f'LISTEN "{name}"'}
        )
        return list(found.scalars())


def test_it_is_told_of_an_earlier_message_and_of_none_else(hook: DelayedStoreHook, listener: Listener):
    assert listener.longest == 1.0
    proven(listener)
    due = hook.now() + HOUR
    thread = later(lambda: hook.send([message("a", due)]))
    assert listener.wait(LONG)
    thread.join()
    hook.send([message("b", due + HOUR)])
    assert not listener.wait(0)


def test_it_can_be_woken_from_another_thread(listener: Listener):
    proven(listener)
    thread = later(listener.wake)
    assert listener.wait(LONG)
    thread.join()
    # once for each time, and also when there was nobody to be woken
    listener.wake()
    assert listener.wait(LONG)
    assert not listener.wait(0)


def test_it_connects_again_after_pauses(hook: DelayedStoreHook, listener: Listener, clock: Clock, caplog):
    proven(listener)
    (process,) = listening(hook)
    with hook.engine.begin() as connection:
        connection.execute(text(f"SELECT pg_terminate_backend({process})"))
    # the server says why before it ends
    while listener.longest != 1.0:
        assert listener.wait(LONG)
    assert caplog.text.count("no notices of messages come from the database") == 1
    # not at once
    assert not listener.wait(0)
    # the server lists it until its process has ended
    eventually(lambda: listening(hook) == [])
    clock.now += 1.0
    # messages may have been stored meanwhile, so one is to look again
    assert listener.wait(LONG)
    proven(listener)
    thread = later(lambda: hook.send([message("a", hook.now() + HOUR)]))
    assert listener.wait(LONG)
    thread.join()


def test_a_connection_on_which_no_notices_come_is_not_trusted(hook, listener: Listener, clock: Clock, caplog):
    proven(listener)
    # as behind a pooler that has given the connection to others in between
    listener._connection.exec_driver_sql("UNLISTEN *")
    clock.now += 60.0
    assert not listener.wait(0)
    # it has asked for a sign, and looks more often until that comes
    assert listener.longest == 1.0
    clock.now += 5.0
    assert listener.wait(LONG)
    assert caplog.text.count("no notices of messages come from the database") == 1
    clock.now += 1.0
    assert listener.wait(LONG)
    proven(listener)


def test_a_silent_connection_is_logged_and_replaced(between: Proxy, listener: Listener, hook, clock: Clock, caplog):
    """A firewall forgets the one connection on which nothing is sent; the others go on."""
    proven(listener)
    hook.engine.dispose()
    between.fall_silent()
    clock.now += 60.0
    assert not listener.wait(0)
    clock.now += 5.0
    assert listener.wait(LONG)
    assert caplog.text.count("no notices of messages come from the database") == 1
    clock.now += 1.0
    assert listener.wait(LONG)
    proven(listener)


def test_a_frozen_server_is_logged_and_waited_for_only_so_long(between: Proxy, hook, clock: Clock, caplog, monkeypatch):
    for name, seconds in (("REPORT_AFTER", 0.2), ("END_AFTER", 1.0), ("LEAST_WAIT", 1.0)):
        monkeypatch.setattr(f"airflow_delayed.store.network.{name}", seconds)
    watchdog = Watchdog(hook.conn_id, hook.engine, 30)
    watched = False

    def watch(what: str) -> AbstractContextManager[None]:
        # not before: a busy server may take longer for the connection
        return watchdog.watch(what) if watched else nullcontext()

    with closing(watchdog):
        made = Listener(hook.engine, hook.table, watch=watch, poll=1.0, safety=60.0, monotonic=clock)
        proven(made)
        monkeypatch.setattr("airflow_delayed.store.network.CONNECT_SECONDS", 2)
        watched = True
        between.hang()
        clock.now += 60.0
        assert made.wait(LONG)
        assert "testing whether notices of messages come has had no answer from the database" in caplog.text
        assert "its connection was ended" in caplog.text
        between.go_on()
        clock.now += 1.0
        while made.longest != 60.0:
            clock.now += 1.0
            made.wait(1.0)
        made.close()


def test_nothing_is_left_open(hook: DelayedStoreHook, clock: Clock):
    made = Listener(hook.engine, hook.table, watch=nullcontext, poll=1.0, monotonic=clock)
    assert len(listening(hook)) == 1
    made.close()
    # closed for good, and not given back to the pool; the server lists it until it has read the end of the connection
    eventually(lambda: listening(hook) == [])
    made.wake()


def test_which_database_is_listened_to(hook: DelayedStoreHook, monkeypatch):
    made = waiter_for(hook.engine, hook.table, nullcontext)
    assert isinstance(made, Listener)
    made.close()
    for name in ("sqlite", "mysql", "mariadb"):
        monkeypatch.setattr(hook.engine.dialect, "name", name)
        other = waiter_for(hook.engine, hook.table, nullcontext)
        assert (type(other), other.longest) == (Poller, 1.0)
