"""What a store records of itself: the version of its tables, and whether this release can use them.

Tables that are older than this release are refused. Newer ones serve it too, unless
:data:`airflow_delayed.store.schema.USABLE_FROM` of the release that made them is above this one's version: a release
only adds tables, and columns that can be null, so that hosts change to it one by one.

The version is read when a store is opened, and after an error of the database; never for a message.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, Engine, insert, inspect, select

from airflow_delayed.delivery import Finding, State, TopologyReport
from airflow_delayed.errors import TopologyError
from airflow_delayed.store.dialects import database_time
from airflow_delayed.store.schema import USABLE_FROM, VERSION, Tables


@dataclass(frozen=True, slots=True)
class RecordedVersion:
    """The version of a store's tables."""

    number: int
    #: The oldest version whose release can use them.
    usable_from: int


def recorded_version(connection: Connection, tables: Tables) -> RecordedVersion | None:
    """Return what the store records; None: tables are missing, or not complete."""
    table = tables.version
    if not inspect(connection).has_table(table.name, schema=table.schema):
        return None
    row = connection.execute(select(table.c.Version, table.c.UsableFrom)).one_or_none()
    return None if row is None else RecordedVersion(row.Version, row.UsableFrom)


def version_difference(connection: Connection, tables: Tables, conn_id: str) -> Finding | None:
    """Return the finding for tables of another version, or None; it is a warning if this release can use them."""
    recorded = recorded_version(connection, tables)
    if recorded is None or recorded.number == VERSION:
        return None
    number = recorded.number
    update_here, other_table = "update airflow-provider-delayed here", "or give this store another table="
    works = number > VERSION >= recorded.usable_from
    why = None
    if works:
        remedy = f"{update_here}; until then all works"
    elif number > VERSION:
        why, remedy = "this release cannot use these newer tables", f"{update_here}, {other_table}"
    else:
        why = "this release does not use older tables"
        remedy = f"the changelog says how to bring them to this release; {other_table}"
    return Finding(
        state=State.WARNING if works else State.DIFFERS,
        resource=f"table {tables.messages.fullname}",
        argument="version",
        wanted=VERSION,
        found=f"version {number}, newer than this release's {VERSION}" if works else number,
        code="version",
        why=why,
        remedy=remedy,
    )


def is_usable(difference: Finding | None) -> bool:
    """Whether this release can use tables of that version; None: they are its own."""
    return difference is None or difference.state is State.WARNING


def problem(conn_id: str, report: TopologyReport) -> TopologyError | None:
    """Return the error for a report with problems, or None."""
    if report.ok:
        return None
    remedies = (finding.remedy for finding in report.problems if finding.code == "version")
    return TopologyError(conn_id, report, next(filter(None, remedies), None))


def check_ready(conn_id: str, engine: Engine, tables: Tables) -> None:
    """Check that the tables exist, and that this release can use them, or raise TopologyError with the remedy."""
    with engine.connect().execution_options(read_only=True) as connection:
        difference = version_difference(connection, tables, conn_id)
        inspector = inspect(connection)
        missing = [
            Finding(state=State.MISSING, resource=f"table {table.fullname}")
            for table in tables
            if not inspector.has_table(table.name, schema=table.schema)
        ]
    findings = [difference] if difference is not None and not is_usable(difference) else missing
    if error := problem(conn_id, TopologyReport(tuple(findings))):
        raise error from None


def record_version(connection: Connection, tables: Tables) -> None:
    """Record this release's version in complete tables that record none."""
    if recorded_version(connection, tables) is None:
        values = {"Version": VERSION, "UsableFrom": USABLE_FROM, "At": database_time(connection)}
        connection.execute(insert(tables.version).values(**values))
