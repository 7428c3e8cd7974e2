"""This package's part in the benchmarks of the store, in a process of its own; see store_peers.py.

    store_worker.py store|copy URL COUNT SERVER
    store_worker.py fill URL ROWS SERVER AHEAD [scattered]
    store_worker.py tagged|cancel|update|delete URL COUNT SERVER
    store_worker.py claim URL COUNT SERVER BLOCK
    store_worker.py publish|dispatch URL COUNT SERVER AHEAD BATCH

Block number n of the messages falls due n days from now, and is what a lookahead of n days claims next.
AHEAD is how many seconds later all are due. The broker of "publish" and "dispatch" is the Airflow connection of that
name, given in the environment; they say when they are ready, and begin at a sign.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]
_HOME = tempfile.TemporaryDirectory(prefix="airflow-delayed-")
os.environ["AIRFLOW_HOME"] = _HOME.name

import psycopg  # noqa: E402
from measured import measure  # noqa: E402
from sqlalchemy import create_engine, delete, text, update  # noqa: E402
from store_fill import fill  # noqa: E402

from airflow_delayed.delivery import (  # noqa: E402
    Delivery,
    SendReport,
    TopologyReport,
    delivery_for,
)
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook  # noqa: E402
from airflow_delayed.hooks.store import DelayedStoreHook  # noqa: E402
from airflow_delayed.identity import Origin  # noqa: E402
from airflow_delayed.message import DelayedMessage, utcnow  # noqa: E402
from airflow_delayed.store.records import to_row  # noqa: E402
from airflow_delayed.store.schema import store_tables  # noqa: E402

STORE, BROKER = "benchmark_store", "benchmark_broker"
QUEUE, CUSTOMER = "orders", "customer"
BODY = b"x" * 200
CLAIMED = 500
#: As DelayedSendOperator gives it.
ORIGIN = Origin(dag_id="benchmark", run_id="manual", task_id="store")


class NoBroker(Delivery):
    """A transport that confirms at once."""

    horizon = timedelta(days=10_000)

    def __init__(self, conn_id: str, clock: Callable[[], datetime]) -> None:
        """Takes what a dispatcher's transports are made of."""

    def install(self, destinations: Iterable[str], **_: object) -> TopologyReport:
        return TopologyReport()

    def verify(self, destinations: Iterable[str], **_: object) -> TopologyReport:
        return TopologyReport()

    def check(self, message: DelayedMessage, now: datetime) -> None:
        """Takes all."""

    def send(self, messages: Iterable[DelayedMessage]) -> SendReport:
        report = SendReport()
        for message in messages:
            report.add(message)
        return report

    def close(self) -> None:
        """Has nothing to close."""


def hook(url: str) -> DelayedStoreHook:
    os.environ[f"AIRFLOW_CONN_{STORE.upper()}"] = url
    return DelayedStoreHook(STORE, BROKER, origin=ORIGIN)


def messages(count: int, *, ahead: float = 3600, spread: int = 1_000_000) -> Iterator[DelayedMessage]:
    """Due so many seconds ahead and later, by default in the next days, as a nightly job's reminders are."""
    start = utcnow()
    for number in range(count):
        due = start + timedelta(seconds=ahead + number % spread)
        yield DelayedMessage(destination=QUEUE, body=BODY, due_at=due, message_id=f"order-{number:08d}")


def store(url: str, count: int, server: int) -> None:
    with closing(hook(url)) as store:
        store.install([])
        measure(server, lambda: store.send(messages(count)).sent)


def copy(url: str, count: int, server: int) -> None:
    """The same rows by COPY, all in one transaction."""
    with closing(hook(url)) as store:
        store.install([])
        table, now = store.table, utcnow()
        names = ["StoredAt", *to_row(next(messages(1)), BROKER, 1)]
        rows = [(now, *to_row(message, BROKER, 1).values()) for message in messages(count)]
    into = ", ".join(f'"{name}"' for name in names)

    def work() -> int:
        with psycopg.connect(url) as connection, connection.cursor() as cursor:
            with cursor.copy(f'COPY "{table.name}" ({into}) FROM STDIN') as lines:
                for row in rows:
                    lines.write_row(row)
            return cursor.rowcount

    measure(server, work)


def tagged(url: str, count: int, server: int) -> None:
    """Store so many messages of one customer, and between them as many of others."""
    with closing(hook(url)) as store:
        store.install([])
        store.send(
            replace(message, tag=CUSTOMER if number % 2 else f"customer {number}")
            for number, message in enumerate(messages(2 * count))
        )


def cancel(url: str, count: int, server: int) -> None:
    with closing(hook(url)) as store:
        measure(server, lambda: store.cancel(tag=CUSTOMER).changed)


def plain(url: str, action: str, server: int) -> None:
    """The least that the database asks: one statement for the same rows, without audit, memory of ids, or undo."""
    engine, table = create_engine(url.replace("mysql:", "mysql+pymysql:")), store_tables().messages
    changes = {"update": update(table).values(Time=utcnow() + timedelta(days=1)), "delete": delete(table)}

    def work() -> int:
        with engine.begin() as connection:
            return connection.execute(changes[action].where(table.c.Tag == CUSTOMER)).rowcount

    with engine.connect() as connection:
        connection.execute(text("SELECT 1"))
    measure(server, work)


def claim(url: str, count: int, server: int, block: int) -> None:
    with closing(hook(url)) as store:
        lookahead = timedelta(days=block, hours=1)
        dispatcher = store.dispatcher([BROKER], NoBroker, lookahead=lookahead, batch_size=CLAIMED)
        measure(server, lambda: dispatcher.run().dispatched)


def publish(url: str, count: int, server: int, ahead: float, batch: int) -> None:
    """What the store would dispatch, by the broker's hook alone."""
    with closing(RabbitMQDelayHook(BROKER)) as broker:
        ready = list(messages(count, ahead=ahead, spread=count // 1000))
        wait_for_start()
        measure(server, lambda: broker.send(ready).sent)


def dispatch(url: str, count: int, server: int, ahead: float, batch: int) -> None:
    with closing(hook(url)) as store:
        lookahead = timedelta(seconds=ahead, hours=1)
        dispatcher = store.dispatcher([BROKER], delivery_for, lookahead=lookahead, batch_size=batch)
        wait_for_start()
        measure(server, lambda: dispatcher.run().dispatched)


def wait_for_start() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


def main(action: str, url: str, count: str, server: str, *more: str) -> None:
    if action in ("store", "copy"):
        {"store": store, "copy": copy}[action](url, int(count), int(server))
    elif action in ("publish", "dispatch"):
        {"publish": publish, "dispatch": dispatch}[action](url, int(count), int(server), float(more[0]), int(more[1]))
    elif action in ("tagged", "cancel"):
        {"tagged": tagged, "cancel": cancel}[action](url, int(count), int(server))
    elif action in ("update", "delete"):
        plain(url, action, int(server))
    elif action == "claim":
        claim(url, int(count), int(server), int(more[0]))
    else:
        with closing(hook(url)) as empty:
            empty.install([])
            fill(url, empty.table.name, BROKER, int(count), ahead=float(more[0]), scattered="scattered" in more)


if __name__ == "__main__":
    main(*sys.argv[1:])
