"""The version of a store's tables: which there is, what it lacks, and its upgrade to this release's."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Column, Connection, Engine, FromClause, Table, func, insert, inspect, select, text
from sqlalchemy.schema import CreateColumn

from airflow_delayed.delivery import Finding, State, TopologyReport
from airflow_delayed.errors import TopologyError
from airflow_delayed.store.dialects import database_time
from airflow_delayed.store.schema import OLDEST, TABLE, VERSION, Tables

OLDER = "store-older"
TOO_OLD = "store-too-old"
NEWER = "store-newer"
#: By code: the remedy of an error about another version.
_REMEDIES: Mapping[str, str] = {
    NEWER: "update airflow-provider-delayed here, or give this store another table=",
    TOO_OLD: "upgrade the tables with the release in between first, or give this store another table=",
}


def _recorded(connection: Connection, tables: Tables) -> int | None:
    """Return the recorded version of the tables, or None."""
    if not inspect(connection).has_table(tables.version.name, schema=tables.version.schema):
        return None
    recorded: int | None = connection.execute(select(func.max(tables.version.c.Version))).scalar()
    return recorded


def version_difference(connection: Connection, tables: Tables, conn_id: str) -> Finding | None:
    """Return the finding for tables of another version, or None; the version before this one is a warning."""
    version = _recorded(connection, tables)
    table = f"table {tables.messages.fullname}"
    if version is None or version == VERSION:
        return None
    if version == OLDEST:
        return Finding(
            state=State.WARNING,
            resource=table,
            argument="version",
            found=f"version {version} is there, and this release's is {VERSION}; all works, but for what is new",
            code=OLDER,
            remedy=f"when this release is everywhere that uses the store: {upgrade_command(conn_id, tables)}",
        )
    if version > VERSION:
        why = "a newer release has made it, and this one leaves it alone"
    else:
        why = f"it is too old: this release uses and upgrades version {OLDEST} alone"
    code = NEWER if version > VERSION else TOO_OLD
    return Finding(
        state=State.DIFFERS, resource=table, argument="version", wanted=VERSION, found=version, code=code, why=why
    )


def upgrade_command(conn_id: str, tables: Tables) -> str:
    """Return the command that upgrades a store."""
    name, schema = tables.messages.name, tables.messages.schema
    options = (["--table", name] if name != TABLE else []) + (["--schema", schema] if schema else [])
    return shlex.join(["airflow", "delayed", "upgrade", "--store-conn-id", conn_id, *options])


def problem(conn_id: str, report: TopologyReport) -> TopologyError | None:
    """Return the error for a report with problems, or None."""
    if report.ok:
        return None
    remedies = (_REMEDIES.get(finding.code or "") for finding in report.problems)
    return TopologyError(conn_id, report, next(filter(None, remedies), None))


def check_ready(conn_id: str, engine: Engine, tables: Tables) -> None:
    """Check that the tables exist and are of this release's version or the one before it.

    :raises TopologyError: they are not; the text says how to install or upgrade them.
    """
    with engine.connect().execution_options(read_only=True) as connection:
        difference = version_difference(connection, tables, conn_id)
        if difference and difference.code != OLDER:
            findings = [difference]
        else:
            findings = _missing(connection, tables_of(tables, VERSION if difference is None else OLDEST))
    if error := problem(conn_id, TopologyReport(tuple(findings))):
        raise error from None


def _missing(connection: Connection, tables: Sequence[Table]) -> list[Finding]:
    inspector = inspect(connection)
    return [
        Finding(state=State.MISSING, resource=f"table {table.fullname}")
        for table in tables
        if not inspector.has_table(table.name, schema=table.schema)
    ]


def table_version(connection: Connection, tables: Tables) -> int:
    """Return the version of tables that are there: this release's, or the one before it."""
    recorded: int | None = connection.execute(select(func.max(tables.version.c.Version))).scalar()
    return VERSION if recorded is None else recorded


def tables_of(tables: Tables, version: int) -> list[Table]:
    """Return the tables that a version has."""
    return [table for table in tables if version >= VERSION or table not in _added_tables(tables)]


def columns_after(tables: Tables, version: int) -> list[Column[Any]]:
    """Return the columns that tables of a version do not have; neither read nor write them there."""
    added = [(number, columns) for number, columns in _added(tables).items() if number > version]
    return [column for _, columns in sorted(added) for column in columns]


def _added(tables: Tables) -> Mapping[int, Sequence[Column[Any]]]:
    """Return by version the columns that it added. Each can be null, so that no row is written when it is added."""
    dispatchers = [tables.dispatchers.c[name] for name in ("WorkedAt", "Problem", "Host", "DagId", "Reaches")]
    past = [tables.past.c[name] for name in ("Tag", "Run", "DeliverConnId")]
    return {5: [*dispatchers, *past]}


def _added_tables(tables: Tables) -> Sequence[Table]:
    """Return the tables that the version before does not have."""
    return (tables.rates, tables.history, tables.cancelled, tables.jobs)


def upgrade(connection: Connection, tables: Tables) -> None:
    """Add the columns and the tables that an older version lacks, and record this version.

    Looking comes before changing: PostgreSQL keeps the table locked from the first change to the end.
    """
    for table in _added_tables(tables):
        table.create(connection, checkfirst=True)
    lacking = columns_after(tables, table_version(connection, tables))
    missing = [column for column in lacking if column.name not in _column_names(connection, column.table)]
    for column in missing:
        _add_column(connection, column)
    record_version(connection, tables)


def _column_names(connection: Connection, table: FromClause) -> set[str]:
    assert isinstance(table, Table)
    return {column["name"] for column in inspect(connection).get_columns(table.name, schema=table.schema)}


def record_version(connection: Connection, tables: Tables) -> None:
    """Record the version of the tables, after all of them are upgraded."""
    there = connection.execute(select(tables.version.c.Version).where(tables.version.c.Version == VERSION)).scalar()
    if there is None:
        connection.execute(insert(tables.version).values(Version=VERSION, At=database_time(connection)))


def _add_column(connection: Connection, column: Column[Any]) -> None:
    assert isinstance(column.table, Table)
    name = connection.dialect.identifier_preparer.format_table(column.table)
    definition = str(CreateColumn(column).compile(dialect=connection.dialect))
    connection.execute(text(f"ALTER TABLE {name} ADD {definition}".replace(":", r"\:")))
