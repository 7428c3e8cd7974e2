"""One message that is due in a year, sent round every 900 s: how late it is in the end, beside NServiceBus.

    python benchmarks/sqs_cycle.py [--days 365]

A private emulator whose clock is moved, its Date header too; about 5 minutes for a year. Each pass comes up to one
second after the message became visible, which is a sensor's pause. NServiceBus's lateness is computed from the very
same passes by its rule (DelayedMessagesPump.cs): each cuts the elapsed time off to whole seconds and counts again from
when it is sent back, for which 50 ms are taken.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / ".ci")]

from airflow_delayed.hooks.sqs import SqsDelayHook  # noqa: E402
from airflow_delayed.message import DelayedMessage  # noqa: E402
from airflow_delayed.sqs.entries import decode  # noqa: E402
from airflow_delayed.sqs.stats import CycleCounts  # noqa: E402
from services import sqs  # noqa: E402

#: Seconds from a receive to the next send, which NServiceBus loses in each round.
LATENCY = 0.05
QUEUE = "orders"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--days", type=float, default=365)
    options = parser.parse_args()
    chance = random.Random(1)
    with sqs.running() as server:
        os.environ["AIRFLOW_CONN_BENCHMARK"] = json.dumps(sqs.connection(server.url, unrestricted_delay=True))
        hook = SqsDelayHook("benchmark", clock=server.now)
        hook.install([QUEUE], create_destinations=True)
        sent = server.now()
        due_at = sent + timedelta(days=options.days)
        hook.send([DelayedMessage(destination=QUEUE, body=b"{}", due_at=due_at, message_id="year", headers={})])
        total, passes, others = CycleCounts(), 0, 0.0
        began, next_pass = time.perf_counter(), sent
        while not total.delivered:
            gap = chance.random()
            next_pass = max(next_pass, server.now()) + timedelta(seconds=900 + gap)
            server.advance(max(0.0, (next_pass - server.now()).total_seconds()))
            passes += 1
            others += gap + LATENCY
            before = total.moved
            total.merge(hook.cycle(QUEUE))
            if total.moved != before + 1:
                raise SystemExit(f"pass {passes} moved {total.moved - before} messages")
            next_pass = server.now()
        seconds = time.perf_counter() - began
        late = _arrival(server, hook) - due_at
        if hook.waiting(QUEUE):
            raise SystemExit("something is left in the delay queue")
    print(f"{options.days:,.0f} days: {passes:,} rounds in {seconds:,.0f} s, {total.requests:,} requests")
    print(f"this package        {late.total_seconds():12,.2f} s late (wanted: 0 to 2)")
    print(f"NServiceBus's rule  {others:12,.0f} s late ({others / 3600:.1f} h), by its arithmetic")
    return 0 if timedelta(0) <= late <= timedelta(seconds=2) else 1


def _arrival(server: sqs.Sqs, hook: SqsDelayHook) -> object:
    """Return when the message can be received, to a few hundredths of a second."""
    client = hook.get_conn()
    url = client.get_queue_url(QueueName=QUEUE)["QueueUrl"]
    while True:
        received = client.receive_message(QueueUrl=url, MessageAttributeNames=["All"]).get("Messages", [])
        if received:
            assert decode(received[0]).message_id == "year"
            return server.now()
        server.advance(0.02)


if __name__ == "__main__":
    sys.exit(main())
