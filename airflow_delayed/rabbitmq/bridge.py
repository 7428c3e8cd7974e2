"""The bridge for services that go on publishing with the header ``x-delay``: installing, verifying and running it.

Its exchanges and queues, and what it publishes for each message, are in :mod:`airflow_delayed.rabbitmq.bridge_routes`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from shlex import quote
from typing import TYPE_CHECKING

from pika.exceptions import NackError, UnroutableError

from airflow_delayed.clock import next_sleep
from airflow_delayed.delivery import Clock, Finding, State, TopologyReport
from airflow_delayed.errors import DelayedError, InvalidMessage, TransportUnavailable, one_line, some
from airflow_delayed.rabbitmq import cluster, declare
from airflow_delayed.rabbitmq.bridge_routes import BridgeRoutes
from airflow_delayed.rabbitmq.connection import failed, host_name, in_turn
from airflow_delayed.rabbitmq.management import PLUGIN_TYPE
from airflow_delayed.rabbitmq.properties import DELIVERY_COUNT, PARKED_FROM, PARKED_REASON, ReceivedProperties
from airflow_delayed.rabbitmq.relay import BrokerRefusals, Publication, Relay, TakenMessage

if TYPE_CHECKING:
    from airflow_delayed.rabbitmq.management import Facts
    from airflow_delayed.rabbitmq.move import MigrationEndpoint

log = logging.getLogger(__name__)

#: Seconds between two lines about parked messages, or about a standstill; and between two lines with counts.
_WARN_SECONDS, _COUNT_SECONDS = 10.0, 60.0
_FIRST_SLEEP, _LONGEST_SLEEP = 1.0, 30.0
#: Seconds to wait for confirms, after a request to stop.
_DRAIN_SECONDS = 3.0


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
    endpoint: Callable[[], MigrationEndpoint]
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

    def _require(self, here: MigrationEndpoint, report: TopologyReport) -> None:
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
