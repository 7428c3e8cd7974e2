"""Forgetting ids that were remembered for long enough."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Connection, or_, select

from airflow_delayed.store import leases
from airflow_delayed.store.claims import IDS
from airflow_delayed.store.schema import Tables


def forget_old(connection: Connection, tables: Tables, before: datetime, now: datetime) -> int:
    """Forget up to 1000 ids of which nothing was written since ``before``, but those that are held; return how many."""
    past = tables.past
    old = (
        select(past.c.Id)
        .where(past.c.At < before, or_(past.c.ClaimedUntil.is_(None), past.c.ClaimedUntil <= now))
        .order_by(past.c.At)
        .limit(IDS)
        .with_for_update(skip_locked=True)
        .with_hint(past, "WITH (READPAST, UPDLOCK, ROWLOCK)", "mssql")
    )
    ids = list(connection.execute(old).scalars())
    leases.forget(connection, tables, sorted(ids))
    return len(ids)
