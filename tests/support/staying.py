"""A trigger in an event loop of its own, to be killed: python -m support.staying CONN_ID SCHEMA JOURNAL."""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import timedelta

from airflow_delayed.store.policy import DispatchPolicy
from airflow_delayed.triggers import store_dispatch
from support.dispatching import Journal


async def main(conn_id: str, schema: str, journal: str) -> None:
    store_dispatch._transport = lambda conn_id, clock: Journal(journal, clock)
    policy = DispatchPolicy(claim_timeout=timedelta(seconds=1), batch_size=50)
    trigger = store_dispatch.StoreDispatchTrigger(
        conn_id, ["broker"], until="empty", schema=schema or None, policy=policy.state()
    )
    async for event in trigger.run():
        print(json.dumps(event.payload), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
