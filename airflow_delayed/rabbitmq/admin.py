"""Administration of a topology on one broker: install, verify, count and uninstall, without losing a message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from pika.exceptions import ChannelClosedByBroker

from airflow_delayed.delivery import Finding, State, TopologyReport
from airflow_delayed.errors import MessagesWaiting, TopologyError, TransportUnavailable
from airflow_delayed.rabbitmq import cluster, declare, verify
from airflow_delayed.rabbitmq.connection import server_version
from airflow_delayed.rabbitmq.declare import Binding, Declaration, Exchange, Queue
from airflow_delayed.rabbitmq.management import BindingFacts, Facts, Management, PolicyFacts, survey
from airflow_delayed.rabbitmq.topology import Topology
from airflow_delayed.rabbitmq.waiting import Waiting, waiting

if TYPE_CHECKING:
    from pika.adapters.blocking_connection import BlockingConnection

#: Seconds that the answers to a ``verify`` may take longer than the quickest, in all. A queue whose leader hangs takes
#: half a second, and a level is such a queue.
_PATIENCE = 3.0
_REPLACE = "replace=True deletes and makes again what differs, as long as no messages wait there"
_NOTHING = Facts()
_MOVE = "Let them fall due, or redrive() what no queue took"
#: Seconds after which the broker's statistics, which it makes every 5 s, have what was stuck before; and for how many
#: such times they are waited for.
_STATISTICS_SECONDS, _STATISTICS_TRIES = 6.0, 5


@dataclass(frozen=True, slots=True)
class TopologyAdmin:
    """Administrates a topology over an open connection and, if there is one, the management API.

    :param management: None without it, with the reason in ``absent``.
    """

    conn_id: str
    topology: Topology
    connection: BlockingConnection
    management: Management | None = None
    absent: Facts = _NOTHING

    # verify and count

    def verify(self, destinations: Sequence[str], top_position: int | None) -> TopologyReport:
        """Compare the broker with what messages need that enter at ``top_position`` or below; None: at any."""
        parts = declare.plan(self.topology, destinations, top_position=top_position)
        broker = (self.management.version() if self.management else None) or server_version(self.connection)
        facts = survey(self.management, self.absent, flags=verify.wants_flags(broker))
        as_planned = verify.as_planned(parts, facts)
        found = declare.compare(self.connection, parts, patience=_PATIENCE, as_planned=as_planned)
        left = sum(not isinstance(part, Binding) for part in parts) - len(found)
        there = [] if left else [one.name for one in parts if isinstance(one, Queue) and one.destination]
        counts = declare.counts(self.connection, [self.topology.unroutable_queue, *there])
        findings = verify.judge(
            self.topology, destinations, parts, found, top_position, facts=facts, broker=broker, counts=counts
        )
        return TopologyReport((*findings, *verify.unanswered(left)))

    def waiting(self, now: datetime) -> Waiting:
        """Count the messages in each level."""
        counts = declare.counts(self.connection, self._queues())
        facts = self.management.list_queues() if self.management else self.absent
        # a classic queue whose node is down is listed, and AMQP says that there is none
        if all(count is None and name not in (facts.queues or ()) for name, count in counts.items()):
            missing = Finding(state=State.MISSING, resource=f"queue {self.topology.level_name(0)}")
            raise TopologyError(self.conn_id, TopologyReport((missing,)), topology=self.topology.name)
        return waiting(self.topology, now, counts, facts)

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
        """Make each part that is missing; with ``replace_differing`` make those again that differ."""
        by_policy = unroutable_policy and self.topology.shared
        parts = declare.plan(self.topology, destinations, unroutable=by_policy)
        facts = survey(self.management, self.absent)
        policy = self._policy(facts) if by_policy else None
        as_planned = verify.as_planned(parts, facts)
        by_amqp = declare.compare(self.connection, parts, as_planned=as_planned)
        found = tuple(verify.coded(verify.exact_arguments(parts, by_amqp, facts)))
        contents = QueueContents(self.topology, self.connection, facts, found)
        differing = _differing(parts, found) if replace_differing else ()
        blocked = self._blocked(differing, contents, final=not dry_run)
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
            *declare.todo(parts, found, create_destinations=create_destinations, done=state),
            *(_waiting_finding(queue, count) for queue, count in blocked.items()),
        ]
        if policy:
            findings.append(replace(policy, state=state) if policy.state is State.MISSING else policy)
        report = TopologyReport(tuple(findings))
        if dry_run:
            return report
        if report.problems:
            raise TopologyError(self.conn_id, report, _REPLACE, topology=self.topology.name)
        lost = self._delete(differing)
        # the management API may still list what AMQP does not find, with its bindings
        missing = {one.resource for one in by_amqp if one.state is State.MISSING}
        make = [part for part in parts if str(part) not in as_planned or not missing.isdisjoint(_ends(part))]
        declare.apply(self.connection, parts if differing else make)
        if differing:
            _rebind(self.connection, self._destination_bindings(facts))
        if policy and policy.state is State.MISSING and self.management:
            try:
                self.management.put_policy(policy_for_unroutable(self.topology))
            except TransportUnavailable as error:
                raise TransportUnavailable(
                    f"connection {self.conn_id!r}: all but the policy is made: {error}"
                ) from error
        return TopologyReport((*report, *(_lost_finding(queue, count) for queue, count in lost.items())))

    def _policy(self, facts: Facts) -> Finding:
        if facts.policies is None:
            raise TransportUnavailable(
                f"connection {self.conn_id!r}: unroutable_policy needs the management API, and a user with the tag"
                f" policymaker: {facts.why}. Nothing was changed"
            )
        return compare_policy(self.topology, facts)

    def _blocked(
        self, differing: Sequence[Exchange | Queue], contents: QueueContents, *, final: bool
    ) -> dict[str, int | None]:
        """Return the queues that have, or may have, messages which would be lost if these parts were replaced.

        :param final: see :meth:`_waiting`.
        """
        if not differing:
            return {}
        names = [part.name for part in differing if isinstance(part, Queue)]
        exchanges = [part for part in differing if isinstance(part, Exchange)]
        # until it has its bindings again, such an exchange leads messages to the unroutable messages
        if any(part.arguments or part.name == self.topology.delivery_exchange for part in exchanges) or (
            # at-most-once dead-lettering drops a message that it cannot route in that moment
            not self.topology.quorum
        ):
            names = self._queues()
        cluster.require_available(self.conn_id, contents.facts, names, "Nothing was changed")
        return self._waiting(names, contents, final=final)

    def _deletions(self, differing: Sequence[Exchange | Queue], facts: Facts, *, done: bool) -> Iterable[Finding]:
        for part in differing:
            yield Finding(state=State.DELETED if done else State.WOULD_DELETE, resource=str(part))
        if facts.bindings is None and any(part.name == self.topology.delivery_exchange for part in differing):
            yield Finding(
                state=State.UNKNOWN,
                resource=f"bindings of exchange {self.topology.delivery_exchange}",
                found=f"those of destinations that are not named here have to be made again: {facts.why}",
                code="missing",
            )

    # uninstall

    def uninstall(self, *, force: bool, dry_run: bool) -> TopologyReport:
        """Delete the existing parts of the topology, but no destination.

        A message that arrives after the last count goes with its queue, and the report says so.
        """
        parts = declare.plan(self.topology, unroutable=True)
        missing = {one.resource for one in declare.compare(self.connection, parts) if one.state is State.MISSING}
        there = tuple(part for part in parts if not isinstance(part, Binding) and str(part) not in missing)
        facts = survey(self.management, self.absent)
        contents = QueueContents(self.topology, self.connection, facts)
        if not force:
            cluster.require_available(self.conn_id, facts, self._queues(), "Nothing was deleted")
        queues = [part.name for part in there if isinstance(part, Queue)]
        blocked = self._waiting(queues, contents, final=not (force or dry_run))
        findings = [
            *self._would_go(there, facts),
            *(_waiting_finding(queue, count) for queue, count in blocked.items()),
        ]
        if dry_run:
            return TopologyReport(tuple(findings))
        if blocked and not force:
            raise MessagesWaiting(
                self.conn_id,
                blocked,
                f"Nothing was deleted. {_MOVE}; force=True deletes them with the queues{self._unseen(blocked)}",
            )
        lost = self._delete(there)
        policy = policy_for_unroutable(self.topology)
        if self.management and any(one.resource == str(policy) for one in findings):
            try:
                self.management.delete_policy(policy.name)
            except TransportUnavailable as error:
                raise TransportUnavailable(
                    f"connection {self.conn_id!r}: all but the policy is deleted: {error}"
                ) from error
        done = [_lost_finding(queue, count) for queue, count in lost.items() if queue not in blocked]
        return TopologyReport((*(_done(one) for one in findings), *done))

    def _would_go(self, there: Sequence[Exchange | Queue], facts: Facts) -> Iterable[Finding]:
        for one in self._destination_bindings(facts):
            yield Finding(state=State.WOULD_DELETE, resource=f"binding {one.source} -> {one.target}")
        for part in there:
            yield Finding(state=State.WOULD_DELETE, resource=str(part))
        ours = policy_for_unroutable(self.topology)
        if any(policy.name == ours.name and not policy.operator for policy in facts.policies or ()):
            yield Finding(state=State.WOULD_DELETE, resource=str(ours))
        elif facts.policies is None and self.topology.shared:
            yield Finding(state=State.UNKNOWN, resource=str(ours), found=facts.why, code="differs")

    # shared

    def _waiting(self, names: Sequence[str], contents: QueueContents, *, final: bool) -> dict[str, int | None]:
        """Return the number of messages in each of these queues that has some; None where it is unknown.

        :param final: they are deleted next: count again, with statistics of what was stuck at the first count.
        """
        waiting = contents.waiting(names)
        if waiting or not final or not any(map(contents.may_be_stuck, names)):
            return waiting
        for _ in range(_STATISTICS_TRIES):
            self.connection.sleep(_STATISTICS_SECONDS)
            waiting = replace(contents, facts=survey(self.management, self.absent)).waiting(names, settled=True)
            if None not in waiting.values():
                break
        return waiting

    def _delete(self, parts: Sequence[Exchange | Queue]) -> dict[str, int]:
        """Delete parts, and return how many messages went with each queue that had some."""
        channel, lost = self.connection.channel(), {}
        # exchanges first: a sender that uses one of them from now on gets an error. Then from the highest level down
        for exchange in (part for part in reversed(parts) if isinstance(part, Exchange)):
            channel.exchange_delete(exchange.name)
        for queue in (part for part in reversed(parts) if isinstance(part, Queue)):
            if count := channel.queue_delete(queue.name).method.message_count:
                lost[queue.name] = count
        channel.close()
        return lost

    def _unseen(self, blocked: Mapping[str, int | None]) -> str:
        why = self.absent.why
        return f". As to what is unknown: {why}" if why and None in blocked.values() else ""

    def _queues(self) -> list[str]:
        return [*self.topology.level_names(), self.topology.unroutable_queue]

    def _destination_bindings(self, facts: Facts) -> list[BindingFacts]:
        return [one for one in facts.bindings or () if one.source == self.topology.delivery_exchange]


def _differing(parts: Iterable[Declaration], found: Iterable[Finding]) -> tuple[Exchange | Queue, ...]:
    names = {one.resource for one in found if one.state is State.DIFFERS}
    return tuple(
        part for part in parts if not isinstance(part, Binding) and not part.destination and str(part) in names
    )


def _ends(part: Declaration) -> set[str]:
    """Return the exchanges and queues that a binding joins; of another part itself."""
    return {str(part.source), str(part.target)} if isinstance(part, Binding) else {str(part)}


def _done(finding: Finding) -> Finding:
    if finding.state is State.WOULD_DELETE:
        return replace(finding, state=State.DELETED)
    if finding.state is State.BLOCKED:
        return replace(finding, state=State.WARNING, found=str(finding.found).replace(" wait in it", " went with it"))
    return finding


def policy_for_unroutable(topology: Topology) -> PolicyFacts:
    """Return the policy that leads unroutable messages into a queue, on a topology that others declare too.

    It has the name of the exchange and of the queue to which it leads.
    """
    name = topology.unroutable_queue
    pattern = f"^{topology.delivery_exchange.replace('.', '[.]')}$"
    return PolicyFacts(name=name, pattern=pattern, apply_to="exchanges", definition={"alternate-exchange": name})


def compare_policy(topology: Topology, facts: Facts) -> Finding:
    """Return whether that policy exists, or another policy is in its way.

    :param facts: with the policies.
    """
    wanted = policy_for_unroutable(topology)
    for there in facts.applied(topology.delivery_exchange, "exchanges"):
        if there.definition.get("alternate-exchange") == wanted.name:
            return Finding(state=State.OK, resource=str(there))
        if not there.operator and there.name != wanted.name:
            return Finding(
                state=State.DIFFERS,
                resource=f"exchange {topology.delivery_exchange}",
                argument="policy",
                wanted=wanted.name,
                found=f"{there.name}; one policy alone applies, so add alternate-exchange {wanted.name} to it",
                code="differs",
            )
    return Finding(state=State.MISSING, resource=str(wanted))


def _waiting_finding(queue: str, count: int | None) -> Finding:
    """Return the finding of a queue whose deletion would lose messages; None: whether there are some is unknown."""
    if count is None:
        why = "whether messages wait in it, or are stuck in dead-lettering, the management API alone tells"
        return Finding(state=State.UNKNOWN, resource=f"queue {queue}", found=why)
    return Finding(state=State.BLOCKED, resource=f"queue {queue}", found=f"{count:,} messages wait in it")


def _lost_finding(queue: str, count: int) -> Finding:
    """Return the finding of a queue that was deleted with messages that came after the last count."""
    found = f"{count:,} messages came meanwhile and went with it"
    return Finding(state=State.WARNING, resource=f"queue {queue}", found=found)


@dataclass(frozen=True, slots=True)
class QueueContents:
    """The kinds and the messages of a topology's own queues, which may have to be deleted.

    :param found: AMQP's findings of the queues, where the management API shows none; empty: all are as planned.
    """

    topology: Topology
    connection: BlockingConnection
    facts: Facts
    found: Sequence[Finding] = ()

    def waiting(self, names: Iterable[str], *, settled: bool = False) -> dict[str, int | None]:
        """Return the number of messages in each queue that has some; None where AMQP may not count all of them.

        :param settled: the broker had time for statistics: a queue without any may have messages.
        """
        counts = declare.counts(self.connection, names)
        found = {name: count for name, count in counts.items() if count is not None}
        waiting: dict[str, int | None] = {name: count for name, count in found.items() if count}
        leaderless = {queue.name for queue in cluster.unavailable((self.facts.queues or {}).values())}
        unknown = [name for name in found if self.facts.silent or name in leaderless]
        waiting.update(dict.fromkeys(unknown))
        for name in filter(self.may_be_stuck, found):
            known = (self.facts.queues or {}).get(name)
            if known is None or name in leaderless or (settled and known.stuck is None):
                waiting.setdefault(name, None)
            elif known.stuck:
                waiting[name] = found[name] + known.stuck
        return waiting

    def may_be_stuck(self, name: str) -> bool:
        """Whether a queue may hold messages that a passive declare does not count."""
        known = (self.facts.queues or {}).get(name)
        if known is not None:
            return known.arguments.get("x-dead-letter-strategy") == "at-least-once"
        kinds = [one for one in self._of(name) if one.argument == "x-queue-type"]
        return name != self.topology.unroutable_queue and self.topology.quorum and not kinds

    def _of(self, name: str) -> list[Finding]:
        return [one for one in self.found if one.resource == f"queue {name}"]


def _rebind(connection: BlockingConnection, bindings: Iterable[BindingFacts]) -> None:
    """Make bindings again if both ends exist."""
    channel = connection.channel()
    for one in bindings:
        try:
            if one.is_queue:
                channel.queue_bind(one.target, one.source, one.key)
            else:
                channel.exchange_bind(one.target, one.source, one.key)
        except ChannelClosedByBroker as error:
            if error.reply_code != declare.NOT_FOUND:
                raise
            channel = connection.channel()
    channel.close()
