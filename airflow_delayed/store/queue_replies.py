"""Replies in a queue table: each row stays until the task that waits for it has handled it, and nothing is locked."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, Table, delete, select

from airflow_delayed.replies import Reply, ReplyQueue, answered
from airflow_delayed.store.dispatch.queue_tables import LONGEST_HEADERS, MESSAGE_ID, bounded
from airflow_delayed.store.engine import database_errors
from airflow_delayed.store.queue_receiver import as_bytes, checked_table

#: Rows of one query.
_ROWS = 1_000
#: Seconds after which all rows are read again: a row may be committed later than the rows behind it.
_READ_AGAIN = 30.0


class QueueTableReplies(ReplyQueue):
    """A queue table of replies. The key of a reply is the number of its row.

    :param conn_id: names the connection in errors.
    :param engine: prepared by :func:`airflow_delayed.store.engine.prepare`; this has it alone.
    :param queue: the name of the table.
    :param schema: of the table; by default the connection's own.
    """

    def __init__(
        self,
        conn_id: str,
        engine: Engine,
        queue: str,
        *,
        schema: str | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._conn_id = conn_id
        self._engine = engine
        self._queue = queue
        self._schema = schema
        self._monotonic = monotonic
        self._table: Table | None = None
        #: The ids of the last look, the last row of it, and when all rows were read.
        self._ids: frozenset[str] = frozenset()
        self._last = 0
        self._read_at = 0.0

    def collect(self, ids: Collection[str]) -> dict[str, str]:
        """Return the numbers of the replies' rows, by id: of the rows that are new since the last call.

        All rows are read if an id is new, and every half minute.
        """
        wanted, now = frozenset(ids), self._monotonic()
        found: dict[str, str] = {}
        with self._connected() as (connection, table):
            if not wanted <= self._ids or now - self._read_at >= _READ_AGAIN:
                self._last, self._read_at = 0, now
            self._ids = wanted
            for number, headers in self._rows(connection, table):
                message_id = answered(_parsed(headers), None, wanted)
                if message_id is not None:
                    found.setdefault(message_id, str(number))
        return found

    def collected(self, message_id: str) -> str | None:
        """Return the number of a reply's row."""
        self._ids = frozenset()
        return self.collect([message_id]).get(message_id)

    def read(self, message_id: str, key: str) -> Reply | None:
        """Return the reply in a row."""
        if not key.isdigit():
            return None
        with self._connected() as (connection, table):
            columns = bounded(connection, table.c.headers, LONGEST_HEADERS).label("headers"), table.c.body
            row = connection.execute(select(*columns).where(table.c.seq == int(key))).first()
        headers = {} if row is None else _parsed(row.headers)
        # the table may have been made again, and have another row of this number
        if row is None or answered(headers, None, [message_id]) is None:
            return None
        own_id = headers.get(MESSAGE_ID)
        return Reply(
            message_id=own_id if isinstance(own_id, str) else None,
            answers=message_id,
            body=as_bytes(row.body) or b"",
            headers={name: value for name, value in headers.items() if isinstance(value, str)},
        )

    def remove(self, message_id: str, key: str) -> None:
        """Delete a reply's row."""
        with database_errors(self._conn_id, self._engine):
            table = self._checked()
            with self._engine.begin() as connection:
                connection.execute(delete(table).where(table.c.seq == int(key)))

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    def _rows(self, connection: Connection, table: Table) -> Iterator[tuple[int, Any]]:
        headers = bounded(connection, table.c.headers, LONGEST_HEADERS)
        while True:
            query = select(table.c.seq, headers).where(table.c.seq > self._last).order_by(table.c.seq).limit(_ROWS)
            rows = connection.execute(query).all()
            for number, text in rows:
                self._last = number
                yield number, text
            if len(rows) < _ROWS:
                return

    def _checked(self) -> Table:
        if self._table is None:
            self._table = checked_table(self._conn_id, self._engine, self._queue, self._schema)
        return self._table

    @contextmanager
    def _connected(self) -> Iterator[tuple[Connection, Table]]:
        with database_errors(self._conn_id, self._engine):
            table = self._checked()
            with self._engine.connect().execution_options(read_only=True) as connection:
                yield connection, table


def _parsed(headers: Any) -> dict[str, Any]:
    """Return a row's headers, as far as they are an object of JSON: another program may have written anything."""
    try:
        found = json.loads(headers)
    except (ValueError, TypeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
