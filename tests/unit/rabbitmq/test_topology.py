from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.topics import delays, destinations, matches

from airflow_delayed.errors import LimitExceeded
from airflow_delayed.rabbitmq.declare import Binding, Declaration, Exchange, Queue, plan
from airflow_delayed.rabbitmq.levels import BITS
from airflow_delayed.rabbitmq.topology import (
    CELERY,
    DELAYED,
    NSERVICEBUS,
    TOPOLOGIES,
    PublishAddress,
    Topology,
    topology_of,
)

ALL = (*TOPOLOGIES.values(), topology_of("nservicebus", "direct"))
each_topology = pytest.mark.parametrize("topology", ALL, ids=lambda found: f"{found.name}-{found.routing}")


def deliver(parts: Iterable[Declaration], way: PublishAddress) -> list[tuple[int, str]]:
    """Follow a message through a plan as a broker routes it: milliseconds waited and last queue, of each copy.

    By the bindings, queue arguments and alternate exchanges that the plan declares, and the default exchange. A message
    is routed by all its keys, each time: the one it was published with and that of ``BCC``.
    """
    exchanges = {part.name: part for part in parts if isinstance(part, Exchange)}
    queues = {part.name: part for part in parts if isinstance(part, Queue)}
    bindings: dict[str, list[Binding]] = {}
    for part in parts:
        if isinstance(part, Binding):
            bindings.setdefault(part.source.name, []).append(part)
    keys = [way.key, *([way.level] if way.level else [])]

    def route(exchange: str) -> set[str]:
        if not exchange:
            return {key for key in keys if key in queues}
        found: set[str] = set()
        for part in bindings.get(exchange, ()):
            if part.source.type == "fanout" or any(matches(part.key, key) for key in keys):
                found |= {part.target.name} if isinstance(part.target, Queue) else route(part.target.name)
        alternate = exchanges[exchange].arguments.get("alternate-exchange")
        return route(str(alternate)) if alternate and not found else found

    ended = []
    under_way = [(0, name) for name in route(way.exchange)]
    while under_way:
        waited, name = under_way.pop()
        arguments = queues[name].arguments
        if "x-message-ttl" in arguments:
            waited += int(arguments["x-message-ttl"])
            under_way += [(waited, queue) for queue in route(str(arguments["x-dead-letter-exchange"]))]
        else:
            ended.append((waited, name))
    return ended


@each_topology
@given(delay=delays, destination=destinations, other=destinations)
def test_a_message_waits_for_its_delay_and_ends_at_its_destination_alone(
    topology: Topology, delay: int, destination: str, other: str
) -> None:
    names = [destination, other]
    assume(destination != other and not topology.leaks(names))
    assume(not any(name.startswith(("delayed.", "nsb.", "celery_")) for name in names))
    assume(all(len(name.encode()) <= topology.digits.max_destination_bytes for name in names))
    parts = plan(topology, names)
    for default_exchange in (True, False):
        for direct in (True, False):
            way = topology.address(destination, delay, default_exchange=default_exchange, direct=direct)
            assert deliver(parts, way) == [(delay * 1000, destination)]


@pytest.mark.parametrize("delay", [0, 5])
def test_a_message_whose_queue_is_gone_ends_as_unroutable(delay: int) -> None:
    way = DELAYED.address("gone", delay, default_exchange=False)
    assert deliver(plan(DELAYED, ["Sales"]), way) == [(delay * 1000, "delayed.hex.unroutable")]


@given(delays.filter(bool), st.data())
def test_without_a_binding_a_message_ends_as_unroutable_and_none_is_early(delay: int, data: st.DataObject) -> None:
    """Whichever binding it is; it never waits at the head of a level, where it would block all others."""
    parts = plan(DELAYED, ["Sales"])
    way = DELAYED.address("Sales", delay, direct=data.draw(st.booleans()))
    matching = [part for part in parts if isinstance(part, Binding) and matches(part.key, way.key)]
    assert len(matching) == 7 + 1
    missing = data.draw(st.sampled_from(matching))
    ends = deliver([part for part in parts if part != missing], way)
    if way.exchange == missing.source.name:
        # the broker returns it to the sender
        assert ends == []
        return
    (end,) = ends
    # a level's exchange that the message does not pass makes no difference
    assert end == (delay * 1000, "Sales") or (end[1] == "delayed.hex.unroutable" and end[0] <= delay * 1000)
    assert missing.target.name != "Sales" or end == (delay * 1000, "delayed.hex.unroutable")


@given(delays, destinations, destinations)
def test_an_exact_binding_takes_its_own_destination_and_no_other(delay: int, one: str, other: str) -> None:
    assume(not f"{one}.{other}".startswith("delayed.") and not other.startswith("delayed."))
    for destination in (one, f"{other}.{one}", f"{one}.{other}", other):
        assume(len(destination.encode()) <= DELAYED.digits.max_destination_bytes)
        found = matches(DELAYED.binding_key(one), DELAYED.digits.routing_key(delay, destination))
        assert found == (destination == one)


@given(delays, destinations, destinations)
def test_no_leak_of_a_suffix_binding_goes_unnamed(delay: int, one: str, other: str) -> None:
    names = [one, f"{other}.{one}", f"0.1.{one}", other]
    assume(all(len(name.encode()) <= BITS.max_destination_bytes for name in names))
    leaks = {
        (first, second)
        for first in names
        for second in names
        if first != second and matches(CELERY.binding_key(first), BITS.routing_key(delay, second))
    }
    assert leaks <= set(CELERY.leaks(names))


@pytest.mark.parametrize(
    "names, leaks",
    [
        (["Sales", "Acme.Sales", "Acme", "MySales", "Sales.Acme"], {("Sales", "Acme.Sales"), ("Acme", "Sales.Acme")}),
        # the last bit of an even delay is 0
        (["Sales", "0.Sales", "2.Sales"], {("Sales", "0.Sales"), ("0.Sales", "Sales"), ("Sales", "2.Sales")}),
        # a key has 28 bits
        (["0." * 28 + "Sales", "Sales"], {("0." * 28 + "Sales", "Sales"), ("Sales", "0." * 28 + "Sales")}),
        (["0." * 29 + "Sales", "Sales"], {("Sales", "0." * 29 + "Sales")}),
        (["Sales", "Sales"], set()),
    ],
)
def test_leaks(names: list[str], leaks: set[tuple[str, str]]) -> None:
    assert set(CELERY.leaks(names)) == leaks
    assert DELAYED.leaks(names) == ()


QUORUM = {"x-queue-type": "quorum", "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}
LAZY = {"x-queue-mode": "lazy"}


@pytest.mark.parametrize(
    "topology, level, kind, milliseconds, next_exchange",
    [
        # NServiceBus.RabbitMQ, DelayInfrastructure.cs
        ("nservicebus", 27, QUORUM, 134_217_728_000, "nsb.v2.delay-level-26"),
        ("nservicebus", 0, QUORUM, 1000, "nsb.v2.delay-delivery"),
        # the same at tag 6.1.6
        ("nservicebus-v1", 1, LAZY, 2000, "nsb.delay-level-00"),
        ("delayed", 0, QUORUM, 1000, "delayed.hex.delivery"),
        # f00 seconds: the last of its position
        ("delayed", 44, QUORUM, 3_840_000, "delayed.hex.last-2"),
        # kombu, native_delayed_delivery.py
        ("celery", 10, QUORUM, 1_024_000, "celery_delayed_9"),
    ],
)
def test_queue_arguments(
    topology: str, level: int, kind: dict[str, object], milliseconds: int, next_exchange: str
) -> None:
    arguments = {**kind, "x-message-ttl": milliseconds, "x-dead-letter-exchange": next_exchange}
    assert topology_of(topology).queue_arguments(level) == arguments


def test_names() -> None:
    assert NSERVICEBUS.level_name(3) == "nsb.v2.delay-level-03"
    assert [DELAYED.level_name(level) for level in (0, 44, 104)] == [
        "delayed.hex.0000001",
        "delayed.hex.0000f00",
        "delayed.hex.f000000",
    ]
    assert DELAYED.pattern == "^(delayed[.]hex[.])"
    v1 = topology_of("nservicebus-v1")
    assert [v1.level_name(27), v1.level_name(0), v1.delivery_exchange] == [
        "nsb.delay-level-27",
        "nsb.delay-level-00",
        "nsb.delay-delivery",
    ]
    assert v1.pattern == "^(nsb[.]delay-level-|nsb[.]delay-delivery|nsb[.]delay-unroutable)"
    assert CELERY.level_name(3) == "celery_delayed_3"
    assert NSERVICEBUS.binding_key("a.b") == "#.a.b"


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_topologys_own_parts_are_no_destinations(topology: str) -> None:
    found = topology_of(topology)
    for part in plan(found):
        if isinstance(part, Exchange | Queue):
            with pytest.raises(LimitExceeded, match="part of the delay levels") as error:
                found.binding_key(part.name)
            assert error.value.column == "destination"


@pytest.mark.parametrize(
    "choice, routing, problem",
    [
        ("rabbit", None, "'rabbit' is unknown; use one of delayed, nservicebus, nservicebus-v1, celery$"),
        ("x-delayed-message", None, "no client can read what waits inside such an exchange"),
        ("delayed", "conventional", "'delayed' has no routing 'conventional'"),
        ("nservicebus", "fanout", "'nservicebus' has no routing 'fanout'"),
    ],
)
def test_choices_that_do_not_exist(choice: str, routing: str | None, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        topology_of(choice, routing)


@pytest.mark.parametrize(
    "topology, routing, delay, exchange, key",
    [
        ("nservicebus", None, 0, "Sales", ""),
        ("nservicebus", "direct", 0, "", "Sales"),
        ("nservicebus", None, 10, "nsb.v2.delay-level-03", "0." * 24 + "1.0.1.0.Sales"),
        ("nservicebus-v1", None, 10, "nsb.delay-level-03", "0." * 24 + "1.0.1.0.Sales"),
        ("celery", None, 1, "celery_delayed_0", "0." * 27 + "1.Sales"),
        ("delayed", None, -1, "", "Sales"),
    ],
)
def test_where_a_message_is_published(topology: str, routing: str | None, delay: int, exchange: str, key: str) -> None:
    found = topology_of(topology, routing).address("Sales", delay)
    assert found == PublishAddress(exchange, key)


KEY = "0." * 4 + "3.8.4.Sales"


@pytest.mark.parametrize(
    "default_exchange, direct, delay, to",
    [
        (True, True, 900, PublishAddress("", KEY, "delayed.hex.0000300")),
        (True, False, 900, PublishAddress("delayed.hex.entry", KEY)),
        (False, True, 900, PublishAddress("delayed.hex.entry", KEY)),
        (True, False, 0, PublishAddress("", "Sales")),
        # by an exchange, and in none of its queues
        (False, True, 0, PublishAddress("delayed.hex.entry", "0." * 7 + "Sales")),
    ],
)
def test_the_direct_entry_and_what_stands_in_for_it(
    default_exchange: bool, direct: bool, delay: int, to: PublishAddress
) -> None:
    found = DELAYED.address("Sales", delay, default_exchange=default_exchange, direct=direct)
    assert found == to


@given(delays, destinations)
def test_a_second_routing_key_leads_nowhere_else(delay: int, destination: str) -> None:
    """RabbitMQ routes by all keys of a message, each time it is dead-lettered."""
    assume(not destination.startswith("delayed."))
    level = DELAYED.address(destination, max(1, delay)).level
    keys = [part.key for part in plan(DELAYED) if isinstance(part, Binding) and part.source.type == "topic"]
    assert not [key for key in (*keys, DELAYED.binding_key(destination)) if matches(key, str(level))]
