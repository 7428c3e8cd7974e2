"""Dispatchers that stay, as the triggerer runs them."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from support.forked import Child
from support.lengths import length
from support.rabbitmq import eventually
from support.staying import stay
from support.stores import Store, Transport, message, on_postgres_only

from airflow_delayed.delivery import SendReport
from airflow_delayed.store.dispatch.report import DispatchReport
from airflow_delayed.store.policy import DispatchPolicy
from airflow_delayed.triggers import store_dispatch
from airflow_delayed.triggers.store_dispatch import StoreDispatchTrigger

SECOND = timedelta(seconds=1)
#: For what happens at once, and may take longer on a slow machine; in seconds.
PATIENCE = 120
KILLS = length("kills of a triggerer of a store", 2, 5)


def trigger(store: Store, *deliver_conn_ids: str, **arguments: object) -> StoreDispatchTrigger:
    made = {"until": "empty", "schema": store.schema, **arguments}
    return StoreDispatchTrigger(store.conn_id, deliver_conn_ids or [store.conn_id], **made)


async def payload(trigger: StoreDispatchTrigger) -> dict:
    (event,) = [event async for event in trigger.run()]
    return event.payload


async def become(true: Callable[[], bool]) -> None:
    """Wait for something to become so; the loop goes on meanwhile."""
    deadline = time.monotonic() + PATIENCE
    while not await asyncio.to_thread(true):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_an_earlier_message_that_is_stored_while_it_sleeps(store: Store):
    hook = store.installed("q", deliver_conn_id=None)
    hook.send([message("later", hook.now() + 120 * SECOND)])

    async def play() -> float:
        work = asyncio.ensure_future(payload(trigger(store, until=(hook.now() + 60 * SECOND).isoformat())))
        await become(lambda: hook.last_seen() is not None)
        due = hook.now() + 1.5 * SECOND
        await asyncio.to_thread(hook.send, [message("earlier", due)])
        await become(lambda: len(store.rows(hook, "q")) == 1)
        late = (hook.now() - due).total_seconds()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        return late

    late = asyncio.run(play())
    assert 0 <= late < PATIENCE
    assert [one.message_id for one in hook.list()] == ["later"]
    assert b"earlier" in store.rows(hook, "q")[0][1]


@dataclass
class Slow(Transport):
    """Takes a while for each message, says when it has begun, and then waits until it may go on."""

    pause: float = 0.0
    begun: threading.Event = field(default_factory=threading.Event)
    may: threading.Event = field(default_factory=threading.Event)

    def send(self, messages) -> SendReport:
        def slowly():
            for one in messages:
                self.begun.set()
                assert self.may.wait(PATIENCE)
                time.sleep(self.pause)
                yield one

        return super().send(slowly())


@pytest.fixture
def through(monkeypatch):
    """Have the triggers deliver through this transport."""

    def use(transport: Transport) -> None:
        def made(conn_id: str, clock: Callable[[], datetime]) -> Transport:
            # several dispatchers may use it at once; the databases run by this machine's clock, behind which that of a
            # dispatcher may be by some milliseconds
            return replace(transport, sent=transport.sent, delays=transport.delays)

        monkeypatch.setattr(store_dispatch, "delivery_for", made)

    return use


def test_two_triggers_at_once_send_nothing_twice(store: Store, through):
    hook = store.installed()
    start = hook.now()
    names = [f"m{number:03}" for number in range(150)]
    hook.send(message(name, start + number * SECOND / 75) for number, name in enumerate(names))
    transport = Slow(pause=0.001)
    transport.may.set()
    through(transport)
    policy = DispatchPolicy(lookahead=timedelta(0), batch_size=10).state()

    async def both() -> list[dict]:
        return await asyncio.gather(*(payload(trigger(store, "broker", policy=policy)) for _ in range(2)))

    events = asyncio.run(both())
    assert [event["status"] for event in events] == ["done", "done"]
    assert sum(event["summary"]["dispatched"] for event in events) == 150
    assert sorted(transport.ids) == names
    # dispatched when it was due, and never before
    assert max(transport.delays.values()) <= timedelta(0)
    assert hook.count() == 0


def test_a_trigger_sends_to_allowed_destinations_alone(store: Store, through):
    hook, transport = store.installed(), Transport()
    hook.send(message(name, hook.now() - SECOND, destination=name) for name in ("reminders", "admin"))
    through(transport)
    policy = DispatchPolicy(lookahead=timedelta(0), allowed_destinations=["remind*"]).state()
    event = asyncio.run(payload(trigger(store, "broker", policy=json.loads(json.dumps(policy)))))
    assert (event["status"], transport.ids) == ("given up", ["reminders"])
    assert "destination 'admin' is not among the allowed_destinations" in event["error"]


def test_a_trigger_that_is_ended_brings_to_an_end_what_it_sends_and_frees_the_rest(store: Store, through, monkeypatch):
    # as long as a slow machine takes
    monkeypatch.setattr(StoreDispatchTrigger, "grace", PATIENCE)
    hook = store.installed()
    names = [f"m{number:03}" for number in range(200)]
    hook.send(message(name, hook.now() - SECOND) for name in names)
    transport = Slow(pause=0.01)
    through(transport)

    async def play() -> None:
        made = trigger(store, "broker")
        work = asyncio.ensure_future(payload(made))
        await asyncio.to_thread(transport.begun.wait, PATIENCE)
        # by Airflow, when the triggerer is shut down; the broker goes on when the trigger knows
        work.cancel()
        asyncio.get_running_loop().call_later(0.2, transport.may.set)
        with pytest.raises(asyncio.CancelledError):
            await work
        await made.cleanup()

    asyncio.run(play())
    assert 1 <= len(transport.sent) < 200
    assert store.leased(hook) == set()
    assert {one.message_id for one in hook.list()} == set(names) - set(transport.ids)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("delayed")] == []
    # another triggerer goes on at once
    left = 200 - len(transport.sent)
    transport.pause = 0
    assert asyncio.run(payload(trigger(store, "broker")))["summary"]["dispatched"] == left
    assert sorted(transport.ids) == names


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
def test_the_loop_goes_on_while_a_broker_takes_its_time(store: Store, through):
    hook = store.installed()
    hook.send([message("a", hook.now() - SECOND)])
    transport = Slow()
    through(transport)

    async def play() -> dict:
        work = asyncio.ensure_future(payload(trigger(store, "broker")))
        await become(transport.begun.is_set)
        # were the loop delayed by it, nobody would let it go on
        transport.may.set()
        return await work

    assert asyncio.run(play())["summary"]["dispatched"] == 1


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
def test_what_went_wrong_is_in_the_event(store: Store, through):
    hook = store.installed()
    hook.send([message("a", hook.now() - SECOND), message("b", hook.now() - SECOND)])
    hook.send([message("body", hook.now(), body=b"hush", headers={"token": "hush"})])
    through(Transport(too_long={"a"}))
    # one that an earlier dispatcher of the same run has given up
    before = DispatchReport(failed=1)
    before.add_all("broker", 5, hook.now(), hook.now())
    carried = {"summary": before.to_json(), "failures": {"z": "refused"}}
    result = asyncio.run(payload(trigger(store, "broker", **carried)))
    assert (result["status"], result["summary"]["dispatched"], result["summary"]["failed"]) == ("given up", 7, 2)
    assert "7 messages were dispatched, 2 failed" in result["error"]
    assert "message z: refused; message a: body: has too many bytes" in result["error"]
    assert "hush" not in json.dumps(result)

    hook.send([message("c", hook.now() - SECOND)])
    through(Transport(lost_after=0))
    policy = DispatchPolicy(time_to_trigger_dispatch_circuit_breaker=timedelta(0)).state()
    result = asyncio.run(payload(trigger(store, "broker", policy=policy)))
    assert (result["status"], result["summary"]["dispatched"]) == ("unavailable", 0)
    assert "connection 'broker' is not available" in result["error"]

    result = asyncio.run(payload(trigger(store, "broker", table="nothing")))
    assert result["status"] == "unavailable"
    assert "TopologyInstallOperator" in result["error"]


@on_postgres_only
def test_a_killed_triggerer_loses_nothing(store: Store, tmp_path):
    """kill -9 in the middle of a batch: what was leased is free when its lease ends, and another one goes on."""
    hook = store.installed()
    names = [f"m{number:03}" for number in range(KILLS * 150)]
    hook.send(message(name, hook.now() - SECOND) for name in names)
    journal = tmp_path / "journal"
    arguments = {"conn_id": store.conn_id, "schema": store.schema, "journal": str(journal)}
    for number in range(KILLS):
        with closing(Child(stay, **arguments, hangs_after=65)) as triggerer:
            # in the middle of its second batch of 50
            eventually(lambda wanted=65 * (number + 1): len(sent(journal)) == wanted, PATIENCE)
            triggerer.kill()
    with closing(Child(stay, **arguments)) as triggerer:
        assert triggerer.answer()["status"] == "done"
    arrived = sent(journal)
    assert set(arrived) == set(names)
    # each kill may repeat the batches that were leased
    assert len(arrived) - len(names) <= KILLS * 150
    assert hook.count() == 0


def sent(journal: Path) -> list[str]:
    """The ids of what was sent; each line also says whether that was in time."""
    lines = [line.split() for line in journal.read_text().splitlines()] if journal.exists() else []
    assert {word for _, word in lines} <= {"in-time"}
    return [message_id for message_id, _ in lines]
