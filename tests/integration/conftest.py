"""What the tests of RabbitMQ share; those of faults have brokers of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import pytest
from support.rabbitmq import VirtualHost, virtual_host

from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook


@pytest.fixture
def vhost(rabbitmq_url: str) -> Iterator[VirtualHost]:
    """A virtual host for one test."""
    with virtual_host(rabbitmq_url) as host:
        yield host


@pytest.fixture
def using(vhost: VirtualHost, connect: Callable[..., str]) -> Callable[..., RabbitMQDelayHook]:
    """Make a hook on a connection of its own: using("celery", heartbeat=30)."""
    numbers = count()

    def make(topology: str | None = None, **extra: object) -> RabbitMQDelayHook:
        conn_id = connect(f"rabbit{next(numbers)}", **vhost.connection, extra=extra)
        return RabbitMQDelayHook(conn_id, topology=topology)

    return make
