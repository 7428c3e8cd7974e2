"""Moving what waits from one topology to another, on a real broker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pika
import pytest
from support.rabbitmq import VirtualHost, messages, virtual_host

from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.rabbitmq import levels
from airflow_delayed.rabbitmq.properties import DESTINATION, DUE_AT
from airflow_delayed.rabbitmq.received import split_key
from airflow_delayed.rabbitmq.topology import Topology

Connect = Callable[..., str]
UTC = timezone.utc
SECOND = timedelta(seconds=1)
SET_ASIDE = "delayed.set-aside"


@pytest.fixture
def vhost(rabbitmq_url: str) -> Iterator[VirtualHost]:
    with virtual_host(rabbitmq_url) as host:
        yield host


@pytest.fixture
def other(rabbitmq_url: str) -> Iterator[VirtualHost]:
    with virtual_host(rabbitmq_url) as host:
        yield host


@pytest.fixture
def hook(vhost: VirtualHost, connect: Connect) -> RabbitMQDelayHook:
    return RabbitMQDelayHook(connect("rabbit", **vhost.connection))


def using(hook: RabbitMQDelayHook, topology: str, routing: str | None = None) -> RabbitMQDelayHook:
    return RabbitMQDelayHook(hook.conn_id, topology=topology, routing=routing)


def waiting(vhost: VirtualHost, topology: Topology) -> list[tuple[int, str, pika.BasicProperties, bytes]]:
    """Take all that waits in the levels: delay of its key, destination, properties, body."""
    taken = []
    with vhost.channel() as channel:
        for level in range(levels.BITS):
            while True:
                method, found, body = channel.basic_get(topology.level_name(level), auto_ack=True)
                if method is None:
                    break
                delay, destination = split_key(method.routing_key) or pytest.fail(method.routing_key)
                assert levels.entry_level(delay) == level
                taken.append((delay, destination, found, body))
    return taken


def publish(vhost: VirtualHost, topology: Topology, delay: int, destination: str, **properties: Any) -> None:
    """Publish as a sender that is not ours would."""
    with vhost.channel() as channel:
        channel.confirm_delivery()
        exchange = topology.entry_exchange(delay)
        channel.basic_publish(
            exchange, levels.routing_key(delay, destination), b"raw", pika.BasicProperties(**properties), mandatory=True
        )


@pytest.mark.parametrize(
    "source, routing, target",
    [
        ("nservicebus-v1", None, "delayed"),
        ("nservicebus", "direct", "delayed"),
        ("celery", None, "delayed"),
        ("delayed", None, "nservicebus"),
    ],
)
def test_what_waits_arrives_through_the_other_topology_and_never_early(
    hook: RabbitMQDelayHook, vhost: VirtualHost, source: str, routing: str | None, target: str
) -> None:
    old, new = using(hook, source, routing), using(hook, target)
    names = ["Sales", "Acme.Sales"]
    for each in (new, old):
        each.install(names, create_destinations=True)
    batch = [
        *messages("Sales", [1.5, 2.6, 9_000_000.2], prefix="a"),
        *messages("Acme.Sales", [1.2, 3.1, 70_000.5], prefix="b"),
    ]
    old.send(batch)
    began = datetime.now(UTC)
    report = new.migrate(old, target)
    assert (report.moved, report.set_aside) == (6, {})
    assert report.by_destination == {"Sales": 3, "Acme.Sales": 3}
    assert str(report).startswith(f"from {source} of connection 'rabbit' to {target} of connection 'rabbit': moved 6 ")
    assert waiting(vhost, old.topology) == []

    # what is due soon arrives, once
    for name, prefix in (("Sales", "a"), ("Acme.Sales", "b")):
        arrivals = vhost.collect(name, enough={f"{prefix}{number}" for number in range(2)})
        got = Counter(arrival.message_id for arrival in arrivals if arrival.message_id[0] == prefix)
        assert got == {f"{prefix}0": 1, f"{prefix}1": 1}
        assert [arrival for arrival in arrivals if arrival.received_at < arrival.due_at] == []
    # what is due later waits for the right time
    due = {message.message_id: message.due_at for message in batch}
    now = datetime.now(UTC)
    far = waiting(vhost, new.topology)
    assert {found.message_id for _, _, found, _ in far} == {"a2", "b2"}
    for delay, destination, found, _ in far:
        assert due[found.message_id] - now <= timedelta(seconds=delay) < due[found.message_id] - began + SECOND
        assert found.headers[DESTINATION] == destination
        assert found.headers[DUE_AT] == due[found.message_id].isoformat(timespec="microseconds")
