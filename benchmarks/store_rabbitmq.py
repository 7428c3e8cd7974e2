"""From the store to RabbitMQ, confirmed: one dispatcher and two, beside the publisher alone with the same messages.

    python benchmarks/store_rabbitmq.py [--rounds 5] [--messages 50000] [--batch 500]

Quorum queues, bodies of 200 bytes, persistent, confirmed, mandatory, due in 20 minutes. A private
PostgreSQL with fsync on and a private broker; a database and a virtual host of its own for each contestant in each
round; the rounds alternate. The publisher alone is RabbitMQDelayHook.send with messages that are made before. All
arrivals are taken from the level's queue and counted by their ids: none may be there twice, and none may lack.

CPU is user and system time: the dispatchers', PostgreSQL's, and the broker's until one second after the last confirm.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial

from store_peers import HERE, OURS, ROOT, WORKERS, Server, alternating, verdict, work
from store_peers import server as running

sys.path.append(str(ROOT / "tests"))

import pika
from measured import Measured
from publish import broker_cpu
from store_worker import BROKER, QUEUE
from support.rabbitmq import VirtualHost, virtual_host

from airflow_delayed.rabbitmq.declare import apply, plan
from airflow_delayed.rabbitmq.topology import DELAYED
from services import rabbitmq

#: Seconds until they are due: they wait in one level until long after the end.
AHEAD = 1200
ALONE, ONE, TWO = "the publisher alone", "one dispatcher", "two dispatchers"
#: Contestants: what each process of it does.
PROCESSES = {ALONE: ["publish"], ONE: ["dispatch"], TWO: ["dispatch", "dispatch"]}


@dataclass(frozen=True)
class Result:
    count: int
    parts: list[Measured]
    broker: float
    twice: int
    lost: int

    @property
    def rate(self) -> float:
        """From the common start to the end of the slower."""
        return self.count / max(part.seconds for part in self.parts)

    @property
    def client_us(self) -> float:
        return sum(part.client for part in self.parts) / self.count * 1e6

    @property
    def server_us(self) -> float:
        return max(part.server for part in self.parts) / self.count * 1e6

    @property
    def broker_us(self) -> float:
        return self.broker / self.count * 1e6


def measure(server: Server, broker: rabbitmq.Broker, name: str, count: int, batch: int) -> Result:
    with server.database() as url, virtual_host(broker.url) as host:
        with pika.BlockingConnection(host.parameters) as connection:
            apply(connection, plan(DELAYED, [QUEUE]))
        if name != ALONE:
            work(OURS, "fill", url, count, server, str(AHEAD))
            server.settle(url)
        command = [url, str(count), str(server.pid), str(AHEAD), str(batch)]
        workers = [start(action, command, host) for action in PROCESSES[name]]
        for worker in workers:
            if worker.stdout.readline().strip() != "ready":
                raise SystemExit(f"{name}: a process ended before it began: {worker.stderr.read()[-3000:]}")
        time.sleep(0.5)
        before = broker_cpu(broker)
        for worker in workers:
            worker.stdin.write("go\n")
            worker.stdin.flush()
        parts = [ended(worker) for worker in workers]
        time.sleep(1)
        used = broker_cpu(broker) - before
        ids = arrived(host)
    return Result(count, parts, used, len(ids) - len(set(ids)), count - len(set(ids)))


def start(action: str, arguments: list[str], host: VirtualHost) -> subprocess.Popen[str]:
    command = [sys.executable, str(HERE / WORKERS[OURS]), action, *arguments]
    environment = {**os.environ, f"AIRFLOW_CONN_{BROKER.upper()}": json.dumps(host.connection)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)


def ended(worker: subprocess.Popen[str]) -> Measured:
    said, errors = worker.communicate()
    if worker.returncode:
        raise SystemExit(f"a process failed:\n{errors[-3000:]}")
    return Measured(**json.loads(said.strip().splitlines()[-1]))


def arrived(host: VirtualHost) -> list[str]:
    """The ids of all that waits in the level."""
    level = DELAYED.level_name(DELAYED.digits.entry_level(AHEAD))
    expected, ids = host.count(level), []
    with pika.BlockingConnection(host.parameters) as connection:
        channel = connection.channel()
        for _, properties, _ in channel.consume(level, auto_ack=True, inactivity_timeout=5):
            if properties is None:
                break
            ids.append(properties.message_id)
            if len(ids) == expected:
                break
    return ids


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=50_000)
    parser.add_argument("--batch", type=int, default=500)
    options = parser.parse_args()
    logging.getLogger("pika").setLevel(logging.ERROR)
    results: dict[str, list[Result]] = {name: [] for name in PROCESSES}

    def contest(server: Server, broker: rabbitmq.Broker, number: int, name: str) -> None:
        # the first round warms up
        result = measure(server, broker, name, options.messages if number else options.messages // 10, options.batch)
        print(f"round {number}: {name}: {result.rate:,.0f}/s", file=sys.stderr, flush=True)
        if number:
            results[name].append(result)

    with running() as server, rabbitmq.running() as broker:
        for number in range(options.rounds + 1):
            alternating(number, [partial(contest, server, broker, number, name) for name in PROCESSES])
    return 0 if report(results) else 1


def report(results: dict[str, list[Result]]) -> bool:
    columns = ("rate", "client_us", "server_us", "broker_us")
    print(
        f"\n{'':22}{'messages/s':>12}{'client CPU us':>15}{'server':>9}{'broker':>9}{'twice':>7}{'lost':>6}   (medians)"
    )
    for name, found in results.items():
        rate, client, used, broker = (statistics.median(getattr(each, column) for each in found) for column in columns)
        twice, lost = sum(each.twice for each in found), sum(each.lost for each in found)
        print(f"{name:22}{rate:12,.0f}{client:15.1f}{used:10.1f}{broker:9.1f}{twice:7}{lost:6}")
    print("\nmedian of the rounds' ratios")

    def ratios(one: str, other: str) -> list[float]:
        return [100 * first.rate / second.rate for first, second in zip(results[one], results[other], strict=True)]

    good = verdict(ratios(ONE, ALONE), 60, "% of the publisher alone, by one dispatcher")
    verdict(ratios(TWO, ONE), None, "% of one dispatcher, by two together")
    wrong = sum(each.twice + each.lost for found in results.values() for each in found)
    print(f"{wrong:8} sent twice or lost (wanted: 0)")
    return good and not wrong


if __name__ == "__main__":
    sys.exit(main())
