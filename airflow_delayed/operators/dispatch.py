"""Handing over what a store holds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from airflow.sdk import BaseOperator

from airflow_delayed.delivery import Clock, DelayedDelivery, delivery_for

if TYPE_CHECKING:
    from airflow.sdk import Context


class StoreDispatchOperator(BaseOperator):
    """Hands over what a store holds and is due within ``lookahead``, with the delay that remains, and removes it.

    A message is handed over at least once, into a queue table of the store's database exactly once. Any number of
    these tasks may run side by side. Lookahead must be longer than the time between two runs and a worker's start.
    What fails stays in the store and fails the task, after all others were handed over; run it again.

    Returns counts (``dispatched``, ``failed``, ``expired``, ``left_for_others``, ``by_connection``) and the first and
    last due time.

    :param conn_id: the store, a SQL connection.
    :param deliver_conn_ids: the connections that it may deliver through; messages of others are left. The store's own
        ``conn_id`` stands for queue tables in its database.
    :param lookahead: how long before its due time a message is handed over, or less if its transport cannot delay it
        for so long; a queue table gets it when it is due.
    :param batch_size: messages a transaction.
    :param until: None makes one pass; "empty" goes on until the store has none left for these connections.
    :param table: the store's table.
    :param schema: the schema of the table and of queue tables.
    :raises ValueError: ``lookahead`` is negative, or ``until`` is something else.
    """

    template_fields: Sequence[str] = ("conn_id", "deliver_conn_ids", "table", "schema")

    def __init__(
        self,
        *,
        conn_id: str,
        deliver_conn_ids: Sequence[str] | str,
        lookahead: timedelta = timedelta(minutes=15),
        batch_size: int = 500,
        until: Literal["empty"] | None = None,
        table: str = "delayed_messages",
        schema: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if lookahead < timedelta(0):
            raise ValueError(f"lookahead={lookahead} is negative: messages would be handed over after their due time")
        if until not in (None, "empty"):
            raise ValueError(f"until={until!r} must be None, for one pass, or 'empty'")
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be 1 or more")
        self.conn_id = conn_id
        self.deliver_conn_ids = deliver_conn_ids
        self.lookahead = lookahead
        self.batch_size = batch_size
        self.until = until
        self.table = table
        self.schema = schema

    def execute(self, context: Context) -> dict[str, Any]:
        """Hand over, and return the counts.

        :raises DispatchFailed: some could not be handed over; they stay in the store.
        """
        from airflow_delayed.hooks.store import DelayedStoreHook

        names = [self.deliver_conn_ids] if isinstance(self.deliver_conn_ids, str) else list(self.deliver_conn_ids)
        with closing(DelayedStoreHook(self.conn_id, table=self.table, schema=self.schema)) as store:
            dispatcher = store.dispatcher(names, transport, lookahead=self.lookahead, batch_size=self.batch_size)
            return dispatcher.run(self.until).summary()


def transport(conn_id: str, clock: Clock) -> DelayedDelivery:
    """Return the transport of a connection, which goes by the store's clock."""
    return delivery_for(conn_id, clock=clock)
