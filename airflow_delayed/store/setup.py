"""Installing a store's tables: creation, and comparison with this version."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from sqlalchemy import Connection, Dialect, Engine, Index, Table, inspect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.types import NullType, TypeEngine

from airflow_delayed.clock import next_sleep
from airflow_delayed.delivery import Finding, State, TopologyReport
from airflow_delayed.store.dialects import dialect_of
from airflow_delayed.store.engine import retried
from airflow_delayed.store.network import limit_reads
from airflow_delayed.store.schema import Tables, queue_table
from airflow_delayed.store.version import is_usable, record_version, version_difference

T = TypeVar("T")

#: Tries of an install: where each change of a table commits by itself, two installs can conflict at each change.
_TRIES = 12
#: The first and the longest sleep between two tries, in seconds: to change a table with many rows takes long.
_FIRST_SLEEP, _LONGEST_SLEEP = 0.02, 0.5
#: Seconds for which MySQL's drivers wait while an index of millions of rows is made.
_INDEX_SECONDS = 3600
#: Collations are written in many ways, and are not compared.
_COLLATE = re.compile(r"( CHARACTER SET \S+)?( COLLATE \S+)?$")
#: MariaDB adds the display width of a number, which is no part of the type.
_WIDTH = re.compile(r"^(\w*INT\w*)\(\d+\)")


def install(
    engine: Engine,
    tables: Tables,
    queues: Sequence[str] = (),
    *,
    conn_id: str,
    create_queues: bool = False,
    dry_run: bool = False,
) -> TopologyReport:
    """Create missing tables and indexes, and return what was found and done; differences stay as they are.

    Senders and dispatchers may be at work: no table stays locked, and nothing waits for a lock, for more than a second.
    """
    limit_reads(engine, _INDEX_SECONDS)
    with engine.connect().execution_options(read_only=True) as connection:
        dialect_of(connection).check_encoding(connection)

    def work(connection: Connection) -> TopologyReport:
        difference = version_difference(connection, tables, conn_id)
        done: list[Finding] = []
        ours = list(tables)
        for table, findings in _compared(connection, tables, queues, difference):
            if table is None or (table not in ours and not create_queues):
                done += findings
            else:
                done += _planned(findings) if dry_run else _create(connection, table, findings)
        if not dry_run and difference is None and not any(_is_unready(one) for one in done):
            record_version(connection, tables)
        return TopologyReport(tuple(done))

    report = _read(engine, work) if dry_run else _repeated(engine, work)
    findings = [one if dry_run else _finished(engine, tables, one) for one in report]
    return TopologyReport(tuple(findings))


def _of(table: Table) -> str:
    return f"table {table.fullname}"


def _planned(findings: Iterable[Finding]) -> list[Finding]:
    return [_with_state(one, State.PLANNED) if one.state is State.MISSING else one for one in findings]


def _is_unready(finding: Finding) -> bool:
    ready = finding.state in (State.OK, State.CREATED) or finding.resource.startswith("index ")
    return not ready and finding.destination is None


def _finished(engine: Engine, tables: Tables, finding: Finding) -> Finding:
    if finding.state is State.MISSING and finding.resource.startswith("index "):
        indexes = (index for table in tables for index in table.indexes)
        index = next(index for index in indexes if finding.resource == f"index {index.name}")
        _make_index(engine, index)
        return _with_state(finding, State.CREATED)
    return finding


def _make_index(engine: Engine, index: Index) -> None:
    dialect = dialect_of(engine)

    def work(connection: Connection) -> None:
        assert index.table is not None
        # another install may have made it meanwhile
        if any(one.resource == f"index {index.name}" for one in compare(connection, index.table)):
            dialect.create_index(connection, index)

    _repeated(dialect.for_indexes(engine), work)


def verify(engine: Engine, tables: Tables, queues: Sequence[str] = (), *, conn_id: str) -> TopologyReport:
    """Compare the tables with those of this version; that they are newer is a finding of a store's health."""

    def work(connection: Connection) -> TopologyReport:
        difference = version_difference(connection, tables, conn_id)
        found = _compared(connection, tables, queues, None if is_usable(difference) else difference)
        return TopologyReport(tuple(one for _, findings in found for one in findings))

    return _read(engine, work)


def _compared(
    connection: Connection, tables: Tables, queues: Sequence[str], difference: Finding | None
) -> Iterator[tuple[Table | None, Sequence[Finding]]]:
    """Yield each table (None for the version) and its findings; a table is compared when the caller asks for it."""
    if difference is not None:
        yield None, [difference]
    if is_usable(difference):
        for table in tables:
            yield table, compare(connection, table)
    for table in _queue_tables(connection, tables, queues):
        yield table, compare(connection, table, destination=table.name, names_only=True)


def _queue_tables(connection: Connection, tables: Tables, queues: Sequence[str]) -> list[Table]:
    return [queue_table(name, tables.messages.schema, dialect_of(connection)) for name in queues]


def _read(engine: Engine, work: Callable[[Connection], TopologyReport]) -> TopologyReport:
    with engine.connect().execution_options(read_only=True) as connection:
        return work(connection)


def _repeated(engine: Engine, work: Callable[[Connection], T], sleep: Callable[[float], None] = time.sleep) -> T:
    for failures in range(1, _TRIES):
        try:
            return retried(engine, work)
        except DBAPIError as error:
            # another install has just created the same, or this user may not; the next try shows which
            if error.connection_invalidated:
                raise
        sleep(next_sleep(failures, first=_FIRST_SLEEP, longest=_LONGEST_SLEEP))
    return retried(engine, work)


def compare(
    connection: Connection,
    table: Table,
    *,
    destination: str | None = None,
    names_only: bool = False,
) -> list[Finding]:
    """Compare a table's columns and indexes with this version; additional columns are no difference.

    :param destination: the destination, for a queue table.
    :param names_only: do not compare indexes, and warn of types that differ: messages may go through such a table.
    """
    what = _of(table)
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
        # a counter of NServiceBus may be shorter
        elif found != wanted and column.key != "seq":
            findings.append(
                Finding(
                    state=State.WARNING,
                    resource=what,
                    argument=f"column {column.name}",
                    found=f"is {found}, and an install makes it {wanted}: messages may not fit, or come out changed",
                    destination=destination,
                    code="differs",
                    remedy="if you do not know why, drop the table and install again",
                )
            )
    if not names_only:
        key = inspector.get_pk_constraint(table.name, schema=table.schema)["constrained_columns"]
        wanted_key = [column.name for column in table.primary_key]
        if key != wanted_key:
            findings.append(
                Finding(state=State.DIFFERS, resource=what, argument="primary key", wanted=wanted_key, found=key)
            )
        invalid = dialect_of(connection).invalid_indexes(connection, table)
        there_already = inspector.get_indexes(table.name, schema=table.schema)
        indexed = [index["column_names"] for index in there_already if index["name"] not in invalid]
        for index in sorted(table.indexes, key=lambda index: str(index.name)):
            names = [column.name for column in index.columns]
            if not any(one[: len(names)] == names for one in indexed) and there.keys() >= set(names):
                findings.append(Finding(state=State.MISSING, resource=f"index {index.name}"))
    return findings or [Finding(state=State.OK, resource=what, destination=destination)]


def _create(connection: Connection, table: Table, findings: Sequence[Finding]) -> list[Finding]:
    if any(one.state is State.MISSING and one.resource.startswith("table ") for one in findings):
        table.create(connection, checkfirst=True)
        return [_with_state(one, State.CREATED) for one in findings]
    return list(findings)


def _with_state(finding: Finding, state: State) -> Finding:
    return Finding(state=state, resource=finding.resource, argument=finding.argument, destination=finding.destination)


def _type_name(kind: TypeEngine[Any], dialect: Dialect) -> str:
    # a type that SQLAlchemy does not know, or none, as SQLite permits
    if isinstance(kind, NullType):
        return "another type"
    return _WIDTH.sub(r"\1", _COLLATE.sub("", kind.compile(dialect=dialect)))
