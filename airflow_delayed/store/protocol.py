"""The interface of a custom store: what a dispatcher calls, whatever the messages are kept in.

It follows NServiceBus's IDelayedMessageStore (NServiceBus.Transport.Msmq 2.0.7, DelayedDelivery), with Python's names:

========================= =======================================================================================
SetupInfrastructure       :meth:`~DelayedMessageStore.set_up_infrastructure`
Initialize                :meth:`~DelayedMessageStore.initialize`
Store                     :meth:`~DelayedMessageStore.store`
FetchNextDueTimeout       :meth:`~DelayedMessageStore.fetch_next_due`
Next                      :meth:`~DelayedMessageStore.next_due`
Remove                    :meth:`~DelayedMessageStore.remove`
IncrementFailureCount     :meth:`~DelayedMessageStore.increment_failure_count`
DelayedMessage            :class:`LeasedMessage`
========================= =======================================================================================

The order of calls is that of its code (MsmqTransport.cs; its documentation differs): ``initialize`` once and first,
then ``set_up_infrastructure``, then the others in any order. :mod:`airflow_delayed.testing.store_contract` tests a
store against this interface; :mod:`airflow_delayed.store.dispatch.custom` dispatches from it.

One thing differs. NServiceBus's dispatcher locks a fetched row by a transaction around its work. Here a store leases a
fetched message: no other dispatcher can fetch it until the lease ends, which also frees the messages of a dispatcher
that was killed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Protocol, runtime_checkable

from airflow_delayed.errors import InputError
from airflow_delayed.message import DelayedMessage
from airflow_delayed.store.policy import LEASE as LEASE

#: ``exactly_once``: fetch, send and remove are one transaction (NServiceBus's TransactionScope mode).
Consistency = Literal["at_least_once", "exactly_once"]


class UnsupportedConsistency(InputError):
    """A store, or its dispatcher, cannot keep the requested consistency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedMessage:
    """A message that a store has fetched and leased to a dispatcher.

    :param failures: how many attempts to deliver it have failed.
    :param handle: the store's own reference to it; the dispatcher does not read it.
    """

    message: DelayedMessage
    failures: int = 0
    handle: object = None


class DelayedMessageStore(Protocol):
    """Keeps messages until they are due. Several dispatchers, each with its own object, may use one store.

    Experimental: it may change without a deprecation before (docs/development/stability.md).

    A method may raise any exception when the store cannot be reached; the dispatcher retries until its breaker trips.
    """

    def initialize(self, name: str, consistency: Consistency) -> None:
        """Prepare the object; called once, before anything else. It changes nothing in the store.

        :param name: the store's name, as NServiceBus's endpoint: tables or keys may be named after it.
        :param consistency: CustomStoreDispatchOperator asks for "at_least_once", and StoreContract for the other too.
        :raises UnsupportedConsistency: the store cannot keep this consistency.
        """
        ...

    def set_up_infrastructure(self) -> None:
        """Create missing tables and the like; may be called again at any time."""
        ...

    def store(self, message: DelayedMessage) -> None:
        """Store a message unchanged, its due time to the microsecond. The same message again changes nothing."""
        ...

    def fetch_next_due(self, at: datetime) -> LeasedMessage | None:
        """Lease and return the message with the earliest due time up to ``at``, without messages that have a lease.

        The lease (:data:`LEASE` or more) also ends when the message is removed or a failure of it is counted. None: no
        such message.
        """
        ...

    def next_due(self) -> datetime | None:
        """Return the earliest due time, or None if there is no message. Leased messages may count or not."""
        ...

    def remove(self, leased: LeasedMessage) -> bool:
        """Remove a delivered message, and return whether it was still there."""
        ...

    def increment_failure_count(self, leased: LeasedMessage) -> bool:
        """Count one more failure and end the lease; return whether the message was still there."""
        ...


@runtime_checkable
class FetchesBatches(Protocol):
    """An optional method, for a store that can fetch several messages in one call."""

    def fetch_batch(self, at: datetime, limit: int) -> Sequence[LeasedMessage]:
        """Return at most ``limit`` messages, as repeated calls of ``fetch_next_due`` would."""
        ...
