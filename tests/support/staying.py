"""A trigger in an event loop of its own, to be killed; see support.forked."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from multiprocessing.connection import Connection

from airflow_delayed.store.policy import DispatchPolicy
from airflow_delayed.triggers import store_dispatch
from support.dispatching import Journal


def stay(pipe: Connection, *, conn_id: str, schema: str | None, journal: str, hangs_after: int | None = None) -> None:
    """Run a trigger until nothing is left, and say how it ended."""
    asyncio.run(_stay(pipe, conn_id, schema, journal, hangs_after))


async def _stay(pipe: Connection, conn_id: str, schema: str | None, journal: str, hangs_after: int | None) -> None:
    store_dispatch.delivery_for = lambda conn_id, clock: Journal(journal, clock, hangs_after=hangs_after)
    policy = DispatchPolicy(claim_timeout=timedelta(seconds=1), batch_size=50)
    trigger = store_dispatch.StoreDispatchTrigger(
        conn_id, ["broker"], until="empty", schema=schema, policy=policy.state()
    )
    async for event in trigger.run():
        pipe.send(event.payload)
