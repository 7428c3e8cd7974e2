"""A store that lives for years: rows, bytes and claim rate over 60 nights, on a clock that is moved a day a night.

    python benchmarks/store_years.py [--days 60] [--messages 20000]

Each night so many messages of 200 bytes are stored, and one pass of a dispatcher, as a task makes it, takes them out
through a transport that confirms at once; ids are remembered for 14 days. A private PostgreSQL with fsync on; its
autovacuum works as it does anywhere, but as nights follow each other without days between, the tables are vacuumed
after each night too. The clock of the store is that of the database, moved by the days that have passed.

Rows and bytes are those of the table of remembered ids after a night, indexes included; the rate is that of the pass,
which claims, sends, settles and forgets; CPU is that of the dispatcher and of the server. Pages are those that the
pass read in PostgreSQL's shared buffers, which do not depend on what else the machine does. The last lines compare the
median of days 16 to the middle with that of the days after it, and say the gigabytes for ten million messages a night.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from datetime import datetime, timedelta

from measured import Measured, Stopwatch
from sqlalchemy import Connection, Engine, create_engine, text
from store_peers import server as running

from airflow_delayed.delivery import SendReport
from airflow_delayed.message import DelayedMessage
from airflow_delayed.store.api import engine_options, prepare
from airflow_delayed.store.dialects import database_time
from airflow_delayed.store.dispatch.dispatcher import Dispatcher
from airflow_delayed.store.enqueue import enqueue
from airflow_delayed.store.schema import Tables, store_tables
from airflow_delayed.store.setup import install

REMEMBER = timedelta(days=14)
NIGHT = 10_000_000
BODY = b"x" * 200


class Confirms:
    """A transport that confirms everything at once."""

    horizon = timedelta(days=365)

    def check(self, message: DelayedMessage, now: datetime) -> None:
        """Nothing is too long."""

    def send(self, messages) -> SendReport:
        report = SendReport()
        for message in messages:
            report.add(message)
        return report

    def close(self) -> None:
        """There is nothing to close."""


def night(
    engine: Engine, tables: Tables, day: int, count: int, clock: Callable[[Connection], datetime], server: int
) -> tuple[Measured, float]:
    """Store the messages of a night and dispatch them; return what the pass took, and the pages it read of each."""
    due = datetime(2020, 1, 1).astimezone()
    messages = (
        DelayedMessage(destination="q", body=BODY, due_at=due, message_id=f"{day:04}-reminder-{number:08}", headers={})
        for number in range(count)
    )
    enqueue(engine, tables, messages, "broker")
    dispatcher = Dispatcher(
        engine,
        tables,
        conn_id="store",
        deliver_conn_ids=["broker"],
        transports=lambda conn_id, now: Confirms(),
        database_time=clock,
        remember=REMEMBER,
    )
    before = pages(engine)
    watch = Stopwatch(server)
    report = dispatcher.run()
    assert report.dispatched == count, report
    return watch.stop(count), (pages(engine) - before) / count


def pages(engine: Engine) -> int:
    """Return how many pages all sessions of the database have read; a session counts its own when it ends."""
    engine.dispose()
    read = text("SELECT blks_hit + blks_read FROM pg_stat_database WHERE datname = current_database()")
    with engine.connect() as connection:
        count: int = connection.execute(read).scalar_one()
    return count


def size(engine: Engine, tables: Tables) -> tuple[int, int]:
    """Return the rows and the bytes of the table of remembered ids."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for table in (tables.past, tables.messages):
            connection.execute(text(f'VACUUM "{table.name}"'))
        rows = connection.execute(text(f'SELECT count(*) FROM "{tables.past.name}"')).scalar_one()
        sized = connection.execute(text(f"SELECT pg_total_relation_size('\"{tables.past.name}\"')")).scalar_one()
    return rows, sized


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--days", type=int, default=60)
    parser.add_argument("--messages", type=int, default=20_000, help="of each night")
    options = parser.parse_args()
    first = REMEMBER.days + 1
    if options.days < 2 * first:
        parser.error(f"--days must be at least {2 * first}: ids are forgotten from day {first + 1} on")
    tables = store_tables()
    with running() as server, server.database() as url:
        engine = prepare(create_engine(url, **engine_options("postgresql")))
        install(engine, tables, conn_id="store")
        print(f"{'day':>4}{'rows':>12}{'MiB':>9}{'messages/s':>12}{'CPU us each':>13}{'pages each':>12}")
        days = []
        for day in range(1, options.days + 1):
            passed = timedelta(days=day)

            def clock(connection: Connection, passed: timedelta = passed) -> datetime:
                return database_time(connection) + passed

            took, read = night(engine, tables, day, options.messages, clock, server.pid)
            rows, sized = size(engine, tables)
            cpu = took.client_us + took.server_us
            days.append((rows, sized, took.rate, cpu, read))
            print(f"{day:>4}{rows:>12,}{sized / 2**20:>9.1f}{took.rate:>12,.0f}{cpu:>13.0f}{read:>12.2f}", flush=True)
        engine.dispose()
    middle = (first + options.days) // 2
    names = ("rows", "bytes", "messages/s", "CPU us each", "pages each")
    for name, values in zip(names, zip(*days, strict=True), strict=True):
        early, late = statistics.median(values[first : middle + 1]), statistics.median(values[middle + 1 :])
        print(f"{name}: {early:,.2f}, then {late:,.2f}: {late / early - 1:+.1%}")
    each = days[-1][1] / days[-1][0]
    total = each * NIGHT * REMEMBER.days / 1e9
    print(f"{each:.0f} bytes an id: {total:.0f} GB for {NIGHT:,} messages a night")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
