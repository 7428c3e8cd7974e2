"""How late healthy messages are beside destinations that are full, missing, or hang.

    python benchmarks/refusing.py [--rounds 1] [--seconds 90] [--rate 100] [--waiting 0]
                                  [--kinds full missing hangs] [--destinations 1 10 1000]

A dispatcher that stays (``airflow delayed dispatcher`` with its defaults) sends so many messages a second to one
healthy queue, each when it is due, and as many to the others together. First without the others, then beside each kind
and number of them. A full queue refuses messages (``reject-publish``); the process of a queue that hangs is suspended;
these are quorum queues. With --waiting so many messages of the others are due before the first healthy one.
p50 and p99 are of all but the first ten seconds, in which the dispatcher learns what the others are like; the longest
of all is printed too.

A private RabbitMQ (Debian's package), a fresh PostgreSQL for each measurement. Lateness is by the consumer's clock.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pika
from arrivals import BROKER, PATIENCE, body, consume, dispatched_store, message
from publish import QUEUE
from support.rabbitmq import VirtualHost, virtual_host

from airflow_delayed.message import DelayedMessage
from services import rabbitmq

#: Messages a second that can surely be stored ahead, and seconds between the last of them and the first due time.
STORED, SPARE = 5_000, 3.0
#: The first seconds, in which the dispatcher learns what the others are like.
LEARNS = 10
KINDS = {
    "full": {"x-max-length": 1, "x-overflow": "reject-publish"},
    "missing": None,
    "hangs": {"x-queue-type": "quorum"},
}


def spoil(broker: rabbitmq.Broker, host: VirtualHost, kind: str, queues: Sequence[str], stack: ExitStack) -> None:
    """Make queues that take no messages, until the block ends."""
    if (arguments := KINDS[kind]) is None:
        return
    with pika.BlockingConnection(host.parameters) as connection:
        channel = connection.channel()
        for queue in queues:
            channel.queue_declare(queue, durable=True, arguments=arguments)
            if kind == "full":
                channel.basic_publish("", queue, b"fills the queue")
    if kind == "hangs":
        processes = ", ".join(f"'{host.name}_{queue}'" for queue in queues)
        broker.eval(f"[sys:suspend(Name) || Name <- [{processes}]]")
        # else the virtual host could not be deleted
        stack.callback(broker.eval, f"[sys:resume(Name) || Name <- [{processes}]]")


def messages(begin: float, options: argparse.Namespace, others: Sequence[str]) -> Iterator[DelayedMessage]:
    chance = random.Random(0)
    for number in range(options.waiting if others else 0):
        yield other(begin - 60, f"waiting-{number}", chance.choice(others))
    for number in range(options.seconds * options.rate):
        due = begin + number / options.rate
        yield message(due, number)
        if others:
            yield other(due, f"other-{number}", chance.choice(others))


def other(due: float, name: str, destination: str) -> DelayedMessage:
    return DelayedMessage(destination=destination, body=body(due), due_at=message(due, 0).due_at, message_id=name)


def measure(broker: rabbitmq.Broker, options: argparse.Namespace, kind: str, number: int) -> list[float]:
    """Return how late each healthy message came, in seconds, in the order of their arrival."""
    others = [f"other-{one:04d}" for one in range(number)]
    with virtual_host(broker.url) as host, ExitStack() as stack:
        hook = dispatched_store(host, stack, 1)
        if others:
            spoil(broker, host, kind, others, stack)
        here, there = multiprocessing.Pipe()
        count = options.seconds * options.rate
        consumer = multiprocessing.get_context("fork").Process(target=consume, args=(host, count, there), daemon=True)
        consumer.start()
        here.recv()
        begin = time.time() + SPARE + (2 * count + options.waiting) / STORED
        hook.send(messages(begin, options, others))
        if time.time() > begin:
            raise SystemExit("not all was stored before it was due")
        if not here.poll(begin - time.time() + options.seconds + 4 * PATIENCE):
            raise SystemExit("the consumer gave no answer")
        late, _, _ = here.recv()
        consumer.join()
    if len(late) != count or min(late) < 0:
        raise SystemExit(f"{kind}: of {count} messages {len(late)} arrived, {sum(one < 0 for one in late)} early")
    return list(late)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=int, default=90)
    parser.add_argument("--rate", type=int, default=100, help="healthy messages a second, and those of the others")
    parser.add_argument("--waiting", type=int, default=0, help="messages of the others that are due before")
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS], default=[*KINDS])
    parser.add_argument("--destinations", nargs="+", type=int, default=[1, 10, 1000], help="that take no messages")
    options = parser.parse_args()
    logging.getLogger("pika").setLevel(logging.CRITICAL)
    contestants = [("none", 0), *((kind, number) for kind in options.kinds for number in options.destinations)]
    found: dict[tuple[str, int], list[list[float]]] = {one: [] for one in contestants}
    with rabbitmq.running() as broker:
        for _ in range(options.rounds):
            for kind, number in contestants:
                found[kind, number].append(measured := measure(broker, options, kind, number))
                text = line(kind, number, [measured], options.rate)
                print(text, f"load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    print(f"{options.rate} healthy messages a second to queue {QUEUE!r} of {BROKER!r} for {options.seconds} s")
    print(f"{'beside':16}{'p50 ms late':>12}{'p99':>10}{'longest':>10}")
    for kind, number in contestants:
        print(line(kind, number, found[kind, number], options.rate))
    print("medians of the rounds; wanted: p99 at most 1.2 times that beside none, or 50 ms more")
    return 0


def line(kind: str, number: int, rounds: Sequence[Sequence[float]], rate: int) -> str:
    settled = [sorted(late[LEARNS * rate :]) for late in rounds]
    p50, p99 = (1000 * statistics.median(late[int(len(late) * part)] for late in settled) for part in (0.5, 0.99))
    longest = 1000 * statistics.median(map(max, rounds))
    return f"{f'{number:,} {kind}' if number else kind:16}{p50:12.1f}{p99:10.1f}{longest:10.1f}"


if __name__ == "__main__":
    sys.exit(main())
