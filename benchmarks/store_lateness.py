"""How late a dispatcher that stays sends what the store holds, at 200 messages a second and lookahead 0.

    python benchmarks/store_lateness.py [--rounds 3] [--seconds 20]

One process stores 200 messages a second, ten at a time, each due 1 to 3 s later at a time of its own; another
dispatches. Late is what passes from when a message is due until it is given to its transport, by one machine's clock.
One transport confirms at once, the other is RabbitMQ, confirmed. A private PostgreSQL with fsync on, a private broker.
A commit beside it: one row, committed by itself 200 times a second in the same database meanwhile; each hand-over
waits for at least one.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing
from functools import partial

import psycopg2
from store_peers import HERE, ROOT, Server, alternating
from store_peers import server as running

sys.path.append(str(ROOT / "tests"))

import pika
from store_stay import BROKER, QUEUE
from support.rabbitmq import virtual_host

from airflow_delayed.rabbitmq.declare import apply, plan
from airflow_delayed.rabbitmq.topology import DELAYED
from services import rabbitmq

RATE = 200
WANTED = 50.0
NOTHING, RABBITMQ = "a transport that confirms at once", "RabbitMQ"
COMMIT = "a commit"


def percentile(found: list[float], part: float) -> float:
    """What this part of the figures does not exceed."""
    return sorted(found)[min(len(found) - 1, int(len(found) * part))]


def measure(server: Server, broker: rabbitmq.Broker, name: str, count: int) -> tuple[list[float], list[float]]:
    """Milliseconds late of each message, and of each commit."""
    with server.database() as url, virtual_host(broker.url) as host, ExitStack() as stack:
        with pika.BlockingConnection(host.parameters) as connection:
            apply(connection, plan(DELAYED, [QUEUE]))
        environment = {**os.environ, f"AIRFLOW_CONN_{BROKER.upper()}": json.dumps(host.connection)}
        kind = "rabbitmq" if name == RABBITMQ else "nothing"
        stay = start(["stay", url, str(count), kind], environment)
        feed = start(["feed", url, str(count), str(RATE)], environment)
        for worker in (stay, feed):
            stack.callback(worker.kill)
            if worker.stdout.readline().strip() != "ready":
                raise SystemExit(f"{name}: a process ended before it began: {worker.stderr.read()[-3000:]}")
        stop = threading.Event()
        commits: list[float] = []
        beside = threading.Thread(target=commit, args=(url, stop, commits))
        beside.start()
        for worker in (stay, feed):
            worker.stdin.write("go\n")
            worker.stdin.flush()
        try:
            ended(feed)
            late = json.loads(ended(stay).strip().splitlines()[-1])
        finally:
            stop.set()
            beside.join()
        if name == RABBITMQ and host.count(QUEUE) != count:
            raise SystemExit(f"{count} messages were stored, and {host.count(QUEUE)} arrived")
    return late, commits


def start(arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    command, pipe = [sys.executable, str(HERE / "store_stay.py"), *arguments], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)


def ended(worker: subprocess.Popen[str]) -> str:
    said, errors = worker.communicate()
    if worker.returncode:
        raise SystemExit(f"a process failed:\n{errors[-3000:]}")
    return said


def commit(url: str, stop: threading.Event, found: list[float]) -> None:
    """Commit single rows until it is to stop, and note the milliseconds of each."""
    with closing(psycopg2.connect(url)) as connection, connection.cursor() as cursor:
        cursor.execute("CREATE TABLE beside (number bigint)")
        connection.commit()
        while not stop.wait(1 / RATE):
            before = time.perf_counter()
            cursor.execute("INSERT INTO beside VALUES (1)")
            connection.commit()
            found.append((time.perf_counter() - before) * 1000)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=20)
    options = parser.parse_args()
    logging.getLogger("pika").setLevel(logging.ERROR)
    late: dict[str, list[list[float]]] = {NOTHING: [], RABBITMQ: [], COMMIT: []}

    def contest(server: Server, broker: rabbitmq.Broker, number: int, name: str) -> None:
        found, commits = measure(server, broker, name, options.seconds * RATE if number else RATE)
        print(f"round {number}: {name}: p99 {percentile(found, 0.99):.1f} ms", file=sys.stderr, flush=True)
        if number:
            late[name].append(found)
            late[COMMIT].append(commits)

    with running() as server, rabbitmq.running() as broker:
        for number in range(options.rounds + 1):
            alternating(number, [partial(contest, server, broker, number, name) for name in (NOTHING, RABBITMQ)])
    return 0 if report(late) else 1


def report(late: dict[str, list[list[float]]]) -> bool:
    print(f"\n{'ms late at hand-over':36}{'p50':>9}{'p99':>9}{'max':>9}{'early':>7}   (medians of the rounds)")
    good = True
    for name, found in late.items():
        p50, p99, most = (statistics.median(percentile(each, part) for each in found) for part in (0.5, 0.99, 1))
        early = sum(one < 0 for each in found for one in each)
        print(f"{name:36}{p50:9.1f}{p99:9.1f}{most:9.1f}{early:7}")
        good = good and (name == COMMIT or (p99 <= WANTED and not early))
    print(f"wanted: p99 at most {WANTED:g}, none early")
    return good


if __name__ == "__main__":
    sys.exit(main())
