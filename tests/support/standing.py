"""Brings messages of a store into the states that a dispatcher leaves them in."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

from sqlalchemy import insert, select

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.store import claims, leases
from airflow_delayed.store.by_id import update_rows


def hold(hook: DelayedStoreHook, *ids: str, lease: timedelta = timedelta(hours=1), dispatcher: str = "d") -> set[str]:
    """Claim messages as a dispatcher does, and return those that it got."""
    with hook.engine.begin() as connection:
        now = claims.database_time(connection)
        rows = leases.lock(connection, hook.tables, ids)
        held = leases.held(connection, hook.tables, ids, now)
        mine = [row for row in rows if row["Id"] not in held]
        leases.note(connection, hook.tables, mine, leases.HANDED_OVER, now, dispatcher=dispatcher, until=now + lease)
    return {row["Id"] for row in mine}


def settle(hook: DelayedStoreHook, *ids: str) -> None:
    """Remove messages that were handed over; their leases now say that they were."""
    with hook.engine.begin() as connection:
        claims.remove(connection, hook.tables.messages, ids)


def hand_over(hook: DelayedStoreHook, *ids: str) -> None:
    assert hold(hook, *ids) == set(ids)
    settle(hook, *ids)


def give_up(hook: DelayedStoreHook, *ids: str, reason: str = "failed", error: str = "queue 'q' is not there") -> None:
    """Move messages to the failed ones."""
    messages, failed = hook.tables.messages, hook.tables.failed
    with hook.engine.begin() as connection:
        now = claims.database_time(connection)
        rows = connection.execute(select(messages).where(messages.c.Id.in_(ids))).mappings().all()
        extra = {"Reason": reason, "FailedAt": now, "RetryCount": 3, "LastError": error}
        connection.execute(insert(failed), [{**row, **extra} for row in rows])
        claims.remove(connection, messages, ids)


def pause(hook: DelayedStoreHook, ids: Iterable[str], span: timedelta) -> None:
    """Note a failure, and that they are tried again after a span."""
    with hook.engine.begin() as connection:
        now = claims.database_time(connection)
        failure = {"RetryCount": 1, "NextTry": now + span, "LastError": "refused"}
        connection.execute(update_rows(hook.tables.messages, list(ids)).values(**failure))
