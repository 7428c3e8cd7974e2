"""Sending on a real broker where something is in the way: full, gone, not allowed; all is counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from itertools import count
from typing import Any
from uuid import uuid4

import pytest
from pika.adapters.utils.selector_ioloop_adapter import SelectorIOServicesAdapter
from pika.channel import Channel
from support.rabbitmq import VirtualHost, messages

from airflow_delayed.errors import LimitExceeded, SendFailed
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.message import DelayedMessage, utcnow
from airflow_delayed.rabbitmq import wire
from airflow_delayed.rabbitmq.topology import MAX_HEADERS_BYTES

Connect = Callable[..., str]


def test_a_destination_that_is_full(using: Callable[..., RabbitMQDelayHook], vhost: VirtualHost) -> None:
    """Each message is either confirmed and there, or named."""
    hook = using(confirm_timeout=12)
    vhost.declare("full", **{"x-queue-type": "classic", "x-max-length": 5, "x-overflow": "reject-publish"})
    vhost.declare("orders")
    batch = [*messages("orders", [0] * 3, prefix="o"), *messages("full", [0] * 20)]
    with pytest.raises(
        SendFailed,
        match=r"confirmed \d+ messages and not \d+: .*refused by the broker \d+ times in \d+ s \(confirm_timeout 12 s",
    ) as error:
        hook.send(batch)
    confirmed = error.value.report.by_destination
    failed = {message_id for message_id, _ in error.value.failures}
    assert confirmed["orders"] == vhost.count("orders") == 3
    assert confirmed["full"] < 20
    arrived = [arrival.message_id for arrival in vhost.collect("full", enough=confirmed["full"])]
    assert sorted(arrived) == sorted({message.message_id for message in batch[3:]} - failed)
    assert len(arrived) == confirmed["full"]


def test_a_queue_deleted_in_the_middle_of_a_batch(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    vhost.declare("gone", "orders")
    taken = 0

    def stream() -> Iterator[DelayedMessage]:
        nonlocal taken
        yield from messages("gone", [0], prefix="before")
        yield from messages("orders", [0])
        vhost.until(gone=1)
        with vhost.channel() as channel:
            channel.queue_delete("gone")
        yield from messages("gone", [0], prefix="after")
        # without an end: it is told at once
        for taken in count(1):
            yield messages("orders", [0], prefix=f"more{taken}-")[0]

    with pytest.raises(SendFailed, match=r"not 1: message after0: returned .* as NO_ROUTE \(queue is gone\)") as error:
        hook.send(stream())
    assert error.value.report.by_destination == {"gone": 1, "orders": 1 + taken}
    vhost.until(orders=1 + taken)


@pytest.mark.parametrize(
    "rights, reason",
    [
        # to bind the destination; which access it is, RabbitMQ says since 4.0
        ({"write": "^orders$", "read": "^$"}, "(read )?access to exchange 'delayed.hex.delivery'"),
        ({"write": "^$", "read": ".*"}, "(write )?access to queue 'orders'"),
        # to enter, neither by the default exchange nor by the level's
        ({"write": "^orders$", "read": ".*"}, "(write )?access to exchange 'delayed.hex.entry'"),
    ],
)
def test_a_user_without_rights(
    hook: RabbitMQDelayHook, vhost: VirtualHost, connect: Connect, rights: dict[str, str], reason: str
) -> None:
    vhost.declare("orders")
    name = f"sender-{uuid4().hex[:8]}"
    vhost.manage("PUT", f"users/{name}", {"password": "secret", "tags": ""})
    try:
        vhost.manage("PUT", f"permissions/{{vhost}}/{name}", {"configure": "^$", **rights})
        sender = RabbitMQDelayHook(connect("sender", **{**vhost.connection, "login": name, "password": "secret"}))
        with pytest.raises(SendFailed, match=f"confirmed 0 messages and not .*ACCESS_REFUSED - {reason}") as error:
            sender.send(messages("orders", [9.5] * 3))
    finally:
        vhost.manage("DELETE", f"users/{name}")
    assert error.value.report.sent == 0
    assert "secret" not in str(error.value)


def test_what_a_slow_source_gave_does_not_wait_for_the_rest(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    vhost.declare("orders")

    def stream() -> Iterator[DelayedMessage]:
        for number, message in enumerate(messages("orders", [0] * 5)):
            vhost.until(orders=number)
            time.sleep(0.005)
            yield message

    assert hook.send(stream()).sent == 5


def test_bodies_of_any_size(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    """A frame takes 131,072 bytes, so some take several."""
    vhost.declare("orders")
    bodies = [b"", b"x", b"y" * 131_064, b"z" * 131_065, b"w" * 1_000_000]
    now = utcnow()
    hook.send(
        DelayedMessage(destination="orders", body=body, due_at=now, message_id=str(number))
        for number, body in enumerate(bodies)
    )
    arrivals = vhost.collect("orders", enough=len(bodies))
    assert {arrival.message_id: arrival.body for arrival in arrivals} == {
        str(number): body for number, body in enumerate(bodies)
    }


@pytest.mark.parametrize("topology", ["delayed", "nservicebus"])
def test_headers_as_large_as_a_frame_takes(vhost: VirtualHost, connect: Connect, topology: str) -> None:
    hook = RabbitMQDelayHook(connect("rabbit", **vhost.connection), topology=topology)
    destination = "d" * 180
    hook.install([destination], create_destinations=True)
    # one byte for the length of its name, one for the type of its value, four for that one's length
    room = MAX_HEADERS_BYTES - len("name") - 6

    def message(size: int) -> DelayedMessage:
        text = "ä" * (size // 2) + "x" * (size % 2)
        return DelayedMessage(
            destination=destination,
            body=b"",
            due_at=utcnow() + timedelta(seconds=1),
            message_id="i" * 128,
            headers={"name": text},
        )

    with pytest.raises(LimitExceeded, match=r"headers: they take 126,977 bytes, of at most 126,976"):
        hook.check(message(room + 1), utcnow())
    with pytest.raises(LimitExceeded, match=r"headers: they take 126,977 bytes, of at most 126,976"):
        hook.send([message(room + 1)])
    assert hook.send([message(room)]).sent == 1
    (arrival,) = vhost.collect(destination, enough=1)
    assert len(arrival.properties.headers["name"].encode()) == room


@pytest.mark.parametrize("moved", ["modules", "streams"])
def test_where_pikas_internals_have_moved_its_own_publish_sends(
    hook: RabbitMQDelayHook, vhost: VirtualHost, monkeypatch: pytest.MonkeyPatch, moved: str
) -> None:
    """Its modules, or the way by which it makes a connection's transport; only slower then."""
    if moved == "modules":
        monkeypatch.setattr(wire, "_PIKA_AS_KNOWN", False)
    else:
        by_pika = SelectorIOServicesAdapter.create_streaming_connection
        monkeypatch.setattr(wire.BufferedServices, "create_streaming_connection", by_pika)
    published = []
    basic_publish = Channel.basic_publish

    def publish(channel: Channel, exchange: str, key: str, body: bytes, *more: Any, **named: Any) -> None:
        published.append(body)
        basic_publish(channel, exchange, key, body, *more, **named)

    monkeypatch.setattr(Channel, "basic_publish", publish)
    vhost.declare("orders")
    batch = [*messages("orders", [0] * 5), *messages("orders", [1] * 5, prefix="later")]
    large = replace(batch[0], body=b"x" * 300_000, message_id="large")
    assert hook.send([*batch, large]).sent == 11
    assert {message.body for message in (*batch, large)} <= set(published)
    arrived = vhost.collect("orders", enough=11)
    assert sorted(arrival.message_id for arrival in arrived) == sorted(m.message_id for m in (*batch, large))
    with pytest.raises(SendFailed, match="message gone0: returned by the broker"):
        hook.send(_and_then_gone(vhost))


def _and_then_gone(vhost: VirtualHost) -> Iterator[DelayedMessage]:
    yield from messages("orders", [0])
    vhost.until(orders=1)
    with vhost.channel() as channel:
        channel.queue_delete("orders")
    yield from messages("orders", [0], prefix="gone")
