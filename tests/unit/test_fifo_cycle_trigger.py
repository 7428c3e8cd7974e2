from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest
from airflow.models.trigger import Trigger
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from airflow_delayed.errors import TransportUnavailable
from airflow_delayed.hooks.sqs import SqsDelayHook
from airflow_delayed.sensors.fifo_cycle import FifoCycleSensor
from airflow_delayed.sqs.stats import CycleCounts
from airflow_delayed.triggers.fifo_cycle import FifoCycleTrigger

ARGUMENTS = {
    "conn_id": "c",
    "destinations": ["orders"],
    "until": "2030-01-01T00:00:00+00:00",
    "wait_time_seconds": 7,
    "poke_interval": 2.5,
    "empty_looks": 4,
    "error_queue": "error",
    "max_late_seconds": 3.0,
    "counts": {"delivered": 5, "late": {"12": 5}},
}


def stored(trigger: FifoCycleTrigger) -> FifoCycleTrigger:
    path, arguments = trigger.serialize()
    assert path == "airflow_delayed.triggers.fifo_cycle.FifoCycleTrigger"
    return FifoCycleTrigger(**Trigger._decrypt_kwargs(Trigger.encrypt_kwargs(arguments)))


def test_it_waits_in_the_triggerer_by_default_where_airflow_says_so(fresh):
    assert fresh["deferrable by default"] is True


def test_arguments_are_stored_and_read_back():
    assert stored(FifoCycleTrigger(**ARGUMENTS)).serialize()[1] == ARGUMENTS
    assert json.loads(json.dumps(ARGUMENTS)) == ARGUMENTS
    assert stored(FifoCycleTrigger("c", ["orders"])).serialize()[1]["until"] == "empty"


@pytest.fixture
def cycles(monkeypatch: pytest.MonkeyPatch):
    """Let a function stand for all passes; queues are empty."""

    def do(function) -> None:
        monkeypatch.setattr(SqsDelayHook, "cycle", lambda self, *_, stop, **__: function(stop))
        monkeypatch.setattr(SqsDelayHook, "waiting", lambda *_: 0)
        monkeypatch.setattr(SqsDelayHook, "retention", lambda *_: 86_400)

    return do


async def payload(trigger: FifoCycleTrigger) -> dict:
    (event,) = [event async for event in trigger.run()]
    return event.payload


def test_the_loop_goes_on_while_the_thread_waits(cycles):
    threads, rounds, waited = set(), 0, []

    def slow(stop) -> CycleCounts:
        threads.add(threading.current_thread())
        # it ends only after the loop has gone on, however slow the machine is
        began, deadline = rounds, time.monotonic() + 60
        while rounds < began + 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        waited.append(rounds - began)
        return CycleCounts()

    cycles(slow)

    async def both() -> dict:
        nonlocal rounds
        trigger = asyncio.ensure_future(payload(FifoCycleTrigger("c", ["orders"], poke_interval=0)))
        while not trigger.done():
            await asyncio.sleep(0.001)
            rounds += 1
        return await trigger

    assert asyncio.run(both())["status"] == "done"
    assert threading.main_thread() not in threads
    assert waited
    assert min(waited) >= 3


def test_what_went_wrong_is_in_the_event(cycles):
    def fail(error: Exception):
        def passing(stop) -> CycleCounts:
            raise error

        return passing

    trigger = FifoCycleTrigger("c", ["orders"])
    sensor = FifoCycleSensor(task_id="cycle", destination="orders")
    cycles(fail(TransportUnavailable("SQS is away")))
    event = asyncio.run(payload(trigger))
    assert (event["status"], event["error"]) == ("failed", "TransportUnavailable: SQS is away")
    with pytest.raises(AirflowException, match="SQS is away"):
        sensor.execute_complete({}, event)

    # the texts of others may show anything, and events are logged
    cycles(fail(RuntimeError("hush")))
    assert asyncio.run(payload(trigger))["error"] == "RuntimeError"

    cycles(lambda stop: CycleCounts(requeued=1, oldest_seconds=50_000))
    event = asyncio.run(payload(trigger))
    assert event["status"] == "retention"
    assert event["summary"]["requeued"] == 1
    with pytest.raises(AirflowFailException, match=r"0\.6 days, and SQS forgets it after 1\.0"):
        sensor.execute_complete({}, event)


def test_a_cancelled_one_does_not_wait_for_a_long_poll(cycles, monkeypatch):
    monkeypatch.setattr(FifoCycleTrigger, "grace", 0.05)
    began, release = threading.Event(), threading.Event()

    def long_poll(stop) -> CycleCounts:
        began.set()
        release.wait(60)
        return CycleCounts()

    cycles(long_poll)

    async def cancelled() -> None:
        task = asyncio.ensure_future(payload(FifoCycleTrigger("c", ["orders"])))
        while not began.is_set():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not release.is_set()

    try:
        asyncio.run(cancelled())
    finally:
        release.set()
