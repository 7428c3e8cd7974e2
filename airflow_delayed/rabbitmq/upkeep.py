"""Installing, verifying, counting and uninstalling a topology on one broker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from airflow_delayed.delivery import Finding, State, TopologyReport
from airflow_delayed.errors import MessagesWaiting, TopologyError, TransportUnavailable
from airflow_delayed.rabbitmq import checks, levels, plan, receivers, unroutable
from airflow_delayed.rabbitmq.contents import Contents
from airflow_delayed.rabbitmq.facts import BindingFacts, Facts
from airflow_delayed.rabbitmq.management import Management
from airflow_delayed.rabbitmq.plan import Declaration, Exchange, Queue
from airflow_delayed.rabbitmq.removal import NotEmpty, Removal, rebind
from airflow_delayed.rabbitmq.topology import Topology
from airflow_delayed.rabbitmq.waiting import Waiting, waiting

if TYPE_CHECKING:
    from pika.adapters.blocking_connection import BlockingConnection

_REPLACE = "replace=True deletes and makes anew what differs, as long as no messages wait there"
_MOVE = "Move them on first (migrate(), redrive()) or let them fall due"


@dataclass(frozen=True, slots=True)
class Upkeep:
    """What a hook does to a topology, over an open connection and, if there is one, the management API.

    :param management: None without it; ``why`` says the reason.
    """

    conn_id: str
    topology: Topology
    connection: BlockingConnection
    management: Management | None = None
    why: str | None = None

    # verify and count

    def verify(self, destinations: Sequence[str], top_level: int, version: Callable[[], str | None]) -> TopologyReport:
        """Compare what is there with what messages need that enter at ``top_level`` or below.

        :param version: asks for the broker's version, without the management API.
        """
        parts = plan.plan(self.topology, destinations, top_level=top_level)
        found = plan.compare(self.connection, parts)
        broker = (self.management.version() if self.management else None) or version()
        facts = self._facts(flags=checks.wants_flags(broker))
        return TopologyReport(tuple(self._judge(parts, found, facts, broker, destinations, top_level)))

    def _judge(
        self,
        parts: Sequence[Declaration],
        found: Sequence[Finding],
        facts: Facts,
        broker: str | None,
        destinations: Sequence[str],
        top_level: int,
    ) -> Iterable[Finding]:
        there = [one for one in parts if isinstance(one, Queue) and one.destination]
        names = [self.topology.unroutable_queue, *(queue.name for queue in there)]
        counts = plan.counts(self.connection, names)
        yield from checks.coded(checks.exact_arguments(parts, found, facts))
        yield from checks.uncompared(found, facts)
        yield from checks.version(broker)
        yield from checks.flags(self.topology, broker, facts)
        yield from checks.bindings(self.topology, parts, found, facts)
        yield from checks.leaks(self.topology, destinations, facts)
        yield from receivers.judge(self.topology, facts, counts)
        yield from checks.stuck(self.topology, top_level, facts)
        yield from checks.policies(self.topology, top_level, facts)
        yield from checks.unroutable(self.topology, facts, counts[self.topology.unroutable_queue])

    def waiting(self, now: datetime) -> Waiting:
        """Count what waits in each level."""
        counts = plan.counts(self.connection, self._queues())
        if all(count is None for count in counts.values()):
            missing = Finding(state=State.MISSING, resource=f"queue {self.topology.level_name(0)}")
            raise TopologyError(self.conn_id, TopologyReport((missing,)), topology=self.topology.name)
        queues = self.management.queues() if self.management else None
        return waiting(self.topology, now, counts, queues, self.why or "the management API does not list the queues")

    # install

    def install(
        self,
        destinations: Sequence[str],
        *,
        create_destinations: bool,
        dry_run: bool,
        replace_differing: bool,
        unroutable_policy: bool,
    ) -> TopologyReport:
        """Make what is missing; with ``replace_differing`` also what differs."""
        by_policy = unroutable_policy and not self.topology.unroutable
        parts = plan.plan(self.topology, destinations, unroutable=by_policy)
        facts = self._facts()
        policy = self._policy(facts) if by_policy else None
        found = tuple(checks.coded(checks.exact_arguments(parts, plan.compare(self.connection, parts), facts)))
        contents = Contents(self.topology, self.connection, facts, found)
        differing = _differing(parts, found) if replace_differing else ()
        blocked = self._blocked(differing, contents)
        if differing and not blocked:
            names = {str(part) for part in differing}
            made = tuple(Finding(state=State.MISSING, resource=name) for name in sorted(names))
            found = (*(one for one in found if one.resource not in names), *made)
        elif blocked and not dry_run:
            raise MessagesWaiting(
                self.conn_id,
                blocked,
                f"Nothing was changed. {_MOVE}, then replace what differs{self._unseen(blocked)}",
            )
        state = State.PLANNED if dry_run else State.CREATED
        findings = [
            *self._deletions(differing if not blocked else (), facts, done=not dry_run),
            *plan.todo(parts, found, create_destinations=create_destinations, done=state),
            *(_waits(queue, count) for queue, count in blocked.items()),
        ]
        if policy:
            findings.append(replace(policy, state=state) if policy.state is State.MISSING else policy)
        report = TopologyReport(tuple(findings))
        if dry_run:
            return report
        if report.problems:
            raise TopologyError(self.conn_id, report, _REPLACE, topology=self.topology.name)
        if differing:
            self._remove(differing, contents, parts, "then replace what differs")
        plan.apply(self.connection, parts)
        if differing:
            rebind(self.connection, self._destination_bindings(facts))
        if policy and policy.state is State.MISSING and self.management:
            try:
                self.management.put_policy(unroutable.policy(self.topology))
            except TransportUnavailable as error:
                raise TransportUnavailable(
                    f"connection {self.conn_id!r}: all but the policy is made: {error}"
                ) from error
        return report

    def _policy(self, facts: Facts) -> Finding:
        if facts.policies is None:
            raise TransportUnavailable(
                f"connection {self.conn_id!r}: unroutable_policy needs the management API, and a user with the tag"
                f" policymaker: {facts.why}. Nothing was changed"
            )
        return unroutable.compare(self.topology, facts)

    def _blocked(self, differing: Sequence[Exchange | Queue], contents: Contents) -> dict[str, int | None]:
        """Return the queues in which messages wait, or may do so, that would be lost if these parts were replaced."""
        if not differing:
            return {}
        names = [part.name for part in differing if isinstance(part, Queue)]
        if any(isinstance(part, Exchange) and part.name == self.topology.delivery_exchange for part in differing) or (
            # at-most-once dead-lettering drops what it cannot route in that moment
            not self.topology.keeps_stuck
        ):
            names = self._queues()
        return contents.waiting(names)

    def _deletions(self, differing: Sequence[Exchange | Queue], facts: Facts, *, done: bool) -> Iterable[Finding]:
        for part in differing:
            yield Finding(state=State.DELETED if done else State.WOULD_DELETE, resource=str(part))
        if facts.bindings is None and any(part.name == self.topology.delivery_exchange for part in differing):
            yield Finding(
                state=State.UNKNOWN,
                resource=f"bindings of exchange {self.topology.delivery_exchange}",
                found=f"those of destinations that are not named here have to be made again: {facts.why}",
                code="binding",
            )

    # uninstall

    def uninstall(self, *, force: bool, dry_run: bool) -> TopologyReport:
        """Delete the parts of the topology that are there, but no destination."""
        parts = plan.plan(self.topology, unroutable=True)
        missing = {one.resource for one in plan.compare(self.connection, parts) if one.state is State.MISSING}
        there = tuple(part for part in parts if not isinstance(part, plan.Binding) and str(part) not in missing)
        facts = self._facts()
        contents = Contents(self.topology, self.connection, facts)
        blocked = contents.waiting(part.name for part in there if isinstance(part, Queue))
        findings = [*self._would_go(there, facts), *(_waits(queue, count) for queue, count in blocked.items())]
        if dry_run:
            return TopologyReport(tuple(findings))
        if blocked and not force:
            raise MessagesWaiting(
                self.conn_id,
                blocked,
                f"Nothing was deleted. {_MOVE}; force=True deletes them with the queues{self._unseen(blocked)}",
            )
        if force:
            self._delete(there)
        else:
            kept = tuple(p for p in parts if not isinstance(p, plan.Binding) or _ends(p) <= {str(t) for t in there})
            kept = tuple(p for p in kept if isinstance(p, plan.Binding) or p in there)
            self._remove(there, contents, kept, "then uninstall")
        policy = unroutable.policy(self.topology)
        if self.management and any(one.resource == str(policy) for one in findings):
            try:
                self.management.delete_policy(policy.name)
            except TransportUnavailable as error:
                raise TransportUnavailable(
                    f"connection {self.conn_id!r}: all but the policy is deleted: {error}"
                ) from error
        return TopologyReport(tuple(_done(one) for one in findings))

    def _would_go(self, there: Sequence[Exchange | Queue], facts: Facts) -> Iterable[Finding]:
        for one in self._destination_bindings(facts):
            yield Finding(state=State.WOULD_DELETE, resource=f"binding {one.source} -> {one.target}")
        for part in there:
            yield Finding(state=State.WOULD_DELETE, resource=str(part))
        ours = unroutable.policy(self.topology)
        if any(policy.name == ours.name and not policy.operator for policy in facts.policies or ()):
            yield Finding(state=State.WOULD_DELETE, resource=str(ours))
        elif facts.policies is None and not self.topology.unroutable:
            yield Finding(state=State.UNKNOWN, resource=str(ours), found=facts.why, code="policy")

    def _delete(self, there: Iterable[Exchange | Queue]) -> None:
        channel = self.connection.channel()
        for part in sorted(there, key=lambda part: isinstance(part, Queue)):
            if isinstance(part, Queue):
                channel.queue_delete(part.name)
            else:
                channel.exchange_delete(part.name)
        channel.close()

    # shared

    def _unseen(self, blocked: Mapping[str, int | None]) -> str:
        return f". As to what is unknown: {self.why}" if self.why and None in blocked.values() else ""

    def _facts(self, *, flags: bool = False) -> Facts:
        return self.management.survey(flags=flags) if self.management else Facts(why=self.why)

    def _queues(self) -> list[str]:
        names = [self.topology.level_name(level) for level in range(levels.BITS)]
        return [*names, self.topology.unroutable_queue]

    def _destination_bindings(self, facts: Facts) -> list[BindingFacts]:
        return [one for one in facts.bindings or () if one.source == self.topology.delivery_exchange]

    def _remove(
        self,
        parts: Sequence[Exchange | Queue],
        contents: Contents,
        put_back: Sequence[Declaration],
        then: str,
    ) -> None:
        # from the highest level down: what moves on meanwhile comes to a queue that is still there
        queues = [part.name for part in reversed(parts) if isinstance(part, Queue)]
        removal = Removal(
            self.connection,
            queues=queues,
            classic=set(filter(contents.is_classic, queues)),
            exchanges=[part.name for part in reversed(parts) if isinstance(part, Exchange)],
            parts=put_back,
            bindings=self._destination_bindings(contents.facts),
        )
        try:
            removal.run(self.management, stuck_in=filter(contents.may_be_stuck, queues))
        except NotEmpty as error:
            raise MessagesWaiting(
                self.conn_id, error.counts, f"They came meanwhile, and all is as it was. {_MOVE}, {then}"
            ) from error


def _differing(parts: Iterable[Declaration], found: Iterable[Finding]) -> tuple[Exchange | Queue, ...]:
    names = {one.resource for one in found if one.state is State.DIFFERS}
    return tuple(
        part for part in parts if not isinstance(part, plan.Binding) and not part.destination and str(part) in names
    )


def _ends(part: plan.Binding) -> set[str]:
    return {str(part.source), str(part.target)}


def _waits(queue: str, count: int | None) -> Finding:
    if count is None:
        why = "whether messages are stuck in dead-lettering in it, the management API alone tells"
        return Finding(state=State.UNKNOWN, resource=f"queue {queue}", found=why, code="waiting")
    return Finding(
        state=State.BLOCKED, resource=f"queue {queue}", found=f"{count:,} messages wait in it", code="waiting"
    )


def _done(finding: Finding) -> Finding:
    if finding.state is State.WOULD_DELETE:
        return replace(finding, state=State.DELETED)
    if finding.code == "waiting" and finding.state is State.BLOCKED:
        return replace(finding, state=State.WARNING, found=str(finding.found).replace(" wait in it", " went with it"))
    return finding
