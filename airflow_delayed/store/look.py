"""Where messages are that are to be changed, their rows locked. No Airflow here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import Connection, Select, Table, case, literal, select, union_all

from airflow_delayed.store import claims
from airflow_delayed.store.by_id import by_key
from airflow_delayed.store.changes import Found
from airflow_delayed.store.criteria import Criteria
from airflow_delayed.store.schema import Tables
from airflow_delayed.store.states import given_up, state_of

_LOOKED_AT = ("Id", "Destination", "Time", "Digest", "DeliverConnId", "ExpiresAt", "NextTry")


def look(
    connection: Connection, tables: Tables, ids: Sequence[str], now: datetime, criteria: Criteria, *, lock: bool
) -> list[Found]:
    """Return where each id is, its row locked if nobody else has it, without those that a filter does not mean.

    The order of the statements matters: each sees what was committed before it. First the messages, then the failed
    ones; then those that are there and were passed over; then who holds a lease and what is remembered; and of what is
    only remembered, whether it is there by now.
    """
    found: dict[str, Found] = {}
    left_out: set[str] = set()
    asked = sorted(ids)
    for table in (tables.messages, tables.failed):
        rest = [message_id for message_id in asked if message_id not in found and message_id not in left_out]
        for row in _found(connection, tables, table, rest, criteria, lock=lock):
            if not row.pop("Meant"):
                left_out.add(row["Id"])
            else:
                where: Literal["messages", "failed"] = "failed" if table is tables.failed else "messages"
                found[row["Id"]] = Found(message_id=row["Id"], where=where, row=row)
    rest = [message_id for message_id in asked if message_id not in found and message_id not in left_out]
    for message_id in _there(connection, tables, rest):
        found[message_id] = Found(message_id=message_id, held=True)
    past = tables.past
    for some in claims.slices([message_id for message_id in asked if message_id not in left_out]):
        said = select(past.c.Id, past.c.Outcome, past.c.ClaimedUntil).where(past.c.Id.in_(some))
        for row_ in connection.execute(said):
            one = found.get(row_.Id)
            if one is None:
                found[row_.Id] = Found(message_id=row_.Id, where="past", remembered=row_.Outcome)
            elif one.where == "messages" and row_.ClaimedUntil is not None:
                held = row_.ClaimedUntil > now
                found[row_.Id] = replace(one, held=held, abandoned=not held)
    # what was stored and claimed since the first look has a lease, which looks as if it had been handed over
    for message_id in _there(connection, tables, [one.message_id for one in found.values() if one.where == "past"]):
        found[message_id] = Found(message_id=message_id, held=True)
    for message_id in asked:
        if message_id not in left_out:
            found.setdefault(message_id, Found(message_id=message_id))
    return [one for one in found.values() if _stands(one, criteria, now)]


def _found(
    connection: Connection, tables: Tables, table: Table, ids: Sequence[str], criteria: Criteria, *, lock: bool
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for some in claims.slices(ids):
        statement = (locking if lock else _looking_at)(tables, table, some, criteria)
        rows += [dict(row._mapping) for row in connection.execute(statement)]
    return rows


def _looking_at(tables: Tables, table: Table, ids: Sequence[str], criteria: Criteria) -> Select[Any]:
    """Return the query for these rows, of which Meant says whether a filter means them."""
    names = [*_LOOKED_AT, *(("Reason", "FailedAt") if "Reason" in table.c else ())]
    fixed = criteria.fixed(tables, table)
    meant = literal(1) if fixed is None else case((fixed, 1), else_=0)
    columns = [table.c[name] for name in names]
    return select(*columns, meant.label("Meant")).where(table.c.Id.in_(ids)).order_by(table.c.Id)


def locking(tables: Tables, table: Table, ids: Sequence[str], criteria: Criteria) -> Select[Any]:
    """Return the query that locks these rows, passing over those that another transaction has."""
    statement = _looking_at(tables, table, ids, criteria).with_for_update(skip_locked=True)
    return by_key(statement.with_hint(table, "WITH (READPAST, UPDLOCK, ROWLOCK)", "mssql"), table)


def _there(connection: Connection, tables: Tables, ids: Sequence[str]) -> set[str]:
    """Return the ids that are there after all: locked by others, or on their way from one table to the other."""
    found: set[str] = set()
    for some in claims.slices(ids):
        both = (select(table.c.Id).where(table.c.Id.in_(some)) for table in (tables.messages, tables.failed))
        found.update(connection.execute(union_all(*both)).scalars())
    return found


def _stands(found: Found, criteria: Criteria, now: datetime) -> bool:
    """Whether it still stands as the filter wants; who holds it decides otherwise."""
    if criteria.states is None or found.held or not found.row:
        return True
    if found.where == "failed":
        return given_up(found.row["Reason"]) in criteria.states
    return state_of({**found.row, "ClaimedUntil": None}, now) in criteria.states
