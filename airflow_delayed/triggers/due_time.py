"""DueTimeTrigger: wait in the triggerer until a moment, exactly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime
from typing import Any

from airflow.triggers.base import BaseTrigger, TaskSuccessEvent, TriggerEvent

from airflow_delayed.clock import pause
from airflow_delayed.delivery import Clock
from airflow_delayed.message import parse_moment, utcnow
from airflow_delayed.triggers.base import class_path


class DueTimeTrigger(BaseTrigger):
    """Fires at its moment: never earlier, and at once if that has passed.

    It sleeps without polling, and is late by milliseconds; a task that it resumes starts two to three seconds later.
    Its event's payload is the moment. Whoever is resumed should look at the clock again: Airflow may resume a task
    too early (apache/airflow#65248).

    :param moment: an aware time, or ISO 8601 text with an offset.
    :param end_from_trigger: end the task as a success from the triggerer; it is not resumed.
    :param target_time: the moment of a task that starts from its trigger, in place of ``moment``: a template of the
        operator's field of this name, which the triggerer renders before the trigger runs.
    :param clock: returns the present; for tests, and not kept in the database.
    :param sleep: waits; for tests, and not kept in the database.
    :raises NaiveTime: the moment has no time zone; that of ``target_time`` is checked when the trigger runs.
    :raises InvalidMessage: it is no time.
    :raises TypeError: neither or both of ``moment`` and ``target_time``.
    """

    def __init__(
        self,
        moment: datetime | str | None = None,
        *,
        end_from_trigger: bool = False,
        target_time: str | None = None,
        clock: Clock = utcnow,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if (moment is None) == (target_time is None):
            raise TypeError("give moment= or target_time=, and not both")
        self._moment = None if moment is None else parse_moment("moment", moment)
        self.target_time = target_time
        self.end_from_trigger = end_from_trigger
        self._clock = clock
        self._sleep = sleep

    @property
    def moment(self) -> datetime:
        """The moment in UTC; of a template only after it was rendered."""
        return self._moment or parse_moment("target_time", self.target_time)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class's path and its arguments."""
        moment = {"target_time": self.target_time} if self._moment is None else {"moment": self._moment.isoformat()}
        return class_path(type(self)), {
            **moment,
            "end_from_trigger": self.end_from_trigger,
        }

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Sleep, then fire once."""
        moment = self.moment
        self.log.info("waiting until %s", moment.isoformat())
        while (left := (moment - self._clock()).total_seconds()) > 0:
            await self._sleep(pause(left))
        yield TaskSuccessEvent() if self.end_from_trigger else TriggerEvent(moment)

    async def on_kill(self) -> None:
        """Log that a user has ended the wait; there is nothing to undo."""
        self.log.warning("ended by a user before %s: what waited for it is not done", self._moment or self.target_time)
