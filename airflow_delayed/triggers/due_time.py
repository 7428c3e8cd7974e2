"""DueTimeTrigger: wait in the triggerer until a moment, exactly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_delayed.message import parse_moment, utcnow

#: Seconds after which a long wait looks at the clock again, since it may have been set, or the machine suspended.
LOOK_AGAIN = 60.0


class DueTimeTrigger(BaseTrigger):
    """Fires at its moment: never before, and at once if it is past. Its event's payload is the moment.

    The last minute is one exact sleep, so that it is late by milliseconds; a task that is resumed by it starts two to
    three seconds later.

    :param moment: an aware time, or ISO 8601 text with an offset.
    :raises InvalidMessage: it has no time zone, or is no time.
    """

    def __init__(self, moment: datetime | str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moment = parse_moment("moment", moment)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class's path and its arguments."""
        return "airflow_delayed.triggers.due_time.DueTimeTrigger", {"moment": self.moment}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Sleep, then fire once."""
        self.log.info("waiting until %s", self.moment.isoformat())
        while (left := (self.moment - utcnow()).total_seconds()) > 0:
            await asyncio.sleep(min(left, LOOK_AGAIN))
        yield TriggerEvent(self.moment)
