"""The memory that sending takes: many messages from a generator beside few.

    python benchmarks/memory.py [--messages 1000000] [--few 10000]

Through RabbitMQDelayHook.send's publisher to a quorum level, bodies of 200 bytes, due in 1000 s and more; each count in
a process of its own, whose peak the system keeps. A private broker.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pika
from publish import BODY, DELAY, QUEUE
from support.rabbitmq import VirtualHost, virtual_host

from airflow_delayed.message import DelayedMessage, utcnow
from airflow_delayed.rabbitmq.declare import apply, plan
from airflow_delayed.rabbitmq.publisher import Publisher
from airflow_delayed.rabbitmq.topology import DELAYED
from services import rabbitmq

WANTED_MIB = 30
#: Different seconds in which messages fall due: more than are kept of what is known of each.
SECONDS = 20_000


def stream(count: int) -> Iterator[DelayedMessage]:
    start = utcnow()
    for number in range(count):
        due = start + timedelta(seconds=DELAY + number % SECONDS)
        yield DelayedMessage(destination=QUEUE, body=BODY, due_at=due, message_id=f"order-{number:08d}")


def send(host: VirtualHost, count: int) -> float:
    """Send so many messages and return this process's peak in MiB."""
    report = Publisher(host.parameters, conn_id="benchmark").send(stream(count))
    if report.sent != count:
        raise SystemExit(f"{count} messages were given, and {report.sent} confirmed")
    # not getrusage: its peak is that of the parent at first
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--few", type=int, default=10_000)
    parser.add_argument("--send", nargs=3, metavar=("URL", "VHOST", "COUNT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.send:
        url, name, count = options.send
        print(send(VirtualHost(url, name), int(count)))
        return 0
    peaks = []
    with rabbitmq.running() as broker:
        for count in (options.few, options.messages):
            with virtual_host(broker.url) as host:
                with pika.BlockingConnection(host.parameters) as connection:
                    apply(connection, plan(DELAYED, [QUEUE]))
                start = time.perf_counter()
                command = [sys.executable, __file__, "--send", host.url, host.name, str(count)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                peaks.append(float(done.stdout))
                seconds = time.perf_counter() - start
                print(f"{count:12,} messages: peak {peaks[-1]:7.1f} MiB, {count / seconds:,.0f}/s")
    more = peaks[1] - peaks[0]
    print(f"{more:+.1f} MiB, {peaks[1] / peaks[0]:.2f} times (wanted: at most {WANTED_MIB} MiB more)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
