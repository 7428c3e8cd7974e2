"""Whatever properties a broker accepts cost nobody a connection, and hold up no message behind them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from random import Random

import pika
import pytest
from support import poison
from support.lengths import length
from support.rabbitmq import VirtualHost, messages, split_key

from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.message import DelayedMessage
from airflow_delayed.rabbitmq.connection import connect as connect_to
from airflow_delayed.rabbitmq.publisher import Publisher
from airflow_delayed.rabbitmq.topology import CELERY, DELAYED, Topology

UTC = timezone.utc
PARKING_LOT = "delayed.set-aside"
#: Each that is parked waits for a confirm of its own.
MOVED = length("random property frames to a mover", 500, 100_000)
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


def test_a_migration_takes_along_what_tells_when_it_is_due(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    """Byte for byte: the properties, and the headers but those of the way."""
    RabbitMQDelayHook("rabbit", topology="celery").install(["orders"])
    stamp = int(datetime.now(UTC).timestamp()).to_bytes(8, "big")
    tables = [each.table for each in poison.CRAFTED.values() if each.table is not None]
    publish(vhost, CELERY, [poison.raw(table, timestamp=stamp) for table in tables], delay=100_000)
    report = hook.migrate("celery", "delayed")
    assert (report.moved, report.parked) == (len(tables), {})
    there = taken(vhost, "delayed.hex.0010000")
    assert len(there) == len(tables)
    for number, table in enumerate(tables):
        key, moved = there[number]
        assert split_key(key)[1] == "orders"
        assert moved[-8:] == stamp
        if b"x-death" not in table and b"airflow-delayed" not in table:
            assert table in moved


def test_what_does_not_tell_when_it_is_due_is_parked_as_it_is(
    hook: RabbitMQDelayHook, vhost: VirtualHost, caplog: pytest.LogCaptureFixture
) -> None:
    celery = RabbitMQDelayHook("rabbit", topology="celery")
    celery.install(["orders"])
    untimed = [each for name, each in poison.CRAFTED.items() if name != "our own headers out of range"]
    # there is no room for the reason
    large = poison.whole_frame()
    publish(vhost, CELERY, [*untimed, large], delay=100_000)
    celery.send(messages("orders", [100_000] * 3, prefix="good"))
    report = hook.migrate("celery", "delayed")
    assert report.by_destination == {"orders": 3}
    assert report.parked == {"no header tells when it is due": len(untimed) + 1}
    there = taken(vhost, PARKING_LOT)
    assert len(there) == len(untimed) + 1
    for number, each in enumerate(untimed):
        _, parked = there[number]
        assert b"no header tells when it is due" in parked
        if each.table is not None and b"airflow-delayed" not in each.table:
            assert each.table in parked
    assert large.table in there[len(untimed)][1]
    assert "its headers leave no room for ours" in caplog.text


def test_what_no_destination_took_is_sent_again(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    found = [each for poisoned in poison.CRAFTED.values() for each in (poisoned, GOOD)]
    with vhost.channel() as channel:
        channel.confirm_delivery()
        for number, each in enumerate(found):
            # as if it came from the levels, and its destination was gone
            channel.basic_publish(
                "delayed.hex.delivery", DELAYED.digits.routing_key(0, "gone"), str(number).encode(), each
            )
    vhost.until(**{"delayed.hex.unroutable": len(found)})
    assert hook.redrive().remaining == {"destination 'gone': missing": len(found)}
    hook.install(["gone"], create_destinations=True)
    assert hook.redrive().by_destination == {"gone": len(found)}
    assert len(taken(vhost, "gone")) == len(found)


@pytest.mark.fuzz
@pytest.mark.timeout(1800)
def test_random_properties_to_a_mover(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    RabbitMQDelayHook("rabbit", topology="celery").install(["orders"])
    stamp = int(datetime.now(UTC).timestamp()).to_bytes(8, "big")
    publish(vhost, CELERY, randomly(17, poison.raw(timestamp=stamp), MOVED), delay=1_000_000)
    report = hook.migrate("celery", "delayed")
    assert report.moved + sum(report.parked.values()) == MOVED
    there = [taken(vhost, name) for name in DELAYED.level_names() if name.startswith("delayed.hex.00")]
    assert set(range(0, MOVED, EACH)) <= {number for each in there for number in each}


def randomly(seed: int, good: pika.BasicProperties, count: int) -> list[pika.BasicProperties]:
    chance = Random(seed)
    return [poison.random(chance) if number % EACH else good for number in range(count)]
