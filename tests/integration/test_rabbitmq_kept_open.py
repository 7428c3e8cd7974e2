"""One connection for sends that follow each other closely."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta

import pytest
from support.proxy import Proxy
from support.rabbitmq import VirtualHost, virtual_host

from airflow_delayed.delivery import KeepsOpen
from airflow_delayed.errors import SendFailed
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.message import DelayedMessage, utcnow


@pytest.fixture
def host(rabbitmq_url: str) -> Iterator[VirtualHost]:
    with virtual_host(rabbitmq_url) as made:
        yield made


@pytest.fixture
def proxy(host: VirtualHost) -> Iterator[Proxy]:
    with closing(Proxy(int(host.connection["port"]))) as made:
        yield made


@pytest.fixture
def hook(host: VirtualHost, proxy: Proxy, connect) -> RabbitMQDelayHook:
    connect("direct", **host.connection)
    RabbitMQDelayHook("direct").install(["q"], create_destinations=True)
    connect("broker", **{**host.connection, "host": "127.0.0.1", "port": proxy.port})
    return RabbitMQDelayHook("broker")


def message(name: str, destination: str = "q") -> DelayedMessage:
    due = utcnow() - timedelta(seconds=1)
    return DelayedMessage(destination=destination, body=b"", due_at=due, message_id=name, headers={})


def ids(host: VirtualHost, enough: int) -> list[str]:
    return sorted(one.message_id for one in host.collect("q", enough=enough))


def test_sends_share_a_connection(hook: RabbitMQDelayHook, host: VirtualHost, proxy: Proxy):
    assert isinstance(hook, KeepsOpen)
    with hook.kept_open():
        for name in "abc":
            assert hook.send([message(name)]).sent == 1
        assert proxy.taken == 1
    hook.send([message("d")])
    assert proxy.taken == 2
    assert ids(host, 4) == list("abcd")


def test_a_connection_that_was_lost_between_two_sends(hook: RabbitMQDelayHook, host: VirtualHost, proxy: Proxy):
    with hook.kept_open():
        hook.send([message("a")])
        assert proxy.cut() == 1
        # at once, over another one
        assert hook.send([message("b"), message("c")]).sent == 2
        assert proxy.taken == 2
    assert ids(host, 3) == ["a", "b", "c"]


def test_a_send_that_failed_does_not_spoil_the_next(hook: RabbitMQDelayHook, host: VirtualHost):
    with hook.kept_open():
        hook.send([message("a")])
        with pytest.raises(SendFailed, match="gone"):
            hook.send([message("b"), message("x", "gone"), message("c")])
        hook.send([message("d")])
    assert ids(host, 3) == ["a", "b", "d"]
