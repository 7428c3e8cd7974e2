"""The one interface that every transport offers, and which transport serves a connection."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from importlib import import_module
from importlib.metadata import entry_points
from inspect import Parameter, signature
from types import MethodType
from typing import Any, cast

from airflow_delayed.clock import Clock as Clock
from airflow_delayed.errors import UnsupportedConnection, UnsupportedOption, WrongTransport
from airflow_delayed.identity import Origin
from airflow_delayed.lineage import Dataset
from airflow_delayed.message import DelayedMessage
from airflow_delayed.reports import Finding as Finding
from airflow_delayed.reports import SendReport as SendReport
from airflow_delayed.reports import State as State
from airflow_delayed.reports import TopologyReport as TopologyReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A connection without Airflow; only its name and type are shown when it is printed."""

    conn_id: str
    conn_type: str
    host: str | None = field(default=None, repr=False)
    port: int | None = field(default=None, repr=False)
    login: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    schema: str | None = field(default=None, repr=False)
    extra: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchBounds:
    """Worst-case bounds of a batch: if they pass a limit, every message does.

    Lengths are bytes in UTF-8, but for the tag's; no length may be below the true one.

    :param destinations: all of them.
    :param header_names: all of them.
    :param longest_value: of a header.
    :param most_headers: the largest number of headers of one message.
    :param longest_tag: in characters; 0 if there are none.
    :param null_in_tag: a tag has a null character.
    """

    destinations: Collection[str]
    first_due: datetime
    last_due: datetime
    shortest_body: int
    longest_body: int
    header_names: Collection[str]
    longest_value: int
    most_headers: int
    longest_tag: int
    null_in_tag: bool


class Delivery(ABC):
    """A transport. Every method may raise TransportUnavailable; none is safe to call from two threads at once."""

    #: Whether messages wait in it until they are dispatched; then it is a :class:`DelayStore`.
    is_store: bool = False
    #: Whether messages arrive sooner if they are sent when they are due than if the transport delays them. Then a
    #: dispatcher that stays sends them when they are due, unless its ``lookahead`` is a fixed time.
    sooner_when_due: bool = False
    #: Whether a send goes on trying, for a while, what a destination refuses, such as a full queue. A dispatcher sets
    #: False, and tries the messages of that destination again later, so that those of others do not wait.
    patient: bool = True
    #: Seconds after which a send that is not patient gives up the messages of a destination that confirms none, though
    #: they may still arrive; None: it waits as long as a patient one.
    silence: float | None = None

    @property
    @abstractmethod
    def horizon(self) -> timedelta:
        """How long the transport itself can delay a message cheaply; a dispatcher dispatches no earlier than that.

        Zero where a message that is dispatched is delivered at once.
        """

    @abstractmethod
    def install(
        self, destinations: Iterable[str], *, create_destinations: bool = False, dry_run: bool = False
    ) -> TopologyReport:
        """Create the topology that the transport needs for these destinations; may be repeated at any time.

        A part that exists and differs is reported, never changed. A destination itself is made only with
        ``create_destinations``. With ``dry_run`` nothing is made and the plan is returned.

        :raises TopologyError: something differs or a destination is missing (not with ``dry_run``).
        """

    @abstractmethod
    def verify(self, destinations: Iterable[str], *, max_delay: timedelta | None = None) -> TopologyReport:
        """Compare the topology with the needs of messages to these destinations, delayed by up to ``max_delay``.

        Without ``max_delay`` it is compared with all that ``install`` creates. Changes nothing.
        """

    @abstractmethod
    def check(self, message: DelayedMessage, now: datetime) -> None:
        """Check one message against the transport's limits, without a network.

        :raises LimitExceeded: it is beyond one of them.
        """

    @abstractmethod
    def send(self, messages: Iterable[DelayedMessage]) -> SendReport:
        """Send each message so that it arrives at its due time, never earlier, and return when all are confirmed.

        Consumes the messages as a stream: memory does not grow with their number.

        :raises SendFailed: some were not confirmed; the error counts the confirmed ones and names the others.
        :raises DestinationMissing: a destination cannot receive.
        :raises TopologyError: something that the transport itself needs is missing.
        """

    @abstractmethod
    def close(self) -> None:
        """Close connections; the object can be used again."""

    def fits(self, bounds: BatchBounds, now: datetime) -> bool:
        """Return whether ``check`` passes all messages within these bounds; False if some may not."""
        return False

    def advice(self, messages: int, delays: timedelta) -> str | None:
        """Return a line for the log about delays beyond the horizon, such as their cost, or None.

        :param messages: how many are due beyond the horizon.
        :param delays: their delays, added up.
        """
        return None

    def receiver_warning(self, message: DelayedMessage) -> str | None:
        """Return a line for the log about a message that may be sent and that its receiver could not read, or None."""
        return None

    def kept_open(self) -> AbstractContextManager[None]:
        """Use one connection for all sends within the block. Where they may be minutes apart, call :meth:`service`."""
        return nullcontext()

    def service(self) -> None:
        """Keep the connection of :meth:`kept_open` open, and check that it works; by default nothing is looked at.

        A dispatcher that stays calls it each second in which it sends nothing, from one thread at a time.

        :raises TransportUnavailable: it does not work.
        """
        return

    def dataset(self, destination: str) -> Dataset | None:
        """Return OpenLineage's name of a destination; None: it has none."""
        return None


#: The name by which transports of other packages know the interface.
DelayedDelivery = Delivery


class DelayStore(Delivery):
    """A store, in which messages wait until they are dispatched."""

    is_store = True
    #: The name of the store's connection.
    conn_id: str
    #: The run of a task that sends, if one does; may be set at any time.
    origin: Origin | None

    @abstractmethod
    def conflicting(self, digests: Mapping[str, bytes]) -> Sequence[str]:
        """Return the ids that are stored with other digests, if the store refuses such messages."""

    @abstractmethod
    def known(self, ids: Sequence[str]) -> set[str]:
        """Return the ids that the store knows: messages that wait, have failed, or were delivered or cancelled."""

    @abstractmethod
    def note_sent(self, messages: Sequence[DelayedMessage]) -> None:
        """Remember messages that their transport has confirmed, and that never waited in the store."""

    @abstractmethod
    def last_seen(self) -> datetime | None:
        """Return when a dispatcher was last at work for these messages; None if there was none lately."""

    @abstractmethod
    def now(self) -> datetime:
        """Return the present by the clock of :meth:`last_seen`."""

    def anchor(self, turn: str | None) -> datetime | None:
        """Return the anchor of the relative delays of ``origin`` in this turn, or None if none is kept.

        :param turn: identifies the tries between two clears, where each clear of the task means other messages.
        """
        return None

    def keep_anchor(self, turn: str | None, anchor: datetime) -> None:
        """Replace the anchor, for as long as ids are remembered; by default none is kept."""
        return

    def own_dataset(self) -> Dataset | None:
        """Return OpenLineage's name of the store's own table; None: it has none."""
        return None

    def gauges(self, *, quick: bool = False) -> None:
        """Emit the store's counts as gauges through Airflow's Stats; by default none.

        :param quick: only the gauges whose cost does not grow with the due messages.
        """
        return


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
}


def delivery_for(conn_id: str, clock: Clock | None = None, **options: object) -> Delivery:
    """Return the hook that serves a connection, chosen by the connection's type.

    :param clock: the hook's present; by default this machine's clock.
    :param options: further keyword arguments of that hook, such as RabbitMQ's ``topology``; an option None is left
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
    return with_defaults(hook(conn_id, **given, **({"clock": clock} if clock else {})))


def with_defaults(transport: Any) -> Delivery:
    """Return a transport that has each default of :class:`Delivery`, whether it inherits from that or not."""
    if not isinstance(transport, Delivery):
        for kind in (Delivery, DelayStore) if getattr(transport, "is_store", False) else (Delivery,):
            for name, default in vars(kind).items():
                if name[0] != "_" and name not in kind.__abstractmethods__ and not hasattr(transport, name):
                    setattr(transport, name, MethodType(default, transport) if callable(default) else default)
    return cast(Delivery, transport)


def type_of(conn_id: str) -> str | None:
    """Return a connection's type."""
    from airflow.sdk import BaseHook

    return BaseHook.get_connection(conn_id).conn_type


def check_type(conn_id: str, conn_type: str | None, own: str) -> None:
    """Check that no other transport serves a connection's type.

    :raises WrongTransport: another one does.
    """
    target = BUILT_IN[own]
    if BUILT_IN.get(conn_type or own, target) != target:
        raise WrongTransport(conn_id, conn_type, [name for name, other in BUILT_IN.items() if other == target])


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


def store_for(conn_id: str, deliver_conn_id: str, **options: object) -> DelayStore:
    """Return the store of a SQL connection, for messages that ``deliver_conn_id`` delivers in the end.

    :param options: further keyword arguments of :class:`airflow_delayed.hooks.store.DelayedStoreHook`.
    """
    return cast(DelayStore, _load(_STORE)(conn_id, deliver_conn_id, **options))


def _load(target: str) -> Callable[..., object]:
    # by name: the hooks know this interface, and it does not know them
    module, _, name = target.partition(":")
    return cast(Callable[..., object], getattr(import_module(module), name))
