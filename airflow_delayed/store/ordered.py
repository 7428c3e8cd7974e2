"""Reading rows in order of due time and id, a page at a time by key, with the indexes that there are."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, FromClause, Select, Subquery, Table, and_, or_, select, true, tuple_

from airflow_delayed.origin import Origin
from airflow_delayed.store import runs
from airflow_delayed.store.criteria import Criteria, Run
from airflow_delayed.store.schema import Tables, value_of
from airflow_delayed.store.stored import of_runs, origin_of

Place = tuple[datetime, str]
Conditions = list[ColumnElement[bool]]
Where = Literal["messages", "failed"]
#: Both tables.
BOTH: tuple[Where, ...] = ("messages", "failed")


def first(
    dialect_name: str,
    tables: Tables,
    where: Where,
    criteria: Criteria,
    now: datetime,
    columns: Sequence[ColumnElement[Any]],
    *,
    run: int | None,
    after: Place | None,
    size: int,
    more: Conditions | None = None,
    of_run: Sequence[ColumnElement[Any]] = (),
) -> Select[Any] | None:
    """Return the query for the first rows of one table that are meant, behind a place; None if none can be meant.

    :param run: the number of the run that is meant, if it is one alone.
    :param columns: Time and Id among them.
    :param more: further conditions.
    :param of_run: columns of the table of runs, null where none was named.
    """
    table: Table = getattr(tables, where)
    each = criteria.sent_by is not None and run is None and dialect_name == "postgresql"
    meant = of_table(tables, where, criteria, now, run=tables.runs.c.Seq if each else run)
    if meant is None:
        return None
    conditions = [*meant, *(more or ()), *behind(table, after, dialect_name)]
    order = (table.c.Time, table.c.Id)
    if each:
        of_one = select(*order).where(*conditions).order_by(*order).limit(size)
        keys = _of_each_run(tables, criteria, of_one, size)
        source = with_runs(tables, table) if of_run else table
        return select(*columns, *of_run).select_from(source.join(keys, keys.c.Id == table.c.Id)).order_by(*order)
    statement = select(*columns, *of_run).where(*conditions).order_by(*order).limit(size)
    return statement.select_from(with_runs(tables, table)) if of_run else statement


def only_run(connection: Connection, tables: Tables, criteria: Criteria) -> tuple[int, Origin] | tuple[None, None]:
    """Return the run and its number if just one is meant: of that, the database knows how many messages it has."""
    if criteria.sent_by is None:
        return None, None
    found = connection.execute(_two_runs(tables, criteria.shape), criteria.values).all()
    return (found[0].Seq, origin_of(*found[0][1:])) if len(found) == 1 else (None, None)


@lru_cache(maxsize=32)
def _two_runs(tables: Tables, shape: Criteria) -> Select[Any]:
    assert shape.sent_by is not None
    return runs.meant(tables, shape.sent_by).add_columns(*of_runs(tables)).limit(2)


@lru_cache(maxsize=32)
def with_runs(tables: Tables, table: Table) -> FromClause:
    """Return messages with their runs."""
    return table.outerjoin(tables.runs, table.c.Run == tables.runs.c.Seq)


def _of_each_run(tables: Tables, criteria: Criteria, of_one: Select[Any], size: int) -> Subquery:
    """Return PostgreSQL's query that takes the first ids of each run, by the index on Run and Time, and of them those.

    Left to itself, it could look through all messages in order of time, for the few that are meant.
    """
    assert criteria.sent_by is not None
    each = of_one.lateral("each")
    meant = runs.meant(tables, criteria.sent_by).whereclause
    assert meant is not None
    source = tables.runs.join(each, true())
    ids = select(each.c.Id).select_from(source).where(meant).order_by(each.c.Time, each.c.Id).limit(size)
    return ids.correlate(None).subquery()


def of_table(
    tables: Tables,
    where: Where,
    criteria: Criteria,
    now: datetime,
    *,
    run: Run = None,
) -> Conditions | None:
    """Return the conditions for one table, or None if none of its rows can be meant."""
    if where == "failed":
        return criteria.of_failed(tables, run=run)
    return criteria.of_messages(tables, now, run=run)


def behind(table: Table, place: Place | None, dialect_name: str) -> Conditions:
    """Return the conditions for what comes after a place in the order of due time and id."""
    if place is None:
        return []
    due, message_id = value_of(table.c.Time, "after_due", place[0]), value_of(table.c.Id, "after_id", place[1])
    if dialect_name == "postgresql":
        # of the longer form it would think that next to nothing is left, and read all of it by the wrong index
        return [tuple_(table.c.Time, table.c.Id) > tuple_(due, message_id)]
    # the first lets the index on Time be used
    return [table.c.Time >= due, or_(table.c.Time > due, and_(table.c.Time == due, table.c.Id > message_id))]
