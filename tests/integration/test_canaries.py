"""Canaries through a real broker: its lateness is in the history, a fault of it in the verdict, and nothing is left."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any

import pytest
from support.proxy import Proxy, proxy
from support.rabbitmq import VirtualHost, eventually
from support.stores import Store

from airflow_delayed.delivery import delivery_for
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.hooks.store import DelayedStoreHook

CANARY = "airflow_delayed.store.dispatch.canary"
WHEN_DUE, IN_LEVELS = "canary, published when due", "canary, through the levels"
#: Seconds in which anything that is to come has come, on a slow machine.
PATIENCE = 120
pytestmark = [pytest.mark.parametrize("store", ["sqlite"], indirect=True), pytest.mark.long]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rounds follow each other at once; how long each takes is shown with a clock of a test's own."""
    monkeypatch.setattr(f"{CANARY}.ROUND_EVERY", 0.2)
    monkeypatch.setattr(f"{CANARY}.DELAY", timedelta(seconds=3))
    monkeypatch.setattr(f"{CANARY}._GIVE_UP", timedelta(seconds=5))
    # an empty queue that was left goes soon
    monkeypatch.setattr(f"{CANARY}._WANTED", 4.0)
    monkeypatch.setattr("airflow_delayed.rabbitmq.transport._GRACE", 0)


@pytest.fixture
def broker(vhost: VirtualHost) -> Iterator[Proxy]:
    with proxy(vhost.parameters.port, vhost.parameters.host) as made:
        yield made


@contextmanager
def dispatching(hook: DelayedStoreHook, conn_id: str) -> Iterator[None]:
    with closing(hook.dispatcher([conn_id], delivery_for, stays=True)) as dispatcher, ThreadPoolExecutor(1) as pool:
        run = pool.submit(dispatcher.run, "stopped")
        try:
            yield
        finally:
            dispatcher.stop()
        run.result(PATIENCE)


def found(hook: DelayedStoreHook) -> str:
    texts = (f"{one.resource}: {one.what} {one.remedy}" for one in hook.health() if one.code == "canary")
    return next(texts, "")


def arrived(hook: DelayedStoreHook) -> dict[str, int]:
    return {one.destination: one.dispatched for one in hook.condition().lateness}


def queues(vhost: VirtualHost) -> list[str]:
    listed: Any = vhost.manage("GET", "queues/{vhost}")
    return [one["name"] for one in listed if one["name"].startswith("airflow-delayed-canary-")]


def test_what_it_measures_is_in_the_history_and_nothing_is_left(
    store: Store, vhost: VirtualHost, connect: Callable[..., str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AIRFLOW__DELAYED__CANARIES", "True")
    conn_id = connect("rabbit", **vhost.connection)
    hook = store.installed(deliver_conn_id=conn_id)
    with dispatching(hook, conn_id):
        eventually(lambda: arrived(hook).get(IN_LEVELS, 0) >= 2, PATIENCE)
        assert arrived(hook).keys() == {WHEN_DUE, IN_LEVELS}
        assert found(hook) == ""
        eventually(lambda: queues(vhost), PATIENCE)
    # one may be on its way; its queue goes when it has come
    eventually(lambda: not queues(vhost), PATIENCE)
    assert vhost.count("delayed.hex.unroutable") == 0


@pytest.mark.parametrize("options", [{"stays": True}, {"canaries": True}], ids=["no option", "does not stay"])
def test_who_has_no_option_or_does_not_stay_sends_none(store: Store, connect: Callable[..., str], options: dict):
    conn_id = connect("rabbit", conn_type="rabbitmq", host="127.0.0.1")
    hook = store.installed(deliver_conn_id=conn_id)
    with closing(hook.dispatcher([conn_id], delivery_for, **options)) as dispatcher:
        dispatcher.once()
        assert "delayed-canary" not in {one.name for one in threading.enumerate()}


def test_a_level_that_is_gone_is_named(
    store: Store, vhost: VirtualHost, connect: Callable[..., str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AIRFLOW__DELAYED__CANARIES", "True")
    conn_id = connect("rabbit", **vhost.connection)
    hook = store.installed(deliver_conn_id=conn_id)
    with dispatching(hook, conn_id):
        eventually(lambda: arrived(hook).get(IN_LEVELS), PATIENCE)
        # a delay of 3 s is a little shorter or longer when it is sent
        for level in range(1, 5):
            vhost.manage("DELETE", f"queues/{{vhost}}/delayed.hex.000000{level}")
        eventually(lambda: "through the delay levels" in found(hook), PATIENCE)
        assert "broker of connection 'rabbit': it does not deliver in time since" in found(hook)
        assert "airflow delayed install --conn-id rabbit" in found(hook)
        with closing(RabbitMQDelayHook(conn_id)) as repair:
            repair.install([])
        eventually(lambda: not found(hook), PATIENCE)


def test_a_binding_between_two_levels_that_is_missing_is_named(
    store: Store, vhost: VirtualHost, connect: Callable[..., str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AIRFLOW__DELAYED__CANARIES", "True")
    # it passes two levels, also when it is sent a little later
    monkeypatch.setattr(f"{CANARY}.DELAY", timedelta(seconds=20))
    monkeypatch.setattr(f"{CANARY}.LATE_AFTER", timedelta(seconds=1))
    exchange = "delayed.hex.last-1"
    with vhost.channel() as channel:
        for level in (f"delayed.hex.000000{digit}" for digit in range(1, 5)):
            listed: Any = vhost.manage("GET", f"bindings/{{vhost}}/e/{exchange}/q/{level}")
            for one in listed:
                channel.queue_unbind(level, exchange, one["routing_key"])
    conn_id = connect("rabbit", **vhost.connection)
    hook = store.installed(deliver_conn_id=conn_id)
    with dispatching(hook, conn_id):
        eventually(lambda: re.search("through the delay levels.*has not arrived", found(hook)), PATIENCE)
        assert arrived(hook).keys() == {WHEN_DUE}
    # it is where all messages without a way are, and redrive moves it back
    assert vhost.count("delayed.hex.unroutable") >= 1


def test_a_broker_that_hangs_is_named(
    store: Store, vhost: VirtualHost, broker: Proxy, connect: Callable[..., str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AIRFLOW__DELAYED__CANARIES", "True")
    monkeypatch.setattr(f"{CANARY}.LATE_AFTER", timedelta(seconds=2))
    conn_id = connect("rabbit", **{**vhost.connection_with(connection_timeout=3000), "port": broker.port})
    hook = store.installed(deliver_conn_id=conn_id)
    with dispatching(hook, conn_id):
        eventually(lambda: arrived(hook).get(WHEN_DUE), PATIENCE)
        broker.hang()
        eventually(lambda: found(hook), PATIENCE)
        broker.go_on()
        eventually(lambda: not found(hook), PATIENCE)
