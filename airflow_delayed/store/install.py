"""Comparing tables with what they should be, and making those that are missing. What is there is never changed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Dialect, Table, inspect
from sqlalchemy.types import TypeEngine

from airflow_delayed.delivery import Finding, State

#: Collations are written in many ways and are no part of the comparison.
_COLLATE = re.compile(r"( CHARACTER SET \S+)?( COLLATE \S+)?$")
#: MariaDB tells how wide a number is shown, which is no part of the type.
_WIDTH = re.compile(r"^(\w*INT\w*)\(\d+\)")


def compare(
    connection: Connection, table: Table, *, destination: str | None = None, names_only: bool = False
) -> list[Finding]:
    """Compare a table's columns and indexes with what they should be; more columns than wanted are no difference.

    :param destination: the destination that the table is, if it is one.
    :param names_only: do not compare types and indexes.
    """
    what = f"table {table.fullname}"
    inspector = inspect(connection)
    if not inspector.has_table(table.name, schema=table.schema):
        return [Finding(state=State.MISSING, resource=what, destination=destination)]
    there = {column["name"]: column["type"] for column in inspector.get_columns(table.name, schema=table.schema)}
    findings = []
    for column in table.columns:
        wanted = _type_name(column.type, connection.dialect)
        found = _type_name(there[column.name], connection.dialect) if column.name in there else None
        if found is None or (found != wanted and not names_only):
            findings.append(
                Finding(
                    state=State.DIFFERS,
                    resource=what,
                    argument=f"column {column.name}",
                    wanted=wanted,
                    found=found,
                    destination=destination,
                )
            )
    if not names_only:
        key = inspector.get_pk_constraint(table.name, schema=table.schema)["constrained_columns"]
        wanted_key = [column.name for column in table.primary_key]
        if key != wanted_key:
            findings.append(
                Finding(state=State.DIFFERS, resource=what, argument="primary key", wanted=wanted_key, found=key)
            )
        indexed = [index["column_names"] for index in inspector.get_indexes(table.name, schema=table.schema)]
        for index in sorted(table.indexes, key=lambda index: str(index.name)):
            names = [column.name for column in index.columns]
            if not any(one[: len(names)] == names for one in indexed) and there.keys() >= set(names):
                findings.append(Finding(state=State.MISSING, resource=f"index {index.name}"))
    return findings or [Finding(state=State.OK, resource=what, destination=destination)]


def create(connection: Connection, table: Table, findings: Sequence[Finding]) -> list[Finding]:
    """Make what is missing, and return the findings as they are afterwards."""
    done = []
    for finding in findings:
        if finding.state is State.MISSING and finding.resource.startswith("table "):
            table.create(connection, checkfirst=True)
        elif finding.state is State.MISSING:
            next(index for index in table.indexes if finding.resource == f"index {index.name}").create(connection)
        done.append(with_state(finding, State.CREATED) if finding.state is State.MISSING else finding)
    return done


def with_state(finding: Finding, state: State) -> Finding:
    """Return the finding with another state."""
    return Finding(state=state, resource=finding.resource, argument=finding.argument, destination=finding.destination)


def _type_name(kind: TypeEngine[Any], dialect: Dialect) -> str:
    return _WIDTH.sub(r"\1", _COLLATE.sub("", kind.compile(dialect=dialect)))
