"""Changing rows by their ids, without a lock on any other.

A small table MySQL and MariaDB would rather read from end to end, and lock, or wait for, each row on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Delete, Select, Table, Update, delete, update
from sqlalchemy.dialects import mysql

_KEY = "FORCE INDEX (PRIMARY)"


def by_key(statement: Select[Any], table: Table) -> Select[Any]:
    """Return a query of this table that finds its rows by their key."""
    return statement.with_hint(table, _KEY, "mysql").with_hint(table, _KEY, "mariadb")


def delete_rows(table: Table, ids: Sequence[str]) -> Delete:
    """Return the statement that deletes these rows."""
    # one table's DELETE takes no such hint, and that of several does
    hint = f"USING {mysql.dialect().identifier_preparer.format_table(table)} {_KEY}"
    statement = delete(table).where(table.c.Id.in_(ids))
    return statement.with_hint(hint, dialect_name="mysql").with_hint(hint, dialect_name="mariadb")


def update_rows(table: Table, ids: Sequence[str]) -> Update:
    """Return the statement that updates these rows, still without values."""
    statement = update(table).where(table.c.Id.in_(ids))
    return statement.with_hint(_KEY, dialect_name="mysql").with_hint(_KEY, dialect_name="mariadb")
