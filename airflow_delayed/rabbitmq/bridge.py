"""The bridge for services that go on publishing with the header ``x-delay``: installing, verifying and running it.

    services --> exchange --> .intake --> bridge --> delay levels --> .due --> bridge --> target --> consumers' queues

A message is taken from the quorum queue ``delayed.bridge.<exchange>.intake``, waits in the delay levels, and comes to
``delayed.bridge.<exchange>.due``. From there it is published with its key, properties and headers to the target: the
exchange to which the consumers' queues are bound. The target is another exchange than the services', or each message
would come back to the bridge. A message that cannot go on is parked in ``delayed.bridge.<exchange>.parked``.

The bridge may publish more than the users whose messages it takes. Others may write to its queues, and to the levels;
so a message that comes back to the bridge goes on only with an :class:`Envelope` that the bridge itself has signed.

The semantics of the header are those of rabbitmq_delayed_message_exchange (rabbit_delayed_message_utils.erl and
rabbit_exchange_type_delayed_message.erl, version 4.2.0), but where docs/rabbitmq/leaving-the-plugin.md says otherwise.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from shlex import quote
from typing import TYPE_CHECKING, Any

from pika import BasicProperties
from pika.exceptions import NackError, UnroutableError

from airflow_delayed.clock import next_sleep
from airflow_delayed.delivery import Clock, Finding, State, TopologyReport
from airflow_delayed.errors import DelayedError, InvalidMessage, LimitExceeded, TransportUnavailable, one_line, some
from airflow_delayed.message import UTC, delay_seconds, parse_moment
from airflow_delayed.rabbitmq import cluster, declare
from airflow_delayed.rabbitmq.connection import failed, host_name, in_turn
from airflow_delayed.rabbitmq.declare import Binding, Declaration, Exchange, Queue
from airflow_delayed.rabbitmq.management import PLUGIN_TYPE
from airflow_delayed.rabbitmq.properties import (
    DELIVERY_COUNT,
    DESTINATION,
    DUE_AT,
    PARKED_FROM,
    PARKED_REASON,
    EncodedProperties,
    ReceivedProperties,
)
from airflow_delayed.rabbitmq.relay import BrokerRefusals, Publication, Relay, TakenMessage
from airflow_delayed.rabbitmq.topology import MAX_HEADERS_BYTES, Topology

if TYPE_CHECKING:
    from airflow_delayed.rabbitmq.management import Facts
    from airflow_delayed.rabbitmq.redrive import TopologyEndpoint

log = logging.getLogger(__name__)

#: The header with the delay in milliseconds; the plugin delivers a delayed message with it negated.
X_DELAY = "x-delay"
#: Header of a message on its way, or parked: a table with its routing key and its properties, encoded as they came, and
#: the bridge's signature.
BRIDGED = "airflow-delayed-bridged"
#: Characters of the shortest key for signatures.
_SHORTEST_SECRET = 32
#: A type of exchange that can be bound for every routing key, and the key that does so.
TYPES = {"topic": "#", "fanout": ""}
#: Returns that a queue counts before it lets a message go: each end of a bridge returns what is unconfirmed. Without
#: it RabbitMQ 4 lets a message go after the twentieth.
_RETURNS = 1_000_000
#: Characters of a reason that a parked message has as a header.
_REASON = 1000
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
#: Seconds between two lines about parked messages, or about a standstill; and between two lines with counts.
_WARN_SECONDS, _COUNT_SECONDS = 10.0, 60.0
_FIRST_SLEEP, _LONGEST_SLEEP = 1.0, 30.0
#: Seconds to wait for confirms, after a request to stop.
_DRAIN_SECONDS = 3.0


def read_delay(headers: Mapping[str, Any] | None) -> int:
    """Return the delay of a message in milliseconds; 0 if it is to be delivered at once.

    As the plugin reads it: any integer, text that is one, or a floating-point number without its fraction. A header
    that is missing, zero or negative means at once.

    :raises InvalidMessage: it is something else; the plugin delivers such a message at once.
    """
    if headers is None or X_DELAY not in headers:
        return 0
    value = headers[X_DELAY]
    if isinstance(value, bytes):
        value = value.decode("ascii", errors="replace")
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        # its value may be a secret
        raise InvalidMessage(X_DELAY, "it is not a whole number of milliseconds")
    return max(0, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """The routing key and the properties of a message that a bridge took from its intake, as they came.

    :param properties: encoded.
    :param due_at: when its delay is over, as the header of its way has it; None: it stated no delay that can be read.
    """

    key: str | bytes
    properties: bytes
    due_at: str | None

    @classmethod
    def of(cls, taken: TakenMessage, due_at: str | None) -> Envelope:
        """Return the envelope of a message from the intake."""
        return cls(key=taken.key, properties=b"".join(taken.properties.encode()), due_at=due_at)

    @classmethod
    def received(cls, headers: Mapping[str, Any], body: bytes, secrets: Sequence[str], bridge: str) -> Envelope:
        """Return the envelope that a message carries.

        :param bridge: which bridge has to have signed it: messages of another one are foreign.
        :raises InvalidMessage: it has none, or none of these secrets has signed it with this body and due time.
        """
        table, due_at = headers.get(BRIDGED), headers.get(DUE_AT)
        key, properties, signature = (
            (table.get(name) for name in ("key", "properties", "signature")) if isinstance(table, dict) else [None] * 3
        )
        if not isinstance(key, str | bytes) or not isinstance(properties, bytes) or not isinstance(signature, bytes):
            raise InvalidMessage(BRIDGED, "it came by another way than through this bridge")
        envelope = cls(key=key, properties=properties, due_at=due_at if isinstance(due_at, str) else None)
        signatures = (envelope.signature(body, secret, bridge) for secret in secrets)
        if not any(hmac.compare_digest(signature, own) for own in signatures):
            raise InvalidMessage(
                BRIDGED,
                "this bridge has not signed it; if it did with a key that is no longer in [delayed] bridge_keys, add"
                " that key at the end of the list",
            )
        return envelope

    def signature(self, body: bytes, secret: str, bridge: str) -> bytes:
        """Return the HMAC-SHA256 over all that the bridge relies on, each part with its length before it."""
        key = self.key.encode() if isinstance(self.key, str) else self.key
        due_at = b"" if self.due_at is None else self.due_at.encode()
        made = hmac.new(secret.encode(), digestmod="sha256")
        for part in (BRIDGED.encode(), bridge.encode(), key, self.properties, due_at, body):
            made.update(len(part).to_bytes(8, "big"))
            made.update(part)
        return made.digest()

    def headers(self, body: bytes, secret: str, bridge: str) -> dict[str, Any]:
        """Return the headers that carry it, signed."""
        signature = self.signature(body, secret, bridge)
        table = {"key": self.key, "properties": self.properties, "signature": signature}
        return {BRIDGED: table, **({} if self.due_at is None else {DUE_AT: self.due_at})}


@dataclass(frozen=True, slots=True)
class BridgeRoutes:
    """The exchanges and queues of one bridge, and what it publishes for each message.

    :param exchange: to which the services publish.
    :param target: the exchange to which the consumers' queues are bound.
    :param secrets: keys for the signatures of envelopes, of 32 characters and more: the first signs, all verify.
    :param type: of ``exchange``: ``topic`` or ``fanout``; the target's own type decides which queues get a message.
    :raises ValueError: the two are one, the type has no binding for every key, the topology is conventional, or there
        is no secret, or a short one.
    :raises LimitExceeded: the exchange's name is too long, or has an empty word.
    """

    exchange: str
    target: str
    topology: Topology
    secrets: Sequence[str] = field(repr=False)
    type: str = "topic"

    def __post_init__(self) -> None:
        if not self.secrets or any(len(secret) < _SHORTEST_SECRET for secret in self.secrets):
            raise ValueError(
                f"a bridge needs a key of {_SHORTEST_SECRET} characters or more in [delayed] bridge_keys, the same for"
                " all bridges of an exchange: it signs the messages on their way, so that nobody else sends through the"
                ' bridge. Make one with: python -c "import secrets; print(secrets.token_urlsafe(32))"'
            )
        if not self.exchange or not self.target:
            raise ValueError("a bridge needs the name of an exchange and of a target; the default exchange is neither")
        if self.exchange == self.target:
            raise ValueError(
                f"exchange and target are both {self.exchange!r}: each message would come back to the bridge; use"
                " another exchange for the services or for the consumers"
            )
        if self.type not in TYPES:
            raise ValueError(
                f"type {self.type!r} has no binding for every routing key; use topic or fanout. The target may be of"
                " any type, and it is the target that routes to the consumers"
            )
        if self.topology.routing != "direct":
            raise ValueError("a bridge needs a topology with direct routing: routing='direct', or topology='delayed'")
        self.topology.check_destination(self.due)

    @property
    def intake(self) -> str:
        """The queue with what the services published."""
        return f"delayed.bridge.{self.exchange}.intake"

    @property
    def due(self) -> str:
        """The queue with the messages whose delay is over."""
        return f"delayed.bridge.{self.exchange}.due"

    @property
    def parked(self) -> str:
        """The queue with the messages that could not go on."""
        return f"delayed.bridge.{self.exchange}.parked"

    def parts(self) -> Iterator[Declaration]:
        """Yield the parts that a bridge needs, in an order in which each may be made."""
        yield from declare.plan(self.topology)
        yield Queue(self.parked, {"x-queue-type": "quorum"})
        arguments: dict[str, str | int] = {
            "x-queue-type": "quorum",
            "x-delivery-limit": _RETURNS,
            # what expires while no bridge runs
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": self.parked,
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        }
        intake, due = Queue(self.intake, arguments), Queue(self.due, arguments)
        services = Exchange(self.exchange, self.type)
        yield from (due, Binding(Exchange(self.topology.delivery_exchange, "topic"), due, self._due_key))
        yield from (intake, services, Binding(services, intake, TYPES[self.type]))
        yield Exchange(self.target, "topic", destination=True)

    @property
    def _due_key(self) -> str:
        return self.topology.binding_key(self.due)

    def publication(self, taken: TakenMessage, refused: str | None, now: datetime, user: str | None) -> Publication:
        """Return what to publish for a message from the intake or from the queue of due messages.

        :param refused: why it cannot go on.
        :param user: the name of the logged-in user; ``user_id`` of another user is removed, for the broker refuses it.
        """
        try:
            if refused:
                return self._park(taken, refused, now)
            if taken.properties.problem:
                return self._park(taken, taken.properties.problem, now)
            if taken.queue == self.due:
                return self._from_due(taken, now, user)
            return self._from_intake(taken, now, user)
        except (InvalidMessage, LimitExceeded) as error:
            return self._park(taken, str(error), now)

    def _from_intake(self, taken: TakenMessage, now: datetime, user: str | None) -> Publication:
        milliseconds = read_delay(taken.properties.headers)
        self.topology.digits.check_delay(milliseconds // 1000)
        if not milliseconds:
            return Publication(self.target, taken.key, _restored(taken.properties, user))
        due_at = now + timedelta(milliseconds=milliseconds)
        return self._delayed(taken, Envelope.of(taken, _text(due_at)), due_at, now)

    def _from_due(self, taken: TakenMessage, now: datetime, user: str | None) -> Publication:
        envelope = self.envelope(taken)
        if envelope.due_at is not None and (due_at := parse_moment(DUE_AT, envelope.due_at)) > now:
            # a node whose clock is ahead has let it go
            return self._delayed(taken, envelope, due_at, now)
        original = ReceivedProperties(envelope.properties)
        if original.problem:
            # redriven; the broker would close the connection
            raise InvalidMessage("properties", original.problem)
        return Publication(self.target, envelope.key, _restored(original, user))

    def envelope(self, taken: TakenMessage) -> Envelope:
        """Return the envelope of a message that comes back to the bridge.

        :raises InvalidMessage: this bridge has not signed it.
        """
        return Envelope.received(taken.properties.headers or {}, taken.body, self.secrets, self.exchange)

    def _signed(self, envelope: Envelope, taken: TakenMessage) -> dict[str, Any]:
        return envelope.headers(taken.body, self.secrets[0], self.exchange)

    def _delayed(self, taken: TakenMessage, envelope: Envelope, due_at: datetime, now: datetime) -> Publication:
        delay = max(1, delay_seconds(due_at, now))
        address = self.topology.address(self.due, delay, default_exchange=False, direct=False)
        properties = _encoded(taken, {DESTINATION: self.due, **self._signed(envelope, taken)})
        if (size := len(properties.encode()[0])) > MAX_HEADERS_BYTES:
            raise LimitExceeded("headers", f"its properties take {size:,} bytes on their way, of {MAX_HEADERS_BYTES:,}")
        return Publication(address.exchange, address.key, properties)

    def _park(self, taken: TakenMessage, reason: str, now: datetime) -> Publication:
        short = {PARKED_REASON: reason[:_REASON], PARKED_FROM: taken.queue}
        if taken.queue == self.intake:
            # redriven, it waits for the rest of its delay
            headers = self._signed(Envelope.of(taken, _due_text(taken, now)), taken)
        else:
            try:
                headers = self._signed(self.envelope(taken), taken)
            except InvalidMessage:
                # nothing of a foreign message is believed, nor signed: it is kept to be looked at
                headers = {BRIDGED: {"key": taken.key, "properties": b"".join(taken.properties.encode())}}
        properties = _encoded(taken, {**headers, **short})
        if len(properties.encode()[0]) > MAX_HEADERS_BYTES:
            # they fill a frame, and leave no room for the reason
            properties = _encoded(taken, short)
        return Publication("", self.parked, properties, parked=reason)


def _text(due_at: datetime) -> str:
    return due_at.isoformat(timespec="microseconds")


def _due_text(taken: TakenMessage, now: datetime) -> str | None:
    """Return when a message from the intake is due, whatever it states."""
    try:
        return _text(now + timedelta(milliseconds=read_delay(taken.properties.headers)))
    except InvalidMessage:
        return None
    except OverflowError:
        return _text(datetime.max.replace(tzinfo=UTC))


def _encoded(taken: TakenMessage, headers: Mapping[str, Any]) -> EncodedProperties:
    found = taken.properties.message_id
    # an id that was made readable may be too long for the property
    message_id = found if found and len(found.encode()) <= 255 else None
    properties = BasicProperties(headers=dict(headers), delivery_mode=2, message_id=message_id)
    return EncodedProperties(b"".join(properties.encode()))


def _restored(original: ReceivedProperties, user: str | None) -> BasicProperties:
    """Return a message's properties as they came, with the delay negated if there was one, as by the plugin."""
    try:
        delay = read_delay(original.headers)
    except InvalidMessage:
        # somebody has redriven it from the queue of parked messages
        delay = 0
    if original.headers is None and original.user_id in (None, user):
        return original
    return original.again(without={DELIVERY_COUNT}, added={X_DELAY: -delay} if delay else {}, user=user)


class BridgeNotReady(DelayedError):
    """A part of a bridge is missing, or differs from the wanted one. ``report`` has each finding."""

    def __init__(self, conn_id: str, report: TopologyReport) -> None:
        problems = some([str(finding) for finding in report.problems])
        super().__init__(
            f"connection {conn_id!r} is not ready for the bridge: {problems}. airflow delayed bridge --install makes"
            " what is missing, but for the target"
        )
        self.report = report


@dataclass(slots=True)
class BridgeCounts:
    """How many messages a bridge has passed on; each confirmed, and acknowledged in the queue that it came from."""

    delayed: int = 0
    delivered: int = 0
    parked: int = 0

    def __str__(self) -> str:
        return f"{self.delayed:,} delayed, {self.delivered:,} delivered, {self.parked:,} parked"


@dataclass
class Bridge:
    """Installs and runs a bridge; several may run side by side.

    Experimental: it may change without a deprecation before (docs/development/stability.md).

    :param endpoint: returns the topology and its connection; called before each round of tries to connect.
    """

    routes: BridgeRoutes
    endpoint: Callable[[], TopologyEndpoint]
    clock: Clock
    counts: BridgeCounts = field(default_factory=BridgeCounts)
    _relay: Relay | None = None
    _refusals: BrokerRefusals = field(default_factory=BrokerRefusals)
    _parked: Counter[str] = field(default_factory=Counter)

    def install(self, *, dry_run: bool = False) -> TopologyReport:
        """Make the delay levels, the services' exchange and the three queues, where they are missing.

        The target has to exist, with the bindings that the consumers need.

        :param dry_run: make nothing; the report has what would be made.
        :raises TopologyError: a part differs, or the target is missing (not with ``dry_run``).
        :raises TransportUnavailable: the broker cannot be reached or refuses the user.
        """
        here, parts = self.endpoint(), tuple(self.routes.parts())
        with here.connect() as connection:
            found = [self._with_remedy(each) for each in declare.compare(connection, parts)]
            done = State.PLANNED if dry_run else State.CREATED
            report = TopologyReport(declare.todo(parts, found, create_destinations=False, done=done))
            if not dry_run:
                self._require(here, report)
                declare.apply(connection, (part for part in parts if not getattr(part, "destination", False)))
        return report

    def verify(self) -> TopologyReport:
        """Compare the broker with what a bridge needs. Changes nothing.

        With the management API it also tells whether the target leads back to the bridge, and which queues get the
        services' messages without a delay.

        :raises TransportUnavailable: the broker cannot be reached or refuses the user.
        """
        here = self.endpoint()
        with here.connect() as connection:
            found = [self._with_remedy(each) for each in declare.compare(connection, self.routes.parts())]
            parked = declare.counts(connection, [self.routes.parked])[self.routes.parked]
        facts = here.facts()
        own = (*cluster.uncounted(facts, [self.routes.parked, self.routes.due]), *self._parked_findings(parked))
        return TopologyReport((*found, *self._ways(facts), *own))

    def require(self) -> None:
        """Check that a bridge can run.

        :raises TopologyError: :meth:`verify` has problems.
        :raises TransportUnavailable: the broker cannot be reached or refuses the user.
        """
        report = self.verify()
        for finding in report:
            if finding.severity == "warning":
                log.warning("%s", finding)
        self._require(self.endpoint(), report)

    def redrive(self) -> int:
        """Put the messages that are parked at the start into the queue of due messages; return how many.

        From there they go to the target, when their delay is over. A message that expired while no bridge ran, or that
        this bridge has not signed, goes to the end of the queue of parked messages.

        :raises TransportUnavailable: the broker cannot be reached or refuses the user, or a queue is full or has no
            leader, or the management API is there and did not answer in time.
        """
        moved, here, routes = 0, self.endpoint(), self.routes
        here.require_available([routes.parked, routes.due])
        with here.connect() as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            for _ in range(channel.queue_declare(routes.parked, passive=True).method.message_count):
                method, properties, body = channel.basic_get(routes.parked)
                if method is None or properties is None or body is None:
                    break
                found = ReceivedProperties.of(properties)
                taken = TakenMessage(routes.parked, method.delivery_tag or 0, method.routing_key or "", found, body)
                try:
                    routes.envelope(taken)
                except InvalidMessage:
                    without, queue = set(), routes.parked
                else:
                    without, queue = {PARKED_REASON, PARKED_FROM}, routes.due
                again = found.again(without=without | {DELIVERY_COUNT}, added={}, user=None)
                try:
                    channel.basic_publish("", queue, body, again, mandatory=True)
                except (UnroutableError, NackError) as error:
                    raise TransportUnavailable(f"connection {here.conn_id!r}: queue {queue!r} takes nothing") from error
                channel.basic_ack(taken.tag)
                moved += queue == routes.due
        return moved

    async def run(self, stop: asyncio.Event) -> None:
        """Pass messages on until ``stop`` is set; then wait up to 3 s for confirms, and close.

        A lost connection is opened again, at the host that answered last or the next one that answers, without end.
        """
        tasks = [asyncio.create_task(each) for each in (self._work(), self._report(), stop.wait())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if self._relay is not None:
            await self._relay.drain(_DRAIN_SECONDS)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        self._log_parked()
        log.info("%s has ended: %s", self, self.counts)
        for result in results:
            if isinstance(result, Exception):
                raise result

    def __str__(self) -> str:
        return f"bridge from exchange {self.routes.exchange!r} to {self.routes.target!r}"

    async def _work(self) -> None:
        failures = 0
        while True:
            began = time.monotonic()
            why = await self._connected()
            failures = 1 if time.monotonic() - began > _LONGEST_SLEEP else failures + 1
            seconds = next_sleep(failures, first=_FIRST_SLEEP, longest=_LONGEST_SLEEP)
            log.warning("%s: %s. It connects again in %.1f s", self, why, seconds)
            await asyncio.sleep(seconds)

    async def _connected(self) -> str:
        """Relay at the first host that accepts the login, until the connection is lost; return why."""
        causes = []
        try:
            # in a thread: it asks Airflow for the connection, and reads certificate files
            here = await asyncio.to_thread(self.endpoint)
        except (DelayedError, ValueError) as error:
            return str(error)
        for host in in_turn(here.hosts):
            self._relay = relay = Relay(
                host,
                [self.routes.intake, self.routes.due],
                lambda *taken: self._route(here.user, *taken),
                self._count,
                self._refusals,
            )
            try:
                await relay.opened
                log.info("%s: connected to %s", self, host_name(host))
                return f"{host_name(host)}: {await relay.ended}"
            except DelayedError as error:
                failed(here.hosts, host)
                causes.append(f"{host_name(host)}: {error}")
            finally:
                self._relay = None
                await relay.close(1.0)
        return "; ".join(causes)

    def _route(self, user: str | None, taken: TakenMessage, refused: str | None) -> Publication:
        return self.routes.publication(taken, refused, self.clock(), user)

    def _count(self, taken: TakenMessage, publication: Publication) -> None:
        if publication.parked:
            self.counts.parked += 1
            self._parked[publication.parked] += 1
        elif publication.exchange == self.routes.target:
            self.counts.delivered += 1
        elif taken.queue == self.routes.intake:
            self.counts.delayed += 1

    async def _report(self) -> None:
        logged, next_count = replace(self.counts), time.monotonic()
        while True:
            await asyncio.sleep(_WARN_SECONDS)
            self._log_parked()
            count, seconds = self._relay.stalled() if self._relay else (0, 0.0)
            if self._relay and count and seconds >= _WARN_SECONDS:
                why = self._relay.blocked or "is a queue full or without a leader?"
                log.warning("%s: %s messages taken, none confirmed for %.0f s: %s", self, f"{count:,}", seconds, why)
            if time.monotonic() >= next_count and logged != self.counts:
                logged, next_count = replace(self.counts), time.monotonic() + _COUNT_SECONDS
                log.info("%s: %s", self, self.counts)

    def _log_parked(self) -> None:
        reasons = [f"{one_line(reason)}: {count:,}" for reason, count in self._parked.items()]
        if reasons:
            log.warning("%s: parked in queue %r: %s", self, self.routes.parked, some(reasons))
            self._parked.clear()

    def _require(self, here: TopologyEndpoint, report: TopologyReport) -> None:
        if report.problems:
            raise BridgeNotReady(here.conn_id, report)

    def _ways(self, facts: Facts) -> Iterator[Finding]:
        """Yield what is wrong with the bindings around the bridge."""
        routes = self.routes
        if facts.bindings is None:
            resource = f"bindings of exchange {routes.exchange}"
            yield Finding(state=State.UNKNOWN, resource=resource, found=facts.why, code="binding")
            return
        reached, more = set(), [routes.target]
        while more:
            reached.add(source := more.pop())
            there = (facts.exchanges or {}).get(source)
            alternate = there.arguments.get("alternate-exchange") if there else None
            ways = [each.target for each in facts.bindings if each.source == source and not each.is_queue]
            more += {*ways, *filter(None, [alternate])} - reached
        if routes.exchange in reached:
            yield Finding(
                state=State.BLOCKED,
                resource=f"exchange {routes.target}",
                found=f"it leads back to exchange {routes.exchange}: each message would go round without end",
                code="bridge-loop",
                remedy=f"remove the binding, or the alternate exchange, that leads to {routes.exchange}",
            )
        for each in facts.bindings:
            if each.source == routes.exchange and each.target != routes.intake:
                kind = "queue" if each.is_queue else "exchange"
                yield Finding(
                    state=State.WARNING,
                    resource=f"binding {routes.exchange} -> {each.target}",
                    found=f"this {kind} gets each message at once, without its delay",
                    code="bridge-undelayed",
                    remedy=f"bind it to exchange {routes.target} instead, and remove this binding",
                )

    def _parked_findings(self, count: int | None) -> Iterator[Finding]:
        if count:
            yield Finding(
                state=State.WARNING,
                resource=f"queue {self.routes.parked}",
                found=f"{count:,} messages could not go on",
                code="bridge-parked",
                remedy=f"read the header {PARKED_REASON}, repair the cause, and run: airflow delayed bridge --conn-id"
                f" {self.endpoint().conn_id} --exchange {quote(self.routes.exchange)} --target"
                f" {quote(self.routes.target)} --redrive",
            )

    def _with_remedy(self, finding: Finding) -> Finding:
        routes = self.routes
        if finding.destination == routes.target and finding.state is State.MISSING:
            return replace(finding, remedy="declare it, with the bindings of the consumers' queues")
        if finding.resource == f"exchange {routes.exchange}" and finding.argument == "type":
            remedy = (
                f"let the services publish to an exchange of another name; type={finding.found!r} cannot be changed"
            )
            if finding.found == PLUGIN_TYPE:
                remedy += ", and must stay until its messages_delayed is 0"
            return replace(finding, remedy=remedy)
        return finding
