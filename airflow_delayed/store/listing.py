"""Looking at what a store holds: pages by due time and id, and all that is known of one id. No Airflow here.

Neither a body nor a header is read, and no transaction stays open between two pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Engine, Select, Table, bindparam, select

from airflow_delayed.store import claims, heartbeat
from airflow_delayed.store.criteria import Criteria
from airflow_delayed.store.drivers import LAST
from airflow_delayed.store.engine import looking
from airflow_delayed.store.ordered import BOTH, Place, Where, first, of_table, only_run, with_runs
from airflow_delayed.store.schema import Tables, value_of
from airflow_delayed.store.states import EXAMPLE, moments
from airflow_delayed.store.stored import Remembered, StoredMessage, columns, of_runs, place_of, stored

#: Rows a page.
PAGE = 1000

DatabaseTime = Callable[[Connection], datetime]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Messages by due time and id, as they stand at ``at``, by the database's clock."""

    at: datetime
    messages: Sequence[StoredMessage]
    #: Of the ids that were asked for: those whose message is gone.
    remembered: Sequence[Remembered]
    #: Where the next page begins; None: there is none.
    next: str | None


def page(
    engine: Engine,
    tables: Tables,
    criteria: Criteria,
    *,
    ids: Sequence[str] | None = None,
    limit: int,
    after: str | None = None,
    database_time: DatabaseTime = claims.database_time,
) -> Page:
    """Return one page, read over one connection.

    :param ids: only these; up to 1000.
    :param limit: at most so many.
    :param after: the last page's ``next``.
    :raises ValueError: ``after`` is no token.
    """
    place = None if after is None else place_of(after)
    gone: list[Remembered] = []
    with looking(engine) as connection:
        now = database_time(connection)
        if ids is None:
            found = _page(connection, tables, criteria, now, place, limit + 1)
        else:
            every = _of_ids(connection, tables, criteria, ids, now)
            found = [one for one in _sorted(every) if _behind(one, place)]
            there = {one.message_id for one in every}
            if criteria.given:
                there = {one.message_id for one in _of_ids(connection, tables, Criteria(), ids, now)}
            gone = _gone(connection, tables, [one for one in ids if one not in there])
            # what was stored and claimed since the first look has a lease, which looks the same
            leased = _of_ids(connection, tables, Criteria(), [one.message_id for one in gone], now)
            gone = [one for one in gone if one.message_id not in {one.message_id for one in leased}]
    shown = found[:limit]
    return Page(at=now, messages=shown, remembered=gone, next=shown[-1].token if len(found) > limit else None)


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
        found: list[StoredMessage] = []
        for some in claims.slices(list(dict.fromkeys(ids))):
            with looking(engine) as connection:
                found += _of_ids(connection, tables, criteria, some, database_time(connection))
        yield from [one for one in _sorted(found) if _behind(one, place)][:limit]
        return
    left = limit
    while left is None or left > 0:
        size = PAGE if left is None else min(PAGE, left)
        with looking(engine) as connection:
            page = _page(connection, tables, criteria, database_time(connection), place, size)
        yield from page
        if len(page) < size:
            return
        place = (page[-1].due_at, page[-1].message_id)
        left = None if left is None else left - size


def _page(
    connection: Connection, tables: Tables, criteria: Criteria, now: datetime, place: Place | None, size: int
) -> list[StoredMessage]:
    """Return the first messages of both tables behind a place."""
    run, origin = only_run(connection, tables, criteria)
    shape, values = criteria.shape, {**criteria.values, **moments(now), "run": run}
    if place is not None:
        values["after_due"], values["after_id"] = place
    # what is due so late is in no dispatcher's hands
    late = any(begin in values and values[begin] > values["soon"] for begin in ("after_due", "due_from"))
    found: list[StoredMessage] = []
    for where in BOTH:
        # what failed and is due later than the last is not of this page
        values["until"] = found[-1].due_at if len(found) == size else None
        statement = _first(
            connection.dialect.name,
            tables,
            where,
            shape,
            one_run=run is not None,
            after=place is not None,
            held=not late,
            until=values["until"] is not None,
            size=size,
        )
        if statement is not None:
            found += [stored(row, where, now, origin) for row in connection.execute(statement, values)]
    if place is not None and place[0] >= LAST:
        # the database finds a time beyond the last one behind each place, so these would come again and again
        found = [one for one in found if _behind(one, place)]
    return _sorted(found)[:size]


@lru_cache(maxsize=256)
def _first(
    dialect_name: str,
    tables: Tables,
    where: Where,
    shape: Criteria,
    *,
    one_run: bool,
    after: bool,
    held: bool,
    until: bool,
    size: int,
) -> Select[Any] | None:
    """Return the query for a page of one table, to be run with values; to make it takes as long as to run it."""
    table: Table = getattr(tables, where)
    return first(
        dialect_name,
        tables,
        where,
        shape,
        EXAMPLE,
        columns(tables, where, held=held),
        run=0 if one_run else None,
        after=(EXAMPLE, "") if after else None,
        size=size,
        more=[table.c.Time <= value_of(table.c.Time, "until", EXAMPLE)] if until else None,
        # the one run is known
        of_run=() if one_run else of_runs(tables),
    )


def _of_ids(
    connection: Connection, tables: Tables, criteria: Criteria, ids: Sequence[str], now: datetime
) -> list[StoredMessage]:
    found: dict[str, StoredMessage] = {}
    values = {**criteria.values, **moments(now)}
    for where in BOTH:
        # one that goes from one table to the other is there once
        rest = [message_id for message_id in ids if message_id not in found]
        statement = _with_ids(tables, where, criteria.shape) if rest else None
        if statement is not None:
            rows = connection.execute(statement, {**values, "ids": rest})
            found.update((row.Id, stored(row, where, now)) for row in rows)
    return list(found.values())


@lru_cache(maxsize=64)
def _with_ids(tables: Tables, where: Where, shape: Criteria) -> Select[Any] | None:
    """Return the query for messages of one table by their ids, to be run with values."""
    conditions = of_table(tables, where, shape, EXAMPLE)
    if conditions is None:
        return None
    table: Table = getattr(tables, where)
    ids = bindparam("ids", type_=table.c.Id.type, expanding=True)
    statement = select(*columns(tables, where), *of_runs(tables)).select_from(with_runs(tables, table))
    return statement.where(*conditions, table.c.Id.in_(ids))


def _place(message: StoredMessage) -> Place:
    return message.due_at, message.message_id


def _sorted(found: Iterable[StoredMessage]) -> list[StoredMessage]:
    return sorted(found, key=_place)


def _behind(message: StoredMessage, place: Place | None) -> bool:
    return place is None or _place(message) > place


def known(
    engine: Engine, tables: Tables, message_id: str, *, database_time: DatabaseTime = claims.database_time
) -> StoredMessage | Remembered | None:
    """Return what is known of an id, or None if nothing is."""
    # it may go from one table to another between two looks, and is then found in the second round
    for _ in range(2):
        for found in listed(engine, tables, Criteria(), ids=[message_id], database_time=database_time):
            return found
        with looking(engine) as connection:
            gone = _gone(connection, tables, [message_id])
        if gone:
            # what was stored and claimed since the first look has a lease, which looks the same
            there = listed(engine, tables, Criteria(), ids=[message_id], database_time=database_time)
            return next(there, gone[0])
    return None


def _gone(connection: Connection, tables: Tables, ids: Sequence[str]) -> list[Remembered]:
    past, found = tables.past, []
    for some in claims.slices(ids):
        columns = (past.c.Id, past.c.Outcome, past.c.At, past.c.Destination, past.c.Time, past.c.Dispatcher)
        found += [
            Remembered(
                message_id=row.Id,
                state=row.Outcome,
                at=row.At,
                destination=row.Destination,
                due_at=row.Time,
                dispatcher=row.Dispatcher,
            )
            for row in connection.execute(select(*columns).where(past.c.Id.in_(some)).order_by(past.c.Id))
        ]
    return found


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
    """Return who dispatches, and who did lately, up to a thousand runs; the one seen last comes first."""
    table = tables.dispatchers
    with looking(engine) as connection:
        columns = (table.c.Id, table.c.StartedAt, table.c.SeenAt, table.c.EndedAt)
        statement = select(*columns, heartbeat.names_in(connection, tables).label("names"))
        statement = statement.order_by(table.c.SeenAt.desc(), table.c.Id).limit(heartbeat.MOST)
        return [
            DispatcherSeen(
                dispatcher=row.Id,
                conn_ids=heartbeat.names(row.names),
                started_at=row.StartedAt,
                seen_at=row.SeenAt,
                ended_at=row.EndedAt,
            )
            for row in connection.execute(statement)
        ]
