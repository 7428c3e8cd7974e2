"""A store of one's own: what a dispatcher needs of it, whatever it is kept in.

The seed is NServiceBus's IDelayedMessageStore (NServiceBus.Transport.Msmq 2.0.7, DelayedDelivery), whose members have
Python's names here:

========================= =======================================================================================
SetupInfrastructure       :meth:`~DelayedMessageStore.set_up_infrastructure`
Initialize                :meth:`~DelayedMessageStore.initialize`
Store                     :meth:`~DelayedMessageStore.store`
FetchNextDueTimeout       :meth:`~DelayedMessageStore.fetch_next_due`
Next                      :meth:`~DelayedMessageStore.next_due`
Remove                    :meth:`~DelayedMessageStore.remove`
IncrementFailureCount     :meth:`~DelayedMessageStore.increment_failure_count`
DelayedMessage            :class:`HeldMessage`
========================= =======================================================================================

The order of calls is that of its code (MsmqTransport.cs; its documentation says otherwise): ``initialize`` once and
first, then ``set_up_infrastructure``, then all others in any order. :class:`airflow_delayed.testing.store_contract`
holds a store to all this; :mod:`airflow_delayed.store.custom_dispatch` dispatches from it.

One thing differs. There, a row that was fetched is locked by the transaction that the dispatcher has around its work.
Here a store gives what it fetched to nobody else for a while, a lease, and whoever is killed holds it until that ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal, Protocol, runtime_checkable

from airflow_delayed.errors import InputError
from airflow_delayed.message import DelayedMessage

#: ``exactly_once``: fetching, sending and removing happen all or not at all (the seed's TransactionScope mode).
Consistency = Literal["at_least_once", "exactly_once"]

#: How long a store holds at least what it has fetched for somebody.
LEASE = timedelta(seconds=30)


class UnsupportedConsistency(InputError):
    """A store, or what dispatches from it, cannot keep the consistency that is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldMessage:
    """A message that a store has fetched, and holds for whoever asked.

    :param failures: how often handing it over has failed before.
    :param handle: what the store finds it by; nobody else looks at it.
    """

    message: DelayedMessage
    failures: int = 0
    handle: object = None


class DelayedMessageStore(Protocol):
    """Keeps messages until they are due. Several dispatchers, each with an object of its own, may use one store.

    A method may raise anything when the store cannot be reached; the dispatcher tries again until its breaker trips.
    """

    def initialize(self, name: str, consistency: Consistency) -> None:
        """Get ready; called once, before anything else. Changes nothing that others see.

        :param name: of the store, as the seed's endpoint: tables or keys may be called after it.
        :raises UnsupportedConsistency: this consistency cannot be kept.
        """
        ...

    def set_up_infrastructure(self) -> None:
        """Make tables and the like where they are missing; may be called again at any time."""
        ...

    def store(self, message: DelayedMessage) -> None:
        """Keep a message, as it is: its due time to the microsecond. The same message once more is still one."""
        ...

    def fetch_next_due(self, at: datetime) -> HeldMessage | None:
        """Return the message that is due the longest by ``at``, or None if none is, passing over those that are held.

        It is held until it is removed, or a failure is counted, or the lease (30 s or more) ends.
        """
        ...

    def next_due(self) -> datetime | None:
        """Return when the next message is due, or None if there is none. Those that are held may count or not."""
        ...

    def remove(self, held: HeldMessage) -> bool:
        """Remove a message that was handed over, and return whether it was still there."""
        ...

    def increment_failure_count(self, held: HeldMessage) -> bool:
        """Count one failure more and hold the message no longer; return whether it was still there."""
        ...


@runtime_checkable
class FetchesBatches(Protocol):
    """What a store may have besides, if it can fetch several at once for the price of one."""

    def fetch_batch(self, at: datetime, limit: int) -> Sequence[HeldMessage]:
        """Return up to so many messages, as ``fetch_next_due`` would one after the other."""
        ...
