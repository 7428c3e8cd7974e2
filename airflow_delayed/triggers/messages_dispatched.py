"""MessagesDispatchedTrigger: wait in the triggerer until messages of a store wait no longer."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_delayed.clock import Backoff
from airflow_delayed.errors import TransportUnavailable
from airflow_delayed.identity import SentBy
from airflow_delayed.message import parse_moment
from airflow_delayed.triggers.base import class_path, error_text

if TYPE_CHECKING:
    from airflow_delayed.store.api import Progress

#: Threads that look into one store, for all triggers of a process.
_THREADS = 2
#: A look that takes long is followed by ten times as long a sleep.
_SHARE = 10
#: Seconds between two tries while the store cannot be reached, at first and at most.
_FIRST_SLEEP, _LONGEST_SLEEP = 1.0, 60.0
#: A message that has been due for longer is named in the log: perhaps no dispatcher is at work.
_LATE = timedelta(minutes=5)

_looking: dict[str, ThreadPoolExecutor] = {}
#: airflow_delayed.testing dispatches in place of sleeping.
_sleep = asyncio.sleep


@dataclass(frozen=True, slots=True)
class MessageSelection:
    """Messages of a store, by ids or by a filter.

    :param criteria: ``ids``, or keywords of :class:`airflow_delayed.store.filters.FilterArgs`.
    """

    store_conn_id: str
    table: str
    schema: str | None
    criteria: Mapping[str, Any]

    def look(self, seen: int) -> Look:
        """Return how far they have come.

        :param seen: how many were known before.
        :raises DelayedError: the store cannot be asked.
        """
        from airflow_delayed.hooks.store import DelayedStoreHook

        with closing(DelayedStoreHook(self.store_conn_id, table=self.table, schema=self.schema)) as store:
            progress = store.progress(**self.criteria)
        ids = self.criteria.get("ids")
        return Look(progress, max(seen, progress.total), None if ids is None else len(ids))

    def to_json(self) -> dict[str, Any]:
        """Return the criteria as JSON can hold them."""
        return {name: _plain(value) for name, value in self.criteria.items()}

    @staticmethod
    def criteria_of(content: Mapping[str, Any]) -> dict[str, Any]:
        """Return the criteria of :meth:`to_json`."""
        criteria = dict(content)
        for name in {"due_from", "due_until"} & criteria.keys():
            criteria[name] = parse_moment(name, criteria[name])
        if "sent_by" in criteria:
            criteria["sent_by"] = SentBy(**criteria["sent_by"])
        return criteria


def _plain(value: Any) -> Any:
    if isinstance(value, SentBy):
        names = ("dag_id", "run_id", "task_id", "map_index")
        return {name: part for name in names if (part := getattr(value, name)) is not None}
    return value.isoformat() if isinstance(value, datetime) else value


@dataclass(frozen=True, slots=True)
class Look:
    """How far messages have come, and how many of them were ever seen.

    :param seen: the largest number that was known in this or an earlier look.
    :param wanted: the number of ids; None: a filter selects.
    """

    progress: Progress
    seen: int
    wanted: int | None

    @property
    def unknown(self) -> bool:
        """Whether messages were never seen: none at all, or some of the ids."""
        return self.seen < self.wanted if self.wanted is not None else not self.seen

    def ends(self, on_missing: str) -> bool:
        """Return whether there is nothing to wait for.

        :param on_missing: "fail", "wait" or "succeed", if messages are unknown.
        """
        if self.unknown and on_missing == "fail":
            return True
        return not self.progress.waiting and not (self.unknown and on_missing == "wait")

    @property
    def counts(self) -> dict[str, int]:
        """The number of messages in all, by outcome, and ``forgotten`` by the store meanwhile."""
        counts = self.progress.outcomes
        return {"total": self.seen, **counts, "forgotten": self.seen - self.progress.total}

    def __str__(self) -> str:
        progress = self.progress
        outcomes = {name: number for name, number in self.counts.items() if number and name not in ("total", "waiting")}
        done = ", ".join(f"{number:,} {name.replace('_', '-')}" for name, number in outcomes.items())
        line = f"{progress.waiting:,} of {self.seen:,} messages wait{f'; {done}' if done else ''}"
        if progress.next_due is None:
            return line
        line += f"; the next is due {progress.next_due.isoformat()}"
        if progress.next_due + _LATE < progress.at:
            line += ", and is late: is a dispatcher at work? See airflow delayed doctor"
        return line


class MessagesDispatchedTrigger(BaseTrigger):
    """Fires when messages of a store wait no longer: each was dispatched, cancelled or given up.

    Its event is ``{"status", "counts", "error"}``, of status "done", "unknown" (the store does not know all of them) or
    "failed" (the store refuses). While the store cannot be reached it tries again, every minute in the end, and logs
    the reason. A process has two threads for each store in which such triggers look.

    :param store_conn_id: the store.
    :param criteria: those of a :class:`MessageSelection`, as JSON.
    :param poke_interval: seconds between two looks.
    :param on_missing: "fail", "wait" or "succeed", if the store does not know all of them.
    :param table: the store's table.
    :param schema: the table's schema; by default the connection's own.
    :param seen: how many messages were known before.
    """

    def __init__(
        self,
        store_conn_id: str,
        criteria: Mapping[str, Any],
        poke_interval: float,
        on_missing: str = "fail",
        table: str = "delayed_messages",
        schema: str | None = None,
        seen: int = 0,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.arguments: dict[str, Any] = {
            "store_conn_id": store_conn_id,
            "criteria": dict(criteria),
            "poke_interval": poke_interval,
            "on_missing": on_missing,
            "table": table,
            "schema": schema,
            "seen": seen,
        }
        self._selection = MessageSelection(store_conn_id, table, schema, MessageSelection.criteria_of(criteria))

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class's path and its arguments."""
        return class_path(type(self)), dict(self.arguments)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Look again and again, and fire once."""
        seen, logged = self.arguments["seen"], ""
        backoff = Backoff(first=_FIRST_SLEEP, longest=_LONGEST_SLEEP)
        while True:
            began = time.monotonic()
            try:
                look = await self._look(seen)
            except TransportUnavailable as error:
                self.log.warning("cannot look into the store: %s. Still trying", error)
                await _sleep(backoff.next())
                continue
            except Exception as error:
                yield TriggerEvent({"status": "failed", "counts": {}, "error": error_text(error)})
                return
            backoff.reset()
            seen = look.seen
            if look.ends(self.arguments["on_missing"]):
                status = "unknown" if look.unknown else "done"
                yield TriggerEvent({"status": status, "counts": look.counts, "error": None})
                return
            if str(look) != logged:
                logged = str(look)
                self.log.info("%s", logged)
            await _sleep(max(self.arguments["poke_interval"], _SHARE * (time.monotonic() - began)))

    async def _look(self, seen: int) -> Look:
        # not the loop's own threads, which are few and wanted by other triggers; a store that hangs holds up no other
        name = self.arguments["store_conn_id"]
        if name not in _looking:
            _looking[name] = ThreadPoolExecutor(_THREADS, thread_name_prefix="delayed-progress")
        work = contextvars.copy_context().run
        return await asyncio.get_running_loop().run_in_executor(_looking[name], work, self._selection.look, seen)
