"""Moving what waits from one topology to another, on a real broker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from random import Random
from typing import Any

import pika
import pytest
from support.lengths import length
from support.rabbitmq import DESTINATION, DUE_AT, VirtualHost, messages, split_key, virtual_host

from airflow_delayed.delivery import SendReport
from airflow_delayed.errors import TopologyError
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.message import DelayedMessage
from airflow_delayed.nservicebus import nservicebus_time, parse_nservicebus_time
from airflow_delayed.rabbitmq.management import Facts, _exchanges
from airflow_delayed.rabbitmq.publisher import Publisher
from airflow_delayed.rabbitmq.topology import (
    CELERY,
    DELAYED,
    FORMER,
    NSERVICEBUS_DELAY,
    NSERVICEBUS_RETRIED,
    NSERVICEBUS_TIME_SENT,
    Topology,
)

pytestmark = pytest.mark.long

Connect = Callable[..., str]
UTC = timezone.utc
SECOND = timedelta(seconds=1)
PARKING_LOT = "delayed.set-aside"
#: Messages that a migration has taken and not acknowledged, at most.
IN_FLIGHT = 32


@pytest.fixture
def other(rabbitmq_url: str) -> Iterator[VirtualHost]:
    with virtual_host(rabbitmq_url) as host:
        yield host


def using(hook: RabbitMQDelayHook, topology: str, routing: str | None = None) -> RabbitMQDelayHook:
    return RabbitMQDelayHook(hook.conn_id, topology=topology, routing=routing)


def as_of_then(hook: RabbitMQDelayHook, topology: str) -> RabbitMQDelayHook:
    """Return a hook as of the time when messages were sent to a topology that was replaced."""
    return RabbitMQDelayHook(hook.conn_id, topology=replace(FORMER[topology], successor=None))


def waiting(
    vhost: VirtualHost, topology: Topology, lowest: int = 0
) -> list[tuple[int, str, pika.BasicProperties, bytes]]:
    """Take all that waits in the levels, from the lowest on: delay of its key, destination, properties, body."""
    taken = []
    with vhost.channel() as channel:
        for level in topology.digits.levels[lowest:]:
            while True:
                method, found, body = channel.basic_get(topology.level_name(level), auto_ack=True)
                if method is None:
                    break
                delay, destination = split_key(method.routing_key)
                assert topology.digits.entry_level(delay) == level
                taken.append((delay, destination, found, body))
    return taken


def publish(vhost: VirtualHost, topology: Topology, delay: int, destination: str, **properties: Any) -> None:
    """Publish as a sender that is not ours would."""
    with vhost.channel() as channel:
        channel.confirm_delivery()
        exchange = topology.entry_exchange(delay)
        channel.basic_publish(
            exchange,
            topology.digits.routing_key(delay, destination),
            b"raw",
            pika.BasicProperties(**properties),
            mandatory=True,
        )


@pytest.mark.parametrize(
    "source, routing, target",
    [
        ("nservicebus-v1", None, "delayed"),
        ("nservicebus", "direct", "delayed"),
        ("celery", None, "delayed"),
        ("delayed", None, "nservicebus"),
        ("delayed-bits", None, "delayed"),
    ],
)
def test_what_waits_arrives_through_the_other_topology_and_never_early(
    hook: RabbitMQDelayHook, vhost: VirtualHost, source: str, routing: str | None, target: str
) -> None:
    old, new = using(hook, source, routing), using(hook, target)
    if source in FORMER:
        old = as_of_then(hook, source)
    names = ["Sales", "Acme.Sales"]
    for each in (new, old):
        each.install(names, create_destinations=True)
    batch = [
        # the first ones are due only when they have been moved
        *messages("Sales", [14.5, 15.6, 9_000_000.2], prefix="a"),
        *messages("Acme.Sales", [14.2, 16.1, 70_000.5], prefix="b"),
    ]
    old.send(batch)
    began = datetime.now(UTC)
    report = new.migrate(source if source in FORMER else old, target)
    assert (report.moved, report.parked) == (6, {})
    assert report.by_destination == {"Sales": 3, "Acme.Sales": 3}
    assert str(report).startswith(f"from {source} of connection 'rabbit' to {target} of connection 'rabbit': moved 6 ")
    assert waiting(vhost, old.topology) == []

    # what is due soon arrives, once
    for name, prefix in (("Sales", "a"), ("Acme.Sales", "b")):
        arrivals = vhost.collect(name, enough={f"{prefix}{number}" for number in range(2)})
        got = Counter(arrival.message_id for arrival in arrivals if arrival.message_id[0] == prefix)
        assert got == {f"{prefix}0": 1, f"{prefix}1": 1}
        assert [arrival for arrival in arrivals if arrival.received_at < arrival.due_at] == []
    # what is due later waits for the right time
    due = {message.message_id: message.due_at for message in batch}
    now = datetime.now(UTC)
    far = waiting(vhost, new.topology)
    assert {found.message_id for _, _, found, _ in far} == {"a2", "b2"}
    for delay, destination, found, _ in far:
        assert due[found.message_id] - now <= timedelta(seconds=delay) < due[found.message_id] - began + SECOND
        assert found.headers[DESTINATION] == destination
        assert found.headers[DUE_AT] == due[found.message_id].isoformat(timespec="microseconds")


def test_between_two_virtual_hosts(
    hook: RabbitMQDelayHook, vhost: VirtualHost, other: VirtualHost, connect: Connect
) -> None:
    """As between two brokers: both have the same topology."""
    there = RabbitMQDelayHook(connect("there", **other.connection))
    hook.install(["Acme.Sales", "only-here"], create_destinations=True)
    with pytest.raises(TopologyError, match=r"'there' is not ready.* TopologyInstallOperator"):
        hook.migrate(hook, there)
    there.install(["Acme.Sales"], create_destinations=True)
    # the first one is due only when it has been moved
    batch = messages("Acme.Sales", [16.5, 1000.25])
    (stray,) = messages("only-here", [1000], prefix="x")
    hook.send([*batch, stray])
    report = there.migrate(hook, "delayed")
    assert (report.moved, report.parked) == (2, {"destination 'only-here': missing": 1})
    assert vhost.count(PARKING_LOT) == 1
    (arrival,) = other.collect("Acme.Sales", enough=["m0"])
    assert arrival.received_at >= arrival.due_at == batch[0].due_at
    ((_, destination, found, body),) = waiting(other, DELAYED)
    assert (destination, found.message_id, found.headers[DUE_AT], body) == (
        "Acme.Sales",
        "m1",
        batch[1].due_at.isoformat(),
        b"m 1",
    )

    # the destination is made: what was parked goes on with the delay that remains
    there.install(["only-here"], create_destinations=True)
    began = datetime.now(UTC)
    redriven = hook.redrive(queue=PARKING_LOT)
    assert (redriven.by_destination, redriven.remaining) == ({"only-here": 1}, {})
    ((delay, destination, found, _),) = waiting(vhost, DELAYED)
    assert destination == "only-here"
    assert stray.due_at - datetime.now(UTC) <= delay * SECOND < stray.due_at - began + SECOND
    assert not [name for name in found.headers if "aside" in name or name == "airflow-delayed-routing-key"]


def test_a_place_is_not_moved_into_itself(hook: RabbitMQDelayHook, connect: Connect, vhost: VirtualHost) -> None:
    hook.install(["orders"], create_destinations=True)
    hook.send(messages("orders", [1000]))
    again = RabbitMQDelayHook(connect("again", **{**vhost.connection, "host": "localhost"}))
    for source, target in (("delayed", "delayed"), (hook, again)):
        with pytest.raises(ValueError, match="to the same place"):
            hook.migrate(source, target)
    with pytest.raises(ValueError, match="topology 'x' is unknown"):
        hook.migrate("x", "delayed")
    with pytest.raises(TopologyError, match="queue celery_delayed_27: missing"):
        hook.migrate("celery", "delayed")
    assert vhost.count("delayed.hex.0000300") == 1


def test_a_dry_run_counts_and_takes_nothing(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    using(hook, "celery").install([])
    hook.install(["orders"], create_destinations=True)
    hook.send(messages("orders", [1000, 1001, 70_000]))
    report = hook.migrate("delayed", "celery", dry_run=True)
    assert (report.moved, report.waiting) == (0, {"delayed.hex.0010000": 1, "delayed.hex.0000300": 2})
    assert str(report) == (
        "from delayed of connection 'rabbit' to celery of connection 'rabbit': would move up to 3 waiting"
        " (delayed.hex.0010000: 1, delayed.hex.0000300: 2)"
    )
    assert sorted(found.message_id for _, _, found, _ in waiting(vhost, DELAYED)) == ["m0", "m1", "m2"]


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
def test_celerys_own_tasks(hook: RabbitMQDelayHook, vhost: VirtualHost, queue_type: str) -> None:
    """Published by Celery itself, with a countdown; a worker then looks at the same eta."""
    from celery import Celery
    from kombu import Exchange, Queue
    from kombu.transport.native_delayed_delivery import (
        bind_queue_to_native_delayed_delivery_exchange,
        declare_native_delayed_delivery_exchanges_and_queues,
    )

    url = vhost.parameters
    login = f"{url.credentials.username}:{url.credentials.password}"
    app = Celery(
        broker=f"pyamqp://{login}@{url.host}:{url.port}/{vhost.name.replace('/', '%2F')}", set_as_current=False
    )
    tasks = Queue("tasks", Exchange("tasks", type="topic"), "tasks", queue_arguments={"x-queue-type": "quorum"})
    app.conf.update(task_queues=[tasks], task_default_queue="tasks", broker_transport_options={"confirm_publish": True})
    with app.connection_for_write() as connection:
        declare_native_delayed_delivery_exchanges_and_queues(connection, queue_type)
        tasks(connection.default_channel).declare()
        bind_queue_to_native_delayed_delivery_exchange(connection, tasks)
    hook.install(["tasks"])
    sent = datetime.now(UTC)
    mine = [1, {"a": None}]
    task = app.send_task("work", args=[7], countdown=1000.5, queue="tasks", priority=3, headers={"mine": mine})
    app.close()
    vhost.until(celery_delayed_9=1)

    report = hook.migrate("celery", "delayed")
    assert (report.moved, report.parked) == (1, {})
    ((delay, destination, found, body),) = waiting(vhost, DELAYED)
    assert destination == "tasks"
    eta = datetime.fromisoformat(found.headers["eta"])
    assert sent <= eta - timedelta(seconds=1000.5) <= datetime.now(UTC)
    # exactly then, although Celery's levels would let it go up to a second earlier
    assert datetime.fromisoformat(found.headers[DUE_AT]) == eta
    assert eta - datetime.now(UTC) <= timedelta(seconds=delay) < eta - sent + SECOND
    assert (found.headers["id"], found.headers["task"]) == (task.id, "work")
    assert (found.headers["timelimit"], found.headers["mine"]) == ([None, None], mine)
    assert (found.correlation_id, found.priority, found.content_type, found.content_encoding, found.delivery_mode) == (
        task.id,
        3,
        "application/json",
        "utf-8",
        2,
    )
    assert body.startswith(b"[[7], ")
    assert using(hook, "celery").uninstall(force=True).ok


def test_nservicebus_messages_keep_their_properties_and_are_read_by_its_tools(
    hook: RabbitMQDelayHook, vhost: VirtualHost
) -> None:
    old, new = as_of_then(hook, "nservicebus-v1"), using(hook, "nservicebus")
    for each in (old, new):
        each.install(["Acme.Sales"], create_destinations=True)
    now = datetime.now(UTC)
    properties_sent = {
        "message_id": "3f2e",
        "correlation_id": "c",
        "reply_to": "Acme.Shop",
        "type": "Acme.Placed",
        "content_type": "application/json",
        "content_encoding": "utf-8",
        "priority": 4,
        "app_id": "shop",
        "delivery_mode": 1,
        "timestamp": 1_764_288_318,
    }
    sent = {NSERVICEBUS_DELAY: 1000, NSERVICEBUS_TIME_SENT: nservicebus_time(now - timedelta(days=1))}
    # of the first delivery; endpoints count from it
    sent["NServiceBus.DeliverAt"] = delivered_at = nservicebus_time(now - timedelta(days=2))
    retried = {**sent, NSERVICEBUS_RETRIED: nservicebus_time(now), "NServiceBus.Retries": "2", "bin": b"\xff"}
    publish(vhost, old.topology, 1000, "Acme.Sales", headers=retried, expiration="9000000", **properties_sent)
    publish(vhost, old.topology, 1000, "Acme.Sales", headers=sent, **{**properties_sent, "message_id": None})

    assert new.migrate("nservicebus-v1", new).moved == 2
    one, other = sorted(waiting(vhost, new.topology), key=lambda each: each[2].message_id or "", reverse=True)
    for delay, _, found, _ in (one, other):
        # its tools add the two, and cut the destination out of the key
        assert found.headers[NSERVICEBUS_DELAY] == delay
        moved = parse_nservicebus_time(found.headers[NSERVICEBUS_TIME_SENT])
        assert now <= moved <= datetime.now(UTC)
        assert "x-death" not in found.headers
        assert found.headers["NServiceBus.DeliverAt"] == delivered_at
        assert {name: getattr(found, name) for name in properties_sent if name != "message_id"} == {
            name: value for name, value in properties_sent.items() if name != "message_id"
        }
        assert found.expiration is None
    # one that is tried again, from when it was; the other one's time sent is older than its level
    assert timedelta(0) <= moved + timedelta(seconds=one[0]) - (now + 1000 * SECOND) < 30 * SECOND
    assert one[2].headers["NServiceBus.Retries"] == "2"
    assert one[2].headers["bin"] == b"\xff"
    assert (one[2].message_id, other[2].message_id) == ("3f2e", None)
    assert other[0] == 1000


def test_what_cannot_be_read_is_parked(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    celery = using(hook, "celery")
    for each in (celery, hook):
        each.install(["orders"], create_destinations=True)
    sent = int(datetime.now(UTC).timestamp())
    publish(vhost, celery.topology, 1000, "orders", message_id="untold", headers={"mine": 1}, app_id="a")
    publish(
        vhost,
        celery.topology,
        1000,
        "delayed.hex.0000008",
        message_id="name",
        timestamp=sent,
    )
    with vhost.channel() as channel:
        channel.confirm_delivery()
        channel.basic_publish("", "celery_delayed_7", b"lost", pika.BasicProperties(message_id="no-key"))
    hook.send(messages("orders", [1000], prefix="good"))
    celery.send(messages("orders", [1000], prefix="fine"))

    report = hook.migrate("celery", "delayed")
    assert report.moved == 1
    reasons = [
        "no header tells when it is due",
        "destination: 'delayed.hex.0000008' is a part of the delay levels themselves; choose another",
        "neither its routing key nor a header tells its destination",
    ]
    assert report.parked == dict.fromkeys(reasons, 1)
    assert "parked 3 (no header tells when it is due: 1, destination: " in str(report)
    parked = {}
    with vhost.channel() as channel:
        for _ in range(3):
            _, found, body = channel.basic_get(PARKING_LOT)
            parked[found.message_id] = (found.headers, body)
            if found.message_id == "untold":
                assert found.app_id == "a"
    headers, body = parked["untold"]
    assert body == b"raw"
    assert headers["mine"] == 1
    assert headers["airflow-delayed-set-aside-reason"] == reasons[0]
    assert headers["airflow-delayed-set-aside-from"] == "celery_delayed_9"
    assert headers["airflow-delayed-routing-key"] == CELERY.digits.routing_key(1000, "orders")
    assert parked["no-key"][0]["airflow-delayed-routing-key"] == "celery_delayed_7"

    # somebody decides that those may go: at the latest time their level could have let them go
    redriven = hook.redrive(queue=PARKING_LOT)
    assert redriven.by_destination == {"orders": 1}
    assert redriven.remaining == dict.fromkeys(reasons[1:], 1)
    assert vhost.count(PARKING_LOT) == 2
    assert {found.message_id for _, _, found, _ in waiting(vhost, DELAYED)} == {"untold", "good0", "fine0"}


def test_a_message_that_the_target_refuses_is_parked_alone(
    hook: RabbitMQDelayHook, vhost: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its destination goes while messages are under way; without an id they cannot be told apart by one."""

    celery = using(hook, "celery")
    for each in (celery, hook):
        each.install(["orders", "gone"], create_destinations=True)
    sent = int(datetime.now(UTC).timestamp())
    for destination in ("orders", "gone", "orders"):
        publish(vhost, celery.topology, 1000, destination, timestamp=sent)
    send = Publisher.send
    removed = []

    def removing(batch: Iterable[DelayedMessage]) -> Iterator[DelayedMessage]:
        for message in batch:
            # its destination was there when the migration looked at it
            if message.destination == "gone" and not removed:
                with vhost.channel() as channel:
                    removed.append(channel.queue_delete("gone"))
            yield message

    monkeypatch.setattr(Publisher, "send", lambda publisher, batch: send(publisher, removing(batch)))
    report = hook.migrate("celery", "delayed")
    assert report.by_destination == {"orders": 2}
    assert report.parked == {"destination 'gone': missing": 1}
    assert len(waiting(vhost, DELAYED)) == 2


def test_what_has_been_returned_often_is_moved_alone(
    hook: RabbitMQDelayHook, vhost: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker lets a message go after twenty returns, so what is under way in a crash is not to be so again."""
    sends = []
    send = Publisher.send

    def counted(publisher: Publisher, batch: Iterable[DelayedMessage]) -> SendReport:
        report = send(publisher, batch)
        sends.append(report.sent)
        return report

    celery = using(hook, "celery")
    for each in (celery, hook):
        each.install(["orders"], create_destinations=True)
    hook.send(messages("orders", [1000] * 5))
    for _ in range(15):
        with vhost.channel() as channel:
            for _ in range(3):
                channel.basic_get("delayed.hex.0000300")
    monkeypatch.setattr(Publisher, "send", counted)
    report = hook.migrate("delayed", "celery")
    assert report.moved == 5
    found = [found for _, _, found, _ in waiting(vhost, celery.topology)]
    assert sorted(each.message_id for each in found) == [f"m{number}" for number in range(5)]
    # of those three none was on its way with another
    assert sends == [0, 1, 0, 1, 0, 1, 2, 0, 0]
    assert not [each for each in found if each.headers.get("x-delivery-count")]


MOVE = Path(__file__).parents[2] / "support" / "move.py"


KILLS = length("kills of a migration", 5, 25)


def test_a_migration_that_is_killed_again_and_again(
    hook: RabbitMQDelayHook, vhost: VirtualHost, monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    """Sent, arrived, twice, lost and early are counted."""
    celery = using(hook, "celery")
    for each in (celery, hook):
        each.install(["orders"], create_destinations=True)
    random = Random(7)
    soon = [random.uniform(2, 9) for _ in range(200)]
    # more than all that are killed can take
    batch = messages("orders", [*soon, *(random.uniform(900, 1e6) for _ in range(200 * KILLS))])
    hook.send(batch)
    monkeypatch.setenv("PYTHONPATH", f"{here}:{here / 'tests'}")
    with subprocess.Popen(
        [sys.executable, MOVE, vhost.url, vhost.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as movers:
        for _ in range(KILLS):
            print(random.randint(1, 150), file=movers.stdin, flush=True)
            lines = {movers.stdout.readline(), movers.stdout.readline()}
            lines.remove("go\n")
            (child,) = map(int, lines)
            time.sleep(random.uniform(0, 0.03))
            os.kill(child, signal.SIGKILL)
        movers.stdin.close()
    report = hook.migrate("delayed", "celery")
    assert 0 < report.moved < len(batch)
    assert report.parked == {}

    due = {message.message_id: message.due_at for message in batch}
    far = waiting(vhost, celery.topology, lowest=9)
    early = [each for _, _, each, _ in far if datetime.fromisoformat(each.headers[DUE_AT]) < due[each.message_id]]
    # by its key, at the moment
    early += [each for delay, _, each, _ in far if datetime.now(UTC) + delay * SECOND < due[each.message_id]]
    arrivals = vhost.collect("orders", enough=set(due) - {each.message_id for _, _, each, _ in far}, seconds=120)
    early += [each for each in arrivals if each.received_at < due[each.message_id]]
    times = Counter([*(each.message_id for each in arrivals), *(each.message_id for _, _, each, _ in far)])
    lost = set(due) - set(times)
    twice = sum(times.values()) - len(times)
    print(f"sent {len(due)}, arrived {len(times)}, twice {twice}, lost {len(lost)}, early {len(early)}")
    assert (len(times), lost, early) == (len(batch), set(), [])
    # what was under way
    assert twice <= KILLS * IN_FLIGHT


def test_what_waits_inside_the_plugins_exchange_is_named(
    hook: RabbitMQDelayHook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plugin cannot be had here, so the management API's answer is a canned one."""
    answer = {"durable": True, "arguments": {"x-delayed-type": "topic"}, "type": "x-delayed-message"}
    exchanges = _exchanges([{**answer, "name": "old", "messages_delayed": 12}, {**answer, "name": "unknown"}])
    drained = _exchanges([{**answer, "name": "drained", "messages_delayed": 0}])
    monkeypatch.setattr(RabbitMQDelayHook, "_facts", lambda _: Facts(exchanges={**exchanges, **drained}))
    RabbitMQDelayHook(hook.conn_id, topology="celery").install([])
    report = hook.migrate("celery", "delayed", destinations=[])
    assert report.unreadable == {"old": 12, "unknown": None}
    assert "not moved: 12 messages inside exchange 'old' of type x-delayed-message, which no client can" in str(report)
