"""Reading rows in order of due time and id, a page at a time by key, with the indexes that there are."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, Select, Table, and_, or_, select, union_all

from airflow_delayed.store import runs
from airflow_delayed.store.criteria import Criteria
from airflow_delayed.store.schema import Tables

#: Runs that are looked through one by one, each by the index on Run and Time; of more the database finds its way.
RUNS = 1000
#: So many of them in one statement; SQLite allows 500 in a union, SQL Server 2100 parameters.
_APART = 50

Place = tuple[datetime, str]
Conditions = list[ColumnElement[bool]]
Where = Literal["messages", "failed"]


def in_order(
    connection: Connection,
    tables: Tables,
    where: Where,
    criteria: Criteria,
    now: datetime,
    columns: Sequence[ColumnElement[Any]],
    *,
    after: Place | None,
    size: int,
    more: Conditions | None = None,
) -> list[dict[str, Any]]:
    """Return the first rows of one table that are meant, behind a place; none if none of that table can be meant.

    :param columns: Time and Id among them.
    :param more: further conditions.
    """
    table: Table = getattr(tables, where)

    def statement(run: int | None) -> Select[Any] | None:
        meant = of_table(tables, where, criteria, now, run=run)
        if meant is None:
            return None
        conditions = [*meant, *(more or ()), *behind(table, after)]
        return select(*columns).where(*conditions).order_by(table.c.Time, table.c.Id).limit(size)

    plain = statement(None)
    if plain is None:
        return []
    if criteria.sent_by is None:
        return _rows(connection, plain)
    numbers = runs.numbers(connection, tables, criteria.sent_by)
    if len(numbers) > RUNS:
        return _rows(connection, plain)
    found: list[dict[str, Any]] = []
    for begin in range(0, len(numbers), _APART):
        apart = [one for run in numbers[begin : begin + _APART] if (one := statement(run)) is not None]
        found += _rows(connection, apart[0] if len(apart) == 1 else _union(apart))
    return sorted(found, key=lambda row: (row["Time"], row["Id"]))[:size]


def _union(apart: Sequence[Select[Any]]) -> Any:
    # each with its own order and limit, for which not every database has parentheses
    return union_all(*(select(one.subquery()) for one in apart))


def _rows(connection: Connection, statement: Any) -> list[dict[str, Any]]:
    return [dict(row._mapping) for row in connection.execute(statement)]


def of_table(
    tables: Tables, where: Where, criteria: Criteria, now: datetime, *, run: int | None = None
) -> Conditions | None:
    """Return the conditions for one table, or None if none of its rows can be meant."""
    if where == "failed":
        return criteria.of_failed(tables, run=run)
    return criteria.of_messages(tables, now, run=run)


def behind(table: Table, place: Place | None) -> Conditions:
    """Return the conditions for what comes after a place in the order of due time and id."""
    if place is None:
        return []
    due, message_id = place
    # the first lets the index on Time be used
    return [table.c.Time >= due, or_(table.c.Time > due, and_(table.c.Time == due, table.c.Id > message_id))]
