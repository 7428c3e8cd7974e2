"""Topologies that others declare too, NServiceBus's and Celery's, and the way through flat levels, on a real broker."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from datetime import datetime, timedelta, timezone
from random import Random

import pika
import pytest
from support.rabbitmq import DUE_AT, VirtualHost, eventually, messages

from airflow_delayed.celery import task
from airflow_delayed.delivery import State
from airflow_delayed.errors import DestinationMissing, TopologyError
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.message import DelayedMessage
from airflow_delayed.rabbitmq.levels import DelayDigits
from airflow_delayed.rabbitmq.topology import (
    CELERY,
    DELAYED,
    NSERVICEBUS_V1,
    TOPOLOGIES,
    Topology,
    topology_of,
)

Connect = Callable[..., str]
# topologies other than the default one
pytestmark = pytest.mark.usefixtures("empty_vhost")
CHOICES = [*(name for name in TOPOLOGIES if name != "delayed"), "nservicebus/direct"]


@pytest.fixture
def using(vhost: VirtualHost, connect: Connect) -> Callable[[str], RabbitMQDelayHook]:
    """Make a hook whose connection chooses a topology: "nservicebus" or "nservicebus/direct"."""

    def use(choice: str) -> RabbitMQDelayHook:
        topology, _, routing = choice.partition("/")
        return RabbitMQDelayHook(connect("rabbit", **vhost.connection_with(topology=topology, routing=routing or None)))

    return use


@pytest.mark.parametrize("choice", CHOICES)
def test_messages_arrive_once_and_never_early(
    using: Callable[[str], RabbitMQDelayHook], vhost: VirtualHost, choice: str
) -> None:
    hook = using(choice)
    assert not hook.verify(["orders"]).ok
    with pytest.raises(TopologyError, match="nowhere: missing") as error:
        hook.install(["nowhere"])
    assert error.value.report.missing_destinations == ("nowhere",)
    hook.install(["orders", "invoices"], create_destinations=True)
    for delay in (0, 1):
        with pytest.raises(DestinationMissing, match="has no destination nowhere; declare the"):
            hook.send(messages("nowhere", [delay]))
    assert hook.verify(["orders", "invoices"]).ok
    assert set(hook.install(["orders"]).counts()) == {"ok"}
    batch = [
        *messages("orders", [number % 31 / 10 for number in range(93)]),
        *messages("invoices", [2], prefix="other"),
    ]
    assert hook.send(batch).sent == 94
    arrivals = vhost.collect("orders", enough=93)
    assert sorted(arrival.message_id for arrival in arrivals) == sorted(message.message_id for message in batch[:93])
    assert [arrival for arrival in arrivals if arrival.received_at < arrival.due_at] == []


def test_a_callers_topology_goes_before_the_connections(vhost: VirtualHost, connect: Connect) -> None:
    conn_id = connect("rabbit", **vhost.connection_with(topology="nservicebus", routing="direct"))
    assert RabbitMQDelayHook(conn_id).topology == topology_of("nservicebus", "direct")
    assert RabbitMQDelayHook(conn_id, routing="conventional").topology == topology_of("nservicebus")
    assert RabbitMQDelayHook(conn_id, topology="celery").topology is CELERY
    assert RabbitMQDelayHook(conn_id, topology=NSERVICEBUS_V1).topology is NSERVICEBUS_V1


def test_conventional_destinations_are_exchanges_and_direct_ones_queues(
    using: Callable[[str], RabbitMQDelayHook], vhost: VirtualHost
) -> None:
    """As Routing/ConventionalRoutingTopology.cs and DirectRoutingTopology.cs bind them."""
    kinds = {}
    for choice in ("nservicebus", "nservicebus/direct"):
        hook = using(choice)
        hook.install(["Acme.Sales"], create_destinations=True)
        found = vhost.manage("GET", f"exchanges/{{vhost}}/{hook.topology.delivery_exchange}/bindings/source")
        kinds[choice] = [(each["destination"], each["destination_type"], each["routing_key"]) for each in found]
        hook.uninstall()
    assert kinds == {
        "nservicebus": [("Acme.Sales", "exchange", "#.Acme.Sales")],
        "nservicebus/direct": [("Acme.Sales", "queue", "#.Acme.Sales")],
    }
    # the endpoint's own layout
    (exchange,) = [each for each in vhost.manage("GET", "exchanges/{vhost}") if each["name"] == "Acme.Sales"]
    assert (exchange["type"], exchange["durable"]) == ("fanout", True)


def test_an_endpoint_without_a_queue_behind_its_exchange(
    using: Callable[[str], RabbitMQDelayHook], vhost: VirtualHost
) -> None:
    """A sender needs the exchange alone: an endpoint's queue may have another name."""
    hook = using("nservicebus")
    hook.install([])
    vhost.declare("Sales-1")
    with vhost.channel() as channel:
        channel.exchange_declare("Sales", exchange_type="fanout", durable=True)
        channel.queue_bind("Sales-1", "Sales")
    hook.send(messages("Sales", [0, 1]))
    assert len(vhost.collect("Sales-1", enough=2)) == 2


@pytest.mark.parametrize("choice", ["nservicebus", "nservicebus/direct", "celery"])
def test_verify_names_the_destinations_that_leak_into_each_other(
    using: Callable[[str], RabbitMQDelayHook], vhost: VirtualHost, choice: str
) -> None:
    hook = using(choice)
    names = ["Sales", "Acme.Sales", "Acme", "Big.Acme.Sales"]
    hook.install(names, create_destinations=True)
    report = hook.verify(names)
    assert report.ok
    assert [str(found) for found in report if found.state is State.WARNING] == [
        "destination Sales: also gets delayed messages for Acme.Sales",
        "destination Sales: also gets delayed messages for Big.Acme.Sales",
        "destination Acme.Sales: also gets delayed messages for Big.Acme.Sales",
    ]
    # and so it is
    hook.send(messages("Acme.Sales", [1] * 5))
    vhost.until(**dict(zip(names, [5, 5, 0, 0], strict=True)))


def test_what_kombu_declares_is_what_we_expect(
    using: Callable[[str], RabbitMQDelayHook], vhost: VirtualHost, kombu: object
) -> None:
    from kombu.transport import native_delayed_delivery as delivery

    delivery.declare_native_delayed_delivery_exchanges_and_queues(kombu, "quorum")
    hook = using("celery")
    eventually(lambda: hook.verify([]).counts() == {"ok": 28 * 2 + 1})

    # argument by argument, once by kombu and once by install
    by_kombu = declared(vhost)
    assert len(by_kombu["queues"]) == 28
    durable = {part[1:3] for kind in ("queues", "exchanges") for part in by_kombu[kind]}
    assert durable == {("True", "False")}
    hook.uninstall(force=True)
    eventually(lambda: declared(vhost) == {"queues": [], "exchanges": [], "bindings": []})
    hook.install([])
    eventually(lambda: declared(vhost) == by_kombu)


def declared(vhost: VirtualHost) -> dict[str, list[tuple[object, ...]]]:
    """Return what the broker has of Celery's topology, with all arguments."""

    def parts(kind: str, *fields: str) -> list[tuple[object, ...]]:
        found = vhost.manage("GET", f"{kind}/{{vhost}}")
        wanted = [each for each in found if "celery" in each.get("source", each.get("name", ""))]
        return sorted(tuple(str(each[name]) for name in fields) for each in wanted)

    fields = ("name", "durable", "auto_delete", "arguments")
    return {
        "queues": parts("queues", *fields),
        "exchanges": parts("exchanges", *fields, "type"),
        "bindings": parts("bindings", "source", "destination", "destination_type", "routing_key", "arguments"),
    }


def test_kombu_accepts_it_with_our_policy_for_what_is_unroutable(
    using: Callable[[str], RabbitMQDelayHook], vhost: VirtualHost, kombu: object
) -> None:
    from kombu.transport import native_delayed_delivery as delivery

    hook = using("celery")
    hook.install(["orders"], create_destinations=True, unroutable_policy=True)
    vhost.manage("DELETE", "policies/{vhost}/celery_delayed_unroutable")
    hook.install(["orders"], unroutable_policy=True)
    delivery.declare_native_delayed_delivery_exchanges_and_queues(kombu, "quorum")
    hook.send(messages("orders", [10] * 3))
    with vhost.channel() as channel:
        channel.queue_delete("orders")
    eventually(lambda: hook.waiting().unroutable == 3)


def test_kombu_accepts_what_we_install_and_its_queues_get_our_messages(
    using: Callable[[str], RabbitMQDelayHook], vhost: VirtualHost, kombu: object
) -> None:
    from kombu import Exchange as KombuExchange
    from kombu import Queue as KombuQueue
    from kombu.transport import native_delayed_delivery as delivery

    hook = using("celery")
    hook.install([])
    delivery.declare_native_delayed_delivery_exchanges_and_queues(kombu, "quorum")
    tasks = KombuQueue(
        "tasks", KombuExchange("work", type="topic"), "tasks", queue_arguments={"x-queue-type": "quorum"}
    )
    tasks(kombu.default_channel).declare()
    delivery.bind_queue_to_native_delayed_delivery_exchange(kombu, tasks)
    # bound by kombu by way of its exchange, and by us directly: one message, not two
    hook.send(messages("tasks", [0, 1, 2.5]))
    arrivals = vhost.collect("tasks", enough=3)
    assert sorted(arrival.message_id for arrival in arrivals) == ["m0", "m1", "m2"]
    assert [arrival for arrival in arrivals if arrival.received_at < arrival.due_at] == []


def test_a_celery_worker_runs_what_we_send(
    using: Callable[[str], RabbitMQDelayHook], vhost: VirtualHost, kombu: object
) -> None:
    from celery import Celery
    from celery.contrib.testing.worker import start_worker
    from celery.signals import setup_logging

    def keep(**_: object) -> None:
        """A worker sets up the logging of its process by itself, unless somebody else does."""

    setup_logging.connect(keep)
    app = Celery("shop", broker=kombu.as_uri(include_password=True), set_as_current=False)  # type: ignore[attr-defined]
    app.conf.update(task_default_queue="tasks", task_default_queue_type="quorum", worker_detect_quorum_queues=True)
    done: dict[str, tuple[object, ...]] = {}

    @app.task(name="shop.remind", bind=True)
    def remind(self: object, *args: object, **kwargs: object) -> None:
        done[self.request.id] = (args, kwargs, datetime.now(timezone.utc))  # type: ignore[attr-defined]

    hook = using("celery")
    hook.install(["tasks"], create_destinations=True)
    soon = datetime.now(timezone.utc) + timedelta(seconds=1.5)
    for number, due in enumerate((soon - timedelta(hours=1), soon)):
        made = task("shop.remind", [number], {"by": "mail"})
        hook.send(
            [
                DelayedMessage(
                    destination="tasks",
                    body=json.dumps(made["value"]).encode(),
                    due_at=due,
                    message_id=f"m{number}",
                    headers=made["headers"],
                )
            ]
        )
    with start_worker(app, pool="solo", perform_ping_check=False, shutdown_timeout=60):
        eventually(lambda: len(done) == 2)
    assert {name: found[:2] for name, found in done.items()} == {
        f"m{number}": ((number,), {"by": "mail"}) for number in range(2)
    }
    assert done["m1"][2] >= soon
    vhost.until(tasks=0)


def test_nservicebus_can_read_when_what_waits_is_due(
    using: Callable[[str], RabbitMQDelayHook], vhost: VirtualHost
) -> None:
    """By its ``delays migrate``: routing key behind 56 characters, time sent, delay (DelayCommandHelpers.cs)."""
    hook = using("nservicebus")
    hook.install(["Acme.Sales"], create_destinations=True)
    (message,) = messages("Acme.Sales", [1000.5])
    hook.send([message])
    with vhost.channel() as channel:
        method, found, _ = channel.basic_get("nsb.v2.delay-level-09", auto_ack=True)
    assert method.routing_key[56:] == "Acme.Sales"
    sent = datetime.strptime(found.headers["NServiceBus.TimeSent"], "%Y-%m-%d %H:%M:%S:%f Z").replace(
        tzinfo=timezone.utc
    )
    due = sent + timedelta(seconds=found.headers["NServiceBus.Transport.RabbitMQ.DelayInSeconds"])
    assert timedelta(0) <= due - message.due_at < timedelta(seconds=1)
    assert "BCC" not in found.headers


class QuickTopology(Topology):
    """Each second is five milliseconds."""

    def queue_arguments(self, level: int) -> dict[str, str | int]:
        found = super().queue_arguments(level)
        return {**found, "x-message-ttl": int(found["x-message-ttl"]) // 200}


def test_each_delay_is_kept_and_a_missing_binding_costs_only_what_needs_it(
    vhost: VirtualHost, connect: Connect
) -> None:
    """Delays of up to 900 s, by the direct entry and without."""
    given = {field.name: getattr(DELAYED, field.name) for field in fields(Topology)}
    topology = QuickTopology(**{**given, "digits": DelayDigits(16, 3)})
    hook = RabbitMQDelayHook(connect("rabbit", **vhost.connection), topology=topology)
    hook.install(["orders"], create_destinations=True)
    delays = Random(33).sample(range(1, 901), 300)
    lost = {str(delay) for delay in delays if delay >= 0x100 and delay >> 4 & 0xF == 8}
    assert lost
    with vhost.channel() as channel:
        channel.confirm_delivery()
        missing = topology.digits.binding_key(1, 1, 8)
        channel.queue_unbind("delayed.hex.0000080", "delayed.hex.last-2", missing)
        for number, delay in enumerate(delays):
            exchange, key, level = topology.address("orders", delay, direct=bool(number % 2))
            due = datetime.now(timezone.utc) + timedelta(seconds=delay / 200)
            headers: dict[str, object] = {DUE_AT: due.isoformat(), **({"BCC": [level]} if level else {})}
            channel.basic_publish(exchange, key, b"", pika.BasicProperties(headers=headers, message_id=str(delay)))
    (problem,) = hook.verify(["orders"]).problems
    assert problem.resource == "binding delayed.hex.last-2 -> delayed.hex.0000080"
    assert "TopologyInstallOperator makes it again" in str(problem.remedy)
    arrivals = vhost.collect("orders", enough={str(delay) for delay in delays} - lost)
    assert sorted(arrival.message_id for arrival in arrivals) == sorted({str(delay) for delay in delays} - lost)
    assert [arrival for arrival in arrivals if arrival.received_at < arrival.due_at] == []
    unroutable = vhost.collect("delayed.hex.unroutable", enough=lost)
    assert sorted(arrival.message_id for arrival in unroutable) == sorted(lost)
