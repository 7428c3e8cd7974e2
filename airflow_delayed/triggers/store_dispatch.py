"""StoreDispatchTrigger: the work of a StoreDispatchOperator in the triggerer, in threads of its own."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Literal

from airflow_delayed import metrics
from airflow_delayed.delivery import delivery_for
from airflow_delayed.errors import DelayedError
from airflow_delayed.message import parse_moment
from airflow_delayed.store.dispatch.dispatcher import Dispatcher
from airflow_delayed.store.dispatch.report import DispatchFailed, DispatchReport
from airflow_delayed.store.policy import DispatchPolicy
from airflow_delayed.store.schema import TABLE
from airflow_delayed.triggers.base import ThreadTrigger


class StoreDispatchTrigger(ThreadTrigger):
    """Dispatches the messages of a store, until a time or until its connections have none; then it fires.

    It sleeps exactly until the next message, and is notified of an earlier one by PostgreSQL; in the other databases it
    polls every second. Its event is ``{"status", "summary", "error"}``, of status "done", "given up" (messages are in
    the table of failed ones) or "unavailable" (a connection or the store, and a retry may help); it has counts and
    reasons, never a body. Two such triggers may run at once: neither sends a message that the other has leased. If the
    triggerer dies, its leases end after the claim_timeout of its policy; so do those of messages that are not confirmed
    when the trigger ends, which may be sent twice.

    :param store_conn_id: the store.
    :param deliver_conn_ids: the connections that it may deliver through.
    :param until: "empty", or ISO 8601 text with an offset, by the database's clock.
    :param table: the store's table.
    :param schema: the schema of the table and of queue tables; by default the connection's own.
    :param policy: the state of a DispatchPolicy.
    :param summary: the counts before the trigger began.
    :param failures: the messages that failed before it began: a reason by message id.
    :param began: when the run began, ISO 8601 text by the database's clock: messages that failed since in a triggerer
        that was lost count for this run too.
    """

    def __init__(
        self,
        store_conn_id: str,
        deliver_conn_ids: Sequence[str],
        until: str = "empty",
        table: str = TABLE,
        schema: str | None = None,
        policy: Mapping[str, Any] | None = None,
        summary: Mapping[str, Any] | None = None,
        failures: Mapping[str, str] | None = None,
        began: str | None = None,
    ) -> None:
        super().__init__(
            store_conn_id=store_conn_id,
            deliver_conn_ids=list(deliver_conn_ids),
            until=until,
            table=table,
            schema=schema,
            policy=dict(policy or {}),
            summary=dict(summary or {}),
            failures=dict(failures or {}),
            began=began,
        )
        self._lock = threading.Lock()
        self._dispatcher: Dispatcher | None = None

    def stop(self) -> None:
        """Claim nothing more."""
        super().stop()
        with self._lock:
            if self._dispatcher is not None:
                self._dispatcher.stop()

    def abandon(self) -> None:
        """Log that messages are still being sent."""
        self.log.warning("what is being sent takes too long to be waited for; it is free again when its lease ends")

    def work(self) -> dict[str, Any] | None:
        """Dispatch until the end, and return the event's payload; None if the trigger was stopped."""
        from airflow_delayed.hooks.store import DelayedStoreHook

        arguments = self.arguments
        policy = DispatchPolicy.restored(arguments["policy"])
        status, problem = "done", None
        metrics.begin_outside_tasks()
        hook = DelayedStoreHook(arguments["store_conn_id"], table=arguments["table"], schema=arguments["schema"])
        with closing(hook) as store:
            dispatcher = None
            try:
                task = self.task_instance
                dispatcher = store.dispatcher(
                    arguments["deliver_conn_ids"],
                    delivery_for,
                    stays=True,
                    dag_id=None if task is None else task.dag_id,
                    **asdict(policy),
                )
                dispatcher.resume(DispatchReport.from_json(arguments["summary"]), arguments["failures"])
                if arguments["began"] is not None:
                    dispatcher.take_up(parse_moment("began", arguments["began"]))
                until: timedelta | Literal["empty"] = "empty"
                if arguments["until"] != "empty":
                    until = parse_moment("until", arguments["until"]) - store.now()
                with self._lock:
                    self._dispatcher = dispatcher
                if self._stopped.is_set():
                    dispatcher.stop()
                with metrics.Gauges(store):
                    dispatcher.run(until)
                if self._stopped.is_set():
                    return None
            except DispatchFailed as error:
                status, problem = ("unavailable" if error.unavailable else "given up"), str(error)
            except DelayedError as error:
                status, problem = "unavailable", str(error)
            metrics.tell_gauges(store)
            summary = DispatchReport().to_json() if dispatcher is None else dispatcher.report.to_json()
        return {"status": status, "summary": summary, "error": problem}
