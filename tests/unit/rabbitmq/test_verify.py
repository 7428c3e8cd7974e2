"""What is judged of a broker, from facts alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from support.lengths import length

from airflow_delayed.delivery import Finding, State
from airflow_delayed.errors import LimitExceeded
from airflow_delayed.rabbitmq.declare import Binding, Declaration, Exchange, Queue, plan
from airflow_delayed.rabbitmq.management import BindingFacts, ExchangeFacts, Facts, PolicyFacts, QueueFacts
from airflow_delayed.rabbitmq.topology import CELERY, DELAYED, NSERVICEBUS, NSERVICEBUS_V1, Topology
from airflow_delayed.rabbitmq.verify import judge

ALL = {"quorum_queue": "enabled", "stream_queue": "enabled"}
NO_FACTS = Facts()
NO_COUNTS: Mapping[str, int | None] = {}
EACH_BINDING = length("a binding that is missing, of so many", 7, 1)
RECEIVERS = ("destination-full", "differs")


def findings_of(
    codes: str | Sequence[str] | None,
    topology: Topology = DELAYED,
    facts: Facts = NO_FACTS,
    *,
    of: str = "",
    destinations: Sequence[str] = (),
    parts: Sequence[Declaration] = (),
    found: Sequence[Finding] = (),
    top_position: int | None = None,
    broker: str | None = "4.0.5",
    counts: Mapping[str, int | None] = NO_COUNTS,
) -> list[Finding]:
    """Judge it all, and return the findings of some codes, or of all, whose resource begins so."""
    findings = judge(
        topology,
        destinations,
        parts,
        found,
        top_position=top_position,
        facts=facts,
        broker=broker,
        counts={topology.unroutable_queue: 0, **counts},
    )
    wanted = [codes] if isinstance(codes, str) else codes
    return [each for each in findings if (wanted is None or each.code in wanted) and each.resource.startswith(of)]


def summaries(findings: Iterable[Finding]) -> list[tuple[str, str, str | None]]:
    return [(found.state.value, found.resource, found.code) for found in findings]


@pytest.mark.parametrize(
    "version, states",
    [
        ("3.10.0", []),
        ("3.10.8", []),
        ("4.0.5", []),
        ("4.2.0-rc.1", []),
        ("3.9.29", ["differs"]),
        ("3.8", ["differs"]),
        ("", ["unknown"]),
        ("built by hand", ["unknown"]),
        (None, ["unknown"]),
    ],
)
def test_the_brokers_version(version: str | None, states: list[str]) -> None:
    assert [found.state.value for found in findings_of("version", of="broker", broker=version)] == states


@pytest.mark.parametrize(
    "topology, version, flags, found",
    [
        (DELAYED, "3.10.8", ALL, []),
        (DELAYED, "3.10.8", {**ALL, "stream_queue": "disabled"}, ["stream_queue"]),
        (DELAYED, "3.11.0", {"quorum_queue": "enabled"}, ["stream_queue"]),
        (NSERVICEBUS, "3.10.8", {}, ["quorum_queue", "stream_queue"]),
        # without at-least-once dead-lettering it is not needed
        (NSERVICEBUS_V1, "3.10.8", {}, []),
        # required from 3.12 on; later versions do not even list it
        (DELAYED, "3.12.0", {}, []),
        (DELAYED, "4.0.5", None, []),
    ],
)
def test_feature_flags(topology: Topology, version: str, flags: dict[str, str] | None, found: list[str]) -> None:
    findings = findings_of("version", topology, Facts(queues={}, flags=flags), of="feature", broker=version)
    assert summaries(findings) == [("differs", f"feature flag {name}", "version") for name in found]


def test_feature_flags_that_only_an_administrator_is_told() -> None:
    findings = findings_of("version", of="feature", facts=Facts(queues={}), broker="3.10.8")
    assert [str(found) for found in findings] == [
        f"feature flag {name}: unknown: only an administrator may see it" for name in ("quorum_queue", "stream_queue")
    ]


def queue_facts(arguments: dict[str, Any], **fields: Any) -> Facts:
    return Facts(queues={"q": QueueFacts(name="q", arguments=arguments, **fields)})


def arguments_of(part: Exchange | Queue, facts: Facts) -> list[tuple[Any, ...]]:
    """Return the arguments in which a part differs, whatever AMQP's first difference was."""
    by_amqp = Finding(state=State.DIFFERS, resource=str(part), code="by-amqp")
    findings = findings_of("differs", of=str(part), facts=facts, parts=[part], found=[by_amqp])
    return [(finding.argument, finding.wanted, finding.found) for finding in findings]


@pytest.mark.parametrize(
    "wanted, facts, differ",
    [
        ({"x-queue-type": "quorum", "a": 1}, queue_facts({"x-queue-type": "quorum", "a": 1}, type="quorum"), []),
        ({"a": 1, "b": 2}, queue_facts({"a": 3, "c": 4}), [("a", 1, 3), ("b", 2, None), ("c", None, 4)]),
        # a queue that was declared without a type has one
        ({}, queue_facts({"x-queue-type": "classic"}), []),
        ({}, queue_facts({}, type="quorum"), [("x-queue-type", "classic", "quorum")]),
        ({}, queue_facts({}, durable=False), [("durable", True, False)]),
        ({}, Facts(), []),
        ({}, Facts(queues={}), []),
    ],
)
def test_arguments_of_a_queue(wanted: dict[str, Any], facts: Facts, differ: list[tuple[Any, ...]]) -> None:
    assert arguments_of(Queue("q", wanted), facts) == differ


def test_arguments_of_an_exchange() -> None:
    facts = Facts(exchanges={"e": ExchangeFacts(name="e", type="fanout", arguments={"alternate-exchange": "x"})})
    assert arguments_of(Exchange("e", "topic"), facts) == [
        ("type", "topic", "fanout"),
        ("alternate-exchange", None, "x"),
    ]


def test_what_amqp_saw_counts_unless_the_user_may_not_ask() -> None:
    parts = [Queue("q", {"x-message-ttl": 1000})]
    ok, differs = (Finding(state=state, resource="queue q", code="by-amqp") for state in (State.OK, State.DIFFERS))

    def exact(finding: Finding, facts: Facts) -> list[str | None]:
        return [one.argument for one in findings_of(None, of="queue q", facts=facts, parts=parts, found=[finding])]

    more = queue_facts({"x-message-ttl": 1000, "x-else": 1})
    # the broker takes the queue for what we want, whatever that argument is
    assert exact(ok, more) == [None]
    assert exact(differs, more) == ["x-else"]
    assert exact(ok, queue_facts({"x-message-ttl": 9})) == ["x-message-ttl"]
    assert exact(differs, Facts()) == [None]


def there(topology: Topology, *destinations: str) -> set[BindingFacts]:
    return {
        BindingFacts(part.source.name, part.target.name, isinstance(part.target, Queue), part.key)
        for part in plan(topology, destinations)
        if isinstance(part, Binding)
    }


def judged(topology: Topology, destinations: list[str], bindings: set[BindingFacts]) -> list[Finding]:
    facts = Facts(bindings=tuple(bindings))
    return findings_of(
        None, topology, facts, of="binding ", destinations=destinations, parts=plan(topology, destinations)
    )


@pytest.mark.parametrize("topology", [DELAYED, NSERVICEBUS, CELERY], ids=lambda topology: topology.name)
def test_each_binding_that_is_missing_is_named(topology: Topology) -> None:
    bindings = there(topology, "orders")
    assert judged(topology, ["orders"], bindings) == []
    for one in sorted(bindings, key=str)[::EACH_BINDING]:
        (found,) = judged(topology, ["orders"], bindings - {one})
        assert found.resource == f"binding {one.source} -> {one.target}"
        # senders bind a destination themselves
        assert found.state is (State.WARNING if one.target == "orders" else State.MISSING)


def test_a_binding_is_gone_with_its_end() -> None:
    gone = Finding(state=State.MISSING, resource="queue delayed.hex.0000008")
    bindings = tuple(one for one in there(DELAYED) if (one.target, one.is_queue) != ("delayed.hex.0000008", True))
    assert not findings_of(None, of="binding ", facts=Facts(bindings=bindings), parts=plan(DELAYED), found=[gone])


def bound(*keys: str, topology: Topology) -> Facts:
    return Facts(bindings=tuple(BindingFacts(topology.delivery_exchange, key[-5:], True, key) for key in keys))


def test_leaks_of_what_is_bound_and_of_what_is_asked_about() -> None:
    facts = bound("#.Sales", "*." * 28 + "Big.Acme.Sales", topology=CELERY)
    found = [str(one) for one in findings_of("differs", CELERY, facts, of="destination ", destinations=["Acme.Sales"])]
    assert found == [
        "destination Acme.Sales: also gets delayed messages for Big.Acme.Sales",
        "destination Sales: also gets delayed messages for Acme.Sales",
        "destination Sales: also gets delayed messages for Big.Acme.Sales",
    ]


def test_a_binding_that_is_not_exact_where_all_are() -> None:
    facts = bound("#.Sales", "*." * 7 + "Sales", "#", topology=DELAYED)
    assert summaries(findings_of("differs", of="binding ", facts=facts, destinations=["Acme.Sales"])) == [
        ("warning", "binding delayed.hex.delivery -> Sales", "differs"),
        ("warning", "binding delayed.hex.delivery -> #", "differs"),
    ]


def test_a_queue_whose_name_is_the_key_of_a_delay() -> None:
    """It gets a copy at once of what is sent to x with a direct entry, and with five seconds' delay."""
    names = ("x", "0.0.0.0.0.0.5.x", "0.0.0.0.0.5.x", "orders")
    facts = Facts(queues={name: QueueFacts(name=name) for name in names})
    (found,) = findings_of("differs", of="queue ", facts=facts)
    assert found.resource == "queue 0.0.0.0.0.0.5.x"
    assert "gets messages for x at once" in str(found)
    assert not findings_of("differs", CELERY, facts, of="queue ")
    DELAYED.check_destination("0.0.0.0.0.5.x")
    with pytest.raises(LimitExceeded, match="the form of a delay's routing key, so that it would get messages for 'x'"):
        DELAYED.check_destination("0.0.0.0.0.0.5.x")


def policy(pattern: str, operator: bool = False, priority: int = 0, **definition: Any) -> PolicyFacts:
    fields = {name.replace("_", "-"): value for name, value in definition.items()}
    return PolicyFacts(name="p", pattern=pattern, definition=fields, operator=operator, priority=priority)


REJECTS = {"x-overflow": "reject-publish", "x-max-length": 10}


@pytest.mark.parametrize(
    "arguments, policies, ready, found",
    [
        ({}, [], 99, []),
        ({"x-max-length": 10}, [], 10, []),
        (REJECTS, [], 9, ["warning"]),
        (REJECTS, [], 10, ["blocked"]),
        # not known is not full
        (REJECTS, [], None, ["warning"]),
        ({**REJECTS, "x-overflow": "drop-head"}, [policy("o", overflow="reject-publish")], 99, []),
        ({"x-max-length": 10}, [policy("o", overflow="reject-publish-dlx")], 10, ["blocked"]),
        ({"x-overflow": "reject-publish"}, [policy("o", max_length=5)], 5, ["blocked"]),
        # the smaller limit is in force
        (REJECTS, [policy("o", operator=True, max_length=3)], 3, ["blocked"]),
        (REJECTS, [policy("o", max_length=30)], 10, ["blocked"]),
        ({"x-overflow": "reject-publish"}, [policy("^other", max_length=5)], 9, []),
        # one policy applies, that of the highest priority
        ({"x-overflow": "reject-publish"}, [policy("o", max_length=5), policy("o", priority=1)], 9, []),
        ({"x-overflow": "reject-publish", "x-max-length-bytes": 100}, [], 1, ["blocked"]),
    ],
)
def test_destinations_that_reject(
    arguments: dict[str, Any], policies: list[PolicyFacts], ready: int | None, found: list[str]
) -> None:
    queue = QueueFacts(name="orders", type="quorum", arguments=arguments, ready=ready, ready_bytes=100)
    for topology, bindings in ((DELAYED, there(DELAYED, "orders")), (NSERVICEBUS, there(NSERVICEBUS, "orders"))):
        facts = Facts(queues={"orders": queue}, bindings=tuple(bindings), policies=tuple(policies))
        assert [one.state.value for one in findings_of(RECEIVERS, topology, facts)] == found


@pytest.mark.parametrize(
    "topology, arguments, definition, warned",
    [
        (DELAYED, {}, {"dead_letter_exchange": ""}, True),
        (DELAYED, {}, {"dead_letter_exchange": "dead"}, False),
        (DELAYED, {}, {"dead_letter_exchange": "", "dead_letter_routing_key": "dead"}, False),
        # senders see an argument, and do not go in directly
        (DELAYED, {"x-dead-letter-exchange": ""}, {}, False),
        (DELAYED, {"x-dead-letter-exchange": "dead"}, {"dead_letter_exchange": ""}, False),
        (CELERY, {}, {"dead_letter_exchange": ""}, False),
    ],
)
def test_destinations_that_dead_letter_into_a_level(
    topology: Topology, arguments: dict[str, Any], definition: dict[str, Any], warned: bool
) -> None:
    facts = Facts(
        queues={"orders": QueueFacts(name="orders", arguments=arguments)},
        bindings=tuple(there(topology, "orders")),
        policies=(policy("orders", **definition),),
    )
    assert bool(findings_of(RECEIVERS, topology, facts)) == warned


@pytest.mark.parametrize(
    "topology, applied, found",
    [
        (DELAYED, policy("hex.0000008", message_ttl=7999), ["differs"]),
        (DELAYED, policy("hex.0000008", message_ttl=8000), []),
        (DELAYED, policy("hex.0000008", expires=10**9), ["differs"]),
        (DELAYED, policy("hex.0000008", dead_letter_routing_key="x"), ["differs"]),
        # the queue's own arguments are in force
        (DELAYED, policy("hex.0000008", dead_letter_exchange="x", overflow="drop-head"), []),
        (DELAYED, policy("hex.0000008", max_length=5), ["warning"]),
        (NSERVICEBUS_V1, policy("level-03", max_length=5), ["differs"]),
        (DELAYED, policy("hex.0000008", delivery_limit=5), ["warning"]),
        (DELAYED, policy("hex.0000008", operator=True, expires=5), ["differs"]),
        (
            DELAYED,
            PolicyFacts(name="p", pattern="hex.0000008", apply_to="classic_queues", definition={"expires": 5}),
            [],
        ),
        (DELAYED, PolicyFacts(name="p", pattern="hex.0000008", apply_to="exchanges", definition={"expires": 5}), []),
        (DELAYED, policy("delivery", alternate_exchange="x"), []),
        (CELERY, policy("delivery$", alternate_exchange="x"), ["warning"]),
        (CELERY, policy("delivery$", alternate_exchange="celery_delayed_unroutable"), []),
        # what Python cannot read is looked at, not left out
        (DELAYED, policy("hex(?|a)", expires=5), ["differs"] * 105),
    ],
)
def test_policies(topology: Topology, applied: PolicyFacts, found: list[str]) -> None:
    findings = findings_of("differs", topology, Facts(policies=(applied,)))
    assert [one.state.value for one in findings] == found


def test_what_is_stuck_and_what_is_unroutable() -> None:
    facts = Facts(queues={"delayed.hex.0000100": QueueFacts(name="delayed.hex.0000100", stuck=422)}, policies=())
    assert summaries(findings_of("stuck", facts=facts)) == [("warning", "queue delayed.hex.0000100", "stuck")]
    assert not findings_of("stuck", facts=facts, top_position=1)
    # a broker may collect no statistics, or none yet
    unseen = Facts(queues={"delayed.hex.0000100": QueueFacts(name="delayed.hex.0000100")})
    assert list(map(str, findings_of("stuck", facts=unseen))) == [
        "messages stuck in dead-lettering: unknown: the broker has no statistics (yet) of delayed.hex.0000100"
    ]
    assert not findings_of("unroutable", facts=facts)
    assert summaries(findings_of("unroutable", facts=facts, counts={DELAYED.unroutable_queue: 1})) == [
        ("warning", "queue delayed.hex.unroutable", "unroutable")
    ]
    dangling = Facts(policies=(policy("delivery$", alternate_exchange="celery_delayed_unroutable"),))
    assert summaries(findings_of("missing", CELERY, dangling, of="queue ", counts={CELERY.unroutable_queue: None})) == [
        ("missing", "queue celery_delayed_unroutable", "missing")
    ]


def test_without_facts_each_thing_is_unknown_once_and_none_is_a_problem() -> None:
    facts = Facts(why="it is off")
    findings = judge(
        DELAYED,
        ["orders"],
        plan(DELAYED, ["orders"]),
        (),
        facts=facts,
        broker="4.0.5",
        counts={"orders": 3, DELAYED.unroutable_queue: 0},
    )
    assert [str(one) for one in findings] == [
        f"{what}: unknown: it is off"
        for what in (
            "nodes of the cluster",
            "leaders and members of the queues",
            "bindings",
            "destinations that reject messages when full",
            "messages stuck in dead-lettering",
            "policies",
        )
    ]
