"""The emulator's clock can be moved, its Date header too: other tests rest on that."""

from __future__ import annotations

from datetime import timedelta
from email.utils import parsedate_to_datetime

from support.sqs import ClockedWorld


def test_the_servers_clock_moves(clocked: ClockedWorld):
    before = clocked.now()
    clocked.install()
    url = clocked.url_of(clocked.queue)
    clocked.client.send_message(QueueUrl=url, MessageBody="x", DelaySeconds=600)
    assert clocked.counts(clocked.queue) == (0, 1, 0)
    clocked.advance(600)
    answer = clocked.client.receive_message(QueueUrl=url, MessageSystemAttributeNames=["All"])
    (message,) = answer["Messages"]
    received = int(message["Attributes"]["ApproximateFirstReceiveTimestamp"])
    assert received - int(message["Attributes"]["SentTimestamp"]) >= 600_000
    shown = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
    assert shown >= before.replace(microsecond=0) + timedelta(seconds=600)
    assert clocked.now() - before >= timedelta(seconds=600)
