"""Writing down what became of a batch, in the caller's transaction: removed, to be tried again, failed, or free again.

What was handed over is deleted from the table of messages; its row in ``_past``, written when it was claimed, then
means that it is remembered. For all others the row in ``_past`` goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    Connection,
    Table,
    any_,
    bindparam,
    case,
    cast,
    delete,
    insert,
    literal,
    literal_column,
    select,
    update,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.sql.dml import ReturningDelete
from sqlalchemy.types import UserDefinedType

from airflow_delayed.store import leases
from airflow_delayed.store.by_id import by_key, delete_rows
from airflow_delayed.store.claims import slices
from airflow_delayed.store.schema import MAX_ERROR, Tables

Row = dict[str, Any]

#: Reasons in the table of failed messages.
FAILED = "failed"
EXPIRED = "expired"
#: Of the column RetryCount: it is not counted any further.
MAX_RETRY_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Again:
    """A message that is to be tried again, not before ``next_try``."""

    row: Row
    reason: str
    next_try: datetime


@dataclass(slots=True)
class Verdict:
    """What becomes of the messages of one batch."""

    #: Handed over.
    gone: list[Row] = field(default_factory=list)
    #: Given up, and handed over to the error destination.
    aside: list[Row] = field(default_factory=list)
    again: list[Again] = field(default_factory=list)
    #: With what went wrong.
    failed: list[tuple[Row, str]] = field(default_factory=list)
    expired: list[Row] = field(default_factory=list)
    untried: list[Row] = field(default_factory=list)
    #: When it was known: right after sending, by the database's clock.
    at: datetime | None = None

    @property
    def others(self) -> list[Row]:
        """All that is no longer held without being gone."""
        return [*(one.row for one in self.again), *(row for row, _ in self.failed), *self.expired, *self.untried]

    @property
    def count(self) -> int:
        """How many messages these are."""
        return len(self.gone) + len(self.aside) + len(self.others)

    def only(self, rows: Sequence[Row]) -> Verdict:
        """Return the same for some of the messages."""
        ids = {row["Id"] for row in rows}
        return Verdict(
            [row for row in self.gone if row["Id"] in ids],
            [row for row in self.aside if row["Id"] in ids],
            [one for one in self.again if one.row["Id"] in ids],
            [(row, reason) for row, reason in self.failed if row["Id"] in ids],
            [row for row in self.expired if row["Id"] in ids],
            [row for row in self.untried if row["Id"] in ids],
            self.at,
        )


def settle(connection: Connection, tables: Tables, verdict: Verdict, dispatcher: str, now: datetime) -> None:
    """Write down what became of messages that this dispatcher holds.

    Of messages that it may hold no longer only those are to be given that :func:`airflow_delayed.store.leases.kept`
    returns.
    """
    remove(connection, tables, [*verdict.gone, *verdict.aside])
    note_failures(connection, tables, verdict, now)
    leases.release(connection, tables, [row["Id"] for row in verdict.others], dispatcher)


def note_failures(connection: Connection, tables: Tables, verdict: Verdict, now: datetime) -> None:
    """Count failures, and move what is given up or has expired to the table of failed messages."""
    _count_failures(connection, tables, verdict)
    for rows, reason in (([row for row, _ in verdict.failed], FAILED), (verdict.expired, EXPIRED)):
        _move(connection, tables, rows, reason, now)


def remove(connection: Connection, tables: Tables, rows: Sequence[Row]) -> None:
    """Delete messages that this dispatcher holds, or has locked.

    On PostgreSQL by their place, which saves a search for each.

    :raises RowsMoved: the table was rewritten meanwhile (VACUUM FULL, CLUSTER); to be rolled back, and done again with
        rows that have no ``ctid``.
    """
    table, ids = tables.messages, [row["Id"] for row in rows]
    if not ids:
        return
    if connection.dialect.name == "postgresql" and all("ctid" in row for row in rows):
        # written as text, which is ten times as fast as a list that the driver has to look through
        places = '{"' + '","'.join([row["ctid"] for row in rows]) + '"}'
        if set(connection.execute(_remove_from(table), {"places": places}).scalars().all()) != set(ids):
            raise RowsMoved
        return
    for some in slices(sorted(ids)):
        connection.execute(delete_rows(table, some))


@lru_cache(maxsize=32)
def _remove_from(table: Table) -> ReturningDelete[Any]:
    places = cast(bindparam("places", type_=_Places()), postgresql.ARRAY(_Place()))
    return delete(table).where(literal_column("ctid") == any_(places)).returning(table.c.Id)


class RowsMoved(Exception):
    """Rows are no longer where they were claimed."""


class _Place(UserDefinedType[str]):
    """PostgreSQL's place of a row."""

    cache_ok = True

    def get_col_spec(self, **_: object) -> str:
        """Return the type's name."""
        return "tid"


class _Places(_Place):
    """Many of them, as the text that PostgreSQL reads an array from."""

    cache_ok = True

    def get_col_spec(self, **_: object) -> str:
        """Return the type's name."""
        return "tid[]"


def _count_failures(connection: Connection, tables: Tables, verdict: Verdict) -> None:
    """Count one failure more for messages, with its reason and the time of the next try."""
    table = tables.messages
    counted = [{"of": one.row["Id"], "reason": shortened(one.reason), "next": one.next_try} for one in verdict.again]
    counted += [{"of": row["Id"], "reason": shortened(reason), "next": None} for row, reason in verdict.failed]
    if counted:
        # somebody else may have written less than none
        more = case(
            (table.c.RetryCount < 0, 1),
            (table.c.RetryCount < MAX_RETRY_COUNT, table.c.RetryCount + 1),
            else_=table.c.RetryCount,
        )
        statement = (
            update(table)
            .where(table.c.Id == bindparam("of"))
            .values(RetryCount=more, NextTry=bindparam("next"), LastError=bindparam("reason"))
        )
        connection.execute(statement, sorted(counted, key=lambda one: str(one["of"])))


def _move(connection: Connection, tables: Tables, rows: Sequence[Row], reason: str, now: datetime) -> None:
    """Move messages, whole, to the table of failed ones; what was moved before stays there."""
    table, failed = tables.messages, tables.failed
    names = [column.name for column in table.columns]
    for ids in slices(sorted(row["Id"] for row in rows)):
        there = select(table.c.Id).where(table.c.Id.in_(ids)).order_by(table.c.Id)
        some = connection.execute(by_key(there, table).with_for_update()).scalars().all()
        if not some:
            continue
        said = literal(reason, failed.c.Reason.type), literal(now, failed.c.FailedAt.type)
        given = select(*(table.c[name] for name in names), *said).where(table.c.Id.in_(some))
        connection.execute(delete_rows(failed, some))
        connection.execute(insert(failed).from_select([*names, "Reason", "FailedAt"], given))
        connection.execute(delete_rows(table, some))


def shortened(reason: str) -> str:
    """Return a reason as its column takes it: one line, of at most 1000 characters."""
    line = " ".join(reason.replace("\0", " ").split())
    return line if len(line) <= MAX_ERROR else f"{line[: MAX_ERROR - 1]}…"
