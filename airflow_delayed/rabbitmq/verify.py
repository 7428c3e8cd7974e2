"""Judging a topology by the facts of a broker: facts in, findings out. No network.

Each finding has a code, one for each problem that there may be.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from airflow_delayed import diagnosis
from airflow_delayed.delivery import Finding, State
from airflow_delayed.errors import some
from airflow_delayed.rabbitmq import cluster
from airflow_delayed.rabbitmq.declare import UNCOMPARED, Binding, Declaration, Exchange, Queue, plan
from airflow_delayed.rabbitmq.management import BindingFacts, ExchangeFacts, Facts, QueueFacts
from airflow_delayed.rabbitmq.topology import Topology

#: The oldest broker whose quorum queues have a time to live and at-least-once dead-lettering.
OLDEST = (3, 10)
#: From this version on, the feature flags that the levels need cannot be off.
_FLAGS_REQUIRED = (3, 12)
_REJECTS = ("reject-publish", "reject-publish-dlx")


def judge(
    topology: Topology,
    destinations: Sequence[str],
    parts: Sequence[Declaration],
    found: Sequence[Finding],
    top_position: int | None = None,
    *,
    facts: Facts,
    broker: str | None,
    counts: Mapping[str, int | None],
) -> Iterator[Finding]:
    """Judge all of a topology.

    :param parts: the plan, of the levels up to ``top_position`` (None: of all) and of the destinations.
    :param found: what AMQP shows of the parts.
    :param broker: its version.
    :param counts: messages in the queues of the destinations and in the one for unroutable messages, by AMQP.
    """
    yield from coded(exact_arguments(parts, found, facts))
    yield from uncompared(found, facts)
    yield from version(broker)
    yield from flags(topology, broker, facts)
    yield from cluster.judge(*needed_queues(topology, parts, top_position, facts), facts)
    yield from bindings(topology, parts, found, facts)
    yield from leaks(topology, destinations, facts)
    yield from receivers(topology, facts, counts)
    yield from stuck(topology, top_position, facts)
    yield from policies(topology, top_position, facts)
    yield from unroutable(topology, facts, counts[topology.unroutable_queue])


def needed_queues(
    topology: Topology, parts: Iterable[Declaration], top_position: int | None, facts: Facts
) -> tuple[list[QueueFacts], list[str]]:
    """Return the queues that messages need and that are there, and the names of the levels' queues.

    A destination that nobody named is needed too, if it is bound: what cannot go there stays at the head of its level.
    """
    names = [*topology.level_names(top_position)]
    named = [part.name for part in parts if isinstance(part, Queue) and part.destination]
    every = dict.fromkeys((*names, topology.unroutable_queue, *named, *sorted(_reached(topology, facts))))
    known = facts.queues or {}
    return [known[name] for name in every if name in known], names


def _reached(topology: Topology, facts: Facts) -> set[str]:
    """Return the queues of all bound destinations."""
    ways = [one for one in facts.bindings or () if one.source == topology.delivery_exchange]
    fans = {one.target for one in ways if not one.is_queue}
    reached = {one.target for one in ways if one.is_queue}
    return reached | {one.target for one in facts.bindings or () if one.source in fans and one.is_queue}


def version(text: str | None) -> Iterator[Finding]:
    """Judge the broker's version."""
    found = _version(text)
    if found is None:
        yield unknown("version", "broker version", "the broker does not tell")
    elif found < OLDEST:
        wanted = f"at least {'.'.join(map(str, OLDEST))}"
        yield Finding(
            state=State.DIFFERS,
            resource="broker version",
            wanted=wanted,
            found=text,
            code="version",
            remedy="upgrade RabbitMQ",
        )


def wants_flags(text: str | None) -> bool:
    """Whether feature flags that the levels need may be off at a broker of this version."""
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
    if not topology.quorum or not wants_flags(broker):
        return
    for name in ("quorum_queue", "stream_queue"):
        resource = f"feature flag {name}"
        if facts.flags is None:
            why = facts.why if facts.queues is None else "only an administrator may see it"
            yield unknown("version", resource, why)
        elif (state := facts.flags.get(name, "absent")) != "enabled":
            yield Finding(
                state=State.DIFFERS,
                resource=resource,
                wanted="enabled",
                found=state,
                code="version",
                remedy=f"rabbitmqctl enable_feature_flag {name}, which cannot be taken back",
            )


def unanswered(left: int) -> Iterator[Finding]:
    """Report exchanges and queues that were not looked at, since the broker answered slowly before."""
    if left:
        why = "not looked at, for the broker took seconds for the others: does a node that leads queues hang?"
        yield unknown("node-down", f"{left} exchanges and queues", why)


def unreachable(problems: Iterable[tuple[str, str | None]], seconds: float) -> Iterator[Finding]:
    """Report hosts that took no login within so many seconds.

    :param problems: each host, and why it took none.
    """
    for name, problem in problems:
        if problem is not None:
            yield Finding(
                state=State.WARNING,
                resource=f"host {name}",
                found=f"no login within {seconds:g} s: {problem}",
                code="node-down",
                remedy="if nothing listens there, start its node; if it takes connections and answers nothing, it"
                " hangs: restart it; else look for a firewall",
            )


def exact_arguments(parts: Iterable[Declaration], found: Iterable[Finding], facts: Facts) -> Iterator[Finding]:
    """Replace AMQP's finding of a part, the first argument that differs, by one for each argument that does.

    Where AMQP shows no difference, since the user may not configure the part, only wanted arguments count.
    """
    by_name = {str(part): part for part in parts if not isinstance(part, Binding) and not part.destination}
    for finding in found:
        part = by_name.get(finding.resource)
        differing = list(differences(part, facts)) if part else []
        if finding.state is State.OK:
            differing = [each for each in differing if each.wanted is not None]
        if differing and finding.state in (State.OK, State.DIFFERS):
            yield from differing
        else:
            yield finding


def uncompared(found: Iterable[Finding], facts: Facts) -> Iterator[Finding]:
    """Report that arguments could not be compared: AMQP shows them only to a user who may configure the part."""
    parts = sum(one.state is State.OK and one.found == UNCOMPARED for one in found)
    if parts and (facts.queues is None or facts.exchanges is None):
        why = f"this user may not configure them, and {facts.why}"
        yield unknown("differs", f"arguments of {parts} exchanges and queues", why)


def differences(part: Exchange | Queue, facts: Facts) -> Iterator[Finding]:
    """Name each argument in which an existing part differs from the plan."""
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
                code="differs",
            )


def bindings(
    topology: Topology, parts: Sequence[Declaration], found: Iterable[Finding], facts: Facts
) -> Iterator[Finding]:
    """Judge the bindings of the levels, the delivery exchange and the destinations.

    :param found: what AMQP shows of the parts; a binding with a missing end is not named.
    """
    if facts.bindings is None:
        yield unknown("missing", "bindings", facts.why)
        return
    there = set(facts.bindings)
    planned = {_facts(part): part for part in parts if isinstance(part, Binding)}
    exchanges = {part.name for part in parts if isinstance(part, Exchange) and not part.destination}
    exchanges.discard(topology.delivery_exchange)
    missing = {one.resource for one in found if one.state is State.MISSING}
    for wanted, part in planned.items():
        if wanted not in there and missing.isdisjoint((str(part.source), str(part.target))):
            yield _absent(part, [one.key for one in there if one[:3] == wanted[:3]])
    # with levels that are not looked at here, for an exchange may know them too
    all_planned = {_facts(part) for part in plan(topology) if isinstance(part, Binding)}
    for extra in sorted(there - planned.keys() - all_planned):
        if extra.source in exchanges:
            yield warning(
                "differs",
                f"binding {extra.source} -> {extra.target}",
                f"with key {extra.key!r} it takes messages off their way, or doubles them; remove it",
            )


def _absent(part: Binding, keys: Sequence[str]) -> Finding:
    destination = part.target.name if part.target.destination else None
    if destination is not None:
        # a warning only, since each sender binds its destinations
        says = f"bound with key {', '.join(map(repr, keys))} alone" if keys else "missing"
        text = f"{says}; messages that wait for it are unroutable until it is bound, by an install or the next send"
        return replace(warning("unroutable", str(part), text), destination=destination)
    if not keys:
        return Finding(state=State.MISSING, resource=str(part), code="missing", remedy=_BIND)
    return Finding(
        state=State.DIFFERS, resource=str(part), argument="key", wanted=part.key, found=", ".join(keys), code="differs"
    )


_BIND = "TopologyInstallOperator makes it again; redrive() sends on what became unroutable meanwhile"


def as_planned(parts: Iterable[Declaration], facts: Facts) -> set[str]:
    """Return the parts, as text, that exist as they are planned, by the management API; not the destinations."""
    there = set(facts.bindings or ())
    return {
        str(part) for part in parts if (_facts(part) in there if isinstance(part, Binding) else _is_alike(part, facts))
    }


def _is_alike(part: Exchange | Queue, facts: Facts) -> bool:
    known = (facts.queues if isinstance(part, Queue) else facts.exchanges) or {}
    return not part.destination and part.name in known and not any(differences(part, facts))


def _facts(part: Binding) -> BindingFacts:
    return BindingFacts(part.source.name, part.target.name, isinstance(part.target, Queue), part.key)


def leaks(topology: Topology, destinations: Iterable[str], facts: Facts) -> Iterator[Finding]:
    """Name each pair of destinations, bound or to be verified, of which one also gets the messages for the other."""
    bound = [one for one in facts.bindings or () if one.source == topology.delivery_exchange]
    for name in sorted(facts.queues or ()):
        if other := topology.copied(name):
            yield warning(
                "differs",
                f"queue {name}",
                f"its name has the form of a delay's routing key, so that it gets messages for {other} at once; give it"
                " another name",
            )
    if not topology.shared:
        for one in bound:
            if one.key != topology.binding_prefix + one.target:
                yield warning(
                    "differs",
                    f"binding {one.source} -> {one.target}",
                    f"its key {one.key!r} is not exact, so that it may also get messages for others; an install"
                    " binds it exactly, then remove this one",
                )
        return
    # an address is the part of a key behind the wildcards
    addresses = (re.sub(r"^(#\.|(\*\.)+)", "", one.key) for one in bound)
    for gets, other in topology.leaks((*destinations, *addresses)):
        yield warning("differs", f"destination {gets}", f"also gets delayed messages for {other}")


_STUCK = "messages stuck in dead-lettering"


def stuck(topology: Topology, top_position: int | None, facts: Facts) -> Iterator[Finding]:
    """Name the levels with messages that dead-lettering could not pass on."""
    if not topology.quorum:
        return
    if facts.queues is None:
        yield unknown("stuck", _STUCK, facts.why)
        return
    there = [facts.queues[name] for name in topology.level_names(top_position) if name in facts.queues]
    if unseen := [queue.name for queue in there if queue.stuck is None]:
        yield unknown("stuck", _STUCK, f"the broker has no statistics (yet) of {some(unseen, separator=', ')}")
    for queue in there:
        if queue.stuck:
            yield diagnosis.stuck(f"queue {queue.name}", queue.stuck, has_members=len(queue.members) > 1)


#: The effect of a policy's setting on a level queue; DIFFERS if messages come at a wrong time or get lost by it.
_ON_LEVELS: Mapping[str, tuple[State, str]] = {
    "expires": (State.DIFFERS, "deletes the queue with all that waits in it when nobody uses it for that long"),
    "dead-letter-routing-key": (State.DIFFERS, "replaces the key by which messages find their way"),
    "message-ttl": (State.DIFFERS, "lets messages go on too early"),
    "delivery-limit": (State.WARNING, "lets a message go on, so too early, that is returned to the queue so often"),
}
_LIMITS = ("max-length", "max-length-bytes")


def policies(topology: Topology, top_position: int | None, facts: Facts) -> Iterator[Finding]:
    """Name each policy that changes what a level queue or the delivery exchange needs.

    Of an argument and a policy's setting, the smaller number is in force, and of other values the argument.
    """
    if facts.policies is None:
        yield unknown("differs", "policies", facts.why)
        return
    for name, level in topology.level_names(top_position).items():
        kind = "quorum_queues" if topology.quorum else "classic_queues"
        for policy in facts.applied(name, kind):
            for setting, value in sorted(policy.definition.items()):
                if judged := _on_level(topology, level, setting, value):
                    yield _of_policy(f"queue {name}", policy, setting, value, *judged)
    if not topology.shared:
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
        return Finding(state=state, resource=resource, argument=argument, found=value, code="differs", remedy=_NARROW)
    text = f"{policy}: {setting} {value!r} {effect}"
    return Finding(state=state, resource=resource, found=text, code="differs", remedy=_NARROW)


_NARROW = "narrow the policy's pattern so that it does not match the levels, such as ^(?!delayed[.])"


def unroutable(topology: Topology, facts: Facts, count: int | None) -> Iterator[Finding]:
    """Report messages that no destination took, and a policy whose queue is missing.

    :param count: messages in the queue for them; None if there is no such queue.
    """
    name = topology.unroutable_queue
    if count:
        yield diagnosis.unroutable(name, count)
    if count is None and topology.shared:
        applied = facts.applied(topology.delivery_exchange, "exchanges")
        if any(policy.definition.get("alternate-exchange") == name for policy in applied):
            yield Finding(
                state=State.MISSING,
                resource=f"queue {name}",
                code="missing",
                why="a policy leads messages there that have no destination, so they are lost",
            )


def receivers(topology: Topology, facts: Facts, counts: Mapping[str, int | None]) -> Iterator[Finding]:
    """Judge the queues of all bound destinations: may they refuse messages, or send them back into a level?

    A destination's queue that is full and rejects messages keeps a due message at the head of its level, with all
    messages behind it: at-least-once dead-lettering tries again until the queue takes it.

    :param counts: messages of a queue by AMQP, if known: more up to date than the management API's.
    """
    if facts.queues is None or facts.bindings is None:
        yield unknown("destination-full", "destinations that reject messages when full", facts.why)
        return
    for name in sorted(_reached(topology, facts) & facts.queues.keys()):
        queue = facts.queues[name]
        yield from _full(queue, facts, counts.get(name))
        yield from _dead_letters_back(topology, queue, facts)


def _full(queue: QueueFacts, facts: Facts, count: int | None) -> Iterator[Finding]:
    """Report a destination that rejects messages because it is full (BLOCKED), or that may become full (WARNING)."""
    if facts.setting(queue, "overflow")[0] not in _REJECTS:
        return
    ready = count if count is not None else queue.ready
    for name, used in (("max-length", ready), ("max-length-bytes", queue.ready_bytes)):
        limit, origin = facts.setting(queue, name)
        if limit is None:
            continue
        resource = f"queue {queue.name}"
        if used is not None and used >= limit:
            text = (
                f"full: {used:,} of at most {limit:,} ({name}, {origin}), and it rejects more; until it is consumed,"
                " delayed messages of all destinations wait behind those for it"
            )
            yield Finding(
                state=State.BLOCKED,
                resource=resource,
                found=text,
                code="destination-full",
                remedy="consume from it, or raise its limit",
            )
        else:
            text = (
                f"rejects messages when it is full ({name} {limit:,}, {origin}), and then blocks the delayed messages"
                " of all destinations; better let it drop or dead-letter its oldest (overflow drop-head), or have no"
                " limit"
            )
            yield warning("destination-full", resource, text)


def _dead_letters_back(topology: Topology, queue: QueueFacts, facts: Facts) -> Iterator[Finding]:
    exchange, origin = facts.setting(queue, "dead-letter-exchange")
    key, _ = facts.setting(queue, "dead-letter-routing-key")
    # a sender sees an argument of the queue by itself
    if not topology.shared and exchange == "" and key is None and origin != "an argument":
        yield warning(
            "differs",
            f"queue {queue.name}",
            f"dead-letters to the default exchange ({origin}): a message that a consumer rejects goes back into a"
            " delay level, again and again; set dead-letter-routing-key in that policy too, or make"
            " x-dead-letter-exchange an argument of the queue",
        )


def unknown(code: str, resource: str, why: str | None) -> Finding:
    """Return the finding for a part that could not be checked."""
    return Finding(state=State.UNKNOWN, resource=resource, found=why or "unknown", code=code)


def warning(code: str, resource: str, text: str) -> Finding:
    """Return the finding for a part that works, and needs a look."""
    return Finding(state=State.WARNING, resource=resource, found=text, code=code)


def coded(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Give a code to each finding that AMQP made."""
    codes = {State.MISSING: "missing", State.DIFFERS: "differs"}
    for finding in findings:
        yield finding if finding.code else replace(finding, code=codes.get(finding.state))
