"""A broker short of memory blocks its publishers: sending waits, and what was sent is counted."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from support.rabbitmq import VirtualHost, eventually, messages

from airflow_delayed.errors import SendFailed, TransportUnavailable
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.message import DelayedMessage
from services import rabbitmq

Hook = Callable[..., RabbitMQDelayHook]


@pytest.fixture
def hook(vhost: VirtualHost, connect: Callable[..., str]) -> Hook:
    def make(**extra: object) -> RabbitMQDelayHook:
        return RabbitMQDelayHook(connect("rabbit", **vhost.connection_with(**extra)))

    vhost.declare("orders")
    return make


@contextmanager
def alarm(broker: rabbitmq.Broker) -> Iterator[None]:
    try:
        broker.alarm()
        yield
    finally:
        broker.end_alarm()


def test_an_alarm_that_ends_loses_nothing(
    broker: rabbitmq.Broker, hook: Hook, vhost: VirtualHost, caplog: pytest.LogCaptureFixture
) -> None:
    batch = messages("orders", [number % 3 for number in range(3000)])

    def end() -> None:
        try:
            eventually(lambda: "the broker takes no messages" in caplog.text)
        finally:
            broker.end_alarm()

    watch = threading.Thread(target=end)

    def stream() -> Iterator[DelayedMessage]:
        for number, message in enumerate(batch):
            if number == 1500:
                broker.alarm()
                watch.start()
            yield message

    try:
        report = hook().send(stream())
    finally:
        broker.end_alarm()
    watch.join()
    assert report.sent == 3000
    assert [text for text in caplog.messages if text.startswith("Connection 'rabbit': the broker")] == [
        "Connection 'rabbit': the broker takes no messages, since it is low on memory; sending goes on when its alarm"
        " ends",
        "Connection 'rabbit': the broker's alarm has ended; sending goes on",
    ]
    arrivals = vhost.collect("orders", enough=3000)
    times = Counter(arrival.message_id for arrival in arrivals)
    assert (len(times), sum(times.values())) == (3000, 3000)
    assert [arrival for arrival in arrivals if arrival.received_at < arrival.due_at] == []


def test_an_alarm_that_lasts_is_an_error(broker: rabbitmq.Broker, hook: Hook, vhost: VirtualHost) -> None:
    batch = messages("orders", [0] * 3000)

    def stream() -> Iterator[DelayedMessage]:
        for number, message in enumerate(batch):
            if number == 1500:
                broker.alarm()
            yield message

    try:
        with pytest.raises(SendFailed) as error:
            hook(blocked_timeout=0.5).send(stream())
    finally:
        broker.end_alarm()
    named = [message_id for message_id, _ in error.value.failures]
    confirmed = error.value.report.sent
    assert 500 <= confirmed <= 2500
    assert 1 <= len(named) <= 1000
    # in order, and each is one or the other
    assert named == [message.message_id for message in batch[confirmed : confirmed + len(named)]]
    text = str(error.value)
    assert f"confirmed {confirmed:,} messages and not {len(named):,}: message" in text
    assert "the broker's alarm (low on memory) has kept it from taking messages for 0.5 s; free memory or disk" in text
    cause = error.value.__cause__
    assert isinstance(cause, TransportUnavailable)
    assert cause.report is error.value.report
    # what was written may still arrive, and what was confirmed does
    sure = {message.message_id for message in batch[:confirmed]}
    assert sure <= {arrival.message_id for arrival in vhost.collect("orders", enough=sure)}


def test_nothing_is_sent_while_an_alarm_lasts_from_the_start(
    broker: rabbitmq.Broker, hook: Hook, vhost: VirtualHost
) -> None:
    sender = hook(blocked_timeout=0.5)
    with alarm(broker):
        started = time.monotonic()
        with pytest.raises(TransportUnavailable, match=r"alarm \(low on memory\) .* 0\.5 s; .* Nothing was sent"):
            sender.send(messages("orders", [0] * 10))
        assert time.monotonic() - started < 30
        # what sends nothing is served
        assert sender.verify(["orders"]).ok
        assert sender.test_connection()[0]
    assert sender.send(messages("orders", [0])).sent == 1
    assert [arrival.message_id for arrival in vhost.collect("orders", enough=1)] == ["m0"]


def test_an_interrupt_during_an_alarm(
    broker: rabbitmq.Broker, hook: Hook, vhost: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that is stopped ends at once: a broker that takes no messages would not read a farewell either."""
    monkeypatch.setattr("airflow_delayed.rabbitmq.session._CLOSE_SECONDS", 120)
    interrupt = threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT))
    # a shell that runs the tests in the background has them ignore it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with alarm(broker):
            interrupt.start()
            started = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                hook(blocked_timeout=120).send(messages("orders", [0] * 10))
            assert time.monotonic() - started < 60
    finally:
        signal.signal(signal.SIGINT, before)
