"""Replacing what differs, the policy for what is unroutable, and uninstalling, on a real broker; nothing gets lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from pika.adapters.blocking_connection import BlockingChannel
from support.commands import Command
from support.rabbitmq import VirtualHost, eventually, messages

from airflow_delayed.delivery import State
from airflow_delayed.errors import MessagesWaiting, TopologyError, TransportUnavailable
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.rabbitmq.levels import DelayDigits
from airflow_delayed.rabbitmq.topology import DELAYED, NSERVICEBUS_V1

Connect = Callable[..., str]
# what is installed, replaced and uninstalled here is the topology itself
pytestmark = pytest.mark.usefixtures("empty_vhost")
#: The default topology with two digits: as much as 30 levels show, 105 would not show better.
SMALL = replace(DELAYED, digits=DelayDigits(16, 2))
LEVEL_8 = {**SMALL.queue_arguments(7), "x-message-ttl": 9000, "x-dead-letter-exchange": "else", "x-expires": 10_000}


@pytest.fixture
def using(using: Callable[..., RabbitMQDelayHook]) -> Callable[..., RabbitMQDelayHook]:
    return lambda topology=SMALL, **extra: using(topology, **extra)


def names(vhost: VirtualHost) -> set[str]:
    queues = vhost.manage("GET", "queues/{vhost}?disable_stats=true")
    exchanges = vhost.manage("GET", "exchanges/{vhost}")
    return {found["name"] for found in (*queues, *exchanges) if not found["name"].startswith("amq.") and found["name"]}


def declare(vhost: VirtualHost, queue: str, arguments: dict[str, object]) -> None:
    with vhost.channel() as channel:
        channel.queue_declare(queue, durable=True, arguments=arguments)


def test_every_argument_that_differs_is_named(using: Callable[..., RabbitMQDelayHook], vhost: VirtualHost) -> None:
    declare(vhost, "delayed.hex.0000008", LEVEL_8)
    with pytest.raises(TopologyError, match="replace=True") as error:
        using().install([])
    assert {(found.argument, found.wanted, found.found) for found in error.value.report.problems} == {
        ("x-message-ttl", 8000, 9000),
        ("x-dead-letter-exchange", "delayed.hex.delivery", "else"),
        ("x-expires", None, 10_000),
    }
    # AMQP tells one
    assert len(using(management_url="none").install([], dry_run=True).problems) == 1
    assert names(vhost) == {"delayed.hex.0000008"}


def test_what_differs_and_is_empty_is_replaced_when_told(
    using: Callable[..., RabbitMQDelayHook], vhost: VirtualHost
) -> None:
    hook = using()
    with vhost.channel() as channel:
        channel.exchange_declare("delayed.hex.delivery", exchange_type="topic", durable=True)
        channel.queue_declare("other", durable=True, arguments={"x-queue-type": "quorum"})
        channel.queue_bind("other", "delayed.hex.delivery", hook.topology.binding_key("other"))
    declare(vhost, "delayed.hex.0000008", {"x-message-ttl": 9000})
    before = names(vhost)
    plan = hook.install(["orders"], create_destinations=True, replace=True, dry_run=True)
    assert [str(found) for found in plan if found.state is State.WOULD_DELETE] == [
        "exchange delayed.hex.delivery: would delete",
        "queue delayed.hex.0000008: would delete",
    ]
    assert plan.ok
    assert names(vhost) == before
    done = hook.install(["orders"], create_destinations=True, replace=True)
    assert done.counts() == {"deleted": 2, "created": plan.counts()["would create"]}
    # also the binding of a destination that was not named
    eventually(lambda: hook.verify(["orders", "other"]).counts() == {"ok": 30 + 2 + 3 + 2})
    hook.send(messages("other", [1]))
    assert len(vhost.collect("other", enough=1)) == 1


def test_nothing_is_replaced_while_messages_wait_in_it(
    using: Callable[..., RabbitMQDelayHook], vhost: VirtualHost
) -> None:
    declare(vhost, "delayed.hex.0000008", {**LEVEL_8, "x-message-ttl": 900_000, "x-expires": 9_000_000})
    declare(vhost, "delayed.hex.0000010", {"x-queue-type": "classic"})
    with vhost.channel() as channel:
        channel.confirm_delivery()
        for _ in range(3):
            channel.basic_publish("", "delayed.hex.0000008", b"")
    before = names(vhost)
    with pytest.raises(MessagesWaiting, match=r"3 in delayed.hex.0000008.* Nothing was changed") as error:
        using().install([], replace=True)
    assert error.value.waiting == {"delayed.hex.0000008": 3}
    assert "queue delayed.hex.0000008: 3 messages wait in it" in map(
        str, using().install([], replace=True, dry_run=True).problems
    )
    with vhost.channel() as channel:
        channel.queue_purge("delayed.hex.0000008")
    with pytest.raises(MessagesWaiting, match="the management API alone tells"):
        using(management_url="none").install([], replace=True)
    assert names(vhost) == before


@pytest.mark.parametrize("topology", ["celery", "nservicebus"])
def test_a_policy_keeps_what_is_unroutable(
    using: Callable[..., RabbitMQDelayHook], vhost: VirtualHost, topology: str
) -> None:
    hook = using(topology)
    with pytest.raises(TransportUnavailable, match=r"needs the management API.*Nothing was changed"):
        using(topology, management_url="none").install([], unroutable_policy=True)
    assert names(vhost) == set()
    queue = {"celery": "celery_delayed_unroutable", "nservicebus": "nsb.v2.delay-unroutable"}[topology]
    plan = hook.install(["gone"], create_destinations=True, unroutable_policy=True, dry_run=True)
    assert f"policy '{queue}': would create" in map(str, plan)
    assert names(vhost) == set()
    hook.install(["gone"], create_destinations=True, unroutable_policy=True)
    # as it was declared by its owners, too
    assert set(hook.install(["gone"]).counts()) == {"ok"}
    again = hook.install(["gone"], unroutable_policy=True)
    assert set(again.counts()) == {"ok"}

    hook.send(messages("gone", [9, 10, 0]))
    with vhost.channel() as channel:
        channel.queue_delete("gone")
        if topology == "nservicebus":
            channel.exchange_delete("gone")
    arrivals = vhost.collect(queue, enough=2)
    assert {arrival.message_id for arrival in arrivals} == {"m0", "m1"}
    hook.install([])


def test_a_user_who_may_set_no_policy_is_told_what_was_done(
    using: Callable[..., RabbitMQDelayHook], vhost: VirtualHost, connect: Connect
) -> None:
    name = vhost.name.replace("/", "-")
    vhost.manage("PUT", f"users/{name}", {"password": "secret-word", "tags": "management"})
    vhost.manage("PUT", f"permissions/{{vhost}}/{name}", {"configure": ".*", "write": ".*", "read": ".*"})
    try:
        conn_id = connect("plain", **{**vhost.connection, "login": name, "password": "secret-word"})
        plain = RabbitMQDelayHook(conn_id, topology="celery")
        with pytest.raises(TransportUnavailable, match=r"'plain': all but the policy is made: .* tag policymaker"):
            plain.install([], unroutable_policy=True)
        using("celery").install([], unroutable_policy=True)
        with pytest.raises(TransportUnavailable, match=r"'plain': all but the policy is deleted: .* tag policymaker"):
            plain.uninstall(force=True)
    finally:
        vhost.manage("DELETE", f"users/{name}")
    assert names(vhost) == set()
    assert list(map(str, using("celery").uninstall())) == ["policy 'celery_delayed_unroutable': deleted"]


def test_a_policy_of_others_is_not_replaced(using: Callable[..., RabbitMQDelayHook], vhost: VirtualHost) -> None:
    body = {"pattern": "delivery", "definition": {"alternate-exchange": "theirs"}, "apply-to": "exchanges"}
    vhost.manage("PUT", "policies/{vhost}/theirs", body)
    with pytest.raises(TopologyError, match=r"wanted 'celery_delayed_unroutable', found 'theirs; one policy alone"):
        using("celery").install([], unroutable_policy=True)
    assert names(vhost) == set()


def test_uninstall_leaves_the_destinations(using: Callable[..., RabbitMQDelayHook], vhost: VirtualHost) -> None:
    hook = using("celery")
    hook.install(["orders"], create_destinations=True, unroutable_policy=True)
    hook.send(messages("orders", [1]))
    assert len(vhost.collect("orders", enough=1)) == 1
    plan = hook.uninstall(dry_run=True)
    assert plan.counts() == {"would delete": 28 * 2 + 1 + 1 + 2 + 1}
    done = hook.uninstall()
    assert done.counts() == {"deleted": plan.counts()["would delete"]}
    assert {
        "binding celery_delayed_delivery -> orders: deleted",
        "queue celery_delayed_27: deleted",
        "policy 'celery_delayed_unroutable': deleted",
    } <= set(map(str, done))
    assert names(vhost) == {"orders"}
    assert vhost.manage("GET", "policies/{vhost}") == []
    # and once more
    assert hook.uninstall().counts() == {}


def test_the_command_asks_and_uninstalls(
    using: Callable[..., RabbitMQDelayHook], vhost: VirtualHost, connect: Connect, airflow_command: Command
) -> None:
    connect("rabbit", **vhost.connection_with(topology="nservicebus-v1"))
    hook = using("nservicebus-v1")
    hook.install(["orders"], create_destinations=True)
    before = names(vhost)
    command = ("uninstall", "--conn-id", "rabbit")
    would = airflow_command(*command, "--dry-run", "-o", "plain")
    assert (would.code, "would delete" in would.out) == (0, True)
    assert "parts deleted. Go on? (y/N)" in airflow_command(*command, answer="n\n").err
    hook.send(messages("orders", [250]))
    refused = airflow_command(*command, "--yes")
    assert (refused.code, "messages wait: 1 in nsb.delay-level-07" in refused.err) == (1, True)
    assert airflow_command(*command, "--dry-run").code == 1
    assert names(vhost) == before
    vhost.manage("DELETE", "queues/{vhost}/nsb.delay-level-07/contents")
    assert airflow_command(*command, "--yes").code == 0
    assert names(vhost) == {"orders"}
    connect("store", conn_type="sqlite", host="/nowhere")
    other = airflow_command("uninstall", "--conn-id", "store")
    assert (other.code, "drop them" in other.err) == (1, True)


def test_uninstall_refuses_while_messages_wait(using: Callable[..., RabbitMQDelayHook], vhost: VirtualHost) -> None:
    hook = using()
    hook.install(["orders"], create_destinations=True)
    hook.send(messages("orders", [250] * 4))
    before = names(vhost)
    with pytest.raises(MessagesWaiting, match=r"messages wait: 4 in delayed.hex.00000f0\. Nothing was deleted"):
        hook.uninstall()
    assert "queue delayed.hex.00000f0: 4 messages wait in it" in map(str, hook.uninstall(dry_run=True))
    assert names(vhost) == before
    assert vhost.count("delayed.hex.00000f0") == 4
    report = hook.uninstall(force=True)
    assert "queue delayed.hex.00000f0: 4 messages went with it" in map(str, report)
    assert names(vhost) == {"orders"}


def test_uninstall_refuses_where_what_is_stuck_cannot_be_seen(
    using: Callable[..., RabbitMQDelayHook], vhost: VirtualHost
) -> None:
    using().install([])
    with pytest.raises(MessagesWaiting, match=r"unknown is how many are stuck .* turns the management API off$"):
        using(management_url="none").uninstall()
    assert "delayed.hex.0000001" in names(vhost)
    # classic queues keep nothing back
    using(NSERVICEBUS_V1).install([])
    using("nservicebus-v1", management_url="none").uninstall()
    assert not [name for name in names(vhost) if name.startswith("nsb.")]


def test_a_message_that_comes_after_the_last_count_is_named(
    using: Callable[..., RabbitMQDelayHook], vhost: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = using()
    hook.install(["orders"], create_destinations=True)
    level = hook.topology.level_name(29)
    delete = BlockingChannel.queue_delete

    def late(self: BlockingChannel, queue: str, **options: object) -> object:
        if queue == level:
            with vhost.channel() as channel:
                channel.confirm_delivery()
                channel.basic_publish("", level, b"late", mandatory=True)
        return delete(self, queue, **options)

    with monkeypatch.context() as patch:
        patch.setattr(BlockingChannel, "queue_delete", late)
        report = hook.uninstall()
    assert [(str(one), one.severity) for one in report if "went with it" in str(one)] == [
        (f"queue {level}: 1 messages came meanwhile and went with it", "warning")
    ]
    assert names(vhost) == {"orders"}


def test_what_is_sent_all_the_while_is_not_lost(using: Callable[..., RabbitMQDelayHook], vhost: VirtualHost) -> None:
    """While uninstall looks at the statistics, somebody sends."""
    hook = using()
    hook.install(["orders"], create_destinations=True)
    stop = threading.Event()
    sent: list[str] = []

    def send() -> None:
        other = using()
        while not stop.wait(0.2):
            batch = messages("orders", [200], prefix=f"n{len(sent)}-")
            other.send(batch)
            sent.append(batch[0].message_id)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        eventually(lambda: sent)
        with pytest.raises(MessagesWaiting):
            hook.uninstall()
    finally:
        stop.set()
        sender.join()
    assert hook.verify(["orders"]).ok
    assert sent
