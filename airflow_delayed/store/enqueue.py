"""Storing messages in bulk, and the rules for ids that the store knows already. No Airflow here.

The store knows an id while its message waits or is in flight, after the message failed or expired, and for as long as
the id is remembered as dispatched or cancelled. A message with a known id and the same content is a duplicate. With
other content, or for another connection, ``on_conflict`` decides:

- "error" raises :class:`~airflow_delayed.errors.MessageConflict`.
- "keep" counts a duplicate: the stored message stays.
- "replace" replaces a message that waits or has failed; the new message keeps the time at which the first message of
  that id was stored. A message that is in flight, dispatched or cancelled stays, and the new one is counted as not
  replaced.

A cancelled message never comes back: the same message is a duplicate, and other content does not replace it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Any

from sqlalchemy import Connection, Engine, Table, select

from airflow_delayed.delivery import SendReport
from airflow_delayed.errors import SHOWN, MessageConflict, some
from airflow_delayed.identity import Origin, digest_of
from airflow_delayed.message import DelayedMessage
from airflow_delayed.store import remembered_ids, runs
from airflow_delayed.store.dialects import database_time, dialect_of
from airflow_delayed.store.engine import Overtaken, retried
from airflow_delayed.store.policy import OnConflict
from airflow_delayed.store.records import insert_new_rows, insert_rows, present_rows, remove_rows, to_row
from airflow_delayed.store.schema import Tables

log = logging.getLogger(__name__)

#: Rows a transaction.
_CHUNK = 2500

Row = Mapping[str, Any]


@dataclass(slots=True)
class EnqueueResult:
    """The ids that were stored, replaced, or not replaced; all others are duplicates."""

    new: set[str] = field(default_factory=set)
    replaced: set[str] = field(default_factory=set)
    #: With "replace": too late, because the message was in flight, dispatched or cancelled.
    not_replaced: set[str] = field(default_factory=set)


def enqueue(
    engine: Engine,
    tables: Tables,
    messages: Iterable[DelayedMessage],
    deliver_conn_id: str | None,
    *,
    on_conflict: OnConflict = "error",
    origin: Origin | None = None,
    until_due: bool = False,
) -> SendReport:
    """Store messages, each chunk of 2500 in a transaction of its own, and count duplicates.

    Messages that were not replaced are counted, and the log names the first few.
    """
    report = SendReport()
    not_replaced: list[str] = []
    rest = iter(messages)
    run: int | None = None
    fresh = True
    try:
        while chunk := list(islice(rest, _CHUNK)):
            if origin is not None and run is None:
                run = _registered(engine, tables, origin)
            rows = message_rows(chunk, deliver_conn_id, run, until_due=until_due)
            stored = _enqueue_chunk(
                engine, tables, chunk, rows, deliver_conn_id, on_conflict, not_replaced, fresh=fresh
            )
            # a job that runs again sends ids of which most are stored already
            fresh = stored.sent == len(chunk)
            report.merge(stored)
    except MessageConflict as error:
        error.report = report
        raise
    finally:
        if not_replaced:
            log.warning(
                "%s messages were not replaced: they had been dispatched or cancelled, or were in flight;"
                " the first are %s",
                f"{report.not_replaced:,}",
                ", ".join(not_replaced),
            )
    return report


def note_sent(
    engine: Engine,
    tables: Tables,
    messages: Sequence[DelayedMessage],
    deliver_conn_id: str | None = None,
    *,
    origin: Origin | None = None,
) -> None:
    """Remember messages that another transport has confirmed and that never waited here; 2500 in a transaction."""
    run = None if origin is None else _registered(engine, tables, origin)
    rest = iter(messages)
    while chunk := list(islice(rest, _CHUNK)):
        labels = {"DeliverConnId": deliver_conn_id, "Run": run}
        retried(engine, partial(_note_sent, tables=tables, messages=chunk, of_all=labels))


def _registered(engine: Engine, tables: Tables, origin: Origin) -> int:
    return retried(engine, lambda connection: runs.register(connection, tables, origin))


def _enqueue_chunk(
    engine: Engine,
    tables: Tables,
    messages: Sequence[DelayedMessage],
    rows: Mapping[str, Row],
    deliver_conn_id: str | None,
    on_conflict: OnConflict,
    not_replaced: list[str],
    *,
    fresh: bool,
) -> SendReport:
    def work(connection: Connection) -> EnqueueResult:
        nonlocal fresh
        first, fresh = fresh, False  # the repetition may find ids that another transaction stored
        return enqueue_rows(connection, tables, rows, on_conflict, deliver_conn_id, fresh=first)

    result = retried(engine, work)
    report = SendReport()
    if len(result.new) == len(messages):
        report.add_all(messages)
        return report
    for message in messages:
        # of several messages with one id, the first counts as stored
        if message.message_id in result.new:
            result.new.remove(message.message_id)
            report.add(message)
        elif message.message_id in result.replaced:
            result.replaced.remove(message.message_id)
            report.add_replaced(message)
        elif message.message_id in result.not_replaced:
            result.not_replaced.remove(message.message_id)
            report.not_replaced += 1
            if len(not_replaced) < SHOWN:
                not_replaced.append(message.message_id)
        else:
            report.duplicates += 1
    return report


def message_rows(
    messages: Sequence[DelayedMessage], deliver_conn_id: str | None, run: int | None, *, until_due: bool
) -> dict[str, dict[str, Any]]:
    """Return the rows of messages by id, in the order of the ids.

    A claim goes by the time of the next try as well as by the due time: a first try at the due time keeps a message
    from being dispatched ahead of it.
    """
    rows: dict[str, dict[str, Any]] = {}
    conflicts = []
    for message in messages:
        row = to_row(message, deliver_conn_id, run)
        if until_due:
            row["NextTry"] = message.due_at
        if rows.setdefault(message.message_id, row)["Digest"] != row["Digest"]:
            conflicts.append(message.message_id)
    if conflicts:
        raise MessageConflict(
            f"{len(conflicts):,} message ids are given twice with different content: {some(conflicts, separator=', ')}."
            " Give what is a new message a new id"
        )
    return {name: rows[name] for name in sorted(rows)}


def enqueue_rows(
    connection: Connection,
    tables: Tables,
    rows: Mapping[str, Row],
    on_conflict: OnConflict,
    deliver_conn_id: str | None,
    *,
    fresh: bool = False,
) -> EnqueueResult:
    """Store rows in the order of their ids, so that two transactions with the same ids never deadlock.

    :param fresh: expect that no message with one of these ids waits here.
    :raises sqlalchemy.exc.IntegrityError: with ``fresh``, one waits; roll back, and repeat without ``fresh``.
    :raises Overtaken: another transaction changes the same rows at this moment; roll back, and repeat.
    """
    now = database_time(connection)
    given = {name: {**row, "StoredAt": now} for name, row in rows.items()}
    if fresh:
        insert_rows(connection, tables.messages, list(given.values()))
        result = EnqueueResult(new=set(given))
    else:
        result = EnqueueResult(new=insert_new_rows(connection, tables.messages, list(given.values())))
    old = [name for name in given if name not in result.new]
    _look_back(connection, tables, given, result, on_conflict)
    there = present_rows(connection, tables.messages, old)
    if gone := [name for name in old if name not in there]:
        raise Overtaken(some(gone, separator=", "))
    other = [name for name in old if there[name] != _content(given[name])]
    if other and on_conflict == "error":
        raise conflict("are stored already with other content or for another connection", other)
    if other and on_conflict == "replace":
        free = _lock_unleased(connection, tables, other, now)
        result.not_replaced.update(name for name in other if name not in free)
        _replace(connection, tables, tables.messages, [given[name] for name in other if name in free])
        result.replaced |= free
    return result


def _look_back(
    connection: Connection, tables: Tables, given: Mapping[str, Row], result: EnqueueResult, on_conflict: OnConflict
) -> None:
    """Remove rows just stored if their ids turn out to be known: another transaction first removes, then remembers."""
    names = [name for name in given if name in result.new]
    # a transaction that cancels, erases or purges a failed message locks its row, and remembers its id before it ends
    failed = present_rows(connection, tables.failed, names, lock=on_conflict == "replace")
    past = remembered_ids.find(connection, tables, names)
    other = {name for name, found in failed.items() if found != _content(given[name])}
    changed = {
        name
        for name, (digest, _) in past.items()
        if name not in failed and digest is not None and digest != given[name]["Digest"]
    }
    if on_conflict == "error":
        if other:
            raise conflict("have failed before with other content or for another connection", sorted(other))
        if sent := sorted(name for name in changed if past[name][1] in remembered_ids.SENT):
            raise conflict("were dispatched already with other content", sent)
    if on_conflict == "replace":
        result.not_replaced |= changed
        result.replaced |= other
        _replace(connection, tables, tables.failed, [given[name] for name in sorted(other)])
    known = (failed.keys() | past.keys()) - result.replaced
    remove_rows(connection, tables.messages, sorted(known))
    result.new -= known | result.replaced


def _lock_unleased(connection: Connection, tables: Tables, names: Sequence[str], now: datetime) -> set[str]:
    locked = {row["Id"] for row in remembered_ids.lock_messages(connection, tables, names, wait=True)}
    if gone := [name for name in names if name not in locked]:
        raise Overtaken(some(gone, separator=", "))
    return locked - remembered_ids.in_flight(connection, tables, sorted(locked), now)


def _replace(connection: Connection, tables: Tables, table: Table, rows: Sequence[Row]) -> None:
    names = [row["Id"] for row in rows]
    first = _stored_at(connection, table, names)
    rows = [{**row, "StoredAt": first[row["Id"]], "ReplacedAt": row["StoredAt"]} for row in rows]
    for one in {table, tables.messages}:
        remove_rows(connection, one, names)
    # the leases of a dispatcher that has died, or else finds that it has lost them
    remembered_ids.forget(connection, tables, names)
    if insert_new_rows(connection, tables.messages, rows) != set(names):
        raise Overtaken(some(names, separator=", "))


def _stored_at(connection: Connection, table: Table, names: Sequence[str]) -> dict[str, datetime | None]:
    found: dict[str, datetime | None] = {}
    dialect = dialect_of(connection)
    for some_ in dialect.portions(names):
        there = select(table.c.Id, table.c.StoredAt).where(dialect.among(table.c.Id, some_))
        found.update((row.Id, row.StoredAt) for row in connection.execute(there))
    return found


def conflicting(
    connection: Connection, tables: Tables, digests: Mapping[str, bytes], deliver_conn_id: str | None
) -> list[str]:
    """Return the ids that are known with other content, or that wait or failed for another connection."""
    found: set[str] = set()
    names = list(digests)
    for table in (tables.messages, tables.failed):
        there = present_rows(connection, table, names)
        found.update(name for name in there if there[name] != (digests[name], deliver_conn_id))
    for name, (digest, outcome) in remembered_ids.find(connection, tables, names).items():
        if outcome in remembered_ids.SENT and digest is not None and digest != digests[name]:
            found.add(name)
    return sorted(found)


def known(connection: Connection, tables: Tables, names: Sequence[str]) -> set[str]:
    """Return the ids that the store knows, whatever their content is."""
    found = set(remembered_ids.find(connection, tables, names))
    for table in (tables.messages, tables.failed):
        found.update(present_rows(connection, table, names))
    return found


def _note_sent(
    connection: Connection, tables: Tables, messages: Sequence[DelayedMessage], of_all: Mapping[str, Any]
) -> None:
    now = database_time(connection)
    rows = {
        message.message_id: {
            "Id": message.message_id,
            "Destination": message.destination,
            "Time": message.due_at,
            "Digest": digest_of(message),
            "Outcome": remembered_ids.DISPATCHED,
            "At": now,
            "Tag": message.tag,
            **of_all,
        }
        for message in messages
    }
    insert_new_rows(connection, tables.past, [rows[name] for name in sorted(rows)])


def _content(row: Row) -> tuple[bytes, str | None]:
    return row["Digest"], row["DeliverConnId"]


def conflict(problem: str, ids: Sequence[str]) -> MessageConflict:
    """Return the error for ids whose content differs."""
    return MessageConflict(
        f"{len(ids):,} message ids {problem}: {some(ids, separator=', ')}. Give what is a new message a new id; or pass"
        " on_conflict='keep' to leave the old one as it is, or 'replace' to put the new one in its place"
    )
