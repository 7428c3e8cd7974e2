"""A destination that takes no messages, or does not exist, costs the other destinations of its connection no time."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from datetime import timedelta

import pytest
from support.rabbitmq import VirtualHost
from support.sleeping import Time
from support.stores import Store, message, on_postgres_too, plain_store_fixture  # noqa: F401 - a fixture

from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook

SECOND = timedelta(seconds=1)
FULL = {"x-queue-type": "classic", "x-max-length": 1, "x-overflow": "reject-publish"}


@pytest.fixture
def broker(vhost: VirtualHost, connect: Callable[..., str]) -> RabbitMQDelayHook:
    """A broker with the queue "orders", and "full", which has room for one message."""
    vhost.declare("orders")
    vhost.declare("full", **FULL)
    hook = RabbitMQDelayHook(connect("rabbit", **vhost.connection))
    hook.install(["orders", "full"])
    return hook


@on_postgres_too
def test_a_full_queue_holds_up_no_other_and_uses_up_no_retry(
    store: Store, vhost: VirtualHost, broker: RabbitMQDelayHook, caplog: pytest.LogCaptureFixture
):
    hook = store.installed()
    time = Time(hook)
    due = time.start - SECOND
    mixed = [message(f"{name}{n}", due, destination=name) for n in range(40) for name in ("full", "orders")]
    hook.send(mixed)
    made = store.dispatcher(hook, broker, **time.options(), batch_size=10, number_of_retries=0)
    with caplog.at_level(logging.WARNING):
        assert made.once().dispatched == 41
    assert len(vhost.collect("orders", enough=40)) == 40
    # nobody waited
    assert time.seconds == 0
    waiting = {one.message_id: one for one in hook.list()}
    assert len(waiting) == 39
    assert {one.retry_count for one in waiting.values()} == {0}
    tried = [one for one in waiting.values() if one.next_try is not None]
    # after the first refusal nothing more of it is claimed
    assert 1 <= len(tried) <= 20
    assert all(
        "full" in (one.last_error or "") and 0 < (one.next_try - time.start).total_seconds() <= 1 for one in tried
    )
    assert made.next_due() is not None
    assert made.next_due() <= SECOND
    assert caplog.text.count("destination 'full' takes no messages") == 1

    # while it is full it is asked again at growing times, and the others go on
    for number in range(6):
        time.seconds += 61
        hook.send([message(f"next{number}", due, destination="orders")])
        assert made.once().dispatched == 1
    assert caplog.text.count("destination 'full' takes no messages") == 1
    assert max(one.next_try for one in hook.list() if one.next_try) - time.start > timedelta(seconds=time.seconds + 29)

    (kept,) = vhost.collect("full", enough=1)
    vhost.manage("DELETE", "queues/{vhost}/full")
    vhost.declare("full")
    broker.install(["full"])
    time.seconds += 61
    assert made.once().dispatched == 39
    arrived = Counter(one.message_id for one in [kept, *vhost.collect("full", enough=39)])
    assert arrived == {f"full{n}": 1 for n in range(40)}
    assert caplog.text.count("destination 'full' takes messages again") == 1
    assert not list(hook.list())


def test_a_queue_that_is_gone_holds_up_no_other(store: Store, vhost: VirtualHost, broker: RabbitMQDelayHook):
    """Its messages are given up at once, as before."""
    hook = store.installed()
    time = Time(hook)
    hook.send(
        message(f"{name}{n}", time.start - SECOND, destination=name) for n in range(20) for name in ("gone", "orders")
    )
    made = store.dispatcher(hook, broker, **time.options(), batch_size=10)
    report = made.once()
    assert (report.dispatched, report.failed, time.seconds) == (20, 20, 0)
    assert len(vhost.collect("orders", enough=20)) == 20


def test_a_full_queue_with_a_rate_is_emptied_when_there_is_room(
    store: Store, vhost: VirtualHost, broker: RabbitMQDelayHook
):
    hook = store.installed()
    time = Time(hook)
    hook.set_rates({"full": 100})
    hook.send(message(f"full{n}", time.start - SECOND, destination="full") for n in range(5))
    made = store.dispatcher(hook, broker, **time.options())
    # until there are tokens
    time.seconds += 1
    assert made.once().dispatched == 1
    vhost.manage("DELETE", "queues/{vhost}/full")
    vhost.declare("full")
    broker.install(["full"])
    time.seconds += 61
    assert made.once().dispatched == 4
