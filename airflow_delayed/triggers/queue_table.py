"""QueueTableTrigger: asset events for the rows that are inserted into a queue table, for an AssetWatcher."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from airflow_delayed.clock import Backoff
from airflow_delayed.message import body_fields
from airflow_delayed.store.queue_receiver import QueueRow, QueueTableReceiver
from airflow_delayed.store.records import check_queue_name
from airflow_delayed.triggers.base import error_text
from airflow_delayed.triggers.message_stream import (
    BODY_LIMIT,
    EVENT_PAUSE,
    Batch,
    MessageProducer,
    MessageStreamTrigger,
)

if TYPE_CHECKING:
    from airflow.triggers.shared_stream import AdvanceOutcome

log = logging.getLogger(__name__)

#: Rows of one event, by default and at most.
BATCH_SIZE = 1_000
MAX_BATCH_SIZE = 10_000
#: Seconds between two tries to receive, at first and at most.
_FIRST_SLEEP, _LONGEST_SLEEP = 1.0, 30.0
#: Seconds after which the same problem is logged again.
_LOG_AGAIN = 600.0

T = TypeVar("T")


class QueueTableTrigger(MessageStreamTrigger[QueueRow]):
    """Watches a queue table of a SQL database; rows become events of the asset, and start the DAGs that wait for it.

    A dispatcher inserts a message's row at its due time, never earlier, so the DAG starts then. Needs a database and
    nothing else: PostgreSQL, MariaDB, MySQL, or SQLite with one watcher of the table. Use it as
    ``Asset("orders", watchers=[AssetWatcher(name="queue", trigger=QueueTableTrigger("orders_db", "orders"))])``.

    One transaction locks the rows, other watchers skip them, and it deletes them after Airflow has stored the event:
    if the triggerer dies between the two, the database frees them. So a row may be in two events then; its
    ``message_id`` is the same. On PostgreSQL the dispatcher's insert wakes the trigger; rows that other programs insert
    are seen within ten seconds. Elsewhere, and behind a pooler in transaction mode, it polls every second.

    An event's ``extra["payload"]`` has the ``queue`` and the ``messages`` that came together, each with ``message_id``
    (None if the row has none) and ``body_bytes``; no header's value.

    The first row after a quiet time makes an event at once; rows within ``pause`` after an event was stored make one
    event together when the pause ends, for the reason that RabbitMQMessageTrigger names.

    Each watched table takes one connection to its database, and on PostgreSQL a second one that LISTENs. Triggers
    that are alike are one for Airflow; triggers of one table that differ divide its rows between them. While the
    database cannot be reached, or the table is missing, the trigger raises no error: it tries again, every 30 seconds
    in the end, and logs the reason.

    Needs Airflow 3.3 or later.

    :param conn_id: a SQL connection; its user needs the rights to select, update and delete rows of the table.
    :param queue: the name of the table: the destination of its messages, up to 63 bytes.
    :param batch_size: how many rows an event has at most, 1 to 10,000.
    :param pause: as RabbitMQMessageTrigger's; so are ``body``, ``body_limit`` (the row of a larger body is deleted all
        the same, and its body lost) and ``triggerer_queue``.
    :param schema: of the table; by default the connection's own.
    :raises ValueError: a parameter is not one of those above.
    :raises LimitExceeded: the name is too long for a table.
    :raises NeedsAirflow: ``triggerer_queue`` before Airflow 3.4.
    """

    defaults = {"batch_size": BATCH_SIZE, "schema": None, **MessageStreamTrigger.defaults}

    def __init__(
        self,
        conn_id: str,
        queue: str,
        batch_size: int = BATCH_SIZE,
        pause: float = EVENT_PAUSE,
        body: bool = False,
        body_limit: int = BODY_LIMIT,
        schema: str | None = None,
        triggerer_queue: str | None = None,
    ) -> None:
        super().__init__(conn_id, queue, pause=pause, body=body, body_limit=body_limit, triggerer_queue=triggerer_queue)
        check_queue_name(queue)
        if not 1 <= batch_size <= MAX_BATCH_SIZE:
            raise ValueError(f"batch_size={batch_size} must be 1 to {MAX_BATCH_SIZE}")
        self.batch_size = batch_size
        self.schema = schema

    def shared_stream_key(self) -> Hashable:
        """Return the key of the stream: all arguments, so that no watcher gets rows as another one wants them."""
        path, arguments = self.serialize()
        return path, *sorted(arguments.items())

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> QueueTableProducer:
        """Return the reader of the table."""
        from airflow_delayed.hooks.store import DelayedStoreHook

        trigger = cls(**kwargs)
        limit = trigger.body_limit if trigger.body else None

        def receiver() -> QueueTableReceiver:
            hook = DelayedStoreHook(trigger.conn_id, schema=trigger.schema)
            return QueueTableReceiver(
                hook.conn_id, hook.engine, trigger.queue_name, schema=hook.schema, body_limit=limit
            )

        return QueueTableProducer(trigger, receiver)

    def _payload(self, message: QueueRow) -> dict[str, Any]:
        if self.body and message.size > self.body_limit:
            self._log_long_body(message.message_id, message.size)
        payload: dict[str, Any] = {"message_id": message.message_id, "body_bytes": message.size}
        return payload if message.body is None else {**payload, **body_fields(message.body)}


class QueueTableProducer(MessageProducer[QueueRow]):
    """The table's end of a stream: hands rows out, and deletes those whose events are stored.

    Everything that waits for the database runs in one thread of its own.

    :param receiver: makes the receiver; called in the thread, and after an error once more.
    """

    def __init__(self, trigger: QueueTableTrigger, receiver: Callable[[], QueueTableReceiver]) -> None:
        super().__init__(pause=trigger.pause)
        self._trigger = trigger
        self._new_receiver = receiver
        self._receiver: QueueTableReceiver | None = None
        self._closed = False
        # not one of the loop's own threads, which are few and wanted by other triggers
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="delayed-queue-table")
        self._logged: tuple[str, float] | None = None

    async def batches(self) -> AsyncIterator[Sequence[QueueRow]]:
        """Yield rows as they come, through each loss of the connection."""
        backoff = Backoff(first=_FIRST_SLEEP, longest=_LONGEST_SLEEP)
        while not self._closed:
            try:
                rows = await self._call(self._receive)
            except Exception as error:
                # no connection of that name, a table that is missing: somebody may repair it meanwhile
                self._log_problem(error_text(error))
                await asyncio.sleep(backoff.next())
                continue
            backoff.reset()
            self._logged = None
            if rows:
                yield rows

    async def settle(self, messages: Batch[QueueRow], outcome: AdvanceOutcome) -> None:
        """Delete rows that every subscriber has stored, and free the others."""
        assert self._receiver is not None
        stored = outcome.is_clean and messages.has_event
        await self._call(self._receiver.done if stored else self._receiver.again)

    async def aclose(self) -> None:
        """Close the connections; rows that are not done are free again."""
        self._closed = True
        if self._receiver is not None:
            self._receiver.stop()
        try:
            await self._call(self._close)
        finally:
            self._thread.shutdown(wait=False)

    def _receive(self) -> Sequence[QueueRow]:
        if self._receiver is None:
            self._receiver = self._new_receiver()
        # it may have been closed before there was a receiver to be stopped
        if self._closed:
            return ()
        try:
            return self._receiver.receive(self._trigger.batch_size)
        except Exception:
            # the next one takes the connection as it is then; but this one alone knows what is still to be deleted
            if self._receiver.all_deleted:
                with suppress(Exception):
                    self._close()
            raise

    def _close(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()

    async def _call(self, work: Callable[[], T]) -> T:
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._thread, context.run, work)

    def _log_problem(self, problem: str) -> None:
        """Log a problem, and the same one again only after a while."""
        now = time.monotonic()
        if self._logged is None or self._logged[0] != problem or now - self._logged[1] >= _LOG_AGAIN:
            self._logged = problem, now
            name = self._trigger.queue_name
            log.warning("cannot watch queue table %r: %s. Still trying", name, problem)
