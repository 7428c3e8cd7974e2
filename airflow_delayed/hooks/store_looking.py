"""What a user of a store sees: the part of DelayedStoreHook that only reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import cached_property

from airflow_delayed.message import utc
from airflow_delayed.origin import SentBy
from airflow_delayed.store import audit, content, counts, dispatched, listing
from airflow_delayed.store.api import Store
from airflow_delayed.store.audit import AuditRecord
from airflow_delayed.store.clock import CarriedClock
from airflow_delayed.store.content import Content
from airflow_delayed.store.counts import StoreCounts
from airflow_delayed.store.criteria import OWN, Criteria, states_of
from airflow_delayed.store.dispatched import Dispatched
from airflow_delayed.store.engine import database_errors
from airflow_delayed.store.listing import DispatcherSeen, Page
from airflow_delayed.store.stored import Remembered, StoredMessage


class StoreLooking(Store):
    """List, count, and tell what is known of a message and who changed what; all of it read-only."""

    def list(
        self,
        *,
        destination: str | None = None,
        deliver_conn_id: str | None = None,
        tag: str | None = None,
        due_from: datetime | None = None,
        due_until: datetime | None = None,
        state: str | Sequence[str] | None = None,
        ids: Iterable[str] | None = None,
        sent_by: SentBy | None = None,
        limit: int | None = None,
        after: str | None = None,
    ) -> Iterator[StoredMessage]:
        """Yield what is in the store, failed and expired messages too, ordered by due time and id.

        Read in pages of 1000, by key: a page deep in a long list costs what the first does. Neither body nor headers
        are read, and no transaction is open between two pages.

        :param deliver_conn_id: the connection that delivers; the store's own ``conn_id`` for its queue tables.
        :param due_from: due then or later; aware.
        :param due_until: due before then; aware.
        :param state: "waiting", "due", "in flight", "retrying", "failed" or "expired", or several of them.
        :param ids: only these.
        :param sent_by: only what these runs of tasks stored.
        :param limit: at most so many.
        :param after: go on behind a message, by its ``token``.
        :raises ValueError: an unknown state, or ``after`` is no token.
        :raises TopologyError: the table is missing.
        """
        criteria = self._criteria(destination, deliver_conn_id, tag, due_from, due_until, state, sent_by)
        chosen = None if ids is None else ids_of(ids)
        with self._ready():
            yield from listing.listed(self.engine, self.tables, criteria, ids=chosen, limit=limit, after=after)

    def page(
        self,
        *,
        destination: str | None = None,
        deliver_conn_id: str | None = None,
        tag: str | None = None,
        due_from: datetime | None = None,
        due_until: datetime | None = None,
        state: str | Sequence[str] | None = None,
        ids: Iterable[str] | None = None,
        sent_by: SentBy | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> Page:
        """Return one page of :meth:`list`, with the database's time and where the next one begins.

        Of ids, at most 1000, it also tells those whose message is gone.
        """
        criteria = self._criteria(destination, deliver_conn_id, tag, due_from, due_until, state, sent_by)
        chosen = None if ids is None else ids_of(ids)
        with self._ready():
            return listing.page(
                self.engine,
                self.tables,
                criteria,
                ids=chosen,
                limit=limit,
                after=after,
                database_time=self._carried_clock.read,
            )

    def get(self, message_id: str) -> StoredMessage | Remembered | None:
        """Return what is known of an id: where its message stands, or what became of it and when; None: nothing."""
        with self._ready():
            return listing.known(self.engine, self.tables, message_id)

    def content(self, message_id: str, *, body_limit: int) -> Content | None:
        """Return a message's headers, and the first bytes of its body; None: it is not in the store."""
        with self._ready():
            return content.content(self.engine, self.tables, message_id, body_limit=body_limit)

    def audit(
        self,
        *,
        message_id: str | None = None,
        since: datetime | None = None,
        limit: int | None = None,
        after: str | None = None,
    ) -> Iterator[AuditRecord]:
        """Yield who changed what, the newest first: one record for each call of cancel, reschedule, retry and so on.

        Read in pages, by key.

        :param message_id: only calls that name this id. One by filter names none, one by ids the first five.
        :param since: only what began then or later; aware.
        :param limit: at most so many.
        :param after: go on behind the record with this ``.token``.
        :raises ValueError: ``after`` is no token, or ``limit`` is negative.
        """
        moment = None if since is None else utc("since", since)
        with self._ready():
            yield from audit.records(
                self.engine, self.tables, message_id=message_id, since=moment, limit=limit, after=after
            )

    def last_dispatched(self) -> Dispatched | None:
        """Return the message that was handed over last; None: none is remembered."""
        with self._ready():
            return dispatched.last(self.engine, self.tables)

    def counts(
        self,
        *,
        destination: str | None = None,
        deliver_conn_id: str | None = None,
        tag: str | None = None,
        overdue: timedelta = timedelta(minutes=1),
        hours: int = 24,
        minutes: int = 0,
        by_destination: bool = False,
    ) -> StoreCounts:
        """Count what is in the store.

        It reads the rows that are due, and those that are tried again, and counts all others by an index without
        looking at them: those of the remembered too. A filter, or ``by_destination``, has it read all rows that are
        meant.
        A message that failed more than a day before it is due counts as waiting; the messages of a dispatcher that
        died more than an hour ago count as remembered as well, until they are handed over.

        :param overdue: due for longer than this counts as overdue.
        :param hours: count by hour what comes due in so many hours, 0 to 744, the present one included.
        :param minutes: count by minute what comes due in so many minutes, 0 to 1440, the present one included.
        :param by_destination: count by destination.
        :raises ValueError: ``hours``, ``minutes`` or ``overdue`` is out of range.
        """
        criteria = self._criteria(destination, deliver_conn_id, tag)
        with self._ready():
            return counts.count(
                self.engine,
                self.tables,
                criteria,
                overdue=overdue,
                hours=hours,
                minutes=minutes,
                by_destination=by_destination,
            )

    def dispatchers(self) -> Sequence[DispatcherSeen]:
        """Return who dispatches, and who did lately: up to a thousand runs, the one seen last first."""
        with self._ready():
            return listing.dispatchers(self.engine, self.tables)

    def gauges(self) -> None:
        """Emit the counts as gauges through Airflow's Stats.

        ``delayed.store.waiting``, ``.due``, ``.overdue`` (by a minute), ``.in_flight``, ``.retrying``, ``.failed``,
        ``.expired`` and ``.remembered``, each with the tag ``conn_id``; ``delayed.store.oldest_due_seconds`` is how
        long the oldest has been due. Reads what :meth:`counts` reads.
        """
        from airflow_delayed.compat import stats

        found = self.counts(hours=0)
        late = timedelta(0) if found.oldest_due is None else found.at - found.oldest_due
        tags = {"conn_id": self.conn_id}
        for name, value in {**found.numbers(), "oldest_due_seconds": late.total_seconds()}.items():
            stats().gauge(f"delayed.store.{name}", value, tags=tags)

    @cached_property
    def _carried_clock(self) -> CarriedClock:
        return CarriedClock()

    @contextmanager
    def _ready(self) -> Iterator[None]:
        with database_errors(self.conn_id, self.engine, self.tables):
            self._check_version()
            yield

    def _criteria(
        self,
        destination: str | None = None,
        deliver_conn_id: str | None = None,
        tag: str | None = None,
        due_from: datetime | None = None,
        due_until: datetime | None = None,
        state: str | Sequence[str] | None = None,
        sent_by: SentBy | None = None,
    ) -> Criteria:
        return Criteria(
            destination=destination,
            deliver_conn_id=OWN if deliver_conn_id == self.conn_id else deliver_conn_id,
            tag=tag,
            due_from=due_from,
            due_until=due_until,
            states=states_of(state),
            sent_by=sent_by,
        )


def ids_of(ids: Iterable[str]) -> Sequence[str]:
    """Return ids as they were given, one alone too, which would be taken letter by letter."""
    return [ids] if isinstance(ids, str) else [*ids]
