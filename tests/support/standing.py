"""Brings messages of a store into the states that a dispatcher leaves them in."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.store.api import DISPATCHED
from airflow_delayed.store.records import remove_rows
from airflow_delayed.store.schema import Tables


def lock(connection: Connection, tables: Tables, *ids: str) -> list[dict[str, Any]]:
    """Lock messages as a change does, except for rows that another transaction has locked; return what is in them."""
    messages = tables.messages
    columns = [messages.c[name] for name in ("Id", "Destination", "Time", "Digest")]
    rows = select(*columns).where(messages.c.Id.in_(ids)).order_by(messages.c.Id).with_for_update(skip_locked=True)
    return [dict(row) for row in connection.execute(rows).mappings()]


def record(
    connection: Connection,
    tables: Tables,
    rows: Iterable[dict[str, Any]],
    outcome: str,
    at: datetime,
    **lease: object,
) -> None:
    """Remember messages, in place of an earlier record; with Dispatcher and ClaimedUntil it is a lease."""
    past, records = tables.past, [{**row, "Outcome": outcome, "At": at, **lease} for row in rows]
    if records:
        connection.execute(delete(past).where(past.c.Id.in_([row["Id"] for row in records])))
        connection.execute(insert(past), records)


def hold(hook: DelayedStoreHook, *ids: str, lease: timedelta = timedelta(hours=1), dispatcher: str = "d") -> set[str]:
    """Claim messages as a dispatcher does, and return the ids of the unclaimed ones."""
    past, now = hook.tables.past, hook.now()
    with hook.engine.begin() as connection:
        rows = lock(connection, hook.tables, *ids)
        leased = select(past.c.Id).where(past.c.Id.in_(ids), past.c.ClaimedUntil > now)
        others = set(connection.execute(leased).scalars())
        rows = [row for row in rows if row["Id"] not in others]
        record(connection, hook.tables, rows, DISPATCHED, now, Dispatcher=dispatcher, ClaimedUntil=now + lease)
    return {row["Id"] for row in rows}


def renew(hook: DelayedStoreHook, *ids: str, dispatcher: str) -> int:
    """Extend leases by an hour, as their dispatcher does; return how many it still had."""
    past, until = hook.tables.past, hook.now() + timedelta(hours=1)
    own = update(past).where(past.c.Id.in_(ids), past.c.Dispatcher == dispatcher)
    with hook.engine.begin() as connection:
        return connection.execute(own.values(ClaimedUntil=until)).rowcount


def release(hook: DelayedStoreHook, *ids: str) -> None:
    """End the leases of messages that were not delivered."""
    past = hook.tables.past
    with hook.engine.begin() as connection:
        connection.execute(delete(past).where(past.c.Id.in_(ids)))


def settle(hook: DelayedStoreHook, *ids: str) -> None:
    """Remove messages that were dispatched; their leases now say that they were."""
    with hook.engine.begin() as connection:
        remove_rows(connection, hook.tables.messages, ids)


def mark_dispatched(hook: DelayedStoreHook, *ids: str) -> None:
    assert hold(hook, *ids) == set(ids)
    settle(hook, *ids)


def give_up(hook: DelayedStoreHook, *ids: str, reason: str = "failed", error: str = "queue 'q' is not there") -> None:
    """Move messages to the failed ones."""
    messages, failed, now = hook.tables.messages, hook.tables.failed, hook.now()
    with hook.engine.begin() as connection:
        rows = connection.execute(select(messages).where(messages.c.Id.in_(ids))).mappings().all()
        extra = {"Reason": reason, "FailedAt": now, "RetryCount": 3, "LastError": error}
        connection.execute(insert(failed), [{**row, **extra} for row in rows])
        remove_rows(connection, messages, ids)


def pause(hook: DelayedStoreHook, ids: Iterable[str], span: timedelta) -> None:
    """Note a failure, and that they are tried again after a span."""
    messages = hook.tables.messages
    failure = {"RetryCount": 1, "NextTry": hook.now() + span, "LastError": "refused"}
    with hook.engine.begin() as connection:
        connection.execute(update(messages).where(messages.c.Id.in_(list(ids))).values(**failure))
