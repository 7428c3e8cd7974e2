"""What a user changes in a store: the part of DelayedStoreHook for those who change their mind."""

from __future__ import annotations

import getpass
import os
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any

from airflow_delayed.hooks.store_looking import StoreLooking, ids_of
from airflow_delayed.message import delay_of, due_after, utc
from airflow_delayed.origin import SentBy
from airflow_delayed.store.changes import Cancel, Change, Erase, Reschedule, Retry
from airflow_delayed.store.criteria import Criteria
from airflow_delayed.store.operations import REMEMBERED, Operations
from airflow_delayed.store.outcomes import Outcomes
from airflow_delayed.store.states import MessageState

#: What ``purge`` removes.
REASONS = (MessageState.FAILED.value, MessageState.EXPIRED.value, REMEMBERED)


class StoreOperations(StoreLooking):
    """Cancel, reschedule, retry, purge, erase; each safe beside dispatchers at work.

    The changes are by ids or by a filter, and at least one criterion must be given. They work on a thousand messages a
    transaction, say for each id whether they came in time, wait up to half a second in all for messages that are being
    handed over, and leave a row in the audit table: who, when, what, and how many; no content.

    A filter may name ``sent_by`` too: what these runs of tasks stored. With ``limit`` a change by filter looks at no
    more than so many messages, and ``next`` of what it returns is to be given as ``after`` to go on.

    ``actor`` is who does it, for the audit; by default the task, or the user of the operating system.
    ``dry_run=True`` changes nothing and tells what would happen.
    """

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
        sent_by: SentBy | None = None,
        limit: int | None = None,
        after: str | None = None,
        dry_run: bool = False,
        actor: str | None = None,
    ) -> Outcomes:
        """Remove messages, failed ones too, and return for each id whether it came in time.

        The ids are remembered, so that a late retry of the task that stored them does not bring them back. What was
        cancelled is never handed over, unless a dispatcher died after it had sent it and before it could say so.

        :raises ValueError: neither ids nor a criterion is given, or both.
        """
        criteria = self._criteria(destination, deliver_conn_id, tag, due_from, due_until, state, sent_by)
        return self._change(Cancel(), ids, criteria, dry_run, actor, limit, after)

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
        sent_by: SentBy | None = None,
        limit: int | None = None,
        after: str | None = None,
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
        criteria = self._criteria(destination, deliver_conn_id, tag, due_from, due_until, state, sent_by)
        if (due_at is None) == (delay is None):
            raise ValueError("reschedule: give due_at= or delay=, and not both")
        if due_at is None:
            with self._ready():
                due_at = due_after(self._operations.now(), delay_of(delay or 0))
        return self._change(Reschedule(utc("due_at", due_at)), ids, criteria, dry_run, actor, limit, after)

    def retry(
        self,
        ids: Iterable[str] | None = None,
        *,
        destination: str | None = None,
        deliver_conn_id: str | None = None,
        tag: str | None = None,
        due_from: datetime | None = None,
        due_until: datetime | None = None,
        sent_by: SentBy | None = None,
        limit: int | None = None,
        after: str | None = None,
        dry_run: bool = False,
        actor: str | None = None,
    ) -> Outcomes:
        """Let failed messages wait again as if they had never failed; those that are due are handed over at once.

        What has expired stays: it would only expire again.

        :raises ValueError: neither ids nor a criterion is given, or both.
        """
        criteria = self._criteria(destination, deliver_conn_id, tag, due_from, due_until, None, sent_by)
        return self._change(Retry(), ids, criteria, dry_run, actor, limit, after)

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
        sent_by: SentBy | None = None,
        limit: int | None = None,
        after: str | None = None,
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
        criteria = self._criteria(destination, deliver_conn_id, tag, due_from, due_until, state, sent_by)
        return self._change(Erase(), ids, criteria, dry_run, actor, limit, after)

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

    @cached_property
    def _operations(self) -> Operations:
        return Operations(self.engine, self.tables)

    def _change(
        self,
        change: Change,
        ids: Iterable[str] | None,
        criteria: Criteria,
        dry_run: bool,
        actor: str | None,
        limit: int | None,
        after: str | None,
    ) -> Outcomes:
        if ids is not None and criteria.given:
            raise ValueError(f"{change.action}: give ids or a filter, and not both")
        if ids is None and not criteria.given:
            raise ValueError(f"{change.action}: give ids, tag= or another filter; nothing is meant by all there is")
        if ids is not None and not (limit is None and after is None):
            raise ValueError(f"{change.action}: limit= and after= are for a filter")
        who = actor or acting()
        with self._ready():
            if ids is not None:
                return self._operations.by_ids(change, ids_of(ids), who=who, dry_run=dry_run)
            return self._operations.by_criteria(change, criteria, who=who, dry_run=dry_run, limit=limit, after=after)


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
