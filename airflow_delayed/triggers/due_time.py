"""DueTimeTrigger: wait in the triggerer until a moment, exactly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any

from airflow.triggers.base import BaseTrigger, TaskSuccessEvent, TriggerEvent

from airflow_delayed.delivery import Clock
from airflow_delayed.message import delay_of, parse_moment, utcnow
from airflow_delayed.pauses import pause


class DueTimeTrigger(BaseTrigger):
    """Fires at its moment, or ``lead`` before it: never earlier, and at once if that is past.

    It sleeps without polling, and is late by milliseconds; a task that it resumes starts two to three seconds later.
    Its event's payload is the moment. Whoever is resumed should look at the clock again: Airflow may resume a task
    too early (apache/airflow#65248).

    Arguments may only grow, each new one with a default: a task that was deferred before an update goes on after it.

    :param moment: an aware time, or ISO 8601 text with an offset.
    :param lead: how long before the moment it fires: a timedelta, or seconds.
    :param end_from_trigger: end the task as a success from the triggerer; it is not resumed.
    :param clock: the present, and
    :param sleep: how to wait; both for tests, and not kept in the database.
    :param later: arguments of later versions, which are handed on and not understood.
    :raises NaiveTime: the moment has no time zone.
    :raises InvalidMessage: it is no time, or the lead is negative or no span.
    """

    def __init__(
        self,
        moment: datetime | str,
        *,
        lead: timedelta | float = 0.0,
        end_from_trigger: bool = False,
        clock: Clock = utcnow,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        **later: Any,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moment = parse_moment("moment", moment)
        self.lead = delay_of(lead, "lead")
        self.end_from_trigger = end_from_trigger
        self._clock = clock
        self._sleep = sleep
        self._later = later

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class's path and its arguments."""
        return "airflow_delayed.triggers.due_time.DueTimeTrigger", {
            "moment": self.moment.isoformat(),
            "lead": self.lead.total_seconds(),
            "end_from_trigger": self.end_from_trigger,
            **self._later,
        }

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Sleep, then fire once."""
        if self._later:
            self.log.warning("arguments of a later version are not understood: %s", ", ".join(sorted(self._later)))
        self.log.info("waiting until %s%s", self.moment.isoformat(), f" less {self.lead}" if self.lead else "")
        while (left := (self.moment - self._clock() - self.lead).total_seconds()) > 0:
            await self._sleep(pause(left))
        yield TaskSuccessEvent() if self.end_from_trigger else TriggerEvent(self.moment)

    async def on_kill(self) -> None:
        """Tell that a user has ended the wait: nothing was done yet that had to be undone."""
        self.log.warning("ended by a user before %s: what waited for it is not done", self.moment.isoformat())
