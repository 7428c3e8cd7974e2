"""pgmq's part in the benchmarks of the store; run by store_peers.py in the peers' virtual environment.

Its Python client, which brings the extension's SQL and can load it without CREATE EXTENSION. "claim" is read_batch and
delete_batch, 500 a batch, which keeps nothing of what was done; "archive" is read_batch and archive_batch, its history.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from measured import measure
from pgmq import PGMQueue
from pgmq.install import install_pgmq_from_sql

QUEUE = "orders"
LEASE = 30
CLAIMED = 500
BATCH = 1000
BODY = {"body": "x" * 189}  # 200 bytes as JSON


def main(action: str, url: str, count: int, server: int) -> None:
    def store() -> int:
        for start in range(0, count, BATCH):
            size = min(BATCH, count - start)
            client.send_batch(QUEUE, [BODY] * size, delay=3600 if action == "store" else 0)
        return count

    def claim(remove: Callable[[str, list[int]], object]) -> int:
        done = 0
        while done < count and (found := client.read_batch(QUEUE, vt=LEASE, batch_size=CLAIMED)):
            remove(QUEUE, [message.msg_id for message in found])
            done += len(found)
        return done

    if action in ("fill", "store"):
        install_pgmq_from_sql(dsn=url)
    client = PGMQueue(conn_string=url, init_extension=False)
    if action in ("fill", "store"):
        client.create_queue(QUEUE)
    if action == "fill":
        store()
    elif action == "store":
        measure(server, store)
    else:
        remove = client.archive_batch if action == "archive" else client.delete_batch
        measure(server, lambda: claim(remove))
    client.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
