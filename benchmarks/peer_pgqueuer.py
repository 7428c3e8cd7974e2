"""pgqueuer's part in the benchmarks of the store; run by store_peers.py in the peers' virtual environment.

By asyncpg, its own choice. "claim" is dequeue and log_jobs, 500 a batch, the bare queries; "work" is its QueueManager
with the same batch and a job that does nothing. Both keep a log of what was done.
"""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta
from uuid import uuid4

import asyncpg
from measured import measure_async
from pgqueuer import PgQueuer
from pgqueuer.models import Job
from pgqueuer.ports.repository import EntrypointExecutionParameter
from pgqueuer.queries import Queries
from pgqueuer.types import QueueExecutionMode

CLAIMED = 500
BATCH = 1000
BODY = b"x" * 200


async def main(action: str, url: str, count: int, server: int) -> None:
    connection = await asyncpg.connect(url)
    queries = Queries.from_asyncpg_connection(connection)
    later = timedelta(hours=1) if action == "store" else None

    async def store() -> int:
        for start in range(0, count, BATCH):
            size = min(BATCH, count - start)
            await queries.enqueue(["orders"] * size, [BODY] * size, [0] * size, [later] * size)
        return count

    async def claim() -> int:
        done, me, entrypoints = 0, uuid4(), {"orders": EntrypointExecutionParameter(concurrency_limit=0)}
        while done < count:
            jobs = await queries.dequeue(CLAIMED, entrypoints, me, None, timedelta(seconds=30))
            if not jobs:
                break
            await queries.log_jobs([(job, "successful", None) for job in jobs])
            done += len(jobs)
        return done

    async def work() -> int:
        done = 0
        worker = PgQueuer.from_asyncpg_connection(connection)

        @worker.entrypoint("orders")
        async def remind(job: Job) -> None:
            nonlocal done
            done += 1

        await worker.run(batch_size=CLAIMED, mode=QueueExecutionMode.drain)
        return done

    if action in ("claim", "work"):
        await measure_async(server, claim if action == "claim" else work)
    else:
        await queries.install()
        await (store() if action == "fill" else measure_async(server, store))
    await connection.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
