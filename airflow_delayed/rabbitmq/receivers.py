"""Judging destinations' queues: whether they may refuse messages, or send them back into a level. No network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from airflow_delayed.delivery import Finding, State
from airflow_delayed.rabbitmq import checks
from airflow_delayed.rabbitmq.facts import Facts, QueueFacts
from airflow_delayed.rabbitmq.topology import Topology

_REJECTS = ("reject-publish", "reject-publish-dlx")


def judge(topology: Topology, facts: Facts, counts: Mapping[str, int | None]) -> Iterator[Finding]:
    """Judge the queues of all bound destinations.

    :param counts: messages of a queue as AMQP tells, where that was asked; it is more up to date.
    """
    if facts.queues is None or facts.bindings is None:
        yield checks.unknown("destination-rejects", "destinations that reject messages when full", facts.why)
        return
    reached = {one.target for one in facts.bindings if one.source == topology.delivery_exchange and one.is_queue}
    fans = {one.target for one in facts.bindings if one.source == topology.delivery_exchange and not one.is_queue}
    reached |= {one.target for one in facts.bindings if one.source in fans and one.is_queue}
    for name in sorted(reached & facts.queues.keys()):
        queue = facts.queues[name]
        yield from _full(queue, facts, counts.get(name))
        yield from _dead_letters_back(topology, queue, facts)


def _full(queue: QueueFacts, facts: Facts, count: int | None) -> Iterator[Finding]:
    if _setting(queue, facts, "overflow")[0] not in _REJECTS:
        return
    ready = count if count is not None else queue.ready
    for name, used in (("max-length", ready), ("max-length-bytes", queue.ready_bytes)):
        limit, origin = _setting(queue, facts, name)
        if limit is None:
            continue
        resource = f"queue {queue.name}"
        if used is not None and used >= limit:
            text = (
                f"full: {used:,} of at most {limit:,} ({name}, {origin}), and it rejects more; until it is consumed,"
                " delayed messages of all destinations wait behind those for it"
            )
            yield Finding(state=State.BLOCKED, resource=resource, found=text, code="destination-full")
        else:
            text = (
                f"rejects messages when it is full ({name} {limit:,}, {origin}), and then blocks the delayed messages"
                " of all destinations; better let it drop or dead-letter its oldest (overflow drop-head), or have no"
                " limit"
            )
            yield Finding(state=State.WARNING, resource=resource, found=text, code="destination-rejects")


def _dead_letters_back(topology: Topology, queue: QueueFacts, facts: Facts) -> Iterator[Finding]:
    exchange, origin = _setting(queue, facts, "dead-letter-exchange")
    key, _ = _setting(queue, facts, "dead-letter-routing-key")
    # what is an argument, the sender sees by itself
    if topology.entry == "direct" and exchange == "" and key is None and origin != "an argument":
        yield Finding(
            state=State.WARNING,
            resource=f"queue {queue.name}",
            found=f"dead-letters to the default exchange ({origin}): a message that a consumer rejects goes back into a"
            " delay level, again and again; set dead-letter-routing-key in that policy too, or make"
            " x-dead-letter-exchange an argument of the queue",
            code="destination-dead-letters-back",
        )


def _setting(queue: QueueFacts, facts: Facts, name: str) -> tuple[Any, str]:
    """Return a setting that is in force, and where it comes from. Of two limits the smaller one is."""
    found: list[tuple[Any, str]] = []
    if f"x-{name}" in queue.arguments:
        found.append((queue.arguments[f"x-{name}"], "an argument"))
    for policy in sorted(facts.applied(queue.name, f"{queue.type}_queues"), key=lambda policy: not policy.operator):
        if name in policy.definition:
            found.append((policy.definition[name], str(policy)))
    if not found:
        return None, ""
    return min(found) if all(isinstance(value, int) for value, _ in found) else found[0]
