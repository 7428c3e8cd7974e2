"""Another client: kombu reads our messages."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pytest
from support.rabbitmq import DUE_AT, VirtualHost, messages

from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook


@pytest.fixture
def hook(hook: RabbitMQDelayHook, vhost: VirtualHost) -> RabbitMQDelayHook:
    vhost.declare("orders")
    return hook


def test_kombu_receives_a_message(hook: RabbitMQDelayHook, kombu: Any) -> None:
    from kombu import Queue

    hook.send(messages("orders", [1.5]))
    received = []

    def take(body: object, message: object) -> None:
        received.append((body, message, datetime.now(timezone.utc)))
        message.ack()

    queue = Queue("orders", queue_arguments={"x-queue-type": "quorum"}, no_declare=True)
    with kombu.Consumer([queue], callbacks=[take], accept=["application/octet-stream"], prefetch_count=1):
        kombu.drain_events(timeout=60)
    ((body, message, at),) = received
    # it reads bytes without an encoding as UTF-8
    assert body == "m 0"
    assert message.properties["message_id"] == "m0"
    assert at >= datetime.fromisoformat(message.headers[DUE_AT])
