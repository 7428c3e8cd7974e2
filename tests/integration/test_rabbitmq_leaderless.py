"""What is refused while queues have no leader: AMQP then counts 0 messages in them, and the management API alone knows.

The broker is a real one of one node; its management API is made up, for no queue of one node loses its leader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.management import made_up
from support.operations_page import Page, served_page_fixture  # noqa: F401 - a fixture
from support.rabbitmq import VirtualHost, messages

from airflow_delayed.errors import TransportUnavailable
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook

NODES = ["rabbit@node1", "rabbit@node2", "rabbit@node3"]
WITHOUT_QUORUM = {"members": NODES, "online": NODES[:1], "leader": None}


@pytest.fixture
def leaderless(vhost: VirtualHost) -> Iterator[str]:
    """URL of a management API by which no quorum queue of the virtual host has a leader."""

    def answer(path: str) -> object:
        if path == "overview":
            return {"rabbitmq_version": "3.10.8", "node": NODES[0]}
        if path.startswith("queues/"):
            queues: Any = vhost.manage("GET", "queues/{vhost}?columns=name,type,durable,arguments")
            return [{**queue, **WITHOUT_QUORUM} for queue in queues]
        return None

    with made_up(answer) as url:
        yield url


@pytest.fixture
def hook(using: Callable[..., RabbitMQDelayHook], leaderless: str) -> RabbitMQDelayHook:
    """A hook to 105 levels without a leader, with two messages of which AMQP tells."""
    using().install(["orders"], create_destinations=True)
    hook = using(management_url=leaderless)
    hook.send(messages("orders", [3000] * 2))
    return hook


WHY = (
    r"how many messages wait is unknown, for AMQP counts 0 in a queue without a leader\. .*no quorum.*"
    r"What to do: start rabbit@node2, rabbit@node3; .*"
)


@pytest.mark.parametrize("dry_run", [False, True])
def test_what_waits_cannot_be_moved_or_deleted(
    hook: RabbitMQDelayHook, vhost: VirtualHost, using: Callable[..., RabbitMQDelayHook], dry_run: bool
) -> None:
    target = using("celery")
    target.install(["orders"])
    refused: list[tuple[str, Callable[[], object]]] = [
        ("Nothing was moved", lambda: hook.migrate(hook, target, destinations=["orders"], dry_run=dry_run)),
        ("Nothing was moved", lambda: hook.redrive(destinations=["orders"], dry_run=dry_run)),
        ("Nothing was deleted", lambda: hook.uninstall(dry_run=dry_run)),
    ]
    for then, call in refused:
        with pytest.raises(TransportUnavailable, match=WHY + then):
            call()
    assert vhost.count("delayed.hex.0000b00") == 2


def test_what_differs_is_not_replaced(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    with vhost.channel() as channel:
        channel.queue_delete("delayed.hex.0000020")
        channel.queue_declare("delayed.hex.0000020", durable=True)
    with pytest.raises(TransportUnavailable, match=f"{WHY}Nothing was changed"):
        hook.install([], replace=True)


@pytest.mark.usefixtures("empty_vhost")
def test_who_forces_a_deletion_asks_for_no_counts(hook: RabbitMQDelayHook) -> None:
    assert hook.uninstall(force=True).counts()["deleted"] > 105


def test_counts_are_unknown_and_the_reason_is_a_finding(hook: RabbitMQDelayHook) -> None:
    found = hook.waiting()
    assert (found.messages, found.stuck, found.unroutable, found.missing) == (0, None, None, ())
    assert {level.messages for level in found.levels} == {None}
    assert [finding.code for finding in found.findings] == ["no-quorum"]
    report = hook.verify(["orders"])
    assert not report.ok
    (quorum,) = (finding for finding in report if finding.code == "no-quorum")
    assert quorum.resource.startswith("107 queues (delayed.hex.0000001, ")
    assert [finding.severity for finding in report if finding.code == "node-down"] == ["unknown"]


def test_without_the_management_api_amqps_counts_are_all_there_is(using: Callable[..., RabbitMQDelayHook]) -> None:
    blind, target = using(management_url="none"), using("celery", management_url="none")
    for each in (blind, target):
        each.install(["orders"], create_destinations=True)
    blind.send(messages("orders", [3000] * 2))
    assert blind.waiting().messages == 2
    assert blind.migrate(blind, target, destinations=["orders"]).moved == 2


def test_the_page_shows_what_is_unknown_and_names_nodes_to_readers_alone(
    hook: RabbitMQDelayHook, served_page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__DELAYED__PAGE_RABBITMQ", hook.conn_id)
    monkeypatch.setenv("AIRFLOW__DELAYED__VIEWERS", "plugins")
    url = f"/api/v1/rabbitmq/{hook.conn_id}/summary"
    found = served_page.get(url, "op")
    assert (found["messages"], found["unroutable"], found["missing"]) == (0, None, [])
    assert len(found["unavailable"]) == 29
    assert {level["messages"] for level in found["levels"]} == {None}
    (finding,) = found["findings"]
    assert (finding["code"], finding["severity"]) == ("no-quorum", "error")
    assert "start rabbit@node2, rabbit@node3" in finding["remedy"]
    seen = served_page.get(url, "viewer")
    assert [each["code"] for each in seen["findings"]] == ["no-quorum"]
    assert "rabbit@" not in str(seen)
    served_page.pool.close()
