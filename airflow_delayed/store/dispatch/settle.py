"""Settling a batch in the caller's transaction: each message is removed, retried later, failed, or released.

A delivered message is deleted from the table of messages; its row in ``_past``, written by the claim, then means that
its id is remembered. For every other message the row in ``_past`` is deleted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Integer,
    Table,
    any_,
    bindparam,
    case,
    delete,
    insert,
    literal,
    or_,
    select,
    update,
)
from sqlalchemy.sql.dml import ReturningDelete

from airflow_delayed.store import bulk, remembered_ids
from airflow_delayed.store.database import slices
from airflow_delayed.store.dialects import dialect_of
from airflow_delayed.store.records import remove_rows
from airflow_delayed.store.schema import MAX_ERROR, Tables

Row = dict[str, Any]

#: The reasons in the table of failed messages.
FAILED = "failed"
EXPIRED = "expired"
#: The largest value of the column RetryCount.
MAX_RETRY_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class PlannedRetry:
    """A message whose attempt failed, and whose next attempt is not before ``next_try``.

    :param counted: the attempt is one of the few that a message has; not if its destination took no messages at all.
    """

    row: Row
    reason: str
    next_try: datetime
    counted: bool = True


@dataclass(slots=True)
class BatchOutcome:
    """The outcomes of the messages of one batch.

    :param delivered: sent and confirmed.
    :param dead_lettered: given up, and delivered to the error destination.
    :param retry: failed this time, with a further attempt.
    :param failed: given up, each with the reason.
    :param expired: not sent before they expired.
    :param released: not attempted, and free for any dispatcher.
    :param at: the database's time right after the batch was sent.
    """

    delivered: list[Row] = field(default_factory=list)
    dead_lettered: list[Row] = field(default_factory=list)
    retry: list[PlannedRetry] = field(default_factory=list)
    failed: list[tuple[Row, str]] = field(default_factory=list)
    expired: list[Row] = field(default_factory=list)
    released: list[Row] = field(default_factory=list)
    at: datetime | None = None

    @property
    def removed(self) -> list[Row]:
        """The messages that leave the store; their ids are remembered."""
        return [*self.delivered, *self.dead_lettered]

    @property
    def others(self) -> list[Row]:
        """The messages that stay in the store, without a lease."""
        return [
            *(planned.row for planned in self.retry),
            *(row for row, _ in self.failed),
            *self.expired,
            *self.released,
        ]

    @property
    def count(self) -> int:
        """The number of messages."""
        return len(self.removed) + len(self.others)

    def only(self, rows: Sequence[Row]) -> BatchOutcome:
        """Return the outcomes of these messages alone."""
        ids = {row["Id"] for row in rows}
        return BatchOutcome(
            [row for row in self.delivered if row["Id"] in ids],
            [row for row in self.dead_lettered if row["Id"] in ids],
            [planned for planned in self.retry if planned.row["Id"] in ids],
            [(row, reason) for row, reason in self.failed if row["Id"] in ids],
            [row for row in self.expired if row["Id"] in ids],
            [row for row in self.released if row["Id"] in ids],
            self.at,
        )


def write_outcomes(connection: Connection, tables: Tables, outcomes: Mapping[str, BatchOutcome], now: datetime) -> None:
    """Write the outcomes of messages of which a dispatcher has leases.

    Where a lease may have ended, pass only messages that
    :func:`airflow_delayed.store.remembered_ids.still_claimed` returns.

    :param outcomes: by the name under which each batch is leased.
    """
    # in one statement: for each answer of the database this thread waits also for the thread that sends
    remove(connection, tables, [row for outcome in outcomes.values() for row in outcome.removed])
    for holder, outcome in outcomes.items():
        for ids in slices(sorted(row["Id"] for row in outcome.dead_lettered)):
            leased = dialect_of(connection).update_rows(tables.past, ids).where(tables.past.c.Dispatcher == holder)
            connection.execute(leased.values(Outcome=remembered_ids.DEAD_LETTERED))
        _note_failures(connection, tables, outcome, now)
        remembered_ids.release(connection, tables, [row["Id"] for row in outcome.others], holder)


def write_delivered(
    connection: Connection, tables: Tables, outcome: BatchOutcome, dispatcher: str, now: datetime
) -> None:
    """Write the outcomes of messages that this transaction has locked and delivered."""
    for rows, what in (
        (outcome.delivered, remembered_ids.DISPATCHED),
        (outcome.dead_lettered, remembered_ids.DEAD_LETTERED),
    ):
        remembered_ids.record(connection, tables, rows, what, now, dispatcher=dispatcher)
    remove(connection, tables, outcome.removed)
    _note_failures(connection, tables, outcome, now)
    remembered_ids.forget(connection, tables, sorted(row["Id"] for row in outcome.others))


def _note_failures(connection: Connection, tables: Tables, outcome: BatchOutcome, now: datetime) -> None:
    _count_failures(connection, tables, outcome)
    for rows, reason in (([row for row, _ in outcome.failed], FAILED), (outcome.expired, EXPIRED)):
        _move(connection, tables, rows, reason, now)


def remove(connection: Connection, tables: Tables, rows: Sequence[Row]) -> None:
    """Delete messages that this dispatcher has leased or locked; on PostgreSQL by their ``ctid``, without a search.

    :raises RowsMoved: the table was rewritten meanwhile (VACUUM FULL, CLUSTER); the caller rolls back, and calls this
        again with rows that have no ``ctid``.
    """
    table, ids = tables.messages, [row["Id"] for row in rows]
    if not ids:
        return
    if dialect_of(connection).claims_at_once and all("ctid" in row for row in rows):
        places = {"places": bulk.array(row["ctid"] for row in rows)}
        if set(connection.execute(_remove_from(table), places).scalars().all()) != set(ids):
            raise RowsMoved
        return
    remove_rows(connection, table, sorted(ids))


@lru_cache(maxsize=32)
def _remove_from(table: Table) -> ReturningDelete[Any]:
    return delete(table).where(bulk.own_place() == any_(bulk.given_places())).returning(table.c.Id)


class RowsMoved(Exception):
    """Rows are no longer at the places where they were claimed."""


def _count_failures(connection: Connection, tables: Tables, outcome: BatchOutcome) -> None:
    table = tables.messages
    counted = [
        {
            "of": planned.row["Id"],
            "reason": shortened(planned.reason),
            "next": planned.next_try,
            "more": int(planned.counted),
        }
        for planned in outcome.retry
    ]
    counted += [
        {"of": row["Id"], "reason": shortened(reason), "next": None, "more": 1} for row, reason in outcome.failed
    ]
    if counted:
        # another program may have written a negative number
        one = bindparam("more", type_=Integer())
        more = case(
            (table.c.RetryCount < 0, one),
            (table.c.RetryCount < MAX_RETRY_COUNT, table.c.RetryCount + one),
            else_=table.c.RetryCount,
        )
        statement = (
            update(table)
            .where(table.c.Id == bindparam("of"))
            .values(RetryCount=more, NextTry=bindparam("next"), LastError=bindparam("reason"))
        )
        connection.execute(statement, sorted(counted, key=lambda one: str(one["of"])))


def _move(connection: Connection, tables: Tables, rows: Sequence[Row], reason: str, now: datetime) -> None:
    table, failed, dialect = tables.messages, tables.failed, dialect_of(connection)
    names = [column.name for column in table.columns]
    for ids in slices(sorted(row["Id"] for row in rows)):
        # with another column: MariaDB reads all of a small table where the key's columns are enough
        there = select(table.c.Id, table.c.Time).where(table.c.Id.in_(ids)).order_by(table.c.Id)
        some = connection.execute(dialect.by_key(there.with_for_update(), table)).scalars().all()
        if not some:
            continue
        reason_and_time = literal(reason, failed.c.Reason.type), literal(now, failed.c.FailedAt.type)
        moved = select(*(table.c[name] for name in names), *reason_and_time).where(table.c.Id.in_(some))
        remove_rows(connection, failed, some)
        connection.execute(insert(failed).from_select([*names, "Reason", "FailedAt"], moved))
        remove_rows(connection, table, some)


def given_up(
    connection: Connection, tables: Tables, deliver_conn_ids: Sequence[str | None], since: datetime
) -> dict[str, str]:
    """Return the messages of these connections that were given up since a time: the reason of each by its id."""
    table = tables.failed
    listed: ColumnElement[bool] = table.c.DeliverConnId.in_([name for name in deliver_conn_ids if name is not None])
    if None in deliver_conn_ids:
        listed = or_(table.c.DeliverConnId.is_(None), listed)
    found = select(table.c.Id, table.c.LastError).where(table.c.Reason == FAILED, table.c.FailedAt >= since, listed)
    return {row.Id: row.LastError or "given up" for row in connection.execute(found)}


def shortened(reason: str) -> str:
    """Return a reason in the form of its column: one line of at most 1000 characters."""
    line = " ".join(reason.replace("\0", " ").split())
    return line if len(line) <= MAX_ERROR else f"{line[: MAX_ERROR - 1]}…"
