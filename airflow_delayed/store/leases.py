"""Who holds which message, and which ids are remembered: the table ``_past``.

Each function works within the caller's transaction. Who wants to hand over or change a message first locks its row
(:func:`lock`), and only then asks whether somebody holds it (:func:`held`): a second statement sees all that was
committed meanwhile. Who wants to add an id adds it first, and asks :func:`remembered` then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import CTE, Column, ColumnElement, Connection, Table, bindparam, cast, insert, literal, or_, select
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.sql.dml import Insert, ReturningInsert

from airflow_delayed.store.arrays import among, as_table
from airflow_delayed.store.by_id import by_key, delete_rows, update_rows
from airflow_delayed.store.claims import portions, slices
from airflow_delayed.store.schema import Tables

#: What the row of an id in ``_past`` says, in its column Outcome.
HANDED_OVER = "handed over"

_KEPT = ("Id", "Destination", "Time", "Digest", "Outcome", "At", "Dispatcher", "ClaimedUntil")


def lock(connection: Connection, tables: Tables, ids: Sequence[str], *, wait: bool = False) -> list[dict[str, Any]]:
    """Lock messages for a change, and return what names them.

    Whether a dispatcher holds one is still to be asked, see :func:`held`.

    :param wait: wait for those whose row another transaction has, instead of passing over them.
    """
    table, found = tables.messages, []
    columns = [table.c[name] for name in ("Id", "Destination", "Time", "Digest")]
    for some in slices(sorted(ids)):
        statement = (
            select(*columns)
            .where(among(connection, table.c.Id, some))
            .order_by(table.c.Id)
            .with_for_update(skip_locked=not wait)
            .with_hint(table, f"WITH ({'' if wait else 'READPAST, '}UPDLOCK, ROWLOCK)", "mssql")
        )
        found += [dict(row._mapping) for row in connection.execute(by_key(statement, table))]
    return found


def held(connection: Connection, tables: Tables, ids: Sequence[str], now: datetime) -> set[str]:
    """Return which of these messages a dispatcher is handing over."""
    past = tables.past
    found: set[str] = set()
    for some in slices(ids):
        statement = select(past.c.Id).where(among(connection, past.c.Id, some), past.c.ClaimedUntil > now)
        found.update(connection.execute(statement).scalars())
    return found


def remembered(connection: Connection, tables: Tables, ids: Sequence[str]) -> dict[str, tuple[bytes | None, str]]:
    """Return digest and outcome of the ids that are remembered, or held."""
    past, found = tables.past, {}
    for some in portions(connection, ids):
        known = among(connection, past.c.Id, some)
        for row in connection.execute(select(past.c.Id, past.c.Digest, past.c.Outcome).where(known)):
            found[row.Id] = (None if row.Digest is None else bytes(row.Digest), row.Outcome)
    return found


def note(
    connection: Connection,
    tables: Tables,
    rows: Sequence[Mapping[str, Any]],
    outcome: str,
    at: datetime,
    *,
    dispatcher: str | None = None,
    until: datetime | None = None,
) -> None:
    """Write down what becomes of messages, in place of what was written before.

    :param rows: have at least Id, Destination, Time, Digest; each Id once.
    :param dispatcher: who holds them, ``until`` when.
    """
    said = {"Outcome": outcome, "At": at, "Dispatcher": dispatcher, "ClaimedUntil": until}
    full = [{**{name: row[name] for name in _KEPT[:4]}, **said} for row in sorted(rows, key=lambda row: str(row["Id"]))]
    if full:
        if connection.dialect.name == "mssql":
            forget(connection, tables, [row["Id"] for row in full])
            connection.execute(insert(tables.past), full)
        elif connection.dialect.name == "postgresql":
            connection.execute(_upsert_arrays(tables.past, full, said))
        else:
            connection.execute(_upsert(tables.past, connection.dialect.name), full)


def _upsert(past: Table, dialect_name: str) -> Insert:
    if dialect_name == "sqlite":
        given = sqlite.insert(past)
        return given.on_conflict_do_update(
            index_elements=[past.c.Id], set_={name: given.excluded[name] for name in _KEPT[1:]}
        )
    values = mysql.insert(past)
    return values.on_duplicate_key_update({name: values.inserted[name] for name in _KEPT[1:]})


def _upsert_arrays(past: Table, rows: Sequence[Mapping[str, Any]], said: Mapping[str, Any]) -> Insert:
    source = as_table(past, _KEPT[:4], rows)
    fixed = [cast(said[name], past.c[name].type) for name in _KEPT[4:]]
    given = postgresql.insert(past).from_select(_KEPT, select(*(source.c[name] for name in _KEPT[:4]), *fixed))
    return given.on_conflict_do_update(
        index_elements=[past.c.Id], set_={name: given.excluded[name] for name in _KEPT[1:]}
    )


def take(tables: Tables, due: CTE) -> ReturningInsert[Any]:
    """Return PostgreSQL's statement that has a dispatcher hold the messages of ``due``, but those that are held.

    It returns the ids that it took. Two that look at the same moment cannot both take one: the second waits for the
    first, and then sees what that wrote. Its values are ``now``, ``dispatcher`` and ``until``.
    """
    past = tables.past
    given = take_all(tables, due)
    free = or_(past.c.ClaimedUntil.is_(None), past.c.ClaimedUntil <= _value(past.c.At, "now"))
    return given.on_conflict_do_update(
        index_elements=[past.c.Id], set_={name: given.excluded[name] for name in _KEPT[1:]}, where=free
    ).returning(past.c.Id)


def take_all(tables: Tables, due: CTE) -> postgresql.Insert:
    """Return the same for messages of which nothing is noted; it fails if another dispatcher notes one meanwhile."""
    past = tables.past
    said = (
        cast(literal(HANDED_OVER), past.c.Outcome.type),
        _value(past.c.At, "now"),
        _value(past.c.Dispatcher, "dispatcher"),
        _value(past.c.ClaimedUntil, "until"),
    )
    # in one order, so that two who take the same messages wait for each other instead of locking up
    rows = select(*(due.c[name] for name in _KEPT[:4]), *said).order_by(due.c.Id)
    return postgresql.insert(past).from_select(_KEPT, rows)


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
    """Hold messages longer, and return how many this dispatcher still held.

    :param now: leave alone what is held no longer than until then: others may have begun to change it.
    """
    past, renewed = tables.past, 0
    for some in slices(sorted(ids)):
        mine = update_rows(past, some).where(past.c.Dispatcher == dispatcher)
        if now is not None:
            mine = mine.where(past.c.ClaimedUntil > now)
        renewed += connection.execute(mine.values(ClaimedUntil=until)).rowcount
    return renewed


def kept(
    connection: Connection, tables: Tables, rows: Sequence[dict[str, Any]], dispatcher: str
) -> list[dict[str, Any]]:
    """Lock messages after their lease may have ended, and return those that nobody has taken or changed since."""
    table, past = tables.messages, tables.past
    found: dict[str, tuple[datetime, bytes | None]] = {}
    mine: set[str] = set()
    for some in slices(sorted(row["Id"] for row in rows)):
        there = select(table.c.Id, table.c.Time, table.c.Digest).where(table.c.Id.in_(some)).order_by(table.c.Id)
        found.update(
            {row.Id: (row.Time, row.Digest) for row in connection.execute(by_key(there, table).with_for_update())}
        )
    for some in slices(sorted(found)):
        ours = select(past.c.Id).where(past.c.Id.in_(some), past.c.Dispatcher == dispatcher).order_by(past.c.Id)
        mine.update(connection.execute(by_key(ours, past).with_for_update()).scalars())
    return [row for row in rows if row["Id"] in mine and found[row["Id"]] == (row["Time"], row["Digest"])]


def release(connection: Connection, tables: Tables, ids: Sequence[str], dispatcher: str) -> set[str]:
    """Hold messages no longer that were not handed over, and return those that this dispatcher still held."""
    past = tables.past
    mine: set[str] = set()
    for some in slices(sorted(ids)):
        ours = select(past.c.Id).where(past.c.Id.in_(some), past.c.Dispatcher == dispatcher).order_by(past.c.Id)
        mine.update(connection.execute(by_key(ours, past).with_for_update()).scalars())
    forget(connection, tables, sorted(mine))
    return mine


def forget(connection: Connection, tables: Tables, ids: Sequence[str]) -> None:
    """Remove ids from what is remembered."""
    for some in slices(ids):
        connection.execute(delete_rows(tables.past, some))
