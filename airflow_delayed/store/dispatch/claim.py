"""Claiming due messages for one dispatcher, by leases; each function works within the caller's transaction.

On PostgreSQL a claim is one statement (``_claim_at_once``). Its snapshot may be older than the last commit of another
dispatcher; then the upsert into ``_past`` decides, because it sees the latest row of an id and does not replace
another's lease. On MySQL, MariaDB and SQLite :func:`lock_due` runs a SELECT that locks the rows
(``_select_due``), and a second statement looks for leases. MySQL and MariaDB lock by an index also what they only
examine, such as messages of other connections; there another SELECT, which locks nothing, first finds the ids.

A program with the right to INSERT can write large rows. So a claim stops at a number of bytes, after at least one row,
and does not read the content of a row over the limits: :func:`airflow_delayed.store.records.to_message` refuses such a
row.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import lru_cache
from itertools import accumulate
from operator import itemgetter
from typing import Any, NamedTuple

from sqlalchemy import (
    TIMESTAMP,
    ColumnElement,
    Connection,
    Integer,
    Select,
    Table,
    Text,
    and_,
    bindparam,
    case,
    cast,
    func,
    or_,
    select,
    type_coerce,
)
from sqlalchemy.exc import IntegrityError

from airflow_delayed.clock import next_sleep
from airflow_delayed.fields import FIELD_COLUMNS, FIELD_MOMENTS
from airflow_delayed.message import EPOCH
from airflow_delayed.store import remembered_ids
from airflow_delayed.store.bulk import Place, own_place
from airflow_delayed.store.database import Dialect, slices
from airflow_delayed.store.dialects import dialect_of
from airflow_delayed.store.dispatch.settle import Row
from airflow_delayed.store.records import count_rows, delivered_by
from airflow_delayed.store.schema import MAX_BODY, MAX_HEADER_BYTES, Tables, UtcTime

#: The bytes of bodies and headers of one claim, without its last message.
MOST_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ClaimCursor:
    """The place up to which the messages of one connection were claimed, in the order of due time.

    :param deliver_conn_id: the connection; None: the queue tables of the store's own database.
    :param window: how long before its due time a message is claimed.
    :param destination: the only destination; None: all of them, without the excluded ones.
    :param excluded: destinations that have cursors of their own.
    :param since: the due time of the last message; None: there were no more.
    :param restart_at: when to begin with the oldest message again, by the monotonic clock.
    :param passed: on PostgreSQL, the place (``ctid``) up to which messages due at ``since`` were claimed; an index has
        those of one time in the order of their places.
    :param furthest: the latest due time that was claimed.
    :param untouched: whether no message due at ``since`` or later was claimed, except those up to ``passed``.
    """

    deliver_conn_id: str | None = None
    window: timedelta = timedelta(0)
    destination: str | None = None
    excluded: Sequence[str] = ()
    since: datetime | None = None
    restart_at: float = 0.0
    passed: str = ""
    furthest: datetime | None = None
    untouched: bool = False

    def advance(self, rows: Sequence[Row], limit: int) -> ClaimCursor:
        """Return the cursor after a claim that was to take up to ``limit`` messages and took these."""
        last = rows[-1]["Time"] if rows else None
        furthest = max(filter(None, (last, self.furthest)), default=None)
        if last is None or len(rows) < limit:
            return replace(self, since=None, passed="", furthest=furthest, untouched=False)
        places = [row["ctid"] for row in rows if row["Time"] == last and "ctid" in row]
        if last == self.since:
            untouched = self.untouched
            places += [self.passed] if self.passed else []
        else:
            # this dispatcher may have leases of messages up to the furthest due time
            untouched = self.furthest is None or last > self.furthest
        passed = max(places, key=_place, default="")
        return replace(self, since=last, passed=passed, furthest=furthest, untouched=untouched)

    def beside(self, other: ClaimCursor) -> ClaimCursor:
        """Return the cursor after a claim by another one, which may have taken messages of this one's destinations."""
        furthest = max(filter(None, (self.furthest, other.furthest)), default=None)
        return replace(self, furthest=furthest, untouched=False)


def _place(ctid: str) -> tuple[int, ...]:
    return tuple(map(int, ctid[1:-1].split(",")))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRequest:
    """The messages that a claim is to take.

    :param since: the earliest due time; None: any. Earlier messages were claimed a moment ago, and a claim need not
        skip them again: during a long transaction of others, deleted rows stay in the index.
    :param most_bytes: the last message begins within so many bytes of bodies and headers.
    :param alone: on PostgreSQL, use a shorter statement that does not look for leases. It fails if there is one, even
        one that has ended.
    :param passed: on PostgreSQL, the place up to which messages due at ``since`` are skipped, because they are claimed
        already.
    """

    deliver_conn_id: str | None
    due_by: datetime
    limit: int
    most_bytes: int = MOST_BYTES
    since: datetime | None = None
    alone: bool = False
    passed: str = ""
    destination: str | None = None
    excluded: Sequence[str] = ()


class NotAlone(Exception):
    """Some messages have, or had, leases of another dispatcher: roll back, and claim again without ``alone``."""


def claim_due(
    connection: Connection, tables: Tables, request: ClaimRequest, *, now: datetime, dispatcher: str, until: datetime
) -> list[dict[str, Any]]:
    """Lease messages to a dispatcher until a time, in the order of due time, without messages that others have leased.

    Expired messages are among them; the caller moves them to the failed ones. On PostgreSQL each row has its ``ctid``,
    by which :func:`airflow_delayed.store.dispatch.settle.remove` finds it. On SQLite the transaction locks the whole
    database, see :func:`airflow_delayed.store.engine.prepare`.

    :raises NotAlone: with ``request.alone``, another dispatcher has leased a message.
    """
    if dialect_of(connection).claims_at_once:
        statement = _claim_at_once(tables, _form(request), request.alone)
        values = {**_values(request, now), "limit": request.limit, "dispatcher": dispatcher, "until": until}
        values |= {"most_bytes": request.most_bytes, "conn_id": request.deliver_conn_id}
        try:
            found = connection.execute(statement, values).all()
        except IntegrityError:
            if not request.alone:
                raise
            raise NotAlone from None
        # strict=True takes half as long again
        rows = [dict(zip(_PLACED, row, strict=False)) for row in found]
        # a row that another transaction has just changed comes in its former order
        rows.sort(key=_TIME)
        return rows
    rows = lock_due(connection, tables, request, now)
    remembered_ids.record(
        connection,
        tables,
        rows,
        remembered_ids.DISPATCHED,
        now,
        dispatcher=dispatcher,
        until=until,
    )
    return rows


def lock_due(connection: Connection, tables: Tables, request: ClaimRequest, now: datetime) -> list[dict[str, Any]]:
    """Lock due messages until the end of the transaction, in which the caller removes or leases them."""
    dialect, values = dialect_of(connection), _values(request, now)
    # larger content is read by a second query, up to the limit of bytes
    small = {"most_small": max(1, request.most_bytes // request.limit)}
    for looks in range(1, _LOOKS + 1):
        rows = _lock(connection, tables, request, {**values, **small})
        if rows or looks == _LOOKS or not dialect.locks_examined_rows:
            break
        if not _overlooked(connection, tables, request, now):
            break
        time.sleep(next_sleep(looks, first=_FIRST_SLEEP, longest=_LONGEST_SLEEP))
    # another dispatcher may have committed its leases after the first statement
    taken = remembered_ids.in_flight(connection, tables, [row["Id"] for row in rows], now)
    rows = _within([row for row in rows if row["Id"] not in taken], request.most_bytes)
    _read_large(connection, tables, rows)
    return rows


def _lock(
    connection: Connection, tables: Tables, request: ClaimRequest, values: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Lock due messages in the order of due time, without those that other transactions have locked."""
    dialect, form = dialect_of(connection), _form(request)
    if not dialect.locks_examined_rows:
        statement = _select_due(tables, form, dialect).limit(request.limit)
        return [dict(zip(_CLAIMED, row, strict=True)) for row in connection.execute(statement, values).all()]
    rows: list[dict[str, Any]] = []
    passed = 0
    while missing := request.limit - len(rows):
        # without locks: those of other connections would be locked too, and their dispatchers would find none
        first = _select_ids(tables, form, dialect).limit(missing).offset(passed)
        ids = connection.execute(first, values).scalars().all()
        if ids:
            locked = connection.execute(_select_due(tables, form, dialect), {**values, "ids": ids}).all()
            by_id = {row.Id: dict(zip(_CLAIMED, row, strict=True)) for row in locked}
            rows += [by_id[name] for name in ids if name in by_id]
        passed += len(ids)
        if len(ids) < missing:
            break
    return rows


def size_of(row: Mapping[str, Any]) -> int:
    """Return the bytes of body and headers that a claim reads of a row: 0 if the row is over the limits."""
    readable = row["BodyBytes"] <= MAX_BODY and row["HeadersBytes"] <= MAX_HEADER_BYTES
    return row["BodyBytes"] + row["HeadersBytes"] if readable else 0


def _within(rows: Sequence[dict[str, Any]], most_bytes: int) -> list[dict[str, Any]]:
    """Return the first rows; the last of them begins within so many bytes."""
    sizes = accumulate(map(size_of, rows), initial=0)
    return [row for row, before in zip(rows, sizes, strict=False) if before < most_bytes]


def _read_large(connection: Connection, tables: Tables, rows: Sequence[dict[str, Any]]) -> None:
    large = {row["Id"]: row for row in rows if row["State"] is None and size_of(row)}
    table = tables.messages
    for some in slices(sorted(large)):
        statement = select(table.c.Id, table.c.State, table.c.Headers).where(table.c.Id.in_(some))
        for row in connection.execute(dialect_of(connection).by_key(statement, table)):
            large[row.Id].update(State=row.State, Headers=row.Headers)


def _overlooked(connection: Connection, tables: Tables, request: ClaimRequest, now: datetime) -> bool:
    """Return whether there is a message that a claim has missed: another transaction has locked it for a moment."""
    there = select(tables.messages.c.Id).where(*_claimable(tables, _form(request))).limit(1)
    return connection.execute(there, _values(request, now)).first() is not None


#: Attempts of an empty claim on MySQL, and the seconds between them, at least two in all: another dispatcher may still
#: hold row locks.
_LOOKS = 13
_FIRST_SLEEP, _LONGEST_SLEEP = 0.001, 2.0
#: Columns that a dispatcher reads.
_PLAIN = ("Id", "Destination", "State", "Time", "Headers", *FIELD_COLUMNS.values(), "RetryCount", "Digest")
#: Columns of which a dispatcher only writes a copy, into the record of the id.
_COPIED = ("Run", "DeliverConnId")
#: The content, and its size in bytes, which is read even where the content is not.
_CONTENT, _SIZES = ("State", "Headers"), ("BodyBytes", "HeadersBytes")
_CLAIMED = (*_PLAIN, *_COPIED, *_SIZES)
_PLACED = (*_PLAIN, *_SIZES, "ctid")
_TIME = itemgetter("Time")
_TIMES = ("Time", *(FIELD_COLUMNS[name] for name in FIELD_MOMENTS))
_TIMESTAMP = TIMESTAMP(timezone=True)


class _ClaimForm(NamedTuple):
    of_connection: bool
    of_destination: bool
    excludes: bool
    since: bool
    passed: bool


def _form(request: ClaimRequest) -> _ClaimForm:
    return _ClaimForm(
        request.deliver_conn_id is not None,
        request.destination is not None,
        bool(request.excluded),
        request.since is not None,
        bool(request.passed),
    )


def _values(request: ClaimRequest, now: datetime) -> dict[str, Any]:
    values: dict[str, Any] = {
        "conn_id": request.deliver_conn_id,
        "due_by": request.due_by,
        "since": request.since,
        "passed": request.passed or None,
        "now": now,
    }
    values |= {"destination": request.destination, "excluded": list(request.excluded) or None}
    return {name: value for name, value in values.items() if value is not None}


# A dispatcher claims many times a second, so each statement is built once.
_built = lru_cache(maxsize=32)


@_built
def _select_due(tables: Tables, form: _ClaimForm, dialect: Dialect) -> Select[Any]:
    table = tables.messages
    body, headers = dialect.length(table.c.State), dialect.length(table.c.Headers)
    small = body + headers <= bindparam("most_small", type_=Integer())
    columns = {
        name: case((small, table.c[name])) if name in _CONTENT else table.c[name] for name in (*_PLAIN, *_COPIED)
    }
    statement: Select[Any] = select(*columns.values(), body, headers).where(*_claimable(tables, form))
    statement = statement.with_for_update(skip_locked=True)
    if dialect.locks_examined_rows:
        return dialect.by_key(statement.where(table.c.Id.in_(bindparam("ids", expanding=True))), table)
    return statement.order_by(table.c.Time)


@_built
def _select_ids(tables: Tables, form: _ClaimForm, dialect: Dialect) -> Select[Any]:
    table, columns = tables.messages, ("Destination", "Time") if form.of_destination else ("Time",)
    statement = select(table.c.Id).where(*_claimable(tables, form)).order_by(table.c.Time)
    return dialect.by_time(statement, table, columns)


@_built
def _claim_at_once(tables: Tables, form: _ClaimForm, alone: bool) -> Select[Any]:
    """Return the claim in one statement: its upsert sees, and does not replace, the leases of other dispatchers."""
    table, conditions = tables.messages, _due(tables, form)
    if not alone:
        conditions.append(_not_leased(tables))
    # PostgreSQL knows a length without reading what is long
    sizes = [func.octet_length(table.c[name]).label(size) for name, size in zip(_CONTENT, _SIZES, strict=True)]
    place = own_place().label("ctid")
    # not the connection, which is the same in each row and a parameter
    columns = [*(table.c[name] for name in (*_PLAIN, "Run")), *sizes, place]
    oldest = select(*columns).where(*conditions).order_by(table.c.Time).limit(bindparam("limit", type_=Integer()))
    locked = oldest.with_for_update(skip_locked=True).cte("locked")
    readable = and_(locked.c.BodyBytes <= MAX_BODY, locked.c.HeadersBytes <= MAX_HEADER_BYTES)
    size = case((readable, locked.c.BodyBytes + locked.c.HeadersBytes), else_=0)
    before = func.coalesce(func.sum(size).over(order_by=locked.c.Time, rows=(None, -1)), 0)
    counted = select(*locked.c, readable.label("readable"), before.label("before")).subquery("counted")
    due = select(counted).where(counted.c.before < bindparam("most_bytes", type_=Integer())).cte("due")

    def read(name: str) -> ColumnElement[Any]:
        if name in _CONTENT:
            return case((due.c.readable, due.c[name]))
        # times as the driver returns them, in UTC: converting each would take as long as everything else with a row
        return type_coerce(due.c[name], _TIMESTAMP) if name in _TIMES else due.c[name]

    rows = select(*(read(name) for name in (*_PLAIN, *_SIZES)), cast(due.c.ctid, Text))
    if alone:
        return rows.add_cte(remembered_ids.lease_new(tables, due).cte("taken"))
    taken = remembered_ids.lease(tables, due).cte("taken")
    return rows.join_from(due, taken, taken.c.Id == due.c.Id)


def _claimable(tables: Tables, form: _ClaimForm) -> list[ColumnElement[bool]]:
    return [*_due(tables, form), _not_leased(tables)]


def _due(tables: Tables, form: _ClaimForm) -> list[ColumnElement[bool]]:
    table = tables.messages
    conditions = [
        table.c.DeliverConnId == bindparam("conn_id") if form.of_connection else table.c.DeliverConnId.is_(None),
        or_(table.c.NextTry.is_(None), table.c.NextTry <= bindparam("now", type_=UtcTime())),
        table.c.Time <= bindparam("due_by"),
    ]
    if form.of_destination:
        conditions.append(table.c.Destination == bindparam("destination"))
    if form.excludes:
        conditions.append(table.c.Destination.not_in(bindparam("excluded", expanding=True)))
    if form.since:
        conditions.append(table.c.Time >= bindparam("since"))
    if form.passed:
        behind = own_place() > cast(bindparam("passed", type_=Text()), Place())
        conditions.append(or_(table.c.Time > bindparam("since"), behind))
    return conditions


def _not_leased(tables: Tables) -> ColumnElement[bool]:
    table, past = tables.messages, tables.past
    now = bindparam("now", type_=UtcTime())
    # a subquery of one value, not an anti-join, for which a database may read all remembered ids
    leased_until = select(past.c.ClaimedUntil).where(past.c.Id == table.c.Id).correlate(table).scalar_subquery()
    return func.coalesce(leased_until, now, type_=UtcTime()) <= now


def _of_cursor(table: Table, cursor: ClaimCursor) -> list[ColumnElement[bool]]:
    conditions = [] if cursor.destination is None else [table.c.Destination == cursor.destination]
    return [*conditions, table.c.Destination.not_in(cursor.excluded)] if cursor.excluded else conditions


def next_entry(
    connection: Connection,
    tables: Tables,
    cursor: ClaimCursor,
    now: datetime,
    since: datetime | None = None,
    until: datetime | None = None,
) -> datetime | None:
    """Return when the next message of a cursor may be claimed, a window before its due time; None: no message.

    A message with a lease counts too, because the lease may end.

    :param since: only messages that are due then or later; None: any.
    :param until: only messages that may be claimed then or before; None: any.
    """
    table, end = tables.messages, now + cursor.window
    ours = [delivered_by(table, cursor.deliver_conn_id), *_of_cursor(table, cursor)]
    ours += [] if since is None else [table.c.Time >= since]
    ours += [] if until is None else [table.c.Time <= until + cursor.window]
    untried = or_(table.c.NextTry.is_(None), table.c.NextTry <= now, table.c.Time > end)
    first: datetime | None = connection.execute(
        select(table.c.Time).where(*ours, untried).order_by(table.c.Time).limit(1)
    ).scalar()
    again: datetime | None = connection.execute(
        select(func.min(table.c.NextTry, type_=UtcTime())).where(*ours, table.c.Time <= end, table.c.NextTry > now)
    ).scalar()
    # a window before the year 1 would be out of range
    moments = [None if first is None else max(first, EPOCH) - cursor.window, again]
    return min((moment for moment in moments if moment is not None), default=None)


def count_others(
    connection: Connection, tables: Tables, deliver_conn_ids: Sequence[str | None], due_by: datetime
) -> int:
    """Count the messages of other connections than these that are due by a time."""
    table = tables.messages
    column = table.c.DeliverConnId
    names = [name for name in deliver_conn_ids if name is not None]
    if None in deliver_conn_ids:
        others = and_(column.is_not(None), column.not_in(names))
    else:
        others = or_(column.is_(None), column.not_in(names))
    return count_rows(connection, table, table.c.Time <= due_by, others)
