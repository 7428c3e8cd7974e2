"""A watcher of a queue table in a process of its own, to be killed; see support.forked."""

from __future__ import annotations

import asyncio
import os
from multiprocessing.connection import Connection

from airflow_delayed.triggers.queue_table import QueueTableTrigger
from support.watching import Triggerer


class Journaling(Triggerer):
    """Writes the ids of each event to a file, as Airflow stores it in its database."""

    def __init__(self, journal: str) -> None:
        super().__init__()
        self._journal = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._written = 0

    def store(self, seqs) -> None:
        ids = self.ids()[self._written :]
        self._written += len(ids)
        os.write(self._journal, "".join(f"{name}\n" for name in ids).encode())
        super().store(seqs)


def watch(pipe: Connection, *, journal: str, batch_size: int, **arguments: object) -> None:
    """Store the events of a queue table until this process is killed; say how many rows each has."""
    asyncio.run(_watch(pipe, Journaling(journal), QueueTableTrigger(batch_size=batch_size, pause=0, **arguments)))


async def _watch(pipe: Connection, triggerer: Triggerer, trigger: QueueTableTrigger) -> None:
    triggerer.watch(1, trigger)
    told = 0
    while True:
        await asyncio.sleep(0.01)
        if len(triggerer.received) > told:
            told = len(triggerer.received)
            pipe.send(told)
