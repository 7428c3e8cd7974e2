"""What sending and cycling cost in CPU and requests, beside bare boto3 batch calls that make the same requests.

    python benchmarks/sqs_requests.py [--rounds 5]

A server in another process gives canned answers at once, so that only the client counts. Bodies of 200 bytes, one
header; batches of 10. Bare boto3 is a default client; "unchecked" has parameter_validation=False, as this package has.
Its entries are made before the time is taken when it sends; when it cycles it copies what it received. It checks
nothing, computes no delay and looks at no answer.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / ".ci"), str(Path(__file__).parent)]

import boto3  # noqa: E402
from botocore.config import Config  # noqa: E402
from canned_sqs import FULL  # noqa: E402

from airflow_delayed.hooks.sqs import SqsDelayHook  # noqa: E402
from airflow_delayed.message import DelayedMessage, utcnow  # noqa: E402
from airflow_delayed.sqs.entries import pack, through_fifo  # noqa: E402
from services import process, sqs  # noqa: E402

MESSAGES = FULL * 10
QUEUE = "orders"


def bare(url: str, *, checked: bool) -> Any:
    return boto3.client(
        "sqs",
        endpoint_url=url,
        region_name=sqs.REGION,
        aws_access_key_id="x",
        aws_secret_access_key="x",
        config=Config(parameter_validation=checked),
    )


def messages() -> list[DelayedMessage]:
    due_at = utcnow() + timedelta(days=30)
    return [
        DelayedMessage(
            destination=QUEUE,
            body=b"x" * 200,
            due_at=due_at,
            message_id=f"order-{number:08d}",
            headers={"Kind": "reminder"},
        )
        for number in range(MESSAGES)
    ]


def send_bare(client: Any) -> Callable[[], object]:
    url = client.get_queue_url(QueueName=f"{QUEUE}-delay.fifo")["QueueUrl"]
    entries = []
    for message in messages():
        parcel = pack(message)
        entries.append(through_fifo(parcel.body, parcel.attributes, 2_592_000, message.message_id, message.due_at))
        entries[-1]["Id"] = str((len(entries) - 1) % 10)

    def work() -> None:
        for start in range(0, len(entries), 10):
            client.send_message_batch(QueueUrl=url, Entries=entries[start : start + 10])

    return work


def cycle_bare(client: Any) -> Callable[[], object]:
    url = client.get_queue_url(QueueName=f"{QUEUE}-delay.fifo")["QueueUrl"]
    wanted = ["MessageDeduplicationId", "SentTimestamp", "ApproximateFirstReceiveTimestamp", "ApproximateReceiveCount"]

    def work() -> None:
        while received := client.receive_message(
            QueueUrl=url,
            MaxNumberOfMessages=10,
            WaitTimeSeconds=0,
            VisibilityTimeout=30,
            MessageAttributeNames=["All"],
            MessageSystemAttributeNames=wanted,
        ).get("Messages"):
            client.send_message_batch(
                QueueUrl=url,
                Entries=[
                    {
                        "Id": str(number),
                        "MessageBody": message["Body"],
                        "MessageAttributes": message["MessageAttributes"],
                        "MessageDeduplicationId": message["Attributes"]["MessageDeduplicationId"],
                        "MessageGroupId": message["Attributes"]["MessageDeduplicationId"],
                    }
                    for number, message in enumerate(received)
                ],
            )
            client.delete_message_batch(
                QueueUrl=url,
                Entries=[
                    {"Id": str(number), "ReceiptHandle": message["ReceiptHandle"]}
                    for number, message in enumerate(received)
                ],
            )

    return work


def send_ours(_: str) -> Callable[[], object]:
    hook, ready = SqsDelayHook("benchmark"), messages()
    hook.get_conn()
    return lambda: hook.send(ready)


def cycle_ours(_: str) -> Callable[[], object]:
    hook = SqsDelayHook("benchmark")
    hook.get_conn()
    return lambda: hook.cycle(QUEUE)


WORK: dict[str, dict[str, Callable[[str], Callable[[], object]]]] = {
    "send": {
        "bare boto3": lambda url: send_bare(bare(url, checked=True)),
        "bare boto3, unchecked": lambda url: send_bare(bare(url, checked=False)),
        "ours": send_ours,
    },
    "cycle": {
        "bare boto3": lambda url: cycle_bare(bare(url, checked=True)),
        "bare boto3, unchecked": lambda url: cycle_bare(bare(url, checked=False)),
        "ours": cycle_ours,
    },
}


def counted(url: str) -> dict[str, int]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return dict(json.loads(answer.read()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    cpu: dict[tuple[str, str], list[float]] = {}
    requests: dict[tuple[str, str], float] = {}
    port = process.free_port()
    url = f"http://127.0.0.1:{port}"
    os.environ["AIRFLOW_CONN_BENCHMARK"] = json.dumps(sqs.connection(url, unrestricted_delay=True))
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "canned.log"
        command = [sys.executable, str(Path(__file__).with_name("canned_sqs.py")), str(port)]
        with process.running(command, log=log):
            process.wait_for("the canned server", lambda: counted(url) is not None, log=log)
            for number in range(options.rounds + 1):
                for what, contestants in WORK.items():
                    for name, prepare in contestants.items():
                        work = prepare(url)
                        counted(url)
                        gc.collect()
                        before = time.process_time()
                        work()
                        used = time.process_time() - before
                        found = counted(url)
                        # the first round warms up
                        if number:
                            cpu.setdefault((what, name), []).append(used / MESSAGES * 1e6)
                        requests[what, name] = sum(
                            count for action, count in found.items() if action.endswith(("Batch", "ReceiveMessage"))
                        )
    return report(cpu, requests)


def report(cpu: dict[tuple[str, str], list[float]], requests: dict[tuple[str, str], float]) -> int:
    print(f"{'':32}{'CPU us':>10}{'requests':>12}   (a message; medians)")
    for (what, name), found in cpu.items():
        print(f"{what:7}{name:25}{statistics.median(found):10.1f}{requests[what, name] / MESSAGES:12.4f}")
    good = True
    print("\nmedian of the rounds' ratios")
    for what in WORK:
        for other, wanted in (("bare boto3", 1.2), ("bare boto3, unchecked", None)):
            ratios = [one / two for one, two in zip(cpu[what, "ours"], cpu[what, other], strict=True)]
            ratio = statistics.median(ratios)
            aim = f"wanted: at most {wanted}" if wanted else "no target"
            print(f"{ratio:8.2f} times {other}'s CPU to {what} ({min(ratios):.2f} to {max(ratios):.2f}; {aim})")
            good = good and (wanted is None or ratio <= wanted)
    each = requests["cycle", "ours"] / MESSAGES
    print(f"{each:8.4f} requests a message and cycle (wanted: at most 0.31)")
    return 0 if good and each <= 0.31 else 1


if __name__ == "__main__":
    sys.exit(main())
