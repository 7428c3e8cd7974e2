"""The way of a message: straight to its transport, or into a store before; and publishing it there."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import cast

from airflow_delayed.delivery import BatchBounds, DelayStore, Delivery, SendReport
from airflow_delayed.errors import AccessDenied, DelayedError, SendFailed, TransportUnavailable
from airflow_delayed.lineage import MOST_DATASETS, Dataset
from airflow_delayed.message import MICROSECOND, START_NEW_TRACE, DelayedMessage, microseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The transport that delivers, and the store in which messages may wait before.

    Operators and Spark send through it, so a step that is the same for all transports has its place here, as the
    trace has: what a message must fulfil in :meth:`check` and :meth:`fits`, what it becomes in :meth:`publish`.

    :param store: takes messages due later than ``hold_over`` from now; without it the transport takes all.
    :param trace: the headers of a trace, for all messages.
    """

    delivery: Delivery
    store: DelayStore | None = None
    hold_over: timedelta = timedelta(0)
    trace: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        delivery: Delivery,
        store: DelayStore | None = None,
        *,
        hold_over: timedelta = timedelta(0),
        trace: Mapping[str, str],
    ) -> Route:
        """Return the route through a transport.

        A transport that stores messages itself takes all. Otherwise the store takes what is due later than
        ``hold_over``, or than the transport's horizon if that is shorter.
        """
        if delivery.is_store:
            return cls(delivery=delivery, store=cast(DelayStore, delivery), trace=trace)
        if store is None:
            return cls(delivery=delivery, trace=trace)
        return cls(delivery=delivery, store=store, hold_over=min(hold_over, delivery.horizon), trace=trace)

    def holds(self, message: DelayedMessage, now: datetime) -> bool:
        """Return whether a message waits in the store."""
        return self.store is not None and (self.holds_all or message.due_at - now > self.hold_over)

    def split(self, messages: list[DelayedMessage], now: datetime) -> tuple[list[DelayedMessage], list[DelayedMessage]]:
        """Return the messages for the transport, and the messages for the store."""
        if self.store is None or self.holds_all:
            return (messages, []) if self.store is None else ([], messages)
        direct: list[DelayedMessage] = []
        to_store: list[DelayedMessage] = []
        for message in messages:
            (to_store if self.holds(message, now) else direct).append(message)
        return direct, to_store

    def stored_from(self, now: datetime) -> int:
        """Return the moment after which :meth:`holds` is true, in microseconds since 1970."""
        if self.store is None:
            return sys.maxsize
        return -sys.maxsize if self.holds_all else microseconds(now) + self.hold_over // MICROSECOND

    @property
    def holds_all(self) -> bool:
        """Whether the transport is a store itself, in which everything waits."""
        return self.store is not None and self.store is self.delivery

    def fits(self, bounds: BatchBounds, now: datetime) -> bool:
        """Return whether all messages within these bounds pass :meth:`check`; False if some may not."""
        if self.store is not None:
            if not self.store.fits(bounds, now):
                return False
            if self.holds_all:
                return True
            # the store dispatches the others when they are no further off
            bounds = replace(bounds, last_due=min(bounds.last_due, now + self.hold_over))
        return self.delivery.fits(bounds, now)

    def check(self, message: DelayedMessage, now: datetime) -> None:
        """Check a message against the limits of the store and the transport on its way."""
        if self.holds(message, now):
            assert self.store is not None
            self.store.check(message, now)
            if self.holds_all:
                return
            now = message.due_at - self.hold_over
        self.delivery.check(message, now)

    def leave_known(self, direct: list[DelayedMessage], to_store: list[DelayedMessage]) -> None:
        """Move messages whose ids the store knows from ``direct`` to ``to_store``.

        The store tells a copy from a change, so that nothing is sent twice.
        """
        if self.store is None or self.holds_all or not direct:
            return
        known = self.store.known([message.message_id for message in direct])
        to_store += (message for message in direct if message.message_id in known)
        direct[:] = [message for message in direct if message.message_id not in known]

    def publish(
        self,
        direct: list[DelayedMessage],
        to_store: list[DelayedMessage],
        now: datetime,
        *,
        sent: SendReport,
        stored: SendReport,
    ) -> DelayedError | None:
        """Send the messages due sooner, then store the others, and count the confirmed ones in the reports."""
        away: DelayedError | None = None
        if self.trace:
            direct, to_store = self._traced(direct, now), self._traced(to_store, now)
        if direct:
            record = None if self.store is None or self.holds_all else self.store.note_sent
            away = publish_and_record(self.delivery, direct, sent, record)
        if to_store:
            assert self.store is not None
            publish_and_record(self.store, to_store, stored)
        return away

    def _traced(self, messages: list[DelayedMessage], now: datetime) -> list[DelayedMessage]:
        # a receiver's span within the sender's would last as long as the delay
        linked = {**self.trace, START_NEW_TRACE: "True"}
        return [replace(message, trace=linked if message.due_at > now else self.trace) for message in messages]

    def outputs(self, counts: Mapping[str, int], *, stored: bool) -> list[Dataset]:
        """Return OpenLineage's names of the store's table, if it took any, and of the main destinations."""
        table = self.store.own_dataset() if stored and self.store is not None else None
        names = [table, *(self.delivery.dataset(name) for name, _ in Counter(counts).most_common(MOST_DATASETS))]
        return [name for name in names if name is not None]

    def close(self) -> None:
        """Close all connections; the next use makes new ones."""
        self.delivery.close()
        if self.store is not None and not self.holds_all:
            self.store.close()


def is_away(error: DelayedError) -> bool:
    """Return whether a transport could not be reached, which passes by itself: it has refused nothing."""
    cause = error.__cause__ if isinstance(error, SendFailed) else error
    return isinstance(cause, TransportUnavailable) and not isinstance(cause, AccessDenied)


def publish_and_record(
    delivery: Delivery,
    messages: list[DelayedMessage],
    report: SendReport,
    record: Callable[[list[DelayedMessage]], None] | None = None,
) -> DelayedError | None:
    """Publish messages, count the confirmed ones in the report, and record them in the store.

    A process that is killed in between publishes them again, with the same ids.

    :return: why the transport could not be reached, if there is a store in front; without a store it is raised.
    """
    try:
        report.merge(delivery.send(messages))
    except DelayedError as error:
        partly = getattr(error, "report", None)
        if isinstance(partly, SendReport):
            report.merge(partly)
        if record is not None and isinstance(error, SendFailed):
            # the user sees the first error
            with suppress(DelayedError):
                record(confirmed_messages(messages, error))
        if record is not None and is_away(error):
            return error
        raise
    if record is not None:
        record(messages)
    return None


def confirmed_messages(messages: list[DelayedMessage], error: SendFailed) -> list[DelayedMessage]:
    """Return the messages that were confirmed, or none if the error does not account for each that was taken.

    A transport takes messages in their order. A message that was not even tried must not pass for sent.
    """
    failed = {message_id for message_id, _ in error.failures}
    confirmed = error.report.sent + error.report.duplicates
    taken = messages[: confirmed + len(error.failures)]
    others = [message for message in taken if message.message_id not in failed]
    return others if confirmed == len(others) else []
