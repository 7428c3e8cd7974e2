"""What a store records of itself: the version of its tables and the name of its environment; checks and changes.

Tables that are older than this release are refused. Newer ones serve it too, unless
:data:`airflow_delayed.store.schema.USABLE_FROM` of the release that made them is above this one's version: a release
only adds tables, and columns that can be null, so that hosts change to it one by one.

The version is read when a store is opened, and after an error of the database; never for a message. The environment is
read when a dispatcher begins.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from sqlalchemy import Connection, Engine, insert, inspect, select, update

from airflow_delayed.delivery import Finding, State, TopologyReport
from airflow_delayed.errors import TopologyError, WrongEnvironment
from airflow_delayed.store.dialects import database_time
from airflow_delayed.store.schema import TABLE, USABLE_FROM, VERSION, Tables

#: The tables are older than this release, which does not use them.
OLDER = "store-older"
#: The tables are newer than this release, which uses them.
STORE_AHEAD = "store-ahead"
#: The tables are newer than this release, and not for it.
NEWER = "store-newer"
#: The store is of another environment than this host.
ENVIRONMENT = "environment"


@dataclass(frozen=True, slots=True)
class RecordedVersion:
    """The version of a store's tables, and the name of the store's environment."""

    number: int
    #: The oldest version whose release can use them.
    usable_from: int
    environment: str | None


def recorded_version(connection: Connection, tables: Tables) -> RecordedVersion | None:
    """Return what the store records; None: tables are missing, or not complete."""
    table = tables.version
    if not inspect(connection).has_table(table.name, schema=table.schema):
        return None
    row = connection.execute(select(table.c.Version, table.c.UsableFrom, table.c.Environment)).one_or_none()
    return None if row is None else RecordedVersion(row.Version, row.UsableFrom, row.Environment)


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


def environment_difference(connection: Connection, tables: Tables, conn_id: str, here: str | None) -> Finding | None:
    """Return the finding for a store that is of another environment than this host, or None.

    :param here: the name of this host's environment; None: it has none, and its dispatchers do not ask.
    """
    recorded = recorded_version(connection, tables)
    name = recorded.environment if recorded else None
    if name == here:
        return None
    state = State.BLOCKED
    if here is None:
        state = State.WARNING
        found = (
            f"it is of environment {name!r}, and [delayed] environment is not set here: a dispatcher of this host would"
            " dispatch from it all the same; a dispatcher of a host with another name takes no message"
        )
        remedy = (
            f"set the option to {name!r} on the hosts that this store belongs to. If it was named so by mistake:"
            f" {_environment(conn_id, tables, 'NAME')} gives it another name"
        )
    elif name is None:
        found = f"it has no name, and [delayed] environment is {here!r} here: no dispatcher takes a message"
        remedy = f"if it is no copy of another environment's store, name it: {_environment(conn_id, tables, here)}"
    else:
        found = (
            f"it is of environment {name!r}, and [delayed] environment is {here!r} here: no dispatcher takes a message"
        )
        remedy = (
            f"if it is a copy, cancel what must not reach its real recipients; then bind it to {here!r}:"
            f" {_environment(conn_id, tables, here)}. If it is the store of {name!r}, correct the connection here"
        )
    return Finding(
        state=state,
        resource=f"store {conn_id!r}",
        argument="environment",
        found=found,
        code=ENVIRONMENT,
        remedy=remedy,
    )


def check_environment(connection: Connection, tables: Tables, conn_id: str, here: str | None) -> None:
    """Check that a dispatcher of this host may dispatch from the store; without a name it may.

    :raises WrongEnvironment: the store is of another environment, or of none.
    """
    if here is not None and (difference := environment_difference(connection, tables, conn_id, here)):
        raise WrongEnvironment(str(difference))


def record_environment(connection: Connection, tables: Tables, name: str) -> str | None:
    """Record the environment of a complete store, and return the former one."""
    version = tables.version
    former: str | None = connection.execute(select(version.c.Environment).with_for_update()).scalar_one()
    connection.execute(update(version).values(Environment=name))
    return former


def _environment(conn_id: str, tables: Tables, environment: str) -> str:
    name, schema = tables.messages.name, tables.messages.schema
    options = (["--table", name] if name != TABLE else []) + (["--schema", schema] if schema else [])
    return shlex.join(["airflow", "delayed", "environment", "--store-conn-id", conn_id, *options, environment])


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


def record_version(connection: Connection, tables: Tables, environment: str | None = None) -> None:
    """Record this release's version in complete tables that record none.

    :param environment: of a new store.
    """
    if recorded_version(connection, tables) is None:
        values = {"Version": VERSION, "UsableFrom": USABLE_FROM, "At": database_time(connection)}
        connection.execute(insert(tables.version).values(**values, Environment=environment))
