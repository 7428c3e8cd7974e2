"""Remembered ids and leases: the table ``_past``. A lease says which dispatcher has claimed a message, until when.

The rows before :data:`FIRST_ID` are marks, which a transaction locks, and no ids of messages: who reads, counts or
forgets ids leaves them out.

Each function works within the caller's transaction. A caller that delivers or changes a message locks its row first
(such as :func:`lock_messages`) and looks for a lease in a second statement (:func:`in_flight`): only that one sees
leases that were committed since the first began. A caller that adds an id inserts it first, and then calls
:func:`find`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import CTE, Column, ColumnElement, Connection, Table, bindparam, cast, literal, null, or_, select
from sqlalchemy.dialects import postgresql
from sqlalchemy.sql.dml import ReturningInsert

from airflow_delayed.store import cancelled
from airflow_delayed.store.database import IDS, slices
from airflow_delayed.store.dialects import dialect_of
from airflow_delayed.store.records import insert_new_rows, remove_rows
from airflow_delayed.store.schema import Tables

#: The value of the column Outcome for a message that is leased or was dispatched.
DISPATCHED = "dispatched"
#: The same for a message that was given up and sent to the error destination.
DEAD_LETTERED = "dead-lettered"
#: The values of a message that a dispatcher or a sender has sent.
SENT = (DISPATCHED, DEAD_LETTERED)

#: The value of the column Outcome for a mark (of :mod:`airflow_delayed.store.pauses`), which is no message's row.
MARK = "mark"
#: The ids of marks begin with it, and come before all ids of messages, which have no blank.
MARK_BEGINS = " "
#: The first id that a message can have.
FIRST_ID = "!"

#: The columns of a message that its record has too.
RECORDED = ("Id", "Destination", "Time", "Digest", "Tag", "Run", "DeliverConnId")
_LEASE = ("Outcome", "At", "Dispatcher", "ClaimedUntil")


def lock_messages(
    connection: Connection, tables: Tables, ids: Sequence[str], *, wait: bool = False
) -> list[dict[str, Any]]:
    """Lock messages for a change, and return what :func:`record` needs of them; then look for leases."""
    table, found, dialect = tables.messages, [], dialect_of(connection)
    columns = [table.c[name] for name in RECORDED]
    for some in slices(sorted(ids)):
        rows = select(*columns).where(dialect.among(table.c.Id, some)).order_by(table.c.Id)
        statement = dialect.by_key(rows.with_for_update(skip_locked=not wait), table)
        found += [dict(row._mapping) for row in connection.execute(statement)]
    return found


def in_flight(connection: Connection, tables: Tables, ids: Sequence[str], now: datetime) -> set[str]:
    """Return which of these messages have a lease: a dispatcher is delivering them."""
    past = tables.past
    found: set[str] = set()
    for some in slices(ids):
        ours = dialect_of(connection).among(past.c.Id, some)
        statement = select(past.c.Id).where(ours, past.c.ClaimedUntil > now)
        found.update(connection.execute(statement).scalars())
    return found


def find(connection: Connection, tables: Tables, ids: Sequence[str]) -> dict[str, tuple[bytes | None, str]]:
    """Return digest and outcome of the ids that are remembered or have a lease."""
    past, found, dialect = tables.past, {}, dialect_of(connection)
    for some in dialect.portions(ids):
        known = dialect.among(past.c.Id, some)
        rows = select(past.c.Id, past.c.Digest, past.c.Outcome).where(known, past.c.Id >= FIRST_ID)
        for row in connection.execute(rows):
            found[row.Id] = (None if row.Digest is None else bytes(row.Digest), row.Outcome)
    return found


def record(
    connection: Connection,
    tables: Tables,
    rows: Sequence[Mapping[str, Any]],
    outcome: str,
    at: datetime,
    *,
    dispatcher: str | None = None,
    until: datetime | None = None,
) -> None:
    """Record the outcome of messages, each once, in place of an earlier record; ``until``: its lease ends."""
    own = [{name: row[name] for name in RECORDED} for row in sorted(rows, key=lambda row: str(row["Id"]))]
    if own:
        common = {"Outcome": outcome, "At": at, "Dispatcher": dispatcher, "ClaimedUntil": until}
        dialect_of(connection).upsert(connection, tables.past, own, common)


def record_removed(tables: Tables, removed: CTE, outcome: str) -> postgresql.Insert:
    """Return PostgreSQL's statement that does :func:`record` of removed messages; its parameter is ``now``."""
    return _replacing(tables.past, _recording(tables.past, removed, outcome))


def record_unleased(tables: Tables, messages: CTE, outcome: str) -> ReturningInsert[Any]:
    """Return the same for messages that may have leases: it leaves those out, and returns the ids of the others."""
    past = tables.past
    return _replacing(past, _recording(past, messages, outcome), _unleased(past)).returning(past.c.Id)


def _recording(past: Table, messages: CTE, outcome: str) -> postgresql.Insert:
    values = cast(literal(outcome), past.c.Outcome.type), _value(past.c.At, "now"), null(), null()
    # in one order, as below
    rows = select(*(messages.c[name] for name in RECORDED), *values).order_by(messages.c.Id)
    return postgresql.insert(past).from_select((*RECORDED, *_LEASE), rows)


def _unleased(past: Table) -> ColumnElement[bool]:
    return or_(past.c.ClaimedUntil.is_(None), past.c.ClaimedUntil <= _value(past.c.At, "now"))


def _replacing(past: Table, given: postgresql.Insert, free: ColumnElement[bool] | None = None) -> postgresql.Insert:
    values = {name: given.excluded[name] for name in (*RECORDED, *_LEASE) if name != "Id"}
    return given.on_conflict_do_update(index_elements=[past.c.Id], set_=values, where=free)


def lease(tables: Tables, due: CTE) -> ReturningInsert[Any]:
    """Return PostgreSQL's statement that gives a dispatcher leases of the messages of ``due`` that have none.

    It returns the ids that it leased. Two dispatchers cannot lease the same message at the same moment: the second
    waits for the first, and then sees its row. The parameters are ``now``, ``dispatcher``, ``until`` and ``conn_id``,
    the connection of all of them.
    """
    past = tables.past
    return _replacing(past, lease_new(tables, due), _unleased(past)).returning(past.c.Id)


def lease_new(tables: Tables, due: CTE) -> postgresql.Insert:
    """Return the same as a plain INSERT: it fails if one of the ids has a row in ``_past``, even of an ended lease."""
    past = tables.past
    values = (
        cast(literal(DISPATCHED), past.c.Outcome.type),
        _value(past.c.At, "now"),
        _value(past.c.Dispatcher, "dispatcher"),
        _value(past.c.ClaimedUntil, "until"),
    )
    # in one order, so that two dispatchers that lease the same messages do not deadlock
    kept = (due.c[name] if name in due.c else _value(past.c[name], "conn_id") for name in RECORDED)
    return postgresql.insert(past).from_select((*RECORDED, *_LEASE), select(*kept, *values).order_by(due.c.Id))


def _value(column: Column[Any], name: str) -> ColumnElement[Any]:
    return cast(bindparam(name, type_=column.type), column.type)


def renew(
    connection: Connection,
    tables: Tables,
    ids: Sequence[str],
    dispatcher: str,
    until: datetime,
    now: datetime | None = None,
) -> int:
    """Extend leases, and return how many this dispatcher still had, without leases that ended by ``now``, if given."""
    past, renewed, dialect = tables.past, 0, dialect_of(connection)
    for some in slices(sorted(ids)):
        mine = dialect.update_rows(past, some).where(past.c.Dispatcher == dispatcher)
        if now is not None:
            mine = mine.where(past.c.ClaimedUntil > now)
        renewed += connection.execute(mine.values(ClaimedUntil=until)).rowcount
    return renewed


def still_claimed(
    connection: Connection, tables: Tables, rows: Sequence[dict[str, Any]], dispatcher: str
) -> list[dict[str, Any]]:
    """Lock messages whose leases may have ended; return the ids that this dispatcher leases and nobody changed."""
    table, dialect = tables.messages, dialect_of(connection)
    found: dict[str, tuple[datetime, bytes | None]] = {}
    for some in slices(sorted(row["Id"] for row in rows)):
        there = select(table.c.Id, table.c.Time, table.c.Digest).where(table.c.Id.in_(some)).order_by(table.c.Id)
        statement = dialect.by_key(there.with_for_update(), table)
        found.update({row.Id: (row.Time, row.Digest) for row in connection.execute(statement)})
    mine = _lock_leases(connection, tables, list(found), dispatcher)
    return [row for row in rows if row["Id"] in mine and found[row["Id"]] == (row["Time"], row["Digest"])]


def release(connection: Connection, tables: Tables, ids: Sequence[str], dispatcher: str) -> set[str]:
    """End the leases of messages that were not delivered, and return the ids of the leases that this dispatcher had."""
    mine = _lock_leases(connection, tables, ids, dispatcher)
    forget(connection, tables, sorted(mine))
    return mine


def _lock_leases(connection: Connection, tables: Tables, ids: Sequence[str], dispatcher: str) -> set[str]:
    past, dialect = tables.past, dialect_of(connection)
    mine: set[str] = set()
    for some in slices(sorted(ids)):
        ours = select(past.c.Id).where(past.c.Id.in_(some), past.c.Dispatcher == dispatcher).order_by(past.c.Id)
        mine.update(connection.execute(dialect.by_key(ours.with_for_update(), past)).scalars())
    return mine


def forget(connection: Connection, tables: Tables, ids: Sequence[str]) -> None:
    """Delete the rows of these ids."""
    remove_rows(connection, tables.past, ids)


def old_ids(tables: Tables, before: datetime, now: datetime) -> Sequence[ColumnElement[bool]]:
    """Return the conditions for remembered ids that are older than ``before`` and have no lease."""
    past = tables.past
    free = or_(past.c.ClaimedUntil.is_(None), past.c.ClaimedUntil <= now)
    return past.c.At < before, free, past.c.Id >= FIRST_ID


def forget_old_ids(connection: Connection, tables: Tables, before: datetime, now: datetime) -> int:
    """Delete up to 1000 remembered ids older than ``before``, neither leased nor locked; return how many."""
    past = tables.past
    old = select(past.c.Id).where(*old_ids(tables, before, now)).order_by(past.c.At).limit(IDS)
    ids = sorted(connection.execute(old.with_for_update(skip_locked=True)).scalars())
    forget(connection, tables, ids)
    cancelled.forget_ids(connection, tables, ids)
    return len(ids)


def lock_mark(connection: Connection, tables: Tables, name: str, now: datetime) -> None:
    """Insert a mark where it is missing, and lock it; another transaction that locks it waits for the end of this."""
    past = tables.past
    insert_new_rows(connection, past, [{"Id": name, "Outcome": MARK, "At": now}])
    mark = select(past.c.Id).where(past.c.Id == name).with_for_update()
    connection.execute(dialect_of(connection).by_key(mark, past))
