"""Putting messages into the store, and what happens to ids that it knows already.

An id is known while its message waits, while a dispatcher hands it over, after it failed for good or expired, and for
as long as it is remembered to have been handed over or cancelled. The same id with the same content is a duplicate,
wherever it is. The same id with other content, or for another connection, is

- with "error" a :class:`~airflow_delayed.errors.MessageConflict`,
- with "keep" a duplicate: what is stored stays,
- with "replace" put in place of what waits or has failed, and refused where it comes too late. It keeps when the
  first of that id was stored.

Nobody brings back what was cancelled: it is a duplicate, and with "replace" and other content refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Table, select

from airflow_delayed.errors import MessageConflict, some
from airflow_delayed.identity import digest_of
from airflow_delayed.message import DelayedMessage
from airflow_delayed.store import claims, leases, notice
from airflow_delayed.store.arrays import among
from airflow_delayed.store.conflicts import OnConflict
from airflow_delayed.store.contention import Overtaken
from airflow_delayed.store.schema import Tables

Row = Mapping[str, Any]


@dataclass(slots=True)
class Placed:
    """What became of ids; all others are duplicates."""

    new: set[str] = field(default_factory=set)
    replaced: set[str] = field(default_factory=set)
    #: To be replaced, and too late for it.
    refused: set[str] = field(default_factory=set)


def place(
    connection: Connection,
    tables: Tables,
    rows: Mapping[str, Row],
    on_conflict: OnConflict,
    deliver_conn_id: str | None,
    *,
    fresh: bool = False,
) -> Placed:
    """Store rows, given by id and ordered by it: whoever stores the same ones waits for the other, and none for both.

    :param fresh: none of the ids is expected to wait here already.
    :raises sqlalchemy.exc.IntegrityError: with ``fresh``, one does; the transaction is to be made anew without it.
    :raises MessageConflict: with "error"; the transaction is to be rolled back.
    :raises Overtaken: others change the same rows at this moment; the transaction is to be made anew.
    """
    now = claims.database_time(connection)
    given = {name: {**row, "StoredAt": now} for name, row in rows.items()}
    if fresh:
        claims.insert_all(connection, tables.messages, list(given.values()))
        placed = Placed(new=set(given))
    else:
        placed = Placed(new=claims.insert_new(connection, tables.messages, list(given.values())))
    old = [name for name in given if name not in placed.new]
    _look_back(connection, tables, given, placed, on_conflict)
    there = claims.present(connection, tables.messages, old)
    if gone := [name for name in old if name not in there]:
        raise Overtaken(some(gone, separator=", "))
    other = [name for name in old if there[name] != _content(given[name])]
    if other and on_conflict == "error":
        raise conflict("are stored already with other content or for another connection", other)
    if other and on_conflict == "replace":
        free = _free(connection, tables, other, now)
        placed.refused.update(name for name in other if name not in free)
        _replace(connection, tables, tables.messages, [given[name] for name in other if name in free])
        placed.replaced |= free
    if written := placed.new | placed.replaced:
        notice.give(connection, tables.messages, min(given[name]["Time"] for name in written), [deliver_conn_id])
    return placed


def _look_back(
    connection: Connection, tables: Tables, given: Mapping[str, Row], placed: Placed, on_conflict: OnConflict
) -> None:
    """Take back what was just stored and is known from before; whoever makes it known has removed it first."""
    names = [name for name in given if name in placed.new]
    # who cancels, erases or purges a failed message has its row, and is waited for; its memory is looked at after that
    failed = claims.present(connection, tables.failed, names, lock=on_conflict == "replace")
    past = leases.remembered(connection, tables, names)
    other = {name for name, found in failed.items() if found != _content(given[name])}
    changed = {
        name
        for name, (digest, _) in past.items()
        if name not in failed and digest is not None and digest != given[name]["Digest"]
    }
    if on_conflict == "error":
        if other:
            raise conflict("have failed before with other content or for another connection", sorted(other))
        if sent := sorted(name for name in changed if past[name][1] == leases.HANDED_OVER):
            raise conflict("were handed over already with other content", sent)
    if on_conflict == "replace":
        placed.refused |= changed
        placed.replaced |= other
        _replace(connection, tables, tables.failed, [given[name] for name in sorted(other)])
    known = (failed.keys() | past.keys()) - placed.replaced
    claims.remove(connection, tables.messages, sorted(known))
    placed.new -= known | placed.replaced


def _free(connection: Connection, tables: Tables, names: Sequence[str], now: datetime) -> set[str]:
    """Lock what waits, once nobody else has its row, and return what no dispatcher is handing over."""
    locked = {row["Id"] for row in leases.lock(connection, tables, names, wait=True)}
    if gone := [name for name in names if name not in locked]:
        raise Overtaken(some(gone, separator=", "))
    return locked - leases.held(connection, tables, sorted(locked), now)


def _replace(connection: Connection, tables: Tables, table: Table, rows: Sequence[Row]) -> None:
    """Put rows in the place of those with their ids that are in a table, and in that of messages."""
    names = [row["Id"] for row in rows]
    first = _stored_at(connection, table, names)
    rows = [{**row, "StoredAt": first[row["Id"]], "ReplacedAt": row["StoredAt"]} for row in rows]
    for one in {table, tables.messages}:
        claims.remove(connection, one, names)
    # of a dispatcher that has died; should it live after all, it finds that it holds this message no longer
    leases.forget(connection, tables, names)
    if claims.insert_new(connection, tables.messages, rows) != set(names):
        raise Overtaken(some(names, separator=", "))


def _stored_at(connection: Connection, table: Table, names: Sequence[str]) -> dict[str, datetime | None]:
    found: dict[str, datetime | None] = {}
    for some_ in claims.slices(names):
        there = select(table.c.Id, table.c.StoredAt).where(among(connection, table.c.Id, some_))
        found.update((row.Id, row.StoredAt) for row in connection.execute(there))
    return found


def conflicting(
    connection: Connection, tables: Tables, digests: Mapping[str, bytes], deliver_conn_id: str | None
) -> list[str]:
    """Return the ids that are known with other content, or wait or failed for another connection."""
    found: set[str] = set()
    names = list(digests)
    for table in (tables.messages, tables.failed):
        there = claims.present(connection, table, names)
        found.update(name for name in there if there[name] != (digests[name], deliver_conn_id))
    for name, (digest, outcome) in leases.remembered(connection, tables, names).items():
        if outcome == leases.HANDED_OVER and digest is not None and digest != digests[name]:
            found.add(name)
    return sorted(found)


def known(connection: Connection, tables: Tables, names: Sequence[str]) -> set[str]:
    """Return the ids that the store knows, whatever their content is."""
    found = set(leases.remembered(connection, tables, names))
    for table in (tables.messages, tables.failed):
        found.update(claims.present(connection, table, names))
    return found


def note_sent(connection: Connection, tables: Tables, messages: Sequence[DelayedMessage]) -> None:
    """Remember messages that their transport took without their having been here; what is known of an id stays."""
    now = claims.database_time(connection)
    rows = {
        message.message_id: {
            "Id": message.message_id,
            "Destination": message.destination,
            "Time": message.due_at,
            "Digest": digest_of(message),
            "Outcome": leases.HANDED_OVER,
            "At": now,
        }
        for message in messages
    }
    claims.insert_new(connection, tables.past, [rows[name] for name in sorted(rows)])


def _content(row: Row) -> tuple[bytes, str | None]:
    return row["Digest"], row["DeliverConnId"]


def conflict(problem: str, ids: Sequence[str]) -> MessageConflict:
    """Return the error for ids whose content differs."""
    return MessageConflict(
        f"{len(ids):,} message ids {problem}: {some(ids, separator=', ')}. Give what is a new message a new id; or pass"
        " on_conflict='keep' to leave the old one as it is, or 'replace' to put the new one in its place"
    )
