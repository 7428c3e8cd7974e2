"""Spark's executors into the PostgreSQL store, beside the store's own bulk rate in the same run.

    python benchmarks/spark_store.py [--rounds 3] [--messages 1000000] [--growth]

local[2], eight partitions, bodies of 200 bytes, ids given. Ours alone is DelayedStoreHook.send from one process, as
store_bulk.py measures it. A private PostgreSQL with fsync on, a database of its own for each in each round; the rounds
alternate. With --growth also ten times as many from Spark, to see whether the rate holds and the memory of the
executors' Python workers does not grow: the peak of the worker that had the most.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

import spark_sink
from sqlalchemy import make_url
from store_peers import OURS, Rounds, Server, alternating, measured, verdict
from store_peers import server as running

SPARK, MORE = "Spark's executors", "Spark's executors, ten times as many"


def connections_of(folder: str, url: str) -> Path:
    parts = make_url(url)
    fields = {"host": parts.host, "port": parts.port, "login": parts.username, "password": parts.password}
    known = {
        "store": {"conn_type": "postgres", "schema": parts.database, **fields},
        "broker": {"conn_type": "rabbitmq", "host": "nowhere.invalid"},
    }
    file = Path(folder, "connections.json")
    file.touch(mode=0o600)
    file.write_text(json.dumps(known))
    return file


def install(url: str) -> None:
    from airflow_delayed.hooks.store import DelayedStoreHook

    os.environ["AIRFLOW_CONN_BENCHMARK"] = url
    hook = DelayedStoreHook("benchmark", "broker")
    hook.install([])
    hook.close()


def alone(server: Server, rounds: Rounds, number: int, *, count: int) -> None:
    with server.database() as url:
        rounds.note(number, OURS, measured(OURS, "store", url, count, server))


def spark(server: Server, rounds: Rounds, number: int, *, name: str, count: int) -> None:
    with server.database() as url, tempfile.TemporaryDirectory() as folder:
        install(url)
        file = connections_of(folder, url)
        rounds.note(number, name, spark_sink.run("broker", count, file, store="store", hold_over=600))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--growth", action="store_true")
    options = parser.parse_args()
    rounds = Rounds()
    with tempfile.TemporaryDirectory(prefix="airflow-delayed-") as home, running() as server:
        os.environ["AIRFLOW_HOME"] = home
        contestants = [
            partial(alone, server, rounds, count=options.messages),
            partial(spark, server, rounds, name=SPARK, count=options.messages),
        ]
        for number in range(1, options.rounds + 1):
            alternating(number, [partial(contestant, number) for contestant in contestants])
        if options.growth:
            spark(server, rounds, 1, name=MORE, count=10 * options.messages)
    rounds.table()
    good = rounds.ratio(SPARK, OURS, 60, "% of the store's own bulk rate", 100)
    if options.growth:
        rates = [100 * rounds.found[MORE][0].rate / each.rate for each in rounds.found[SPARK]]
        good = verdict(rates, 85, "% of the rate when there are ten times as many rows") and good
        few, many = ([each.peak for each in rounds.found[name]] for name in (SPARK, MORE))
        print(f"{statistics.median(few):8.0f} MiB and {statistics.median(many):.0f} MiB: the largest Python worker")
        shares = [100 * each / many[0] for each in few]
        good = verdict(shares, 90, "% of its memory with ten times as many rows it has with one time as many") and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
