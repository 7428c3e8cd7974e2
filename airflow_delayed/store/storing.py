"""Storing messages in bulk, and changing one's mind about them. No Airflow here."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from enum import Enum
from itertools import islice
from typing import Any

from sqlalchemy import Engine, Table, and_, or_, select

from airflow_delayed.delivery import SendReport
from airflow_delayed.errors import SHOWN, MessageConflict, some
from airflow_delayed.message import DelayedMessage
from airflow_delayed.store import claims
from airflow_delayed.store.conflicts import OnConflict
from airflow_delayed.store.contention import retried
from airflow_delayed.store.placing import place
from airflow_delayed.store.rows import StoredMessage, to_row, to_stored
from airflow_delayed.store.schema import Tables

log = logging.getLogger(__name__)

#: Rows a transaction when storing, and rows a page when listing.
CHUNK = 1000

_SHOWN = ("Id", "Destination", "Time", "DeliverConnId", "Tag", "ExpiresAt", "RetryCount", "StoredAt")


class Outcome(str, Enum):
    """What became of an id that was to be changed."""

    CANCELLED = "cancelled"
    #: Never stored, or handed over, or cancelled before.
    ABSENT = "absent"


def store(
    engine: Engine,
    tables: Tables,
    messages: Iterable[DelayedMessage],
    deliver_conn_id: str | None,
    *,
    on_conflict: OnConflict = "error",
) -> SendReport:
    """Store messages, each chunk of 1000 in a transaction of its own; those that are known already are counted.

    What cannot be replaced any more is counted, and the first few are named in the log.

    :param on_conflict: what to do with an id that is known with other content, see
        :mod:`airflow_delayed.store.placing`.
    :raises MessageConflict: an id is known with other content, or is to be delivered by another connection; nothing
        of its chunk was stored, those before it were.
    :raises LimitExceeded: a message does not fit into the table.
    :raises TransportUnavailable: others keep the same messages busy.
    """
    report = SendReport()
    refused: list[str] = []
    rest = iter(messages)
    try:
        while chunk := list(islice(rest, CHUNK)):
            report.merge(_store_chunk(engine, tables, chunk, deliver_conn_id, on_conflict, refused))
    finally:
        if refused:
            log.warning(
                "%s messages were not replaced, for they had been handed over or cancelled, or were being handed over;"
                " the first are %s",
                f"{report.refused:,}",
                ", ".join(refused),
            )
    return report


def _store_chunk(
    engine: Engine,
    tables: Tables,
    messages: Sequence[DelayedMessage],
    deliver_conn_id: str | None,
    on_conflict: OnConflict,
    refused: list[str],
) -> SendReport:
    rows: dict[str, dict[str, Any]] = {}
    conflicts = []
    for message in messages:
        row = to_row(message, deliver_conn_id)
        if rows.setdefault(message.message_id, row)["Digest"] != row["Digest"]:
            conflicts.append(message.message_id)
    if conflicts:
        raise MessageConflict(
            f"{len(conflicts):,} message ids are given twice with different content: {some(conflicts, separator=', ')}."
            " Give what is a new message a new id"
        )
    given = {name: rows[name] for name in sorted(rows)}
    placed = retried(engine, lambda connection: place(connection, tables, given, on_conflict, deliver_conn_id))
    report = SendReport(duplicates=len(messages))
    for message in messages:
        # of copies the first one counts
        if message.message_id in placed.new:
            placed.new.remove(message.message_id)
            report.add(message)
        elif message.message_id in placed.replaced:
            placed.replaced.remove(message.message_id)
            report.add_replaced(message)
        elif message.message_id in placed.refused:
            placed.refused.remove(message.message_id)
            report.refused += 1
            if len(refused) < SHOWN:
                refused.append(message.message_id)
    report.duplicates -= report.sent + report.replaced + report.refused
    return report


def listed(
    engine: Engine, table: Table, *, destination: str | None = None, tag: str | None = None
) -> Iterator[StoredMessage]:
    """Yield what waits, ordered by due time and id, in pages: no transaction stays open in between."""
    wanted = []
    if destination is not None:
        wanted.append(table.c.Destination == destination)
    if tag is not None:
        wanted.append(table.c.Tag == tag)
    after: tuple[datetime, str] | None = None
    while True:
        conditions = list(wanted)
        if after is not None:
            later = and_(table.c.Time == after[0], table.c.Id > after[1])
            conditions += [table.c.Time >= after[0], or_(table.c.Time > after[0], later)]
        statement = (
            select(*(table.c[name] for name in _SHOWN))
            .where(*conditions)
            .order_by(table.c.Time, table.c.Id)
            .limit(CHUNK)
        )
        with engine.connect().execution_options(read_only=True) as connection:
            page = [to_stored(dict(row._mapping)) for row in connection.execute(statement)]
        yield from page
        if len(page) < CHUNK:
            return
        after = (page[-1].due_at, page[-1].message_id)


def cancel(engine: Engine, table: Table, ids: Iterable[str]) -> dict[str, Outcome]:
    """Remove messages, and return for each id whether it came in time.

    Waits for a dispatcher that is just sending one of them.
    """
    outcomes = dict.fromkeys(ids, Outcome.ABSENT)
    with engine.begin() as connection:
        gone = claims.take_back(connection, table, list(outcomes))
    outcomes.update(dict.fromkeys(gone, Outcome.CANCELLED))
    return outcomes
