"""StoreDispatchTrigger: the work of a StoreDispatchOperator in the triggerer, in threads of its own."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_delayed import metrics
from airflow_delayed.delivery import Clock, Delivery, delivery_for
from airflow_delayed.errors import DelayedError
from airflow_delayed.message import parse_moment
from airflow_delayed.store.policy import DispatchPolicy
from airflow_delayed.store.report import DispatchFailed, DispatchReport
from airflow_delayed.store.schema import TABLE
from airflow_delayed.store.stay import AHEAD, Stay
from airflow_delayed.store.waiting import waiter_for

#: Of the arguments. They may only grow, each new one with a default: a task that was deferred before an update goes on
#: after it, and one that was deferred after it may be taken by a triggerer that is not updated yet.
VERSION = 1
#: Seconds for which an end waits for what is being sent; what is not confirmed by then is free for others when its
#: lease ends, and may be sent twice.
GRACE = 5.0


class StoreDispatchTrigger(BaseTrigger):
    """Hands over what a store holds, until a time or until nothing is left for its connections; then it fires.

    It sleeps exactly until the next message, and is told of an earlier one by PostgreSQL; in the other databases it
    looks every second. Its event is ``{"version", "status", "summary", "error"}``, of status "done", "given up"
    (messages are in the table of failed ones) or "unavailable" (a connection or the store, and a retry may help); it
    has counts and reasons, never a body. Two of the same may run at once: none sends what the other holds. If the
    triggerer dies, what it held is free for others after the claim_timeout of its policy.

    :param conn_id: the store.
    :param deliver_conn_ids: the connections that it may deliver through.
    :param until: "empty", or ISO 8601 text with an offset, by the database's clock.
    :param policy: the state of a DispatchPolicy.
    :param summary: of what was done before.
    :param failures: a reason by message id of what was given up before.
    :param began: when the run began, ISO 8601 text by the database's clock: what a triggerer that is gone has given up
        since is this run's, too.
    :param version: of the arguments.
    :param later: arguments of later versions, which are handed on and not understood.
    """

    def __init__(
        self,
        conn_id: str,
        deliver_conn_ids: Sequence[str],
        until: str = "empty",
        table: str = TABLE,
        schema: str | None = None,
        policy: Mapping[str, Any] | None = None,
        summary: Mapping[str, Any] | None = None,
        failures: Mapping[str, str] | None = None,
        began: str | None = None,
        version: int = VERSION,
        **later: Any,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.arguments = {
            "conn_id": conn_id,
            "deliver_conn_ids": list(deliver_conn_ids),
            "until": until,
            "table": table,
            "schema": schema,
            "policy": dict(policy or {}),
            "summary": dict(summary or {}),
            "failures": dict(failures or {}),
            "began": began,
            "version": version,
            **later,
        }
        self._later = sorted(later)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._stay: Stay | None = None
        self._work: asyncio.Future[dict[str, Any] | None] | None = None

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class's path and its arguments, all of which JSON can hold."""
        return "airflow_delayed.triggers.store_dispatch.StoreDispatchTrigger", dict(self.arguments)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Dispatch in a thread, and fire when that ends."""
        if self._later:
            self.log.warning("arguments of a later version are not understood: %s", ", ".join(self._later))
        # not one of the loop's own threads, which are few and wanted by other triggers; it logs where this one does
        thread = ThreadPoolExecutor(1, "delayed-stay")
        context = contextvars.copy_context()
        self._work = asyncio.get_running_loop().run_in_executor(thread, context.run, self._dispatch)
        thread.shutdown(wait=False)
        try:
            payload = await asyncio.shield(self._work)
        finally:
            await self.cleanup()
        if payload is not None:
            yield TriggerEvent(payload)

    async def cleanup(self) -> None:
        """Claim nothing more, and wait for what is being sent, for some seconds; the rest is free at once."""
        self._stop.set()
        with self._lock:
            if self._stay is not None:
                self._stay.stop()
        if self._work is not None:
            await asyncio.wait([self._work], timeout=GRACE)
            if not self._work.done():
                self.log.warning(
                    "what is being sent takes too long to be waited for; it is free again when its lease ends"
                )
            elif not self._work.cancelled():
                self._work.exception()

    def _dispatch(self) -> dict[str, Any] | None:
        from airflow_delayed.hooks.store import DelayedStoreHook

        given = self.arguments
        policy = DispatchPolicy.restored(given["policy"])
        status, problem = "done", None
        metrics.begin_in_trigger()
        with closing(DelayedStoreHook(given["conn_id"], table=given["table"], schema=given["schema"])) as store:
            dispatcher = None
            try:
                dispatcher = store.dispatcher(given["deliver_conn_ids"], _transport, ahead=AHEAD, **asdict(policy))
                dispatcher.resume(DispatchReport.restored(given["summary"]), given["failures"])
                if given["began"] is not None:
                    dispatcher.take_up(parse_moment("began", given["began"]))
                seconds = None
                if given["until"] != "empty":
                    seconds = (parse_moment("until", given["until"]) - store.now()).total_seconds()
                stay = Stay(dispatcher, waiter_for(store.engine, store.table), seconds)
                with self._lock:
                    self._stay = stay
                if self._stop.is_set():
                    stay.stop()
                with metrics.Gauges(store):
                    ended = stay.run()
                if ended is None:
                    return None
            except DispatchFailed as error:
                status, problem = ("unavailable" if error.unavailable else "given up"), str(error)
            except DelayedError as error:
                status, problem = "unavailable", str(error)
            metrics.tell_gauges(store)
            summary = DispatchReport().summary() if dispatcher is None else dispatcher.report.summary()
        return {"version": VERSION, "status": status, "summary": summary, "error": problem}


def _transport(conn_id: str, clock: Clock) -> Delivery:
    return delivery_for(conn_id, clock=clock)
