"""Taking due messages for one dispatcher, by leases; each function works within the caller's transaction.

On PostgreSQL it is one statement. Its snapshot may be older than what another dispatcher has just committed; then the
upsert into ``_past`` is what tells them apart, for it sees the latest row of an id and leaves one that is held.
Elsewhere a second statement looks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
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
    bindparam,
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
from airflow_delayed.store.drivers import raw_of
from airflow_delayed.store.schema import MYSQL, Tables, UtcTime


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a dispatcher would like to claim.

    :param deliver_conn_id: whose messages.
    :param due_by: those that are due until then.
    :param since: those that are due from then on, None: all. All that is older was seen not long ago, and need not be
        passed over again: with a long transaction elsewhere, what was removed stays in the index.
    :param limit: how many at most.
    :param alone: on PostgreSQL, claim in a shorter way, which does not look whether somebody holds a message, and fails
        if so; also if the lease has ended.
    :param passed: ids that are due at ``since`` and are claimed already; with ``alone`` they are passed over.
    """

    deliver_conn_id: str | None
    due_by: datetime
    limit: int
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
    statement, said = _claim_locked(tables, *_form(wanted)).limit(wanted.limit), _said(wanted, now)
    for looks in range(1, _LOOKS + 1):
        rows = [dict(zip(CLAIMED, row, strict=True)) for row in connection.execute(statement, said).all()]
        _make_nameable(connection, tables, rows)
        if rows or looks == _LOOKS or not _overlooked(connection, tables, wanted, now):
            break
        time.sleep(next_sleep(looks, first=_FIRST_SLEEP, longest=_LONGEST_SLEEP))
    # the first statement may have looked before another dispatcher had noted what it claimed
    taken = leases.held(connection, tables, [row["Id"] for row in rows], now)
    return [row for row in rows if row["Id"] not in taken]


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
CLAIMED = ("Id", "Destination", "State", "Time", "Headers", "Tag", "ExpiresAt", "RetryCount", "Digest")
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
def _claim_locked(tables: Tables, connected: bool, since: bool) -> Select[Any]:
    return _due(tables, _free(tables, connected, since))


@_built
def _claim_at_once(tables: Tables, connected: bool, since: bool, alone: bool) -> Select[Any]:
    """Return the claim in one statement: the upsert sees, and leaves, what another dispatcher noted meanwhile."""
    conditions = _due_now(tables, connected, since)
    if alone:
        passed = cast(bindparam("passed", type_=Text()), postgresql.ARRAY(Text()))
        conditions.append(tables.messages.c.Id != all_(passed))
    else:
        conditions.append(_not_held(tables))
    place: ColumnElement[Any] = literal_column("ctid").label("ctid")
    due = _due(tables, conditions, place).limit(bindparam("limit", type_=Integer())).cte("due")
    # times as the driver has them, which are in UTC: to look at each takes as long as all else with a row
    plain = [type_coerce(due.c[name], _TIMESTAMP) if name in _TIMES else due.c[name] for name in CLAIMED]
    rows = select(*plain, cast(due.c.ctid, Text))
    if alone:
        return rows.add_cte(leases.take_all(tables, due).cte("taken"))
    taken = leases.take(tables, due).cte("taken")
    return rows.join_from(due, taken, taken.c.Id == due.c.Id)


def _due(tables: Tables, conditions: Sequence[ColumnElement[bool]], *further: ColumnElement[Any]) -> Select[Any]:
    table = tables.messages
    return (
        select(*(table.c[name] for name in CLAIMED), *further)
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
