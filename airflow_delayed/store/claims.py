"""The store's SQL, on every database the same by meaning; each function works within the caller's transaction."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Table,
    and_,
    func,
    insert,
    or_,
    select,
    text,
    true,
)
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.sql.dml import ReturningInsert

from airflow_delayed.errors import DelayedError
from airflow_delayed.message import UTC
from airflow_delayed.store.arrays import among, as_table
from airflow_delayed.store.by_id import delete_rows, update_rows
from airflow_delayed.store.packets import pieces
from airflow_delayed.store.schema import MYSQL

#: How many ids go into one statement; SQL Server allows 2100 parameters in all.
IDS = 1000

_NOW = {
    # not now(), which stands still during a transaction
    "postgresql": "SELECT clock_timestamp()",
    "sqlite": "SELECT strftime('%Y-%m-%dT%H:%M:%f', 'now')",
    "mysql": "SELECT UTC_TIMESTAMP(6)",
    "mariadb": "SELECT UTC_TIMESTAMP(6)",
    "mssql": "SELECT SYSUTCDATETIME()",
}


def database_time(connection: Connection) -> datetime:
    """Return the database's time in UTC, in one round trip. SQLite's has milliseconds.

    :raises DelayedError: a database whose clock is not known.
    """
    name = connection.dialect.name
    if name not in _NOW:
        raise DelayedError(f"the store does not know the clock of {name}; use one of {', '.join(sorted(_NOW))}")
    said = connection.execute(text(_NOW[name])).scalar_one()
    moment: datetime = datetime.fromisoformat(said) if isinstance(said, str) else said
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def insert_new(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """Insert the rows whose ids are not there yet, and return their ids. Each id may occur once in ``rows``.

    :raises sqlalchemy.exc.IntegrityError: on MySQL and SQL Server, another transaction stored one of the ids meanwhile.
    """
    if not rows:
        return set()
    if connection.dialect.name == "postgresql":
        return set(connection.execute(_insert_arrays(table, rows)).scalars())
    if connection.dialect.name == "sqlite":
        statement = sqlite.insert(table).on_conflict_do_nothing(index_elements=[table.c.Id]).returning(table.c.Id)
        return set(connection.execute(statement, list(rows)).scalars())
    there = present(connection, table, [row["Id"] for row in rows])
    new = [row for row in rows if row["Id"] not in there]
    for piece in pieces(connection, new) if connection.dialect.name in MYSQL else [new] if new else []:
        connection.execute(insert(table), piece)
    return {row["Id"] for row in new}


def _insert_arrays(table: Table, rows: Sequence[Mapping[str, Any]]) -> ReturningInsert[Any]:
    names = list(rows[0])
    source = as_table(table, names, rows)
    return (
        postgresql.insert(table)
        .from_select(names, select(*(source.c[name] for name in names)))
        .on_conflict_do_nothing(index_elements=[table.c.Id])
        .returning(table.c.Id)
    )


def present(connection: Connection, table: Table, ids: Sequence[str]) -> dict[str, tuple[bytes | None, str | None]]:
    """Return digest and delivering connection of each id that is there."""
    there: dict[str, tuple[bytes | None, str | None]] = {}
    for some in slices(ids):
        known = among(connection, table.c.Id, some)
        statement = select(table.c.Id, table.c.Digest, table.c.DeliverConnId).where(known)
        for row in connection.execute(statement):
            there[row.Id] = (None if row.Digest is None else bytes(row.Digest), row.DeliverConnId)
    return there


def waiting(table: Table, deliver_conn_id: str | None, now: datetime) -> ColumnElement[bool]:
    """Return the condition for rows of one delivering connection that have not expired."""
    return and_(_delivered_by(table, deliver_conn_id), or_(table.c.ExpiresAt.is_(None), table.c.ExpiresAt > now))


def _delivered_by(table: Table, deliver_conn_id: str | None) -> ColumnElement[bool]:
    if deliver_conn_id is None:
        return table.c.DeliverConnId.is_(None)
    return table.c.DeliverConnId == deliver_conn_id


def without(table: Table, ids: Collection[str], destinations: Collection[str]) -> ColumnElement[bool]:
    """Return the condition that leaves some rows out."""
    left_out = ((table.c.Id, ids), (table.c.Destination, destinations))
    return and_(true(), *(column.not_in(list(names)) for column, names in left_out if names))


def claim(
    connection: Connection, table: Table, condition: ColumnElement[bool], until: datetime, limit: int
) -> list[dict[str, Any]]:
    """Lock and return up to ``limit`` rows due by ``until``, oldest first, passing over those that others hold.

    On SQLite the transaction itself holds the whole database, see :func:`airflow_delayed.store.engine.prepare`.
    """
    statement = (
        select(*(table.c[name] for name in _SENT))
        .where(table.c.Time <= until, condition)
        .order_by(table.c.Time)
        .limit(limit)
        .with_for_update(skip_locked=True)
        # SQL Server has hints in its place; these are the seed's
        .with_hint(table, "WITH (READPAST, UPDLOCK, ROWLOCK)", "mssql")
        # sorting whatever is due would lock all of it, and leave nothing to others
        .with_hint(table, _by_time(table), "mysql")
        .with_hint(table, _by_time(table), "mariadb")
    )
    return [dict(row._mapping) for row in connection.execute(statement)]


def _by_time(table: Table) -> str:
    """Return the hint that makes MySQL and MariaDB read the rows in the order of the index on Time."""
    name = next(str(index.name) for index in table.indexes if [column.name for column in index.columns] == ["Time"])
    return f"FORCE INDEX ({mysql.dialect().identifier_preparer.quote_identifier(name)})"


_SENT = ("Id", "Destination", "State", "Time", "Headers", "Tag", "ExpiresAt")


def remove(connection: Connection, table: Table, ids: Sequence[str]) -> None:
    """Delete rows that this transaction has claimed."""
    for some in slices(ids):
        connection.execute(delete_rows(table, some))


def take_back(connection: Connection, table: Table, ids: Sequence[str]) -> set[str]:
    """Delete rows that a dispatcher may be about to send, and return the ids of those that were still there."""
    gone: set[str] = set()
    # in one order everywhere, so that two who delete the same rows wait for each other instead of locking up
    for some in slices(sorted(ids)):
        if connection.dialect.name in ("postgresql", "sqlite"):
            gone.update(connection.execute(delete_rows(table, some).returning(table.c.Id)).scalars())
        else:
            locked = select(table.c.Id).where(table.c.Id.in_(some)).order_by(table.c.Id).with_for_update()
            there = list(connection.execute(locked).scalars())
            connection.execute(delete_rows(table, there))
            gone.update(there)
    return gone


def count_failure(connection: Connection, table: Table, ids: Sequence[str]) -> None:
    """Count one failure more for rows that this transaction has claimed."""
    for some in slices(ids):
        connection.execute(update_rows(table, some).values(RetryCount=table.c.RetryCount + 1))


def next_due(connection: Connection, table: Table, condition: ColumnElement[bool]) -> datetime | None:
    """Return when the next of some rows is due, or None if there are none."""
    statement = select(table.c.Time).where(condition).order_by(table.c.Time).limit(1)
    found: datetime | None = connection.execute(statement).scalar()
    return found


def count(connection: Connection, table: Table, *conditions: ColumnElement[bool]) -> int:
    """Count rows."""
    return int(connection.execute(select(func.count()).select_from(table).where(*conditions)).scalar_one())


def slices(ids: Sequence[str]) -> Iterator[list[str]]:
    """Cut ids into pieces that fit into one statement."""
    rest = iter(ids)
    while some := list(islice(rest, IDS)):
        yield some
