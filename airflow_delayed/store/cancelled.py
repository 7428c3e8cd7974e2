"""Cancelled messages that can still be restored: the table ``_cancelled``, with all their content.

No dispatcher reads a message here. A row is there only while the table of remembered ids has the id as cancelled: who
forgets the id removes the row too, so a message that is stored again under the same id never meets it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import (
    CTE,
    ColumnElement,
    Connection,
    FromClause,
    ScalarSelect,
    Table,
    bindparam,
    insert,
    literal,
    null,
    select,
)

from airflow_delayed.store.database import IDS, slices
from airflow_delayed.store.dialects import dialect_of
from airflow_delayed.store.records import remove_rows
from airflow_delayed.store.schema import Tables


def keep(connection: Connection, tables: Tables, source: Table, ids: Sequence[str], until: datetime) -> None:
    """Copy messages of another table to this one, before they are removed there."""
    values = {**_kept_values(tables, source), "Until": literal(until, tables.cancelled.c.Until.type)}
    copy(connection, source, tables.cancelled, ids, values)


def keep_all(tables: Tables, source: CTE) -> CTE:
    """Return the part of a statement that copies all messages of another part; its parameter is ``until``."""
    values = {**_kept_values(tables, source), "Until": bindparam("until", type_=tables.cancelled.c.Until.type)}
    return insert(tables.cancelled).from_select(list(values), select(*values.values())).cte("kept")


def _kept_values(tables: Tables, source: FromClause) -> Mapping[str, ColumnElement[Any]]:
    return {one.name: source.c.get(one.name, null()) for one in tables.cancelled.c}


def copy(connection: Connection, source: Table, target: Table, ids: Sequence[str], values: Mapping[str, Any]) -> None:
    """Insert rows of one table into another within the database, without reading bodies; ``values`` by column."""
    for some in slices(ids):
        rows = select(*values.values()).where(dialect_of(connection).among(source.c.Id, some))
        connection.execute(insert(target).from_select(list(values), rows))


def forget(connection: Connection, tables: Tables, now: datetime) -> int:
    """Delete up to 1000 messages that can be restored no longer, and return how many."""
    table = tables.cancelled
    old = select(table.c.Id).where(table.c.Until <= now).order_by(table.c.Until).limit(IDS)
    ids = list(connection.execute(old.with_for_update(skip_locked=True)).scalars())
    remove_rows(connection, table, sorted(ids))
    return len(ids)


def forget_ids(connection: Connection, tables: Tables, ids: Sequence[str]) -> None:
    """Delete the messages of ids that are remembered no longer."""
    if ids:
        remove_rows(connection, tables.cancelled, ids)


def kept_until(tables: Tables) -> ScalarSelect[datetime]:
    """Return the SQL for the time until which the message of a remembered id can be restored."""
    past, table = tables.past, tables.cancelled
    return select(table.c.Until).where(table.c.Id == past.c.Id).correlate(past).scalar_subquery()
