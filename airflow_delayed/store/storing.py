"""Storing messages in bulk, and changing one's mind about them. No Airflow here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from enum import Enum
from itertools import islice
from typing import Any

from sqlalchemy import Connection, Engine, Table, and_, or_, select
from sqlalchemy.exc import IntegrityError

from airflow_delayed.delivery import SendReport
from airflow_delayed.errors import MessageConflict, TransportUnavailable, some
from airflow_delayed.message import DelayedMessage
from airflow_delayed.store import claims
from airflow_delayed.store.rows import StoredMessage, to_row, to_stored

#: Rows a transaction when storing, and rows a page when listing.
CHUNK = 1000
#: How often a chunk is stored anew because others store or remove the same ids meanwhile.
TRIES = 5

_SHOWN = ("Id", "Destination", "Time", "DeliverConnId", "Tag", "ExpiresAt", "RetryCount", "StoredAt")


class Outcome(str, Enum):
    """What became of an id that was to be changed."""

    CANCELLED = "cancelled"
    #: Never stored, or handed over, or cancelled before.
    ABSENT = "absent"


def store(engine: Engine, table: Table, messages: Iterable[DelayedMessage], deliver_conn_id: str | None) -> SendReport:
    """Store messages, each chunk of 1000 in a transaction of its own; those that are there already are counted.

    :raises MessageConflict: an id is there with other content, or is to be delivered by another connection; nothing
        of its chunk was stored, those before it were.
    :raises LimitExceeded: a message does not fit into the table.
    """
    report = SendReport()
    rest = iter(messages)
    while chunk := list(islice(rest, CHUNK)):
        report.merge(_store_chunk(engine, table, chunk, deliver_conn_id))
    return report


def _store_chunk(
    engine: Engine, table: Table, messages: Sequence[DelayedMessage], deliver_conn_id: str | None
) -> SendReport:
    rows: dict[str, dict[str, Any]] = {}
    conflicts = []
    for message in messages:
        row = to_row(message, deliver_conn_id)
        if rows.setdefault(message.message_id, row)["Digest"] != row["Digest"]:
            conflicts.append(message.message_id)
    if conflicts:
        raise _conflict("are given twice with different content", conflicts)
    # in one order everywhere, so that two who store the same ids wait for each other instead of locking up
    waiting = [rows[name] for name in sorted(rows)]
    stored: set[str] = set()
    for tries_left in reversed(range(TRIES)):
        try:
            with engine.begin() as connection:
                new, waiting = _insert(connection, table, waiting, deliver_conn_id)
        except IntegrityError:
            if not tries_left:
                raise
            continue  # another transaction stored one of the ids just now; it is seen in the next try
        stored |= new
        if not waiting:
            break
    else:
        raise TransportUnavailable(
            f"others keep storing and removing the same ids, such as {waiting[0]['Id']}; try again"
        )
    report = SendReport(duplicates=len(messages) - len(stored))
    for message in messages:
        if message.message_id in stored:
            stored.remove(message.message_id)
            report.add(message)
    return report


def _insert(
    connection: Connection, table: Table, rows: Sequence[dict[str, Any]], deliver_conn_id: str | None
) -> tuple[set[str], list[dict[str, Any]]]:
    """Return the ids stored, and the rows that neither could be stored nor were there: others removed them just now."""
    stored_at = claims.database_time(connection)
    new = claims.insert_new(connection, table, [{**row, "StoredAt": stored_at} for row in rows])
    old = {row["Id"]: row["Digest"] for row in rows if row["Id"] not in new}
    there = claims.present(connection, table, list(old))
    changed = [name for name in there if there[name] != (old[name], deliver_conn_id)]
    if changed:
        raise _conflict("are stored already with other content or for another connection", changed)
    return new, [row for row in rows if row["Id"] in old and row["Id"] not in there]


def conflicting(engine: Engine, table: Table, digests: Mapping[str, bytes], deliver_conn_id: str | None) -> list[str]:
    """Return the ids that are stored already with other content, or for another connection."""
    with engine.connect().execution_options(read_only=True) as connection:
        there = claims.present(connection, table, list(digests))
    return sorted(name for name, found in there.items() if found != (digests[name], deliver_conn_id))


def _conflict(problem: str, ids: Sequence[str]) -> MessageConflict:
    return MessageConflict(
        f"{len(ids):,} message ids {problem}: {some(ids, separator=', ')}. Give what is a new message a new id, or"
        " cancel the old one first"
    )


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
