"""Who dispatches, for which connections, and when it was last seen: the table ``_dispatchers``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, Connection, delete, insert, select, update

from airflow_delayed.store.content import beginning
from airflow_delayed.store.schema import Tables

#: How long a dispatcher is remembered after it was last seen.
KEPT = timedelta(days=1)
#: How many runs of dispatchers are read, and how many characters of the names of their connections: somebody else may
#: have written more.
MOST = 1000
MOST_CHARACTERS = 8192


def seen(
    connection: Connection,
    tables: Tables,
    dispatcher: str,
    deliver_conn_ids: Sequence[str | None],
    now: datetime,
    *,
    ended: bool = False,
) -> None:
    """Write down that a dispatcher is at work, or has ended, and forget those of which nothing was seen for a day.

    :param deliver_conn_ids: the connections that it delivers through; None stands for the queue tables of the store's
        own database.
    """
    table = tables.dispatchers
    values = {"SeenAt": now, "EndedAt": now if ended else None}
    if not connection.execute(update(table).where(table.c.Id == dispatcher).values(**values)).rowcount:
        names = json.dumps(list(deliver_conn_ids), ensure_ascii=False)
        connection.execute(insert(table).values(Id=dispatcher, ConnIds=names, StartedAt=now, **values))
    connection.execute(delete(table).where(table.c.SeenAt < now - KEPT))


def last_seen(connection: Connection, tables: Tables, deliver_conn_id: str | None) -> datetime | None:
    """Return when a dispatcher was last at work for a connection, or None if none was for about a day.

    :param deliver_conn_id: None for the queue tables of the store's own database.
    """
    table = tables.dispatchers
    # as it is written down; what only looks like it is left out below
    name = table.c.ConnIds.contains(json.dumps(deliver_conn_id, ensure_ascii=False), autoescape=True)
    statement = select(names_in(connection, tables), table.c.SeenAt).where(name).order_by(table.c.SeenAt.desc())
    for text, moment in connection.execute(statement.limit(MOST)):
        if deliver_conn_id in names(text):
            found: datetime = moment
            return found
    return None


def names_in(connection: Connection, tables: Tables) -> ColumnElement[str]:
    """Return the column of connections' names, for :func:`names`."""
    return beginning(tables.dispatchers.c.ConnIds, MOST_CHARACTERS, connection.dialect.name)


def names(text: str) -> tuple[str | None, ...]:
    """Return the names in a JSON list; none for what somebody else wrote and is none, or is too long."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    return tuple(name for name in found if name is None or isinstance(name, str)) if isinstance(found, list) else ()
