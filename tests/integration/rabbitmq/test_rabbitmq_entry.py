"""The direct entry into a level's queue: which way a message takes, and where the entry is not to be had."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from uuid import uuid4

import pytest
from support.rabbitmq import Arrival, VirtualHost
from support.rabbitmq import messages as messages_after

from airflow_delayed.errors import DestinationMissing
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.message import UTC, DelayedMessage

Connect = Callable[..., str]


#: What the hooks take for the present, and delays count from: so a delay is the same however slow the machine is.
BEGAN = datetime.now(UTC)


def messages(destination: str, delays: Iterable[float], **options: str) -> list[DelayedMessage]:
    return messages_after(destination, delays, start=BEGAN, **options)


@pytest.fixture
def hook(vhost: VirtualHost, connect: Connect) -> RabbitMQDelayHook:
    return RabbitMQDelayHook(connect("rabbit", **vhost.connection), clock=lambda: BEGAN)


@pytest.fixture
def restricted(vhost: VirtualHost, connect: Connect) -> Iterator[Callable[..., RabbitMQDelayHook]]:
    """Make a hook whose user has these rights alone."""
    name = f"sender-{uuid4().hex[:8]}"

    def make(**rights: str) -> RabbitMQDelayHook:
        vhost.manage("PUT", f"users/{name}", {"password": "secret", "tags": ""})
        vhost.manage("PUT", f"permissions/{{vhost}}/{name}", rights)
        fields = {**vhost.connection, "login": name, "password": "secret"}
        return RabbitMQDelayHook(connect("restricted", **fields), clock=lambda: BEGAN)

    yield make
    vhost.manage("DELETE", f"users/{name}")


def ways(arrivals: list[Arrival]) -> set[str]:
    """The exchange through which each message entered the levels."""
    return {arrival.properties.headers["x-first-death-exchange"] for arrival in arrivals}


def test_a_delayed_message_enters_its_level_directly(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    vhost.declare("orders", "Acme.orders")
    batch = [*messages("orders", [1, 2.5, 5], prefix="a"), *messages("Acme.orders", [1, 4], prefix="b")]
    assert hook.send(batch).sent == 5
    for queue, ids in (("orders", ["a0", "a1", "a2"]), ("Acme.orders", ["b0", "b1"])):
        arrivals = vhost.collect(queue, enough=len(ids))
        assert sorted(arrival.message_id for arrival in arrivals) == ids
        assert ways(arrivals) == {""}
        assert [arrival for arrival in arrivals if arrival.received_at < arrival.due_at] == []
        # a consumer sees nothing of it
        assert not [arrival for arrival in arrivals if {"CC", "BCC"} & set(arrival.properties.headers)]
    assert vhost.count("delayed.hex.unroutable") == 0


def test_what_waits_tells_where_it_goes(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    """A message in a level's queue has the key it would have through the exchanges, and our headers."""
    vhost.declare("Acme.orders")
    hook.send(messages("Acme.orders", [1000]))
    with vhost.channel() as channel:
        method, found, _ = channel.basic_get("delayed.hex.0000300", auto_ack=True)
    assert method.routing_key == "0." * 4 + "3.e.8.Acme.orders"
    assert found.headers["airflow-delayed-destination"] == "Acme.orders"


@pytest.mark.parametrize(
    "kind, arguments, way",
    [
        ("quorum", {"x-dead-letter-exchange": ""}, "delayed.hex.entry"),
        ("classic", {"x-dead-letter-exchange": "", "x-max-length": 1000}, "delayed.hex.entry"),
        ("quorum", {"x-dead-letter-exchange": "elsewhere", "x-delivery-limit": 5}, ""),
        ("quorum", {"x-max-length": 1000, "x-overflow": "reject-publish"}, ""),
        ("classic", {"x-expires": 600_000, "x-max-priority": 3}, ""),
        # what is not to be known is taken for the worst
        ("stream", {}, "delayed.hex.entry"),
    ],
)
def test_a_destination_that_dead_letters_to_the_default_exchange_has_no_direct_entry(
    hook: RabbitMQDelayHook, vhost: VirtualHost, kind: str, arguments: dict[str, object], way: str
) -> None:
    with vhost.channel() as channel:
        channel.queue_declare("orders", durable=True, arguments={"x-queue-type": kind, **arguments})
        if kind == "stream":
            channel.queue_declare("beside", durable=True)
    hook.send(messages("orders", [0, 1]))
    if kind == "stream":
        assert _entered(hook, vhost) == way
        return
    arrivals = [found for found in vhost.collect("orders", enough=2) if found.message_id == "m1"]
    assert ways(arrivals) == {way}


def _entered(hook: RabbitMQDelayHook, vhost: VirtualHost) -> str:
    """The way of a message to ``orders``, seen by a queue that is bound beside it."""
    from airflow_delayed.rabbitmq.topology import DELAYED

    with vhost.channel() as channel:
        channel.queue_bind("beside", DELAYED.delivery_exchange, DELAYED.binding_key("orders"))
    hook.send(messages("orders", [1], prefix="seen"))
    (way,) = ways([found for found in vhost.collect("beside", enough=["seen0"]) if found.message_id == "seen0"])
    return way


def test_a_reject_does_not_send_a_message_back_into_its_level(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    vhost.declare("orders", **{"x-dead-letter-exchange": ""})
    hook.send(messages("orders", [1]))
    vhost.until(orders=1)
    delivered = 0
    with vhost.channel() as channel:
        for method, _, _ in channel.consume("orders", inactivity_timeout=4):
            if method is None:
                break
            delivered += 1
            channel.basic_reject(method.delivery_tag, requeue=False)
    assert delivered == 1


def test_a_user_who_may_not_write_to_the_default_exchange(
    hook: RabbitMQDelayHook, vhost: VirtualHost, restricted: Callable[..., RabbitMQDelayHook]
) -> None:
    vhost.declare("orders")
    sender = restricted(configure=".*", write=r"^(delayed\.|orders)", read=r"^(delayed\.|orders)")
    assert sender.send(messages("orders", [0, 1, 2])).sent == 3
    arrivals = vhost.collect("orders", enough=3)
    assert sorted(arrival.message_id for arrival in arrivals) == ["m0", "m1", "m2"]
    delayed = [arrival for arrival in arrivals if arrival.message_id != "m0"]
    assert ways(delayed) == {"delayed.hex.entry"}
    assert [arrival for arrival in arrivals if arrival.received_at < arrival.due_at] == []
    with pytest.raises(DestinationMissing):
        sender.send(messages("orders-2", [0]))


def test_a_user_who_may_not_configure_the_destination(
    hook: RabbitMQDelayHook, vhost: VirtualHost, restricted: Callable[..., RabbitMQDelayHook]
) -> None:
    vhost.declare("orders")
    sender = restricted(configure="^$", write=".*", read=r"^delayed\.")
    assert sender.send(messages("orders", [0, 1])).sent == 2
    arrivals = vhost.collect("orders", enough=2)
    assert ways([arrival for arrival in arrivals if arrival.message_id == "m1"]) == {"delayed.hex.entry"}
