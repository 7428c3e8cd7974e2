"""What the tests of RabbitMQ share: a hook, and another client's connection."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import pytest
from support.rabbitmq import VirtualHost

from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook


@pytest.fixture
def hook(vhost: VirtualHost, connect: Callable[..., str]) -> RabbitMQDelayHook:
    """A hook on ``vhost``."""
    return RabbitMQDelayHook(connect("rabbit", **vhost.connection))


@pytest.fixture(autouse=True)
def late_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait longer for what a broker on a busy machine answers about its parts."""
    monkeypatch.setattr("airflow_delayed.rabbitmq.admin._PATIENCE", 60.0)
    monkeypatch.setattr("airflow_delayed.rabbitmq.management._TIMEOUT", httpx.Timeout(30))


@pytest.fixture
def kombu(vhost: VirtualHost) -> Iterator[object]:
    """A connection of kombu to ``vhost``."""
    from kombu import Connection

    login = vhost.connection
    with Connection(
        transport="pyamqp",
        hostname=login["host"],
        port=login["port"],
        userid=login["login"],
        password=login["password"],
        virtual_host=login["schema"],
    ) as connection:
        yield connection
