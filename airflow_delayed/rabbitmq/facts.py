"""What is known of a broker, as data: what its management API told, and what AMQP tells without it. No network."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFacts:
    """A queue as the management API lists it. A count is None where its statistics are not (yet) there.

    Statistics are up to 5 s old, and a queue that was just declared has none.
    """

    name: str
    type: str = "classic"
    durable: bool = True
    arguments: Mapping[str, Any] = field(default_factory=dict)
    ready: int | None = None
    ready_bytes: int | None = None
    #: Messages that at-least-once dead-lettering has not got rid of; a passive declare does not count them.
    stuck: int | None = None
    consumers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeFacts:
    """An exchange as the management API lists it."""

    name: str
    type: str
    durable: bool = True
    arguments: Mapping[str, Any] = field(default_factory=dict)


class BindingFacts(NamedTuple):
    """A binding, of a queue or of an exchange."""

    source: str
    target: str
    is_queue: bool
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFacts:
    """A policy of the virtual host, or an operator policy."""

    name: str
    pattern: str
    apply_to: str = "all"
    priority: int = 0
    definition: Mapping[str, Any] = field(default_factory=dict)
    operator: bool = False

    def __str__(self) -> str:
        return f"{'operator policy' if self.operator else 'policy'} {self.name!r}"

    def matches(self, name: str, kind: str) -> bool:
        """Whether it may apply to something of this name and kind: ``exchanges``, ``quorum_queues``, ...

        RabbitMQ's patterns are PCRE; one that Python cannot read is taken to match, so that it gets looked at.
        """
        if self.apply_to not in ("all", kind) and not (self.apply_to == "queues" and kind.endswith("_queues")):
            return False
        try:
            return re.search(self.pattern, name) is not None
        except re.error:
            return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What could be learnt of a virtual host; None for what could not, and ``why`` says the reason."""

    why: str | None = None
    queues: Mapping[str, QueueFacts] | None = None
    exchanges: Mapping[str, ExchangeFacts] | None = None
    bindings: tuple[BindingFacts, ...] | None = None
    policies: tuple[PolicyFacts, ...] | None = None
    #: State of each feature flag; administrators alone are told.
    flags: Mapping[str, str] | None = None

    def applied(self, name: str, kind: str) -> tuple[PolicyFacts, ...]:
        """Return the policies that apply to something: of each sort the one with the highest priority."""
        found: list[PolicyFacts] = []
        for operator in (False, True):
            matching = [p for p in self.policies or () if p.operator is operator and p.matches(name, kind)]
            found += sorted(matching, key=lambda policy: -policy.priority)[:1]
        return tuple(found)


def queues(answer: Iterable[Mapping[str, Any]]) -> dict[str, QueueFacts]:
    """Read the management API's list of queues."""
    return {
        found["name"]: QueueFacts(
            name=found["name"],
            type=found.get("type", "classic"),
            durable=found.get("durable", True),
            arguments=found.get("arguments") or {},
            ready=found.get("messages_ready"),
            ready_bytes=found.get("message_bytes_ready"),
            stuck=found.get("messages_dlx"),
            consumers=found.get("consumers"),
        )
        for found in answer
    }


def exchanges(answer: Iterable[Mapping[str, Any]]) -> dict[str, ExchangeFacts]:
    """Read the management API's list of exchanges."""
    return {
        found["name"]: ExchangeFacts(
            name=found["name"],
            type=found["type"],
            durable=found.get("durable", True),
            arguments=found.get("arguments") or {},
        )
        for found in answer
    }


def bindings(answer: Iterable[Mapping[str, Any]]) -> tuple[BindingFacts, ...]:
    """Read the management API's list of bindings, without those of the default exchange."""
    return tuple(
        BindingFacts(found["source"], found["destination"], found["destination_type"] == "queue", found["routing_key"])
        for found in answer
        if found["source"]
    )


def policies(answer: Iterable[Mapping[str, Any]], *, operator: bool) -> tuple[PolicyFacts, ...]:
    """Read the management API's list of policies, or of operator policies."""
    return tuple(
        PolicyFacts(
            name=found["name"],
            pattern=found["pattern"],
            apply_to=found.get("apply-to", "all"),
            priority=found.get("priority", 0),
            definition=found.get("definition") or {},
            operator=operator,
        )
        for found in answer
    )
