"""Storing in bulk: DelayedStoreHook.send beside the peers' batches, and beside COPY, the least that PostgreSQL asks.

    python benchmarks/store_bulk.py [--rounds 5] [--messages 50000]
    python benchmarks/store_bulk.py --cancel [--rounds 5] [--messages 100000]

Bodies of 200 bytes, due in an hour and later; 1000 a batch where the caller chooses, and 2500 by ours. A private
PostgreSQL with fsync on, and a database of its own for each contestant in each round; the rounds alternate. Ours makes
each message, checks it, notes which run of a task it comes from, and looks for ids that are there already or
remembered. COPY writes ready-made rows into the same empty table, all in one transaction, by psycopg 3. SQLite is a
file of its own, in WAL mode, and MariaDB a private server, by the same hook.

With --cancel, one call cancels all messages of a tag, in a table with as many others: with its audit, remembered ids,
and messages that can be restored. Beside it, one UPDATE of the due time, and one DELETE, of the same rows.

CPU is user and system time, PostgreSQL's that of all its processes; that of SQLite is the client's, and MariaDB's is
not counted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from sqlalchemy import create_engine
from store_peers import OURS, PGMQ, PGQUEUER, PROCRASTINATE, Rounds, Server, alternating, measured, work
from store_peers import server as running

import services.mariadb
from airflow_delayed.store.schema import store_tables

COPY, SQLITE, MARIADB = "COPY into the same table", "ours, on SQLite", "ours, on MariaDB"
DEFER = "procrastinate, batch_defer"
#: Names of contestants by action.
CANCEL = {"cancel": "cancel by tag", "update": "one UPDATE", "delete": "one DELETE"}
ON_MARIADB = " (MariaDB)"


def postgres(server: Server, rounds: Rounds, number: int, *, name: str, who: str, action: str, count: int) -> None:
    with server.database() as url:
        rounds.note(number, name, measured(who, action, url, count, server))


def sqlite(server: Server, rounds: Rounds, number: int, *, count: int) -> None:
    with tempfile.TemporaryDirectory(prefix="delayed-sqlite-") as folder:
        url = f"sqlite:///{Path(folder, 'store.db')}"
        rounds.note(number, SQLITE, measured(OURS, "store", url, count, server))


def mariadb(server: Server, rounds: Rounds, number: int, *, url: str, count: int) -> None:
    rounds.note(number, MARIADB, measured(OURS, "store", url, count, server))
    _drop(url)


def change(server: Server, rounds: Rounds, number: int, *, action: str, count: int, mariadb: str | None = None) -> None:
    name = CANCEL[action] + (ON_MARIADB if mariadb else "")
    with server.database() if mariadb is None else nullcontext(mariadb) as url:
        work(OURS, "tagged", url, count, server)
        if mariadb is None:
            server.settle(url)
        rounds.note(number, name, measured(OURS, action, url, count, server))
    if mariadb is not None:
        _drop(mariadb)


def _drop(url: str) -> None:
    with create_engine(url.replace("mysql:", "mysql+pymysql:")).begin() as connection:
        for table in store_tables():
            table.drop(connection)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int)
    parser.add_argument("--cancel", action="store_true", help="measure a cancel by tag, and nothing else")
    options = parser.parse_args()
    options.messages = options.messages or (100_000 if options.cancel else 50_000)
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
        if options.cancel:
            contestants = [
                partial(change, server, rounds, action=action, count=options.messages, mariadb=url)
                for url in (None, maria.url)
                for action in CANCEL
            ]
        for number in range(options.rounds + 1):
            alternating(number, [partial(contestant, number) for contestant in contestants])
    return 0 if (report_cancel if options.cancel else report)(rounds) else 1


def report(rounds: Rounds) -> bool:
    rounds.table()
    good = rounds.ratio(OURS, DEFER, 3, "times procrastinate's batch_defer")
    rounds.ratio(OURS, "pgqueuer, enqueue", None, "times pgqueuer's enqueue")
    rounds.ratio(OURS, "pgmq, send_batch", None, "times pgmq's send_batch")
    rounds.ratio(OURS, COPY, None, "% of COPY", 100)
    return good


def report_cancel(rounds: Rounds) -> bool:
    rounds.table()
    cancel, update, delete = CANCEL.values()
    good = rounds.ratio(cancel, update, 100 / 3, "% of the rate of one UPDATE", 100)
    rounds.ratio(cancel, delete, None, "% of the rate of one DELETE", 100)
    rounds.ratio(cancel + ON_MARIADB, update + ON_MARIADB, None, "% of the rate of one UPDATE on MariaDB", 100)
    return good


if __name__ == "__main__":
    sys.exit(main())
