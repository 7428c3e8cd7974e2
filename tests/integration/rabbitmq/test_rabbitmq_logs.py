"""What a task's log shows of pika on a real broker: nothing, unless somebody asks for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta

import pytest
from support.rabbitmq import VirtualHost, messages

from airflow_delayed.errors import DestinationMissing, TransportUnavailable
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook

Connect = Callable[..., str]


def pikas(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("pika.")]


def test_what_is_asked_and_refused_is_not_logged(
    hook: RabbitMQDelayHook, connect: Connect, vhost: VirtualHost, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    hook.install(["orders"], create_destinations=True)
    assert hook.verify(["orders"], max_delay=timedelta(seconds=1)).ok
    assert hook.send(messages("orders", [1000, 0])).sent == 2
    assert hook.waiting().messages == 1
    assert hook.redrive().moved == 0
    assert hook.test_connection()[0]
    with pytest.raises(DestinationMissing):
        hook.send(messages("none", [1]))
    bad = RabbitMQDelayHook(connect("bad", **{**vhost.connection, "host": "127.0.0.1:1"}))
    for use in (lambda: bad.verify([]), lambda: bad.send(messages("orders", [1]))):
        with pytest.raises(TransportUnavailable, match="nothing listens"):
            use()
    assert not bad.test_connection()[0]
    assert pikas(caplog) == []


def test_pikas_log_is_there_for_who_asks_for_it(
    hook: RabbitMQDelayHook, vhost: VirtualHost, caplog: pytest.LogCaptureFixture
) -> None:
    hook.install([])
    # others, in the same process
    caplog.set_level(logging.INFO)
    with vhost.channel():
        pass
    assert "Connection workflow succeeded" in "\n".join(pikas(caplog))
    caplog.clear()
    caplog.set_level(logging.INFO, "pika")
    hook.install([])
    assert "Connection workflow succeeded" in "\n".join(pikas(caplog))
