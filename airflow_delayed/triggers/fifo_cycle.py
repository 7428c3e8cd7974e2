"""FifoCycleTrigger: the work of a FifoCycleSensor in the triggerer, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import closing, suppress
from datetime import datetime, timedelta
from typing import Any

from airflow.sdk.exceptions import AirflowException
from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_delayed import metrics
from airflow_delayed.errors import DelayedError, RetentionAtRisk
from airflow_delayed.message import utcnow
from airflow_delayed.sqs.counts import Counts
from airflow_delayed.sqs.rounds import Rounds, end_of

#: Of the arguments. They may only grow, each new one with a default: a task that was deferred before an update goes on
#: after it, and one that was deferred after it may be taken by a triggerer that is not updated yet.
VERSION = 1
#: Seconds for which an end waits for the batch in hand; what is not done by then is visible to others 30 s later.
GRACE = 3.0


class FifoCycleTrigger(BaseTrigger):
    """Sends on what waits in delay queues, until they are empty or until a time; then it fires.

    Its event is ``{"version", "status", "summary", "error", "counts"}``, of status "done", "failed" or "retention"; the
    summary has counts, never a body, and "counts" is their state, to go on from. Nothing is lost if the triggerer dies,
    and two of the same may run for a while.

    :param conn_id: a connection of type ``aws``.
    :param destinations: as messages name them.
    :param until: "empty", or ISO 8601 text with an offset.
    :param wait_time_seconds: of each round, 0 to 20.
    :param poke_interval: seconds between two rounds.
    :param empty_looks: rounds in a row that must find nothing.
    :param error_queue: for messages that do not say when they are due.
    :param max_late_seconds: a message delivered later than that is a warning.
    :param counts: the state of Counts: what was done before.
    :param version: of the arguments.
    :param later: arguments of later versions, which are handed on and not understood.
    """

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
        version: int = VERSION,
        **later: Any,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.arguments = {
            "conn_id": conn_id,
            "destinations": list(destinations),
            "until": until,
            "wait_time_seconds": wait_time_seconds,
            "poke_interval": poke_interval,
            "empty_looks": empty_looks,
            "error_queue": error_queue,
            "max_late_seconds": max_late_seconds,
            "counts": dict(counts or {}),
            "version": version,
            **later,
        }
        self._later = sorted(later)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class's path and its arguments, all of which JSON can hold."""
        return "airflow_delayed.triggers.fifo_cycle.FifoCycleTrigger", dict(self.arguments)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Cycle in a thread, and fire when that ends."""
        if self._later:
            self.log.warning("arguments of a later version are not understood: %s", ", ".join(self._later))
        stop = threading.Event()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[dict[str, Any]] = loop.create_future()

        def settle(set_to: Callable[[Any], None], value: object) -> None:
            if not done.done():
                set_to(value)

        def work() -> None:
            try:
                result: tuple[Callable[[Any], None], object] = done.set_result, self._work(stop)
            except BaseException as error:
                result = done.set_exception, error
            # the loop may be closed by now, and nobody waits any more
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, *result)

        # not one of the loop's own threads, which are few and wanted by other triggers; it logs where this one does
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(work,), name="fifo-cycle", daemon=True).start()
        try:
            yield TriggerEvent(await asyncio.shield(done))
        finally:
            stop.set()
            # a moment for the batch in hand, so that what was sent on is deleted too
            await asyncio.wait([done], timeout=GRACE)
            if done.done() and not done.cancelled():
                done.exception()

    def _work(self, stop: threading.Event) -> dict[str, Any]:
        from airflow_delayed.hooks.sqs import SqsDelayHook

        def sleep(seconds: float) -> None:
            stop.wait(seconds)

        given = self.arguments
        max_late = given["max_late_seconds"]
        metrics.begin_in_trigger()
        with closing(SqsDelayHook(given["conn_id"], sleep=sleep)) as hook:
            rounds = Rounds(
                hook,
                given["destinations"],
                end=end_of(given["until"], utcnow()),
                wait_seconds=given["wait_time_seconds"],
                looks=given["empty_looks"],
                error_queue=given["error_queue"],
                max_late=None if max_late is None else timedelta(seconds=max_late),
                counts=Counts.restored(given["counts"]),
                meter=metrics.count_cycled(given["conn_id"]),
            )
            status, problem = "done", None
            try:
                while not rounds.go(stop.is_set) and not stop.wait(given["poke_interval"]):
                    pass
            except RetentionAtRisk as error:
                status, problem = "retention", str(error)
            except Exception as error:
                # the event is logged, and the texts of others may show what must not be in a log
                told = f": {error}" if isinstance(error, DelayedError | AirflowException) else ""
                status, problem = "failed", f"{type(error).__name__}{told}"
            rounds.tell()
        counts = rounds.counts
        return {
            "version": VERSION,
            "status": status,
            "summary": counts.summary(),
            "error": problem,
            "counts": counts.state(),
        }


def until_text(end: datetime | None) -> str:
    """Return ``until`` as the trigger takes it."""
    return "empty" if end is None else end.isoformat()
