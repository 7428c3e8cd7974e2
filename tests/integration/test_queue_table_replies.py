"""Tasks that wait for replies in one queue table: each gets its own row, and the other rows stay."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta

import pytest
from airflow.sdk.exceptions import AirflowSensorTimeout
from support.forked import Child
from support.replying import QUEUE, WaitingTask, die_handling, fired, reply_headers, result, sensor, text_of, wait
from support.stores import Store, message

from airflow_delayed.errors import DelayedError
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.sensors.reply import ReplySensor
from airflow_delayed.triggers import reply

on_sqlite = pytest.mark.parametrize("store", ["sqlite"], indirect=True)


@pytest.fixture
def hook(store: Store, monkeypatch: pytest.MonkeyPatch) -> DelayedStoreHook:
    """A database with an empty queue table of replies."""
    monkeypatch.setattr(reply, "INTERVAL", 0.05)
    return store.installed(QUEUE, deliver_conn_id=None)


def answer(store: Store, hook: DelayedStoreHook, *message_ids: str, body: str = "to {}") -> None:
    """Reply to messages as the recorded endpoint did."""
    hook.send(
        message(
            reply_id,
            hook.now(),
            destination=QUEUE,
            body=body.format(message_id).encode(),
            headers=reply_headers(message_id, reply_id),
        )
        for message_id in message_ids
        if (reply_id := f"reply-{message_id}")
    )
    store.dispatcher(hook).run()


def count(store: Store, hook: DelayedStoreHook) -> int:
    return int(store.sql(hook, f'SELECT COUNT(*) FROM {{s}}"{QUEUE}"')[0][0])


def waiting(store: Store, message_id: str, on_reply: Callable[..., object] = text_of, **options: object) -> ReplySensor:
    return sensor(message_id, store.conn_id, on_reply, schema=store.schema, **options)


def test_two_runs_one_queue_answers_crossed(
    store: Store, hook: DelayedStoreHook, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "airflow_delayed")
    one = WaitingTask(waiting(store, "first")).start()
    store.sql(hook, f"INSERT INTO {{s}}\"{QUEUE}\" (id, headers) VALUES ('{'0' * 32}', '[1, \"no headers\"]')")
    answer(
        store, hook, "second", "of-somebody-else", *[f"other-{n}" for n in range(1200)], body="a secret answer to {}"
    )
    answer(store, hook, "first", body="a secret answer to {}")
    event = one.event()
    assert event["reply"].isdigit()
    assert one.resume() == "reply-first: a secret answer to first"
    # the other run begins to wait long after the reply has come
    assert result(waiting(store, "second")) == "reply-second: a secret answer to second"
    assert count(store, hook) == 1202
    assert "secret" not in f"{caplog.text}{event}{one.deferred.trigger.serialize()}"


def test_a_killed_triggerer_and_a_killed_worker(store: Store, hook: DelayedStoreHook) -> None:
    task = WaitingTask(waiting(store, "m1"))
    with closing(Child(wait, arguments=task.deferred.trigger.serialize()[1])) as triggerer:
        assert triggerer.answer() == "begun"
        answer(store, hook, "m0", "m1")
        assert "reply" in triggerer.answer()
    # its event was not stored, so that another triggerer makes it again
    event = task.start().event()
    options = {"message_id": "m1", "conn_id": store.conn_id, "schema": store.schema}
    with closing(Child(die_handling, **options)) as worker:
        assert worker.answer() == "reply-m1: to m1"
        assert worker.ended() < 0
    assert count(store, hook) == 2
    assert result(waiting(store, "m1")) == "reply-m1: to m1"
    assert count(store, hook) == 1
    # a try that finds its reply removed waits on until its time is up
    late = waiting(store, "m1", timeout=timedelta(seconds=0.2))
    with pytest.raises(AirflowSensorTimeout, match="If an earlier try handled the reply"):
        late.execute_complete({}, event=event, until="2026-01-01T00:00:00Z")


@on_sqlite
def test_many_tasks_in_one_triggerer(store: Store, hook: DelayedStoreHook) -> None:
    tasks = [WaitingTask(waiting(store, f"m{number}")) for number in range(20)]

    async def triggerer() -> list[object]:
        waits = [asyncio.create_task(fired(task.deferred.trigger)) for task in tasks]
        await asyncio.sleep(0.2)
        await asyncio.to_thread(answer, store, hook, *[f"m{number}" for number in reversed(range(20))])
        return await asyncio.gather(*waits)

    events = asyncio.run(triggerer())
    handled = [
        task.task.execute_complete({}, event, **task.deferred.kwargs) for task, event in zip(tasks, events, strict=True)
    ]
    assert handled == [f"reply-m{number}: to m{number}" for number in range(20)]


@on_sqlite
def test_what_is_wrong_is_an_error_before_the_wait(store: Store, hook: DelayedStoreHook) -> None:
    with pytest.raises(DelayedError, match="there is no table 'elsewhere'; run TopologyInstallOperator"):
        waiting(store, "m1", reply_to="elsewhere").execute({})
