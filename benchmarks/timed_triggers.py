"""Triggers that write down when they fire, for due_triggers.py: each runs in a real triggerer."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any

from airflow.providers.standard.triggers.temporal import DateTimeTrigger
from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_delayed.triggers.due_time import DueTimeTrigger

#: A moment and when its trigger fired, in seconds since 1970.
FIRING = struct.Struct("dd")
_FILE = os.environ.get("DUE_TRIGGERS_FILE")
_firings = os.open(_FILE, os.O_WRONLY | os.O_APPEND) if _FILE else None


def note(moment: datetime) -> None:
    assert _firings is not None
    os.write(_firings, FIRING.pack(moment.timestamp(), time.time()))


class TimedDue(DueTimeTrigger):
    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "timed_triggers.TimedDue", super().serialize()[1]

    async def run(self) -> AsyncIterator[TriggerEvent]:
        async for event in super().run():
            note(self.moment)
            yield event


class TimedDateTime(DateTimeTrigger):
    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "timed_triggers.TimedDateTime", super().serialize()[1]

    async def run(self) -> AsyncIterator[TriggerEvent]:
        async for event in super().run():
            note(self.moment)
            yield event


class AtOnce(BaseTrigger):
    def __init__(self, moment: datetime) -> None:
        super().__init__()
        self.moment = moment

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "timed_triggers.AtOnce", {"moment": self.moment}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        note(self.moment)
        yield TriggerEvent(self.moment)
