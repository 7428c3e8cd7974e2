"""One connection for several sends, which is serviced where they are far apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta

import pytest
from support.proxy import Proxy
from support.rabbitmq import VirtualHost

from airflow_delayed.errors import DestinationMissing, SendFailed, TransportUnavailable
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.message import DelayedMessage, utcnow


@pytest.fixture
def proxy(vhost: VirtualHost) -> Iterator[Proxy]:
    with closing(Proxy(vhost.port, str(vhost.connection["host"]))) as made:
        yield made


@pytest.fixture
def hook(vhost: VirtualHost, proxy: Proxy, connect) -> RabbitMQDelayHook:
    vhost.declare("q")
    connect("broker", **{**vhost.connection, "host": "127.0.0.1", "port": proxy.port})
    return RabbitMQDelayHook("broker")


def message(name: str, destination: str = "q") -> DelayedMessage:
    due = utcnow() - timedelta(seconds=1)
    return DelayedMessage(destination=destination, body=b"", due_at=due, message_id=name, headers={})


def ids(vhost: VirtualHost, enough: int) -> list[str]:
    return sorted(one.message_id for one in vhost.collect("q", enough=enough))


def test_sends_share_a_connection(hook: RabbitMQDelayHook, vhost: VirtualHost, proxy: Proxy):
    with hook.kept_open():
        for name in "abc":
            assert hook.send([message(name)]).sent == 1
        assert proxy.taken == 1
    hook.send([message("d")])
    assert proxy.taken == 2
    assert ids(vhost, 4) == list("abcd")


def test_a_connection_that_was_lost_between_two_sends(hook: RabbitMQDelayHook, vhost: VirtualHost, proxy: Proxy):
    with hook.kept_open():
        hook.send([message("a")])
        assert proxy.cut() == 1
        # at once, over another one
        assert hook.send([message("b"), message("c")]).sent == 2
        assert proxy.taken == 2
    assert ids(vhost, 3) == ["a", "b", "c"]


def test_a_send_that_failed_does_not_spoil_the_next(hook: RabbitMQDelayHook, vhost: VirtualHost):
    with hook.kept_open():
        hook.send([message("a")])
        with pytest.raises(SendFailed, match="gone"):
            hook.send([message("b"), message("x", "gone"), message("c")])
        hook.send([message("d")])
    assert ids(vhost, 3) == ["a", "b", "d"]


def test_a_connection_is_kept_while_nothing_is_sent(hook: RabbitMQDelayHook, vhost: VirtualHost, proxy: Proxy):
    with hook.kept_open():
        for name in "abc":
            for _ in range(3):
                hook.service()
            hook.send([message(name)])
        assert proxy.taken == 1
    assert ids(vhost, 3) == ["a", "b", "c"]


@pytest.mark.parametrize("ends", [Proxy.cut, Proxy.fall_silent])
def test_a_connection_that_ended_while_nothing_was_sent_is_opened_again(
    hook: RabbitMQDelayHook, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, ends
):
    with hook.kept_open():
        hook.service()
        monkeypatch.setattr("airflow_delayed.rabbitmq.publisher._ANSWER_SECONDS", 2.0)
        assert ends(proxy) == 1
        hook.service()
        assert proxy.taken == 2


def test_a_broker_that_hangs_or_is_away_is_an_error_until_it_answers(
    vhost: VirtualHost, proxy: Proxy, connect, monkeypatch: pytest.MonkeyPatch
):
    to = {**vhost.connection_with(connection_timeout=1000), "host": "127.0.0.1", "port": proxy.port}
    connect("broker", **to)
    hook = RabbitMQDelayHook("broker")
    with hook.kept_open():
        hook.service()
        monkeypatch.setattr("airflow_delayed.rabbitmq.publisher._ANSWER_SECONDS", 1.0)
        proxy.hang()
        with pytest.raises(TransportUnavailable, match=f"connection 'broker': 127.0.0.1:{proxy.port}: "):
            hook.service()
        connect("broker", **{**to, "port": 1})
        with pytest.raises(TransportUnavailable, match="nothing listens on that host and port"):
            hook.service()
        proxy.go_on()
        connect("broker", **vhost.connection)
        hook.service()


def test_a_queue_that_was_deleted_while_nothing_was_sent_is_missing(hook: RabbitMQDelayHook, vhost: VirtualHost):
    with hook.kept_open():
        hook.send([message("a")])
        vhost.collect("q", enough=1)
        vhost.manage("DELETE", "queues/{vhost}/q")
        hook.service()
        with pytest.raises(DestinationMissing):
            hook.send([message("b")])
