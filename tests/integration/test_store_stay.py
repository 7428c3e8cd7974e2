"""Dispatchers that stay, as the triggerer runs them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
from support.stores import Store, Transport, message, store_fixture  # noqa: F401 - a fixture

from airflow_delayed.triggers.store_dispatch import StoreDispatchTrigger

SECOND = timedelta(seconds=1)
#: For what happens at once, and may take longer on a slow machine; in seconds.
PATIENCE = 30


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
    print("LATE", late)
