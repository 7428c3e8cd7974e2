"""RabbitMQMessageTrigger under Airflow's own manager of shared streams, with a real broker.

What is not acknowledged is back in the queue when the connection ends: that is how it is counted.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import tracemalloc
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from itertools import pairwise
from typing import Any

import pika
import pytest
from airflow.triggers.shared_stream import SharedStreamManager, reject_shared_stream_event
from support.proxy import Proxy, proxy
from support.rabbitmq import VirtualHost, messages
from support.virtual_hosts import VirtualHosts
from support.watching import SECONDS, Triggerer, eventually, triggerer, watcher

from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.rabbitmq import consumer
from airflow_delayed.triggers.rabbitmq_message import RabbitMQMessageTrigger

Connect = Callable[..., str]


@pytest.fixture(scope="module")
def vhost(virtual_hosts: VirtualHosts) -> Iterator[VirtualHost]:
    """One for all: each test has queues of its own."""
    with virtual_hosts.one() as host:
        yield host


@pytest.fixture
def queue(vhost: VirtualHost, connect: Connect, request: pytest.FixtureRequest) -> str:
    """A queue of the test's own, and the connection "rabbit"."""
    connect("rabbit", **vhost.connection)
    vhost.declare(request.node.name)
    return str(request.node.name)


@pytest.fixture
def proxied(vhost: VirtualHost, connect: Connect, queue: str) -> Iterator[Proxy]:
    """The connection "rabbit" through a proxy."""
    with proxy(vhost.port, str(vhost.connection["host"])) as made:
        connect("rabbit", **{**vhost.connection, "host": "127.0.0.1", "port": made.port})
        yield made


def publish(vhost: VirtualHost, queue: str, *bodies: str, **properties: Any) -> None:
    with vhost.channel() as channel:
        # a quorum queue may drop what nobody waits for: RabbitMQ promises only what it confirms
        channel.confirm_delivery()
        for body in bodies:
            channel.basic_publish("", queue, body.encode(), pika.BasicProperties(message_id=body, **properties))


def test_what_is_not_stored_goes_back_and_what_is_does_not(vhost: VirtualHost, queue: str) -> None:
    async def first() -> None:
        async with triggerer(watcher(queue)) as one:
            publish(vhost, queue, "a", "b")
            await one.until("a", "b")
            one.hold.add(1)
            publish(vhost, queue, "c")
            await one.until("a", "b", "c")

    async def second() -> None:
        async with triggerer(watcher(queue)) as one:
            await one.until("c")
            assert one.received[0][1]["redelivered"] is True

    asyncio.run(first())
    assert vhost.count(queue) == 1
    asyncio.run(second())
    assert vhost.count(queue) == 0


def test_an_event_says_what_and_when_and_the_body_only_if_asked(
    vhost: VirtualHost, queue: str, connect: Connect
) -> None:
    hook = RabbitMQDelayHook(connect("rabbit", **vhost.connection))
    hook.install([queue])
    (message,) = messages(queue, [1])

    async def watch() -> tuple[dict[str, Any], dict[str, Any], datetime]:
        watchers = watcher(queue), watcher(queue, body=True)
        async with triggerer(*watchers) as one:
            await asyncio.to_thread(hook.send, [message])
            await eventually(lambda: len(one.received) == 2)
            now = datetime.now(timezone.utc)
            await one.until("m0")
            received = dict(one.received)
            return received[1], received[2], now

    plain, whole, at = asyncio.run(watch())
    assert plain == {
        "message_id": "m0",
        "destination": queue,
        "due_at": message.due_at.isoformat(timespec="microseconds"),
        "redelivered": False,
        "body_bytes": 3,
    }
    assert whole == {**plain, "body": "m 0"}
    assert at >= message.due_at
    assert vhost.count(queue) == 0


def test_large_bodies_are_not_kept(vhost: VirtualHost, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer, "KEPT_BODY", 100_000)
    with vhost.channel() as channel:
        channel.confirm_delivery()
        for number in range(40):
            body = b"x" * (1_000_000 if number else 100_000)
            channel.basic_publish("", queue, body, pika.BasicProperties(message_id=f"m{number}"))

    async def watch() -> list[dict[str, Any]]:
        async with triggerer(watcher(queue), watcher(queue, body=True, body_limit=1_048_576)) as one:
            for number in (1, 2):
                await one.until(*(f"m{number}" for number in range(40)), trigger_id=number)
            return [message for number, message in one.received if number == 2]

    tracemalloc.start()
    try:
        received = asyncio.run(watch())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # 39 MB were in hand
    assert peak < 15_000_000
    assert [message["body_bytes"] for message in received] == [100_000, *[1_000_000] * 39]
    # of watchers that share a stream each gets the bodies that it asked for
    assert [len(message.get("body", "")) for message in received] == [100_000, *[0] * 39]
    assert vhost.count(queue) == 0


def test_watchers_of_one_queue_share_a_stream_and_all_have_to_store(vhost: VirtualHost, queue: str) -> None:
    async def watch() -> None:
        async with triggerer(watcher(queue), watcher(queue, body=True)) as one:
            one.hold.add(2)
            await eventually(lambda: consumers(vhost, queue) == 1)
            publish(vhost, queue, "a")
            for number in (1, 2):
                await one.until("a", trigger_id=number)
            assert consumers(vhost, queue) == 1

    asyncio.run(watch())
    assert vhost.count(queue) == 1


def consumers(vhost: VirtualHost, queue: str) -> int:
    with vhost.channel() as channel:
        return channel.queue_declare(queue, passive=True).method.consumer_count


def test_a_lost_connection_doubles_no_message(
    vhost: VirtualHost, queue: str, proxied: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    async def watch() -> None:
        async with triggerer(watcher(queue)) as one:
            one.hold.add(1)
            publish(vhost, queue, "a")
            await one.until("a")
            # stored while the broker cannot be told of it
            assert proxied.cut() == 1
            publish(vhost, queue, "b")
            one.hold.clear()
            one.store(one.unstored)
            await one.until("a", "b")

    asyncio.run(watch())
    assert proxied.taken == 2
    assert vhost.count(queue) == 0
    assert f"cannot watch queue '{queue}': the connection was" in caplog.text


def test_messages_that_come_together_are_one_event_and_what_comes_after_it_another(
    vhost: VirtualHost, queue: str
) -> None:
    """Airflow makes no run of an event that it stores before the scheduler has seen the one before."""
    ids = [f"{number:02}" for number in range(30)]

    async def watch() -> None:
        async with triggerer(watcher(queue, pause=1, prefetch=20)) as one:
            one.hold.add(1)
            publish(vhost, queue, ids[0])
            await one.until(ids[0])
            publish(vhost, queue, *ids[1:])
            one.hold.clear()
            one.store(one.unstored)
            await one.until(*ids)
            gaps = [after - before for before, after in pairwise(one.fired_at)]
            # the first, 19 or 20, the rest; a slow machine may need some more, and not one for each
            assert 2 <= len(gaps) < 10
            assert min(gaps) >= 1

    asyncio.run(watch())
    assert vhost.count(queue) == 0


def test_a_queue_that_is_missing_is_told_and_waited_for(
    vhost: VirtualHost, queue: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"{queue}-later"
    quick(monkeypatch)

    async def watch() -> None:
        async with triggerer(watcher(name)) as one:
            await eventually(lambda: "does not exist" in caplog.text)
            vhost.declare(name)
            publish(vhost, name, "a")
            await one.until("a")
            with vhost.channel() as channel:
                channel.queue_delete(name)
            await eventually(lambda: "was deleted" in caplog.text)
            vhost.declare(name)
            publish(vhost, name, "b")
            await one.until("a", "b")

    caplog.set_level(logging.INFO)
    asyncio.run(watch())
    # however often it was tried
    assert caplog.text.count("'rabbit': cannot watch") in (2, 3)
    # pika's own lines name the connection; those of the test's are of another class
    assert "AsyncioConnection" not in caplog.text


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    make = RabbitMQDelayHook.consumer

    def made(*arguments: Any, **options: Any) -> consumer.Consumer:
        found = make(*arguments, **options)
        found._waits = (0.05,)
        return found

    monkeypatch.setattr(RabbitMQDelayHook, "consumer", made)


def test_a_connection_that_is_missing_is_told_and_waited_for(
    vhost: VirtualHost,
    queue: str,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    quick(monkeypatch)

    async def watch() -> None:
        async with triggerer(watcher(queue, "later")) as one:
            await eventually(lambda: "AirflowNotFoundException" in caplog.text)
            connect("later", **{**vhost.connection, "password": "wrong"})
            await eventually(lambda: "login refused" in caplog.text)
            connect("later", **{**vhost.connection, "host": f"127.0.0.1:1,{vhost.connection['host']}"})
            publish(vhost, queue, "a")
            await one.until("a")

    asyncio.run(watch())
    assert vhost.count(queue) == 0
    assert "wrong" not in caplog.text


def test_what_a_watcher_refuses_is_dead_lettered(vhost: VirtualHost, queue: str) -> None:
    dead, name = f"{queue}-dead", f"{queue}-refusing"
    vhost.declare(dead)
    vhost.declare(name, **{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead})

    class Choosy(RabbitMQMessageTrigger):
        async def filter_shared_stream(self, shared_stream):
            async def chosen():
                async for batch in shared_stream:
                    if b"bad" in [found.body for found in batch]:
                        reject_shared_stream_event()
                    else:
                        yield batch

            async for event in super().filter_shared_stream(chosen()):
                yield event

    async def watch() -> None:
        async with triggerer(Choosy("rabbit", name, pause=0)) as one:
            publish(vhost, name, "bad")
            await eventually(lambda: vhost.count(dead) == 1)
            publish(vhost, name, "good")
            await one.until("good")

    asyncio.run(watch())
    assert (vhost.count(name), vhost.count(dead)) == (0, 1)


def test_an_event_that_is_never_stored_is_fired_again(vhost: VirtualHost, queue: str) -> None:
    """Airflow fails the watcher after ``[triggerer] shared_stream_ack_timeout``, and starts it anew."""

    async def watch() -> None:
        one = Triggerer()
        one.manager = SharedStreamManager(ack_timeout=0.3)
        try:
            one.hold.add(1)
            one.watch(1, watcher(queue))
            publish(vhost, queue, "a")
            await one.until("a")
            await eventually(lambda: one.failed)
            assert type(one.failed.pop(1)).__name__ == "AckTimeout"
            one.hold.clear()
            one.unstored.clear()
            one.watch(1, watcher(queue))
            await one.until("a", "a")
        finally:
            await one.stop()

    asyncio.run(watch())
    assert vhost.count(queue) == 0


def test_a_watcher_that_is_cancelled_while_it_connects_leaves_nothing_open(
    vhost: VirtualHost, queue: str, connect: Connect
) -> None:
    async def watch(silent: socket.socket) -> socket.socket:
        connect("silent", **{**vhost.connection, "host": "127.0.0.1", "port": silent.getsockname()[1]})
        async with triggerer(watcher(queue, "silent")):
            taken, _ = await asyncio.to_thread(silent.accept)
            taken.settimeout(SECONDS)
            # the greeting, and then the end
            assert (await asyncio.to_thread(taken.recv, 100)).startswith(b"AMQP")
        return taken

    with socket.create_server(("127.0.0.1", 0), backlog=16) as silent:
        silent.settimeout(SECONDS)
        with asyncio.run(watch(silent)) as taken:
            assert taken.recv(100) == b""
