"""What no destination took, sent again, on a real broker."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, timezone

import pika
import pytest
from support.commands import Command
from support.rabbitmq import DUE_AT, VirtualHost, eventually, messages

from airflow_delayed.errors import TopologyError, TransportUnavailable
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.rabbitmq.levels import BITS
from airflow_delayed.rabbitmq.topology import DELAYED

UTC = timezone.utc
UNROUTABLE = "delayed.hex.unroutable"


def test_the_command_asks_and_sends(hook: RabbitMQDelayHook, vhost: VirtualHost, airflow_command: Command) -> None:
    strand(hook, vhost)
    command = ("redrive", "--conn-id", "rabbit", "-o", "json")
    stays = [{"outcome": "stays: destination 'gone': missing", "messages": 2}]
    nothing = airflow_command(*command, "--yes")
    assert [row["messages"] for row in json.loads(nothing.out)] == [4, 2]
    assert vhost.count(UNROUTABLE) == 6
    hook.install(["Acme.Sales"], create_destinations=True)
    would = airflow_command(*command, "--dry-run")
    assert json.loads(would.out) == [{"outcome": "would be sent to Acme.Sales", "messages": 4}, *stays]
    no = airflow_command(*command, answer="n\n")
    assert (no.code, "This would be: 4 sent, 2 stay. Go on? (y/N)" in no.err) == (1, True)
    assert vhost.count(UNROUTABLE) == 6
    yes = airflow_command(*command, answer="y\n")
    assert json.loads(yes.out) == [{"outcome": "sent to Acme.Sales", "messages": 4}, *stays]
    vhost.until(**{"Acme.Sales": 4, UNROUTABLE: 2})


def test_the_command_is_of_rabbitmq_alone(connect: Callable[..., str], airflow_command: Command) -> None:
    connect("store", conn_type="sqlite", host="/nowhere")
    done = airflow_command("redrive", "--conn-id", "store")
    assert (done.code, "is not RabbitMQ's" in done.err) == (1, True)


@pytest.fixture
def hook(hook: RabbitMQDelayHook, vhost: VirtualHost) -> RabbitMQDelayHook:
    vhost.declare("Acme.Sales", "orders", "gone")
    return hook


def strand(hook: RabbitMQDelayHook, vhost: VirtualHost, waiting: int = 6) -> None:
    """Have destinations deleted while messages for them wait."""
    hook.send([*messages("Acme.Sales", [6] * 4, prefix="s"), *messages("gone", [6] * 2, prefix="g")])
    with vhost.channel() as channel:
        for queue in ("Acme.Sales", "gone"):
            channel.queue_delete(queue)
    vhost.until(**{UNROUTABLE: waiting})


def test_a_destination_that_is_made_again_gets_what_waited_for_it(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    strand(hook, vhost)
    dry = hook.redrive(dry_run=True)
    assert (dry.moved, dry.waiting, vhost.count(UNROUTABLE)) == (0, {UNROUTABLE: 6}, 6)
    assert dry.destinations == {"Acme.Sales": 4, "gone": 2}
    assert dry.problems == {name: f"destination '{name}': missing" for name in ("Acme.Sales", "gone")}
    nothing = hook.redrive()
    left = {"destination 'Acme.Sales': missing": 4, "destination 'gone': missing": 2}
    assert (nothing.moved, nothing.remaining) == (0, left)
    assert vhost.count(UNROUTABLE) == 6

    hook.install(["Acme.Sales"], create_destinations=True)
    assert hook.redrive(limit=0).moved == 0
    report = hook.redrive()
    assert (report.moved, report.by_destination) == (4, {"Acme.Sales": 4})
    assert report.remaining == {"destination 'gone': missing": 2}
    assert str(report) == (
        "delayed of connection 'rabbit': moved 4 (Acme.Sales: 4); remaining 2 (destination 'gone': missing: 2)"
    )
    arrivals = vhost.collect("Acme.Sales", enough=4)
    assert sorted(arrival.message_id for arrival in arrivals) == ["s0", "s1", "s2", "s3"]
    for arrival in arrivals:
        assert arrival.received_at >= arrival.due_at
        # what the broker and we wrote on the way
        assert set(arrival.properties.headers) <= {DUE_AT, "airflow-delayed-destination", "x-delivery-count"}
    # the next one goes by itself
    hook.send(messages("Acme.Sales", [1], prefix="next"))
    assert len(vhost.collect("Acme.Sales", enough=["next0"])) == 1

    # the others were looked at again and again, and none was returned: the broker drops what is returned too often
    policy = {"pattern": f"^{UNROUTABLE}$", "definition": {"delivery-limit": 2}, "apply-to": "queues"}
    vhost.manage("PUT", "policies/{vhost}/returns", policy)
    eventually(lambda: vhost.manage("GET", f"queues/{{vhost}}/{UNROUTABLE}").get("policy") == "returns")
    for _ in range(4):
        assert hook.redrive(limit=1).remaining == {"destination 'gone': missing": 1}
    hook.install(["gone"], create_destinations=True)
    assert hook.redrive().by_destination == {"gone": 2}
    assert len(vhost.collect("gone", enough=2)) == 2
    assert vhost.count(UNROUTABLE) == 0


def test_a_limit_bounds_how_many_are_looked_at(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    strand(hook, vhost)
    hook.install(["Acme.Sales", "gone"], create_destinations=True)
    assert hook.redrive(limit=4).moved == 4
    assert vhost.count(UNROUTABLE) == 2
    with pytest.raises(ValueError, match="limit must not be negative"):
        hook.redrive(limit=-1)


def forge(vhost: VirtualHost, destination: str, count: int = 1) -> None:
    """Do what who may write to the delivery exchange alone can do: name any queue."""
    with vhost.channel() as channel:
        channel.confirm_delivery()
        for _ in range(count):
            channel.basic_publish("delayed.hex.delivery", DELAYED.digits.routing_key(0, destination), b"forged")


def bound(vhost: VirtualHost, queue: str) -> list[str]:
    """The exchanges that a queue is bound to, beside the default one."""
    return [each["source"] for each in vhost.manage("GET", f"queues/{{vhost}}/{queue}/bindings") if each["source"]]


def test_no_queue_is_bound_because_a_message_names_it(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    vhost.declare("admin-jobs")
    forge(vhost, "admin-jobs", 2)
    forge(vhost, "nowhere")
    strand(hook, vhost, waiting=9)
    hook.install(["gone"], create_destinations=True)
    unbound = "destination 'admin-jobs': not bound; name it in destinations=[...]"

    dry = hook.redrive(dry_run=True)
    assert dry.destinations == {"admin-jobs": 2, "nowhere": 1, "Acme.Sales": 4, "gone": 2}
    missing = {name: f"destination '{name}': missing" for name in ("nowhere", "Acme.Sales")}
    assert dry.problems == {"admin-jobs": unbound, **missing}
    assert str(dry) == (
        "delayed of connection 'rabbit': would move up to 9 waiting"
        f" ({UNROUTABLE}: 9); would send (gone: 2); would leave ({unbound}: 2, destination 'nowhere': missing: 1,"
        " destination 'Acme.Sales': missing: 4)"
    )
    done = hook.redrive()
    assert (done.by_destination, done.remaining[unbound]) == ({"gone": 2}, 2)
    assert (vhost.count("admin-jobs"), bound(vhost, "admin-jobs")) == (0, [])

    # who looks after the broker may say so
    named = hook.redrive(destinations=["admin-jobs"])
    assert named.by_destination == {"admin-jobs": 2}
    assert named.remaining == {
        "destination 'nowhere': not among destinations=[...]": 1,
        "destination 'Acme.Sales': not among destinations=[...]": 4,
    }
    assert vhost.count("admin-jobs") == 2


def test_a_dry_run_may_be_repeated_for_ever(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    """The broker drops a message that is returned too often."""
    policy = {"pattern": f"^{UNROUTABLE}$", "definition": {"delivery-limit": 3}, "apply-to": "queues"}
    vhost.manage("PUT", "policies/{vhost}/returns", policy)
    eventually(lambda: vhost.manage("GET", f"queues/{{vhost}}/{UNROUTABLE}").get("policy") == "returns")
    strand(hook, vhost)
    for _ in range(8):
        assert sum(hook.redrive(dry_run=True).destinations.values()) == 6
    assert sum(hook.redrive(dry_run=True, limit=2).destinations.values()) == 2
    hook.install(["Acme.Sales", "gone"], create_destinations=True)
    assert hook.redrive().moved == 6


def test_without_the_management_api_destinations_have_to_be_named(
    vhost: VirtualHost, connect: Callable[..., str], hook: RabbitMQDelayHook
) -> None:
    strand(hook, vhost)
    hook.install(["gone"], create_destinations=True)
    blind = RabbitMQDelayHook(connect("blind", **vhost.connection_with(management_url="none")))
    with pytest.raises(TransportUnavailable, match=r"which destinations are bound.*destinations=\[...\]"):
        blind.redrive()
    assert vhost.count(UNROUTABLE) == 6
    dry = blind.redrive(dry_run=True)
    assert dry.destinations == {"Acme.Sales": 4, "gone": 2}
    assert dry.problems["gone"].startswith("destination 'gone': unknown whether bound")
    assert blind.redrive(destinations=["gone"]).by_destination == {"gone": 2}


def test_messages_of_others_tell_their_destination_by_their_key_alone(
    hook: RabbitMQDelayHook, vhost: VirtualHost
) -> None:
    """As a shared topology's are, that a policy catches in a queue of ours."""
    celery = RabbitMQDelayHook(hook.conn_id, topology="celery")
    celery.install(["orders"])
    with pytest.raises(TopologyError, match=r"celery_delayed_unroutable: missing.*with unroutable_policy=True"):
        celery.redrive()
    with pytest.raises(TopologyError, match="queue caught: missing"):
        celery.redrive(queue="caught")
    vhost.declare("caught")
    with vhost.channel() as channel:
        channel.confirm_delivery()
        channel.queue_bind("caught", celery.topology.delivery_exchange, "#.Acme.Sales")
        properties = pika.BasicProperties(headers={"n": [1, None]})
        channel.basic_publish("celery_delayed_1", BITS.routing_key(2, "Acme.Sales"), b"theirs", properties)
        channel.basic_publish("", "caught", b"by hand")
    vhost.until(caught=2)
    report = celery.redrive(queue="caught", destinations=["Acme.Sales"])
    assert report.by_destination == {"Acme.Sales": 1}
    assert report.remaining == {"neither its routing key nor a header tells its destination": 1}
    with vhost.channel() as channel:
        method, found, body = channel.basic_get("Acme.Sales", auto_ack=True)
        assert (body, found.message_id, found.headers["n"]) == (b"theirs", None, [1, None])
        assert datetime.fromisoformat(found.headers[DUE_AT]) <= datetime.now(UTC)
        method, found, body = channel.basic_get("caught", auto_ack=True)
        assert (method.routing_key, found.headers["airflow-delayed-routing-key"], body) == (
            "caught",
            "caught",
            b"by hand",
        )
