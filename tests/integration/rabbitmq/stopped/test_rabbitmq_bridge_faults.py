"""The bridge on a broker that restarts, and that refuses a message for good."""

from __future__ import annotations

from collections import Counter

import pytest
from support.bridging import consumers_exchange, publish, running
from support.rabbitmq import VirtualHost, eventually

from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from services import rabbitmq

pytestmark = pytest.mark.long


def bodies(vhost: VirtualHost, queue: str) -> Counter[bytes]:
    found: Counter[bytes] = Counter()
    with vhost.channel() as channel:
        while (body := channel.basic_get(queue, auto_ack=True)[2]) is not None:
            found[body] += 1
    return found


def test_a_broker_that_restarts(hook: RabbitMQDelayHook, vhost: VirtualHost, broker: rabbitmq.Broker) -> None:
    consumers_exchange(vhost, "topic", mine="#")
    made = hook.bridge("services", "orders")
    made.install()
    for number in range(20):
        publish(vhost, "k", b"%d" % number, 1 + 100 * number)
    with running(made):
        eventually(lambda: made.counts.delayed)
        broker.stop()
        broker.start()
        # a level sends again after some time what a queue has not confirmed, such as a queue still starting
        eventually(lambda: made.counts.delivered >= 20, 120)
        # what was delivered twice is counted twice
        arrived: set[bytes] = set()
        eventually(lambda: arrived.update(bodies(vhost, "mine")) or len(arrived) >= 20, 120)
    assert arrived == {b"%d" % number for number in range(20)}


def test_a_message_that_the_broker_refuses_for_good_holds_up_no_other(
    hook: RabbitMQDelayHook, vhost: VirtualHost, broker: rabbitmq.Broker, caplog: pytest.LogCaptureFixture
) -> None:
    """The broker takes smaller messages by now, and closes the channel for a larger one without naming it."""
    consumers_exchange(vhost, "topic", mine="#")
    made = hook.bridge("services", "orders")
    made.install()
    small = [b"%d" % number for number in range(40)]
    large = bytes(2_000_000)
    for body in [*small[:20], large, *small[20:]]:
        publish(vhost, "k", body)

    def take_at_most(size: str) -> None:
        broker.eval(f"application:set_env(rabbit, max_message_size, {size})")
        broker.eval(f"persistent_term:put(max_message_size, {size})")

    before = broker.eval("element(2, application:get_env(rabbit, max_message_size))")
    take_at_most("1000000")
    try:
        with running(made):
            eventually(lambda: made.counts.delivered + made.counts.parked >= 41)
            vhost.until(**{"delayed.bridge.services.parked": 1})
    finally:
        take_at_most(before)
    assert set(bodies(vhost, "mine")) == set(small)
    assert bodies(vhost, "delayed.bridge.services.parked") == {large: 1}
    assert "is larger than configured max size" in caplog.text
