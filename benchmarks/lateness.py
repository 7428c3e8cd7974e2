"""How late messages arrive: this package beside the bare topology, and bursts of it beside Celery.

    python benchmarks/lateness.py [--rounds 3] [--seconds 15] [--burst 2000]

Quorum queues, bodies of 200 bytes, persistent, confirmed; a private broker, and a virtual host of its own for each
contestant in each round; the rounds alternate. A message tells when it is due in its body; late is what passes from
then until a plain pika consumer, a process of its own, has it.

Steady: 200 messages a second with delays of 1 to 4 whole seconds; the bare topology is entered by its exchanges.
Burst: 2,000 messages are asked for within one second, each to come 6 s after that moment, of which a publisher that
cannot keep up is late already. Beside it stands how late they come counted from when each was published.

Broker CPU is user and system time for the whole chain, from the first publish to the last arrival.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from multiprocessing.connection import Connection

import pika
from publish import QUEUE, broker_cpu, celery_app
from raw_client import RawClient
from support.rabbitmq import VirtualHost, virtual_host

from airflow_delayed.message import DelayedMessage
from airflow_delayed.rabbitmq.declare import apply, plan
from airflow_delayed.rabbitmq.publisher import Publisher
from airflow_delayed.rabbitmq.topology import DELAYED, NSERVICEBUS, Topology
from services import rabbitmq

RATE = 200
BURST_DELAY = 6
PATIENCE = 90.0
_DUE = re.compile(rb"due=(\d+\.\d+) sent=(\d+\.\d+)")

#: Publishes so many messages.
Work = Callable[[], object]


@dataclass(frozen=True)
class Contestant:
    name: str
    prepare: Callable[[VirtualHost, int], Work]


@dataclass
class Result:
    #: Milliseconds after due.
    late: list[float]
    #: Milliseconds after publishing and the delay.
    after_publishing: list[float]
    broker: float

    def percentile(self, part: float) -> float:
        return percentile(self.late, part)


def percentile(found: list[float], part: float) -> float:
    """What this part of the figures does not exceed."""
    return sorted(found)[min(len(found) - 1, int(len(found) * part))]


def body(asked: float, delay: int) -> bytes:
    return f"due={asked + delay:.6f} sent={time.time() + delay:.6f} ".encode().ljust(200, b"x")


def asked(count: int, rate: int) -> Iterator[tuple[int, float]]:
    """Numbers and when they are asked for, at this rate; never before that moment."""
    start = time.time()
    for number in range(count):
        moment = start + number / rate
        time.sleep(max(0.0, moment - time.time()))
        yield number, moment


def install(host: VirtualHost, topology: Topology) -> None:
    with pika.BlockingConnection(host.parameters) as connection:
        apply(connection, plan(topology, [QUEUE]))


def message(number: int, moment: float, delay: int) -> DelayedMessage:
    return DelayedMessage(
        destination=QUEUE,
        body=body(moment, delay),
        due_at=datetime.fromtimestamp(moment + delay, timezone.utc),
        message_id=f"order-{number:08d}",
    )


def steady(host: VirtualHost, count: int) -> Work:
    install(host, DELAYED)
    publisher = Publisher(host.parameters, conn_id="benchmark", topology=DELAYED)
    return lambda: publisher.send(message(number, moment, 1 + number % 4) for number, moment in asked(count, RATE))


def steady_bare(host: VirtualHost, count: int) -> Work:
    install(host, DELAYED)
    client = RawClient(host.parameters)

    def work() -> None:
        for number, moment in asked(count, RATE):
            delay = 1 + number % 4
            properties = pika.BasicProperties(delivery_mode=2, message_id=f"order-{number:08d}")
            exchange, key, _ = DELAYED.address(QUEUE, delay, direct=False)
            client.publish(1, exchange, key, body(moment, delay), properties)
        client.close()

    return work


def burst(topology: Topology) -> Callable[[VirtualHost, int], Work]:
    def prepare(host: VirtualHost, count: int) -> Work:
        install(host, topology)
        publisher = Publisher(host.parameters, conn_id="benchmark", topology=topology)
        return lambda: publisher.send(message(number, moment, BURST_DELAY) for number, moment in asked(count, count))

    return prepare


def burst_by_celery(host: VirtualHost, count: int) -> Work:
    app, task = celery_app(host)

    def work() -> None:
        for _, moment in asked(count, count):
            task.apply_async((body(moment, BURST_DELAY).decode()[:120],), countdown=BURST_DELAY)
        app.close()

    return work


STEADY, BARE = "200/s, ours", "200/s, bare topology"
OURS, OURS_NSB, CELERYS = "burst, ours", "burst, NServiceBus's entry", "burst, Celery"
CONTESTANTS = (
    Contestant(BARE, steady_bare),
    Contestant(STEADY, steady),
    Contestant(OURS, burst(DELAYED)),
    Contestant(OURS_NSB, burst(NSERVICEBUS)),
    Contestant(CELERYS, burst_by_celery),
)


def measure(contestant: Contestant, broker: rabbitmq.Broker, count: int) -> Result:
    with virtual_host(broker.url) as host:
        work = contestant.prepare(host, count)
        here, there = multiprocessing.Pipe()
        consumer = multiprocessing.Process(target=consume, args=(host, count, there), daemon=True)
        consumer.start()
        here.recv()
        before = broker_cpu(broker)
        work()
        if not here.poll(PATIENCE + 10):
            raise SystemExit(f"{contestant.name}: the consumer gave no answer")
        late = here.recv()
        used = broker_cpu(broker) - before
        consumer.join()
    if len(late) != count:
        raise SystemExit(f"{contestant.name}: {count} messages were sent, and {len(late)} arrived")
    return Result([due for due, _ in late], [sent for _, sent in late], used / count * 1e6)


def consume(host: VirtualHost, count: int, answer: Connection) -> None:
    """Tell when it is ready; then, of each message, how many milliseconds it came after its two times."""
    late: list[tuple[float, float]] = []

    def take(_: object, __: object, ___: object, content: bytes) -> None:
        now = time.time()
        found = _DUE.search(content)
        if found:
            late.append(((now - float(found[1])) * 1000, (now - float(found[2])) * 1000))

    with pika.BlockingConnection(host.parameters) as connection:
        connection.channel().basic_consume(QUEUE, take, auto_ack=True)
        answer.send("ready")
        deadline = time.monotonic() + PATIENCE
        while len(late) < count and time.monotonic() < deadline:
            connection.process_data_events(time_limit=0.5)
    answer.send(late)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=15, help="of the steady rate")
    parser.add_argument("--burst", type=int, default=2000, help="messages of a burst")
    options = parser.parse_args()
    results: dict[str, list[Result]] = {contestant.name: [] for contestant in CONTESTANTS}
    with rabbitmq.running() as broker:
        measure(CONTESTANTS[1], broker, RATE)  # warms up
        for number in range(1, options.rounds + 1):
            # each comes before and after each other one
            for contestant in CONTESTANTS if number % 2 else reversed(CONTESTANTS):
                count = options.seconds * RATE if contestant.name in (STEADY, BARE) else options.burst
                result = measure(contestant, broker, count)
                results[contestant.name].append(result)
                print(f"round {number}: {contestant.name}: p99 {result.percentile(0.99):.1f} ms", file=sys.stderr)
    report(results)
    return 0


def report(results: dict[str, list[Result]]) -> None:
    print(f"\n{'ms after due':28}{'p50':>9}{'p99':>9}{'max':>9}{'early':>7}{'p99 *':>9}{'broker CPU us':>15}")
    for name, found in results.items():
        p50, p99, most = (statistics.median(each.percentile(part) for each in found) for part in (0.5, 0.99, 1))
        early = sum(late < 0 for each in found for late in each.late)
        published = statistics.median(percentile(each.after_publishing, 0.99) for each in found)
        broker = statistics.median(each.broker for each in found)
        print(f"{name:28}{p50:9.1f}{p99:9.1f}{most:9.1f}{early:7}{published:9.1f}{broker:15.0f}")
    print("medians of the rounds; * counted from when each message was published; CPU of a message")
    print("\nmedian of the rounds' ratios of p99")
    for one, other, target in ((STEADY, BARE, 1.25), (OURS, CELERYS, 0.2)):
        pairs = zip(results[one], results[other], strict=True)
        ratios = sorted(first.percentile(0.99) / second.percentile(0.99) for first, second in pairs)
        median = statistics.median(ratios)
        print(f"{median:8.3f} {one} / {other} ({ratios[0]:.3f} to {ratios[-1]:.3f}; wanted: at most {target})")


if __name__ == "__main__":
    sys.exit(main())
