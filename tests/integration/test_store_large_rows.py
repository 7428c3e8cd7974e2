"""Rows that are large: a claim is bounded by bytes, and a row that nobody can read holds up no other."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass
from datetime import timedelta

import pytest
from support.stores import Store, Transport, message

from airflow_delayed.delivery import SendReport
from airflow_delayed.errors import LimitExceeded
from airflow_delayed.store.dispatch import claim
from airflow_delayed.store.dispatch.report import DispatchFailed
from airflow_delayed.store.schema import MAX_BODY, MAX_HEADER_BYTES

pytestmark = pytest.mark.mariadb

SECOND = timedelta(seconds=1)
MIB = 1024 * 1024
BYTES = {"sqlite": "zeroblob({})", "postgresql": "repeat('x', {})::bytea", "mysql": "repeat('x', {})"}


def grow(store: Store, hook, column: str, size: int, *, name: str = "%") -> None:
    made = BYTES[hook.engine.dialect.name].format(size)
    store.sql(hook, f"""UPDATE {{s}}"delayed_messages" SET "{column}" = {made} WHERE "Id" LIKE '{name}'""")


@dataclass
class Forgetful(Transport):
    """Keeps no message."""

    count: int = 0

    def send(self, messages) -> SendReport:
        report = SendReport()
        for one in messages:
            self.count += 1
            report.add(one)
        return report


@pytest.mark.parametrize("column, lane", [("State", "broker"), ("Headers", "queue table")])
def test_a_row_too_large_to_be_read_is_given_up_and_the_others_go_on(store: Store, monkeypatch, column, lane):
    queues = lane == "queue table"
    hook = store.installed(*(["q"] if queues else []), deliver_conn_id=None if queues else "broker")
    now, transport = hook.now(), None if queues else Transport()
    hook.send([message("large", now - 5 * SECOND), *(message(f"m{n}", now - SECOND) for n in range(2))])
    size = {"State": MAX_BODY, "Headers": MAX_HEADER_BYTES}[column]
    if hook.engine.dialect.name == "mysql" or column == "State":
        # MySQL makes no value of more than its max_allowed_packet, and 128 MiB take every database seconds
        size = MIB
        monkeypatch.setattr(claim, "MAX_BODY", size)
        monkeypatch.setattr(claim, "MAX_HEADER_BYTES", size)
    grow(store, hook, column, size + 1, name="large")
    body, headers = {"State": (size + 1, 2), "Headers": (len(b"body of large"), size + 1)}[column]
    with pytest.raises(DispatchFailed) as caught:
        store.dispatcher(hook, transport).run()
    assert caught.value.report.dispatched == 2
    reason = f"body: has {body:,} bytes and the headers {headers:,}, too many to be read"
    assert list(caught.value.failures) == ["large"]
    assert caught.value.failures["large"].startswith(reason)
    assert hook.count() == 0
    found = hook.get("large")
    assert (found.state, found.retry_count) == ("failed", 1)
    assert found.last_error.startswith(reason)
    # nothing of it is cut
    assert hook.content("large", body_limit=10).body_bytes == body
    assert hook.retry(["large"]).changed == 1


@pytest.mark.parametrize("lane", ["broker", "queue table"])
def test_many_large_messages_are_not_in_memory_at_once(store: Store, lane):
    queues = lane == "queue table"
    hook = store.installed(*(["q"] if queues else []), deliver_conn_id=None if queues else "broker")
    now, transport = hook.now(), None if queues else Forgetful()
    hook.send(message(f"m{n:02}", now - SECOND) for n in range(18))
    grow(store, hook, "State", 6 * MIB)
    tracemalloc.start()
    try:
        report = store.dispatcher(hook, transport).run()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (report.dispatched, hook.count()) == (18, 0)
    assert peak < 100 * MIB, f"{peak:,}"


@pytest.mark.parametrize("size", [1000, 100_000, 5 * MIB])
def test_bodies_of_any_size_arrive_whole_and_in_order(store: Store, size):
    hook, transport = store.installed(), Transport()
    now = hook.now()
    bodies = {f"m{n}": bytes([n]) * (size if n % 2 else 1) for n in range(10)}
    hook.send(message(name, now - (60 - n) * SECOND, body=body) for n, (name, body) in enumerate(bodies.items()))
    assert store.dispatcher(hook, transport, batch_size=4).run().dispatched == 10
    assert [(one.message_id, one.body) for one in transport.sent] == list(bodies.items())


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
def test_what_no_dispatcher_would_read_is_not_stored(store: Store):
    hook = store.installed()
    with pytest.raises(LimitExceeded, match="body: has 134,217,729 bytes, and a dispatcher reads up to 134,217,728"):
        hook.send([message("a", hook.now(), body=bytes(128 * MIB + 1))])
    with pytest.raises(LimitExceeded, match="headers: has 16,777,225 bytes, and a dispatcher reads up to 16,777,216"):
        hook.send([message("a", hook.now(), headers={"a": "x" * (16 * MIB + 1)})])
    assert hook.count() == 0
