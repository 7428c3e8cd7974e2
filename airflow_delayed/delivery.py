"""The one interface that every transport offers, and which transport serves a connection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import Enum
from importlib import import_module
from importlib.metadata import entry_points
from inspect import Parameter, signature
from operator import attrgetter
from typing import Protocol, cast, runtime_checkable

from airflow_delayed.errors import UnsupportedConnection, UnsupportedOption
from airflow_delayed.extremes import Extremes
from airflow_delayed.message import DelayedMessage
from airflow_delayed.store.origin import Origin

Clock = Callable[[], datetime]


class State(str, Enum):
    """What was found of, or done to, one part of a topology."""

    OK = "ok"
    PLANNED = "would create"
    CREATED = "created"
    MISSING = "missing"
    DIFFERS = "differs"
    WOULD_REPAIR = "would repair"
    REPAIRED = "repaired"
    WOULD_DELETE = "would delete"
    DELETED = "deleted"
    #: All is there, and yet messages cannot pass for the time being; ``found`` says why.
    BLOCKED = "blocked"
    #: Messages are delivered, and something is to be known; ``found`` says what.
    WARNING = "warning"
    #: It could not be looked at, which is neither good nor bad; ``found`` says why.
    UNKNOWN = "unknown"


_UNREADY = (State.MISSING, State.DIFFERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One part of a topology: a queue, an exchange, a table; with ``argument``, one setting of it."""

    state: State
    resource: str
    argument: str | None = None
    wanted: object = None
    found: object = None
    #: The destination whose messages cannot be delivered because of it.
    destination: str | None = None
    #: A short name of this kind of finding that stays the same, such as ``destination-full``.
    code: str | None = None
    #: What happens because of it.
    why: str | None = None
    #: What a repair does to messages that are there already; None: there is no repair.
    repair: str | None = None

    def __str__(self) -> str:
        text = f"{self.resource} {self.argument}" if self.argument else self.resource
        if self.state in (State.DIFFERS, State.WOULD_REPAIR, State.REPAIRED):
            done = "" if self.state is State.DIFFERS else f"{self.state.value}, "
            text += f": {done}wanted {self.wanted!r}, found {self.found!r}"
        elif self.state in (State.WARNING, State.BLOCKED):
            text += f": {self.found}"
        elif self.state is State.UNKNOWN:
            text += f": unknown: {self.found}"
        else:
            text += f": {self.state.value}"
        if self.why:
            text += f" ({self.why})"
        if self.repair:
            text += f"; a repair {self.repair}"
        return text


@dataclass(frozen=True, slots=True)
class TopologyReport:
    """What ``install`` did or would do, or what ``verify`` found."""

    findings: tuple[Finding, ...] = ()

    @property
    def problems(self) -> tuple[Finding, ...]:
        """Findings that keep messages from being delivered."""
        return tuple(found for found in self.findings if found.state in (*_UNREADY, State.BLOCKED))

    @property
    def unready(self) -> tuple[Finding, ...]:
        """Those of the problems that do not pass by themselves: what has to be made or changed before sending."""
        return tuple(found for found in self.findings if found.state in _UNREADY)

    @property
    def ok(self) -> bool:
        """Whether everything is there and as wanted."""
        return not self.problems

    @property
    def missing_destinations(self) -> tuple[str, ...]:
        """Destinations that do not exist."""
        return tuple(
            sorted({found.destination for found in self.problems if found.destination and found.state is State.MISSING})
        )

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def counts(self) -> dict[str, int]:
        """Count the findings by state."""
        counts: dict[str, int] = {}
        for found in self.findings:
            counts[found.state.value] = counts.get(found.state.value, 0) + 1
        return counts


@dataclass(slots=True)
class SendReport:
    """What became of the messages given to ``send``. ``duplicates`` were there already and are not in ``sent``.

    In a store, ``replaced`` took the place of what had the same id, and ``refused`` came too late for that: it had
    been handed over or cancelled, or was being handed over. Neither is in ``sent``.
    """

    sent: int = 0
    duplicates: int = 0
    replaced: int = 0
    refused: int = 0
    first_due: datetime | None = None
    last_due: datetime | None = None
    by_destination: dict[str, int] = field(default_factory=dict)

    def add(self, message: DelayedMessage) -> None:
        """Count a message that was confirmed."""
        self.sent += 1
        self._note(message)

    def add_all(self, messages: Sequence[DelayedMessage]) -> None:
        """Count messages that were confirmed."""
        if messages:
            dues = list(map(attrgetter("due_at"), messages))
            counts = Counter(map(attrgetter("destination"), messages))
            self.merge(SendReport(len(messages), first_due=min(dues), last_due=max(dues), by_destination=counts))

    def add_replaced(self, message: DelayedMessage) -> None:
        """Count a message that took the place of another."""
        self.replaced += 1
        self._note(message)

    def _note(self, message: DelayedMessage) -> None:
        self.by_destination[message.destination] = self.by_destination.get(message.destination, 0) + 1
        if self.first_due is None or message.due_at < self.first_due:
            self.first_due = message.due_at
        if self.last_due is None or message.due_at > self.last_due:
            self.last_due = message.due_at

    def merge(self, other: SendReport) -> None:
        """Add another report's counts to this one."""
        self.sent += other.sent
        self.duplicates += other.duplicates
        self.replaced += other.replaced
        self.refused += other.refused
        for destination, count in other.by_destination.items():
            self.by_destination[destination] = self.by_destination.get(destination, 0) + count
        dues = [due for due in (self.first_due, self.last_due, other.first_due, other.last_due) if due]
        if dues:
            self.first_due, self.last_due = min(dues), max(dues)


class DelayedDelivery(Protocol):
    """A transport. Every method may raise TransportUnavailable; none is safe to call from two threads at once."""

    @property
    def horizon(self) -> timedelta:
        """How long the transport itself can delay a message cheaply; a dispatcher hands over no earlier than that.

        Zero where a message that is handed over is delivered at once.
        """
        ...

    def install(
        self, destinations: Iterable[str], *, create_destinations: bool = False, dry_run: bool = False
    ) -> TopologyReport:
        """Make what the transport needs to deliver to these destinations; may be repeated at any time.

        What is there and differs is reported, never changed. A destination itself is made only with
        ``create_destinations``. With ``dry_run`` nothing is made and the plan is returned.

        :raises TopologyError: something differs or a destination is missing (not with ``dry_run``).
        """
        ...

    def verify(self, destinations: Iterable[str], *, max_delay: timedelta | None = None) -> TopologyReport:
        """Compare what is there with what messages to these destinations need, delayed by up to ``max_delay``.

        Without ``max_delay`` with all that ``install`` makes. Changes nothing.
        """
        ...

    def check(self, message: DelayedMessage, now: datetime) -> None:
        """Check one message against the transport's limits, without a network.

        :raises LimitExceeded: it is beyond one of them.
        """
        ...

    def send(self, messages: Iterable[DelayedMessage]) -> SendReport:
        """Send each message so that it arrives at its due time, never earlier, and return when all are confirmed.

        Consumes the messages as a stream: memory does not grow with their number.

        :raises SendFailed: some were not confirmed; the error counts those that were and names those that were not.
        :raises DestinationMissing: a destination cannot receive.
        :raises TopologyError: something that the transport itself needs is missing.
        """
        ...

    def close(self) -> None:
        """Close connections; the object can be used again."""
        ...


@runtime_checkable
class Adviser(Protocol):
    """A transport that has something to say of delays beyond its horizon, such as what they cost. Not all have."""

    def advice(self, messages: int, delays: timedelta) -> str | None:
        """Return a line for the log, or None.

        :param messages: how many are due beyond the horizon.
        :param delays: their delays, added up.
        """
        ...


@runtime_checkable
class ChecksMany(Protocol):
    """A transport whose limits can be compared with what bounds many messages. Not all have."""

    def fits(self, extremes: Extremes, now: datetime) -> bool:
        """Return whether ``check`` passes all messages within these bounds; False where that is not sure."""
        ...


@runtime_checkable
class KeepsOpen(Protocol):
    """A transport that makes a connection for each send, and need not. Not all have."""

    def kept_open(self) -> AbstractContextManager[None]:
        """Use one connection for all sends within the block, which follow each other within seconds."""
        ...


class HoldingStore(DelayedDelivery, Protocol):
    """A store, in which messages wait until a dispatcher hands them over."""

    #: The run of a task that sends, if one does; may be set at any time.
    origin: Origin | None

    def conflicting(self, digests: Mapping[str, bytes]) -> Sequence[str]:
        """Return the ids whose content is not what these digests stand for, where storing them is an error for that."""
        ...

    def known(self, ids: Sequence[str]) -> set[str]:
        """Return the ids that wait there, have failed there, or are remembered to have gone from there."""
        ...

    def note_sent(self, messages: Sequence[DelayedMessage]) -> None:
        """Remember messages that their transport has confirmed, and that never waited there."""
        ...

    def last_seen(self) -> datetime | None:
        """Return when a dispatcher was last at work for these messages; None if none was not long ago."""
        ...

    def now(self) -> datetime:
        """Return the time by which that is told."""
        ...


@runtime_checkable
class KeepsAnchors(Protocol):
    """A store that keeps what the relative delays of a task's run count from. Not all do."""

    def anchor(self, turn: str | None) -> datetime | None:
        """Return what is kept for the store's ``origin`` and this turn; None if nothing."""
        ...

    def keep_anchor(self, turn: str | None, anchor: datetime) -> None:
        """Keep it, in place of what was kept before; for as long as ids are remembered.

        :param turn: where each clear of the task means other messages, what its tries have in common.
        """
        ...


_STORE = "airflow_delayed.hooks.store:DelayedStoreHook"
#: Which hook serves a connection type; entry points of the group ``airflow_delayed.delivery`` add to it.
BUILT_IN: Mapping[str, str] = {
    "rabbitmq": "airflow_delayed.hooks.rabbitmq:RabbitMQDelayHook",
    "amqp": "airflow_delayed.hooks.rabbitmq:RabbitMQDelayHook",
    "amqps": "airflow_delayed.hooks.rabbitmq:RabbitMQDelayHook",
    "aws": "airflow_delayed.hooks.sqs:SqsDelayHook",
    "sqlite": _STORE,
    "postgres": _STORE,
    "mysql": _STORE,
    "mssql": _STORE,
}


def delivery_for(conn_id: str, *, clock: Clock | None = None, **options: object) -> DelayedDelivery:
    """Return the hook that serves a connection, chosen by the connection's type.

    :param clock: what the hook takes for the present; by default this machine's clock.
    :param options: further keyword arguments of that hook, such as RabbitMQ's ``topology``; one that is None is left
        out.
    :raises UnsupportedConnection: nothing serves that type.
    :raises UnsupportedOption: that transport has no such option.
    """
    conn_type = type_of(conn_id)
    others = {entry.name: entry.value for entry in entry_points(group="airflow_delayed.delivery")}
    targets = {**others, **BUILT_IN}
    if conn_type not in targets:
        raise UnsupportedConnection(conn_id, conn_type, sorted(targets))
    hook = _load(targets[conn_type])
    given = {name: value for name, value in options.items() if value is not None}
    check_options(conn_id, conn_type, hook, given)
    return cast(DelayedDelivery, hook(conn_id, **given, **({"clock": clock} if clock else {})))


def type_of(conn_id: str) -> str | None:
    """Return a connection's type."""
    from airflow.sdk import BaseHook

    return BaseHook.get_connection(conn_id).conn_type


def check_options(
    conn_id: str, conn_type: str | None, function: Callable[..., object], options: Mapping[str, object]
) -> None:
    """Check that a transport's hook, or a method of it, knows these keyword arguments.

    :raises UnsupportedOption: it lacks one.
    """
    known = signature(function).parameters.values()
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in known):
        return
    if unknown := sorted(options.keys() - {parameter.name for parameter in known}):
        raise UnsupportedOption(conn_id, conn_type, unknown)


def store_for(conn_id: str, deliver_conn_id: str, *, on_conflict: str = "error") -> HoldingStore:
    """Return the store of a SQL connection, for messages that ``deliver_conn_id`` delivers in the end."""
    return cast(HoldingStore, _load(_STORE)(conn_id, deliver_conn_id, on_conflict=on_conflict))


def _load(target: str) -> Callable[..., object]:
    # by name: the hooks know this interface, and it does not know them
    module, _, name = target.partition(":")
    return cast(Callable[..., object], getattr(import_module(module), name))
