"""procrastinate's part in the benchmarks of the store; run by store_peers.py in the peers' virtual environment.

Its own asynchronous connector. "claim" is fetch_job and finish_job, one job at a time, as its worker does; finished
jobs stay, as they do by default.
"""

from __future__ import annotations

import asyncio
import sys
from datetime import datetime, timedelta, timezone

from measured import measure_async
from procrastinate import App, PsycopgConnector
from procrastinate.jobs import Status

BATCH = 1000
BODY = "x" * 200


async def main(action: str, url: str, count: int, server: int) -> None:
    app = App(connector=PsycopgConnector(conninfo=url))

    @app.task(name="remind", queue="orders")
    def remind(body: str) -> None:
        """Is not run here."""

    later = remind.configure(schedule_at=datetime.now(timezone.utc) + timedelta(hours=1))

    async def store() -> int:
        deferrer = later if action == "store" else remind.configure()
        for start in range(0, count, BATCH):
            await deferrer.batch_defer_async(*({"body": BODY} for _ in range(start, min(start + BATCH, count))))
        return count

    async def claim() -> int:
        manager, done = app.job_manager, 0
        worker = await manager.register_worker()
        while done < count and (job := await manager.fetch_job(None, worker)) is not None:
            await manager.finish_job(job, Status.SUCCEEDED, delete_job=False)
            done += 1
        return done

    async with app.open_async():
        if action == "claim":
            await measure_async(server, claim)
            return
        await app.schema_manager.apply_schema_async()
        await (store() if action == "fill" else measure_async(server, store))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
