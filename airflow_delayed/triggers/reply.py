"""ReplyTrigger: wait in the triggerer for the reply to a message."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_delayed.clock import Backoff, pause
from airflow_delayed.delivery import Clock, delivery_for
from airflow_delayed.message import parse_moment, utcnow
from airflow_delayed.replies import ReplyQueue
from airflow_delayed.triggers.base import class_path, error_text

log = logging.getLogger(__name__)

#: Seconds between two looks for replies, and at most; a look that takes long is followed by ten times as long a sleep,
#: so that all looks together take a tenth of a processor.
INTERVAL, _LONGEST_INTERVAL = 1.0, 30.0
_SHARE = 10
#: Seconds between two tries, at first and at most; and after which the same problem is logged again.
_FIRST_SLEEP, _LONGEST_SLEEP, _LOG_AGAIN = 1.0, 30.0, 600.0

T = TypeVar("T")


class ReplyTrigger(BaseTrigger):
    """Fires when the reply to a message is there, or when the time is up.

    Its event has the reply's key alone, ``{"reply": "..."}``, or None if the time is up: the message id that the reply
    has on RabbitMQ, and the number of its row in a queue table. Body and headers stay in the queue, where the resumed
    task reads them. All these triggers of one queue in a triggerer share one connection and one thread.

    While the broker or database cannot be reached, or the queue is missing, it raises no error: it tries again, every
    30 seconds in the end, and logs the reason.

    :param conn_id: a connection to RabbitMQ, or to a SQL database with queue tables.
    :param queue: the queue of replies.
    :param message_id: the id of the message that was sent.
    :param until: an aware time, or ISO 8601 text with an offset, at which it fires in any case.
    :param schema: of a queue table; by default the connection's own.
    :param clock: returns the present; for tests, and not kept in the database.
    """

    def __init__(
        self,
        conn_id: str,
        queue: str,
        message_id: str,
        until: datetime | str,
        schema: str | None = None,
        *,
        clock: Clock = utcnow,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.conn_id = conn_id
        # from 3.4 on the attribute "queue" is Airflow's: the queue of triggerers
        self.queue_name = queue
        self.message_id = message_id
        self.until = parse_moment("until", until)
        self.schema = schema
        self._clock = clock

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class's path and its arguments."""
        return class_path(type(self)), {
            "conn_id": self.conn_id,
            "queue": self.queue_name,
            "message_id": self.message_id,
            "until": self.until.isoformat(),
            "schema": self.schema,
        }

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait, and fire once."""
        self.log.info(
            "waiting until %s for the reply to message %s in queue %r",
            self.until.isoformat(),
            self.message_id,
            self.queue_name,
        )
        with _watch(self.conn_id, self.queue_name, self.schema).waiting(self.message_id) as reply:
            while not reply.done() and (left := (self.until - self._clock()).total_seconds()) > 0:
                await asyncio.wait([reply], timeout=pause(left))
            key = reply.result() if reply.done() else None
        yield TriggerEvent({"reply": key})


@dataclass(eq=False, slots=True)
class _Wait:
    """A trigger that waits: what it gets, where it logs, and the problem that it has logged and when."""

    key: asyncio.Future[str]
    context: contextvars.Context
    logged: tuple[str, float] | None = None


class ReplyWatch:
    """Looks into one queue for all triggers of an event loop that wait for replies there."""

    def __init__(self, conn_id: str, queue: str, schema: str | None, *, ended: Callable[[], object]) -> None:
        self._conn_id = conn_id
        self._queue = queue
        self._schema = schema
        self._ended = ended
        #: By the id of the message.
        self._waiting: dict[str, list[_Wait]] = {}
        self._replies: ReplyQueue | None = None
        # not one of the loop's own threads, which are few and wanted by other triggers
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="delayed-replies")
        self._rounds: asyncio.Task[None] | None = None

    @contextmanager
    def waiting(self, message_id: str) -> Iterator[asyncio.Future[str]]:
        """Look for a reply within the block; the future gets its key."""
        wait = _Wait(asyncio.get_running_loop().create_future(), contextvars.copy_context())
        waits = self._waiting.setdefault(message_id, [])
        waits.append(wait)
        if self._rounds is None:
            self._rounds = asyncio.create_task(self._look())
        try:
            yield wait.key
        finally:
            waits.remove(wait)
            if not waits:
                del self._waiting[message_id]

    async def _look(self) -> None:
        """Look again and again, until nothing waits any more."""
        backoff = Backoff(first=_FIRST_SLEEP, longest=_LONGEST_SLEEP)
        try:
            while self._waiting:
                began = time.monotonic()
                try:
                    found = await self._call(self._collect, tuple(self._waiting))
                except Exception as error:
                    # no connection of that name, a queue that is missing: somebody may repair it meanwhile
                    self._log_problem(error_text(error))
                    await asyncio.sleep(backoff.next())
                    continue
                backoff.reset()
                for wait in self._waits():
                    wait.logged = None
                for message_id, key in found.items():
                    for wait in self._waiting.get(message_id, ()):
                        if not wait.key.done():
                            wait.key.set_result(key)
                took = time.monotonic() - began
                await asyncio.sleep(min(max(INTERVAL, _SHARE * took), _LONGEST_INTERVAL))
        finally:
            # whoever waits from now on gets another one
            self._ended()
            try:
                await self._call(self._close)
            finally:
                self._thread.shutdown(wait=False)

    def _collect(self, ids: Sequence[str]) -> dict[str, str]:
        if self._replies is None:
            self._replies = delivery_for(self._conn_id, schema=self._schema).replies(self._queue)
        try:
            return self._replies.collect(ids)
        except Exception:
            # the next one takes the connection as it is then
            self._close()
            raise

    def _close(self) -> None:
        replies, self._replies = self._replies, None
        if replies is not None:
            with suppress(Exception):
                replies.close()

    async def _call(self, work: Callable[..., T], *arguments: Any) -> T:
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._thread, context.run, work, *arguments)

    def _waits(self) -> Iterator[_Wait]:
        return (wait for waits in self._waiting.values() for wait in waits)

    def _log_problem(self, problem: str) -> None:
        """Log a problem where each trigger logs, and the same one again only after a while."""
        now = time.monotonic()
        for wait in self._waits():
            if wait.logged is None or wait.logged[0] != problem or now - wait.logged[1] >= _LOG_AGAIN:
                wait.logged = problem, now
                text = "cannot look for replies in queue %r: %s. Still trying"
                wait.context.run(log.warning, text, self._queue, problem)


#: A connection, a queue, and its schema.
_Place = tuple[str, str, str | None]
#: The watches of each event loop. A process has one loop, but for tests.
_WATCHES: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Place, ReplyWatch]] = WeakKeyDictionary()


def _watch(conn_id: str, queue: str, schema: str | None) -> ReplyWatch:
    key = conn_id, queue, schema
    watches = _WATCHES.setdefault(asyncio.get_running_loop(), {})
    if key not in watches:
        watches[key] = ReplyWatch(*key, ended=partial(watches.pop, key, None))
    return watches[key]
