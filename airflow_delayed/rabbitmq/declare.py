"""The declarations of a topology: planned as data, compared with the broker, and made; and the broker's refusals.

Nothing here needs the management API. AMQP without it does not show which bindings exist. They are made again on every
install, and a destination's on every connection that sends to it.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from airflow_delayed.delivery import Finding, State, TopologyReport
from airflow_delayed.errors import DelayedError, DestinationMissing, TopologyError
from airflow_delayed.rabbitmq.topology import Topology

if TYPE_CHECKING:
    from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
    from pika.exceptions import ChannelClosedByBroker

#: The finding for a part that exists, and whose arguments the broker does not show to this user.
UNCOMPARED = "there; its arguments are unknown"
#: AMQP reply codes that concern one declaration, not the connection.
ACCESS_REFUSED, NOT_FOUND, RESOURCE_LOCKED, PRECONDITION_FAILED = 403, 404, 405, 406


@dataclass(frozen=True, slots=True)
class Exchange:
    """A durable exchange. A destination only has to exist; its arguments are its owner's and never compared."""

    name: str
    type: str
    arguments: Mapping[str, str | int] = field(default_factory=dict)
    destination: bool = False

    def __str__(self) -> str:
        return f"exchange {self.name}"

    def declare(self, channel: BlockingChannel, *, passive: bool = False) -> None:
        """Declare it, or with ``passive`` ask whether it is there."""
        channel.exchange_declare(
            self.name, exchange_type=self.type, durable=True, passive=passive, arguments=dict(self.arguments)
        )


@dataclass(frozen=True, slots=True)
class Queue:
    """A durable queue. A destination only has to exist; its arguments are its owner's and never compared."""

    name: str
    arguments: Mapping[str, str | int] = field(default_factory=dict)
    destination: bool = False

    def __str__(self) -> str:
        return f"queue {self.name}"

    def declare(self, channel: BlockingChannel, *, passive: bool = False) -> None:
        """Declare it, or with ``passive`` ask whether it is there."""
        channel.queue_declare(self.name, durable=True, passive=passive, arguments=dict(self.arguments))


@dataclass(frozen=True, slots=True)
class Binding:
    """A binding of a queue, or of a further exchange, to an exchange."""

    source: Exchange
    target: Exchange | Queue
    key: str = ""

    def __str__(self) -> str:
        return f"binding {self.source.name} -> {self.target.name}"

    def declare(self, channel: BlockingChannel) -> None:
        """Make it; without effect if it is there."""
        if isinstance(self.target, Queue):
            channel.queue_bind(self.target.name, self.source.name, self.key)
        else:
            channel.exchange_bind(self.target.name, self.source.name, self.key)


Declaration = Exchange | Queue | Binding


def plan(
    topology: Topology,
    destinations: Iterable[str] = (),
    *,
    top_position: int | None = None,
    unroutable: bool = False,
) -> tuple[Declaration, ...]:
    """Return the declarations that delays need, in an order in which each may be made.

    :param top_position: the highest position wanted; -1 for none, where no message is delayed; None for all.
    :param unroutable: include the exchange and the queue for unroutable messages of a shared topology too.
    :raises LimitExceeded: a destination's name is beyond the limits.
    """
    parts: list[Declaration] = []
    arguments = {} if topology.shared else {"alternate-exchange": topology.unroutable_queue}
    if unroutable or not topology.shared:
        exchange = Exchange(topology.unroutable_queue, "fanout")
        queue = Queue(topology.unroutable_queue, {"x-queue-type": "quorum"})
        parts += exchange, queue, Binding(exchange, queue)
    delivery = below = Exchange(topology.delivery_exchange, "topic", arguments)
    parts.append(delivery)
    digits = topology.digits
    top = topology.top_position if top_position is None else top_position
    positions = [*range(top + 1)]
    if not topology.shared and -1 < top < topology.top_position:
        positions.append(topology.top_position)
    for position in positions:
        if position <= top:
            parts += (_level(topology, level) for level in digits.levels_at(position))
        # what a sender's message cannot be routed by is an error of the sender's; its bindings right behind each other
        # exchange, for messages that it cannot route become unroutable
        passes_on = not topology.shared and position < topology.top_position
        exchange = Exchange(topology.exchange_name(position), "topic", arguments if passes_on else {})
        parts.append(exchange)
        last = position if topology.shared else 0
        for read in range(last, min(position, top) + 1):
            parts += (
                Binding(exchange, _level(topology, level), digits.binding_key(position, read, digits.digit(level)))
                for level in digits.levels_at(read)
            )
        parts.append(Binding(exchange, below, digits.binding_key(position, last, 0)))
        below = exchange if topology.shared else delivery
    for destination in dict.fromkeys(destinations):
        key = topology.binding_key(destination)
        queue = Queue(destination, {"x-queue-type": "quorum"}, destination=True)
        parts.append(queue)
        if topology.routing == "conventional":
            exchange = Exchange(destination, "fanout", destination=True)
            parts += exchange, Binding(exchange, queue), Binding(delivery, exchange, key)
        else:
            parts.append(Binding(delivery, queue, key))
    return tuple(parts)


def _level(topology: Topology, level: int) -> Queue:
    return Queue(topology.level_name(level), topology.queue_arguments(level))


def compare(
    connection: BlockingConnection,
    parts: Iterable[Declaration],
    *,
    patience: float = math.inf,
    as_planned: Container[str] = (),
) -> tuple[Finding, ...]:
    """Return for each exchange and queue whether it exists and is as planned; changes nothing.

    To find a difference, an existing part is declared again. The broker refuses that and names the first argument that
    differs. A user without the right to configure the part learns only that it exists; ``found`` then says so.

    :param patience: seconds that the answers may take longer, in all, than if each were as quick as the quickest; the
        parts that remain then have no finding.
    :param as_planned: the parts, as text, that are known to be as planned if they exist.
    :raises pika.exceptions.ChannelClosedByBroker: the broker does not even show whether a part exists.
    """
    asker = _Asker(connection)
    findings: list[Finding] = []
    took: list[float] = []
    for part in parts:
        if isinstance(part, Binding):
            continue
        if sum(took) - min(took, default=0) * len(took) > patience:
            break
        began = time.monotonic()
        findings.append(_compare(asker, part, compared=str(part) in as_planned))
        took.append(time.monotonic() - began)
    asker.close()
    return tuple(findings)


def counts(connection: BlockingConnection, names: Iterable[str]) -> dict[str, int | None]:
    """Count the messages that are ready in each queue; None for a queue that is missing.

    Messages that are stuck in dead-lettering, or that a consumer has, are not counted.

    :raises pika.exceptions.ChannelClosedByBroker: the broker refuses to count.
    """
    asker = _Asker(connection)
    found = {name: asker.count(name) for name in names}
    asker.close()
    return found


def _compare(asker: _Asker, part: Exchange | Queue, *, compared: bool) -> Finding:
    destination = part.name if part.destination else None
    if refusal := asker.refuses(part, passive=True):
        code, text = refusal
        if code == NOT_FOUND:
            return Finding(state=State.MISSING, resource=str(part), destination=destination)
        return difference(part, text, destination)
    if destination is None and not compared and (refusal := asker.refuses(part, passive=False)):
        if refusal[0] == ACCESS_REFUSED:
            return Finding(state=State.OK, resource=str(part), found=UNCOMPARED)
        return difference(part, refusal[1])
    return Finding(state=State.OK, resource=str(part), destination=destination)


class _Asker:
    """Declares on a channel, and opens another when the broker closes it, as it does with each refusal."""

    def __init__(self, connection: BlockingConnection) -> None:
        self._connection = connection
        self._channel: BlockingChannel | None = None

    def refuses(self, part: Exchange | Queue, *, passive: bool) -> tuple[int, str] | None:
        from pika.exceptions import ChannelClosedByBroker

        if self._channel is None:
            self._channel = self._connection.channel()
        try:
            part.declare(self._channel, passive=passive)
        except ChannelClosedByBroker as error:
            self._channel = None
            known = (NOT_FOUND, RESOURCE_LOCKED) if passive else (ACCESS_REFUSED, PRECONDITION_FAILED, RESOURCE_LOCKED)
            if error.reply_code not in known:
                raise
            return error.reply_code, error.reply_text
        return None

    def count(self, queue: str) -> int | None:
        from pika.exceptions import ChannelClosedByBroker

        if self._channel is None:
            self._channel = self._connection.channel()
        try:
            return int(self._channel.queue_declare(queue, passive=True).method.message_count)
        except ChannelClosedByBroker as error:
            self._channel = None
            if error.reply_code != NOT_FOUND:
                raise
            return None

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()


# Its text is one of: inequivalent arg 'x-message-ttl' for queue 'q' in vhost '/': received the value '8000' of type
# 'signedint' but current is the value '9000' of type 'signedint'; ... received 'topic' but current is 'fanout';
# ... received none but current is ...
_VALUE = r"(?:the value )?(?:'(?P<{0}>.*?)'(?: of type '\w+')?|none)"
_INEQUIVALENT = re.compile(
    rf"inequivalent arg '(?P<argument>[^']+)' .*: received {_VALUE.format('wanted')} but current is"
    rf" {_VALUE.format('found')}\s*$"
)


def difference(part: Exchange | Queue, text: str, destination: str | None = None) -> Finding:
    """Read the broker's refusal of a declaration: which argument differs, its wanted value and the existing one."""
    match = _INEQUIVALENT.search(text)
    if match is None:
        # for instance a queue that is exclusive to another connection
        return Finding(
            state=State.DIFFERS,
            resource=str(part),
            argument="declaration",
            wanted="accepted",
            found=text,
            destination=destination,
        )
    return Finding(
        state=State.DIFFERS,
        resource=str(part),
        argument=match["argument"],
        wanted=_value(match["wanted"]),
        found=_value(match["found"]),
        destination=destination,
    )


def _value(text: str | None) -> object:
    """Read a value that the broker quotes, sometimes without its type. An absent value is None."""
    return int(text) if text is not None and re.fullmatch(r"-?\d+", text) else text


def todo(
    parts: Iterable[Declaration], found: Iterable[Finding], *, create_destinations: bool, done: State = State.PLANNED
) -> tuple[Finding, ...]:
    """Return the findings, with the state ``done`` for each part that an install makes, and its bindings.

    A missing destination stays missing unless it is to be created. A binding is named if one of its ends is made.
    Between ends that exist it is made again and not named, since AMQP does not show whether it exists.
    """
    findings = []
    made = set()
    for finding in found:
        if finding.state is State.MISSING and (create_destinations or finding.destination is None):
            made.add(finding.resource)
            finding = replace(finding, state=done)
        findings.append(finding)
    for part in parts:
        if isinstance(part, Binding) and not made.isdisjoint((str(part.source), str(part.target))):
            findings.append(Finding(state=done, resource=str(part)))
    return tuple(findings)


def apply(connection: BlockingConnection, parts: Iterable[Declaration]) -> None:
    """Make each part that is missing; an existing part has to be as planned (see :func:`compare`).

    :raises pika.exceptions.ChannelClosedByBroker: something differs, or a right is missing.
    """
    channel = connection.channel()
    for part in parts:
        if not isinstance(part, Binding) and part.destination:
            _make_destination(connection, channel, part)
        else:
            part.declare(channel)
    channel.close()


def _make_destination(connection: BlockingConnection, channel: BlockingChannel, part: Exchange | Queue) -> None:
    # an existing one of another kind is as good
    asker = _Asker(connection)
    missing = asker.refuses(part, passive=True)
    asker.close()
    if missing:
        part.declare(channel)


_NO_SUCH = re.compile(r"NOT_FOUND - no (?P<kind>queue|exchange) '(?P<name>.*?)' in vhost ")


def refusal_cause(
    conn_id: str, topology: Topology, reason: ChannelClosedByBroker, destination: str | None = None
) -> DelayedError | str:
    """Return the error of a sender whose channel the broker closed, or a text where there is no class for it.

    :param destination: the destination that was being bound; None if messages were published.
    """
    text = reason.reply_text
    found = _NO_SUCH.match(text)
    if found and destination and found["name"] == destination:
        return DestinationMissing(
            conn_id,
            [destination],
            f"declare the {found['kind']}, or run TopologyInstallOperator(conn_id={conn_id!r},"
            f" topology={topology.name!r}, destinations=[{destination!r}], create_destinations=True)",
        )
    if found:
        finding = Finding(state=State.MISSING, resource=f"{found['kind']} {found['name']}")
        return TopologyError(conn_id, TopologyReport((finding,)), topology=topology.name)
    if reason.reply_code == ACCESS_REFUSED:
        return (
            f"the broker refused it: {text}. To send, the user needs the rights write and read on {topology.pattern},"
            " and write on the destinations"
        )
    return f"the broker refused it: {text}"
