"""What no destination took, sent again, on a real broker."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone

import pika
import pytest
from support.rabbitmq import VirtualHost, eventually, messages

from airflow_delayed.errors import TopologyError
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.rabbitmq import levels
from airflow_delayed.rabbitmq.properties import DUE_AT

UTC = timezone.utc
UNROUTABLE = "delayed.unroutable"


@pytest.fixture
def hook(vhost: VirtualHost, connect: Callable[..., str]) -> RabbitMQDelayHook:
    vhost.declare("Acme.Sales", "orders", "gone")
    return RabbitMQDelayHook(connect("rabbit", **vhost.connection))


def strand(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    """Have destinations deleted while messages for them wait."""
    hook.send([*messages("Acme.Sales", [1] * 4, prefix="s"), *messages("gone", [1] * 2, prefix="g")])
    with vhost.channel() as channel:
        for queue in ("Acme.Sales", "gone"):
            channel.queue_delete(queue)
    vhost.until(**{UNROUTABLE: 6})


def test_a_destination_that_is_made_again_gets_what_waited_for_it(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    strand(hook, vhost)
    dry = hook.redrive(dry_run=True)
    assert (dry.moved, dry.waiting, vhost.count(UNROUTABLE)) == (0, {UNROUTABLE: 6}, 6)
    nothing = hook.redrive()
    left = {"destination 'Acme.Sales': missing": 4, "destination 'gone': missing": 2}
    assert (nothing.moved, nothing.left) == (0, left)
    assert vhost.count(UNROUTABLE) == 6

    vhost.declare("Acme.Sales")
    assert hook.redrive(limit=0).moved == 0
    report = hook.redrive()
    assert (report.moved, report.by_destination) == (4, {"Acme.Sales": 4})
    assert report.left == {"destination 'gone': missing": 2}
    assert str(report) == (
        "from delayed of connection 'rabbit' to delayed of connection 'rabbit': moved 4 (Acme.Sales: 4);"
        " left 2 (destination 'gone': missing: 2)"
    )
    arrivals = vhost.collect("Acme.Sales", enough=4)
    assert sorted(arrival.message_id for arrival in arrivals) == ["s0", "s1", "s2", "s3"]
    for arrival in arrivals:
        assert arrival.received_at >= arrival.due_at
        # what the broker and we wrote on the way
        assert set(arrival.properties.headers) <= {DUE_AT, "airflow-delayed-destination", "x-delivery-count"}
    # its destination is bound again: the next one goes by itself
    hook.send(messages("Acme.Sales", [1], prefix="next"))
    assert len(vhost.collect("Acme.Sales", enough=["next0"])) == 1

    # the others were looked at again and again, and none was returned: the broker drops what is returned too often
    policy = {"pattern": f"^{UNROUTABLE}$", "definition": {"delivery-limit": 2}, "apply-to": "queues"}
    vhost.manage("PUT", "policies/{vhost}/returns", policy)
    eventually(lambda: vhost.manage("GET", f"queues/{{vhost}}/{UNROUTABLE}").get("policy") == "returns")
    for _ in range(4):
        assert hook.redrive(limit=1).left == {"destination 'gone': missing": 1}
    vhost.declare("gone")
    assert hook.redrive().by_destination == {"gone": 2}
    assert len(vhost.collect("gone", enough=2)) == 2
    assert vhost.count(UNROUTABLE) == 0


def test_a_limit_bounds_how_many_are_looked_at(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    strand(hook, vhost)
    vhost.declare("Acme.Sales")
    vhost.declare("gone")
    assert hook.redrive(limit=4).moved == 4
    assert vhost.count(UNROUTABLE) == 2
    with pytest.raises(ValueError, match="limit must not be negative"):
        hook.redrive(limit=-1)


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
        channel.basic_publish("celery_delayed_1", levels.routing_key(2, "Acme.Sales"), b"theirs", properties)
        channel.basic_publish("", "caught", b"by hand")
    vhost.until(caught=2)
    report = celery.redrive(queue="caught")
    assert report.by_destination == {"Acme.Sales": 1}
    assert report.left == {"neither its routing key nor a header tells its destination": 1}
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
