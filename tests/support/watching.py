"""Watchers of a queue under Airflow's own manager of shared streams, as in its triggerer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from airflow.sdk import Asset, AssetWatcher
from airflow.serialization.encoders import encode_trigger
from airflow.triggers.base import BaseEventTrigger
from airflow.triggers.shared_stream import SharedStreamManager

from airflow_delayed.triggers.message_stream import MessageStreamTrigger
from airflow_delayed.triggers.rabbitmq_message import RabbitMQMessageTrigger

SECONDS = 60


def watcher(queue: str, conn_id: str = "rabbit", **options: Any) -> RabbitMQMessageTrigger:
    return RabbitMQMessageTrigger(conn_id, queue, **{"pause": 0, **options})


def number(trigger: MessageStreamTrigger) -> int:
    """Return that of a watcher's trigger in Airflow; triggers of one number are one."""
    stored = encode_trigger(Asset("a", watchers=[AssetWatcher(name="w", trigger=trigger)]).watchers[0].trigger)
    return BaseEventTrigger.hash(stored["classpath"], stored["kwargs"])


class Triggerer:
    """Does with watchers what Airflow's triggerer does. Events are stored at once, unless it is told to hold them."""

    def __init__(self) -> None:
        self.manager = SharedStreamManager()
        self.received: list[tuple[int, dict[str, Any]]] = []
        self.failed: dict[int, BaseException] = {}
        self.fired_at: list[float] = []
        #: The events as Airflow logs them.
        self.texts: list[str] = []
        self.hold: set[int] = set()
        self.unstored: list[int] = []
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def watch(self, trigger_id: int, trigger: MessageStreamTrigger) -> None:
        self._tasks[trigger_id] = asyncio.create_task(self._run(trigger_id, trigger))

    async def _run(self, trigger_id: int, trigger: MessageStreamTrigger) -> None:
        key = trigger.shared_stream_key()
        stream = self.manager.subscribe(trigger_id=trigger_id, trigger=trigger, key=key)
        try:
            async for event in trigger.filter_shared_stream(stream):
                seq = self.manager.bind_pending_event(trigger_id=trigger_id, key=key)
                assert seq is not None
                self.fired_at.append(asyncio.get_running_loop().time())
                self.texts.append(str(event))
                self.received += [(trigger_id, message) for message in event.payload["messages"]]
                self.unstored.append(seq)
                if trigger_id not in self.hold:
                    # Airflow's supervisor answers some time later
                    asyncio.get_running_loop().call_later(0.05, self.store, [seq])
        except Exception as error:
            self.failed[trigger_id] = error
        finally:
            await self.manager.unsubscribe(trigger_id, key)

    def store(self, seqs: Sequence[int]) -> None:
        """Have events be in the database."""
        self.manager.confirm_persisted(seqs)
        self.unstored = [seq for seq in self.unstored if seq not in seqs]

    def ids(self, trigger_id: int = 1) -> list[str]:
        return [message["message_id"] for each, message in self.received if each == trigger_id]

    async def until(self, *ids: str, trigger_id: int = 1) -> None:
        """Wait until these events came, in this order, and all is stored that may be."""
        await eventually(lambda: len(self.ids(trigger_id)) >= len(ids) and (self.hold or not self.unstored))
        assert self.ids(trigger_id) == list(ids)
        # the acknowledgement is on its way
        await asyncio.sleep(0.2)

    async def stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await self.manager.stop_all()


@asynccontextmanager
async def triggerer(*watchers: MessageStreamTrigger) -> AsyncIterator[Triggerer]:
    made = Triggerer()
    for number, watcher in enumerate(watchers, start=1):
        made.watch(number, watcher)
    try:
        yield made
    finally:
        await made.stop()
    assert made.failed == {}


async def eventually(ready: Callable[[], object], seconds: float = SECONDS) -> None:
    deadline = asyncio.get_running_loop().time() + seconds
    while not ready():
        assert asyncio.get_running_loop().time() < deadline, "it did not come about in time"
        await asyncio.sleep(0.02)
