"""What the verdict says of a real RabbitMQ cluster: two of its three nodes are gone.

Nothing is due meanwhile: the verdict is the page's own look. At the end of a run stands within how many seconds it said
each, and took it back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
from support.lengths import TABLES
from support.operations_page import Page
from support.rabbitmq import VirtualHost, virtual_host

from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from services import rabbitmq_cluster
from services.rabbitmq_cluster import Cluster

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.parametrize("store", ["sqlite"], indirect=True),
]
TITLE = "broken RabbitMQ clusters: seconds until reported, and until taken back"
#: Seconds within which the verdict has to say it, and to take it back when the nodes are well again.
WANTED = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with rabbitmq_cluster.running() as made:
        yield made


@pytest.fixture
def vhost(
    cluster: Cluster, connect: Callable[..., str], monkeypatch: pytest.MonkeyPatch, page: Page
) -> Iterator[VirtualHost]:
    """A virtual host of the cluster, with the topology, which the page shows."""
    monkeypatch.setenv("AIRFLOW__DELAYED__PAGE_RABBITMQ", "rabbit")
    cluster.restore()
    with virtual_host(cluster.nodes[0].url) as made:
        connect("rabbit", **{**made.connection, "host": cluster.hosts})
        RabbitMQDelayHook("rabbit").install(["orders"], create_destinations=True)
        until(page, set())
        yield made
        cluster.restore()


def until(page: Page, codes: Collection[str], *, longest: float = WANTED) -> tuple[float, dict[str, Any]]:
    """Ask until the verdict has these errors of RabbitMQ alone; return after how many seconds, and the verdict."""
    began = time.monotonic()
    while True:
        found = page.get("/api/v1/health", "op")
        errors = {
            one["code"] for one in found["causes"] if one["severity"] == "error" and one["connection_id"] == "rabbit"
        }
        seconds = time.monotonic() - began
        if errors == {*codes}:
            return seconds, found
        assert seconds < longest, (found["status"], found["causes"])
        time.sleep(0.5)


def played(name: str, *seconds: float) -> None:
    TABLES.setdefault(TITLE, []).append(f"{name:<30}{seconds[0]:6.1f}{seconds[1]:6.1f}")


def test_a_lost_quorum(cluster: Cluster, vhost: VirtualHost, page: Page) -> None:
    _, other, third = cluster.nodes
    other.kill()
    third.kill()
    reported, found = until(page, {"no-leader"})
    (cause,) = (one for one in found["causes"] if one["code"] == "no-leader")
    assert found["status"] == "failing"
    assert "no quorum: half of the members or more do not run" in cause["what"]
    other.start()
    taken_back, _ = until(page, set())
    played("two of three nodes killed", reported, taken_back)
