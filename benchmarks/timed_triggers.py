"""Triggers that write down when they fire, for due_triggers.py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import datetime, timezone
from typing import Any, ClassVar

from airflow.providers.standard.triggers.temporal import DateTimeTrigger
from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_delayed.triggers.due_time import DueTimeTrigger

#: Seconds from when all are loaded to the first moment: longer than DateTimeTrigger polls every second before its own.
HEAD_START = 21.0


class AtOnce(BaseTrigger):
    def __init__(self, moment: datetime) -> None:
        super().__init__()
        self.moment = moment

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "timed_triggers.AtOnce", {"moment": self.moment}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        yield TriggerEvent(self.moment)


class PlainSleep(AtOnce):
    async def run(self) -> AsyncIterator[TriggerEvent]:
        await asyncio.sleep(self.moment.timestamp() - time.time())
        yield TriggerEvent(self.moment)


class Timed(BaseTrigger):
    """Waits until all others are loaded, then runs a trigger of a kind for its own moment.

    :param after: seconds from the first moment to its own.
    :param count: how many there are.
    """

    KINDS: ClassVar[dict[str, Any]] = {
        "due": DueTimeTrigger,
        "core": DateTimeTrigger,
        "plain": PlainSleep,
        "at once": AtOnce,
    }
    #: Of each: its moment and when it fired, in seconds since 1970.
    fired: ClassVar[list[tuple[float, float]]] = []
    #: The CPU seconds of this process when all were loaded.
    cpu: ClassVar[float] = 0.0
    first: ClassVar[float] = 0.0
    _loaded: ClassVar[int] = 0
    _go: ClassVar[asyncio.Event | None] = None

    def __init__(self, kind: str, after: float, count: int) -> None:
        super().__init__()
        self.kind, self.after, self.count = kind, after, count

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "timed_triggers.Timed", {"kind": self.kind, "after": self.after, "count": self.count}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        await self._all_are_loaded()
        due = Timed.first + self.after
        async for event in self.KINDS[self.kind](datetime.fromtimestamp(due, timezone.utc)).run():
            Timed.fired.append((due, time.time()))
            yield event

    async def _all_are_loaded(self) -> None:
        if Timed._go is None:
            Timed._go = asyncio.Event()
        Timed._loaded += 1
        if Timed._loaded == self.count:
            Timed.first = time.time() + HEAD_START
            Timed.cpu = time.process_time()
            Timed._go.set()
        await Timed._go.wait()
