"""A dispatcher as a process of its own, to be killed; see support.forked.

It says "ready", waits for a word, and begins. With the target "broker" its transport writes each id to the journal, as
a broker would that confirms it; with "queue" it inserts into queue tables. At the end it says how many it dispatched.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from multiprocessing.connection import Connection
from typing import Any

from sqlalchemy import Engine, create_engine, event

from airflow_delayed.delivery import SendReport
from airflow_delayed.message import DelayedMessage
from airflow_delayed.store.api import Store, engine_options, prepare
from airflow_delayed.store.dispatch.dispatcher import Dispatcher
from airflow_delayed.store.schema import TABLE, store_tables


class Journal:
    """Slow, so that a kill comes in the middle of a batch.

    :param hangs_after: it hangs when it has taken so many messages.
    :param begun: is called when it is given its first messages, before it takes them.
    :param now: asks the database for its time, of which ``clock`` is the least that it can be.
    """

    horizon = timedelta(days=1)

    def __init__(
        self,
        path: str,
        clock: Callable[[], datetime],
        *,
        hangs_after: int | None = None,
        begun: Callable[[], None] | None = None,
        now: Callable[[], datetime] | None = None,
    ) -> None:
        self.clock = clock
        self.now = now or clock
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.left = hangs_after
        self.begun = begun

    def check(self, message, now) -> None:
        pass

    def send(self, messages) -> SendReport:
        if self.begun is not None:
            begun, self.begun = self.begun, None
            begun()
        report = SendReport()
        for message in messages:
            if self.left == 0:
                time.sleep(3600)
            os.write(self.file, f"{message.message_id} {self.word(message)}\n".encode())
            report.add(message)
            self.left = None if self.left is None else self.left - 1
            time.sleep(0.002)
        return report

    def word(self, message: DelayedMessage) -> str:
        return "early" if message.due_at > self.clock() and message.due_at > self.now() else "in-time"

    def close(self) -> None:
        os.close(self.file)


def die_at_commit(engine: Engine, number: int) -> None:
    """Have this process die just before the engine's so manyth commit."""
    left = number

    @event.listens_for(engine, "commit")
    def commit(connection: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def dispatch(
    pipe: Connection,
    *,
    url: str,
    schema: str | None,
    table: str = TABLE,
    target: str,
    journal: str,
    seconds: float | None = None,
    claim_seconds: float = 2,
    hangs_after: int | None = None,
    together: bool = False,
    dies_at_commit: int | None = None,
    stays: bool = False,
) -> None:
    """Dispatch what is due until nothing is left, or for some seconds.

    :param hangs_after: the broker hangs when it has taken so many messages.
    :param together: say "claimed" with the first messages in hand, and wait for a word before they are sent.
    :param dies_at_commit: die just before this commit.
    :param stays: it claims messages a moment before they are due.
    """
    engine = prepare(create_engine(url, **engine_options(url.split("+")[0].split(":")[0])))

    now = Store("queue", lambda: engine).now

    def claimed() -> None:
        pipe.send("claimed")
        pipe.recv()

    dispatcher = Dispatcher(
        engine,
        store_tables(table, schema),
        conn_id="queue",
        transports=lambda conn_id, clock: Journal(
            journal, clock, hangs_after=hangs_after, begun=claimed if together else None, now=now
        ),
        deliver_conn_ids=[target],
        lookahead=timedelta(0),
        batch_size=50,
        claim_timeout=timedelta(seconds=claim_seconds),
        schema=schema,
        stays=stays,
    )
    pipe.send("ready")
    pipe.recv()
    if dies_at_commit is not None:
        die_at_commit(engine, dies_at_commit)
    pipe.send(dispatcher.run("empty" if seconds is None else timedelta(seconds=seconds)).dispatched)
