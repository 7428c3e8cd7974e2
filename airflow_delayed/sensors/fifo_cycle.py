"""FifoCycleSensor: sends on what waits in SQS for over 900 s."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseSensorOperator

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_delayed.hooks.sqs import SqsDelayHook

#: Seconds: the longest that SQS waits for a message.
LONGEST_WAIT = 20


class FifoCycleSensor(BaseSensorOperator):
    """Sends the messages of delay queues on, every 900 s, until they are delivered.

    A message that is due in over 900 s waits in ``<destination>-delay.fifo``, and is delivered late or, after 14 days,
    lost if no such sensor runs. Each poke sends on whatever is visible: back for another 900 s, or to its destination
    with what is left of its delay. Several sensors may run on one queue.

    :param conn_id: a connection of type ``aws``.
    :param destination: one destination or several, as messages name them; not the names of their delay queues.
    :param until: "empty": done when the delay queues hold nothing, neither visible nor delayed nor in flight.
    :param wait_time_seconds: how long each poke waits for a message to become visible, 0 to 20; shared among several
        destinations.
    :param poke_interval: seconds between two pokes. In ``mode="reschedule"`` it should be 60 or more; a message whose
        delay ends meanwhile is late by as much.
    :raises TopologyError: a delay queue or a destination does not exist.
    :raises ValueError: ``until`` or ``wait_time_seconds`` is not one of those above.
    """

    template_fields: Sequence[str] = ("conn_id", "destination")
    ui_color = "#e8f1fb"

    def __init__(
        self,
        *,
        conn_id: str = "aws_default",
        destination: str | Sequence[str],
        until: str = "empty",
        wait_time_seconds: int = LONGEST_WAIT,
        poke_interval: float = 5,
        **kwargs: Any,
    ) -> None:
        if until != "empty":
            raise ValueError(f"until={until!r} is not known; use 'empty'")
        if not 0 <= wait_time_seconds <= LONGEST_WAIT:
            raise ValueError(f"wait_time_seconds={wait_time_seconds} must be 0 to {LONGEST_WAIT}")
        super().__init__(poke_interval=poke_interval, **kwargs)
        self.conn_id = conn_id
        self.destination = destination
        self.until = until
        self.wait_time_seconds = wait_time_seconds

    @cached_property
    def hook(self) -> SqsDelayHook:
        """The connection."""
        from airflow_delayed.hooks.sqs import SqsDelayHook

        return SqsDelayHook(self.conn_id)

    def poke(self, context: Context) -> bool:
        """Send on what is visible, and return whether nothing is left."""
        names = [self.destination] if isinstance(self.destination, str) else list(self.destination)
        wait = -(-self.wait_time_seconds // max(1, len(names)))
        left = 0
        for name in names:
            counts = self.hook.cycle(name, wait)
            waiting = self.hook.waiting(name)
            self.log.info(
                "%s: %s sent back for another round, %s delivered, %s failed; about %s left",
                name,
                f"{counts.moved_back:,}",
                f"{counts.delivered:,}",
                f"{counts.failed:,}",
                f"{waiting:,}",
            )
            # SQS counts late, so a pass that moved something proves nothing yet
            left += waiting + counts.moved + counts.failed
        return left == 0
