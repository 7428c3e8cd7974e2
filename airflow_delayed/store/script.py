"""The SQL of an install as text, for a database administrator; nothing here connects to a database."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import ClauseElement, Insert, Table, exists, insert, literal, literal_column, select
from sqlalchemy import Dialect as SqlDialect
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.dialects.mysql.mariadb import MariaDBDialect
from sqlalchemy.schema import CreateIndex, CreateTable

from airflow_delayed.store.database import KNOWN
from airflow_delayed.store.dialects import dialect_for, dialect_named
from airflow_delayed.store.records import check_queue_name
from airflow_delayed.store.schema import TABLE, USABLE_FROM, VERSION, Tables, queue_table, store_tables

_DIALECTS: Mapping[str, Callable[..., SqlDialect]] = {
    "postgresql": postgresql.dialect,
    "mysql": mysql.dialect,
    "mariadb": MariaDBDialect,
    "sqlite": sqlite.dialect,
}
#: "CREATE UNIQUE INDEX name ON table (columns)"
_INDEX = re.compile(r"CREATE (UNIQUE )?INDEX (.+?) ON .+? (\(.*\))$", re.DOTALL)


def install_script(name: str, queues: Sequence[str] = (), *, table: str = TABLE, schema: str | None = None) -> str:
    """Return the SQL that creates what is missing of a store's tables and queue tables, and records their version.

    It may be run again, and changes no table that is there: an older one keeps its version.

    :param name: SQLAlchemy's name of the database; one of :data:`airflow_delayed.store.database.KNOWN`.
    :raises DelayedError: an unknown database.
    :raises ValueError: the table's name is empty, or too long.
    :raises LimitExceeded: the name of a queue is longer than a table's may be.
    """
    dialect_named(name).check_known()
    # names, and not "%s": the text is not for a driver, which would read "%%" as one "%"
    dialect = _DIALECTS[name](paramstyle="named")
    tables = store_tables(table, schema)
    for queue in queues:
        check_queue_name(queue)
    made = [*tables, *(queue_table(queue, schema, dialect_for(dialect)) for queue in queues)]
    statements = [statement for one in made for statement in _creation(one, dialect)]
    head = (
        f"-- {KNOWN[name]}: tables of airflow_delayed, version {VERSION}. It may be run again: it creates what is"
        " missing, and changes nothing else.\n"
    )
    if name == "sqlite":
        # the file keeps this setting
        statements.insert(0, "PRAGMA journal_mode=WAL")
    return head + "".join(f"\n{statement};\n" for statement in [*statements, _version_row(tables, dialect)])


def _creation(table: Table, dialect: SqlDialect) -> Iterator[str]:
    create = _text(CreateTable(table, if_not_exists=True), dialect)
    indexes = sorted(table.indexes, key=lambda index: str(index.name))
    if dialect_for(dialect).indexes_within:
        parts = [_INDEX.sub(r"\1INDEX \2 \3", _text(CreateIndex(index), dialect)) for index in indexes]
        yield ",\n\t".join([create.removesuffix(")").rstrip(), *parts]) + "\n)"
        return
    yield create
    for index in indexes:
        yield _text(CreateIndex(index, if_not_exists=True), dialect)


def _version_row(tables: Tables, dialect: SqlDialect) -> str:
    version = tables.version
    row: Any = select(literal(VERSION), literal(USABLE_FROM), literal_column(dialect_for(dialect).clock_sql))
    statement = insert(version).from_select(["Version", "UsableFrom", "At"], row.where(~exists().select_from(version)))
    return _text(statement, dialect)


def _text(element: ClauseElement, dialect: SqlDialect) -> str:
    options = {"literal_binds": True} if isinstance(element, Insert) else {}
    lines = str(element.compile(dialect=dialect, compile_kwargs=options)).strip().splitlines()
    return "\n".join(line.rstrip() for line in lines)
