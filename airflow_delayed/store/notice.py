"""On PostgreSQL, telling dispatchers that sleep until the next message that there is an earlier one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from hashlib import blake2b

from sqlalchemy import Connection, Table, bindparam, exists, func, or_, select

from airflow_delayed.message import microseconds
from airflow_delayed.store.schema import UtcTime

#: Rows looked at, from the earliest on, for one that keeps a dispatcher awake anyway.
_FRONT = 100


def channel(connection: Connection, table: Table) -> str:
    """Return the name of the channel to LISTEN on for a store's table, of 40 bytes.

    A schema that is not named is the connection's own, so that both ways of naming it are one channel.
    """
    schema = table.schema or connection.dialect.default_schema_name or ""
    return "delayed_" + blake2b(f"{schema}\0{table.name}".encode(), digest_size=16).hexdigest()


def give(connection: Connection, table: Table, earliest: datetime, deliver_conn_ids: Sequence[str | None]) -> None:
    """Give notice, as part of the transaction, if nothing else of these connections is due before ``earliest``.

    The payload is that due time in microseconds since 1970. Call it at most once a transaction, after the rows are
    there; on any other database than PostgreSQL it does nothing.
    """
    if connection.dialect.name != "postgresql":
        return
    moment = bindparam("earliest", earliest, UtcTime())
    front = (
        select(table.c.DeliverConnId, table.c.NextTry)
        .where(table.c.Time < moment)
        .order_by(table.c.Time)
        .limit(_FRONT)
        .subquery()
    )
    # what waits for another try, or for connections that nobody serves, keeps no dispatcher awake
    ours = or_(*(front.c.DeliverConnId.is_not_distinct_from(name) for name in dict.fromkeys(deliver_conn_ids)))
    awake = exists().where(ours, or_(front.c.NextTry.is_(None), front.c.NextTry < moment))
    connection.execute(select(func.pg_notify(channel(connection, table), str(microseconds(earliest)))).where(~awake))
