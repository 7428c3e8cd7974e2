"""What others write into the queues of a bridge: it goes nowhere by the bridge's rights, and holds up no message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from random import Random
from uuid import uuid4

import pika
import pytest
from pika.exceptions import AMQPError
from support import poison
from support.bridging import KEYS, consumers_exchange, running
from support.lengths import length
from support.rabbitmq import VirtualHost, eventually

from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.rabbitmq.bridge import BRIDGED, Envelope
from airflow_delayed.rabbitmq.connection import connect

pytestmark = pytest.mark.long

INTAKE, DUE, PARKED = (f"delayed.bridge.services.{name}" for name in ("intake", "due", "parked"))
FRAMES = length("random property frames to a bridge", 500, 20_000)


@pytest.fixture
def hook(hook: RabbitMQDelayHook, vhost: VirtualHost) -> RabbitMQDelayHook:
    consumers_exchange(vhost, "topic", all="#")
    hook.bridge("services", "orders").install()
    return hook


def publish(vhost: VirtualHost, exchange: str, key: str, body: bytes, properties: pika.BasicProperties) -> None:
    with vhost.channel() as channel:
        channel.confirm_delivery()
        channel.basic_publish(exchange, key, body, properties, mandatory=True)


def bodies(vhost: VirtualHost, queue: str) -> dict[bytes, tuple[str, pika.BasicProperties]]:
    found = {}
    with connect("raw", [vhost.parameters]) as connection:
        channel = connection.channel()
        while (taken := channel.basic_get(queue, auto_ack=True))[0]:
            found[taken[2]] = taken[0].routing_key, taken[1]
    return found


def bridged(key: bytes, properties: bytes = b"\0\0", **more: bytes) -> bytes:
    """The header with an envelope, as anybody can write it."""
    fields = {"key": b"S" + poison.long(key), "properties": b"x" + poison.long(properties), **more}
    return poison.table({BRIDGED: b"F" + poison.long(poison.table(fields))})


def signed(envelope: Envelope, body: bytes) -> pika.BasicProperties:
    """What only the bridge can write."""
    return pika.BasicProperties(headers=envelope.headers(body, KEYS[0], "services"))


MALFORMED = poison.table({"x-delay": b"S" + poison.long(b"soon")})
ENDLESS_DUE = poison.table({"airflow-delayed-due-at": b"S" + poison.long(b"9" * 60_000)})
WHOLE_FRAME = poison.table({"airflow-delayed-due-at": b"S" + poison.long(b"9" * 130_000)})
#: From services, and from a sender who may write to the levels.
HOSTILE: Mapping[str, tuple[str, bytes]] = {
    "large texts of a service": (INTAKE, bridged(b"k", b"\0\0" + b"x" * 60_000) + MALFORMED + ENDLESS_DUE),
    "texts of a service that fill a frame": (INTAKE, bridged(b"k") + MALFORMED + WHOLE_FRAME),
    "a service's own envelope with a key that is too long": (INTAKE, bridged(b"k" * 300) + MALFORMED),
    "a key that is too long": (DUE, bridged(b"k" * 300)),
    "a key of no text": (DUE, bridged(b"\xff" * 255)),
    "a signature of another type": (DUE, bridged(b"k", signature=b"t\x01")),
    "a signature of no sense": (DUE, bridged(b"k", signature=b"x" + poison.long(b"\0" * 32))),
    "properties with unknown flags": (DUE, bridged(b"k", b"\x00\x03")),
    "properties that are none": (DUE, bridged(b"k", b"\xf8\x00\xff")),
    "a time beyond all calendars": (DUE, bridged(b"k") + poison.table({"airflow-delayed-due-at": b"T" + b"\xff" * 8})),
    "a due time of 60,000 characters": (DUE, bridged(b"k") + ENDLESS_DUE),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_one_message_costs_no_other_its_way(case: str, hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    queue, headers = HOSTILE[case]
    made = hook.bridge("services", "orders")
    # what leaves no room beside it is parked without its properties, and only that
    goes_on = queue == INTAKE and WHOLE_FRAME not in headers
    publish(vhost, "", queue, b"hostile", poison.raw(headers))
    for number in range(3):
        publish(vhost, "services", "k", b"%d" % number, pika.BasicProperties(headers={"x-delay": 1}))
    with running(made):
        vhost.until(all=3, **{PARKED: 1})
    assert made.redrive() == goes_on
    with running(made):
        # a malformed delay counts as none by now
        vhost.until(**({"all": 4} if goes_on else {PARKED: 1}))
        publish(vhost, "services", "k", b"last", pika.BasicProperties())
        eventually(lambda: made.counts.delivered == 4 + goes_on)
    arrived = bodies(vhost, "all")
    assert set(arrived) - {b"hostile"} == {b"0", b"1", b"2", b"last"}
    if goes_on:
        # as the service published it, with the header that it made up
        assert arrived[b"hostile"][0] == INTAKE
        assert headers[: headers.index(b"x-delay") - 1] in b"".join(arrived[b"hostile"][1].encode())


def test_a_sender_borrows_no_rights(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    """A user who may write to the levels alone, and a service that may write to the services' exchange alone."""
    user = f"sender-{uuid4().hex[:8]}"
    vhost.manage("PUT", f"users/{user}", {"password": "secret", "tags": ""})
    rights = {"configure": "^$", "write": r"^delayed\.hex\.entry$", "read": "^$"}
    try:
        vhost.manage("PUT", f"permissions/{{vhost}}/{user}", rights)
        parameters = vhost.parameters
        parameters.credentials = pika.PlainCredentials(user, "secret")
        forged = pika.BasicProperties(headers={"role": "root"}, app_id="trusted")
        envelope = bridged(b"admin.run", b"".join(forged.encode()))
        address = hook.topology.address(DUE, 1, default_exchange=False, direct=False)
        with pika.BlockingConnection(parameters) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            channel.basic_publish(address.exchange, address.key, b"by the levels", poison.raw(envelope))
        publish(vhost, "services", "k", b"by the exchange", poison.raw(MALFORMED + envelope))
    finally:
        vhost.manage("DELETE", f"users/{user}")
    made = hook.bridge("services", "orders")
    with running(made):
        vhost.until(**{PARKED: 2})
    # the service's own message, with its own key
    assert made.redrive() == 1
    with running(made):
        vhost.until(all=1, **{PARKED: 1})
    assert {body: key for body, (key, _) in bodies(vhost, "all").items()} == {b"by the exchange": "k"}
    assert set(bodies(vhost, PARKED)) == {b"by the levels"}


def test_a_key_is_replaced_while_messages_are_on_their_way(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    publish(vhost, "services", "k", b"on its way", pika.BasicProperties(headers={"x-delay": 1}))
    publish(vhost, "services", "k", b"parked", pika.BasicProperties(headers={"x-delay": "soon"}))
    old = hook.bridge("services", "orders", secrets=KEYS[:1])
    with running(old):
        eventually(lambda: old.counts.delayed == old.counts.parked == 1)
    vhost.until(**{DUE: 1, PARKED: 1})
    new = "a third key of the bridge, which is new"
    both = hook.bridge("services", "orders", secrets=[new, KEYS[0]])
    assert hook.bridge("services", "orders", secrets=[new]).redrive() == 0
    assert both.redrive() == 1
    with running(both):
        vhost.until(all=2)


def test_the_broker_names_no_message_for_which_it_closes_the_connection(
    hook: RabbitMQDelayHook, vhost: VirtualHost, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the bridge could have signed these; what a broker refuses of it, nobody has foreseen."""
    for number in range(20):
        publish(vhost, "services", "k", b"%d" % number, pika.BasicProperties())
    for name, refused in poison.INFINITE.items():
        envelope = Envelope(key="k", properties=refused.raw, due_at=None)
        publish(vhost, "", DUE, name.encode(), signed(envelope, name.encode()))
    publish(vhost, "services", "k", b"behind", pika.BasicProperties(headers={"x-delay": 1}))
    made = hook.bridge("services", "orders")
    with running(made):
        vhost.until(**{PARKED: len(poison.INFINITE)})
        eventually(lambda: vhost.count("all") >= 21)
    assert set(bodies(vhost, "all")) == {*(b"%d" % number for number in range(20)), b"behind"}
    assert set(bodies(vhost, PARKED)) == {name.encode() for name in poison.INFINITE}
    assert "the broker closed the connection when it was published" in caplog.text


@pytest.mark.fuzz
@pytest.mark.timeout(1800)
def test_random_properties_to_a_bridge(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    """From services, from foreign senders, and as envelopes that the bridge has signed."""
    chance, good, published = Random(32), set[bytes](), Counter[str]()
    names = count()
    while sum(published.values()) < FRAMES:
        with suppress(AMQPError), vhost.channel() as channel:
            channel.confirm_delivery()
            for _ in range(20):
                body, found = b"%d" % next(names), poison.random(chance)
                kind = chance.choice(["service", "foreign", "envelope", "signed", "good"])
                if kind == "envelope":
                    found = poison.raw(
                        bridged(chance.randbytes(chance.randrange(300)), found.raw) + (found.table or b"")
                    )
                if kind == "signed":
                    found = signed(Envelope(key=chance.randbytes(9), properties=found.raw, due_at=None), body)
                if kind == "good":
                    found = pika.BasicProperties(headers={"x-delay": chance.choice([0, 1, 1500])})
                    good.add(body)
                where = INTAKE if kind in ("service", "good") else DUE
                channel.basic_publish("", where, body, found, mandatory=True)
                published[kind] += 1
    made = hook.bridge("services", "orders")
    with running(made):
        eventually(lambda: vhost.count(INTAKE) == vhost.count(DUE) == 0, 600)
        eventually(lambda: made.counts.delivered + made.counts.parked >= sum(published.values()), 120)
    arrived, parked = set(bodies(vhost, "all")), set(bodies(vhost, PARKED))
    assert good <= arrived
    assert len(arrived | parked) == sum(published.values())
