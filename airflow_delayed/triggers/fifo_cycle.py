"""FifoCycleTrigger: the work of a FifoCycleSensor in the triggerer, in a thread of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import datetime, timedelta
from typing import Any

from airflow.sdk.exceptions import AirflowException

from airflow_delayed import metrics
from airflow_delayed.errors import DelayedError, RetentionAtRisk
from airflow_delayed.message import utcnow
from airflow_delayed.sqs.delay_queue import DelayQueueLoop, end_of
from airflow_delayed.sqs.stats import CycleCounts
from airflow_delayed.triggers.base import ThreadTrigger


class FifoCycleTrigger(ThreadTrigger):
    """Cycles delay queues until they are empty or until a time; then it fires.

    Its event is ``{"status", "summary", "error", "counts"}``, of status "done", "failed" or "retention"; the summary
    has counts, never a body, and "counts" is their state, to go on from. Nothing is lost if the triggerer dies, and two
    of the same may run for a while. A batch that is not done when the trigger ends is visible to others 30 s later.

    :param conn_id: a connection of type ``aws``.
    :param destinations: as messages name them.
    :param until: "empty", or ISO 8601 text with an offset.
    :param wait_time_seconds: as FifoCycleSensor's; so are ``poke_interval``, ``empty_looks`` and ``error_queue``.
    :param max_late_seconds: the sensor's ``max_late``, in seconds.
    :param counts: CycleCounts as JSON, of earlier passes.
    """

    grace = 3.0
    # a receive may wait for 20 s more, with no message in hand
    daemon = True

    def __init__(
        self,
        conn_id: str,
        destinations: Sequence[str],
        until: str = "empty",
        wait_time_seconds: int = 20,
        poke_interval: float = 1,
        empty_looks: int = 3,
        error_queue: str | None = None,
        max_late_seconds: float | None = None,
        counts: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            conn_id=conn_id,
            destinations=list(destinations),
            until=until,
            wait_time_seconds=wait_time_seconds,
            poke_interval=poke_interval,
            empty_looks=empty_looks,
            error_queue=error_queue,
            max_late_seconds=max_late_seconds,
            counts=dict(counts or {}),
        )

    def work(self) -> dict[str, Any]:
        """Cycle until the end, and return the event's payload."""
        from airflow_delayed.hooks.sqs import SqsDelayHook

        def sleep(seconds: float) -> None:
            self._stopped.wait(seconds)

        arguments = self.arguments
        max_late = arguments["max_late_seconds"]
        metrics.begin_outside_tasks()
        with closing(SqsDelayHook(arguments["conn_id"], sleep=sleep)) as hook:
            loop = DelayQueueLoop(
                hook,
                arguments["destinations"],
                end=end_of(arguments["until"], utcnow()),
                wait_seconds=arguments["wait_time_seconds"],
                looks=arguments["empty_looks"],
                error_queue=arguments["error_queue"],
                max_late=None if max_late is None else timedelta(seconds=max_late),
                counts=CycleCounts.from_json(arguments["counts"] or {}),
                meter=metrics.count_cycled(arguments["conn_id"]),
            )
            status, problem = "done", None
            try:
                while not loop.go(self._stopped.is_set) and not self._stopped.wait(arguments["poke_interval"]):
                    pass
            except RetentionAtRisk as error:
                status, problem = "retention", str(error)
            except Exception as error:
                # the event is logged, and the text of a foreign error may show what must not be in a log
                text = f": {error}" if isinstance(error, DelayedError | AirflowException) else ""
                status, problem = "failed", f"{type(error).__name__}{text}"
            loop.log_counts()
        return {"status": status, "summary": loop.summary(), "error": problem, "counts": loop.counts.to_json()}


def until_text(end: datetime | None) -> str:
    """Return the argument ``until`` of the trigger."""
    return "empty" if end is None else end.isoformat()
