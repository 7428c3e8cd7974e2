"""What the tests of RabbitMQ share: a hook."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.bridging import KEYS
from support.rabbitmq import VirtualHost

from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook


@pytest.fixture
def hook(vhost: VirtualHost, connect: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> RabbitMQDelayHook:
    """A hook on ``vhost``, whose bridges have keys."""
    monkeypatch.setenv("AIRFLOW__DELAYED__BRIDGE_KEYS", ",".join(KEYS))
    return RabbitMQDelayHook(connect("rabbit", **vhost.connection))
