"""verify() compares the clocks of a cluster's nodes: here one real broker behind two hosts, and a made-up API."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator

import pika
import pytest
from support.management import made_up
from support.proxy import Proxy, proxy
from support.rabbitmq import VirtualHost, eventually

from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook

NODES = ["rabbit@node1", "rabbit@node2"]
Connect = Callable[..., str]


@pytest.fixture
def hosts(vhost: VirtualHost) -> Iterator[tuple[Proxy, Proxy]]:
    broker = str(vhost.connection["host"]), vhost.port
    with proxy(broker[1], broker[0]) as one, proxy(broker[1], broker[0]) as other:
        yield one, other


@pytest.fixture
def through(vhost: VirtualHost, connect: Connect, hosts: tuple[Proxy, Proxy]) -> Callable[..., RabbitMQDelayHook]:
    names = ",".join(f"127.0.0.1:{each.port}" for each in hosts)

    def make(**extra: object) -> RabbitMQDelayHook:
        return RabbitMQDelayHook(connect("cluster", **{**vhost.connection_with(**extra), "host": names}))

    return make


def cluster(hosts: tuple[Proxy, Proxy], ahead: float) -> Callable[[str], object]:
    """The API of two nodes, of which the second has a clock so many seconds ahead."""

    def answer(path: str) -> object:
        if path == "overview":
            return {"rabbitmq_version": "4.0.5", "node": NODES[0]}
        if path == "nodes":
            return [{"name": name, "running": True} for name in NODES]
        if path.endswith("/connections"):
            return [
                {"user_provided_name": name, "node": node, "connected_at": 1000 * (time.time() + number * ahead)}
                for number, (node, host) in enumerate(zip(NODES, hosts, strict=True))
                for name in names_of_connections(host)
            ]
        return None

    return answer


def names_of_connections(host: Proxy) -> list[str]:
    found = b"\n".join(host.greetings).decode(errors="replace")
    return re.findall("airflow-delayed clock [0-9a-f-]{36}", found)


@pytest.mark.parametrize("ahead, found", [(0, []), (12, ["error"]), (-12, ["error"])])
def test_clocks_of_two_nodes(
    hosts: tuple[Proxy, Proxy], through: Callable[..., RabbitMQDelayHook], ahead: float, found: list[str]
) -> None:
    with made_up(cluster(hosts, ahead)) as url:
        report = through(management_url=url).verify([])
    findings = [finding for finding in report if finding.code == "node-clock"]
    assert [finding.severity for finding in findings] == found
    assert report.ok is not bool(found)
    for finding in findings:
        first, other = reversed(NODES) if ahead > 0 else NODES
        assert f"{first} is at least 1" in str(finding.found)
        assert f"s ahead of {other}; a message expires by the clock of the node that leads" in str(finding.found)


def test_a_node_whose_clock_cannot_be_read_is_unknown(
    hosts: tuple[Proxy, Proxy], through: Callable[..., RabbitMQDelayHook]
) -> None:
    def answer(path: str) -> object:
        return [] if path.endswith("/connections") else cluster(hosts, 0)(path)

    with made_up(answer) as url:
        report = through(management_url=url).verify([])
    (finding,) = (finding for finding in report if finding.code == "node-clock")
    assert (finding.severity, finding.found) == ("unknown", f"not all of them could be read ({NODES[1]})")
    (finding,) = (each for each in through(management_url="none").verify([]) if each.code == "node-clock")
    assert (finding.severity, finding.found) == ("unknown", "the extra 'management_url' turns the management API off")


def test_a_user_who_is_shown_no_connections_gets_no_clean_bill(
    hosts: tuple[Proxy, Proxy], through: Callable[..., RabbitMQDelayHook], monkeypatch: pytest.MonkeyPatch
) -> None:
    """RabbitMQ answers an empty list, and no error, to a user with the tag management alone."""

    def answer(path: str) -> object:
        if path == "nodes":
            return None
        return [] if path.endswith("/connections") else cluster(hosts, 0)(path)

    def date_of(host: pika.ConnectionParameters, *_: object) -> tuple[str, float]:
        return NODES[host.port == hosts[1].port], time.time()

    monkeypatch.setattr("airflow_delayed.rabbitmq.node_clocks.date_of", date_of)
    with made_up(answer) as url:
        report = through(management_url=url).verify([])
    (finding,) = (finding for finding in report if finding.code == "node-clock")
    assert finding.severity == "unknown"
    assert "neither nodes nor connections" in str(finding.found)
    assert finding.remedy == "rabbitmqctl set_user_tags <user> monitoring"


def test_a_host_that_takes_no_login_is_named(
    hosts: tuple[Proxy, Proxy], through: Callable[..., RabbitMQDelayHook]
) -> None:
    hosts[1].close()
    report = through(management_url="none").verify([])
    (finding,) = (finding for finding in report if finding.code == "host-unreachable")
    assert (finding.severity, finding.resource) == ("warning", f"host 127.0.0.1:{hosts[1].port}")
    assert finding.found == "no login within 2 s: nothing listens on that host and port"


def test_one_node_behind_two_hosts_is_compared_with_nothing(
    vhost: VirtualHost, through: Callable[..., RabbitMQDelayHook], hosts: tuple[Proxy, Proxy]
) -> None:
    through(management_url=vhost.management_url).install(["orders"], create_destinations=True)
    taken = hosts[1].taken
    eventually(lambda: through(management_url=vhost.management_url).verify(["orders"]).counts() == {"ok": 116})
    assert hosts[1].taken == taken
