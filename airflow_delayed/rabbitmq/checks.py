"""Judging what is known of a broker: facts in, findings out. No network.

Each finding has a code, one for each thing that may be wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from airflow_delayed.delivery import Finding, State
from airflow_delayed.errors import some
from airflow_delayed.rabbitmq import levels
from airflow_delayed.rabbitmq.facts import BindingFacts, ExchangeFacts, Facts, QueueFacts
from airflow_delayed.rabbitmq.plan import UNCOMPARED, Binding, Declaration, Exchange, Queue
from airflow_delayed.rabbitmq.topology import Topology

#: The oldest broker whose quorum queues have a time to live and at-least-once dead-lettering.
OLDEST = (3, 10)
#: From this version on, the feature flags that we need cannot be off.
_FLAGS_REQUIRED = (3, 12)


def version(text: str | None) -> Iterator[Finding]:
    """Judge the broker's version."""
    found = _version(text)
    if found is None:
        yield unknown("broker-version", "broker version", "the broker does not tell")
    elif found < OLDEST:
        wanted = f"at least {'.'.join(map(str, OLDEST))}"
        yield Finding(state=State.DIFFERS, resource="broker version", wanted=wanted, found=text, code="broker-version")


def wants_flags(text: str | None) -> bool:
    """Whether a broker of this version may have feature flags off that are needed."""
    found = _version(text)
    return found is not None and found < _FLAGS_REQUIRED


def _version(text: str | None) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", text or "")
    return (int(match[1]), int(match[2])) if match else None


def flags(topology: Topology, broker: str | None, facts: Facts) -> Iterator[Finding]:
    """Judge the feature flags that quorum queues and at-least-once dead-lettering rely on.

    Without ``stream_queue``, as NServiceBus's tools know (BrokerVerifier.cs), RabbitMQ 3.10 and 3.11 do not dead-letter
    at least once, whatever the queue's argument says.
    """
    if not wants_flags(broker):
        return
    wanted = {
        "quorum_queue": topology.is_quorum,
        "stream_queue": topology.keeps_stuck,
    }
    for name in (name for name, needed in wanted.items() if needed):
        resource = f"feature flag {name}"
        if facts.flags is None:
            why = facts.why if facts.queues is None else "only an administrator is told"
            yield unknown("feature-flag", resource, why)
        elif (state := facts.flags.get(name, "absent")) != "enabled":
            yield Finding(state=State.DIFFERS, resource=resource, wanted="enabled", found=state, code="feature-flag")


def exact_arguments(parts: Iterable[Declaration], found: Iterable[Finding], facts: Facts) -> Iterator[Finding]:
    """Replace what AMQP told of a part, the first argument that differs, by every one that does.

    Where AMQP found no difference, since the user may not configure the part, what we want decides.
    """
    by_name = {str(part): part for part in parts if not isinstance(part, Binding) and not part.destination}
    for finding in found:
        part = by_name.get(finding.resource)
        all_of_it = list(differences(part, facts)) if part else []
        if finding.state is State.OK:
            all_of_it = [each for each in all_of_it if each.wanted is not None]
        if all_of_it and finding.state in (State.OK, State.DIFFERS):
            yield from all_of_it
        else:
            yield finding


def uncompared(found: Iterable[Finding], facts: Facts) -> Iterator[Finding]:
    """Say that arguments could not be compared: AMQP tells of them to those alone who may configure the part."""
    parts = sum(one.state is State.OK and one.found == UNCOMPARED for one in found)
    if parts and (facts.queues is None or facts.exchanges is None):
        why = f"this user may not configure them, and {facts.why}"
        yield unknown("argument", f"arguments of {parts} exchanges and queues", why)


def differences(part: Exchange | Queue, facts: Facts) -> Iterator[Finding]:
    """Name each argument in which something that is there differs from the plan."""
    known: Mapping[str, QueueFacts] | Mapping[str, ExchangeFacts] | None
    known = facts.queues if isinstance(part, Queue) else facts.exchanges
    there = (known or {}).get(part.name)
    if there is None:
        return
    wanted: dict[str, Any] = {"durable": True, **part.arguments}
    found: dict[str, Any] = {"durable": there.durable, **there.arguments}
    if isinstance(part, Exchange):
        wanted["type"], found["type"] = part.type, there.type
    else:
        # a queue of no type is a classic one
        wanted.setdefault("x-queue-type", "classic")
        found["x-queue-type"] = there.type
    for name in dict.fromkeys((*wanted, *found)):
        if wanted.get(name) != found.get(name):
            yield Finding(
                state=State.DIFFERS,
                resource=str(part),
                argument=name,
                wanted=wanted.get(name),
                found=found.get(name),
                code="argument",
            )


def bindings(
    topology: Topology, parts: Sequence[Declaration], found: Iterable[Finding], facts: Facts
) -> Iterator[Finding]:
    """Judge the bindings of the levels, the delivery exchange and the destinations.

    :param found: of the parts; a binding is gone with either of its ends, and not named too.
    """
    if facts.bindings is None:
        yield unknown("binding", "bindings", facts.why)
        return
    there = set(facts.bindings)
    planned = {_facts(part): part for part in parts if isinstance(part, Binding)}
    exchanges = {part.name for part in parts if isinstance(part, Exchange) and not part.destination}
    exchanges.discard(topology.delivery_exchange)
    missing = {one.resource for one in found if one.state is State.MISSING}
    for wanted, part in planned.items():
        if wanted not in there and missing.isdisjoint((str(part.source), str(part.target))):
            yield _absent(part, [one.key for one in there if one[:3] == wanted[:3]])
    for extra in sorted(there - planned.keys()):
        if extra.source in exchanges:
            yield Finding(
                state=State.WARNING,
                resource=f"binding {extra.source} -> {extra.target}",
                found=f"with key {extra.key!r} it takes messages off their way, or doubles them; remove it",
                code="binding-extra",
            )


def _absent(part: Binding, keys: Sequence[str]) -> Finding:
    destination = part.target.name if part.target.destination else None
    if destination is not None:
        # each sender to it binds it, so it can be sent to
        says = f"bound with key {', '.join(map(repr, keys))} alone" if keys else "missing"
        text = f"{says}; messages that wait for it are unroutable until it is bound, by an install or the next send"
        return Finding(state=State.WARNING, resource=str(part), found=text, code="destination-unbound")
    if not keys:
        return Finding(state=State.MISSING, resource=str(part), code="binding")
    return Finding(
        state=State.DIFFERS, resource=str(part), argument="key", wanted=part.key, found=", ".join(keys), code="binding"
    )


def _facts(part: Binding) -> BindingFacts:
    return BindingFacts(part.source.name, part.target.name, isinstance(part.target, Queue), part.key)


def leaks(topology: Topology, destinations: Iterable[str], facts: Facts) -> Iterator[Finding]:
    """Name each pair of destinations, bound or asked about, of which one also gets the messages for the other."""
    bound = [one for one in facts.bindings or () if one.source == topology.delivery_exchange]
    if topology.binding == "exact":
        for one in bound:
            if one.key != "*." * levels.BITS + one.target:
                yield Finding(
                    state=State.WARNING,
                    resource=f"binding {one.source} -> {one.target}",
                    found=f"its key {one.key!r} is not exact, so that it may also get messages for others; an install"
                    " binds it exactly, then remove this one",
                    code="leak",
                )
        return
    # an address is what stands behind the wildcards
    addresses = (re.sub(r"^(#\.|(\*\.)+)", "", one.key) for one in bound)
    for gets, other in topology.leaks((*destinations, *addresses)):
        yield Finding(
            state=State.WARNING,
            resource=f"destination {gets}",
            found=f"also gets delayed messages for {other}",
            code="leak",
        )


_STUCK = "messages stuck in dead-lettering"


def stuck(topology: Topology, top_level: int, facts: Facts) -> Iterator[Finding]:
    """Name the levels in which messages wait that dead-lettering did not get rid of."""
    if not topology.keeps_stuck:
        return
    if facts.queues is None:
        yield unknown("stuck", _STUCK, facts.why)
        return
    names = (topology.level_name(level) for level in range(top_level + 1))
    there = [facts.queues[name] for name in names if name in facts.queues]
    if unseen := [queue.name for queue in there if queue.stuck is None]:
        yield unknown("stuck", _STUCK, f"the broker has no statistics (yet) of {some(unseen, separator=', ')}")
    for queue in there:
        if queue.stuck:
            yield Finding(
                state=State.WARNING,
                resource=f"queue {queue.name}",
                found=f"{queue.stuck:,} due messages are not taken by where they go next; if that lasts, a destination"
                " is full or unroutable, and all behind them wait",
                code="stuck",
            )


#: What a policy's setting does to a level queue, and whether messages then come at a wrong time or get lost.
_ON_LEVELS: Mapping[str, tuple[State, str]] = {
    "expires": (State.DIFFERS, "deletes the queue with all that waits in it when nobody uses it for that long"),
    "dead-letter-routing-key": (State.DIFFERS, "replaces the key by which messages find their way"),
    "message-ttl": (State.DIFFERS, "lets messages go on too early"),
    "delivery-limit": (State.WARNING, "lets a message go on, so too early, that is returned to the queue so often"),
}
_LIMITS = ("max-length", "max-length-bytes")


def policies(topology: Topology, top_level: int, facts: Facts) -> Iterator[Finding]:
    """Name each policy that changes what a level queue or the delivery exchange needs.

    Of an argument and a policy's setting, the smaller number is in force, and of other values the argument.
    """
    if facts.policies is None:
        yield unknown("policy", "policies", facts.why)
        return
    for level in range(top_level + 1):
        name = topology.level_name(level)
        kind = "quorum_queues" if topology.is_quorum else "classic_queues"
        for policy in facts.applied(name, kind):
            for setting, value in sorted(policy.definition.items()):
                if judged := _on_level(topology, level, setting, value):
                    yield _of_policy(f"queue {name}", policy, setting, value, *judged)
    if topology.unroutable:
        return
    for policy in facts.applied(topology.delivery_exchange, "exchanges"):
        other = policy.definition.get("alternate-exchange")
        if other not in (None, topology.unroutable_queue):
            text = "takes what is unroutable; look there for lost messages"
            resource = f"exchange {topology.delivery_exchange}"
            yield _of_policy(resource, policy, "alternate-exchange", other, State.WARNING, text)


def _on_level(topology: Topology, level: int, setting: str, value: Any) -> tuple[State, str] | None:
    arguments = topology.queue_arguments(level)
    if setting == "message-ttl" and int(value) >= int(arguments["x-message-ttl"]):
        return None
    if setting in _LIMITS:
        if "x-overflow" in arguments:
            return State.WARNING, "refuses senders when the level is full"
        return State.DIFFERS, "drops messages when the level is full"
    return _ON_LEVELS.get(setting)


def _of_policy(resource: str, policy: object, setting: str, value: Any, state: State, effect: str) -> Finding:
    if state is State.DIFFERS:
        argument = f"{setting} by {policy}, which {effect}"
        return Finding(state=state, resource=resource, argument=argument, found=value, code="policy")
    return Finding(state=state, resource=resource, found=f"{policy}: {setting} {value!r} {effect}", code="policy")


def unroutable(topology: Topology, facts: Facts, count: int | None) -> Iterator[Finding]:
    """Tell of messages that no destination took, and of a policy whose queue is not there.

    :param count: what is in the queue for them; None if there is none.
    """
    name = topology.unroutable_queue
    if count:
        yield Finding(
            state=State.WARNING,
            resource=f"queue {name}",
            found=f"{count:,} messages whose destination was not there when they were due; redrive() sends them on",
            code="unroutable",
        )
    if count is None and not topology.unroutable:
        applied = facts.applied(topology.delivery_exchange, "exchanges")
        if any(policy.definition.get("alternate-exchange") == name for policy in applied):
            yield Finding(state=State.MISSING, resource=f"queue {name}", code="unroutable")


def unknown(code: str, resource: str, why: str | None) -> Finding:
    """Say that something could not be looked at."""
    return Finding(state=State.UNKNOWN, resource=resource, found=why or "not told", code=code)


def coded(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Give a code to what was found over AMQP."""
    codes = {State.MISSING: "missing", State.DIFFERS: "argument"}
    for finding in findings:
        yield finding if finding.code else replace(finding, code=codes.get(finding.state))
