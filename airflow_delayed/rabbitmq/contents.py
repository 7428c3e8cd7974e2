"""What queues that may have to go hold: of what kind they are, and which messages would be lost with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_delayed.delivery import Finding, State
from airflow_delayed.rabbitmq import plan
from airflow_delayed.rabbitmq.facts import Facts
from airflow_delayed.rabbitmq.topology import Topology

if TYPE_CHECKING:
    from pika.adapters.blocking_connection import BlockingConnection


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a topology's own queues.

    :param found: what AMQP told of them, where the management API tells nothing; none: all are as planned.
    """

    topology: Topology
    connection: BlockingConnection
    facts: Facts
    found: Sequence[Finding] = ()

    def waiting(self, names: Iterable[str]) -> dict[str, int | None]:
        """Return the queues in which messages wait, and None for one in which they may be stuck unseen."""
        counts = plan.counts(self.connection, names)
        found = {name: count for name, count in counts.items() if count is not None}
        waiting: dict[str, int | None] = {name: count for name, count in found.items() if count}
        for name in filter(self.may_be_stuck, found):
            known = (self.facts.queues or {}).get(name)
            if known is None:
                waiting.setdefault(name, None)
            # without statistics yet: a removal waits for them
            elif known.stuck:
                waiting[name] = found[name] + known.stuck
        return waiting

    def may_be_stuck(self, name: str) -> bool:
        """Whether a queue may hold messages that a passive declare does not count."""
        known = (self.facts.queues or {}).get(name)
        if known is not None:
            return known.arguments.get("x-dead-letter-strategy") == "at-least-once"
        kinds = [one for one in self._of(name) if one.argument == "x-queue-type"]
        return name != self.topology.unroutable_queue and self.topology.keeps_stuck and not kinds

    def is_classic(self, name: str) -> bool:
        """Whether a queue is known to be a classic one."""
        known = (self.facts.queues or {}).get(name)
        if known is not None:
            return known.type == "classic"
        differs = [one for one in self._of(name) if one.state is State.DIFFERS]
        if differs:
            return any(one.argument == "x-queue-type" and one.found in (None, "classic") for one in differs)
        return name != self.topology.unroutable_queue and not self.topology.is_quorum

    def _of(self, name: str) -> list[Finding]:
        return [one for one in self.found if one.resource == f"queue {name}"]
