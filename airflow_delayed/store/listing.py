"""Looking at what a store holds: pages by due time and id, and all that is known of one id. No Airflow here.

Neither a body nor a header is read, and no transaction stays open between two pages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, Engine, Select, Table, and_, or_, select

from airflow_delayed.store import claims, runs
from airflow_delayed.store.criteria import Criteria
from airflow_delayed.store.schema import Tables
from airflow_delayed.store.states import claimed_until
from airflow_delayed.store.stored import SHOWN, Remembered, StoredMessage, place_of, stored

#: Rows a page.
PAGE = 1000

Place = tuple[datetime, str]
Conditions = list[ColumnElement[bool]]
DatabaseTime = Callable[[Connection], datetime]


def listed(
    engine: Engine,
    tables: Tables,
    criteria: Criteria,
    *,
    ids: Sequence[str] | None = None,
    limit: int | None = None,
    after: str | None = None,
    database_time: DatabaseTime = claims.database_time,
) -> Iterator[StoredMessage]:
    """Yield messages, failed ones too, ordered by due time and id.

    :param ids: only these; they are read at once, before the first is yielded.
    :param limit: at most so many.
    :param after: the token of the message behind which to begin.
    :raises ValueError: ``after`` is no token, or ``limit`` is negative.
    """
    if limit is not None and limit < 0:
        raise ValueError(f"limit={limit} is negative")
    place = None if after is None else place_of(after)
    if ids is not None:
        found = _of_ids(engine, tables, criteria, ids, place, database_time)
        yield from found[:limit]
        return
    left = limit
    while left is None or left > 0:
        size = PAGE if left is None else min(PAGE, left)
        with engine.connect().execution_options(read_only=True) as connection:
            page = _page(connection, tables, criteria, database_time(connection), place, size)
        yield from page
        if len(page) < size:
            return
        place = (page[-1].due_at, page[-1].message_id)
        left = None if left is None else left - size


def _page(
    connection: Connection, tables: Tables, criteria: Criteria, now: datetime, after: Place | None, size: int
) -> list[StoredMessage]:
    """Return one page of both tables."""
    rows = []
    for table, conditions in _meant(tables, criteria, now):
        rows += _rows(connection, tables, _shown(tables, table, conditions), table, now, after, size)
    return sorted(rows, key=_place)[:size]


def _of_ids(
    engine: Engine,
    tables: Tables,
    criteria: Criteria,
    ids: Sequence[str],
    after: Place | None,
    database_time: DatabaseTime,
) -> list[StoredMessage]:
    found: dict[str, StoredMessage] = {}
    for some in claims.slices(list(dict.fromkeys(ids))):
        with engine.connect().execution_options(read_only=True) as connection:
            now = database_time(connection)
            for table, conditions in _meant(tables, criteria, now):
                statement = _shown(tables, table, [*conditions, table.c.Id.in_(some)])
                rows = _rows(connection, tables, statement, table, now, after, None)
                found.update((one.message_id, one) for one in rows)
    return sorted(found.values(), key=_place)


def _meant(tables: Tables, criteria: Criteria, now: datetime) -> list[tuple[Table, Conditions]]:
    """Return the tables in which something may be meant, each with its conditions."""
    both = ((tables.messages, criteria.of_messages(tables, now)), (tables.failed, criteria.of_failed(tables)))
    return [(table, conditions) for table, conditions in both if conditions is not None]


def _shown(tables: Tables, table: Table, conditions: Conditions) -> Select[Any]:
    columns = [table.c[name] for name in SHOWN]
    if table is tables.failed:
        return select(*columns, table.c.Reason, table.c.FailedAt).where(*conditions)
    return select(*columns, claimed_until(tables).label("ClaimedUntil")).where(*conditions)


def _rows(
    connection: Connection,
    tables: Tables,
    statement: Select[Any],
    table: Table,
    now: datetime,
    after: Place | None,
    size: int | None,
) -> list[StoredMessage]:
    statement = statement.where(*behind(table, after)).order_by(table.c.Time, table.c.Id).limit(size)
    rows = [dict(row._mapping) for row in connection.execute(statement)]
    # a page has few runs
    origins = runs.origins(connection, tables, {row["Run"] for row in rows})
    return [stored(row, now, origins) for row in rows]


def behind(table: Table, place: Place | None) -> Conditions:
    """Return the conditions for what comes after a place in the order of due time and id."""
    if place is None:
        return []
    due, message_id = place
    # the first lets the index on Time be used
    return [table.c.Time >= due, or_(table.c.Time > due, and_(table.c.Time == due, table.c.Id > message_id))]


def _place(message: StoredMessage) -> Place:
    return message.due_at, message.message_id


Where = Literal["messages", "failed"]


def pages_of_ids(
    engine: Engine,
    tables: Tables,
    criteria: Criteria,
    *,
    where: Sequence[Where],
    more: Callable[[Table], Conditions],
    database_time: DatabaseTime,
) -> Iterator[list[str]]:
    """Yield the ids of messages, a thousand at a time, one table after the other.

    :param where: the tables to look into.
    :param more: further conditions.
    """
    for name in where:
        table: Table = getattr(tables, name)
        place: Place | None = None
        while True:
            with engine.connect().execution_options(read_only=True) as connection:
                meant = dict(_meant(tables, criteria, database_time(connection)))
                if table not in meant:
                    break
                statement = (
                    select(table.c.Time, table.c.Id)
                    .where(*meant[table], *more(table), *behind(table, place))
                    .order_by(table.c.Time, table.c.Id)
                    .limit(PAGE)
                )
                found = list(connection.execute(statement))
            if found:
                yield [row.Id for row in found]
            if len(found) < PAGE:
                break
            place = (found[-1].Time, found[-1].Id)


def known(
    engine: Engine, tables: Tables, message_id: str, *, database_time: DatabaseTime = claims.database_time
) -> StoredMessage | Remembered | None:
    """Return what is known of an id, or None if nothing is."""
    past = tables.past
    # it may go from one table to another between two looks, and is then found in the second round
    for _ in range(2):
        for found in listed(engine, tables, Criteria(), ids=[message_id], database_time=database_time):
            return found
        statement = select(past.c.Outcome, past.c.At, past.c.Destination, past.c.Time).where(past.c.Id == message_id)
        with engine.connect().execution_options(read_only=True) as connection:
            row = connection.execute(statement).one_or_none()
        if row is not None:
            return Remembered(
                message_id=message_id, state=row.Outcome, at=row.At, destination=row.Destination, due_at=row.Time
            )
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatcherSeen:
    """One run of a dispatcher."""

    dispatcher: str
    #: The connections that it delivers through; None: the queue tables of the store's database.
    conn_ids: tuple[str | None, ...]
    started_at: datetime
    seen_at: datetime
    #: None: it is at work, or was killed.
    ended_at: datetime | None


def dispatchers(engine: Engine, tables: Tables) -> list[DispatcherSeen]:
    """Return who dispatches, and who did lately; the one seen last comes first."""
    table = tables.dispatchers
    statement = select(table).order_by(table.c.SeenAt.desc(), table.c.Id)
    with engine.connect().execution_options(read_only=True) as connection:
        return [
            DispatcherSeen(
                dispatcher=row.Id,
                conn_ids=tuple(json.loads(row.ConnIds)),
                started_at=row.StartedAt,
                seen_at=row.SeenAt,
                ended_at=row.EndedAt,
            )
            for row in connection.execute(statement)
        ]
