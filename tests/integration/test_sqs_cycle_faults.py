"""Delays beyond 900 s when a call fails, a sensor is killed, or a message cannot be moved."""

from __future__ import annotations

import json
import signal
from datetime import timedelta
from types import SimpleNamespace

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError
from support.forked import Child
from support.sqs import DELAY, ClockedWorld, grown, sensor_of
from support.sqs_processes import dies_before_its_second_delete

from airflow_delayed.errors import LimitExceeded
from airflow_delayed.hooks.sqs import SqsDelayHook


def test_a_delete_that_fails_leaves_a_duplicate_that_the_id_reveals(clocked: ClockedWorld):
    clocked.install()
    clocked.hook.send([clocked.message(1000, "m1"), clocked.message(1000, "m2")])
    clocked.advance(905)
    failing = True

    def spoil(params, **_):
        if failing:
            body = json.loads(params["body"])
            body["Entries"][0]["ReceiptHandle"] = "no such handle"
            params["body"] = json.dumps(body).encode()

    clocked.on("before-call.sqs.DeleteMessageBatch", spoil)
    counts = clocked.hook.cycle(clocked.destination)
    assert (counts.delivered, counts.undeleted) == (2, 1)
    failing = False
    clocked.advance(31)
    other = SqsDelayHook(clocked.conn_id, clock=clocked.now)  # a process that knows nothing of it
    assert other.cycle(clocked.destination).delivered == 1
    clocked.advance(200)
    ids = clocked.ids()
    assert sorted(set(ids)) == ["m1", "m2"]
    assert len(ids) == 3
    assert sensor_of(clocked).poke({})


@pytest.mark.parametrize("code", ["KmsThrottled", "OverLimit"])
def test_a_receive_that_botocore_does_not_repeat_is_repeated(clocked: ClockedWorld, code):
    clocked.install()
    clocked.hook.send([clocked.message(1000)])
    clocked.advance(905)
    tries = []

    def refuse(**_):
        tries.append(code)
        if len(tries) < 4:
            raise ClientError({"Error": {"Code": code}}, "ReceiveMessage")

    clocked.on("before-call.sqs.ReceiveMessage", refuse)
    assert clocked.hook.cycle(clocked.destination).delivered == 1
    assert grown(clocked.slept, 0.2, 0.4, 0.8)


def test_what_this_process_sent_on_and_could_not_delete_it_does_not_send_again(clocked: ClockedWorld, monkeypatch):
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=lambda seconds: None))
    clocked.install()
    clocked.hook.send([clocked.message(1000, "near"), clocked.message(4000, "far")])
    clocked.advance(905)
    failing, tries = True, []

    def break_off(**_):
        tries.append(failing)
        if failing:
            raise EndpointConnectionError(endpoint_url=clocked.url)

    clocked.on("before-send.sqs.DeleteMessageBatch", break_off)
    counts = clocked.hook.cycle(clocked.destination)
    assert (counts.delivered, counts.requeued, counts.undeleted) == (1, 1, 2)
    assert len(tries) == 5
    failing = False
    clocked.advance(1800)  # longer than SQS itself would know the message that went back
    counts = clocked.hook.cycle(clocked.destination)
    assert (counts.delivered, counts.requeued, counts.undeleted) == (0, 1, 0)
    clocked.advance(905)
    assert clocked.hook.cycle(clocked.destination).delivered == 1
    clocked.advance(500)
    assert clocked.ids() == ["far", "near"]
    assert clocked.hook.waiting(clocked.destination) == 0


def test_a_sensor_killed_between_send_and_delete_loses_nothing(clocked: ClockedWorld):
    clocked.install()
    delays = [1000] * 15 + [2500] * 15
    messages = [clocked.message(delay, f"m{number:02}") for number, delay in enumerate(delays)]
    due = {message.message_id: message.due_at for message in messages}
    clocked.hook.send(messages)
    clocked.advance(905)
    killed = Child(dies_before_its_second_delete, conn_id=clocked.conn_id, destination=clocked.destination)
    assert killed.ended() == -signal.SIGKILL
    killed.close()

    arrived: list[str] = []
    sensor = sensor_of(clocked)
    for _ in range(100):
        clocked.advance(31)
        done = sensor.poke({})
        found, now = clocked.ids(), clocked.now()
        assert [message_id for message_id in found if due[message_id] > now] == []
        arrived += found
        if done and clocked.counts(clocked.queue) == (0, 0, 0):
            break
    assert sorted(set(arrived)) == sorted(due)
    # only those of the one batch whose delete was cut off, and only if it went to the destination
    twice = {message_id for message_id in arrived if arrived.count(message_id) > 1}
    assert len(arrived) - len(due) == len(twice) <= 10
    assert all(int(message_id[1:]) < 15 for message_id in twice)


def test_what_cannot_be_sent_on_is_tried_again(clocked: ClockedWorld):
    clocked.install()
    clocked.hook.send([clocked.message(1000, "good"), clocked.message(1000, "large", body=b"x" * 5000)])
    url = clocked.url_of(clocked.queue)
    clocked.client.set_queue_attributes(QueueUrl=url, Attributes={"MaximumMessageSize": "1024"})
    clocked.advance(905)
    counts = clocked.hook.cycle(clocked.destination)
    assert (counts.delivered, counts.failed) == (1, 1)
    assert not sensor_of(clocked).poke({})
    clocked.client.set_queue_attributes(QueueUrl=url, Attributes={"MaximumMessageSize": "1048576"})
    clocked.advance(6)
    assert clocked.hook.cycle(clocked.destination).delivered == 1
    clocked.advance(200)
    assert clocked.ids() == ["good", "large"]


@pytest.mark.parametrize("attribute", [None, "soon", "1_000", str(2**31)])
def test_a_message_that_does_not_say_when_it_is_due_goes_whole_to_the_error_queue(clocked: ClockedWorld, attribute):
    clocked.install()
    attributes = {
        "Kind": {"DataType": "Number", "StringValue": "7"},
        "Raw": {"DataType": "Binary", "BinaryValue": b"\x00"},
    }
    if attribute:
        attributes[DELAY] = {"DataType": "String", "StringValue": attribute}
    for number in range(12):
        clocked.client.send_message(
            QueueUrl=clocked.url_of(clocked.fifo),
            MessageBody="foreign",
            MessageGroupId=f"foreign-{number}",
            MessageDeduplicationId=f"foreign-{number}",
            MessageAttributes=attributes,
        )
    clocked.hook.send([clocked.message(1000)])
    clocked.advance(905)
    counts = clocked.hook.cycle(clocked.destination)
    assert (counts.delivered, counts.failed, counts.to_error_queue) == (1, 0, 12)
    assert clocked.hook.waiting(clocked.destination) == 0
    errors = clocked.raw(f"{clocked.queue}-error")
    assert [message["Body"] for message in errors] == ["foreign"] * 12
    for message in errors:
        arrived = message["MessageAttributes"]
        assert arrived.items() >= attributes.items()
        assert arrived["AirflowDelayed.FromQueue"]["StringValue"] == clocked.fifo
        assert DELAY in arrived["AirflowDelayed.Reason"]["StringValue"]
    clocked.advance(200)
    assert clocked.ids() == ["m1"]


def test_an_error_queue_of_ones_own(clocked: ClockedWorld):
    clocked.install()
    own = f"{clocked.queue}-poison"
    clocked.client.create_queue(QueueName=own)
    full = {f"a{number}": {"DataType": "String", "StringValue": "x"} for number in range(10)}  # no room for a reason
    clocked.client.send_message(
        QueueUrl=clocked.url_of(clocked.fifo),
        MessageBody="x",
        MessageGroupId="x",
        MessageDeduplicationId="x",
        MessageAttributes=full,
    )
    clocked.advance(905)
    result = sensor_of(clocked, error_queue=own, until=timedelta(0)).poke({})
    assert result.xcom_value["to_error_queue"] == 1
    (message,) = clocked.raw(own)
    assert message["MessageAttributes"] == full
    with pytest.raises(LimitExceeded, match="error_queue"):
        SqsDelayHook(clocked.conn_id).cycle(clocked.destination, error_queue=clocked.fifo)
