"""What has to be declared in the broker: the plan as data, its comparison with what is there, and its making.

Nothing here needs the management API. What AMQP cannot tell without it: which bindings exist. They are made again on
every install, and a destination's on every connection that sends to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from airflow_delayed.delivery import Finding, State
from airflow_delayed.rabbitmq import levels
from airflow_delayed.rabbitmq.topology import Topology

if TYPE_CHECKING:
    from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection

#: What is found of a part that is there, and whose arguments this user is not told.
UNCOMPARED = "there; its arguments are unknown"
#: AMQP reply codes that concern one declaration, not the connection.
ACCESS_REFUSED, NOT_FOUND, RESOURCE_LOCKED, PRECONDITION_FAILED = 403, 404, 405, 406


@dataclass(frozen=True, slots=True)
class Exchange:
    """A durable exchange. A destination is only asked for, and never compared: its arguments are its owner's."""

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
    """A durable queue. A destination is only asked for, and never compared: its arguments are its owner's."""

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
    """The way from an exchange to a queue or to a further exchange."""

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
    top_level: int = levels.TOP_LEVEL,
    unroutable: bool = False,
) -> tuple[Declaration, ...]:
    """Return what delays need, in an order in which each part may be made.

    :param top_level: the highest level wanted; -1 for none, where no message is delayed.
    :param unroutable: with an exchange and queue for what is unroutable, to which a policy leads, also where the
        topology has none.
    :raises LimitExceeded: a destination's name is beyond the limits.
    """
    parts: list[Declaration] = []
    arguments: dict[str, str | int] = {}
    if topology.unroutable:
        arguments["alternate-exchange"] = topology.unroutable
    if topology.unroutable or unroutable:
        exchange = Exchange(topology.unroutable_queue, "fanout")
        queue = Queue(topology.unroutable_queue, {"x-queue-type": "quorum"})
        parts += exchange, queue, Binding(exchange, queue)
    delivery = below = Exchange(topology.delivery_exchange, "topic", arguments)
    parts.append(delivery)
    for level in range(top_level + 1):
        name = topology.level_name(level)
        exchange, queue = Exchange(name, "topic"), Queue(name, topology.queue_arguments(level))
        parts += exchange, queue
        parts += (
            Binding(exchange, queue, levels.level_key(level, 1)),
            Binding(exchange, below, levels.level_key(level, 0)),
        )
        below = exchange
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


def compare(connection: BlockingConnection, parts: Iterable[Declaration]) -> tuple[Finding, ...]:
    """Say of each exchange and queue whether it is there and as planned; changes nothing.

    A difference is learnt by declaring again what is there, which the broker refuses; it names the first argument that
    differs. A user who may not configure it is told only that it is there; ``found`` then says so.

    :raises pika.exceptions.ChannelClosedByBroker: the broker refuses even to say whether something is there.
    """
    asker = _Asker(connection)
    findings = tuple(_compare(asker, part) for part in parts if not isinstance(part, Binding))
    asker.close()
    return findings


def counts(connection: BlockingConnection, names: Iterable[str]) -> dict[str, int | None]:
    """Count the messages that are ready in each queue; None for one that is missing.

    What is stuck in dead-lettering, or with a consumer, is not counted.

    :raises pika.exceptions.ChannelClosedByBroker: the broker refuses to say.
    """
    asker = _Asker(connection)
    found = {name: asker.count(name) for name in names}
    asker.close()
    return found


def _compare(asker: _Asker, part: Exchange | Queue) -> Finding:
    destination = part.name if part.destination else None
    if refusal := asker.refuses(part, passive=True):
        code, text = refusal
        if code == NOT_FOUND:
            return Finding(state=State.MISSING, resource=str(part), destination=destination)
        return difference(part, text, destination)
    if destination is None and (refusal := asker.refuses(part, passive=False)):
        if refusal[0] == ACCESS_REFUSED:
            return Finding(state=State.OK, resource=str(part), found=UNCOMPARED)
        return difference(part, refusal[1])
    return Finding(state=State.OK, resource=str(part), destination=destination)


class _Asker:
    """Declares on a channel that is replaced when the broker closes it, as it does with each refusal."""

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
    """Read the broker's refusal of a declaration: which argument differs, what was wanted, what is there."""
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
    """Read a value the broker quotes; it tells an argument's type only sometimes. Absent is None."""
    return int(text) if text is not None and re.fullmatch(r"-?\d+", text) else text


def todo(
    parts: Iterable[Declaration], found: Iterable[Finding], *, create_destinations: bool, done: State = State.PLANNED
) -> tuple[Finding, ...]:
    """Return the findings with what an install makes marked as ``done``; adds the bindings that need it.

    A missing destination stays missing unless it is to be created. A binding is named if one of its ends is made;
    between ends that are there it is made again without a word, since AMQP does not tell whether it exists.
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
    """Make every part that is not there; what is there has to be as planned (see :func:`compare`).

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
    # one of another kind that is there already is as good
    asker = _Asker(connection)
    missing = asker.refuses(part, passive=True)
    asker.close()
    if missing:
        part.declare(channel)
