"""Reading messages: pages by key, in the order of due time and id, and single messages by id. No Airflow here.

No query reads a body or a header, and no transaction is open between two pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    FromClause,
    Select,
    Subquery,
    Table,
    and_,
    bindparam,
    exists,
    func,
    literal,
    not_,
    or_,
    select,
    true,
    union,
)

from airflow_delayed.identity import Origin, SentBy
from airflow_delayed.store import cancelled
from airflow_delayed.store.database import Dialect, slices
from airflow_delayed.store.dialects import database_time, dialect_of
from airflow_delayed.store.filters import BOTH, CANCELLED, Conditions, MessageFilter, moments
from airflow_delayed.store.outcomes import OutOfReach
from airflow_delayed.store.records import Remembered, StoredMessage, columns, of_runs, origin_of, place_of, stored
from airflow_delayed.store.remembered_ids import DEAD_LETTERED, DISPATCHED, FIRST_ID, SENT
from airflow_delayed.store.runs import matching_runs
from airflow_delayed.store.schema import Tables, UtcTime, Where

#: Rows a page.
PAGE = 1000
#: The last delivered message is searched for among so many of the newest ids, then among ten times as many.
MAX_LOOKED_AT = 10_000
#: Destinations are searched for among so many waiting messages, the first by due time, and so many failed ones.
MAX_SEARCHED = 10_000
#: The columns of a remembered id that a record shows.
_LEFT_COLUMNS = ("Id", "Outcome", "At", "Destination", "Time", "Dispatcher", "Tag", "DeliverConnId")

#: A place in the order of due time and id.
Place = tuple[datetime, str]
DatabaseTime = Callable[[Connection], datetime]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Messages in the order of due time and id, with their states at ``at``, by the database's clock."""

    at: datetime
    messages: Sequence[StoredMessage]
    #: Messages that have left the store: of a page by ids, or in the order of a page of such states.
    remembered: Sequence[Remembered]
    #: The token of the next page; None: this is the last page.
    next: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveredMessage:
    """A message that a dispatcher has delivered, and whose id is remembered."""

    message_id: str
    #: When the dispatcher claimed it, by the database's clock.
    at: datetime
    destination: str | None
    dispatcher: str | None


def page(
    engine: Engine,
    tables: Tables,
    wanted: MessageFilter,
    *,
    ids: Sequence[str] | None = None,
    limit: int,
    after: str | None = None,
    left: Sequence[str] = (),
    database_time: DatabaseTime = database_time,
) -> Page:
    """Return one page, read over one connection; ``left``: of messages that left in these states, the last first."""
    place = None if after is None else place_of(after)
    remembered: list[Remembered] = []
    with dialect_of(engine).read_only(engine) as connection:
        now = database_time(connection)
        if left:
            gone = newest_left(connection, tables, wanted, left, now, ids=ids, behind=place, limit=limit + 1)
            end = gone[limit - 1].token if len(gone) > limit else None
            return Page(at=now, messages=[], remembered=gone[:limit], next=end)
        if ids is None:
            found = _first_of_both(connection, tables, wanted, now, place, limit + 1)
        else:
            matching = _of_ids(connection, tables, wanted, ids, now)
            found = _behind(_in_order(matching), place)
            present = _of_ids(connection, tables, MessageFilter(), ids, now) if wanted.criteria else matching
            there = {message.message_id for message in present}
            remembered = remembered_by_ids(connection, tables, [one for one in ids if one not in there], now)
            # a message stored and claimed since the first query has a lease, which looks like a remembered id
            leased = _of_ids(connection, tables, MessageFilter(), [one.message_id for one in remembered], now)
            claimed = {message.message_id for message in leased}
            remembered = [one for one in remembered if one.message_id not in claimed]
    shown = found[:limit]
    return Page(at=now, messages=shown, remembered=remembered, next=shown[-1].token if len(found) > limit else None)


def messages(
    engine: Engine,
    tables: Tables,
    wanted: MessageFilter,
    *,
    ids: Sequence[str] | None = None,
    limit: int | None = None,
    after: str | None = None,
    database_time: DatabaseTime = database_time,
) -> Iterator[StoredMessage]:
    """Yield messages, failed ones too, ordered by due time and id; those of ``ids`` are read before the first."""
    if limit is not None and limit < 0:
        raise ValueError(f"limit={limit} is negative")
    place = None if after is None else place_of(after)
    if ids is not None:
        found: list[StoredMessage] = []
        for some in slices(list(dict.fromkeys(ids))):
            with dialect_of(engine).read_only(engine) as connection:
                found += _of_ids(connection, tables, wanted, some, database_time(connection))
        yield from _behind(_in_order(found), place)[:limit]
        return
    left = limit
    while left is None or left > 0:
        size = PAGE if left is None else min(PAGE, left)
        with dialect_of(engine).read_only(engine) as connection:
            found = _first_of_both(connection, tables, wanted, database_time(connection), place, size)
        yield from found
        if len(found) < size:
            return
        place = _place(found[-1])
        left = None if left is None else left - size


def get(
    engine: Engine, tables: Tables, message_id: str, *, database_time: DatabaseTime = database_time
) -> StoredMessage | Remembered | None:
    """Return the message of an id, or the record of a remembered id; None: the id is unknown."""
    # a message that moves from one table to the other between two queries is found by the second round
    for _ in range(2):
        for message in messages(engine, tables, MessageFilter(), ids=[message_id], database_time=database_time):
            return message
        with dialect_of(engine).read_only(engine) as connection:
            remembered = remembered_by_ids(connection, tables, [message_id], database_time(connection))
        if remembered:
            # a message stored and claimed since the first query has a lease, which looks like a remembered id
            claimed = messages(engine, tables, MessageFilter(), ids=[message_id], database_time=database_time)
            return next(claimed, remembered[0])
    return None


def last_delivered(engine: Engine, tables: Tables) -> DeliveredMessage | None:
    """Return the message that was delivered last; None: none is among the remembered ids that are looked at."""
    remembered, waiting = tables.past, tables.messages
    columns = [remembered.c[name] for name in ("Id", "At", "Destination", "Dispatcher", "Outcome")]

    def last(limit: int) -> Select[Any]:
        some = select(*columns).where(remembered.c.Id >= FIRST_ID)
        newest = some.order_by(remembered.c.At.desc()).limit(limit).subquery()
        in_flight = exists().where(waiting.c.Id == newest.c.Id)
        sent = select(newest).where(newest.c.Outcome.in_(SENT), not_(in_flight))
        return sent.order_by(newest.c.At.desc()).limit(1)

    with engine.connect().execution_options(read_only=True) as connection:
        row = connection.execute(last(MAX_LOOKED_AT)).one_or_none()
        if row is None:
            # after a change of very many messages
            row = connection.execute(last(10 * MAX_LOOKED_AT)).one_or_none()
    if row is None:
        return None
    return DeliveredMessage(message_id=row.Id, at=row.At, destination=row.Destination, dispatcher=row.Dispatcher)


def destinations(engine: Engine, tables: Tables) -> dict[str | None, list[str]]:
    """Return the destinations of messages that wait or have failed, in order, by the connection that delivers them."""
    waiting, failed = (
        select(table.c.DeliverConnId, table.c.Destination).order_by(*order).limit(MAX_SEARCHED).subquery()
        for table, order in ((tables.messages, (tables.messages.c.Time, tables.messages.c.Id)), (tables.failed, ()))
    )
    found: dict[str | None, list[str]] = {}
    with dialect_of(engine).read_only(engine) as connection:
        for conn_id, destination in connection.execute(union(select(waiting), select(failed))):
            found.setdefault(conn_id, []).append(destination)
    return {conn_id: sorted(names) for conn_id, names in found.items()}


def _first_of_both(
    connection: Connection, tables: Tables, wanted: MessageFilter, now: datetime, place: Place | None, size: int
) -> list[StoredMessage]:
    run, origin = only_run(connection, tables, wanted)
    values = page_values(now, place, run)
    # no dispatcher has a lease of a message that is due so late
    begins = (wanted.due_from, None if place is None else place[0])
    late = any(begin is not None and begin > values["soon"] for begin in begins)
    found: list[StoredMessage] = []
    for where in BOTH:
        # a failed message that is due later than all of a full page belongs to a later page
        values["until"] = found[-1].due_at if len(found) == size else None
        statement = _page_statement(
            dialect_of(connection),
            tables,
            where,
            wanted,
            one_run=run is not None,
            behind=place is not None,
            leases=not late,
            until=values["until"] is not None,
            size=size,
        )
        if statement is not None:
            found += [stored(row, where, now, origin) for row in connection.execute(statement, values)]
    return _in_order(found)[:size]


def _of_ids(
    connection: Connection, tables: Tables, wanted: MessageFilter, ids: Sequence[str], now: datetime
) -> list[StoredMessage]:
    found: dict[str, StoredMessage] = {}
    values = moments(now)
    for where in BOTH:
        # a message that moves from one table to the other is returned once
        rest = [message_id for message_id in ids if message_id not in found]
        statement = _ids_statement(tables, where, wanted) if rest else None
        if statement is not None:
            rows = connection.execute(statement, {**values, "ids": rest})
            found.update((row.Id, stored(row, where, now)) for row in rows)
    return list(found.values())


def _place(message: StoredMessage) -> Place:
    return message.due_at, message.message_id


def _in_order(found: Iterable[StoredMessage]) -> list[StoredMessage]:
    return sorted(found, key=_place)


def _behind(found: Iterable[StoredMessage], place: Place | None) -> list[StoredMessage]:
    return [one for one in found if place is None or _place(one) > place]


def only_run(connection: Connection, tables: Tables, wanted: MessageFilter) -> tuple[int, Origin] | tuple[None, None]:
    """Return the only matching run and its number: the database can estimate the rows of one run, not of several."""
    if wanted.sent_by is None:
        return None, None
    found = connection.execute(_two_runs(tables, wanted.sent_by)).all()
    return (found[0].Seq, origin_of(*found[0][1:])) if len(found) == 1 else (None, None)


def page_values(now: datetime, place: Place | None, run: int | None = None) -> dict[str, Any]:
    """Return the parameters of a statement: they change from page to page, the filter does not."""
    due, message_id = (None, None) if place is None else place
    return {**moments(now), "run": run, "after_due": due, "after_id": message_id}


# Statements are cached by filter, for its next pages: without that, a page takes 1.3 to 2 times as long.


@lru_cache(maxsize=256)
def _page_statement(
    dialect: Dialect,
    tables: Tables,
    where: Where,
    wanted: MessageFilter,
    *,
    one_run: bool,
    behind: bool,
    leases: bool,
    until: bool,
    size: int,
) -> Select[Any] | None:
    """Return the query for a page of one table, see :func:`first_rows`."""
    table = tables.of(where)
    return first_rows(
        dialect,
        tables,
        where,
        wanted,
        columns(tables, where, leased=leases),
        one_run=one_run,
        behind=behind,
        size=size,
        more=[table.c.Time <= bindparam("until", type_=UtcTime())] if until else [],
        # the caller knows the one run
        of_run=() if one_run else of_runs(tables),
    )


@lru_cache(maxsize=64)
def _ids_statement(tables: Tables, where: Where, wanted: MessageFilter) -> Select[Any] | None:
    conditions = wanted.conditions(tables, where)
    if conditions is None:
        return None
    table = tables.of(where)
    ids = bindparam("ids", type_=table.c.Id.type, expanding=True)
    statement = select(*columns(tables, where), *of_runs(tables)).select_from(_with_runs(tables, table))
    return statement.where(*conditions, table.c.Id.in_(ids))


@lru_cache(maxsize=32)
def _two_runs(tables: Tables, sent_by: SentBy) -> Select[Any]:
    return matching_runs(tables, sent_by).add_columns(*of_runs(tables)).limit(2)


@lru_cache(maxsize=32)
def _with_runs(tables: Tables, table: Table) -> FromClause:
    return table.outerjoin(tables.runs, table.c.Run == tables.runs.c.Seq)


def first_rows(
    dialect: Dialect,
    tables: Tables,
    where: Where,
    wanted: MessageFilter,
    columns: Sequence[ColumnElement[Any]],
    *,
    one_run: bool,
    behind: bool,
    size: int,
    more: Conditions,
    of_run: Sequence[ColumnElement[Any]] = (),
) -> Select[Any] | None:
    """Return the query for the first rows of one table that match, to be run with :func:`page_values`.

    :param columns: at least Time and Id.
    :param one_run: only the messages of the parameter ``run``.
    :param behind: only rows behind the place in the parameters.
    """
    table = tables.of(where)
    each_run = wanted.sent_by is not None and not one_run and dialect.reads_by_run
    run: ColumnElement[int] | None = tables.runs.c.Seq if each_run else None
    if one_run:
        run = bindparam("run", type_=table.c.Run.type)
    conditions = wanted.conditions(tables, where, run=run)
    if conditions is None:
        return None
    conditions += [*more, *(behind_place(table, dialect) if behind else ())]
    order = (table.c.Time, table.c.Id)
    source = _with_runs(tables, table) if of_run else table
    if wanted.sent_by is not None and each_run:
        of_one = select(*order).where(*conditions).order_by(*order).limit(size)
        keys = _of_each_run(tables, wanted.sent_by, of_one, size)
        return select(*columns, *of_run).select_from(source.join(keys, keys.c.Id == table.c.Id)).order_by(*order)
    return select(*columns, *of_run).select_from(source).where(*conditions).order_by(*order).limit(size)


def _of_each_run(tables: Tables, sent_by: SentBy, of_one: Select[Any], size: int) -> Subquery:
    """Return the query for the first ids of all matching runs: of each by the index on Run, not by a scan of all."""
    each = of_one.lateral("each")
    matching = matching_runs(tables, sent_by).whereclause
    assert matching is not None
    source = tables.runs.join(each, true())
    ids = select(each.c.Id).select_from(source).where(matching).order_by(each.c.Time, each.c.Id).limit(size)
    return ids.correlate(None).subquery()


def behind_place(table: Table, dialect: Dialect) -> Conditions:
    """Return the conditions for rows behind a place, which is a pair of parameters."""
    due = bindparam("after_due", type_=table.c.Time.type)
    message_id = bindparam("after_id", type_=table.c.Id.type)
    return dialect.behind(table.c.Time, table.c.Id, (due, message_id))


# messages that have left the store, as the table of remembered ids has them: no body and no header


def remembered_by_ids(connection: Connection, tables: Tables, ids: Sequence[str], now: datetime) -> list[Remembered]:
    """Return the records of these ids, also of ids whose messages a dispatcher has leased."""
    if not ids:
        return []
    past, found = tables.past, list[Remembered]()
    statement = _left(tables).order_by(past.c.Id)
    for some in slices(ids):
        found += [
            _remembered(row, now)
            for row in connection.execute(statement.where(past.c.Id.in_(some), past.c.Id >= FIRST_ID))
        ]
    return found


def newest_left(
    connection: Connection,
    tables: Tables,
    wanted: MessageFilter,
    states: Sequence[str],
    now: datetime,
    *,
    ids: Sequence[str] | None,
    behind: tuple[datetime, str] | None,
    limit: int,
) -> list[Remembered]:
    """Return messages that have left the store, the last one first, and by id where several left at one time."""
    past = tables.past
    # a leased message looks like a dispatched one, but is still there
    there = (exists().where(table.c.Id == past.c.Id) for table in (tables.messages, tables.failed))
    outcomes = [*states, DEAD_LETTERED] if DISPATCHED in states else states
    conditions: Conditions = [past.c.Outcome.in_(outcomes), *map(not_, there)]
    conditions += wanted.stable_conditions(tables, past)
    if ids is not None:
        conditions.append(past.c.Id.in_(ids))
    if behind is not None:
        at, message_id = behind
        later = and_(past.c.At == at, past.c.Id > message_id)
        # the first condition lets an index on At be used
        conditions += [past.c.At <= at, or_(past.c.At < at, later)]
    statement = _left(tables).where(*conditions).order_by(past.c.At.desc(), past.c.Id)
    return [_remembered(row, now) for row in connection.execute(statement.limit(limit))]


def not_due(connection: Connection, tables: Tables, wanted: MessageFilter, now: datetime, most: int) -> OutOfReach:
    """Return what matches a filter, was dispatched and is not due yet, of the ``most`` messages that left last."""
    past, run = tables.past, only_run(connection, tables, wanted)[0]
    by_index = MessageFilter(tag=wanted.tag, sent_by=wanted.sent_by)
    conditions = by_index.stable_conditions(tables, past, run=None if run is None else literal(run))
    names = ("Id", "Outcome", "Destination", "Time", "DeliverConnId")
    latest = select(*(past.c[name] for name in names)).where(*conditions).order_by(past.c.At.desc())
    left = latest.limit(most).subquery()
    # a leased message looks like a dispatched one, but is still there; not a join, for which a database may read all
    there = (select(table.c.Id).where(table.c.Id == left.c.Id) for table in (tables.messages, tables.failed))
    dispatched = (left.c.Outcome == DISPATCHED, left.c.Time > now, left.c.DeliverConnId.is_not(None))
    others = replace(wanted, tag=None, sent_by=None).stable_conditions(tables, left)
    statement = select(left.c.DeliverConnId, func.count(), func.max(left.c.Time)).where(
        *dispatched, *others, *(one.correlate(left).scalar_subquery().is_(None) for one in there)
    )
    found = OutOfReach()
    for conn_id, messages, until in connection.execute(statement.group_by(left.c.DeliverConnId)):
        found.add(conn_id, until, messages)
    found.at_least = connection.execute(latest.offset(most).limit(1)).first() is not None
    return found


def _left(tables: Tables) -> Select[Any]:
    past, runs = tables.past, tables.runs
    columns = [past.c[name] for name in _LEFT_COLUMNS]
    until = cancelled.kept_until(tables).label("Until")
    return select(*columns, until, *of_runs(tables)).select_from(past.outerjoin(runs, past.c.Run == runs.c.Seq))


def _remembered(row: Sequence[Any], now: datetime) -> Remembered:
    message_id, outcome, at, destination, due_at, dispatcher, tag, deliver_conn_id, until, *of_run = row
    state = DISPATCHED if outcome == DEAD_LETTERED else outcome
    restorable = state == CANCELLED and until is not None and until > now
    return Remembered(
        message_id=message_id,
        state=state,
        at=at,
        destination=destination,
        due_at=due_at,
        dispatcher=dispatcher,
        tag=tag,
        deliver_conn_id=deliver_conn_id,
        restorable_until=until if restorable else None,
        origin=origin_of(*of_run) if of_run[0] is not None else None,
    )
