"""Publishing delays of about 1000 s: this package beside Celery, kombu and the least that a raw client can do.

    python benchmarks/publish.py [--rounds 5] [--messages 20000]

Quorum queues, bodies of 200 bytes, persistent, confirmed; mandatory except by Celery, which has no such option. A
private broker; each contestant has a virtual host of its own in each round, and the rounds alternate. CPU is user and
system time: the client's while it publishes, the broker's from the first publish to one second after the last confirm.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / ".ci"), str(ROOT / "tests"), str(Path(__file__).parent)]

import pika  # noqa: E402
from raw_client import RawClient  # noqa: E402
from support.rabbitmq import VirtualHost, virtual_host  # noqa: E402

from airflow_delayed.message import DelayedMessage, utcnow  # noqa: E402
from airflow_delayed.rabbitmq.declare import apply, plan  # noqa: E402
from airflow_delayed.rabbitmq.publisher import Publisher  # noqa: E402
from airflow_delayed.rabbitmq.topology import CELERY, DELAYED, NSERVICEBUS, Topology  # noqa: E402
from services import rabbitmq  # noqa: E402

if TYPE_CHECKING:
    from celery import Celery, Task

DELAY = 1000
BODY = b"x" * 200
QUEUE = "orders"

#: Publishes so many messages and returns when they are confirmed.
Work = Callable[[], object]


@dataclass(frozen=True)
class Contestant:
    name: str
    prepare: Callable[[VirtualHost, int], Work]
    #: Of the messages of a round; the slow ones are given fewer.
    share: float = 1.0


@dataclass
class Result:
    rate: float
    client: float
    broker: float


def ours(topology: Topology) -> Callable[[VirtualHost, int], Work]:
    def prepare(host: VirtualHost, count: int) -> Work:
        with pika.BlockingConnection(host.parameters) as connection:
            apply(connection, plan(topology, [QUEUE]))
        start = utcnow()
        batch = [
            DelayedMessage(
                destination=QUEUE,
                body=BODY,
                due_at=start + timedelta(seconds=DELAY + number % 20),
                message_id=f"order-{number:08d}",
            )
            for number in range(count)
        ]
        publisher = Publisher(host.parameters, conn_id="benchmark", topology=topology)
        return lambda: publisher.send(batch)

    return prepare


def raw(topology: Topology, exchange: str, key: str) -> Callable[[VirtualHost, int], Work]:
    def prepare(host: VirtualHost, count: int) -> Work:
        with pika.BlockingConnection(host.parameters) as connection:
            apply(connection, plan(topology, [QUEUE]))
        client = RawClient(host.parameters)
        properties = pika.BasicProperties(delivery_mode=2, message_id="order-00000000")

        def work() -> None:
            client.publish(count, exchange, key, BODY, properties)
            client.close()

        return work

    return prepare


def by_kombu(host: VirtualHost, count: int) -> Work:
    from kombu import Connection, Producer
    from kombu.transport import native_delayed_delivery as delivery

    connection = Connection(_celery_url(host), transport_options={"confirm_publish": True})
    delivery.declare_native_delayed_delivery_exchanges_and_queues(connection, "quorum")
    producer = Producer(connection.channel())

    def work() -> None:
        for _ in range(count):
            producer.publish(
                BODY,
                exchange=delivery.level_name(delivery.MAX_LEVEL),
                routing_key=delivery.calculate_routing_key(DELAY, QUEUE),
                delivery_mode=2,
                mandatory=True,
                content_type="application/octet-stream",
                content_encoding="binary",
            )
        connection.release()

    return work


def by_celery(host: VirtualHost, count: int) -> Work:
    app, task = celery_app(host)
    body = "x" * 120  # 200 bytes with what Celery puts around it

    def work() -> None:
        for _ in range(count):
            task.apply_async((body,), countdown=DELAY)
        app.close()

    return work


def celery_app(host: VirtualHost) -> tuple[Celery, Task]:
    """Set up as Celery's own page on quorum queues and native delayed delivery does, with confirms."""
    from celery import Celery
    from kombu import Exchange, Queue
    from kombu.transport import native_delayed_delivery as delivery

    app = Celery("benchmark", broker=_celery_url(host), set_as_current=False)
    exchange = Exchange("celery", type="topic")
    app.conf.update(
        task_queues=[Queue(QUEUE, exchange, routing_key=QUEUE, queue_arguments={"x-queue-type": "quorum"})],
        task_default_queue=QUEUE,
        task_default_queue_type="quorum",
        task_default_exchange="celery",
        task_default_exchange_type="topic",
        task_default_routing_key=QUEUE,
        worker_detect_quorum_queues=True,
        broker_native_delayed_delivery_queue_type="quorum",
        broker_transport_options={"confirm_publish": True},
        task_ignore_result=True,
    )
    with app.connection_for_write() as connection:
        # what a worker does when it starts
        delivery.declare_native_delayed_delivery_exchanges_and_queues(connection, "quorum")
        for queue in app.amqp.queues.values():
            queue(connection.default_channel).declare()
            delivery.bind_queue_to_native_delayed_delivery_exchange(connection, queue)

    @app.task(name="work")
    def task(_: str) -> None:
        """Is not run here."""

    return app, task


def _celery_url(host: VirtualHost) -> str:
    given = host.parameters
    login = given.credentials
    # kombu takes all behind the first slash for the name, as it is
    return f"pyamqp://{login.username}:{login.password}@{given.host}:{given.port}/{host.name}"


OURS, FLOOR, CELERYS = "ours", "floor: raw client, plain queue", "Celery, native delayed delivery"
OURS_NSB, RAW_NSB = "ours, NServiceBus's topology", "raw client, NServiceBus's topology"
CONTESTANTS = (
    Contestant(FLOOR, raw(DELAYED, "", QUEUE)),
    Contestant(OURS, ours(DELAYED)),
    Contestant(RAW_NSB, raw(NSERVICEBUS, *NSERVICEBUS.address(QUEUE, DELAY)[:2]), 0.4),
    Contestant(OURS_NSB, ours(NSERVICEBUS), 0.4),
    Contestant("kombu, confirm_publish", by_kombu, 0.03),
    Contestant(CELERYS, by_celery, 0.03),
)


def measure(contestant: Contestant, broker: rabbitmq.Broker, messages: int) -> Result:
    count = max(1, int(messages * contestant.share))
    with virtual_host(broker.url) as host:
        work = contestant.prepare(host, count)
        time.sleep(0.5)
        gc.collect()
        broker_before, client_before, start = broker_cpu(broker), time.process_time(), time.perf_counter()
        work()
        seconds, client = time.perf_counter() - start, time.process_time() - client_before
        time.sleep(1)
        broker_used = broker_cpu(broker) - broker_before
        _check(host, count)
    return Result(count / seconds, client / count * 1e6, broker_used / count * 1e6)


def _check(host: VirtualHost, count: int) -> None:
    """All of it waits in the level's queue or, by the floor's client, in its own."""
    topologies = (DELAYED, NSERVICEBUS, CELERY)
    names = [QUEUE, *(topology.level_name(topology.digits.entry_level(DELAY)) for topology in topologies)]
    found = 0
    for name in names:
        try:
            found += host.count(name)
        except pika.exceptions.ChannelClosedByBroker:
            continue
    if found != count:
        raise SystemExit(f"{count} messages were confirmed, and {found} are there")


def broker_cpu(broker: rabbitmq.Broker) -> float:
    """Seconds of CPU that the broker has used since it started."""
    fields = Path("/proc", (broker.folder / "pid").read_text().strip(), "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=20_000)
    options = parser.parse_args()
    results: dict[str, list[Result]] = {contestant.name: [] for contestant in CONTESTANTS}
    with rabbitmq.running() as broker:
        for number in range(options.rounds + 1):
            for contestant in CONTESTANTS:
                result = measure(contestant, broker, options.messages if number else options.messages // 10)
                # the first round warms up
                if number:
                    results[contestant.name].append(result)
                    print(f"round {number}: {contestant.name}: {result.rate:,.0f}/s", file=sys.stderr)
    report(results)
    return 0


def report(results: dict[str, list[Result]]) -> None:
    print(f"\n{'':38}{'messages/s':>12}{'client CPU us':>15}{'broker CPU us':>15}   (medians; a message)")
    for name, found in results.items():
        rate, client, broker = (
            statistics.median(getattr(result, field) for result in found) for field in ("rate", "client", "broker")
        )
        print(f"{name:38}{rate:12,.0f}{client:15.1f}{broker:15.1f}")
    ratios = (
        (OURS, CELERYS, 50, "times Celery's rate", 1),
        (OURS, FLOOR, 60, "% of the floor", 100),
        (OURS_NSB, RAW_NSB, 85, "% of the raw client on NServiceBus's topology", 100),
    )
    print("\nmedian of the rounds' ratios")
    for one, other, target, text, factor in ratios:
        pairs = zip(results[one], results[other], strict=True)
        found = sorted(factor * first.rate / second.rate for first, second in pairs)
        print(f"{statistics.median(found):8.1f} {text} ({found[0]:.1f} to {found[-1]:.1f}; wanted: {target})")
    client = statistics.median(result.client for result in results[OURS])
    print(f"{client:8.1f} us of client CPU a message (wanted: at most 20)")


if __name__ == "__main__":
    sys.exit(main())
