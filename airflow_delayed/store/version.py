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

#: The tables are older than this release, which does not use them.
OLDER = "store-older"
#: The tables are newer than this release, which uses them.
STORE_AHEAD = "store-ahead"
#: The tables are newer than this release, and not for it.
NEWER = "store-newer"


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
    code = OLDER if number < VERSION else NEWER if recorded.usable_from > VERSION else STORE_AHEAD
    update_here = "update airflow-provider-delayed here"
    why, remedy = {
        OLDER: (
            "this release does not use older tables",
            "the changelog says how to bring them to this release; or give this store another table=",
        ),
        NEWER: ("this release cannot use these newer tables", f"{update_here}, or give this store another table="),
        STORE_AHEAD: (None, f"{update_here}; until then all works"),
    }[code]
    return Finding(
        state=State.WARNING if code == STORE_AHEAD else State.DIFFERS,
        resource=f"table {tables.messages.fullname}",
        argument="version",
        wanted=VERSION,
        found=f"version {number}, newer than this release's {VERSION}" if code == STORE_AHEAD else number,
        code=code,
        why=why,
        remedy=remedy,
    )


def problem(conn_id: str, report: TopologyReport) -> TopologyError | None:
    """Return the error for a report with problems, or None."""
    if report.ok:
        return None
    remedies = (finding.remedy for finding in report.problems if finding.code in (OLDER, NEWER))
    return TopologyError(conn_id, report, next(filter(None, remedies), None))


def check_ready(conn_id: str, engine: Engine, tables: Tables) -> None:
    """Check that the tables exist, and that this release can use them.

    :raises TopologyError: they do not, or it cannot; the text has the remedy.
    """
    with engine.connect().execution_options(read_only=True) as connection:
        difference = version_difference(connection, tables, conn_id)
        inspector = inspect(connection)
        missing = [
            Finding(state=State.MISSING, resource=f"table {table.fullname}")
            for table in tables
            if not inspector.has_table(table.name, schema=table.schema)
        ]
    findings = missing if difference is None or difference.code == STORE_AHEAD else [difference]
    if error := problem(conn_id, TopologyReport(tuple(findings))):
        raise error from None


def record_version(connection: Connection, tables: Tables) -> None:
    """Record this release's version in complete tables that record none."""
    if recorded_version(connection, tables) is None:
        values = {"Version": VERSION, "UsableFrom": USABLE_FROM, "At": database_time(connection)}
        connection.execute(insert(tables.version).values(**values))
