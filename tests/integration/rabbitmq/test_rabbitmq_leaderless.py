"""What is refused while queues have no leader: AMQP then counts 0 messages in them, and the management API alone knows.

The broker is a real one of one node; its management API is made up, for no queue of one node loses its leader. While a
node of a cluster hangs, the API of each node hangs too.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from support.management import made_up
from support.operations_page import Page, served_page_fixture  # noqa: F401 - a fixture
from support.proxy import Proxy, proxy
from support.rabbitmq import VirtualHost, messages
from support.stores import Store

from airflow_delayed.errors import SendFailed, TransportUnavailable
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.message import DelayedMessage

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
def test_what_waits_cannot_be_moved_or_deleted(hook: RabbitMQDelayHook, vhost: VirtualHost, dry_run: bool) -> None:
    refused: list[tuple[str, Callable[[], object]]] = [
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
    assert (found.messages, found.stuck, found.unroutable, found.missing) == (None, None, None, ())
    assert {level.messages for level in found.levels} == {None}
    assert [finding.code for finding in found.findings] == ["no-leader"]
    report = hook.verify(["orders"])
    assert not report.ok
    (quorum,) = (finding for finding in report if finding.code == "no-leader")
    assert quorum.resource.startswith("107 queues (delayed.hex.0000001, ")
    assert [finding.severity for finding in report if finding.code == "node-down"] == ["unknown"]


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL at which connections are taken and nothing is answered."""
    monkeypatch.setattr("airflow_delayed.rabbitmq.management._TIMEOUT", httpx.Timeout(0.1))
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.usefixtures("empty_vhost")
def test_while_the_management_api_hangs_nothing_is_taken_for_empty(
    using: Callable[..., RabbitMQDelayHook], hanging: str, vhost: VirtualHost
) -> None:
    using().install(["orders"], create_destinations=True)
    hook = using(management_url=hanging)
    why = r"how many messages wait is unknown, .* no answer in time; .*a node of its cluster hangs.*Nothing was "
    for dry_run in (False, True):
        for call in (
            lambda: hook.redrive(destinations=["orders"], dry_run=dry_run),  # noqa: B023
            lambda: hook.uninstall(dry_run=dry_run),  # noqa: B023
        ):
            with pytest.raises(TransportUnavailable, match=why):
                call()
    found = hook.waiting()
    assert (found.messages, found.stuck, found.unroutable, found.missing) == (None, None, None, ())
    assert "at least" not in str(found)
    assert [(each.severity, each.code) for each in found.findings] == [("error", "no-leader")]
    report = hook.verify(["orders"])
    assert not report.ok
    assert [each.code for each in report if each.severity == "error"] == ["no-leader"]
    # a send may still succeed
    assert not report.unready
    with vhost.channel() as channel:
        channel.queue_delete("delayed.hex.0000020")
        channel.queue_declare("delayed.hex.0000020", durable=True)
    with pytest.raises(TransportUnavailable, match=why):
        hook.install([], replace=True)
    # who forces a deletion asks for no counts, and none is shown
    plan = hook.uninstall(force=True, dry_run=True)
    assert {each.severity for each in plan if "wait in it" in str(each)} == {"unknown"}


def test_a_management_api_that_is_not_there_or_refuses_is_not_one_that_hangs(
    using: Callable[..., RabbitMQDelayHook], vhost: VirtualHost
) -> None:
    using().install(["orders"], create_destinations=True)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with made_up(lambda path: None) as refusing:
        for url in (f"http://127.0.0.1:{port}", refusing):
            hook = using(management_url=url)
            assert hook.waiting().messages == 0
            assert hook.redrive(destinations=["orders"]).moved == 0


@pytest.fixture
def quickly(
    vhost: VirtualHost, connect: Callable[..., str], leaderless: str
) -> Iterator[tuple[Proxy, RabbitMQDelayHook]]:
    """A proxy and a hook through it, whose sends may end after 6 s without a confirm."""
    with proxy(vhost.port, str(vhost.connection["host"])) as between:
        fields = vhost.connection_with(management_url=leaderless, confirm_timeout=12)
        yield between, RabbitMQDelayHook(connect("broker", **{**fields, "host": "127.0.0.1", "port": between.port}))


WITHOUT_QUORUM_IT_ENDS = r"no confirm for 6 s, while 1 messages are .*no quorum: half of the members or more do not run"


def test_a_send_without_quorum_says_so_and_ends(
    vhost: VirtualHost, quickly: tuple[Proxy, RabbitMQDelayHook], caplog: pytest.LogCaptureFixture
) -> None:
    between, hook = quickly
    vhost.declare("orders")
    first, second = messages("orders", [0] * 2)

    def then_silence() -> Iterator[DelayedMessage]:
        yield first
        vhost.until(orders=1)
        between.swallow_answers()
        yield second

    with pytest.raises(SendFailed, match=WITHOUT_QUORUM_IT_ENDS) as error:
        hook.send(then_silence())
    assert "What to do: start rabbit@node2, rabbit@node3" in str(error.value)
    assert "Sending ended; what is unconfirmed may still arrive" in str(error.value)
    assert isinstance(error.value.__cause__, TransportUnavailable)
    assert re.search(WITHOUT_QUORUM_IT_ENDS, caplog.text)


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
def test_what_is_refused_for_want_of_quorum_is_no_messages_failure(
    vhost: VirtualHost, quickly: tuple[Proxy, RabbitMQDelayHook], store: Store
) -> None:
    """RabbitMQ 3.10 refuses messages then, as it does when a queue is full."""
    vhost.declare("orders", **{"x-max-length": 1, "x-overflow": "reject-publish"})
    with vhost.channel() as channel:
        # it is full when it holds more than its maximum; what is unconfirmed when the connection ends may be lost
        for number in range(2):
            channel.basic_publish("", "orders", b"")
            vhost.until(orders=number + 1)
    stored = store.installed()
    stored.send(messages("orders", [-1]))
    assert store.dispatcher(stored, quickly[1]).once().dispatched == 0
    assert store.failures_of(stored) == {"m0": 0}
    (waiting,) = stored.list()
    assert "Is a queue full, or without a leader?" in waiting.last_error


def test_the_page_shows_what_is_unknown_and_names_nodes_to_readers_alone(
    hook: RabbitMQDelayHook, served_page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__DELAYED__PAGE_RABBITMQ", hook.conn_id)
    monkeypatch.setenv("AIRFLOW__DELAYED__VIEWERS", "plugins")
    url = f"/api/v1/rabbitmq/{hook.conn_id}/summary"
    found = served_page.get(url, "op")
    assert (found["messages"], found["unroutable"], found["missing"]) == (None, None, [])
    assert len(found["unavailable"]) == 106
    assert {level["messages"] for level in found["levels"]} == {None}
    (finding,) = found["findings"]
    assert (finding["code"], finding["severity"]) == ("no-leader", "error")
    assert "start rabbit@node2, rabbit@node3" in finding["remedy"]
    seen = served_page.get(url, "viewer")
    assert [each["code"] for each in seen["findings"]] == ["no-leader"]
    assert "rabbit@" not in str(seen)
    served_page.pool.close()
