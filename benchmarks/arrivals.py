"""How fast messages arrive once they are due, and how late: the delay levels, the store, and no delay at all.

    python benchmarks/arrivals.py [--rounds 3] [--messages 20000] [--seconds 20] [--newest] [--only NAME ...]

One second: all messages are due at one moment, and wait by then; arrivals a second count from that moment to the last.
"At once" is the limit: the same messages published without a delay, counted from the first publish.
Steady: at half of what the slowest delivered of one second, each message due 5 to 15 s after it is asked for.

Quorum queues, bodies of 200 bytes, persistent, confirmed; a plain pika consumer in a process of its own, which knows
from each body when its message was due. NServiceBus's topology is entered as its endpoints do, by this package's
publisher; Celery is Celery's own code, which rounds delays down. The store is a PostgreSQL with fsync on, fresh for
each measurement, so that each is a first run; its dispatchers are ``airflow delayed dispatcher`` with its defaults,
in processes of their own.

A private broker, by default Debian's package, with --newest that of make test-newest (as root); a virtual host for each
measurement; the rounds alternate. CPU is user and system time, a message, from the first send to the last arrival: of
the client (who sends or stores, and the dispatchers), of the broker and of the database.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pika
import psutil
from publish import QUEUE, celery_app
from support.rabbitmq import VirtualHost, virtual_host

from airflow_delayed.message import DelayedMessage
from airflow_delayed.rabbitmq.declare import apply, plan
from airflow_delayed.rabbitmq.publisher import Publisher
from airflow_delayed.rabbitmq.topology import DELAYED, NSERVICEBUS, Topology
from services import postgres, process, rabbitmq

if TYPE_CHECKING:
    from airflow_delayed.hooks.store import DelayedStoreHook

STORE, BROKER = "benchmark_store", "benchmark_broker"
#: Seconds for which no message may arrive until a measurement has failed.
PATIENCE = 60.0
#: Seconds between the last message that is sent ahead and the moment when all are due.
SPARE = 3.0
_DUE = re.compile(rb"due=(\d+\.\d+)")

#: Sends messages, of which each is due at its moment; those of a steady stream not before they are asked for.
Send = Callable[[Iterator[float]], object]


@dataclass(frozen=True)
class Contestant:
    """:param rate: how many messages a second it can surely take ahead, from which the common moment is planned."""

    name: str
    prepare: Callable[[VirtualHost, ExitStack], Send]
    rate: int
    #: What one that is dearer to send gets of a round's messages.
    share: float = 1.0


@dataclass(frozen=True)
class Result:
    late: array[float]
    rate: float
    client: float
    broker: float
    database: float

    def percentile(self, part: float) -> float:
        """What this part of the messages does not exceed, in seconds after due."""
        return self.late[min(len(self.late) - 1, int(len(self.late) * part))]

    @property
    def early(self) -> int:
        return sum(late < 0 for late in self.late)


def body(due: float) -> bytes:
    return f"due={due:.6f} ".encode().ljust(200, b"x")


def message(due: float, number: int) -> DelayedMessage:
    moment = datetime.fromtimestamp(due, timezone.utc)
    return DelayedMessage(destination=QUEUE, body=body(due), due_at=moment, message_id=f"order-{number:08d}")


def levels(topology: Topology) -> Callable[[VirtualHost, ExitStack], Send]:
    def prepare(host: VirtualHost, stack: ExitStack) -> Send:
        with pika.BlockingConnection(host.parameters) as connection:
            apply(connection, plan(topology, [QUEUE]))
        publisher = Publisher(host.parameters, conn_id=BROKER, topology=topology)
        stack.callback(publisher.close)
        return lambda dues: publisher.send(message(due, number) for number, due in enumerate(dues))

    return prepare


def at_once(host: VirtualHost, stack: ExitStack) -> Send:
    send = levels(DELAYED)(host, stack)
    # each is due at the moment in which it is published
    return lambda dues: send(time.time() for _ in dues)


def by_celery(host: VirtualHost, stack: ExitStack) -> Send:
    app, task = celery_app(host)
    stack.callback(app.close)

    def send(dues: Iterator[float]) -> None:
        for due in dues:
            # it takes no delay below one second, and its sender may not keep up
            moment = datetime.fromtimestamp(max(due, time.time() + 1.1), timezone.utc)
            task.apply_async((body(due)[:120].decode(),), eta=moment)

    return send


def store(dispatchers: int) -> Callable[[VirtualHost, ExitStack], Send]:
    def prepare(host: VirtualHost, stack: ExitStack) -> Send:
        hook = dispatched_store(host, stack, dispatchers)
        return lambda dues: hook.send(message(due, number) for number, due in enumerate(dues))

    return prepare


def dispatched_store(host: VirtualHost, stack: ExitStack, dispatchers: int) -> DelayedStoreHook:
    """Return a fresh store with dispatchers at work, which send to a broker that has the healthy queue."""
    with pika.BlockingConnection(host.parameters) as connection:
        apply(connection, plan(DELAYED, [QUEUE]))
    url = stack.enter_context(postgres.running()).url
    home = stack.enter_context(tempfile.TemporaryDirectory(prefix="airflow-delayed-"))
    os.environ.update({"AIRFLOW_HOME": home, f"AIRFLOW_CONN_{STORE.upper()}": url})
    os.environ[f"AIRFLOW_CONN_{BROKER.upper()}"] = json.dumps(host.connection)
    from airflow_delayed.hooks.store import DelayedStoreHook

    hook = stack.enter_context(closing(DelayedStoreHook(STORE, BROKER)))
    hook.install([])
    _ = [stack.enter_context(service(Path(home))) for _ in range(dispatchers)]
    return hook


@contextmanager
def service(home: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``airflow delayed dispatcher`` until the block ends; wait until it serves."""
    port = process.free_port()
    command = [str(Path(sys.executable).with_name("airflow")), "delayed", "dispatcher", "--store-conn-id", STORE]
    command += ["--deliver-conn-ids", BROKER, "--port", str(port), *options]
    log = home / f"dispatcher-{port}.log"
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT) as child:
        try:
            process.wait_for("a dispatcher", lambda: listens(port) is not None, seconds=120, log=log)
            yield child
        finally:
            child.send_signal(signal.SIGTERM)


CELERYS, NSB, LEVELS, LIMIT = "Celery", "topology nservicebus", "topology delayed", "at once (limit)"
ONE, TWO = "store, 1 dispatcher", "store, 2 dispatchers"
CONTESTANTS = (
    Contestant(LIMIT, at_once, 5_000),
    Contestant(ONE, store(1), 3_000),
    Contestant(TWO, store(2), 3_000),
    Contestant(LEVELS, levels(DELAYED), 4_000),
    Contestant(NSB, levels(NSERVICEBUS), 1_500),
    Contestant(CELERYS, by_celery, 100, 0.1),
)


def listens(port: int) -> psutil.Process | None:
    """Return the process that listens at a port of this machine."""
    for one in psutil.net_connections("tcp"):
        if one.status == psutil.CONN_LISTEN and one.laddr.port == port and one.pid:
            return psutil.Process(one.pid)
    return None


def cpu(parent: psutil.Process, without: Collection[int | None] = ()) -> float:
    """Seconds of CPU that a process has used, and its children: those that have ended, and those that run.

    :param without: children that do not count, and theirs neither.
    """
    ended = parent.cpu_times()
    total = ended.user + ended.system + ended.children_user + ended.children_system
    for child in parent.children():
        with suppress(psutil.NoSuchProcess):
            total += 0.0 if child.pid in without else cpu(child, without)
    return total


def server(url: str) -> psutil.Process | None:
    return listens(urlsplit(url).port or 0)


def at_one_moment(contestant: Contestant, count: int) -> tuple[float, Iterator[float]]:
    """The moment, late enough for all to be sent before, and for each message when it is due."""
    due = float(int(time.time() + count / contestant.rate + SPARE) + 1)
    return due, iter([due] * count)


def steady(count: int, rate: float) -> tuple[float, Iterator[float]]:
    chance, begin = random.Random(0), time.time()

    def dues() -> Iterator[float]:
        for number in range(count):
            asked = begin + number / rate
            time.sleep(max(0.0, asked - time.time()))
            yield asked + chance.uniform(5, 15)

    return begin, dues()


def measure(contestant: Contestant, broker_url: str, count: int, rate: float | None) -> Result:
    """Measure one second, or a steady stream of so many messages a second."""
    with virtual_host(broker_url) as host, ExitStack() as stack:
        send = contestant.prepare(host, stack)
        database = server(os.environ[f"AIRFLOW_CONN_{STORE.upper()}"]) if "store" in contestant.name else None
        here, there = multiprocessing.Pipe()
        consumer = multiprocessing.get_context("fork").Process(target=consume, args=(host, count, there), daemon=True)
        consumer.start()
        here.recv()
        begin, dues = steady(count, rate) if rate else at_one_moment(contestant, count)
        if contestant.name == LIMIT:
            begin = time.time()
        servers = [one for one in (server(broker_url), database) if one is not None]
        # all that runs below this process are the dispatchers, but for these
        others = {one.pid for one in servers} | {consumer.pid}

        def used() -> list[float]:
            return [cpu(psutil.Process(), others), *(cpu(one) for one in servers)]

        before = used()
        send(dues)
        if rate is None and contestant.name != LIMIT and time.time() > begin:
            raise SystemExit(f"{contestant.name}: not all was sent before it was due; give it a lower rate")
        # a stream is fed in real time, and the sender of one second has all its time until the moment
        if not here.poll(max(0.0, begin - time.time()) + count / 100 + PATIENCE):
            raise SystemExit(f"{contestant.name}: the consumer gave no answer")
        late, first, last = here.recv()
        costs = [1e6 * (now - was) / count for now, was in zip(used(), before, strict=True)]
        consumer.join()
    if len(late) != count:
        raise SystemExit(f"{contestant.name}: {count} messages were sent, and {len(late)} arrived")
    # who is early has begun earlier
    seconds = max(1e-3, last - min(begin, first))
    return Result(array("d", sorted(late)), count / seconds, costs[0], costs[1], costs[2] if database else 0.0)


def consume(host: VirtualHost, count: int, answer: Connection) -> None:
    """Say when it is ready; then how late each message came, in seconds, and when the first and the last came."""
    late, first, last = array("d"), 0.0, 0.0

    def take(_: object, __: object, ___: object, content: bytes) -> None:
        if due := _DUE.search(content):
            late.append(time.time() - float(due[1]))

    with pika.BlockingConnection(host.parameters) as connection:
        connection.channel().basic_consume(QUEUE, take, auto_ack=True)
        answer.send("ready")
        silent = time.monotonic()
        while len(late) < count and time.monotonic() - silent < 4 * PATIENCE:
            before = len(late)
            connection.process_data_events(time_limit=0.5)
            if len(late) > before:
                last, silent = time.time(), time.monotonic()
                first = first or last
    answer.send((late, first, last))


@contextmanager
def broker(newest: bool) -> Iterator[str]:
    if not newest:
        with rabbitmq.running() as running:
            yield running.url
        return
    import newest as sid

    (kind,) = (one for one in sid.SERVERS if one.service == "rabbitmq")
    with sid._prepared() as base, sid._running(sid._installed(kind, base), "rabbitmq") as url:
        yield url


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--messages", type=int, default=20_000, help="due at one second")
    parser.add_argument("--seconds", type=int, default=20, help="of the steady stream; 0: none")
    parser.add_argument("--newest", action="store_true", help="on Debian sid's RabbitMQ")
    parser.add_argument("--only", nargs="+", choices=[one.name for one in CONTESTANTS], help="some contestants")
    options = parser.parse_args()
    field = [one for one in CONTESTANTS if options.only is None or one.name in options.only]
    logging.getLogger("pika").setLevel(logging.CRITICAL)
    bursts: dict[str, list[Result]] = {one.name: [] for one in field}
    streams: dict[str, list[Result]] = {one.name: [] for one in field if one.name != LIMIT}
    with broker(options.newest) as url:
        for number in range(options.rounds):
            # each comes before and after each other one
            for contestant in field if number % 2 == 0 else reversed(field):
                result = measure(contestant, url, int(options.messages * contestant.share), None)
                bursts[contestant.name].append(result)
                note(number, contestant, result)
        rate = min(statistics.median(one.rate for one in found) for found in bursts.values()) / 2
        for number in range(options.rounds if options.seconds else 0):
            for contestant in field if number % 2 == 0 else reversed(field):
                if contestant.name in streams:
                    result = measure(contestant, url, int(options.seconds * rate), rate)
                    streams[contestant.name].append(result)
                    note(number, contestant, result)
    report(f"{options.messages:,} messages of one second", bursts)
    if options.seconds:
        report(f"{rate:,.0f} messages a second for {options.seconds} s", streams)
    ratios(bursts)
    ours = [found for results in (bursts, streams) for name, found in results.items() if name != CELERYS]
    return 1 if any(one.early for found in ours for one in found) else 0


def note(number: int, contestant: Contestant, result: Result) -> None:
    load = os.getloadavg()[0]
    text = f"round {number + 1}: {contestant.name}: {result.rate:,.0f}/s, last {result.late[-1]:.2f} s late"
    print(f"{text} (load {load:.1f})", file=sys.stderr, flush=True)


def report(title: str, results: dict[str, list[Result]]) -> None:
    columns = f"{'arrived/s':>10}{'p50 s':>8}{'p99 s':>8}{'last s':>8}{'early':>7}"
    print(f"\n{title:34}{columns}{'CPU us: client':>16}{'broker':>8}{'database':>10}")
    for name, found in results.items():
        p50, p99, last = (statistics.median(one.percentile(part) for one in found) for part in (0.5, 0.99, 1))
        fields = ("rate", "client", "broker", "database")
        rate, client, broker, database = (statistics.median(getattr(one, of) for one in found) for of in fields)
        early = sum(one.early for one in found)
        print(
            f"{name:34}{rate:10,.0f}{p50:8.2f}{p99:8.2f}{last:8.2f}{early:7}{client:16.0f}{broker:8.0f}{database:10.0f}"
        )
    print("medians of the rounds; seconds after due; CPU of a message")


def ratios(results: dict[str, list[Result]]) -> None:
    print("\nmedian of the rounds' ratios")
    wanted: Sequence[tuple[str, str, str, float]] = (
        (ONE, LIMIT, "rate", 0.85),
        (TWO, ONE, "rate", 1.0),
        (LEVELS, NSB, "rate", 2.5),
        (LEVELS, NSB, "broker", 0.6),
        (LEVELS, CELERYS, "rate", 2.5),
    )
    for one, other, field, target in wanted:
        if one not in results or other not in results:
            continue
        pairs = zip(results[one], results[other], strict=True)
        found = sorted(getattr(first, field) / getattr(second, field) for first, second in pairs)
        what = "broker CPU a message" if field == "broker" else "arrivals a second"
        bound = "at most" if field == "broker" else "at least"
        print(
            f"{statistics.median(found):7.2f} ({found[0]:.2f} to {found[-1]:.2f}) {what}: {one} / {other}"
            f" (wanted: {bound} {target:g})"
        )


if __name__ == "__main__":
    sys.exit(main())
