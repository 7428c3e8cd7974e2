"""Taking due messages for one dispatcher, by leases; each function works within the caller's transaction.

On PostgreSQL it is one statement. Its snapshot may be older than what another dispatcher has just committed; then the
upsert into ``_past`` is what tells them apart, for it sees the latest row of an id and leaves one that is held.
Elsewhere a second statement looks.

Anybody with the right to INSERT can make large rows. So a claim takes no more bytes than are wanted, but at least one
row, and leaves out the content of a row that is too large to be read: :func:`airflow_delayed.store.rows.to_message`
refuses such a row.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from itertools import accumulate
from operator import itemgetter
from typing import Any

from sqlalchemy import (
    TIMESTAMP,
    ColumnElement,
    Connection,
    Integer,
    LargeBinary,
    Select,
    Table,
    Text,
    all_,
    and_,
    bindparam,
    case,
    cast,
    func,
    literal_column,
    or_,
    select,
    type_coerce,
    update,
)
from sqlalchemy.dialects import mysql, postgresql
from sqlalchemy.exc import IntegrityError

from airflow_delayed.backoff import next_sleep
from airflow_delayed.message import EPOCH
from airflow_delayed.store import claims, leases
from airflow_delayed.store.arrays import array
from airflow_delayed.store.by_id import by_key
from airflow_delayed.store.claims import slices
from airflow_delayed.store.content import length
from airflow_delayed.store.drivers import raw_of
from airflow_delayed.store.schema import MAX_BODY, MAX_HEADERS, MYSQL, Tables, UtcTime

#: Bytes of bodies and headers that are claimed at a time, but for the last message.
MOST_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a dispatcher would like to claim.

    :param deliver_conn_id: whose messages.
    :param due_by: those that are due until then.
    :param since: those that are due from then on, None: all. All that is older was seen not long ago, and need not be
        passed over again: with a long transaction elsewhere, what was removed stays in the index.
    :param limit: how many at most.
    :param most_bytes: the last message begins within so many bytes of bodies and headers.
    :param alone: on PostgreSQL, claim in a shorter way, which does not look whether somebody holds a message, and fails
        if so; also if the lease has ended.
    :param passed: ids that are due at ``since`` and are claimed already; with ``alone`` they are passed over.
    """

    deliver_conn_id: str | None
    due_by: datetime
    limit: int
    most_bytes: int = MOST_BYTES
    since: datetime | None = None
    alone: bool = False
    passed: Sequence[str] = ()


class NotAlone(Exception):
    """Another dispatcher holds some of the messages, or did; to be rolled back, and done again without ``alone``."""


def claim(
    connection: Connection, tables: Tables, wanted: Wanted, *, now: datetime, dispatcher: str, until: datetime
) -> list[dict[str, Any]]:
    """Take messages for a dispatcher until a time, oldest due first, passing over those that others have.

    Those that have expired are among them, to be put aside. On PostgreSQL each has its ``ctid``, by which
    :func:`airflow_delayed.store.settling.remove` finds it. On SQLite the transaction itself holds the whole database,
    see :func:`airflow_delayed.store.engine.prepare`.

    :raises NotAlone: ``wanted.alone`` was asked for, and is not so.
    """
    if connection.dialect.name == "postgresql":
        statement = _claim_at_once(tables, *_form(wanted), wanted.alone)
        said = {**_said(wanted, now), "limit": wanted.limit, "dispatcher": dispatcher, "until": until}
        said["most_bytes"] = wanted.most_bytes
        if wanted.alone:
            said["passed"] = array(wanted.passed)
        try:
            found = connection.execute(statement, said).all()
        except IntegrityError:
            if not wanted.alone:
                raise
            raise NotAlone from None
        # not strict, which takes half as long again
        rows = [dict(zip(_PLACED, row, strict=False)) for row in found]
        # what others changed a moment ago comes in the place that it had before
        rows.sort(key=_TIME)
        return rows
    rows = claim_locked(connection, tables, wanted, now)
    leases.note(connection, tables, rows, leases.HANDED_OVER, now, dispatcher=dispatcher, until=until)
    return rows


def claim_locked(connection: Connection, tables: Tables, wanted: Wanted, now: datetime) -> list[dict[str, Any]]:
    """Lock messages until the transaction's end, for those that are removed within it."""
    # not a parameter: SQL Server's TOP takes none
    name, said = connection.dialect.name, _said(wanted, now)
    statement = _claim_locked(tables, *_form(wanted), name).limit(wanted.limit)
    # what is larger is read by itself, as far as there is room for it
    small = {"most_small": max(1, wanted.most_bytes // wanted.limit)}
    for looks in range(1, _LOOKS + 1):
        rows = [dict(zip(CLAIMED, row, strict=True)) for row in connection.execute(statement, {**said, **small}).all()]
        _make_nameable(connection, tables, rows)
        if rows or looks == _LOOKS or not _overlooked(connection, tables, wanted, now):
            break
        time.sleep(next_sleep(looks, first=_FIRST_SLEEP, longest=_LONGEST_SLEEP))
    # the first statement may have looked before another dispatcher had noted what it claimed
    taken = leases.held(connection, tables, [row["Id"] for row in rows], now)
    rows = _within([row for row in rows if row["Id"] not in taken], wanted.most_bytes)
    _read_large(connection, tables, rows)
    return rows


def size_of(row: Mapping[str, Any]) -> int:
    """Return how many bytes of body and headers a claim reads of a row: 0 if the row is over the limits."""
    readable = row["BodyBytes"] <= MAX_BODY and row["HeadersBytes"] <= MAX_HEADERS
    return row["BodyBytes"] + row["HeadersBytes"] if readable else 0


def _within(rows: Sequence[dict[str, Any]], most_bytes: int) -> list[dict[str, Any]]:
    """Return the first rows, the last of which begins within so many bytes."""
    sizes = accumulate(map(size_of, rows), initial=0)
    return [row for row, before in zip(rows, sizes, strict=False) if before < most_bytes]


def _read_large(connection: Connection, tables: Tables, rows: Sequence[dict[str, Any]]) -> None:
    """Read the content that the claim left out, but for what is too large to be read."""
    large = {row["Id"]: row for row in rows if row["State"] is None and size_of(row)}
    table = tables.messages
    for some in slices(sorted(large)):
        statement = select(table.c.Id, table.c.State, table.c.Headers).where(table.c.Id.in_(some))
        for row in connection.execute(by_key(statement, table)):
            large[row.Id].update(State=row.State, Headers=row.Headers)


def _make_nameable(connection: Connection, tables: Tables, rows: Sequence[dict[str, Any]]) -> None:
    """Give each row an id by which it can be named: SQLite keeps ids that are no text."""
    if connection.dialect.name != "sqlite":
        return
    table = tables.messages
    for row in rows:
        if (raw := raw_of(row["Id"])) is not None:
            connection.execute(update(table).where(cast(table.c.Id, LargeBinary) == raw).values(Id=row["Id"]))


def _overlooked(connection: Connection, tables: Tables, wanted: Wanted, now: datetime) -> bool:
    """Return whether there is a message that a claim should have found.

    MySQL and MariaDB lock each row for a moment that they only look at, and so make it pass unseen by a claim beside.
    """
    if connection.dialect.name not in MYSQL:
        return False
    there = select(tables.messages.c.Id).where(*_free(tables, *_form(wanted))).limit(1)
    return connection.execute(there, _said(wanted, now)).first() is not None


#: How often a claim on MySQL that finds nothing looks, and the seconds in between, two at least in all: a dispatcher
#: beside it that is not run just now may still hold row locks.
_LOOKS = 13
_FIRST_SLEEP, _LONGEST_SLEEP = 0.001, 2.0
#: What a dispatcher reads of a message.
_PLAIN = ("Id", "Destination", "State", "Time", "Headers", "Tag", "ExpiresAt", "RetryCount", "Digest")
#: The content, and its bytes, which are known where it is left out too.
_CONTENT, _SIZES = ("State", "Headers"), ("BodyBytes", "HeadersBytes")
CLAIMED = (*_PLAIN, *_SIZES)
_PLACED = (*CLAIMED, "ctid")
_TIME = itemgetter("Time")
_TIMES, _TIMESTAMP = ("Time", "ExpiresAt"), TIMESTAMP(timezone=True)


def _form(wanted: Wanted) -> tuple[bool, bool]:
    """Return on what a claim's statement depends: whether a connection delivers, and whether a time is given."""
    return wanted.deliver_conn_id is not None, wanted.since is not None


def _said(wanted: Wanted, now: datetime) -> dict[str, Any]:
    """Return the values of a claim's statement."""
    values = {"conn_id": wanted.deliver_conn_id, "due_by": wanted.due_by, "since": wanted.since, "now": now}
    return {name: value for name, value in values.items() if value is not None}


# A dispatcher claims many times a second, so each statement is built once.
_built = lru_cache(maxsize=32)


@_built
def _claim_locked(tables: Tables, connected: bool, since: bool, dialect_name: str) -> Select[Any]:
    table = tables.messages
    body, headers = length(table.c.State, dialect_name), length(table.c.Headers, dialect_name)
    small = body + headers <= bindparam("most_small", type_=Integer())
    columns = {name: case((small, table.c[name])) if name in _CONTENT else table.c[name] for name in _PLAIN}
    return _due(tables, _free(tables, connected, since), [*columns.values(), body, headers])


@_built
def _claim_at_once(tables: Tables, connected: bool, since: bool, alone: bool) -> Select[Any]:
    """Return the claim in one statement: the upsert sees, and leaves, what another dispatcher noted meanwhile."""
    table, conditions = tables.messages, _due_now(tables, connected, since)
    if alone:
        passed = cast(bindparam("passed", type_=Text()), postgresql.ARRAY(Text()))
        conditions.append(table.c.Id != all_(passed))
    else:
        conditions.append(_not_held(tables))
    # PostgreSQL knows a length without reading what is long
    sizes = [func.octet_length(table.c[name]).label(size) for name, size in zip(_CONTENT, _SIZES, strict=True)]
    place: ColumnElement[Any] = literal_column("ctid").label("ctid")
    columns = [*(table.c[name] for name in _PLAIN), *sizes, place]
    locked = _due(tables, conditions, columns).limit(bindparam("limit", type_=Integer())).cte("locked")
    readable = and_(locked.c.BodyBytes <= MAX_BODY, locked.c.HeadersBytes <= MAX_HEADERS)
    size = case((readable, locked.c.BodyBytes + locked.c.HeadersBytes), else_=0)
    before = func.coalesce(func.sum(size).over(order_by=locked.c.Time, rows=(None, -1)), 0)
    counted = select(*locked.c, readable.label("readable"), before.label("before")).subquery("counted")
    due = select(counted).where(counted.c.before < bindparam("most_bytes", type_=Integer())).cte("due")

    def read(name: str) -> ColumnElement[Any]:
        if name in _CONTENT:
            return case((due.c.readable, due.c[name]))
        # times as the driver has them, which are in UTC: to look at each takes as long as all else with a row
        return type_coerce(due.c[name], _TIMESTAMP) if name in _TIMES else due.c[name]

    rows = select(*(read(name) for name in CLAIMED), cast(due.c.ctid, Text))
    if alone:
        return rows.add_cte(leases.take_all(tables, due).cte("taken"))
    taken = leases.take(tables, due).cte("taken")
    return rows.join_from(due, taken, taken.c.Id == due.c.Id)


def _due(
    tables: Tables, conditions: Sequence[ColumnElement[bool]], columns: Sequence[ColumnElement[Any]]
) -> Select[Any]:
    table = tables.messages
    return (
        select(*columns)
        .where(*conditions)
        .order_by(table.c.Time)
        .with_for_update(skip_locked=True)
        # SQL Server has hints in its place; these are the seed's
        .with_hint(table, "WITH (READPAST, UPDLOCK, ROWLOCK)", "mssql")
        # sorting whatever is due would lock all of it, and leave nothing to others
        .with_hint(table, _by_time(table), "mysql")
        .with_hint(table, _by_time(table), "mariadb")
    )


def _by_time(table: Table) -> str:
    """Return the hint that makes MySQL and MariaDB read the rows in the order of the index on Time."""
    name = next(str(index.name) for index in table.indexes if [column.name for column in index.columns] == ["Time"])
    return f"FORCE INDEX ({mysql.dialect().identifier_preparer.quote_identifier(name)})"


def _free(tables: Tables, connected: bool, since: bool) -> list[ColumnElement[bool]]:
    """Return the conditions for messages that are due, that nobody holds, and that need not wait for another try."""
    return [*_due_now(tables, connected, since), _not_held(tables)]


def _due_now(tables: Tables, connected: bool, since: bool) -> list[ColumnElement[bool]]:
    table = tables.messages
    conditions = [
        table.c.DeliverConnId == bindparam("conn_id") if connected else table.c.DeliverConnId.is_(None),
        or_(table.c.NextTry.is_(None), table.c.NextTry <= bindparam("now", type_=UtcTime())),
        table.c.Time <= bindparam("due_by"),
    ]
    if since:
        conditions.append(table.c.Time >= bindparam("since"))
    return conditions


def _not_held(tables: Tables) -> ColumnElement[bool]:
    table, past = tables.messages, tables.past
    now = bindparam("now", type_=UtcTime())
    # a subquery of one value, not an anti-join: no database may think of reading all that is remembered
    held_until = select(past.c.ClaimedUntil).where(past.c.Id == table.c.Id).correlate(table).scalar_subquery()
    return func.coalesce(held_until, now, type_=UtcTime()) <= now


def next_entry(
    connection: Connection, tables: Tables, deliver_conn_id: str | None, now: datetime, window: timedelta
) -> datetime | None:
    """Return when the next message of a connection may be handed over, ``window`` before it is due; None: no message.

    One that others hold counts too: it may come free.
    """
    table, end = tables.messages, now + window
    ours = claims.delivered_by(table, deliver_conn_id)
    untried = or_(table.c.NextTry.is_(None), table.c.NextTry <= now, table.c.Time > end)
    first: datetime | None = connection.execute(
        select(table.c.Time).where(ours, untried).order_by(table.c.Time).limit(1)
    ).scalar()
    again: datetime | None = connection.execute(
        select(func.min(table.c.NextTry, type_=UtcTime())).where(ours, table.c.Time <= end, table.c.NextTry > now)
    ).scalar()
    # before 1970 there is no room for the window on the first day of all
    moments = [None if first is None else max(first, EPOCH) - window, again]
    return min((moment for moment in moments if moment is not None), default=None)
