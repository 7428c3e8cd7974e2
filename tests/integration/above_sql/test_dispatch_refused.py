"""A destination that takes no messages, or does not exist, costs the other destinations of its connection no time."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace

import pytest
from botocore.awsrequest import AWSResponse
from support.rabbitmq import VirtualHost, eventually
from support.sleeping import Time
from support.sqs import World
from support.stores import Store, message, on_postgres_too

from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from services import rabbitmq, sqs

SECOND = timedelta(seconds=1)
FROZEN = [f"frozen{number}" for number in range(5)]
FULL = {"x-queue-type": "classic", "x-max-length": 1, "x-overflow": "reject-publish"}


@pytest.fixture
def rabbit(vhost: VirtualHost, connect: Callable[..., str]) -> RabbitMQDelayHook:
    """A broker with the queue "orders", and "full", which has room for one message."""
    vhost.declare("orders")
    vhost.declare("full", **FULL)
    hook = RabbitMQDelayHook(connect("rabbit", **vhost.connection))
    hook.install(["orders", "full"])
    return hook


@on_postgres_too
def test_a_full_queue_holds_up_no_other_and_uses_up_no_retry(
    store: Store, vhost: VirtualHost, rabbit: RabbitMQDelayHook, caplog: pytest.LogCaptureFixture
):
    hook = store.installed()
    time = Time(hook)
    due = time.start - SECOND
    mixed = [message(f"{name}{n}", due, destination=name) for n in range(40) for name in ("full", "orders")]
    hook.send(mixed)
    made = store.dispatcher(hook, rabbit, **time.options(), batch_size=10, number_of_retries=0)
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
    assert max(one.next_try for one in hook.list() if one.next_try) - time.start > timedelta(seconds=time.seconds + 4)

    (kept,) = vhost.collect("full", enough=1)
    vhost.manage("DELETE", "queues/{vhost}/full")
    vhost.declare("full")
    rabbit.install(["full"])
    time.seconds += 61
    assert made.once().dispatched == 39
    arrived = Counter(one.message_id for one in [kept, *vhost.collect("full", enough=39)])
    assert arrived == {f"full{n}": 1 for n in range(40)}
    assert caplog.text.count("destination 'full' takes messages again") == 1
    assert not list(hook.list())


def test_what_was_due_long_ago_is_found_while_a_queue_is_full(
    store: Store, vhost: VirtualHost, rabbit: RabbitMQDelayHook
):
    hook = store.installed()
    time = Time(hook)
    hook.send(message(f"full{n}", time.start - SECOND, destination="full") for n in range(30))
    made = store.dispatcher(hook, rabbit, **time.options(), batch_size=10)
    made.once()
    hook.send(message(f"late{n}", time.start - 3600 * SECOND, destination="orders") for n in range(30))
    due = made.next_due()
    assert due is not None
    assert due <= SECOND
    time.seconds += 1
    assert made.once().dispatched == 30
    assert len(list(hook.list())) == 29


def test_a_full_queue_without_messages_is_no_longer_tried(store: Store, vhost: VirtualHost, rabbit: RabbitMQDelayHook):
    hook = store.installed()
    time = Time(hook)
    hook.send(message(f"full{n}", time.start - SECOND, destination="full") for n in range(3))
    made = store.dispatcher(hook, rabbit, **time.options())
    made.once()
    assert made.next_due() is not None
    hook.cancel([f"full{n}" for n in range(3)])
    time.seconds += 61
    assert made.once().dispatched == 0
    assert made.next_due() is None


@pytest.fixture
def frozen(own_vhost: VirtualHost, broker: rabbitmq.Broker) -> Iterator[Callable[[], None]]:
    """Freezes the processes of the queues FROZEN, which confirm nothing then; the function lets them go on."""
    own_vhost.declare("orders", *FROZEN)
    processes = ", ".join(f"'{own_vhost.name}_{name}'" for name in FROZEN)
    broker.eval(f"[sys:suspend(Name) || Name <- [{processes}]]")
    thawed = False

    def thaw() -> None:
        nonlocal thawed
        if not thawed:
            thawed = True
            broker.eval(f"[sys:resume(Name) || Name <- [{processes}]]")

    yield thaw
    thaw()


def test_queues_that_confirm_nothing_hold_up_no_other(
    store: Store,
    own_vhost: VirtualHost,
    frozen: Callable[[], None],
    connect: Callable[..., str],
    caplog: pytest.LogCaptureFixture,
):
    """More messages for each than a broker takes of a channel before it reads nothing more from it."""
    conn_id = connect("rabbit", **own_vhost.connection)
    RabbitMQDelayHook(conn_id).install([])
    hook = store.installed()
    due = hook.now() - SECOND
    names = (*FROZEN, "orders")
    hook.send(message(f"{name}-{n}", due, destination=name) for n in range(50) for name in names)
    made = store.dispatcher(
        hook,
        transports=lambda _, clock: RabbitMQDelayHook(conn_id, clock=clock),
        deliver_conn_ids=["broker"],
        stays=True,
        number_of_retries=0,
    )
    with caplog.at_level(logging.WARNING):
        assert made.once(60).dispatched == 50
        # all at the same time
        assert (hook.now() - due).total_seconds() < 10
        for name in FROZEN:
            assert f"destination '{name}' takes no messages: it has confirmed nothing for 1 s" in caplog.text
        for number in range(3):
            hook.send([message(f"next{number}", hook.now() - SECOND, destination="orders")])
            assert made.once(60).dispatched == 1
        assert {one.retry_count for one in hook.list()} == {0}
        assert len(list(hook.list())) == 50 * len(FROZEN)
        frozen()
        eventually(lambda: made.once(60) is not None and not list(hook.list()), 120)
        for name in FROZEN:
            assert f"destination '{name}' takes messages again" in caplog.text
    made.finish()
    wanted = {f"{name}-{n}" for n in range(50) for name in names} | {f"next{n}" for n in range(3)}
    assert {one.message_id for one in own_vhost.collect(*names, enough=wanted)} == wanted


@pytest.mark.parametrize("store", ["postgres", "mariadb"], indirect=True)
def test_a_locked_queue_table_holds_up_no_other_and_uses_up_no_retry(store: Store, caplog: pytest.LogCaptureFixture):
    hook = store.installed("locked", "orders", deliver_conn_id=None)
    due = hook.now() - SECOND
    hook.send(message(f"{name}{n}", due, destination=name) for n in range(20) for name in ("locked", "orders"))
    time = Time(hook)
    made = store.dispatcher(hook, **time.options(), batch_size=10, number_of_retries=0)
    table = ".".join(map(hook.engine.dialect.identifier_preparer.quote_identifier, (store.schema, "locked")))
    lock, unlock = {
        "postgresql": (f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE", "SELECT 1"),
        "mysql": (f"LOCK TABLES {table} WRITE", "UNLOCK TABLES"),
    }[hook.engine.dialect.name]
    with hook.engine.begin() as other:
        other.exec_driver_sql(lock)
        assert made.once().dispatched == 20
        assert {(one.destination, one.retry_count) for one in hook.list()} == {("locked", 0)}
        assert made.next_due() is not None
        assert made.next_due() <= SECOND
        other.exec_driver_sql(unlock)
    time.seconds += 2
    assert made.once().dispatched == 20
    assert [len(store.rows(hook, queue)) for queue in ("locked", "orders")] == [20, 20]
    assert caplog.text.count("destination 'locked' takes no messages: table 'locked' is locked") == 1


def test_a_throttled_queue_of_sqs_holds_up_no_other_and_uses_up_no_retry(
    store: Store, sqs_endpoint: str, connect: Callable[..., str], caplog: pytest.LogCaptureFixture
):
    connect("broker", **sqs.connection(sqs_endpoint))
    throttled, orders = (World(sqs_endpoint, "broker").install() for _ in range(2))
    hook = store.installed()
    due, both = hook.now() - SECOND, (throttled.destination, orders.destination)
    hook.send(message(f"{name}{n}", due, destination=name) for n in range(30) for name in both)
    time = Time(hook)
    busy = True

    def refuse(request, **_):
        asked.append(json.loads(request.body)["QueueUrl"].rpartition("/")[2])
        if busy and asked[-1] == throttled.queue:
            raw = SimpleNamespace(stream=lambda: [b'{"__type": "RequestThrottled"}'])
            return AWSResponse(request.url, 403, {}, raw)
        return None

    asked: list[str] = []
    orders.hook.close()
    orders.hook.patient = False
    orders.on("before-send.sqs.SendMessageBatch", refuse)
    made = store.dispatcher(
        hook,
        transports=lambda *_: orders.hook,
        deliver_conn_ids=["broker"],
        **time.options(),
        batch_size=100,
        number_of_retries=0,
    )
    assert made.once().dispatched == 30
    # nobody waited, and the queue was not asked again
    assert (time.seconds, orders.slept, asked.count(throttled.queue)) == (0, [], 1)
    assert {(one.destination, one.retry_count) for one in hook.list()} == {(throttled.destination, 0)}
    assert (
        caplog.text.count(f"destination '{throttled.destination}' takes no messages: SQS is too busy for its queue")
        == 1
    )
    busy = False
    time.seconds += 61
    assert made.once().dispatched == 30
    assert [len(world.ids()) for world in (orders, throttled)] == [30, 30]
