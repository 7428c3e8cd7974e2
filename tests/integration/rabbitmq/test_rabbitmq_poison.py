"""Whatever properties a broker accepts cost nobody a connection, and hold up no message behind them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from random import Random

import pika
import pytest
from support import poison
from support.lengths import length
from support.rabbitmq import VirtualHost

from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.message import DelayedMessage
from airflow_delayed.rabbitmq.connection import connect as connect_to
from airflow_delayed.rabbitmq.publisher import Publisher
from airflow_delayed.rabbitmq.topology import DELAYED, Topology

UTC = timezone.utc
#: Each that is sent again waits for a confirm of its own.
REDRIVEN = length("random property frames to a redrive", 500, 100_000)
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
@pytest.mark.timeout(1800)
def test_random_properties_to_a_redrive(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    with vhost.channel() as channel:
        channel.confirm_delivery()
        for number, each in enumerate(randomly(17, GOOD, REDRIVEN)):
            key = DELAYED.digits.routing_key(0, "orders")
            channel.basic_publish("delayed.hex.unroutable", key, str(number).encode(), each)
    again = hook.redrive()
    there = taken(vhost, "orders")
    assert len(there) + sum(again.remaining.values()) == REDRIVEN
    assert {*range(0, REDRIVEN, EACH)} <= there.keys()


def randomly(seed: int, good: pika.BasicProperties, count: int) -> list[pika.BasicProperties]:
    chance = Random(seed)
    return [poison.random(chance) if number % EACH else good for number in range(count)]
