"""A queue table that is there for one block, in which somebody waits for one message."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Engine, Table, delete, select
from sqlalchemy.exc import SQLAlchemyError

from airflow_delayed.delivery import TemporaryQueue
from airflow_delayed.store.dialects import dialect_of
from airflow_delayed.store.engine import database_errors, first_line
from airflow_delayed.store.schema import queue_table

#: Seconds between two looks at a temporary queue.
_LOOK_AGAIN = 0.1


class TemporaryQueueTable(TemporaryQueue):
    """A queue table of its own; it is dropped whatever is on its way to it."""

    def __init__(self, conn_id: str, engine: Engine, table: Table) -> None:
        super().__init__(table.name)
        self._conn_id = conn_id
        self._engine = engine
        self._table = table

    def arrives(self, seconds: float) -> bool:
        """Look for a row, ten times a second."""
        deadline = time.monotonic() + seconds
        while True:
            with database_errors(self._conn_id, self._engine), self._engine.begin() as connection:
                first = connection.execute(select(self._table.c.seq).limit(1)).scalar_one_or_none()
                if first is not None:
                    connection.execute(delete(self._table).where(self._table.c.seq == first))
                    return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(_LOOK_AGAIN, left))

    def end(self) -> None:
        """Drop the table."""
        try:
            self._table.drop(self._engine, checkfirst=True)
        except SQLAlchemyError as error:
            self.remains = f"table {self.name} stays, and has to be dropped by hand: {first_line(error)}"


@contextmanager
def temporary_queue_table(conn_id: str, engine: Engine, schema: str | None, name: str) -> Iterator[TemporaryQueue]:
    """Make a queue table for the block."""
    table = queue_table(name, schema, dialect_of(engine))
    with database_errors(conn_id, engine):
        table.create(engine)
    queue = TemporaryQueueTable(conn_id, engine, table)
    try:
        yield queue
    finally:
        queue.end()
