"""Messages that have left the store, as the table of remembered ids has them. No body and no header is read."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Select, and_, exists, not_, or_, select

from airflow_delayed.store import cancelled
from airflow_delayed.store.database import slices
from airflow_delayed.store.filters import CANCELLED, Conditions, MessageFilter
from airflow_delayed.store.leases import DEAD_LETTERED, DISPATCHED, FIRST_ID
from airflow_delayed.store.records import Remembered, of_runs, origin_of
from airflow_delayed.store.schema import Tables

_COLUMNS = ("Id", "Outcome", "At", "Destination", "Time", "Dispatcher", "Tag", "DeliverConnId")


def by_ids(connection: Connection, tables: Tables, ids: Sequence[str], now: datetime) -> list[Remembered]:
    """Return the records of these ids, also of ids whose messages a dispatcher has leased."""
    if not ids:
        return []
    past, found = tables.past, list[Remembered]()
    statement = _records(tables).order_by(past.c.Id)
    for some in slices(ids):
        found += [
            _record(row, now) for row in connection.execute(statement.where(past.c.Id.in_(some), past.c.Id >= FIRST_ID))
        ]
    return found


def newest(
    connection: Connection,
    tables: Tables,
    wanted: MessageFilter,
    states: Sequence[str],
    now: datetime,
    *,
    ids: Sequence[str] | None,
    behind: tuple[datetime, str] | None,
    limit: int,
) -> list[Remembered]:
    """Return messages that have left the store, the last one first, and by id where several left at one time.

    :param states: "dispatched", "cancelled" or both.
    :param ids: only these; up to 1000.
    :param behind: time and id of the record behind which to begin.
    """
    past = tables.past
    # a leased message looks like a dispatched one, but is still there
    there = (exists().where(table.c.Id == past.c.Id) for table in (tables.messages, tables.failed))
    outcomes = [*states, DEAD_LETTERED] if DISPATCHED in states else states
    conditions: Conditions = [past.c.Outcome.in_(outcomes), *map(not_, there)]
    conditions += wanted.stable_conditions(tables, past)
    if ids is not None:
        conditions.append(past.c.Id.in_(ids))
    if behind is not None:
        at, message_id = behind
        later = and_(past.c.At == at, past.c.Id > message_id)
        # the first condition lets an index on At be used
        conditions += [past.c.At <= at, or_(past.c.At < at, later)]
    statement = _records(tables).where(*conditions).order_by(past.c.At.desc(), past.c.Id)
    return [_record(row, now) for row in connection.execute(statement.limit(limit))]


def _records(tables: Tables) -> Select[Any]:
    past, runs = tables.past, tables.runs
    columns = [past.c[name] for name in _COLUMNS]
    until = cancelled.kept_until(tables).label("Until")
    return select(*columns, until, *of_runs(tables)).select_from(past.outerjoin(runs, past.c.Run == runs.c.Seq))


def _record(row: Sequence[Any], now: datetime) -> Remembered:
    message_id, outcome, at, destination, due_at, dispatcher, tag, deliver_conn_id, until, *of_run = row
    state = DISPATCHED if outcome == DEAD_LETTERED else outcome
    restorable = state == CANCELLED and until is not None and until > now
    return Remembered(
        message_id=message_id,
        state=state,
        at=at,
        destination=destination,
        due_at=due_at,
        dispatcher=dispatcher,
        tag=tag,
        deliver_conn_id=deliver_conn_id,
        restorable_until=until if restorable else None,
        origin=origin_of(*of_run) if of_run[0] is not None else None,
    )
