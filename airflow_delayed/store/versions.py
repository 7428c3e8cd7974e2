"""Which version of the tables is there, and bringing an older one up to ours with its rows.

Version 1 was the table of messages alone, without NextTry and LastError; version 2 has them, and the tables beside it.
Version 3 knows of a message which run of a task stored it, and when it was replaced, and has the messages of a tag and
of a destination in order of due time. Version 4 knows the iteration of a task loop, and what a run's relative delays
count from. Each step can be repeated, for MySQL commits every change of a table by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sqlalchemy import Connection, Engine, Table, func, insert, inspect, select, text
from sqlalchemy.schema import CreateColumn

from airflow_delayed.delivery import Finding, State, TopologyReport
from airflow_delayed.errors import TopologyError
from airflow_delayed.store.claims import database_time
from airflow_delayed.store.schema import MYSQL, Tables, mysql_collation, store_tables

VERSION = 4

OLDER = "store-older"
NEWER = "store-newer"

_FIRST_COLUMNS = {"Id", "Destination", "State", "Time", "Headers", "RetryCount", "DeliverConnId", "Tag", "ExpiresAt"}


def found(connection: Connection, tables: Tables) -> int | None:
    """Return the version that is there, or None where there is no table of messages, or one that is not ours."""
    inspector = inspect(connection)
    if inspector.has_table(tables.version.name, schema=tables.version.schema):
        recorded: int | None = connection.execute(select(func.max(tables.version.c.Version))).scalar()
        if recorded is not None:
            return recorded
    name, schema = tables.messages.name, tables.messages.schema
    if not inspector.has_table(name, schema=schema):
        return None
    return 1 if {column["name"] for column in inspector.get_columns(name, schema=schema)} >= _FIRST_COLUMNS else None


def difference(connection: Connection, tables: Tables) -> Finding | None:
    """Return what is wrong with the version that is there, if one is."""
    version = found(connection, tables)
    table = f"table {tables.messages.fullname}"
    if version is None or version == VERSION:
        return None
    if version > VERSION:
        why = "a newer release has made it, and this one leaves it alone"
        return Finding(
            state=State.DIFFERS, resource=table, argument="version", wanted=VERSION, found=version, code=NEWER, why=why
        )
    why = f"version {version} is there; it is brought up, and its rows stay"
    return Finding(state=State.MISSING, resource=f"version {VERSION} of {table}", found=version, code=OLDER, why=why)


def problem(conn_id: str, report: TopologyReport) -> TopologyError | None:
    """Return the error for a report that is not good."""
    if report.ok:
        return None
    newer = any(finding.code == NEWER for finding in report.problems)
    remedy = "update airflow-provider-delayed here, or give this store another table="
    return TopologyError(conn_id, report, remedy if newer else None)


def check_ready(conn_id: str, engine: Engine, tables: Tables | Table) -> None:
    """Look whether the tables are there, and of our version.

    :raises TopologyError: they are not; the text says what to do.
    """
    if isinstance(tables, Table):
        tables = store_tables(tables.name, tables.schema)
    with engine.connect().execution_options(read_only=True) as connection:
        difference_found = difference(connection, tables)
        findings = [difference_found] if difference_found else _missing(connection, tables)
    if error := problem(conn_id, TopologyReport(tuple(findings))):
        raise error from None


def _missing(connection: Connection, tables: Tables) -> list[Finding]:
    inspector = inspect(connection)
    return [
        Finding(state=State.MISSING, resource=f"table {table.fullname}")
        for table in tables
        if not inspector.has_table(table.name, schema=table.schema)
    ]


def upgrade(connection: Connection, tables: Tables) -> None:
    """Bring an older version up to ours; what it lacks beside is made as on a first install."""
    version = found(connection, tables)
    for number in range((version or VERSION) + 1, VERSION + 1):
        _STEPS[number](connection, tables)


def record(connection: Connection, tables: Tables) -> None:
    """Write down that the tables are of our version, once they all are."""
    there = connection.execute(select(tables.version.c.Version).where(tables.version.c.Version == VERSION)).scalar()
    if there is None:
        connection.execute(insert(tables.version).values(Version=VERSION, At=database_time(connection)))


def _to_2(connection: Connection, tables: Tables) -> None:
    if connection.dialect.name in MYSQL:
        _compare_without_padding(connection, tables.messages)
    for name in ("NextTry", "LastError"):
        _add_column(connection, tables.messages, name)


def _to_3(connection: Connection, tables: Tables) -> None:
    for table in (tables.messages, tables.failed):
        # version 1 had only one of them
        if inspect(connection).has_table(table.name, schema=table.schema):
            for name in ("Run", "ReplacedAt"):
                _add_column(connection, table, name)
            _drop_index_on_tag(connection, table)


def _to_4(connection: Connection, tables: Tables) -> None:
    # version 1 had none
    if inspect(connection).has_table(tables.runs.name, schema=tables.runs.schema):
        for name in ("Iteration", "Turn", "Anchor"):
            _add_column(connection, tables.runs, name)


_STEPS: Mapping[int, Callable[[Connection, Tables], None]] = {2: _to_2, 3: _to_3, 4: _to_4}


def _add_column(connection: Connection, table: Table, name: str) -> None:
    there = {column["name"] for column in inspect(connection).get_columns(table.name, schema=table.schema)}
    if name not in there:
        column = CreateColumn(table.c[name]).compile(dialect=connection.dialect)
        _alter(connection, table, f"ADD {column}")


def _drop_index_on_tag(connection: Connection, table: Table) -> None:
    """Drop the index on Tag alone; the one with Time has its name, and is made as all that is missing."""
    there = {one["name"]: one["column_names"] for one in inspect(connection).get_indexes(table.name, table.schema)}
    for index in table.indexes:
        if there.get(str(index.name)) == ["Tag"]:
            index.drop(connection)


def _compare_without_padding(connection: Connection, table: Table) -> None:
    """Before, an id and the same with a blank after it were one."""
    wanted = mysql_collation(connection.dialect)
    # what SQLAlchemy reads leaves out a collation that is the table's own
    asked = text(
        "SELECT COLLATION_NAME FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = COALESCE(:schema, DATABASE())"
        " AND TABLE_NAME = :name AND COLUMN_NAME = 'Id'"
    )
    if connection.execute(asked, {"schema": table.schema, "name": table.name}).scalar() != wanted:
        _alter(connection, table, f"CONVERT TO CHARACTER SET utf8mb4 COLLATE {wanted}")


def _alter(connection: Connection, table: Table, change: str) -> None:
    name = connection.dialect.identifier_preparer.format_table(table)
    connection.execute(text(f"ALTER TABLE {name} {change}".replace(":", r"\:")))
