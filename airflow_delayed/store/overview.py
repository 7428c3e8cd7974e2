"""What an operator sees at a glance: bounded counts, failures by cause, and a search by the beginning of a text.

Each answer reads a bounded number of rows, by an index, however many messages the store has. No Airflow here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from sqlalchemy import Column, Connection, Engine, func, or_, select

from airflow_delayed.store import pauses
from airflow_delayed.store.dialects import database_time, dialect_of
from airflow_delayed.store.filters import BOTH, MessageFilter, MessageState, moments
from airflow_delayed.store.pauses import not_paused
from airflow_delayed.store.records import delivered_by
from airflow_delayed.store.remembered_ids import FIRST_ID
from airflow_delayed.store.schema import Tables

#: Failed messages that are looked at, the first by due time.
_MAX_FAILURES = 10_000
#: Groups of failures that are returned, the largest ones.
MAX_GROUPS = 50
#: Values of one field that a search returns.
MAX_MATCHES = 5
#: No text that begins with another comes behind that other one with this character.
_LAST = "\U0010ffff"

SearchField = Literal["id", "tag", "destination", "dag_id"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureGroup:
    """Failed messages of one cause and destination."""

    reason: str | None
    destination: str
    #: None: a queue table in the store's database.
    deliver_conn_id: str | None
    count: int
    #: The first of them, by id.
    first_id: str
    #: When the last of them failed.
    latest: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchMatch:
    """A value of a field that is the text of a search, or begins with it; or an id whose key is that text."""

    field: SearchField
    value: str
    exact: bool


def next_due(engine: Engine, tables: Tables) -> datetime | None:
    """Return when the next of the messages that are not due yet falls due; None: there is none."""
    time = tables.messages.c.Time
    with dialect_of(engine).read_only(engine) as connection:
        soonest: datetime | None = connection.execute(
            select(func.min(time)).where(time > database_time(connection))
        ).scalar_one()
    return soonest


def oldest_due_seconds(engine: Engine, tables: Tables) -> float:
    """Return for how long the message has been due that was due first, and is not paused; 0: there is none."""
    messages = tables.messages.c
    with dialect_of(engine).read_only(engine) as connection:
        now = database_time(connection)
        free = not_paused(tables, pauses.read(connection, tables))
        alive = or_(messages.ExpiresAt.is_(None), messages.ExpiresAt > now)
        # not a minimum, whose plan might be to read all messages
        first = select(messages.Time).where(messages.Time <= now, alive, *free).order_by(messages.Time).limit(1)
        oldest: datetime | None = connection.execute(first).scalar_one_or_none()
    return 0.0 if oldest is None else (now - oldest).total_seconds()


def count_overdue(
    connection: Connection,
    tables: Tables,
    deliver_conn_ids: Sequence[str | None],
    now: datetime,
    late: timedelta,
    limit: int,
) -> int:
    """Count messages that have been due for so long and could be sent, up to a limit; no paused ones."""
    table = tables.messages
    free = not_paused(tables, pauses.read(connection, tables))
    alive = or_(table.c.ExpiresAt.is_(None), table.c.ExpiresAt > now)
    tried = or_(table.c.NextTry.is_(None), table.c.NextTry <= now)
    chosen = or_(*(delivered_by(table, name) for name in deliver_conn_ids))
    overdue = select(table.c.Id).where(table.c.Time <= now - late, chosen, alive, tried, *free).limit(limit)
    return int(connection.execute(select(func.count()).select_from(overdue.subquery())).scalar_one())


def matching(engine: Engine, tables: Tables, wanted: MessageFilter, limit: int) -> int:
    """Count the messages that match a filter, failed ones too, up to a limit."""
    with dialect_of(engine).read_only(engine) as connection:
        values, counted = moments(database_time(connection)), 0
        for where in BOTH:
            table = tables.of(where)
            conditions = wanted.conditions(tables, where)
            if conditions is not None and counted < limit:
                some = select(table.c.Id).where(*conditions).limit(limit - counted).subquery()
                counted += int(connection.execute(select(func.count()).select_from(some), values).scalar_one())
    return counted


def failures(engine: Engine, tables: Tables) -> tuple[Sequence[FailureGroup], bool]:
    """Group the first 10,000 failed messages by cause, the largest first, 50 at most; return whether there are more."""
    failed = tables.failed
    columns = (failed.c.LastError, failed.c.Destination, failed.c.DeliverConnId, failed.c.Id, failed.c.FailedAt)
    look = select(*columns, failed.c.Reason).order_by(failed.c.Time, failed.c.Id).limit(_MAX_FAILURES).subquery()
    by = (look.c.LastError, look.c.Destination, look.c.DeliverConnId)
    count = func.count().label("many")
    groups = (
        select(*by, count, func.min(look.c.Id).label("first"), func.max(look.c.FailedAt).label("latest"))
        .where(look.c.Reason == MessageState.FAILED.value)
        .group_by(*by)
        .order_by(count.desc(), func.min(look.c.Id))
        .limit(MAX_GROUPS)
    )
    with dialect_of(engine).read_only(engine) as connection:
        found = [
            FailureGroup(
                reason=row.LastError,
                destination=row.Destination,
                deliver_conn_id=row.DeliverConnId,
                count=int(row.many),
                first_id=row.first,
                latest=row.latest,
            )
            for row in connection.execute(groups)
        ]
        looked_at = connection.execute(select(func.count()).select_from(look)).scalar_one()
    return found, len(found) == MAX_GROUPS or looked_at == _MAX_FAILURES


def search(engine: Engine, tables: Tables, text: str) -> list[SearchMatch]:
    """Return up to five ids, tags, destinations and DAGs each that begin with a text."""
    messages, failed, past = tables.messages, tables.failed, tables.past
    searched: dict[SearchField, Sequence[Column[Any]]] = {
        "id": (messages.c.Id, failed.c.Id, past.c.Id),
        "tag": (messages.c.Tag, failed.c.Tag, past.c.Tag),
        "destination": (messages.c.Destination, failed.c.Destination),
        "dag_id": (tables.runs.c.DagId,),
    }
    found = list[SearchMatch]()
    with dialect_of(engine).read_only(engine) as connection:
        for field, columns in searched.items():
            values = sorted({value for column in columns for value in _beginning_with(connection, column, text)})
            found += [SearchMatch(field=field, value=one, exact=one == text) for one in values[:MAX_MATCHES]]
    return found


def _beginning_with(connection: Connection, column: Column[Any], text: str) -> list[str]:
    """Return the first values of a column that begin with a text; each is one step in its index, unlike DISTINCT."""
    found: list[str] = []
    # the table of remembered ids has marks too, before all ids
    behind = column >= (max(text, FIRST_ID) if column.name == "Id" else text)
    while len(found) < MAX_MATCHES:
        statement = select(column).where(behind, column < text + _LAST).order_by(column).limit(1)
        value = connection.execute(statement).scalar()
        if value is None:
            break
        found.append(value)
        behind = column > value
    return found
