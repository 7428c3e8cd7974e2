"""Delays beyond 900 s, on a real SQS server whose clock is moved."""

from __future__ import annotations

from datetime import timedelta

import pytest
from support.sqs import DELAY, ClockedWorld, sensor_of

from airflow_delayed.errors import LimitExceeded, TopologyError
from airflow_delayed.hooks.sqs import SqsDelayHook


def delays(world: ClockedWorld) -> list[str]:
    """The attribute of all messages in the delay queue, which are due back there already; leaves them there."""
    return [message["MessageAttributes"][DELAY]["StringValue"] for message in world.raw(world.fifo, delete=False)]


def is_near(text: str, seconds: int) -> bool:
    """Whether a remaining delay is what the example says, or less by what the machine took meanwhile."""
    return seconds - 60 <= int(text) <= seconds


def test_845_seconds_go_straight_to_the_destination(clocked: ClockedWorld):
    clocked.install()
    message = clocked.message(845)
    clocked.hook.send([message])
    assert clocked.counts(clocked.fifo) == (0, 0, 0)
    clocked.advance((message.due_at - clocked.now()).total_seconds() - 30)
    assert clocked.counts(clocked.queue) == (0, 1, 0)
    clocked.advance(31)
    (arrived,) = clocked.raw()
    assert DELAY not in arrived["MessageAttributes"]
    assert arrived["Body"] == "body of m1"


def test_1925_seconds_take_two_rounds(clocked: ClockedWorld):
    clocked.install()
    sensor = sensor_of(clocked)
    message = clocked.message(1925)
    clocked.hook.send([message])
    assert clocked.counts(clocked.fifo) == (0, 1, 0)

    assert not sensor.poke({})  # delayed is not empty
    clocked.advance(900)
    (first,) = delays(clocked)
    assert is_near(first, 1925)
    clocked.advance(31)  # the look above ends: the time in flight counts as well, by the client's clock
    assert not sensor.poke({})
    assert clocked.counts(clocked.fifo) == (0, 1, 0)
    assert clocked.counts(clocked.queue) == (0, 0, 0)

    clocked.advance(900)
    assert not sensor.poke({})  # it moved something, so it looks once more
    assert clocked.counts(clocked.queue) == (0, 1, 0)
    assert sensor.poke({})

    while not (arrived := clocked.raw()):
        assert clocked.now() <= message.due_at + timedelta(minutes=5)
        clocked.advance(1)
    assert clocked.now() >= message.due_at
    (only,) = arrived
    assert DELAY not in only["MessageAttributes"]
    assert (only["Body"], only["MessageAttributes"]["Kind"]["StringValue"]) == ("body of m1", "reminder")
    assert only["MessageAttributes"]["NServiceBus.MessageId"]["StringValue"] == "m1"
    clocked.advance(3600)
    assert sensor.poke({})
    assert clocked.ids() == []


def test_a_mixed_load_arrives_once_and_never_early(clocked: ClockedWorld):
    clocked.install()
    sensor = sensor_of(clocked)
    wanted = [0, 1, 10, 450, 899, 900, 901, 902, 950, 1799, 1800, 1801, 1925, 2700, 2701, 3000, 3599, 4000] * 3
    messages = [clocked.message(delay, f"m{number}") for number, delay in enumerate(wanted)]
    due = {message.message_id: message.due_at for message in messages}
    clocked.hook.send(messages)
    arrived: list[str] = []
    for _ in range(200):
        sensor.poke({})
        found = clocked.ids()
        now = clocked.now()
        assert [message_id for message_id in found if due[message_id] > now] == []
        arrived += found
        if len(arrived) >= len(messages):
            break
        clocked.advance(50)
    assert sorted(arrived) == sorted(due)
    assert sensor.poke({})


def test_large_messages_are_sent_on_in_batches_that_sqs_takes(clocked: ClockedWorld):
    clocked.install()
    clocked.hook.send([clocked.message(1000, f"m{number}", body=b"x" * 300_000) for number in range(10)])
    clocked.advance(905)
    assert clocked.hook.cycle(clocked.destination).delivered == 10


def test_the_queues_own_visibility_timeout_does_not_count(clocked: ClockedWorld):
    clocked.install()
    fifo = clocked.url_of(clocked.fifo)
    clocked.client.set_queue_attributes(QueueUrl=fifo, Attributes={"VisibilityTimeout": "0"})
    clocked.hook.send([clocked.message(1000), clocked.message(5000, "m2")])
    clocked.advance(905)
    counts = clocked.hook.cycle(clocked.destination)
    assert (counts.delivered, counts.requeued, counts.undeleted) == (1, 1, 0)


def test_a_message_sent_twice_waits_once(clocked: ClockedWorld):
    clocked.install()
    message = clocked.message(1000)
    clocked.hook.send([message])
    clocked.hook.send([message])  # a retry of the task
    assert clocked.hook.waiting(clocked.destination) == 1


def test_time_that_passes_while_a_batch_fills_is_taken_off(clocked: ClockedWorld):
    clocked.install()
    start, passed = clocked.now(), 0.0
    hook = SqsDelayHook(clocked.conn_id, clock=lambda: start + timedelta(seconds=passed))

    def stream():
        nonlocal passed
        yield clocked.message(0, "m1", due_at=start + timedelta(seconds=901))
        passed = 0.5
        yield clocked.message(0, "m2", due_at=start + timedelta(seconds=5000))
        passed = 60  # no longer a case for the delay queue

    assert hook.send(stream()).sent == 2
    assert clocked.counts(clocked.queue) == (0, 1, 0)
    assert clocked.counts(clocked.fifo) == (0, 1, 0)


def test_a_missing_destination_is_an_error_and_loses_nothing(clocked: ClockedWorld):
    clocked.install()
    sensor = sensor_of(clocked)
    clocked.hook.send([clocked.message(1000, f"m{number}") for number in range(3)])
    clocked.client.delete_queue(QueueUrl=clocked.url_of(clocked.queue))
    clocked.advance(905)
    for _ in range(2):
        with pytest.raises(TopologyError, match=f"queue {clocked.queue}: missing"):
            sensor.poke({})
    assert clocked.counts(clocked.fifo) == (3, 0, 0)
    clocked.hook.install([clocked.destination], create_destinations=True)
    clocked.hook.cycle(clocked.destination)
    clocked.advance(200)
    assert clocked.ids() == ["m0", "m1", "m2"]


def test_several_destinations(clocked: ClockedWorld):
    clocked.install()
    other = f"{clocked.queue}-other"
    clocked.hook.install([other], create_destinations=True)
    clocked.hook.send([clocked.message(1000, "m1"), clocked.message(1000, "m2", destination=other)])
    sensor = sensor_of(clocked, destination=[clocked.destination, other])
    assert not sensor.poke({})
    clocked.advance(905)
    assert not sensor.poke({})
    assert sensor.poke({})
    clocked.advance(200)
    assert clocked.ids() == ["m1"]
    assert [message["Body"] for message in clocked.raw(other)] == ["body of m2"]


def test_what_comes_back_within_five_minutes_is_not_dropped_as_its_own_copy(clocked: ClockedWorld, caplog):
    clocked.install()
    # somebody set the delay queue to one minute
    fifo = clocked.url_of(clocked.fifo)
    clocked.client.set_queue_attributes(QueueUrl=fifo, Attributes={"DelaySeconds": "60"})
    sent = {DELAY: "2000", "NServiceBus.MessageId": "m1"}
    clocked.client.send_message(
        QueueUrl=fifo,
        MessageBody="x",
        MessageGroupId="m1",
        MessageDeduplicationId="m1",
        MessageAttributes={name: {"DataType": "String", "StringValue": value} for name, value in sent.items()},
    )
    clocked.advance(61)
    assert clocked.hook.cycle(clocked.destination).failed == 1
    assert f"queue {clocked.fifo} DelaySeconds: wanted 900, found 60" in caplog.text  # told before the first message
    assert "has to delay by 900 s" in caplog.text
    assert clocked.hook.cycle(clocked.destination).is_quiet  # it is hidden for four minutes
    clocked.advance(245)
    assert clocked.hook.cycle(clocked.destination).requeued == 1
    assert clocked.hook.waiting(clocked.destination) == 1
    for _ in range(4):
        clocked.advance(305)
        clocked.hook.cycle(clocked.destination)
    clocked.advance(900)
    assert clocked.ids() == ["m1"]


def test_a_due_time_of_an_earlier_send_does_not_make_it_early(clocked: ClockedWorld):
    clocked.install()
    stale = (clocked.now() - timedelta(hours=5)).isoformat()
    # a consumer sends a message that it got once more, with all its attributes and a new delay
    sent = {DELAY: "20000", "AirflowDelayed.DueAt": stale, "NServiceBus.MessageId": "again"}
    clocked.client.send_message(
        QueueUrl=clocked.url_of(clocked.fifo),
        MessageBody="x",
        MessageGroupId="again",
        MessageDeduplicationId="again",
        MessageAttributes={name: {"DataType": "String", "StringValue": value} for name, value in sent.items()},
    )
    due_at = clocked.now() + timedelta(seconds=20_000)
    while clocked.hook.waiting(clocked.destination):
        assert clocked.counts(clocked.queue) == (0, 0, 0)
        clocked.advance(901)
        clocked.hook.cycle(clocked.destination)
    clocked.advance((due_at - clocked.now()).total_seconds() - 40)
    assert clocked.ids() == []
    clocked.advance(45)
    (message,) = clocked.arrived()
    assert message.due_at is not None
    assert abs(message.due_at - due_at) < timedelta(seconds=40)


def test_received_before_it_goes_by_this_machines_clock_as_at_an_endpoint(clocked: ClockedWorld):
    clocked.install()
    clocked.client.send_message(
        QueueUrl=clocked.url_of(clocked.fifo),
        MessageBody="x",
        MessageGroupId="net",
        MessageDeduplicationId="net",
        MessageAttributes={DELAY: {"DataType": "String", "StringValue": "5000"}},
    )
    clocked.advance(905)
    clocked.raw(clocked.fifo, delete=False)
    clocked.advance(31)
    ahead = SqsDelayHook(clocked.conn_id, clock=lambda: clocked.now() + timedelta(hours=3))
    counts = ahead.cycle(clocked.destination)
    assert (counts.requeued, counts.delivered) == (0, 1)


def test_what_the_destination_would_refuse_in_the_end_is_refused_at_once(clocked: ClockedWorld):
    clocked.install()
    # as queues are that were made when SQS took less
    url = clocked.url_of(clocked.queue)
    clocked.client.set_queue_attributes(QueueUrl=url, Attributes={"MaximumMessageSize": "262144"})
    with pytest.raises(LimitExceeded, match=r"300,\d{3} bytes.*takes 262,144 \(MaximumMessageSize\)"):
        clocked.hook.send([clocked.message(2000, body=b"x" * 300_000)])
    assert clocked.hook.waiting(clocked.destination) == 0
    assert clocked.hook.send([clocked.message(2000, body=b"x" * 200_000)]).sent == 1


def test_the_delay_queue_is_not_the_destination(clocked: ClockedWorld):
    clocked.install()
    with pytest.raises(LimitExceeded, match="name the standard queue"):
        clocked.hook.cycle(clocked.fifo)
