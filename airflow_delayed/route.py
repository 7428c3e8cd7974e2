"""Which way a message goes: straight to its transport, or into a store before."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from airflow_delayed.delivery import DelayStore, Delivery
from airflow_delayed.extremes import Extremes
from airflow_delayed.lineage import NAMED, Dataset
from airflow_delayed.message import MICROSECOND, DelayedMessage, microseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Who delivers, and what waits in a store before.

    :param store: takes what is due later than ``hold_over`` from now; without it the transport takes all.
    """

    delivery: Delivery
    store: DelayStore | None = None
    hold_over: timedelta = timedelta(0)

    def holds(self, message: DelayedMessage, now: datetime) -> bool:
        """Return whether a message waits in the store."""
        return self.store is not None and (self.holds_all or message.due_at - now > self.hold_over)

    def parted(
        self, messages: list[DelayedMessage], now: datetime
    ) -> tuple[list[DelayedMessage], list[DelayedMessage]]:
        """Return the messages that go straight to the transport, and those that wait in the store."""
        if self.store is None or self.holds_all:
            return (messages, []) if self.store is None else ([], messages)
        direct: list[DelayedMessage] = []
        held: list[DelayedMessage] = []
        for message in messages:
            (held if self.holds(message, now) else direct).append(message)
        return direct, held

    def held_from(self, now: datetime) -> int:
        """Return after which moment :meth:`holds` is true, in microseconds since 1970."""
        if self.store is None:
            return sys.maxsize
        return -sys.maxsize if self.holds_all else microseconds(now) + self.hold_over // MICROSECOND

    @property
    def holds_all(self) -> bool:
        """Whether the transport is a store itself, in which everything waits."""
        return self.store is not None and self.store is self.delivery

    def fits(self, extremes: Extremes, now: datetime) -> bool:
        """Return whether all messages within these bounds pass :meth:`check`; False where that is not sure."""
        if self.store is not None:
            if not self.store.fits(extremes, now):
                return False
            if self.holds_all:
                return True
            # what is due later than that is handed over by then
            extremes = replace(extremes, last_due=min(extremes.last_due, now + self.hold_over))
        return self.delivery.fits(extremes, now)

    def check(self, message: DelayedMessage, now: datetime) -> None:
        """Check a message against the limits of all that it will pass through.

        :raises LimitExceeded: it is beyond one of them.
        """
        if self.holds(message, now):
            assert self.store is not None
            self.store.check(message, now)
            if self.holds_all:
                return
            now = message.due_at - self.hold_over
        self.delivery.check(message, now)

    def leave_known(self, direct: list[DelayedMessage], held: list[DelayedMessage]) -> None:
        """Move what the store knows from ``direct`` to ``held``.

        What the store knows stays the store's: it tells a copy from a change, and nothing is sent twice.
        """
        if self.store is None or self.holds_all or not direct:
            return
        known = self.store.known([message.message_id for message in direct])
        held += (message for message in direct if message.message_id in known)
        direct[:] = [message for message in direct if message.message_id not in known]

    def outputs(self, counts: Counter[str], *, stored: bool) -> list[Dataset]:
        """Name where messages went: the store's table, if that took any, and the destinations with the most of them.

        :param counts: messages by destination.
        :param stored: the store took some.
        """
        table = self.store.own_dataset() if stored and self.store is not None else None
        names = [table, *(self.delivery.dataset(name) for name, _ in counts.most_common(NAMED))]
        return [name for name in names if name is not None]

    def close(self) -> None:
        """Close all connections; the next use makes new ones."""
        self.delivery.close()
        if self.store is not None and not self.holds_all:
            self.store.close()
