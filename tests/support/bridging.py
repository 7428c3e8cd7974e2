"""A bridge in a thread, or in a process of its own to be killed (see support.forked); services and consumers."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pika

from airflow_delayed.delivery import Connection as Plain
from airflow_delayed.message import utcnow
from airflow_delayed.rabbitmq.bridge import Bridge
from airflow_delayed.rabbitmq.transport import RabbitMQTransport
from support.rabbitmq import VirtualHost, eventually

#: What signs the messages on their way.
KEYS = ["the-first-key-of-a-bridge-it-signs", "the-second-key-of-a-bridge-it-verifies"]


def bridge(pipe: Connection, *, fields: dict, exchange: str, target: str) -> None:
    """Run a bridge until SIGTERM; say so when it begins, and its counts when it has ended."""
    transport = RabbitMQTransport("rabbit", lambda: Plain(conn_id="rabbit", **fields), clock=utcnow)
    made = transport.bridge(exchange, target, secrets=KEYS)

    async def run() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        pipe.send("runs")
        await made.run(stop)

    asyncio.run(run())
    pipe.send(str(made.counts))


def consumers_exchange(vhost: VirtualHost, kind: str, **keys: str) -> None:
    """The target, and queues that are bound to it by these keys."""
    vhost.declare(*keys)
    with vhost.channel() as channel:
        channel.exchange_declare("orders", kind, durable=True)
        for queue, key in keys.items():
            channel.queue_bind(queue, "orders", key)


@contextmanager
def running(bridge: Bridge) -> Iterator[Bridge]:
    """Run a bridge in a thread until the block ends."""
    started = threading.Event()
    stops: list[Callable[[], Any]] = []

    async def run() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        stops.append(lambda: loop.call_soon_threadsafe(stop.set))
        started.set()
        await bridge.run(stop)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    started.wait()
    try:
        yield bridge
    finally:
        stops[0]()
        thread.join(60)
    assert not thread.is_alive()


def publish(vhost: VirtualHost, key: str, body: bytes, delay: object = None, **properties: Any) -> None:
    headers = {**properties.pop("headers", {}), **({} if delay is None else {"x-delay": delay})}
    with vhost.channel() as channel:
        channel.confirm_delivery()
        sent = pika.BasicProperties(headers=headers or None, **properties)
        channel.basic_publish("services", key, body, sent, mandatory=True)


def take(vhost: VirtualHost, queue: str) -> tuple[pika.spec.Basic.GetOk, pika.BasicProperties, bytes]:
    eventually(lambda: vhost.count(queue))
    with vhost.channel() as channel:
        method, found, body = channel.basic_get(queue, auto_ack=True)
    # the count of the consumers' own quorum queue
    (found.headers or {}).pop("x-delivery-count", None)
    return method, found, body
