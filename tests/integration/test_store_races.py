"""Changing one's mind while others are at work: each message is changed or arrives, never both, never neither.

A transaction is kept open where another one can meet it: at its commit, or by a connection of the test's own.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone

import pytest
from sqlalchemy import Connection, Engine, create_engine, delete, event, literal_column, select, text, update
from support.standing import give_up, hold, lock
from support.stores import Store, Transport, message

from airflow_delayed.errors import TransportUnavailable
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.store.api import engine_options, prepare

pytestmark = pytest.mark.mariadb

LATER = datetime(2030, 5, 6, 7, 8, 9, 123456, tzinfo=timezone.utc)
MANY = 800
#: As by default: on MariaDB a dispatcher and a change may lock each other up, and one of them does its part again.
PATIENT = {f"time_to_trigger_{what}_circuit_breaker": timedelta(seconds=30) for what in ("store", "fetch", "dispatch")}
TOO_LATE = {"in flight", "dispatched"}


@dataclass
class Gated(Transport):
    """Sends nothing before it may."""

    asked: threading.Event = field(default_factory=threading.Event)
    may: threading.Event = field(default_factory=threading.Event)

    def send(self, messages):
        self.asked.set()
        assert self.may.wait(120)
        return super().send(messages)


@pytest.mark.parametrize("change", ["cancel", "reschedule"])
def test_each_message_is_changed_or_arrives(store: Store, change):
    hook = store.installed()
    now = hook.now()
    hook.send(message(f"m{n:04}", now, tag="t") for n in range(MANY))
    done = threading.Event()
    transports = [Gated(), Gated()]
    faults = []

    def dispatch(transport: Transport) -> None:
        try:
            own = store.hook()
            while not done.is_set():
                store.dispatcher(own, transport, batch_size=20, **PATIENT).run()
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=dispatch, args=(transport,)) for transport in transports]
    for thread in threads:
        thread.start()
    ids = [f"m{n:04}" for n in range(MANY)]
    random.Random(7).shuffle(ids)
    options = {"due_at": LATER} if change == "reschedule" else {}
    found = {}
    try:
        for transport in transports:
            assert transport.asked.wait(120)
        for start in range(0, MANY, 200):
            found.update(getattr(hook, change)(ids[start : start + 200], **options))
            for transport in transports:
                transport.may.set()
    finally:
        done.set()
        for transport in transports:
            transport.may.set()
        for thread in threads:
            thread.join(120)
    assert faults == []
    # what was in flight and not sent was given back, so one pass more
    last = Transport()
    store.dispatcher(store.hook(), last).run()
    arrived = Counter(name for transport in [*transports, last] for name in transport.ids)
    changed = {name for name, outcome in found.items() if outcome.changed}
    late = {name for name, outcome in found.items() if outcome in TOO_LATE}
    assert changed | late == set(ids)
    assert set(arrived) == late
    assert set(arrived.values()) <= {1}
    assert {one.message_id for one in hook.list()} == (changed if change == "reschedule" else set())
    # the first ones were in flight, and the others of those asked for then were not
    assert changed
    assert late


def test_two_who_cancel_the_same(store: Store):
    """One of them did it, the other is told so; nobody waits for a lock that the other holds for long."""
    hook = store.installed()
    hook.send(message(f"m{n:04}", LATER, tag="t") for n in range(MANY))
    ids = [f"m{n:04}" for n in range(MANY)]
    found = []

    def cancel(order: list[str]) -> None:
        found.append(store.hook().cancel(order))

    threads = [threading.Thread(target=cancel, args=(order,)) for order in (ids, ids[::-1], ids[300:] + ids[:300])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(found) == 3
    for name in ids:
        outcomes = sorted(one[name].value for one in found)
        assert outcomes.count("cancelled") == 1, (name, outcomes)
        # in flight: the other one had the row for over half a second
        assert set(outcomes) <= {"cancelled", "already cancelled", "in flight"}


servers_only = pytest.mark.parametrize("store", ["postgres", "mariadb"], indirect=True)
#: Changes of a message that has failed, with the state that remains of it.
CHANGES: dict[str, tuple[Callable[[DelayedStoreHook], object], str]] = {
    "cancel": (lambda hook: hook.cancel(["m"]), "cancelled"),
    "erase": (lambda hook: hook.erase(["m"]), "erased"),
    "purge": (lambda hook: hook.purge(timedelta(0), reason=["failed", "expired"]), "purged"),
}


@contextmanager
def beside(work: Callable[[], object]) -> Iterator[list[object]]:
    """Do some work in a thread, which has ended with the block; its answer, or its error, is in the list then."""
    answers: list[object] = []

    def run() -> None:
        try:
            answers.append(work())
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield answers
    finally:
        thread.join(120)


def when(engine: Engine, pattern: str, then: Callable[[], object], name: str = "before_cursor_execute") -> None:
    """Do something before or after the first statement that looks so."""
    left = [then]

    def look(connection, cursor, statement, parameters, context, executemany) -> None:
        if left and re.search(pattern, statement, re.DOTALL):
            left.pop()()

    event.listen(engine, name, look)


@servers_only
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("reason", ["failed", "expired"])
def test_a_replace_does_not_bring_back_what_is_being_removed(store: Store, change, reason):
    hook = store.installed()
    hook.send([message("m", LATER)])
    give_up(hook, "m", reason=reason)
    changing, replacing = store.hook(), store.hook(on_conflict="replace")
    at_commit, go = threading.Event(), threading.Event()

    @event.listens_for(changing.engine, "commit")
    def commit(connection: Connection) -> None:
        at_commit.set()
        assert go.wait(60)

    # it has looked at what is committed, and meets the lock now
    when(replacing.engine, "(DELETE|FOR UPDATE).*_failed|_failed.*FOR UPDATE", go.set)
    work, state = CHANGES[change]
    with beside(lambda: work(changing)) as changed:
        assert at_commit.wait(60)
        with beside(lambda: replacing.send([message("m", LATER, body=b"new")])) as sent:
            pass
    assert changed[0].changed == 1
    assert (sent[0].sent, sent[0].replaced) == (0, 0)
    assert list(hook.list()) == []
    assert hook.get("m").state == state


@servers_only
def test_a_replace_waits_for_who_has_the_row(store: Store):
    """Nobody dispatches it: another client looked at it for a while, with a lock."""
    hook = store.installed()
    hook.send([message("m", LATER)])
    replacing = store.hook(on_conflict="replace")
    overtaken = threading.Event()

    def asked() -> None:
        event.listen(replacing.engine, "rollback", lambda connection: overtaken.set())

    when(replacing.engine, "FOR UPDATE", asked)
    with hook.engine.begin() as other:
        assert lock(other, hook.tables, "m")
        with beside(lambda: (replacing.send([message("m", LATER, body=b"new")]), overtaken.set())[0]) as sent:
            assert overtaken.wait(60)
            other.commit()
    assert (sent[0].replaced, sent[0].not_replaced) == (1, 0)
    assert hook.content("m", body_limit=10).body == b"new"


@pytest.mark.parametrize("store", ["mariadb"], indirect=True)
def test_what_expires_while_a_claim_waits_is_not_dispatched(store: Store, monkeypatch):
    """MariaDB passes over a row that another one only looks at, and so a claim looks again for some seconds."""
    hook = store.installed("q", deliver_conn_id=None)
    now = hook.now()
    hook.send([message("m", now - timedelta(seconds=1), expires_at=now + timedelta(hours=1))])
    passed, other = [timedelta(0)], store.hook().engine.connect()
    assert lock(other, hook.tables, "m")

    def pause(seconds: float) -> None:
        other.rollback()
        passed[0] = timedelta(hours=2)

    monkeypatch.setattr("airflow_delayed.store.dispatch.claim.time.sleep", pause)
    with other:
        report = store.dispatcher(hook, database_time=lambda _: hook.now() + passed[0]).run()
    assert passed[0]
    assert (report.dispatched, report.expired) == (0, 1)
    assert store.rows(hook, "q") == []


def end_session(store: Store, number: int) -> None:
    """End a session of the database, and see to it that it is over."""
    postgres = store.hook().engine.dialect.name == "postgresql"
    with store.hook().engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(f"SELECT pg_terminate_backend({number}, 60000)" if postgres else f"KILL {number}"))


@pytest.mark.parametrize("store", ["mariadb"], indirect=True)
def test_a_connection_lost_before_the_commit_is_told_as_such(store: Store):
    hook = store.installed()
    hook.send([message("m", LATER)])
    numbers = []
    event.listen(hook.engine, "begin", lambda one: numbers.append(one.connection.dbapi_connection.thread_id()))
    when(hook.engine, "innodb_lock_wait_timeout = DEFAULT", lambda: end_session(store, numbers[-1]))
    with pytest.raises(TransportUnavailable, match=f"connection '{store.conn_id}': "):
        hook.cancel(["m"])
    assert store.hook().cancel(["m"]) == {"m": "cancelled"}


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
@pytest.mark.parametrize("look", ["get", "list"])
def test_a_session_that_ends_after_the_last_statement_is_told_as_such(store: Store, look):
    hook = store.installed()
    hook.send([message("m", LATER)])
    give_up(hook, "m")
    # psycopg2 asks the server when a connection is given back
    url = store.url().set(drivername="postgresql+psycopg2")
    hook.close()
    hook.engine = prepare(create_engine(url, **engine_options("postgresql")))
    hook.get("m")  # what is asked once for each connection is asked now
    numbers = []
    event.listen(hook.engine, "checkout", lambda one, *_: numbers.append(one.info.backend_pid))
    when(hook.engine, "SELECT.*_failed", lambda: end_session(store, numbers[-1]), "after_cursor_execute")
    with pytest.raises(TransportUnavailable, match=f"connection '{store.conn_id}': "):
        hook.get("m") if look == "get" else list(hook.list())
    assert hook.get("m").state == "failed"


@servers_only
@pytest.mark.parametrize("what", ["get", "page", "cancel"])
def test_what_is_stored_and_claimed_between_two_looks_is_in_flight(store: Store, what):
    """Of such a message first only the lease is seen, which says what it says once the message is dispatched."""
    hook, other = store.installed(), store.hook()
    hook.get("m")  # what is asked once for each connection is asked now

    def claimed() -> None:
        other.send([message("m", LATER)])
        assert hold(other, "m")

    # a change looks for those whose rows others have, too
    last_look = "UNION ALL" if what == "cancel" else r'FROM [^\n]*delayed_messages["`]'
    when(hook.engine, last_look, claimed, "after_cursor_execute")
    if what == "page":
        page = hook.page(ids=["m"])
        assert page.remembered == []
    else:
        found = hook.get("m").state.value if what == "get" else hook.cancel(["m"])["m"]
        assert found == "in flight"
    assert hook.get("m").state == "in flight"


@servers_only
def test_what_others_do_while_a_tag_is_cancelled(store: Store):
    """After it has read which messages have the tag, and before it locks them."""
    hook, other = store.installed(), store.hook()
    names = ("free", "moved", "retagged", "claimed", "locked", "ended", "gone")
    hook.send(message(name, LATER, tag="t") for name in names)
    hold(hook, "ended", lease=timedelta(seconds=-1))
    table = hook.tables.messages

    def others(connection: Connection) -> None:
        with other.engine.begin() as own:
            own.execute(update(table).where(table.c.Id == "moved").values(Time=LATER + timedelta(days=1)))
            own.execute(update(table).where(table.c.Id == "retagged").values(Tag="u"))
            own.execute(delete(table).where(table.c.Id == "gone"))
        assert hold(other, "claimed")
        assert lock(connection, hook.tables, "locked")

    with other.engine.connect() as connection, connection.begin():
        when(hook.engine, "FOR UPDATE SKIP LOCKED", lambda: others(connection))
        found = hook.cancel(tag="t")
    assert found == {
        **dict.fromkeys(("free", "moved", "ended"), "cancelled"),
        **dict.fromkeys(("claimed", "locked"), "in flight"),
        "gone": "absent",
    }
    assert {one.message_id for one in hook.list()} == {"retagged", "claimed", "locked"}
    assert store.past(hook) == {**dict.fromkeys(("free", "moved", "ended"), "cancelled"), "claimed": "dispatched"}
    assert hook.restore(state="cancelled").changed == 3
    assert {one.message_id: one.due_at for one in hook.list(tag="t")}["moved"] == LATER + timedelta(days=1)


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
def test_a_lease_that_is_committed_while_a_tag_is_cancelled(store: Store):
    hook = store.installed()
    hook.send(message(name, LATER, tag="t") for name in ("claimed", "free"))
    lease = {"Id": "claimed", "Outcome": "dispatched", "At": LATER, "Dispatcher": "d", "ClaimedUntil": LATER}
    found: list[object] = []
    begun, cancelling = threading.Event(), store.hook()
    when(cancelling.engine, "FOR UPDATE SKIP LOCKED", begun.set)
    with hook.engine.begin() as connection:
        connection.execute(hook.tables.past.insert(), [lease])
        thread = threading.Thread(target=lambda: found.append(cancelling.cancel(tag="t")))
        thread.start()
        assert begun.wait(60)
        # it waits for the row of the lease
        thread.join(0.2)
    thread.join(60)
    assert found == [{"claimed": "in flight", "free": "cancelled"}]
    assert [one.message_id for one in hook.list()] == ["claimed"]


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
def test_a_message_that_has_got_the_place_of_another(store: Store, monkeypatch: pytest.MonkeyPatch):
    # the cancel stands still in its transaction while others go on
    monkeypatch.setattr("airflow_delayed.store.network.IDLE_SECONDS", 600)
    hook, other = store.installed(), store.hook()
    table = hook.tables.messages

    def places() -> list[str]:
        place = select(literal_column("ctid::text")).select_from(table).order_by(literal_column("ctid"))
        with other.engine.connect() as connection:
            return list(connection.execute(place).scalars())

    def remove(name: str) -> None:
        with other.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(delete(table).where(table.c.Id == name))
            connection.exec_driver_sql(f"VACUUM {connection.dialect.identifier_preparer.format_table(table)}")

    def others() -> None:
        remove("a")
        # VACUUM leaves a place as it is while any transaction of the server may still see its row
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            other.send([message("new", LATER, tag="t")])
            if places() == before:
                return
            remove("new")
            time.sleep(0.1)

    # the check of the tables has left places free
    remove("none")
    hook.send(message(name, LATER, tag="t") for name in ("a", "b"))
    before = places()
    when(hook.engine, "FOR UPDATE SKIP LOCKED", others)
    assert hook.cancel(tag="t") == {"a": "absent", "b": "cancelled"}
    assert places() == before[:1]
    assert [one.message_id for one in hook.list()] == ["new"]


@pytest.fixture
def remembered(store: Store, monkeypatch: pytest.MonkeyPatch) -> DelayedStoreHook:
    """A store that remembers an id, and changes that wait for others as long as these take."""
    monkeypatch.setattr("airflow_delayed.store.bulk_changes.IN_FLIGHT_WAIT", 120.0)
    hook = store.installed()
    hook.send([message("m", LATER)])
    give_up(hook, "m")
    hook.purge(timedelta(0), reason="failed")
    assert store.past(hook) == {"m": "purged"}
    return hook


#: What an erase writes when it has decided; and what it asks of the table before.
WRITES, ASKS = "INSERT.*_past", "INSERT.*_past|_past.*FOR UPDATE"


@servers_only
def test_of_two_who_erase_an_id_one_does(store: Store, remembered: DelayedStoreHook):
    first, second, met = store.hook(), store.hook(), threading.Event()
    deciding = threading.Event()
    when(first.engine, WRITES, lambda: (deciding.set(), met.wait(120)))
    when(second.engine, "_past.*FOR UPDATE", met.set, "after_cursor_execute")
    with beside(lambda: first.erase(["m"])) as one:
        assert deciding.wait(60)
        with beside(lambda: (second.erase(["m"]), met.set())[0]) as other:
            pass
    assert [one[0], other[0]] == [{"m": "erased"}, {"m": "already removed"}]


@servers_only
def test_what_is_forgotten_beside_an_erase_stays_forgotten(store: Store, remembered: DelayedStoreHook):
    erasing, purging, met = store.hook(), store.hook(), threading.Event()
    deciding = threading.Event()
    when(erasing.engine, WRITES, lambda: (deciding.set(), met.wait(120)))
    with beside(lambda: erasing.erase(["m"])) as erased:
        assert deciding.wait(60)
        forgotten = purging.purge(timedelta(0), reason="remembered").counts
        met.set()
    # the erase was first
    assert (forgotten, erased[0]) == ({}, {"m": "erased"})
    assert store.past(remembered) == {"m": "erased"}


@servers_only
def test_an_erase_does_not_write_what_is_being_forgotten(store: Store, remembered: DelayedStoreHook):
    erasing, purging = store.hook(), store.hook()
    at_commit, go = threading.Event(), threading.Event()

    @event.listens_for(purging.engine, "commit")
    def commit(connection: Connection) -> None:
        at_commit.set()
        assert go.wait(60)

    when(erasing.engine, ASKS, go.set)
    with beside(lambda: purging.purge(timedelta(0), reason="remembered")) as purged:
        assert at_commit.wait(60)
        with beside(lambda: erasing.erase(["m"])) as erased:
            pass
    assert (purged[0].counts, erased[0]) == ({"forgotten": 1}, {"m": "absent"})
    assert store.past(remembered) == {}
