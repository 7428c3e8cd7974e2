"""Several hosts, and connections that a proxy cuts or lets fall silent: sent, arrived, twice and lost are counted."""

from __future__ import annotations

import contextlib
import random
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack

import pika
import pytest
from support.proxy import Proxy, proxy
from support.rabbitmq import VirtualHost, messages

from airflow_delayed.delivery import delivery_for
from airflow_delayed.errors import SendFailed, TransportUnavailable
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.message import DelayedMessage
from airflow_delayed.rabbitmq.publisher import Publisher

Connect = Callable[..., str]
DEAD = "127.0.0.1:1"
#: How far the management API's port is above AMQP's by default.
PORT_OFFSET = 10_000


@pytest.fixture
def proxies(vhost: VirtualHost) -> Iterator[tuple[Proxy, Proxy]]:
    """Two hosts of what might be a cluster."""
    broker = vhost.port, str(vhost.connection["host"])
    with proxy(*broker) as one, proxy(*broker) as other:
        yield one, other


@pytest.fixture
def hook(hook: RabbitMQDelayHook, vhost: VirtualHost) -> RabbitMQDelayHook:
    vhost.declare("orders")
    return hook


def through(connect: Connect, vhost: VirtualHost, *hosts: Proxy | str, **extra: object) -> RabbitMQDelayHook:
    names = ",".join(each if isinstance(each, str) else f"127.0.0.1:{each.port}" for each in hosts)
    return RabbitMQDelayHook(connect("through", **{**vhost.connection_with(**extra), "host": names}))


def silent_port(stack: ExitStack) -> str:
    """A host that takes connections and never says a word."""
    return f"127.0.0.1:{stack.enter_context(socket.create_server(('127.0.0.1', 0), backlog=16)).getsockname()[1]}"


class FrozenHost:
    """A host whose broker is frozen: the ports of AMQP and of the management API take connections and never answer."""

    def __init__(self, stack: ExitStack) -> None:
        self.taken: Counter[int] = Counter()
        listeners: list[socket.socket] = []
        while len(listeners) < 2:
            self.port = random.randrange(20_000, 30_000)
            with contextlib.suppress(OSError), ExitStack() as both:
                ports = (self.port, self.port + PORT_OFFSET)
                listeners = [both.enter_context(socket.create_server(("127.0.0.1", port))) for port in ports]
                stack.push(both.pop_all())
        for listener in listeners:
            thread = threading.Thread(target=self._accept, args=(listener,))
            thread.start()
            stack.callback(thread.join)
            # wakes the thread
            stack.callback(listener.shutdown, socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        with ExitStack() as connections, contextlib.suppress(OSError):
            while True:
                connection = connections.enter_context(listener.accept()[0])
                self.taken[connection.getsockname()[1]] += 1


def account(vhost: VirtualHost, batch: Iterable[DelayedMessage]) -> dict[str, int]:
    ids = {message.message_id for message in batch}
    arrivals = vhost.collect("orders", enough=ids)
    times = Counter(arrival.message_id for arrival in arrivals)
    return {
        "arrived": len(times),
        "twice": sum(times.values()) - len(times),
        "lost": len(ids - times.keys()),
        "early": sum(arrival.received_at < arrival.due_at for arrival in arrivals),
    }


def test_the_first_host_that_answers_is_used(
    hook: RabbitMQDelayHook, vhost: VirtualHost, proxies: tuple[Proxy, Proxy], connect: Connect
) -> None:
    one, other = proxies
    both = through(connect, vhost, DEAD, one, other)
    batch = messages("orders", [0] * 10)
    assert both.install(["orders"]).ok
    assert both.send(batch).sent == 10
    assert one.taken > 0
    assert other.taken == 0
    report = both.verify(["orders"])
    assert report.ok
    assert [(each.code, each.resource) for each in report if each.severity == "warning"] == [
        ("node-down", f"host {DEAD}")
    ]
    assert account(vhost, batch) == {"arrived": 10, "twice": 0, "lost": 0, "early": 0}


def test_a_frozen_host_is_waited_for_once_in_a_process(
    hook: RabbitMQDelayHook, vhost: VirtualHost, connect: Connect
) -> None:
    """By the hook's first call; then AMQP and the management API begin with the host that answered."""
    fields = vhost.connection
    with ExitStack() as stack:
        frozen = FrozenHost(stack)
        host = f"127.0.0.1:{frozen.port},{fields['host']}:{fields['port']}"
        conn_id = connect("cluster", **{**fields, "host": host})
        batch = messages("orders", [0] * 10)
        assert RabbitMQDelayHook(conn_id).verify(["orders"]).ok
        assert RabbitMQDelayHook(conn_id).install(["orders"]).ok
        assert RabbitMQDelayHook(conn_id).send(batch).sent == 10
        assert RabbitMQDelayHook(conn_id).waiting().messages == 0
    assert frozen.taken == {frozen.port: 1}
    assert account(vhost, batch) == {"arrived": 10, "twice": 0, "lost": 0, "early": 0}


def test_when_no_host_answers_each_is_named_with_its_cause(vhost: VirtualHost, connect: Connect) -> None:
    bad = through(connect, vhost, DEAD, "no-such-host.invalid:5673")
    causes = f"connection 'through': {DEAD}: nothing listens on that host and port; no-such-host.invalid:5673: the host"
    uses = {"sent": lambda: bad.send(messages("orders", [1])), "verified": lambda: bad.verify([])}
    for name, use in uses.items():
        with pytest.raises(TransportUnavailable, match=re.escape(causes)) as error:
            use()
        assert str(error.value).endswith(". Nothing was sent") == (name == "sent")
    well, text = bad.test_connection()
    assert not well
    assert text.startswith(causes.removeprefix("connection 'through': "))


def test_a_lost_connection_goes_on_with_the_next_host(
    hook: RabbitMQDelayHook, vhost: VirtualHost, proxies: tuple[Proxy, Proxy], connect: Connect
) -> None:
    """Cut five times, in turn, once with hundreds of messages under way."""
    batch = messages("orders", [number % 3 for number in range(6000)])
    cuts = []

    def stream() -> Iterator[DelayedMessage]:
        for number, message in enumerate(batch):
            if number % 1100 == 700:
                cuts.append((proxies[0].cut(), proxies[1].cut()))
            yield message

    started = time.monotonic()
    assert through(connect, vhost, *proxies).send(stream()).sent == 6000
    # all but the one in use are tried at once, without a wait
    assert time.monotonic() - started < 60
    assert sorted(cuts) == [(0, 1), (0, 1), (1, 0), (1, 0), (1, 0)]
    assert (proxies[0].taken, proxies[1].taken) == (3, 3)
    counts = account(vhost, batch)
    # at most what was unconfirmed, five times
    assert counts.pop("twice") <= 5000
    assert counts == {"arrived": 6000, "lost": 0, "early": 0}


def test_one_host_whose_connection_is_cut_again_and_again(
    hook: RabbitMQDelayHook, vhost: VirtualHost, proxies: tuple[Proxy, Proxy], connect: Connect
) -> None:
    batch = messages("orders", [0] * 3000)
    cuts = 0

    def stream() -> Iterator[DelayedMessage]:
        nonlocal cuts
        for number, message in enumerate(batch):
            if number % 1000 == 900:
                cuts += proxies[0].cut()
            yield message

    assert through(connect, vhost, proxies[0]).send(stream()).sent == 3000
    assert (cuts, proxies[0].taken) == (3, 4)
    counts = account(vhost, batch)
    assert counts.pop("twice") <= 3000
    assert counts == {"arrived": 3000, "lost": 0, "early": 0}


def test_when_no_host_comes_back_each_is_named(
    hook: RabbitMQDelayHook, vhost: VirtualHost, proxies: tuple[Proxy, Proxy]
) -> None:
    names = [f"127.0.0.1:{each.port}" for each in proxies]
    login = vhost.parameters.credentials
    hosts = [pika.ConnectionParameters("127.0.0.1", each.port, vhost.name, login) for each in proxies]
    waited: list[float] = []

    def stream() -> Iterator[DelayedMessage]:
        yield from messages("orders", [0] * 1100)
        for each in proxies:
            each.close()
        yield from messages("orders", [0] * 10, prefix="last")

    with pytest.raises(SendFailed) as error:
        Publisher(hosts, conn_id="rabbit", reconnect_waits=(0.1, 0.2), sleep=waited.append).send(stream())
    assert [seconds for seconds in waited if seconds] == [0.1, 0.2]
    dead = "nothing listens on that host and port"
    cause = error.value.__cause__
    assert isinstance(cause, TransportUnavailable)
    assert str(cause).startswith("connection 'rabbit': 127.0.0.1:")
    for name in names:
        assert f"{name}: {dead}" in str(cause)
    assert str(cause).endswith("; 5 tries to connect again")
    assert 100 <= error.value.report.sent <= 1100


def test_a_connection_that_falls_silent_is_lost_by_its_heartbeat(
    hook: RabbitMQDelayHook, vhost: VirtualHost, proxies: tuple[Proxy, Proxy], connect: Connect, caplog
) -> None:
    batch = messages("orders", [0] * 1500)
    silenced = 0

    def stream() -> Iterator[DelayedMessage]:
        nonlocal silenced
        for number, message in enumerate(batch):
            if number == 800:
                silenced = proxies[0].fall_silent()
            yield message

    assert through(connect, vhost, *proxies, heartbeat=5).send(stream()).sent == 1500
    assert (silenced, caplog.text.count("was lost after")) == (1, 1)
    assert "the broker sent no heartbeat" in caplog.text
    counts = account(vhost, batch)
    assert counts.pop("twice") <= 1000
    assert counts == {"arrived": 1500, "lost": 0, "early": 0}


def test_a_test_of_dead_hosts_takes_a_few_seconds(
    hook: RabbitMQDelayHook, vhost: VirtualHost, proxies: tuple[Proxy, Proxy], connect: Connect
) -> None:
    with ExitStack() as stack:
        dead = [silent_port(stack) for _ in range(12)]
        silent = through(connect, vhost, dead[0], connection_timeout=200)
        for use in (lambda: silent.verify([]), lambda: silent.send(messages("orders", [0]))):
            with pytest.raises(TransportUnavailable, match=f"'through': {dead[0]}: no answer in time"):
                use()
        bad = through(connect, vhost, *dead, DEAD)
        started = time.monotonic()
        well, text = bad.test_connection()
        # one after the other they would take 60
        assert time.monotonic() - started < 45
        assert not well
        for host in dead:
            assert f"{host}: no answer in time" in text
        assert f"{DEAD}: nothing listens" in text

        good = f"127.0.0.1:{proxies[0].port}"
        well, text = through(connect, vhost, DEAD, good).test_connection()
        assert well
        assert f"Connected to RabbitMQ at {good}, virtual host {vhost.name!r}" in text
        assert f"Not all hosts can be used: {DEAD}: nothing listens" in text


def test_connections_given_as_uris(
    hook: RabbitMQDelayHook, vhost: VirtualHost, proxies: tuple[Proxy, Proxy], connect: Connect
) -> None:
    fields = vhost.connection
    name = vhost.name.replace("/", "%2F")
    for hosts in (f"127.0.0.1:{proxies[0].port}", f"127.0.0.1%3A1%2C127.0.0.1%3A{proxies[0].port}"):
        conn_id = connect("by_uri", f"amqp://{fields['login']}:{fields['password']}@{hosts}/{name}?heartbeat=30")
        found = delivery_for(conn_id)
        assert isinstance(found, RabbitMQDelayHook)
        assert found.verify(["orders"]).ok


def test_an_extra_that_is_no_json_is_no_empty_one(connect: Connect, vhost: VirtualHost) -> None:
    bad = RabbitMQDelayHook(connect("bad", **{**vhost.connection, "extra": '{"ssl": true'}))
    with pytest.raises(ValueError, match="connection 'bad': the extra is no JSON object"):
        bad.verify([])
