"""Tasks that wait for replies in one RabbitMQ queue: each gets its own, and those of others stay."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pika
import pytest
from airflow.sdk.exceptions import AirflowFailException, AirflowSensorTimeout
from support import pages, poison
from support.forked import Child
from support.lengths import length
from support.rabbitmq import VirtualHost, eventually, manage
from support.replying import (
    QUEUE,
    RECORDED,
    WaitingTask,
    die_handling,
    fired,
    reply_headers,
    result,
    sensor,
    wait,
)

from airflow_delayed.errors import DelayedError, TransportUnavailable
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.message import utcnow
from airflow_delayed.nservicebus import headers
from airflow_delayed.operators.send import DelayedSendOperator
from airflow_delayed.rabbitmq import reply_queues
from airflow_delayed.testing.delayed import TaskRun
from airflow_delayed.triggers import reply

pytestmark = pytest.mark.long

Connect = Callable[..., str]


@pytest.fixture(params=["quorum", "classic"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def rabbit(vhost: VirtualHost, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> VirtualHost:
    """A virtual host as the connection "rabbit", whose queue of replies each test declares."""
    connect("rabbit", **vhost.connection_with(topology="delayed"))
    monkeypatch.setattr(reply, "INTERVAL", 0.05)
    return vhost


def answer(vhost: VirtualHost, *message_ids: str, queue: str = QUEUE, body: str = "to {}") -> None:
    """Reply to messages as the recorded endpoint did."""
    properties = RECORDED["properties"]
    with vhost.channel() as channel:
        channel.confirm_delivery()
        for message_id in message_ids:
            reply_id = f"reply-{message_id}"
            headers = reply_headers(message_id, reply_id)
            fields = {**properties, "correlation_id": message_id, "message_id": reply_id, "headers": headers}
            channel.basic_publish("", queue, body.format(message_id).encode(), pika.BasicProperties(**fields))


def own_queues(vhost: VirtualHost) -> set[str]:
    found = vhost.manage("GET", "queues/{vhost}")
    return {queue["name"] for queue in found if ".reply." in queue["name"]}


def test_two_runs_one_queue_answers_crossed(rabbit: VirtualHost, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rabbit.declare(QUEUE, **{"x-queue-type": kind})
    rabbit.declare("billing")
    send = DelayedSendOperator(
        task_id="send",
        conn_id="rabbit",
        destination="billing",
        value="a secret question",
        delay=0,
        headers=headers("Acme.PriceRequest", reply_to=QUEUE),
    )
    (first,), (second,) = (TaskRun(send, utcnow(), run_id=run).execute()["message_ids"] for run in ("one", "two"))
    # the endpoint takes both, and answers the second one first
    assert {each.message_id for each in rabbit.collect("billing", enough=2)} == {first, second}
    one = WaitingTask(sensor(first, "rabbit")).start()
    answer(rabbit, second, "of-somebody-else", body="a secret answer to {}")
    answer(rabbit, first, body="a secret answer to {}")
    assert one.event() == {"reply": f"reply-{first}"}
    assert one.resume() == f"reply-{first}: a secret answer to {first}"
    # the other run begins to wait long after the reply has come
    assert result(sensor(second, "rabbit")) == f"reply-{second}: a secret answer to {second}"
    eventually(lambda: rabbit.count(QUEUE) == 1)
    assert result(sensor("of-somebody-else", "rabbit")).endswith("of-somebody-else")
    assert rabbit.count(QUEUE) == 0
    eventually(lambda: not own_queues(rabbit))
    assert "secret" not in caplog.text
    assert "secret" not in str(one.deferred.trigger.serialize())


def test_the_page_and_its_code(rabbit: VirtualHost, connect: Connect, here: Path) -> None:
    page = here / "docs/dotnet.md"
    _, (_, block) = pages.blocks(page)
    names: dict[str, Any] = {}
    exec(compile(block, str(page), "exec"), names)
    ask, wait = names["dag"].tasks
    connect("rabbitmq_dotnet", **rabbit.connection)
    rabbit.declare("prices", QUEUE)
    ask.delay = 0
    summary = TaskRun(ask, utcnow(), run_id="r").execute()
    answer(rabbit, *summary["message_ids"], body='{{"Price": 100}}')
    assert TaskRun(wait, utcnow(), run_id="r", xcoms={"ask": summary}).execute() == 100


def test_replies_of_a_service_that_is_no_nservicebus(rabbit: VirtualHost) -> None:
    rabbit.declare(QUEUE)
    with rabbit.channel() as channel:
        channel.basic_publish("", QUEUE, b"42", pika.BasicProperties(correlation_id="m1"))
    assert result(sensor("m1", "rabbit")) == "None: 42"
    assert rabbit.count(QUEUE) == 0


def test_replies_of_others_stay_however_often_one_looks(rabbit: VirtualHost) -> None:
    # what is returned more often than this is lost
    rabbit.declare(QUEUE, **{"x-delivery-limit": 3})
    count = length("replies of others in a queue", 200, 1000)
    others = [f"other-{number}" for number in range(count)]
    answer(rabbit, *others[: count // 2])
    for number in range(6):
        answer(rabbit, f"mine-{number}")
        if number == 3:
            answer(rabbit, *others[count // 2 :])
        assert result(sensor(f"mine-{number}", "rabbit")) == f"reply-mine-{number}: to mine-{number}"
    eventually(lambda: rabbit.count(QUEUE) == count)
    with rabbit.channel() as channel:
        taken = {channel.basic_get(QUEUE, auto_ack=True)[1].correlation_id for _ in range(count)}
    assert taken == set(others)


def test_what_no_client_can_read_holds_up_no_reply(rabbit: VirtualHost, caplog: pytest.LogCaptureFixture) -> None:
    rabbit.declare(QUEUE, **{"x-delivery-limit": 3})
    names_others = {"NServiceBus.CorrelationId": "billing", "NServiceBus.RelatedTo": ["m1"], "CC": ["billing"]}
    hostile = [*poison.CRAFTED.values(), pika.BasicProperties(headers=names_others, correlation_id="x" * 255)]
    with rabbit.channel() as channel:
        channel.confirm_delivery()
        for properties in hostile:
            channel.basic_publish("", QUEUE, b"", properties)
        # a reply whose own properties are strange
        headers = poison.table({"NServiceBus.RelatedTo": b"S" + poison.long(b"m0"), "when": b"T" + b"\xff" * 8})
        channel.basic_publish("", QUEUE, b"y" * 3_000_000, poison.raw(headers, message_id=poison.short(b"\xff\n")))
    assert result(sensor("m0", "rabbit", lambda reply: len(reply.body))) == 3_000_000
    for number in range(1, 6):
        answer(rabbit, f"m{number}")
        assert result(sensor(f"m{number}", "rabbit")) == f"reply-m{number}: to m{number}"
    eventually(lambda: rabbit.count(QUEUE) == len(hostile))
    assert own_queues(rabbit) == set()
    assert [line for line in caplog.messages if not line.isprintable()] == []


def test_a_killed_triggerer_and_a_killed_worker(rabbit: VirtualHost) -> None:
    rabbit.declare(QUEUE)
    ids = [f"m{number}" for number in range(40)]
    first, second = WaitingTask(sensor("m7", "rabbit")), WaitingTask(sensor("m8", "rabbit"))
    answer(rabbit, *ids)
    # the process dies before it searches, while it moves a reply, or when it has made its event
    for seconds in (0.0, 0.1, 0.5):
        with closing(Child(wait, arguments=first.deferred.trigger.serialize()[1])) as triggerer:
            assert triggerer.answer() == "begun"
            time.sleep(seconds)
    assert first.start().event() == {"reply": "reply-m7"}
    with closing(Child(die_handling, message_id="m7", conn_id="rabbit")) as worker:
        assert worker.answer() == "reply-m7: to m7"
        assert worker.ended() < 0
    # the retry reads it again, and another task its own
    assert result(sensor("m7", "rabbit")) == "reply-m7: to m7"
    assert second.start().resume() == "reply-m8: to m8"
    eventually(lambda: rabbit.count(QUEUE) >= len(ids) - 2)
    # one that was killed between the confirm and the acknowledgement has left a copy
    assert own_queues(rabbit) <= {f"{QUEUE}.reply.m7"}


def test_a_handler_that_fails_keeps_the_reply(rabbit: VirtualHost) -> None:
    rabbit.declare(QUEUE)
    answer(rabbit, "m1", "m1")

    def fail(reply: object) -> None:
        raise RuntimeError("the shop is closed")

    for _ in range(2):
        with pytest.raises(RuntimeError):
            result(sensor("m1", "rabbit", fail))
    # a second reply to the same message is for whoever waits next
    assert result(sensor("m1", "rabbit")) == "reply-m1: to m1"
    assert result(sensor("m1", "rabbit")) == "reply-m1: to m1"
    assert (rabbit.count(QUEUE), own_queues(rabbit)) == (0, set())


def test_a_timeout_says_what_to_do_and_a_later_reply_stays(rabbit: VirtualHost) -> None:
    rabbit.declare(QUEUE)
    task = sensor("m1", "rabbit", timeout=timedelta(seconds=0.2))
    with pytest.raises(AirflowSensorTimeout) as caught:
        result(task)
    text = str(caught.value)
    assert "no reply to message m1 came into queue 'airflow.results' within 0:00:00.200000" in text
    assert "its header NServiceBus.ReplyToAddress names this queue" in text
    assert "clear the task, and it waits again" in text
    answer(rabbit, "m1")
    assert rabbit.count(QUEUE) == 1
    assert result(sensor("m1", "rabbit")) == "reply-m1: to m1"
    assert own_queues(rabbit) == set()


def test_a_reply_that_no_worker_reads_goes_back(rabbit: VirtualHost) -> None:
    rabbit.declare(QUEUE)
    answer(rabbit, "m1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reply_queues, "_KEPT", 1)
        with closing(RabbitMQDelayHook("rabbit").replies(QUEUE)) as replies:
            assert replies.collect(["m1"]) == {"m1": "reply-m1"}
        eventually(lambda: rabbit.count(QUEUE) == 1)
    with rabbit.channel() as channel:
        # so that it may be declared with another time
        channel.queue_delete(f"{QUEUE}.reply.m1")
    assert result(sensor("m1", "rabbit")) == "reply-m1: to m1"
    assert rabbit.count(QUEUE) == 0


def test_what_is_wrong_is_an_error_before_the_wait(rabbit: VirtualHost, connect: Connect) -> None:
    with pytest.raises(TransportUnavailable, match=r"queue 'airflow[.]results' must exist before"):
        sensor("m1", "rabbit").execute({})
    with pytest.raises(AirflowFailException, match="message_id: must be text of 1 to 128 characters; message_id= must"):
        sensor("", "rabbit").execute({})
    with pytest.raises(AirflowFailException, match="1 to 128"):
        sensor(None, "rabbit").execute({})  # type: ignore[arg-type]
    rabbit.declare(QUEUE, "q" * 200)
    with pytest.raises(DelayedError, match="at most 255 bytes"):
        sensor("m" * 100, "rabbit", reply_to="q" * 200).execute({})
    connect("sqs", conn_type="aws")
    with pytest.raises(DelayedError, match="cannot wait for replies through SqsDelayHook; use a connection"):
        sensor("m1", "sqs").execute({})
    user = "reader-only"
    manage(rabbit.url, "PUT", f"users/{user}", {"password": "x", "tags": ""})
    rabbit.manage("PUT", f"permissions/{{vhost}}/{user}", {"configure": "", "write": "", "read": ".*"})
    connect("reader", **{**rabbit.connection, "login": user, "password": "x"})
    with pytest.raises(TransportUnavailable, match=r"rights read on 'airflow.results', configure, write and read on"):
        sensor("m1", "reader").execute({})


def test_many_tasks_in_one_triggerer_and_a_queue_that_goes(
    rabbit: VirtualHost, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reply, "_FIRST_SLEEP", 0.05)
    rabbit.declare(QUEUE)
    tasks = [WaitingTask(sensor(f"m{number}", "rabbit")) for number in range(20)]

    async def triggerer() -> list[object]:
        waits = [asyncio.create_task(fired(task.deferred.trigger)) for task in tasks]
        await asyncio.sleep(0.5)
        with rabbit.channel() as channel:
            channel.queue_delete(QUEUE)
        await asyncio.to_thread(eventually, lambda: "Still trying" in caplog.text)
        await asyncio.to_thread(rabbit.declare, QUEUE)
        await asyncio.to_thread(answer, rabbit, *[f"m{number}" for number in reversed(range(20))])
        return await asyncio.gather(*waits)

    assert asyncio.run(triggerer()) == [{"reply": f"reply-m{number}"} for number in range(20)]
