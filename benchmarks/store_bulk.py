"""Storing in bulk: DelayedStoreHook.send beside the peers' batches, and beside COPY, the least that PostgreSQL asks.

    python benchmarks/store_bulk.py [--rounds 5] [--messages 50000]

Bodies of 200 bytes, due in an hour and later; 1000 a batch where the caller chooses, and 2500 by ours. A private
PostgreSQL with fsync on, and a database of its own for each contestant in each round; the rounds alternate. Ours makes
each message, checks it, notes which run of a task it comes from, and looks for ids that are there already or
remembered. COPY writes ready-made rows into the same empty table, all in one transaction, by psycopg 3. SQLite is a
file of its own, in WAL mode, and MariaDB a private server, by the same hook.

CPU is user and system time, PostgreSQL's that of all its processes; that of SQLite is the client's, and MariaDB's is
not counted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path

from sqlalchemy import create_engine
from store_peers import OURS, PGMQ, PGQUEUER, PROCRASTINATE, Rounds, Server, alternating, measured
from store_peers import server as running

import services.mariadb
from airflow_delayed.store.schema import store_tables

COPY, SQLITE, MARIADB = "COPY into the same table", "ours, on SQLite", "ours, on MariaDB"
DEFER = "procrastinate, batch_defer"


def postgres(server: Server, rounds: Rounds, number: int, *, name: str, who: str, action: str, count: int) -> None:
    with server.database() as url:
        rounds.note(number, name, measured(who, action, url, count, server))


def sqlite(server: Server, rounds: Rounds, number: int, *, count: int) -> None:
    with tempfile.TemporaryDirectory(prefix="delayed-sqlite-") as folder:
        url = f"sqlite:///{Path(folder, 'store.db')}"
        rounds.note(number, SQLITE, measured(OURS, "store", url, count, server))


def mariadb(server: Server, rounds: Rounds, number: int, *, url: str, count: int) -> None:
    rounds.note(number, MARIADB, measured(OURS, "store", url, count, server))
    with create_engine(url.replace("mysql:", "mysql+pymysql:")).begin() as connection:
        for table in store_tables():
            table.drop(connection)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=50_000)
    options = parser.parse_args()
    rounds = Rounds()
    with running() as server, services.mariadb.running() as maria:
        on_postgres = partial(postgres, server, rounds)
        contestants = [
            partial(on_postgres, name=OURS, who=OURS, action="store", count=options.messages),
            partial(on_postgres, name=COPY, who=OURS, action="copy", count=options.messages),
            partial(on_postgres, name=DEFER, who=PROCRASTINATE, action="store", count=options.messages // 2),
            partial(on_postgres, name="pgqueuer, enqueue", who=PGQUEUER, action="store", count=options.messages),
            partial(on_postgres, name="pgmq, send_batch", who=PGMQ, action="store", count=options.messages),
            partial(sqlite, server, rounds, count=options.messages),
            partial(mariadb, server, rounds, url=maria.url, count=options.messages),
        ]
        for number in range(options.rounds + 1):
            alternating(number, [partial(contestant, number) for contestant in contestants])
    return 0 if report(rounds) else 1


def report(rounds: Rounds) -> bool:
    rounds.table()
    good = rounds.ratio(OURS, DEFER, 3, "times procrastinate's batch_defer")
    rounds.ratio(OURS, "pgqueuer, enqueue", None, "times pgqueuer's enqueue")
    rounds.ratio(OURS, "pgmq, send_batch", None, "times pgmq's send_batch")
    rounds.ratio(OURS, COPY, None, "% of COPY", 100)
    return good


if __name__ == "__main__":
    sys.exit(main())
