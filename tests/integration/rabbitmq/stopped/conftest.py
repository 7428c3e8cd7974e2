"""Tests that stop the broker, hold it up or demand certificates: it is another one than that of all other tests."""

from __future__ import annotations

import pytest
from support.rabbitmq import VirtualHost


@pytest.fixture
def vhost(own_vhost: VirtualHost) -> VirtualHost:
    return own_vhost
