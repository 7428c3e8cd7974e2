"""Storing messages in bulk. No Airflow here."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any

from sqlalchemy import Connection, Engine

from airflow_delayed.delivery import SendReport
from airflow_delayed.errors import SHOWN, MessageConflict, some
from airflow_delayed.message import DelayedMessage
from airflow_delayed.origin import Origin
from airflow_delayed.store import placing, runs
from airflow_delayed.store.conflicts import OnConflict
from airflow_delayed.store.contention import retried
from airflow_delayed.store.placing import Placed
from airflow_delayed.store.rows import to_row
from airflow_delayed.store.schema import Tables

log = logging.getLogger(__name__)

#: Rows a transaction.
CHUNK = 2500


def store(
    engine: Engine,
    tables: Tables,
    messages: Iterable[DelayedMessage],
    deliver_conn_id: str | None,
    *,
    on_conflict: OnConflict = "error",
    origin: Origin | None = None,
) -> SendReport:
    """Store messages, each chunk of 2500 in a transaction of its own; those that are known already are counted.

    What cannot be replaced any more is counted, and the first few are named in the log.

    :param on_conflict: what to do with an id that is known with other content, see
        :mod:`airflow_delayed.store.placing`.
    :param origin: the run of a task that they come from; several may store for one at the same time.
    :raises MessageConflict: an id is known with other content, or is to be delivered by another connection; nothing
        of its chunk was stored, those before it were.
    :raises LimitExceeded: a message does not fit into the table.
    :raises TransportUnavailable: others keep the same messages busy.
    """
    report = SendReport()
    refused: list[str] = []
    rest = iter(messages)
    run: int | None = None
    fresh = True
    try:
        while chunk := list(islice(rest, CHUNK)):
            if origin is not None and run is None:
                run = _registered(engine, tables, origin)
            stored = _store_chunk(engine, tables, chunk, deliver_conn_id, run, on_conflict, refused, fresh=fresh)
            # a job that runs anew has the same ids, and most of them are there
            fresh = stored.sent == len(chunk)
            report.merge(stored)
    finally:
        if refused:
            log.warning(
                "%s messages were not replaced, for they had been handed over or cancelled, or were being handed over;"
                " the first are %s",
                f"{report.refused:,}",
                ", ".join(refused),
            )
    return report


def note_sent(engine: Engine, tables: Tables, messages: Sequence[DelayedMessage]) -> None:
    """Remember that messages were handed over that never waited here, each 2500 in a transaction of its own.

    :raises TransportUnavailable: others keep the same messages busy.
    """
    rest = iter(messages)
    while chunk := list(islice(rest, CHUNK)):
        retried(engine, partial(placing.note_sent, tables=tables, messages=chunk))


def _registered(engine: Engine, tables: Tables, origin: Origin) -> int:
    return retried(engine, lambda connection: runs.register(connection, tables, origin))


def _store_chunk(
    engine: Engine,
    tables: Tables,
    messages: Sequence[DelayedMessage],
    deliver_conn_id: str | None,
    run: int | None,
    on_conflict: OnConflict,
    refused: list[str],
    *,
    fresh: bool,
) -> SendReport:
    given = _rows(messages, deliver_conn_id, run)

    def work(connection: Connection) -> Placed:
        nonlocal fresh
        first, fresh = fresh, False  # what is done anew expects nothing
        return placing.place(connection, tables, given, on_conflict, deliver_conn_id, fresh=first)

    placed = retried(engine, work)
    report = SendReport()
    if len(placed.new) == len(messages):
        report.add_all(messages)
        return report
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
        else:
            report.duplicates += 1
    return report


def _rows(
    messages: Sequence[DelayedMessage], deliver_conn_id: str | None, run: int | None
) -> dict[str, dict[str, Any]]:
    """Return the rows of messages by their ids, ordered by these.

    :raises MessageConflict: two have one id and different content.
    """
    rows: dict[str, dict[str, Any]] = {}
    conflicts = []
    for message in messages:
        row = to_row(message, deliver_conn_id, run)
        if rows.setdefault(message.message_id, row)["Digest"] != row["Digest"]:
            conflicts.append(message.message_id)
    if conflicts:
        raise MessageConflict(
            f"{len(conflicts):,} message ids are given twice with different content: {some(conflicts, separator=', ')}."
            " Give what is a new message a new id"
        )
    return {name: rows[name] for name in sorted(rows)}
