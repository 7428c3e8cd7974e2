"""Whatever properties a broker accepts cost nobody a connection, and hold up no message behind them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from random import Random
from typing import Any

import pika
import pytest
from pika.exceptions import AMQPError
from support import poison
from support.lengths import length
from support.rabbitmq import VirtualHost
from support.watching import Triggerer, eventually, triggerer, watcher

from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.message import DelayedMessage
from airflow_delayed.rabbitmq.connection import connect as connect_to
from airflow_delayed.rabbitmq.publisher import Publisher
from airflow_delayed.rabbitmq.topology import DELAYED, Topology

UTC = timezone.utc
FRAMES = length("random property frames to a watcher", 2000, 100_000)
DAMAGED = length("damaged property frames, which the broker refuses or not", 30, 1000)
#: Behind so many of them comes a good message.
EACH = 20
GOOD = poison.raw(message_id=poison.short(b"good"))


@pytest.fixture
def hook(hook: RabbitMQDelayHook) -> RabbitMQDelayHook:
    hook.install(["orders"], create_destinations=True)
    return hook


def publish(vhost: VirtualHost, topology: Topology, found: Sequence[pika.BasicProperties], delay: int = 0) -> None:
    """Publish messages with these properties as they are; the body is their number."""

    class Writer:
        def properties(self, message: DelayedMessage, *_: object) -> pika.BasicProperties:
            return found[int(message.body)]

    due = datetime.now(UTC) + timedelta(seconds=delay)
    batch = (
        DelayedMessage(destination="orders", body=str(number).encode(), due_at=due, message_id=f"m{number}")
        for number in range(len(found))
    )
    Publisher(vhost.parameters, conn_id="raw", topology=topology, writer=Writer()).send(batch)


def watch(ready: Callable[[Triggerer], bool], **options: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Return what the events said of the messages of the queue "orders", and the events as Airflow logs them."""

    async def run() -> tuple[list[dict[str, Any]], list[str]]:
        async with triggerer(watcher("orders", body=True, **options)) as one:
            await eventually(lambda: ready(one) and not one.unstored, seconds=600)
            # the acknowledgement is on its way
            await asyncio.sleep(0.2)
            return [message for _, message in one.received], one.texts

    return asyncio.run(run())


def check_events(
    found: Sequence[pika.BasicProperties], received: Sequence[dict[str, Any]], lines: Sequence[str]
) -> None:
    """Check that each message had its event, over one connection, and that JSON and the log can hold all of it."""
    assert [int(message["body"]) for message in received] == list(range(len(found)))
    text = json.dumps(received, allow_nan=False)
    assert json.loads(text) == received
    # not every database can hold it
    assert "\\u0000" not in text
    assert [line for line in lines if not line.isprintable()] == []
    assert [line for line in lines if "watch" in line] == ["connection 'rabbit': watching queue 'orders'"]


def test_a_watcher_tells_of_every_message_whatever_its_properties(
    hook: RabbitMQDelayHook, vhost: VirtualHost, caplog: pytest.LogCaptureFixture
) -> None:
    found = [each for poisoned in poison.CRAFTED.values() for each in (poisoned, GOOD)]
    publish(vhost, DELAYED, found)
    caplog.set_level(logging.INFO)
    received, texts = watch(lambda one: len(one.received) >= len(found), body_limit=5)
    check_events(found, received, [*texts, *caplog.messages])
    ids = {name: received[2 * number]["message_id"] for number, name in enumerate(poison.CRAFTED)}
    assert ids["ids that are not UTF-8"] == "\\xff\\xfe\n\\x00"
    assert ids["an id of two lines"] == "a\n[2026-01-01] ERROR - forged"
    assert {message["message_id"] for message in received[1::2]} == {"good"}
    # what no queue is called does not go into Airflow's database
    assert {message["destination"] for message in received} == {None}
    assert vhost.count("orders") == 0


def test_the_log_line_of_a_body_that_is_too_large_is_one_line(
    hook: RabbitMQDelayHook, vhost: VirtualHost, caplog: pytest.LogCaptureFixture
) -> None:
    publish(vhost, DELAYED, [poison.CRAFTED["an id of two lines"], poison.CRAFTED["ids that are not UTF-8"]])
    caplog.set_level(logging.INFO)
    _, texts = watch(lambda one: len(one.received) == 2, body_limit=0)
    assert "message a\\n[2026-01-01] ERROR - forged of queue 'orders': its body of 1 bytes is beyond" in caplog.text
    assert [line for line in (*texts, *caplog.messages) if not line.isprintable()] == []


def taken(vhost: VirtualHost, queue: str) -> dict[int, tuple[str, bytes]]:
    """Take all that is in a queue: routing key and properties as they came, by the number that is the body."""
    found = {}
    with connect_to("raw", [vhost.parameters]) as connection:
        channel = connection.channel()
        while True:
            method, properties, body = channel.basic_get(queue, auto_ack=True)
            if method is None:
                return found
            found[int(body)] = method.routing_key, b"".join(properties.encode())


def test_what_no_destination_took_is_sent_again_as_it_is(
    hook: RabbitMQDelayHook, vhost: VirtualHost, caplog: pytest.LogCaptureFixture
) -> None:
    """Byte for byte: the properties, and the headers but those of the way."""
    # there is no room for what is noted of it while it waits
    found = [each for poisoned in poison.CRAFTED.values() for each in (poisoned, GOOD)] + [poison.whole_frame()]
    with vhost.channel() as channel:
        channel.confirm_delivery()
        for number, each in enumerate(found):
            # as if it came from the levels, and its destination was gone
            channel.basic_publish(
                "delayed.hex.delivery", DELAYED.digits.routing_key(0, "gone"), str(number).encode(), each
            )
    vhost.until(**{"delayed.hex.unroutable": len(found)})
    assert hook.redrive().remaining == {"destination 'gone': missing": len(found)}
    assert "its headers leave no room for ours" in caplog.text
    hook.install(["gone"], create_destinations=True)
    again = hook.redrive()
    assert again.by_destination == {"gone": len(found) - 1}
    # its key went with the room
    assert sum(again.remaining.values()) == 1
    there = taken(vhost, "gone")
    assert sorted(there) == list(range(len(found) - 1))
    for number, each in enumerate(found[:-1]):
        table = getattr(each, "table", None)
        if table is not None and b"x-death" not in table and b"airflow-delayed" not in table:
            assert table in there[number][1]


@pytest.mark.fuzz
@pytest.mark.timeout(900)
def test_random_properties_to_a_watcher(
    hook: RabbitMQDelayHook, vhost: VirtualHost, caplog: pytest.LogCaptureFixture
) -> None:
    found = randomly(16, GOOD, FRAMES)
    publish(vhost, DELAYED, found)
    caplog.set_level(logging.INFO)
    received, texts = watch(lambda one: len(one.received) >= FRAMES, prefetch=500)
    check_events(found, received, [*texts, *caplog.messages])
    assert {message["message_id"] for message in received[::EACH]} == {"good"}


def randomly(seed: int, good: pika.BasicProperties, count: int) -> list[pika.BasicProperties]:
    chance = Random(seed)
    return [poison.random(chance) if number % EACH else good for number in range(count)]


@pytest.mark.fuzz
def test_what_a_broker_passes_on_of_damaged_frames(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    """It closes the connection of the sender for most of them."""
    chance = Random(18)
    refused = 0
    for number in range(DAMAGED):
        damaged = bytearray(poison.random(chance).raw)
        for _ in range(chance.randrange(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        try:
            with vhost.channel() as channel:
                channel.confirm_delivery()
                channel.basic_publish("", "orders", str(number).encode(), poison.Raw(bytes(damaged)))
        except AMQPError:
            refused += 1
    assert 0 < refused < DAMAGED
    publish(vhost, DELAYED, [GOOD])
    received, texts = watch(lambda one: "good" in one.ids())
    assert json.loads(json.dumps(received, allow_nan=False)) == received
    assert [text for text in texts if not text.isprintable()] == []
    assert vhost.count("orders") == 0
