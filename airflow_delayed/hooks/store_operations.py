"""What a user of a store sees and changes: the part of DelayedStoreHook that has nothing to do with storing."""

from __future__ import annotations

import getpass
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any

from sqlalchemy import Engine

from airflow_delayed import compat
from airflow_delayed.message import delay_of, due_after, utc
from airflow_delayed.store import counts, listing
from airflow_delayed.store.changes import Cancel, Change, Erase, Reschedule, Retry
from airflow_delayed.store.counts import StoreCounts
from airflow_delayed.store.criteria import OWN, Criteria, states_of
from airflow_delayed.store.engine import database_errors
from airflow_delayed.store.listing import DispatcherSeen
from airflow_delayed.store.operations import REMEMBERED, Operations
from airflow_delayed.store.outcomes import Outcomes
from airflow_delayed.store.schema import Tables
from airflow_delayed.store.states import MessageState
from airflow_delayed.store.stored import Remembered, StoredMessage

#: What ``purge`` removes.
REASONS = (MessageState.FAILED.value, MessageState.EXPIRED.value, REMEMBERED)
#: Gauges are looked for no more often; in seconds.
GAUGE_PAUSE = 30.0


class StoreOperations:
    """List, count, cancel, reschedule, retry, purge, erase; each safe beside dispatchers at work.

    The changes are by ids or by a filter, and at least one criterion must be given. They work on a thousand messages a
    transaction, say for each id whether they came in time, wait up to half a second in all for messages that are being
    handed over, and leave a row in the audit table: who, when, what, and how many; no content.

    ``actor`` is who does it, for the audit; by default the task, or the user of the operating system.
    ``dry_run=True`` changes nothing and tells what would happen.
    """

    conn_id: str
    tables: Tables
    _gauged: float | None = None

    @property
    def engine(self) -> Engine:
        """The connection's engine."""
        raise NotImplementedError

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
        :param limit: at most so many.
        :param after: go on behind a message, by its ``token``.
        :raises ValueError: an unknown state, or ``after`` is no token.
        :raises TopologyError: the table is missing.
        """
        criteria = self._criteria(destination, deliver_conn_id, tag, due_from, due_until, state)
        chosen = None if ids is None else _ids(ids)
        with self._ready():
            yield from listing.listed(self.engine, self.tables, criteria, ids=chosen, limit=limit, after=after)

    def get(self, message_id: str) -> StoredMessage | Remembered | None:
        """Return what is known of an id: where its message stands, or what became of it and when; None: nothing."""
        with self._ready():
            return listing.known(self.engine, self.tables, message_id)

    def counts(
        self,
        *,
        destination: str | None = None,
        deliver_conn_id: str | None = None,
        tag: str | None = None,
        overdue: timedelta = timedelta(minutes=1),
        hours: int = 24,
        by_destination: bool = False,
    ) -> StoreCounts:
        """Count what is in the store.

        It reads the rows that are due within a day, and counts all others by an index without looking at them: those
        of the failed and of the remembered too. A filter, or ``by_destination``, has it read all rows that are meant.
        A message that failed more than a day before it is due counts as waiting; the messages of a dispatcher that
        died more than an hour ago count as remembered as well, until they are handed over.

        :param overdue: due for longer than this counts as overdue.
        :param hours: count by hour what comes due in so many hours, 0 to 744, the present one included.
        :param by_destination: count by destination.
        :raises ValueError: ``hours`` or ``overdue`` is out of range.
        """
        criteria = self._criteria(destination, deliver_conn_id, tag)
        with self._ready():
            return counts.count(
                self.engine, self.tables, criteria, overdue=overdue, hours=hours, by_destination=by_destination
            )

    def cancel(
        self,
        ids: Iterable[str] | None = None,
        *,
        destination: str | None = None,
        deliver_conn_id: str | None = None,
        tag: str | None = None,
        due_from: datetime | None = None,
        due_until: datetime | None = None,
        state: str | Sequence[str] | None = None,
        dry_run: bool = False,
        actor: str | None = None,
    ) -> Outcomes:
        """Remove messages, failed ones too, and return for each id whether it came in time.

        The ids are remembered, so that a late retry of the task that stored them does not bring them back. What was
        cancelled is never handed over, unless a dispatcher died after it had sent it and before it could say so.

        :raises ValueError: neither ids nor a criterion is given, or both.
        """
        criteria = self._criteria(destination, deliver_conn_id, tag, due_from, due_until, state)
        return self._change(Cancel(), ids, criteria, dry_run, actor)

    def reschedule(
        self,
        ids: Iterable[str] | None = None,
        due_at: datetime | None = None,
        *,
        delay: timedelta | float | None = None,
        destination: str | None = None,
        deliver_conn_id: str | None = None,
        tag: str | None = None,
        due_from: datetime | None = None,
        due_until: datetime | None = None,
        state: str | Sequence[str] | None = None,
        dry_run: bool = False,
        actor: str | None = None,
    ) -> Outcomes:
        """Give messages that wait another due time, and return for each id whether it came in time.

        Failed messages stay as they are (``retry`` brings them back), and so does one that would expire before it is
        due. The task that stored a message may run again: the message is known by what it said then, and keeps its new
        due time.

        :param due_at: aware; what is past is handed over at once.
        :param delay: in its place: from now on, by the database's clock; a timedelta or seconds.
        :raises ValueError: neither ids nor a criterion is given, or both; neither or both of due_at and delay.
        :raises NaiveTime: ``due_at`` has no time zone.
        """
        criteria = self._criteria(destination, deliver_conn_id, tag, due_from, due_until, state)
        if (due_at is None) == (delay is None):
            raise ValueError("reschedule: give due_at= or delay=, and not both")
        if due_at is None:
            with self._ready():
                due_at = due_after(self._operations.now(), delay_of(delay or 0))
        return self._change(Reschedule(utc("due_at", due_at)), ids, criteria, dry_run, actor)

    def retry(
        self,
        ids: Iterable[str] | None = None,
        *,
        destination: str | None = None,
        deliver_conn_id: str | None = None,
        tag: str | None = None,
        due_from: datetime | None = None,
        due_until: datetime | None = None,
        dry_run: bool = False,
        actor: str | None = None,
    ) -> Outcomes:
        """Let failed messages wait again as if they had never failed; those that are due are handed over at once.

        What has expired stays: it would only expire again.

        :raises ValueError: neither ids nor a criterion is given, or both.
        """
        criteria = self._criteria(destination, deliver_conn_id, tag, due_from, due_until)
        return self._change(Retry(), ids, criteria, dry_run, actor)

    def erase(
        self,
        ids: Iterable[str] | None = None,
        *,
        destination: str | None = None,
        deliver_conn_id: str | None = None,
        tag: str | None = None,
        due_from: datetime | None = None,
        due_until: datetime | None = None,
        state: str | Sequence[str] | None = None,
        dry_run: bool = False,
        actor: str | None = None,
    ) -> Outcomes:
        """Remove messages and all that is known of them but the id, for a person's right to it.

        What waits or has failed goes with body and headers, as cancelled. Of an id that is only remembered go its
        destination, due time and digest; a tag is not remembered, so give the ids of what was handed over long ago.
        The id itself stays, or a late retry would send it anew; ``purge`` forgets it. Rows of the audit name up to five
        ids and the tag that was asked for.

        :raises ValueError: neither ids nor a criterion is given, or both.
        """
        criteria = self._criteria(destination, deliver_conn_id, tag, due_from, due_until, state)
        return self._change(Erase(), ids, criteria, dry_run, actor)

    def purge(
        self,
        older_than: timedelta,
        *,
        reason: str | Sequence[str] = REASONS,
        dry_run: bool = False,
        actor: str | None = None,
    ) -> Outcomes:
        """Remove what has failed or expired for longer than a span, and forget the ids remembered for longer.

        The ids of what is removed are remembered from now on.

        :param reason: "failed", "expired", "remembered", or several; all of them unless given.
        :raises ValueError: ``older_than`` is negative, or the reason is none of these.
        """
        reasons = [reason] if isinstance(reason, str) else [*reason]
        if not reasons or set(reasons) - set(REASONS):
            raise ValueError(f"reason={reason!r} must be of {', '.join(REASONS)}")
        if older_than < timedelta(0):
            raise ValueError(f"older_than={older_than} is negative")
        with self._ready():
            return self._operations.purge(older_than, reasons, who=actor or acting(), dry_run=dry_run)

    def dispatchers(self) -> Sequence[DispatcherSeen]:
        """Return who dispatches, and who did lately."""
        with self._ready():
            return listing.dispatchers(self.engine, self.tables)

    def gauges(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Emit the counts as gauges through Airflow's Stats, no more often than every 30 seconds.

        ``delayed.store.waiting``, ``.due``, ``.overdue`` (by a minute), ``.in_flight``, ``.retrying``, ``.failed``,
        ``.expired`` and ``.remembered``, each with the tag ``conn_id``; ``delayed.store.oldest_due_seconds`` is how
        long the oldest has been due. Reads what :meth:`counts` reads.
        """
        if self._gauged is not None and monotonic() - self._gauged < GAUGE_PAUSE:
            return
        found = self.counts(hours=0)
        late = timedelta(0) if found.oldest_due is None else found.at - found.oldest_due
        tags = {"conn_id": self.conn_id}
        for name, value in {**found.numbers(), "oldest_due_seconds": late.total_seconds()}.items():
            compat.gauge(f"delayed.store.{name}", value, tags)
        self._gauged = monotonic()

    def _check_version(self) -> None:
        """Check that the tables are of this release."""
        raise NotImplementedError

    @contextmanager
    def _ready(self) -> Iterator[None]:
        with database_errors(self.conn_id, self.engine, self.tables):
            self._check_version()
            yield

    @cached_property
    def _operations(self) -> Operations:
        return Operations(self.engine, self.tables)

    def _criteria(
        self,
        destination: str | None = None,
        deliver_conn_id: str | None = None,
        tag: str | None = None,
        due_from: datetime | None = None,
        due_until: datetime | None = None,
        state: str | Sequence[str] | None = None,
    ) -> Criteria:
        return Criteria(
            destination=destination,
            deliver_conn_id=OWN if deliver_conn_id == self.conn_id else deliver_conn_id,
            tag=tag,
            due_from=due_from,
            due_until=due_until,
            states=states_of(state),
        )

    def _change(
        self, change: Change, ids: Iterable[str] | None, criteria: Criteria, dry_run: bool, actor: str | None
    ) -> Outcomes:
        if ids is not None and criteria.given:
            raise ValueError(f"{change.action}: give ids or a filter, and not both")
        if ids is None and not criteria.given:
            raise ValueError(f"{change.action}: give ids, tag= or another filter; nothing is meant by all there is")
        who = actor or acting()
        with self._ready():
            if ids is not None:
                return self._operations.by_ids(change, _ids(ids), who=who, dry_run=dry_run)
            return self._operations.by_criteria(change, criteria, who=who, dry_run=dry_run)


def _ids(ids: Iterable[str]) -> Sequence[str]:
    # a text alone would be taken letter by letter
    return [ids] if isinstance(ids, str) else [*ids]


def acting() -> str:
    """Return who is at work: the task, with who triggered its run; elsewhere the user of the operating system."""
    from airflow.sdk import get_current_context

    try:
        context: Any = get_current_context()
    except RuntimeError:
        return system_user()
    task = context["ti"]
    who = f"task {task.dag_id}.{task.task_id}, run {task.run_id}"
    triggered_by = getattr(context.get("dag_run"), "triggering_user_name", None)
    return f"{who}, triggered by {triggered_by}" if triggered_by else who


def system_user() -> str:
    """Return the name of the operating system's user."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # a container's user need not have a name
        return f"uid {os.getuid()}"
