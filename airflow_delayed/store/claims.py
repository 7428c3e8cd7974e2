"""The store's SQL, on every database the same by meaning; each function works within the caller's transaction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import Any, TypeVar

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    Table,
    func,
    insert,
    select,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite

from airflow_delayed.errors import DelayedError
from airflow_delayed.message import UTC
from airflow_delayed.store import copying
from airflow_delayed.store.arrays import among, as_table
from airflow_delayed.store.by_id import by_key, delete_rows
from airflow_delayed.store.packets import pieces, portions_by_size
from airflow_delayed.store.schema import MYSQL

#: How many ids go into one statement; SQL Server allows 2100 parameters in all.
IDS = 1000

T = TypeVar("T")

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


def insert_all(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows of which none is there yet, as is to be expected of most: it takes half the time.

    :raises sqlalchemy.exc.IntegrityError: one is there; the transaction is to be rolled back.
    """
    if copying.can_copy(connection):
        copying.copy(connection, table, rows)
    elif connection.dialect.name == "postgresql":
        for portion in portions_by_size(rows):
            connection.execute(_insert_arrays(table, portion))
    elif connection.dialect.name in MYSQL:
        for piece in pieces(connection, rows):
            connection.execute(insert(table), piece)
    else:
        connection.execute(insert(table), list(rows))


def insert_new(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """Insert the rows whose ids are not there yet, and return their ids. Each id may occur once in ``rows``.

    :raises sqlalchemy.exc.IntegrityError: on MySQL and SQL Server, another transaction stored one of the ids meanwhile.
    """
    if not rows:
        return set()
    if connection.dialect.name == "postgresql":
        new: set[str] = set()
        for portion in portions_by_size(rows):
            statement = _insert_arrays(table, portion).on_conflict_do_nothing(index_elements=[table.c.Id])
            new.update(connection.execute(statement.returning(table.c.Id)).scalars())
        return new
    if connection.dialect.name == "sqlite":
        unless = sqlite.insert(table).on_conflict_do_nothing(index_elements=[table.c.Id]).returning(table.c.Id)
        return set(connection.execute(unless, list(rows)).scalars())
    there = _there(connection, table, [row["Id"] for row in rows])
    missing = [row for row in rows if row["Id"] not in there]
    if missing:
        insert_all(connection, table, missing)
    return {row["Id"] for row in missing}


def _insert_arrays(table: Table, rows: Sequence[Mapping[str, Any]]) -> postgresql.Insert:
    names = list(rows[0])
    source = as_table(table, names, rows)
    return postgresql.insert(table).from_select(names, select(*(source.c[name] for name in names)))


def _there(connection: Connection, table: Table, ids: Sequence[str]) -> set[str]:
    return {
        found
        for some in portions(connection, ids)
        for found in connection.execute(select(table.c.Id).where(among(connection, table.c.Id, some))).scalars()
    }


def present(
    connection: Connection, table: Table, ids: Sequence[str], *, lock: bool = False
) -> dict[str, tuple[bytes | None, str | None]]:
    """Return digest and delivering connection of each id that is there.

    :param lock: lock these rows, and wait for those that another transaction has.
    """
    there: dict[str, tuple[bytes | None, str | None]] = {}
    for some in portions(connection, ids):
        known = among(connection, table.c.Id, some)
        statement: Select[Any] = select(table.c.Id, table.c.Digest, table.c.DeliverConnId).where(known)
        if lock:
            locked = statement.order_by(table.c.Id).with_for_update()
            statement = by_key(locked.with_hint(table, "WITH (UPDLOCK, ROWLOCK)", "mssql"), table)
        for row in connection.execute(statement):
            there[row.Id] = (None if row.Digest is None else bytes(row.Digest), row.DeliverConnId)
    return there


def delivered_by(table: Table, deliver_conn_id: str | None) -> ColumnElement[bool]:
    """Return the condition for messages that this connection delivers; None: those for queue tables."""
    if deliver_conn_id is None:
        return table.c.DeliverConnId.is_(None)
    return table.c.DeliverConnId == deliver_conn_id


def remove(connection: Connection, table: Table, ids: Sequence[str]) -> None:
    """Delete rows that this transaction has locked."""
    for some in slices(ids):
        connection.execute(delete_rows(table, some))


def count(connection: Connection, table: Table, *conditions: ColumnElement[bool]) -> int:
    """Count rows."""
    return int(connection.execute(select(func.count()).select_from(table).where(*conditions)).scalar_one())


def portions(connection: Connection, ids: Sequence[str]) -> Iterator[Sequence[str]]:
    """Cut ids as far as the database needs it for :func:`airflow_delayed.store.arrays.among`."""
    if connection.dialect.name != "postgresql":
        yield from slices(ids)
    elif ids:
        yield ids


def slices(ids: Sequence[T]) -> Iterator[list[T]]:
    """Cut ids, or numbers, into pieces that fit into one statement."""
    rest = iter(ids)
    while some := list(islice(rest, IDS)):
        yield some
