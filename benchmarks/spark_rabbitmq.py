"""Spark's executors into RabbitMQ, confirmed, beside one publisher in the same run.

    python benchmarks/spark_rabbitmq.py [--rounds 3] [--messages 1000000]

local[2], eight partitions, bodies of 200 bytes, persistent, mandatory, ids given, due in an hour and later. One
publisher is the hook's own, from one process that has its messages ready. A private broker, a virtual host of its own
for each in each round; the rounds alternate. The broker's CPU is not counted.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import spark_sink
from measured import Measured
from store_peers import Rounds, alternating
from support.rabbitmq import VirtualHost, virtual_host

from airflow_delayed.message import DelayedMessage, utcnow
from airflow_delayed.rabbitmq.declare import apply, plan
from airflow_delayed.rabbitmq.publisher import Publisher
from airflow_delayed.rabbitmq.topology import DELAYED
from services import rabbitmq

SPARK, ONE = "Spark's executors", "one publisher"


def install(host: VirtualHost) -> None:
    import pika

    with pika.BlockingConnection(host.parameters) as connection:
        apply(connection, plan(DELAYED, [spark_sink.QUEUE]))
    host.declare(spark_sink.QUEUE)


def alone(url: str, rounds: Rounds, number: int, *, count: int) -> None:
    with virtual_host(url) as host:
        install(host)
        start = utcnow()
        messages = [
            DelayedMessage(
                destination=spark_sink.QUEUE,
                body=spark_sink.BODY.encode(),
                due_at=start + timedelta(seconds=3600 + each),
                message_id=f"order-{each:08d}",
            )
            for each in range(count)
        ]
        publisher = Publisher(host.parameters, conn_id="broker")
        gc.collect()
        began, cpu = time.perf_counter(), time.process_time()
        sent = publisher.send(messages).sent
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        rounds.note(number, ONE, Measured(sent, seconds, cpu, 0))


def spark(url: str, rounds: Rounds, number: int, *, count: int) -> None:
    with virtual_host(url) as host, tempfile.TemporaryDirectory() as folder:
        install(host)
        file = Path(folder, "connections.json")
        file.touch(mode=0o600)
        file.write_text(json.dumps({"broker": host.connection}))
        rounds.note(number, SPARK, spark_sink.run("broker", count, file))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--messages", type=int, default=1_000_000)
    options = parser.parse_args()
    rounds = Rounds()
    with rabbitmq.running() as broker:
        contestants = [
            partial(alone, broker.url, rounds, count=options.messages),
            partial(spark, broker.url, rounds, count=options.messages),
        ]
        for number in range(1, options.rounds + 1):
            alternating(number, [partial(contestant, number) for contestant in contestants])
    rounds.table()
    return 0 if rounds.ratio(SPARK, ONE, 60, "% of one publisher's rate", 100) else 1


if __name__ == "__main__":
    sys.exit(main())
