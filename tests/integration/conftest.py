"""What these tests share: virtual hosts of a broker, a broker that may be stopped, and what `support` offers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import pytest
from support.certificates import Authority
from support.commands import airflow_command  # noqa: F401
from support.forked import PATIENCE
from support.rabbitmq import VirtualHost, virtual_host
from support.sqs import clocked_fixture, clocked_server_fixture, world_fixture  # noqa: F401
from support.stores import store_fixture  # noqa: F401
from support.virtual_hosts import VirtualHosts

from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.notifications import notifiers
from services import rabbitmq


@pytest.fixture(scope="session")
def virtual_hosts(rabbitmq_url: str) -> Iterator[VirtualHosts]:
    """Virtual hosts with the default topology, for this process's tests one after the other."""
    made = VirtualHosts(rabbitmq_url)
    yield made
    made.close()


@pytest.fixture(scope="module", autouse=True)
def idle_virtual_hosts() -> Iterator[None]:
    yield
    VirtualHosts.delete_idle()


@pytest.fixture(autouse=True)
def patient_notifiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let notifiers wait for a store as long as a busy machine may need."""
    monkeypatch.setattr(notifiers, "CALL_SECONDS", float(PATIENCE))


@pytest.fixture
def empty_vhost(rabbitmq_url: str) -> Iterator[VirtualHost]:
    """A virtual host with nothing in it; a test that uses this fixture has it as ``vhost`` too."""
    with virtual_host(rabbitmq_url) as host:
        yield host


@pytest.fixture
def vhost(request: pytest.FixtureRequest, rabbitmq_url: str) -> Iterator[VirtualHost]:
    """A virtual host for one test, with the default topology's levels and no destinations."""
    # by asking for the URL it shows that a test needs the broker; see support/needing.py
    if "empty_vhost" in request.fixturenames:
        yield request.getfixturevalue("empty_vhost")
        return
    with request.getfixturevalue("virtual_hosts").one() as host:
        yield host


@pytest.fixture
def using(vhost: VirtualHost, connect: Callable[..., str]) -> Callable[..., RabbitMQDelayHook]:
    """Make a hook on a connection of its own: using("celery", heartbeat=30)."""
    numbers = count()

    def make(topology: str | None = None, **extra: object) -> RabbitMQDelayHook:
        conn_id = connect(f"rabbit{next(numbers)}", **vhost.connection_with(**extra))
        return RabbitMQDelayHook(conn_id, topology=topology)

    return make


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Who signs the certificates of the tests' own broker and of its clients."""
    return Authority(tmp_path_factory.mktemp("authority"), "ours")


@pytest.fixture(scope="session")
def own_broker(authority: Authority) -> Iterator[rabbitmq.Broker]:
    """A broker that may be stopped and alarmed, with TLS: the tests' own, whatever RABBITMQ_URL says."""
    with rabbitmq.running(authority.sign("localhost")) as made:
        yield made


@pytest.fixture(scope="session")
def own_virtual_hosts(own_broker: rabbitmq.Broker) -> VirtualHosts:
    """Virtual hosts of that broker, which go with it."""
    return VirtualHosts(own_broker.url)


@pytest.fixture
def broker(own_broker: rabbitmq.Broker) -> Iterator[rabbitmq.Broker]:
    """The tests' own broker, well again after each test."""
    yield own_broker
    own_broker.restore()


@pytest.fixture
def own_vhost(broker: rabbitmq.Broker, own_virtual_hosts: VirtualHosts) -> Iterator[VirtualHost]:
    """A virtual host of the tests' own broker, with the default topology's levels."""
    with own_virtual_hosts.one() as host:
        yield host
        # it can be cleaned only on a broker that is well
        broker.restore()
