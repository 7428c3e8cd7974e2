"""Installing, verifying and sending, on a real SQS server."""

from __future__ import annotations

import gc
import json
import socket
import time
import tracemalloc
from datetime import timedelta

import pytest
from botocore.exceptions import EndpointConnectionError
from support.sqs import World, grown

from airflow_delayed.delivery import State, delivery_for
from airflow_delayed.errors import (
    DestinationMissing,
    LimitExceeded,
    SendFailed,
    TopologyError,
    TransportUnavailable,
)
from airflow_delayed.hooks.sqs import SqsDelayHook
from airflow_delayed.sqs.entries import MAX_BYTES
from services import process, sqs


def states(report) -> list[State]:
    return [finding.state for finding in report]


def test_the_connections_type_leads_to_the_hook(world: World):
    hook = delivery_for(world.conn_id)
    assert isinstance(hook, SqsDelayHook)
    assert hook.horizon == timedelta(seconds=870)
    assert hook.test_connection()[0]


def test_namespace_and_name_for_openlineage_are_the_queues_arn(world: World):
    world.install()
    hook = SqsDelayHook(world.conn_id)
    for fifo, url in ((False, world.queue), (True, world.fifo)):
        found = hook.get_conn().get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])
        assert ":".join(hook.dataset(world.destination, fifo=fifo)) == found["Attributes"]["QueueArn"]


def test_install_twice(world: World):
    plan = world.hook.install([world.destination], create_destinations=True, dry_run=True)
    assert states(plan) == [State.PLANNED, State.PLANNED]
    assert world.client.list_queues(QueueNamePrefix=world.queue).get("QueueUrls", []) == []
    first = world.hook.install([world.destination], create_destinations=True)
    assert states(first) == [State.CREATED, State.CREATED]
    assert states(world.hook.install([world.destination, world.destination])) == [State.OK, State.OK]
    assert world.hook.verify([world.destination]).ok
    made = world.attributes(world.fifo)
    assert (made["FifoQueue"], made["DelaySeconds"], made["MessageRetentionPeriod"]) == ("true", "900", "1209600")
    assert "RedrivePolicy" not in made


def test_install_makes_no_destination_unless_told(world: World):
    with pytest.raises(TopologyError, match=f"queue {world.queue}: missing") as caught:
        world.hook.install([world.destination])
    assert caught.value.report.missing_destinations == (world.destination,)
    assert world.url_of(world.fifo)


def test_the_delay_queue_is_needed_for_long_delays_only(world: World):
    world.client.create_queue(QueueName=world.queue)
    assert world.hook.verify([world.destination], max_delay=timedelta(seconds=900)).ok
    for far in (timedelta(seconds=901), None):
        report = world.hook.verify([world.destination], max_delay=far)
        (problem,) = report.problems
        assert str(problem).startswith(f"queue {world.fifo}: missing (what is due in over 900 s waits in it; or let")
        assert report.missing_destinations == ()  # the destination itself is there


def test_a_prefix_from_the_connection(world: World, connect):
    prefix = f"{world.queue}-"
    conn_id = connect("sqs_prefixed", **sqs.connection(world.url, queue_name_prefix=prefix, unrestricted_delay=True))
    hook = SqsDelayHook(conn_id)
    hook.install(["orders"], create_destinations=True)
    hook.send([world.message(0, destination="orders")])
    assert [message["Body"] for message in world.raw(f"{prefix}orders")] == ["body of m1"]
    assert world.url_of(f"{prefix}orders-delay.fifo")


def test_a_url_or_arn_of_the_connections_account_is_that_queue(world: World, connect):
    world.install()
    prefixed = sqs.connection(world.url, queue_name_prefix="dev-", unrestricted_delay=True)
    hook = SqsDelayHook(connect("sqs_addresses", **prefixed))
    addresses = world.url_of(world.queue), world.attributes(world.queue)["QueueArn"]
    for number, address in enumerate(addresses):
        assert states(hook.install([address], create_destinations=True)) == [State.OK, State.OK]
        hook.send([world.message(0, f"m{number}", destination=address)])
        assert hook.waiting(address) == 0
        assert hook.life(address).destination.queue == world.queue
    assert world.ids() == ["m0", "m1"]


@pytest.mark.parametrize("other", ["account", "region", "name"])
def test_a_queue_of_another_account_is_an_error_and_none_is_made(world: World, other: str):
    world.install()
    arn = world.attributes(world.queue)["QueueArn"]
    region, account = arn.split(":")[3:5]
    change = {"account": (account, "210987654321"), "region": (region, "ap-south-2"), "name": ("orders", "remind")}
    foreign = arn.replace(*change[other])
    name = foreign.rsplit(":", 1)[-1]
    before = world.client.list_queues(QueueNamePrefix=name).get("QueueUrls", [])
    possible = "through a connection of that one, which may take on a role there .role_arn.; to make a queue"
    for refused, method in (
        (TopologyError, lambda: world.hook.install([foreign], create_destinations=True)),
        (DestinationMissing, lambda: world.hook.send([world.message(0, destination=foreign)])),
        (DestinationMissing, lambda: world.hook.send([world.message(2000, destination=foreign)])),
        (TopologyError, lambda: world.hook.cycle(foreign)),
        (TopologyError, lambda: world.hook.life(foreign)),
    ):
        with pytest.raises(refused, match=possible):
            method()
    (problem,) = world.hook.verify([foreign]).problems
    assert problem.destination == foreign
    assert world.client.list_queues(QueueNamePrefix=name).get("QueueUrls", []) == before


def test_what_arrives_is_what_was_sent(world: World):
    world.install()
    many = {f"Header.{number}": f"wert {number} ü" for number in range(11)}
    messages = [
        world.message(0, "emoji", body="Grüße \U0001f600".encode()),
        world.message(0, "binary", body=bytes(range(256))),
        world.message(0, "headers", headers=many),
        world.message(-5, "past"),
    ]
    report = world.hook.send(iter(messages))
    assert (report.sent, report.by_destination) == (4, {world.destination: 4})
    assert (report.first_due, report.last_due) == (
        min(message.due_at for message in messages),
        max(message.due_at for message in messages),
    )
    arrived = {found.message_id: (found.body, found.headers) for found in world.arrived()}
    assert arrived == {message.message_id: (message.body, message.headers) for message in messages}


def test_a_queues_own_delay_does_not_count(world: World):
    world.client.create_queue(QueueName=world.queue, Attributes={"DelaySeconds": "300"})
    world.hook.send([world.message(0)])
    assert world.ids() == ["m1"]


def test_near_and_far_messages_in_one_batch(world: World):
    world.install()
    messages = [world.message(600 if number % 2 else 3600, f"m{number}") for number in range(25)]
    assert world.hook.send(messages).sent == 25
    assert world.counts(world.queue) == (0, 12, 0)
    assert world.counts(world.fifo) == (0, 13, 0)


def test_nothing_is_sent_if_a_queue_is_missing(world: World):
    world.install()
    good = world.message(0, "good")
    with pytest.raises(DestinationMissing, match=r"nowhere; .*TopologyInstallOperator") as caught:
        world.hook.send([good, world.message(0, "lost", destination="nowhere")])
    assert caught.value.destinations == ("nowhere",)
    world.client.delete_queue(QueueUrl=world.url_of(world.fifo))
    hook = SqsDelayHook(world.conn_id)
    with pytest.raises(TopologyError, match=f"queue {world.fifo}: missing.*TopologyInstallOperator"):
        hook.send([good, world.message(1000, "far")])
    assert world.ids() == []


def test_a_missing_queue_after_others_were_sent(world: World):
    world.install()
    messages = [world.message(0, f"m{number}") for number in range(12)]
    messages.insert(11, world.message(0, "lost", destination="nowhere"))
    with pytest.raises(SendFailed) as caught:
        world.hook.send(messages)
    assert [message_id for message_id, _ in caught.value.failures] == ["lost"]
    assert caught.value.report.sent == 12
    assert len(world.ids()) == 12


def test_a_delay_queue_without_its_destination_takes_nothing(world: World):
    world.install()
    world.client.delete_queue(QueueUrl=world.url_of(world.queue))
    with pytest.raises(DestinationMissing):
        SqsDelayHook(world.conn_id).send([world.message(1000)])
    assert world.counts(world.fifo) == (0, 0, 0)


@pytest.mark.parametrize(
    "fields, column",
    [
        ({"body": b"x" * MAX_BYTES}, "body"),
        ({"destination": "orders.fifo"}, "destination"),
        ({"destination": "a" * 70, "delay": 901}, "destination"),
    ],
)
def test_what_sqs_cannot_carry_is_refused_before_anything_is_sent(world: World, fields, column):
    world.install()
    bad = world.message(**{"delay": 0, "message_id": "bad", **fields})
    with pytest.raises(LimitExceeded) as checked:
        world.hook.check(bad, world.now())
    assert checked.value.column == column
    if fields.get("destination", "").startswith("a"):
        return  # such a queue cannot exist
    with pytest.raises(LimitExceeded):
        world.hook.send([world.message(0, "good"), bad])
    assert world.ids() == []


def test_the_largest_messages_arrive(world: World):
    world.install()
    body = b"x" * (MAX_BYTES - 1000)
    world.hook.send([world.message(0, f"m{number}", body=body) for number in range(12)])
    assert len(world.ids()) == 12


def test_an_entry_that_sqs_refuses_is_named_and_the_others_arrive(world: World):
    # an old queue with a limit below that of today
    world.client.create_queue(QueueName=world.queue, Attributes={"MaximumMessageSize": "1024"})
    messages = [world.message(0, f"m{number}", body=b"x" * (2000 if number == 7 else 10)) for number in range(15)]
    with pytest.raises(
        SendFailed, match="confirmed 14 messages and not 1: message m7: InvalidParameterValue"
    ) as caught:
        world.hook.send(messages)
    assert [message_id for message_id, _ in caught.value.failures] == ["m7"]
    assert caught.value.report.sent == 14
    assert world.ids() == sorted(f"m{number}" for number in range(15) if number != 7)
    assert world.slept == []  # trying again cannot help


def test_a_batch_that_sqs_refuses_as_a_whole_is_sent_one_by_one(world: World):
    world.install()
    sizes = []

    def enlarge(params, **_):
        body = json.loads(params["body"])
        sizes.append(len(body["Entries"]))
        for entry in body["Entries"]:
            if entry["MessageBody"] == "body of m4":
                entry["MessageBody"] = "x" * (MAX_BYTES + 1)
        params["body"] = json.dumps(body).encode()

    world.on("before-call.sqs.SendMessageBatch", enlarge)
    with pytest.raises(SendFailed, match=r"message m4: .*BatchRequestTooLong") as caught:
        world.hook.send([world.message(0, f"m{number}") for number in range(8)])
    assert caught.value.report.sent == 7
    assert sizes == [8] + [1] * 8
    assert world.ids() == [f"m{number}" for number in range(8) if number != 4]


def _throttle(world: World, times: int) -> list[int]:
    """Let the answer to each request, so many times, say that its first entry was not taken; return their sizes."""
    sizes: list[int] = []

    def drop(params, **_):
        body = json.loads(params["body"])
        sizes.append(len(body["Entries"]))
        if len(sizes) <= times:
            # not sent at all, so that a resend is no duplicate
            body["Entries"][0]["MessageBody"] = ""
            params["body"] = json.dumps(body).encode()

    def busy(parsed, **_):
        for entry in parsed.get("Failed", ()):
            entry.update(SenderFault=False, Code="ServiceUnavailable")

    world.on("before-call.sqs.SendMessageBatch", drop)
    world.on("after-call.sqs.SendMessageBatch", busy)
    return sizes


def test_what_fails_in_a_batch_is_sent_again_alone(world: World):
    world.install()
    sizes = _throttle(world, 2)
    report = world.hook.send([world.message(0, f"m{number}") for number in range(10)])
    assert report.sent == 10
    assert sizes == [10, 1, 1]
    assert grown(world.slept, 0.2, 0.4)
    assert world.ids() == sorted(f"m{number}" for number in range(10))


def test_a_message_that_fails_again_and_again_is_named(world: World):
    world.install()
    sizes = _throttle(world, 100)
    with pytest.raises(SendFailed, match="message m0: ServiceUnavailable") as caught:
        world.hook.send([world.message(0, f"m{number}") for number in range(10)])
    assert sizes == [10, 1, 1, 1]
    assert caught.value.report.sent == 9
    assert len(world.ids()) == 9


def test_a_queue_deleted_meanwhile(world: World):
    world.install()
    world.hook.send([world.message(0, "m0")])
    world.client.delete_queue(QueueUrl=world.url_of(world.queue))
    with pytest.raises(SendFailed, match=r"m1: .*NonExistentQueue|m1: QueueDoesNotExist"):
        world.hook.send([world.message(0, "m1")])


def test_too_many_failures_end_the_send(world: World):
    world.install()
    world.hook.send([world.message(0, "m0")])
    world.client.delete_queue(QueueUrl=world.url_of(world.queue))
    taken = 0

    def endless():
        nonlocal taken
        while True:
            taken += 1
            yield world.message(0, f"m{taken}")

    with pytest.raises(SendFailed) as caught:
        world.hook.send(endless())
    assert len(caught.value.failures) == taken == 1000


def test_messages_for_rare_destinations_do_not_wait_for_the_end(world: World):
    world.install()
    other = f"{world.queue}-other"
    world.hook.install([other], create_destinations=True)
    start = world.now()
    passed = timedelta(0)
    hook = SqsDelayHook(world.conn_id, clock=lambda: start + passed)

    def stream():
        nonlocal passed
        # due by the hook's clock too, however long it took to make the hook
        yield world.message(0, "rare", destination=other, due_at=start)
        for number in range(5):
            yield world.message(0, f"m{number}", due_at=start)
            passed += timedelta(seconds=0.5)
        assert [message["Body"] for message in world.raw(other)] == ["body of rare"]

    assert hook.send(stream()).sent == 6


def test_memory_stays_flat(world: World):
    world.install()

    def stream(count: int):
        for number in range(count):
            yield world.message(0, f"m{number}", body=b"x" * 100_000)

    world.hook.send(stream(20))
    gc.collect()
    tracemalloc.start()
    try:
        world.hook.send(stream(200))  # 20 MB
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_a_server_that_is_gone(connect):
    conn_id = connect(
        "sqs_gone",
        **sqs.connection(
            f"http://127.0.0.1:{process.free_port()}", config_kwargs={"retries": {"total_max_attempts": 1}}
        ),
    )
    hook = SqsDelayHook(conn_id)
    with pytest.raises(TransportUnavailable, match=r"'sqs_gone' could not look up queue orders: .*endpoint"):
        hook.verify(["orders"])
    answers, text = hook.test_connection()
    assert not answers
    assert "sqs_gone" in text


@pytest.mark.parametrize(
    "change, cause",
    [
        ("silent", "Read timeout on endpoint URL"),
        ("refused", "Could not connect to the endpoint URL"),
        ("unknown", "Could not connect to the endpoint URL"),
    ],
)
def test_a_test_of_what_does_not_answer_takes_a_few_seconds(connect, change: str, cause: str):
    with socket.create_server(("127.0.0.1", 0), backlog=4) as silent:
        url = {
            "silent": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "refused": f"http://127.0.0.1:{process.free_port()}",
            "unknown": "http://no-such-host.invalid",
        }[change]
        # its own timeouts and tries are those of the test
        began = time.monotonic()
        answers, text = SqsDelayHook(connect("sqs_test", **sqs.connection(url))).test_connection()
        # boto3 by itself would try for minutes
        assert time.monotonic() - began < 30
    assert not answers
    assert cause in text
    assert "at the network" in text


def test_connection_lost_in_the_middle_tells_what_was_confirmed(world: World):
    world.install()
    requests = []

    def cut(**_: object) -> None:
        requests.append(1)
        if len(requests) > 1:
            raise EndpointConnectionError(endpoint_url=world.url)

    world.on("before-call.sqs.SendMessageBatch", cut)
    with pytest.raises(TransportUnavailable) as caught:
        world.hook.send(world.message(0, f"m{number}") for number in range(25))
    assert caught.value.report is not None
    assert caught.value.report.sent == len(world.ids()) == 10
