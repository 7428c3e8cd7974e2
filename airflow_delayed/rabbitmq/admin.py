"""Administration of a topology on one broker: install, verify, count and uninstall, without losing a message."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pika.exceptions import ChannelClosedByBroker

from airflow_delayed.delivery import Finding, State, TopologyReport
from airflow_delayed.errors import MessagesWaiting, TopologyError, TransportUnavailable
from airflow_delayed.rabbitmq import cluster, declare, verify
from airflow_delayed.rabbitmq.connection import server_version
from airflow_delayed.rabbitmq.declare import Binding, Declaration, Exchange, Queue
from airflow_delayed.rabbitmq.management import BindingFacts, Facts, Management, PolicyFacts, survey
from airflow_delayed.rabbitmq.node_clocks import NodeClocks
from airflow_delayed.rabbitmq.properties import DELIVERY_COUNT, ReceivedProperties
from airflow_delayed.rabbitmq.topology import Topology
from airflow_delayed.rabbitmq.waiting import Waiting, waiting

if TYPE_CHECKING:
    from pika import BasicProperties
    from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection

#: Seconds that the answers to a ``verify`` may take longer than the quickest, in all. A queue whose leader hangs takes
#: half a second, and a level is such a queue.
_PATIENCE = 3.0
_REPLACE = "replace=True deletes and makes again what differs, as long as no messages wait there"
_NOTHING = Facts()
_MOVE = "Let them fall due, or redrive() what no queue took"
#: Seconds to wait for statistics from after the consumers came; the broker makes them every 5 s.
_STATISTICS_SECONDS = 30.0
#: Seconds to wait until the broker cancels the consumer of a deleted queue; its messages come before that.
_CANCEL_SECONDS = 5.0


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

    def verify(self, destinations: Sequence[str], top_position: int | None, clocks: NodeClocks) -> TopologyReport:
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
        return TopologyReport((*findings, *verify.unanswered(left), *clocks.judge(self.absent.why)))

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
        by_policy = unroutable_policy and not self.topology.unroutable
        parts = declare.plan(self.topology, destinations, unroutable=by_policy)
        facts = survey(self.management, self.absent)
        policy = self._policy(facts) if by_policy else None
        as_planned = verify.as_planned(parts, facts)
        by_amqp = declare.compare(self.connection, parts, as_planned=as_planned)
        found = tuple(verify.coded(verify.exact_arguments(parts, by_amqp, facts)))
        contents = QueueContents(self.topology, self.connection, facts, found)
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
        if differing:
            self._remove(differing, contents, parts, "then replace what differs")
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
        return report

    def _policy(self, facts: Facts) -> Finding:
        if facts.policies is None:
            raise TransportUnavailable(
                f"connection {self.conn_id!r}: unroutable_policy needs the management API, and a user with the tag"
                f" policymaker: {facts.why}. Nothing was changed"
            )
        return compare_policy(self.topology, facts)

    def _blocked(self, differing: Sequence[Exchange | Queue], contents: QueueContents) -> dict[str, int | None]:
        """Return the queues that have, or may have, messages which would be lost if these parts were replaced."""
        if not differing:
            return {}
        names = [part.name for part in differing if isinstance(part, Queue)]
        exchanges = [part for part in differing if isinstance(part, Exchange)]
        # until it has its bindings again, such an exchange leads messages to the unroutable messages
        if any(part.arguments or part.name == self.topology.delivery_exchange for part in exchanges) or (
            # at-most-once dead-lettering drops a message that it cannot route in that moment
            not self.topology.keeps_stuck
        ):
            names = self._queues()
        cluster.require_available(self.conn_id, contents.facts, names, "Nothing was changed")
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
        """Delete the existing parts of the topology, but no destination."""
        parts = declare.plan(self.topology, unroutable=True)
        missing = {one.resource for one in declare.compare(self.connection, parts) if one.state is State.MISSING}
        there = tuple(part for part in parts if not isinstance(part, Binding) and str(part) not in missing)
        facts = survey(self.management, self.absent)
        contents = QueueContents(self.topology, self.connection, facts)
        if not force:
            cluster.require_available(self.conn_id, facts, self._queues(), "Nothing was deleted")
        blocked = contents.waiting(part.name for part in there if isinstance(part, Queue))
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
        if force:
            self._delete(there)
        else:
            names = set(map(str, there))
            kept = tuple(part for part in parts if _ends(part) <= names)
            self._remove(there, contents, kept, "then uninstall")
        policy = policy_for_unroutable(self.topology)
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
        ours = policy_for_unroutable(self.topology)
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
        why = self.absent.why
        return f". As to what is unknown: {why}" if why and None in blocked.values() else ""

    def _queues(self) -> list[str]:
        return [*self.topology.level_names(), self.topology.unroutable_queue]

    def _destination_bindings(self, facts: Facts) -> list[BindingFacts]:
        return [one for one in facts.bindings or () if one.source == self.topology.delivery_exchange]

    def _remove(
        self,
        parts: Sequence[Exchange | Queue],
        contents: QueueContents,
        put_back: Sequence[Declaration],
        then: str,
    ) -> None:
        # from the highest level down: a message that moves on meanwhile comes to a queue that still exists
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
        except _NotEmpty as error:
            raise MessagesWaiting(
                self.conn_id, error.counts, f"They came meanwhile, and all is as it was. {_MOVE}, {then}"
            ) from error


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
    if finding.code == "waiting" and finding.state is State.BLOCKED:
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
                code="policy",
            )
    return Finding(state=State.MISSING, resource=str(wanted))


def _waiting_finding(queue: str, count: int | None) -> Finding:
    """Return the finding of a queue whose deletion would lose messages; None: whether there are some is unknown."""
    if count is None:
        why = "whether messages wait in it, or are stuck in dead-lettering, the management API alone tells"
        return Finding(state=State.UNKNOWN, resource=f"queue {queue}", found=why, code="waiting")
    return Finding(
        state=State.BLOCKED, resource=f"queue {queue}", found=f"{count:,} messages wait in it", code="waiting"
    )


@dataclass(frozen=True, slots=True)
class QueueContents:
    """The kinds and the messages of a topology's own queues, which may have to be deleted.

    :param found: AMQP's findings of the queues, where the management API shows none; empty: all are as planned.
    """

    topology: Topology
    connection: BlockingConnection
    facts: Facts
    found: Sequence[Finding] = ()

    def waiting(self, names: Iterable[str]) -> dict[str, int | None]:
        """Return the number of messages in each queue that has some; None where AMQP may not count all of them."""
        counts = declare.counts(self.connection, names)
        found = {name: count for name, count in counts.items() if count is not None}
        waiting: dict[str, int | None] = {name: count for name, count in found.items() if count}
        leaderless = {queue.name for queue in cluster.unavailable((self.facts.queues or {}).values())}
        unknown = [name for name in found if self.facts.silent or name in leaderless]
        waiting.update(dict.fromkeys(unknown))
        for name in filter(self.may_be_stuck, found):
            known = (self.facts.queues or {}).get(name)
            if known is None or name in leaderless:
                waiting.setdefault(name, None)
            # without statistics yet the queue counts as empty: a removal waits for them
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


@dataclass(frozen=True, slots=True)
class _LateMessage:
    """A message that came to a queue that was to be deleted."""

    queue: str
    key: str
    properties: BasicProperties
    body: bytes


class _NotEmpty(Exception):
    """Messages arrived, or were stuck, and nothing was deleted. ``counts`` has them by queue, None for unknown."""

    def __init__(self, counts: Mapping[str, int | None]) -> None:
        super().__init__("queues that were to be deleted are not empty")
        self.counts = dict(counts)


class Removal:
    """Deletes exchanges and queues, and puts all of them back when a message arrives in one of the queues.

    A classic queue is deleted if it is empty. A quorum queue cannot be: RabbitMQ refuses ``if-empty`` and ``if-unused``
    for them and closes the connection (NOT_IMPLEMENTED, 540). So each of those gets a consumer first. A message that
    arrives between the last count and the deletion, by way of an exchange or directly, goes to that consumer, and is
    put back with the queue.

    :param queues: the queues to delete, in this order; each was empty at the last count.
    :param classic: the classic ones of these queues.
    :param exchanges: the exchanges to delete before the queues.
    :param parts: the declarations to make again when all is put back.
    :param bindings: further bindings to put back.
    """

    def __init__(
        self,
        connection: BlockingConnection,
        *,
        queues: Sequence[str],
        classic: Container[str],
        exchanges: Sequence[str],
        parts: Sequence[Declaration],
        bindings: Iterable[BindingFacts] = (),
    ) -> None:
        self._connection = connection
        self._queues = queues
        self._classic = classic
        self._exchanges = exchanges
        self._parts = parts
        self._bindings = tuple(bindings)
        self._arrived: list[_LateMessage] = []
        self._gone: set[str] = set()
        self._changed = False
        self._deleted: set[str] = set()

    def run(self, management: Management | None, *, stuck_in: Iterable[str] = ()) -> None:
        """Delete the exchanges and the queues.

        One message cannot be saved: what a sender, after seconds of silence, publishes straight into a queue in the
        millisecond of its deletion. RabbitMQ confirms it and drops it (seen on 4.0.5; with classic queues on 3.10.8).

        :param stuck_in: the queues that may have messages stuck in dead-lettering, which no consumer gets.
        :raises _NotEmpty: messages arrived, or are stuck.
        """
        consuming = self._consume()
        try:
            if management is not None:
                self._check_stuck(management, set(stuck_in))
            self._check()
            worker = self._connection.channel()
            # exchanges first: a sender that uses one of them from now on gets an error
            for name in self._exchanges:
                worker.exchange_delete(name)
                self._changed = True
            self._check()
            for name in self._queues:
                self._delete(worker, name)
            worker.close()
        except _NotEmpty:
            if self._changed:
                self._put_back()
            raise
        finally:
            # with the channel, messages of a queue that stays go back into it
            if consuming.is_open:
                consuming.close()

    def _delete(self, worker: BlockingChannel, name: str) -> None:
        if name in self._classic:
            try:
                worker.queue_delete(name, if_empty=True)
            except ChannelClosedByBroker as error:
                if error.reply_code != declare.PRECONDITION_FAILED:
                    raise
                raise _NotEmpty(declare.counts(self._connection, [name])) from error
        else:
            worker.queue_delete(name)
            self._deleted.add(name)
            self._pump(lambda: name in self._gone, _CANCEL_SECONDS)
        self._changed = True
        self._check()

    def _consume(self) -> BlockingChannel:
        channel = self._connection.channel()

        def cancelled(frame: Any) -> None:
            self._gone.add(consumers[frame.method.consumer_tag])

        channel.add_on_cancel_callback(cancelled)
        quorum = [name for name in self._queues if name not in self._classic]
        consumers = {channel.basic_consume(name, self._take(name)): name for name in quorum}
        return channel

    def _take(self, queue: str) -> Callable[[BlockingChannel, Any, BasicProperties, bytes], None]:
        def take(_: BlockingChannel, method: Any, properties: BasicProperties, body: bytes) -> None:
            self._arrived.append(_LateMessage(queue, method.routing_key, properties, body))

        return take

    def _check_stuck(self, management: Management, names: set[str]) -> None:
        # A queue's count of consumers and that of its stuck messages are from one moment. A consumer gets each message
        # that arrives, so none gets stuck any more once there is one.
        found: dict[str, int | None] = {}

        def counted() -> bool:
            queues = management.queues() or {}
            for name in names & queues.keys():
                if queues[name].consumers:
                    found[name] = queues[name].stuck
            return names <= found.keys()

        self._pump(counted, _STATISTICS_SECONDS, pause=0.5)
        if bad := {name: found.get(name) for name in sorted(names) if found.get(name) != 0}:
            raise _NotEmpty(bad)

    def _check(self) -> None:
        # deliveries that are on their way come before the broker's next answer
        self._connection.process_data_events(time_limit=0)
        if self._arrived:
            counts: dict[str, int | None] = {}
            for arrived in self._arrived:
                counts[arrived.queue] = (counts.get(arrived.queue) or 0) + 1
            raise _NotEmpty(counts)

    def _pump(self, ready: Callable[[], bool], seconds: float, pause: float = 0.05) -> None:
        end = time.monotonic() + seconds
        while not ready() and time.monotonic() < end:
            self._connection.process_data_events(time_limit=pause)

    def _put_back(self) -> None:
        declare.apply(self._connection, self._parts)
        _rebind(self._connection, self._bindings)
        channel = self._connection.channel()
        channel.confirm_delivery()
        for arrived in self._arrived:
            if arrived.queue not in self._deleted:
                continue
            # straight into its queue, with the key that it had (see Topology.address); headers that fill a frame have
            # no room for another one
            added = {} if arrived.key == arrived.queue else {"BCC": [arrived.queue]}
            # without the user who sent it: the broker accepts that property from the same user alone
            properties = ReceivedProperties.of(arrived.properties).again(
                without={DELIVERY_COUNT}, added=added, user=None
            )
            channel.basic_publish("", arrived.key, arrived.body, properties, mandatory=True)
        channel.close()


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
