"""The subtler rules of SQS a second time, on another emulator: moto is strict where ministack is not.

What ministack plays too, and other files show, is for a long run. Few messages: each request looks at all of them. Its
clock is moved in this process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from botocore.exceptions import ClientError
from moto import mock_aws
from support.sqs import World

from airflow_delayed.errors import LimitExceeded, TopologyError
from airflow_delayed.hooks.sqs import SqsDelayHook
from airflow_delayed.message import utcnow
from airflow_delayed.sqs.entries import decode
from airflow_delayed.sqs.settings import QueueSettings
from services import sqs

pytestmark = pytest.mark.long

URL = f"https://sqs.{sqs.REGION}.amazonaws.com"


class Clock:
    """What moto, its Date header and the hook take for the present. It stands still until a test moves it."""

    def __init__(self) -> None:
        self.moment = utcnow()

    def advance(self, seconds: float) -> None:
        self.moment += timedelta(seconds=seconds)

    def now(self) -> datetime:
        return self.moment


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in ("utils", "responses"):
        monkeypatch.setattr(f"moto.core.{module}.utcnow", lambda: made.now().replace(tzinfo=None))
    return made


@pytest.fixture
def world(clock: Clock, connect) -> Iterator[World]:
    # in this process: nothing is sent anywhere
    with mock_aws():
        conn_id = connect("moto", **sqs.connection(URL, unrestricted_delay=True))
        yield World(URL, conn_id, now=clock.now)


def refusal(request, **arguments: Any) -> str:
    """Return why SQS refuses a request."""
    with pytest.raises(ClientError) as caught:
        request(**arguments)
    return str(caught.value)


def test_a_dead_letter_queue_that_is_none(world: World):
    world.install()
    arn = world.attributes(world.queue)["QueueArn"]
    for target, reason in ((arn, "non fifo dead letter"), (f"{arn}-nowhere", "Could not find DLQ")):
        change = {"RedrivePolicy": json.dumps({"deadLetterTargetArn": target, "maxReceiveCount": 3})}
        with pytest.raises(ClientError, match=reason):
            world.client.set_queue_attributes(QueueUrl=world.url_of(world.fifo), Attributes=change)
    # both are found before SQS is asked to change anything
    with pytest.raises(ValueError, match="must be a standard one"):
        QueueSettings(dead_letter_queue=world.fifo, max_receive_count=3)
    settings = QueueSettings(dead_letter_queue=f"{world.queue}-nowhere", max_receive_count=3)
    with pytest.raises(TopologyError, match=f"{world.queue}-nowhere: missing"):
        world.hook.install([world.destination], settings=settings, repair=True)
    assert "RedrivePolicy" not in world.attributes(world.queue)


def test_over_900_s_is_refused_by_sqs_and_never_asked_of_it(world: World, connect):
    world.install()
    send = {"QueueUrl": world.url_of(world.queue), "MessageBody": "x"}
    assert "DelaySeconds" in refusal(world.client.send_message, **send, DelaySeconds=901)
    assert world.hook.send([world.message(900)]).sent == 1
    near = SqsDelayHook(connect("near", **sqs.connection(world.url)), clock=world.now)
    with pytest.raises(LimitExceeded, match="over 900 s away"):
        near.send([world.message(901)])
    assert world.counts(world.queue) == (0, 1, 0)
    # and a message in a FIFO queue has no delay of its own
    fifo = {"QueueUrl": world.url_of(world.fifo), "MessageGroupId": "m", "MessageDeduplicationId": "m"}
    assert "DelaySeconds" in refusal(world.client.send_message, **{**send, **fifo}, DelaySeconds=5)
    assert world.hook.send([world.message(901)]).sent == 1


def test_the_rules_of_names_are_sqs_s_own(world: World):
    assert "alphanumeric" in refusal(world.client.create_queue, QueueName=world.destination)  # it has a dot
    assert "alphanumeric" in refusal(world.client.create_queue, QueueName="a" * 81)
    with pytest.raises(LimitExceeded, match="81 characters"):
        world.hook.verify(["a" * 81])
    world.install()
    assert world.attributes(world.queue)["QueueArn"].endswith(world.queue)


def test_twelve_hours_in_all(world: World, clock: Clock):
    world.install()
    world.hook.send([world.message(0, "old")])
    clock.advance(3600)
    # moto counts from the send, where SQS does from the receive: "old" has an hour less
    world.hook.send([world.message(0, "new")])
    received_at = clock.now()
    old, new = sorted(world.raw(delete=False), key=lambda message: message["Body"], reverse=True)
    assert old["Body"] == "body of old"
    handles = [old["ReceiptHandle"], new["ReceiptHandle"]]
    # it refuses both for the one's sake
    refused = world.hook.extend_visibility(world.destination, handles, 43_200 - 1800)
    assert list(refused) == handles[:1]
    assert "VisibilityTimeout" in refused[handles[0]]
    clock.advance(60)
    with pytest.raises(ValueError, match=r"at most 12 hours .*60 s have passed"):
        world.hook.extend_visibility(world.destination, handles, 43_200, received_at=received_at)
    assert world.ids() == ["old"]  # its 30 s are over
    clock.advance(43_200 - 1800 - 60 - 60)
    assert world.ids() == []
    clock.advance(120)
    assert world.ids() == ["new"]


def test_dead_letters_and_the_queues_they_come_from(world: World, monkeypatch: pytest.MonkeyPatch):
    dead = f"{world.queue}-dead"
    settings = QueueSettings(dead_letter_queue=dead, max_receive_count=1)
    world.hook.install([world.destination], create_destinations=True, settings=settings)
    world.hook.send([world.message(0, f"m{number}") for number in range(3)])
    for _ in range(2):
        world.client.receive_message(QueueUrl=world.url_of(world.queue), MaxNumberOfMessages=10, VisibilityTimeout=0)
    assert world.hook.life(world.destination).dead_lettered == 3
    sources = world.client.list_dead_letter_source_queues(QueueUrl=world.url_of(dead))["queueUrls"]
    assert [url.rsplit("/", 1)[-1] for url in sources] == [world.queue]
    # SQS's own way is asked for first, since only this queue uses the dead-letter queue; moto has no tasks
    with pytest.raises(NotImplementedError, match="start_message_move_task"):
        world.hook.redrive(world.destination)
    other = f"{world.queue}-other"
    world.hook.install([other], create_destinations=True, settings=settings)
    assert len(world.client.list_dead_letter_source_queues(QueueUrl=world.url_of(dead))["queueUrls"]) == 2
    monkeypatch.setattr("moto.core.utils.utcnow", lambda: utcnow().replace(tzinfo=None))  # a receive waits by it
    # two queues use it, so SQS is not asked to move all; and moto does not say where a dead letter came from
    done = world.hook.redrive(world.destination)
    assert (done.task, done.moved, done.others) == (None, 0, 3)
    assert sorted(decode(message).message_id for message in world.raw(dead)) == ["m0", "m1", "m2"]
