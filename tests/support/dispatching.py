"""A dispatcher as a process of its own, to be killed: python -m support.dispatching, its arguments as JSON.

It says "ready", waits for a line, and begins. With the target "broker" its transport writes each id to the journal, as
a broker would that confirms it; with "queue" it inserts into queue tables. At the end it says how many it handed over.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta

from sqlalchemy import create_engine

from airflow_delayed.delivery import SendReport
from airflow_delayed.store.dispatch import Dispatcher
from airflow_delayed.store.engine import engine_options, prepare
from airflow_delayed.store.schema import store_tables


class Journal:
    """Slow, so that a kill comes in the middle of a batch."""

    horizon = timedelta(days=1)

    def __init__(self, path: str, clock: Callable[[], datetime]) -> None:
        self.clock = clock
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def check(self, message, now) -> None:
        pass

    def send(self, messages) -> SendReport:
        report = SendReport()
        for message in messages:
            early = "early" if message.due_at > self.clock() else "in-time"
            os.write(self.file, f"{message.message_id} {early}\n".encode())
            report.add(message)
            time.sleep(0.002)
        return report

    def close(self) -> None:
        os.close(self.file)


def main(url: str, schema: str | None, target: str, journal: str, seconds: float | None = None) -> None:
    engine = prepare(create_engine(url, **engine_options(url.split("+")[0].split(":")[0])))
    until = "empty" if seconds is None else timedelta(seconds=seconds)
    dispatcher = Dispatcher(
        engine,
        store_tables(schema=schema),
        conn_id="queue",
        transports=lambda conn_id, clock: Journal(journal, clock),
        deliver_conn_ids=[target],
        lookahead=timedelta(0),
        batch_size=50,
        claim_timeout=timedelta(seconds=2),
        schema=schema,
    )
    # the store needs no Airflow
    assert "airflow" not in sys.modules
    print("ready", flush=True)
    sys.stdin.readline()
    print(dispatcher.run(until).dispatched, flush=True)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
