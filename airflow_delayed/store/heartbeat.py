"""Who dispatches, for which connections, and when it was last seen: the table ``_dispatchers``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy import Connection, delete, insert, select, update

from airflow_delayed.store.schema import Tables

#: How long a dispatcher is remembered after it was last seen.
KEPT = timedelta(days=1)


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
    for conn_ids, moment in connection.execute(
        select(table.c.ConnIds, table.c.SeenAt).order_by(table.c.SeenAt.desc(), table.c.Id)
    ):
        if deliver_conn_id in json.loads(conn_ids):
            found: datetime = moment
            return found
    return None
