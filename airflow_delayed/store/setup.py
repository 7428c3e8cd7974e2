"""Making a store's tables, bringing older ones up, and looking whether they are as they should be."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence

from sqlalchemy import Connection, Engine, Table
from sqlalchemy.exc import DBAPIError

from airflow_delayed.backoff import next_sleep
from airflow_delayed.delivery import Finding, State, TopologyReport
from airflow_delayed.store import takeover, versions
from airflow_delayed.store.contention import retried
from airflow_delayed.store.install import compare, create, with_state
from airflow_delayed.store.queue_table import queue_table
from airflow_delayed.store.schema import Tables

log = logging.getLogger(__name__)

#: Where each change of a table stands by itself, two installs can be in each other's way at every one.
_TRIES = 12
#: Seconds between two tries: a change of a table with many rows takes its time.
_FIRST_SLEEP, _LONGEST_SLEEP = 0.02, 0.5


def install(
    engine: Engine,
    tables: Tables,
    queues: Sequence[str] = (),
    *,
    schema: str | None = None,
    create_queues: bool = False,
    dry_run: bool = False,
) -> TopologyReport:
    """Make what is missing, one table after the other, and return what was found and done; what differs stays as it is.

    It may be repeated, and run by several at once. Tables of an older version are brought up with their rows; of a
    newer one nothing is touched. The log has a warning for each table that somebody else owns, or that has triggers.

    :param queues: names of queue tables, made only with ``create_queues``.
    """

    def work(connection: Connection) -> TopologyReport:
        difference = versions.difference(connection, tables)
        done: list[Finding] = []
        ours = list(tables)
        if difference is not None and difference.code == versions.OLDER and not dry_run:
            versions.upgrade(connection, tables)
            done.append(with_state(difference, State.CREATED))
            difference = None
        for table, findings in _compared(connection, tables, queues, schema, difference):
            if table is not None and table not in ours and not create_queues:
                done += findings
            elif dry_run:
                done += (with_state(one, State.PLANNED) if one.state is State.MISSING else one for one in findings)
            elif table is None:
                done += findings
            else:
                done += create(connection, table, findings)
        if not dry_run and all(one.destination is not None for one in TopologyReport(tuple(done)).problems):
            versions.record(connection, tables)
        return TopologyReport(tuple(done))

    report = _read(engine, work) if dry_run else _repeated(engine, work)
    with engine.connect().execution_options(read_only=True) as connection:
        ours = [*tables, *(queue_table(name, schema, connection.dialect.name) for name in queues)]
        for warning in takeover.warnings(connection, ours):
            log.warning("%s", warning)
    return report


def look(engine: Engine, tables: Tables, queues: Sequence[str] = (), *, schema: str | None = None) -> TopologyReport:
    """Compare the tables with what they should be."""

    def work(connection: Connection) -> TopologyReport:
        found = _compared(connection, tables, queues, schema, versions.difference(connection, tables))
        return TopologyReport(tuple(finding for _, findings in found for finding in findings))

    return _read(engine, work)


def _compared(
    connection: Connection, tables: Tables, queues: Sequence[str], schema: str | None, difference: Finding | None
) -> Iterator[tuple[Table | None, Sequence[Finding]]]:
    """Yield each table, None for the version, and what was found, as soon as the one before was dealt with."""
    if difference is not None:
        yield None, [difference]
    if difference is None or difference.code == versions.OLDER:
        for table in tables:
            if difference is None or table is not tables.messages:
                yield table, compare(connection, table)
    for name in queues:
        table = queue_table(name, schema, connection.dialect.name)
        yield table, compare(connection, table, destination=name, names_only=True)


def _read(engine: Engine, work: Callable[[Connection], TopologyReport]) -> TopologyReport:
    with engine.connect().execution_options(read_only=True) as connection:
        return work(connection)


def _repeated(
    engine: Engine, work: Callable[[Connection], TopologyReport], sleep: Callable[[float], None] = time.sleep
) -> TopologyReport:
    for failures in range(1, _TRIES):
        try:
            return retried(engine, work)
        except DBAPIError as error:
            # another install made the same just now, or this one may not; the next try tells which
            if error.connection_invalidated:
                raise
        sleep(next_sleep(failures, first=_FIRST_SLEEP, longest=_LONGEST_SLEEP))
    return retried(engine, work)
