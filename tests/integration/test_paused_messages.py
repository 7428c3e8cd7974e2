"""A pause lets no dispatcher take messages until somebody ends it, and loses, doubles and hastens none."""

from __future__ import annotations

import time as real_time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from threading import Event
from typing import Any

import pytest
from pika import BasicProperties
from pika.adapters.blocking_connection import BlockingChannel
from sqlalchemy import event
from support.forked import PATIENCE, Child
from support.lengths import length
from support.pausing import dispatch
from support.rabbitmq import DUE_AT, VirtualHost, eventually
from support.sleeping import Time
from support.stores import DATABASES, Store, Transport, message

from airflow_delayed.errors import NullCriterion
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.identity import Origin, SentBy

SECOND, MINUTE, HOUR = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1)
on_sqlite = pytest.mark.parametrize("store", ["sqlite"], indirect=True)
on_servers = pytest.mark.parametrize("store", [name for name in DATABASES if name != "sqlite"], indirect=True)
#: 1,000,000 in make test-long.
ROWS = length("rows of which a run is paused, cancelled and restored", 20_000, 1_000_000)


def codes(hook: DelayedStoreHook) -> set[str]:
    return {one.code for one in hook.health()}


@pytest.mark.parametrize(
    "selection, held",
    [({"destination": "p"}, "ab"), ({"deliver_conn_id": "broker"}, "abcd"), ({"deliver_conn_id": "other"}, "")],
)
def test_what_is_paused_waits_and_nothing_else(store: Store, selection: dict[str, str], held: str):
    hook = store.installed()
    time, transport = Time(hook), Transport()
    due = time.start - SECOND
    hook.send(message(name, due, destination="p" if name in "ab" else "q") for name in "abcd")
    would = hook.pause(**selection, dry_run=True)
    assert (would.waiting, would.dry_run, hook.pauses()) == (len(held), True, [])
    report = hook.pause(**selection, because="upgrade", actor="ann")
    assert (report.waiting, report.with_broker, report.arrive_until) == (len(held), 0, None)
    # whoever pauses it again, as a retry does, changes nothing
    hook.pause(**selection, because="once more", actor="bob")
    (paused,) = hook.pauses()
    assert (paused.at, paused.who, paused.because) == (report.pause.at, "ann", "upgrade")
    made = store.dispatcher(hook, transport, **time.options(), batch_size=2)
    for _ in range(3):
        made.once()
        time.seconds += 1
    assert sorted(transport.ids) == sorted({*"abcd"} - {*held})
    assert "paused" in codes(hook)
    if held:
        # it looks again soon, and not at once
        assert 0 < made.next_due().total_seconds() <= 1
        assert {one.message_id for one in hook.list(state="due")} == {*held}
    # what is stored meanwhile is paused too, and may be due before what was claimed
    hook.send([message("e", due - HOUR, destination="p")])
    time.seconds += 1
    made.once()
    assert ("e" in transport.ids) == (held == "")
    assert hook.unpause(**selection, because="done").due == (len(held) + 1 if held else 0)
    for _ in range(3):
        time.seconds += 1
        made.once()
    assert sorted(transport.ids) == ["a", "b", "c", "d", "e"]
    assert "paused" not in codes(hook)
    assert [(one.action, one.because) for one in hook.audit()] == [("unpause", "done"), ("pause", "upgrade")]
    assert not hook.unpause(**selection).pause


@on_sqlite
def test_what_is_paused_must_be_selected(store: Store):
    hook = store.installed()
    for wrong in ({}, {"destination": "q", "deliver_conn_id": "broker"}):
        with pytest.raises(ValueError, match="give what to pause: a destination= or a deliver_conn_id="):
            hook.pause(**wrong)
    with pytest.raises(NullCriterion):
        hook.pause(destination=None)
    with pytest.raises(TypeError, match="'tag': a destination= or a deliver_conn_id= is paused"):
        hook.pause(tag="t")
    for number in range(50):
        hook.pause(destination=f"d{number}")
    hook.pause(destination="d0")
    with pytest.raises(ValueError, match="50 pauses are in this store"):
        hook.pause(destination="one more")
    assert [one.name for one in hook.pauses()][-1] == "destination 'd49'"


@on_sqlite
def test_a_queue_table_is_paused_as_a_connection_is(store: Store):
    hook = store.installed("q", deliver_conn_id=None)
    time = Time(hook)
    hook.send([message("a", time.start - SECOND)])
    hook.pause(deliver_conn_id=store.conn_id)
    made = store.dispatcher(hook, **time.options())
    assert made.once().dispatched == 0
    assert hook.unpause(deliver_conn_id=store.conn_id).due == 1
    time.seconds += 1
    assert made.once().dispatched == 1


@on_sqlite
def test_what_is_paused_is_not_late(store: Store):
    hook = store.installed()
    hook.send([message("due", hook.now() - HOUR)])
    hook.pause(destination="q", because="upgrade")
    (found,) = [one for one in hook.health() if one.code == "paused"]
    assert "until somebody ends that" in found.what
    assert f"airflow delayed pause --end --store-conn-id {store.conn_id} --destination q" in found.remedy
    # in the counters neither
    assert "no-dispatcher" not in {one.code for one in hook.health() if one.severity == "error"}
    assert (hook.counts().due, hook.counts().overdue, hook.counts().oldest_due) == (1, 0, None)
    hook.send([message("free", hook.now() - MINUTE, destination="other")])
    assert (hook.counts().overdue, hook.counts().oldest_due) == (1, hook.get("free").due_at)
    hook.pause(deliver_conn_id="broker")
    assert (hook.counts().overdue, hook.counts().oldest_due) == (0, None)


def test_what_a_broker_has_already_is_counted(store: Store):
    hook = store.installed()
    time, transport = Time(hook), Transport()
    due = time.start + 10 * MINUTE
    hook.send(message(f"m{n}", due + n * SECOND) for n in range(5))
    hook.send([message("waits", due + HOUR), message("done", time.start - SECOND)])
    store.dispatcher(hook, transport, **time.options(), lookahead=15 * MINUTE).once()
    report = hook.pause(destination="q")
    assert (report.waiting, report.with_broker, report.arrive_until) == (1, 5, due + 4 * SECOND)
    assert f"5 are already with the broker and arrive until {due + 4 * SECOND:%Y-%m-%d %H:%M:%S} UTC" in str(report)


@dataclass
class Pausing(Transport):
    """Does something when it has taken so many messages of a send, and then goes on."""

    after: int = 0
    work: Callable[[], object] = field(default=lambda: None)

    def send(self, messages):
        def taken():
            for number, one in enumerate(messages):
                if number == self.after:
                    self.work()
                yield one

        return super().send(taken())


def test_what_was_claimed_before_a_pause_is_sent_and_nothing_more(store: Store):
    hook = store.installed()
    time = Time(hook)
    hook.send(message(f"m{n:02}", time.start - SECOND) for n in range(40))

    def work() -> None:
        hook.pause(destination="q")
        # the dispatcher reads the pauses when they are a second old
        time.seconds += 2

    transport = Pausing(after=5, work=work)
    made = store.dispatcher(hook, transport, **time.options(), batch_size=10)
    made.once()
    sent = len(transport.ids)
    # what was in hand, and what was claimed meanwhile
    assert 10 <= sent < 40
    assert not store.leased(hook)
    transport.work = lambda: None
    time.seconds += 2
    made.once()
    assert len(transport.ids) == sent
    hook.unpause(destination="q")
    time.seconds += 2
    made.once()
    assert Counter(transport.ids) == {f"m{n:02}": 1 for n in range(40)}


@on_servers
def test_a_slow_claim_holds_up_no_settlement(store: Store):
    """A claim takes seconds where it passes over many messages of a destination that is paused."""
    hook = store.installed()
    time, slow, begun, ends = Time(hook), Event(), Event(), Event()
    hook.send(message(f"m{n:02}", time.start - SECOND) for n in range(40))
    hook.pause(destination="other")

    def wait(connection: object, cursor: object, statement: str, *more: object) -> None:
        if slow.is_set() and "SKIP LOCKED" in statement:
            begun.set()
            ends.wait(PATIENCE)

    event.listen(hook.engine, "before_cursor_execute", wait)
    transport = Pausing(after=0, work=slow.set)
    made = store.dispatcher(hook, transport, **time.options(), batch_size=10)
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(made.once)
        try:
            assert begun.wait(PATIENCE)
            eventually(lambda: hook.count() == 40 - len(transport.ids))
            assert 0 < len(transport.ids) < 40
        finally:
            ends.set()
        assert done.result(PATIENCE).dispatched == 40
    assert Counter(transport.ids) == {f"m{n:02}": 1 for n in range(40)}
    assert made.report.dispatched == 40


def consume(vhost: VirtualHost, queue: str, enough: int, ids: Counter[str]) -> int:
    """Count by id what arrives, until so many have, and a second longer; return how many were early.

    It keeps no message: there may be a million.
    """
    early = 0

    def take(channel: BlockingChannel, method: Any, properties: BasicProperties, body: bytes) -> None:
        nonlocal early
        assert properties.message_id
        ids[properties.message_id] += 1
        early += datetime.now(timezone.utc) < datetime.fromisoformat(properties.headers[DUE_AT])

    with vhost.channel() as channel:
        channel.basic_consume(queue, take, auto_ack=True)
        deadline = real_time.monotonic() + 1200
        while ids.total() < enough:
            assert real_time.monotonic() < deadline, f"{ids.total():,} of {enough:,} have arrived"
            channel.connection.process_data_events(time_limit=0.2)
        more = real_time.monotonic() + 1
        while real_time.monotonic() < more:
            channel.connection.process_data_events(time_limit=0.1)
    return early


@pytest.mark.timeout(3600)
@on_servers
def test_three_dispatchers_obey_and_one_is_killed(
    store: Store, vhost: VirtualHost, connect: Callable[..., str], monkeypatch: pytest.MonkeyPatch
):
    vhost.declare("orders")
    rabbit = connect("rabbit", **vhost.connection)
    RabbitMQDelayHook(rabbit).install(["orders"])
    hook = store.installed(deliver_conn_id=rabbit)
    now, ids = hook.now(), [f"m{number}" for number in range(ROWS)]
    # most are due, the others fall due within the next seconds
    for run, names in {"r1": ids[: ROWS // 2], "r2": ids[ROWS // 2 :]}.items():
        hook.origin = Origin(dag_id="campaign", run_id=run, task_id="send")
        due = [now + max(-1, number % 100 - 90) * SECOND for number in range(len(names))]
        hook.send(message(name, at, destination="orders") for name, at in zip(names, due, strict=True))
    arguments = {"conn_id": store.conn_id, "schema": store.schema, "deliver_conn_id": rabbit}
    rate = max(1_000, ROWS / 60)
    arrived: Counter[str] = Counter()
    with ExitStack() as stack:
        children = [stack.enter_context(closing(Child(dispatch, **arguments, max_rate=rate))) for _ in range(3)]
        assert [child.answer() for child in children] == ["ready"] * 3
        eventually(lambda: vhost.count("orders") >= ROWS / 10, PATIENCE)
        report = hook.pause(destination="orders", because="stop")
        # later where the processes of other tests are at work
        real_time.sleep(length("seconds in which three dispatchers obey a pause", 5, 2))
        sent = vhost.count("orders")
        # what was sent is settled, which a busy database may do later
        eventually(lambda: sent + hook.count() == ROWS, PATIENCE)
        before = vhost.count("orders"), hook.count()
        assert before[0] == sent
        assert before[1] > ROWS / 10, "it was not in mid-flight"
        assert report.waiting >= before[1]
        children.pop().kill()
        # a consumer gets what the dispatchers sent before, and nothing else
        early = consume(vhost, "orders", before[0], arrived)
        assert (arrived.total(), vhost.count("orders"), hook.count()) == (before[0], 0, before[1])

        run = SentBy(dag_id="campaign", run_id="r1")
        cancelled = hook.cancel(sent_by=run)
        assert cancelled.changed > 0
        assert hook.restore(sent_by=run, overdue_ok=True).changed == cancelled.changed
        assert vhost.count("orders") == 0
        hook.unpause(destination="orders")
        early += consume(vhost, "orders", ROWS, arrived)
    assert arrived == dict.fromkeys(ids, 1)
    assert early == 0
    assert hook.count() == 0
