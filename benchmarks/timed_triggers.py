"""Triggers that write down when they fire, for due_triggers.py: each runs in a real triggerer."""

from __future__ import annotations

import asyncio
import os
import struct
import time
from collections.abc import AsyncIterator
from datetime import datetime, timezone
from typing import Any, ClassVar

from airflow.providers.standard.triggers.temporal import DateTimeTrigger
from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_delayed.triggers.due_time import DueTimeTrigger

#: A moment and when its trigger fired, in seconds since 1970; in the first record, when all had been loaded.
FIRING = struct.Struct("dd")
#: Seconds from then until the first moment.
HEAD_START = 2.0


class Timed(BaseTrigger):
    """Waits until all others are loaded, then runs a trigger of a kind for its own moment.

    :param after: seconds from the first moment to its own.
    :param count: how many there are.
    """

    _loaded: ClassVar[int] = 0
    _go: ClassVar[asyncio.Event | None] = None
    _first: ClassVar[float] = 0.0
    _file: ClassVar[int] = 0

    def __init__(self, kind: str, after: float, count: int) -> None:
        super().__init__()
        self.kind, self.after, self.count = kind, after, count

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "timed_triggers.Timed", {"kind": self.kind, "after": self.after, "count": self.count}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        await self._all_are_loaded()
        due = Timed._first + self.after
        moment = datetime.fromtimestamp(due, timezone.utc)
        if self.kind == "AtOnce":
            os.write(Timed._file, FIRING.pack(due, time.time()))
            yield TriggerEvent(moment)
            return
        trigger = DueTimeTrigger(moment) if self.kind == "DueTime" else DateTimeTrigger(moment)
        async for event in trigger.run():
            os.write(Timed._file, FIRING.pack(moment.timestamp(), time.time()))
            yield event

    async def _all_are_loaded(self) -> None:
        if Timed._go is None:
            Timed._go = asyncio.Event()
        Timed._loaded += 1
        if Timed._loaded == self.count:
            Timed._file = os.open(os.environ["DUE_TRIGGERS_FILE"], os.O_WRONLY | os.O_APPEND)
            now = time.time()
            os.write(Timed._file, FIRING.pack(now, now))
            Timed._first = now + HEAD_START
            Timed._go.set()
        await Timed._go.wait()
