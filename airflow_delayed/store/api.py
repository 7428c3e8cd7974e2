"""Store: the one door to the messages in a database. A program reads, changes, counts, dispatches and adopts them here.

No Airflow here: the hook adds the connection, the metrics and the user.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from datetime import datetime, timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import airflow_delayed.store.alchemy  # noqa: F401
from airflow_delayed.criteria import UNSET, Unset, passed
from airflow_delayed.delivery import Clock, Delivery
from airflow_delayed.identity import MAX_NAME, SentBy
from airflow_delayed.message import delay_of, due_after, utc
from airflow_delayed.reports import WithdrawReport
from airflow_delayed.store import audit, counts, pauses, queries, rates, streams
from airflow_delayed.store.audit import AuditEntry, AuditRecord, hash_of, of_ids, system_user
from airflow_delayed.store.bulk_changes import MAX_COUNTED, REMEMBERED, BulkChanges, ChangeArgs, check_token
from airflow_delayed.store.changes import Cancel, Erase, MessageChange, Reschedule, Restore, Retry, Withdraw
from airflow_delayed.store.counts import DispatcherSeen, Progress, StoreCounts
from airflow_delayed.store.dialects import database_time
from airflow_delayed.store.dispatch.dispatcher import Dispatcher
from airflow_delayed.store.dispatch.queue_tables import delete_delivered
from airflow_delayed.store.engine import CarriedClock, close_engine, database_errors, first_line, retried
from airflow_delayed.store.escalations import (
    ArmOutcome,
    Escalation,
    RunAttempt,
    RunFailure,
    RunFailures,
    StoreEscalations,
    TakenBack,
)
from airflow_delayed.store.filters import FilterArgs, MessageFilter, MessageState, run_number, take_left
from airflow_delayed.store.forecast import Forecast
from airflow_delayed.store.health import NAMES_HOSTS, StoreCondition
from airflow_delayed.store.history import Timeline
from airflow_delayed.store.jobs import Job, JobSeen, TooManyJobs
from airflow_delayed.store.lateness import LATE_AFTER
from airflow_delayed.store.leases import DISPATCHED
from airflow_delayed.store.nservicebus.adopt import Adopter, AdoptReport
from airflow_delayed.store.nservicebus.foreign_table import HeaderFormat, Reader, foreign_table, queue_of
from airflow_delayed.store.outcomes import Outcome, Outcomes
from airflow_delayed.store.pauses import SPREAD, OnUnpause, Pause, PauseArgs, PauseReport, UnpauseReport
from airflow_delayed.store.queries import DeliveredMessage, Page
from airflow_delayed.store.records import Content, Remembered, StoredMessage, read_content
from airflow_delayed.store.script import install_script as install_script
from airflow_delayed.store.streams import StreamRecord as StreamRecord
from airflow_delayed.store.version import check_environment, record_environment, recorded_version

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from typing_extensions import Unpack

T = TypeVar("T")

__all__ = [
    "DISPATCHED",
    "LATE_AFTER",
    "MAX_COUNTED",
    "NAMES_HOSTS",
    "REASONS",
    "ArmOutcome",
    "AuditRecord",
    "DeliveredMessage",
    "DispatcherSeen",
    "Escalation",
    "Forecast",
    "Job",
    "JobSeen",
    "OnUnpause",
    "Outcome",
    "Outcomes",
    "Pause",
    "PauseArgs",
    "PauseReport",
    "Progress",
    "RunAttempt",
    "RunFailure",
    "RunFailures",
    "Store",
    "StoreCondition",
    "StoreCounts",
    "TakenBack",
    "Timeline",
    "TooManyJobs",
    "UnpauseReport",
    "check_token",
    "close_engine",
    "first_line",
    "hash_of",
    "of_ids",
    "system_user",
]

#: The reasons of :meth:`Store.purge`.
REASONS = (MessageState.FAILED.value, MessageState.EXPIRED.value, REMEMBERED)


class Store(StoreEscalations):
    """Messages in the tables of one database: what a transport sends, and everything else that a store can do.

    ``list`` and ``page`` read, and ``cancel``, ``restore``, ``reschedule``, ``retry`` and ``erase`` change, the
    messages that match a filter or have these ids. The keywords of a filter are those of
    :class:`airflow_delayed.store.filters.FilterArgs`: ``destination``, ``deliver_conn_id``, ``tag``, ``due_from``,
    ``due_until``, ``state`` and ``sent_by``.

    A change needs ids or at least one criterion, and is safe beside dispatchers at work. It works on up to
    2500 messages a transaction, returns for each id whether it came in time, waits up to half a second in all for
    messages in flight, and leaves a row in the audit table: who, when, what, and how many; no content. Its further
    keywords are those of :class:`airflow_delayed.store.bulk_changes.ChangeArgs`.
    """

    def list(
        self,
        *,
        ids: Iterable[str] | Unset = UNSET,
        limit: int | None = None,
        after: str | None = None,
        **filters: Unpack[FilterArgs],
    ) -> Iterator[StoredMessage]:
        """Yield the messages of the store, failed and expired ones too, ordered by due time and id.

        It reads pages of 1000 messages by key, so that a late page costs as much as the first. It reads neither bodies
        nor headers, and no transaction is open between two pages.

        :param ids: only these.
        :param limit: at most so many.
        :param after: continue behind a message, by its ``token``.
        :raises ValueError: an unknown state, or ``after`` is no token.
        :raises TopologyError: the table is missing.
        """
        return self._messages(self._filter(filters), _ids(ids), limit, after)

    def _messages(
        self, wanted: MessageFilter, ids: Sequence[str] | None, limit: int | None, after: str | None
    ) -> Iterator[StoredMessage]:
        with self._ready():
            yield from queries.messages(self.engine, self.tables, wanted, ids=ids, limit=limit, after=after)

    def page(
        self,
        *,
        ids: Iterable[str] | Unset = UNSET,
        limit: int = 100,
        after: str | None = None,
        **filters: Unpack[FilterArgs],
    ) -> Page:
        """Return one page of :meth:`list`, with the database's time and where the next one begins.

        With ``ids``, at most 1000, it also returns the remembered ones. With ``state`` "dispatched" or "cancelled" it
        returns messages that have left the store, the last one first, for as long as ids are remembered.
        """
        left = take_left(filters)
        wanted, chosen, now = self._filter(filters), _ids(ids), self._carried_clock.read
        with self._ready():
            return queries.page(
                self.engine, self.tables, wanted, ids=chosen, limit=limit, after=after, left=left, database_time=now
            )

    def get(self, message_id: str) -> StoredMessage | Remembered | None:
        """Return the message of an id, or the record of a remembered id; None: the id is unknown."""
        with self._ready():
            return queries.get(self.engine, self.tables, message_id)

    def content(self, message_id: str, *, body_limit: int) -> Content | None:
        """Return the headers of a message and the first bytes of its body; None: it is not in the store.

        Of a cancelled message too, for as long as it can be restored.
        """
        with self._ready():
            return read_content(self.engine, self.tables, message_id, body_limit=body_limit)

    def audit(
        self,
        *,
        message_id: str | None = None,
        since: datetime | None = None,
        limit: int | None = None,
        after: str | None = None,
    ) -> Iterator[AuditRecord]:
        """Yield the audit, the newest record first: one for each call of cancel, reschedule, retry and so on.

        :param message_id: only calls that name this id. A call by filter names none, a call by ids the first five.
        :param since: only calls that began then or later; aware.
        :param limit: at most so many.
        :param after: continue behind the record with this ``.token``.
        :raises ValueError: ``after`` is no token, or ``limit`` is negative.
        """
        moment = None if since is None else utc("since", since)
        with self._ready():
            yield from audit.records(
                self.engine, self.tables, message_id=message_id, since=moment, limit=limit, after=after
            )

    def dispatched_since(self, beginning: str, since: datetime) -> Sequence[str]:
        """Return the remembered ids that begin with a text and were dispatched at a time or later; at most 1000.

        :param since: aware.
        """
        with self._ready():
            return queries.dispatched_since(self.engine, self.tables, beginning, utc("since", since))

    def counts(
        self,
        *,
        destination: str | Unset = UNSET,
        deliver_conn_id: str | Unset = UNSET,
        tag: str | Unset = UNSET,
        overdue: timedelta = LATE_AFTER,
        hours: int = 24,
        minutes: int = 0,
        by_destination: bool = False,
    ) -> StoreCounts:
        """Count the messages and the remembered ids of the store.

        It reads the rows that are due or retried, and counts all others, remembered ids too, by an index. With a
        filter, or ``by_destination``, it reads all rows that match. A message that failed more than a day before its
        due time counts as waiting. The messages of a dispatcher that was killed more than an hour ago count as
        remembered too, until they are dispatched.

        :param overdue: messages that have been due for longer than this count as overdue.
        :param hours: count the messages of the next hours by hour, 0 to 744, the present hour included.
        :param minutes: count the messages of the next minutes by minute, 0 to 1440, the present minute included.
        :param by_destination: count by destination too.
        :raises ValueError: ``hours``, ``minutes`` or ``overdue`` is out of range.
        """
        criteria = passed(destination=destination, deliver_conn_id=deliver_conn_id, tag=tag)
        wanted = self._filter(cast(FilterArgs, criteria))
        with self._ready():
            return counts.count(
                self.engine,
                self.tables,
                wanted,
                overdue=overdue,
                hours=hours,
                minutes=minutes,
                by_destination=by_destination,
            )

    def progress(self, *, ids: Iterable[str] | Unset = UNSET, **filters: Unpack[FilterArgs]) -> Progress:
        """Count messages by outcome: in the store, and after they have left it for as long as ids are remembered.

        Messages that a send handed to the transport at once count as dispatched, if it had this store. With ``sent_by``
        alone, messages that notifiers stored about a run do not count; with their ``tag`` they do.

        :param ids: only these.
        :raises ValueError: ``state`` or ``reason`` is among the criteria: messages that have left the store have none.
        :raises TopologyError: the table is missing.
        """
        wanted = self._filter(filters)
        if wanted.states is not None or wanted.reason is not None:
            raise ValueError("progress: state= and reason= are of messages in the store alone; leave them out")
        with self._ready():
            return counts.progress(self.engine, self.tables, wanted, ids=_ids(ids))

    def environment(self) -> str | None:
        """Return the name of the environment whose dispatchers may dispatch from this store; None: it has none."""
        with self._ready(), self._reading() as connection:
            recorded = recorded_version(connection, self.tables)
        return None if recorded is None else recorded.environment

    def set_environment(self, name: str, *, actor: str | None = None, because: str | None = None) -> None:
        """Bind the store to an environment, and record that in the audit. Its messages go out from there.

        A dispatcher that is at work goes on; the next one compares.

        :raises ValueError: the name is empty, or has more than 250 characters.
        """
        if not 0 < len(name) <= MAX_NAME:
            raise ValueError(f"environment={name!r}: the name must have 1 to {MAX_NAME} characters")
        who = actor or self.actor()

        def work(connection: Connection) -> None:
            former = record_environment(connection, self.tables, name)
            entry = AuditEntry(who, "environment", {"environment": name, "former": former}, because=because)
            entry.write(connection, self.tables, {}, database_time(connection))

        with self._ready():
            retried(self.engine, work)

    def take_stream(self, stream: str, holder: str) -> StreamRecord | None:
        """Take the lease of a stream for a minute; None: another holder has it.

        :param stream: the place of its checkpoint.
        """
        return self._of_stream(partial(streams.take, tables=self.tables, stream=stream, holder=holder))

    def renew_stream(self, stream: str, holder: str) -> bool:
        """Renew the lease of a stream for a minute; False: it is another's by now."""
        return self._of_stream(partial(streams.renew, tables=self.tables, stream=stream, holder=holder))

    def release_stream(self, stream: str, holder: str, seen: StreamRecord) -> None:
        """End the lease of a stream, and note which query its checkpoint is of."""
        self._of_stream(partial(streams.release, tables=self.tables, stream=stream, holder=holder, seen=seen))

    def restart_stream(self, stream: str, *, actor: str | None = None, because: str | None = None) -> bool:
        """Let a stream begin with a new checkpoint, and record that in the audit.

        :return: False if the store does not know it, or a task runs it now.
        """
        who = actor or self.actor()

        def work(connection: Connection) -> bool:
            done = streams.restart(connection, self.tables, stream)
            if done:
                entry = AuditEntry(who, "stream-restart", {"stream": stream}, because=because)
                entry.write(connection, self.tables, {}, database_time(connection))
            return done

        return self._of_stream(work)

    def _of_stream(self, work: Callable[[Connection], T]) -> T:
        with self._ready():
            return retried(self.engine, work)

    def rates(self) -> Mapping[str, float]:
        """Return by destination the messages a second that all dispatchers together send to it at most."""
        with self._reading() as connection:
            self._check_version()
            found = rates.read(connection, self.tables)
        return {one.destination: one.per_second for one in found}

    def set_rates(
        self, per_second: Mapping[str, float | None], *, actor: str | None = None, because: str | None = None
    ) -> None:
        """Limit the messages a second to these destinations, of all dispatchers together; None removes a limit.

        :raises ValueError: a name or a number is not allowed.
        """
        rates.check(per_second)
        with self._ready():
            who = actor or self.actor()
            rates.change(self.engine, self.tables, per_second, who=who, because=because)

    def pauses(self) -> Sequence[Pause]:
        """Return the pauses that hold messages, the earliest first."""
        with self._ready(), self._reading() as connection:
            found, now = pauses.read(connection, self.tables, reasons=True), database_time(connection)
        return [one for one in found if not one.is_over(now)]

    def pause(
        self,
        *,
        duration: timedelta | float | str | None = None,
        on_unpause: OnUnpause = "spread",
        spread: timedelta | float | str = SPREAD,
        dry_run: bool = False,
        actor: str | None = None,
        because: str | None = None,
        **selection: Unpack[PauseArgs],
    ) -> PauseReport:
        """Let no dispatcher take the messages of a selection until the pause ends; each obeys within 2 s.

        They wait in the store, also messages that are stored meanwhile; nothing of them changes. A message that expires
        meanwhile is not delivered afterwards. What a dispatcher has handed over to a broker that delays it, and what
        was sent without a store, cannot be paused: the report counts what the store knows of it.

        To pause the same selection again replaces the pause, and its end.

        :param duration: it ends by itself after so long: a timedelta, seconds, or an ISO 8601 duration (``"PT10M"``);
            None: when :meth:`unpause` ends it.
        :param on_unpause: what becomes of messages that fell due by the end of the pause: "spread" sends them evenly
            within ``spread``, "at_once" sends them at once, and "drop" cancels them; for :meth:`cancel_grace`
            :meth:`restore` brings them back.
        :param dry_run: pause nothing, and return what would be paused.
        :raises ValueError: nothing is selected, another value is not allowed, or there are 50 pauses.
        """
        wanted = self._filter(pauses.check_selection(selection))
        span = None if duration is None else delay_of(duration, "duration")
        with self._ready():
            pause = pauses.begin(
                self.engine,
                self.tables,
                wanted,
                duration=span,
                on_unpause=pauses.check_on_unpause(on_unpause),
                spread=delay_of(spread, "spread"),
                grace=self.cancel_grace(),
                who=actor or self.actor(),
                because=because,
                dry_run=dry_run,
            )
            with self._reading() as connection:
                waiting = pauses.waiting(connection, self.tables, pause)
                with_broker, until = pauses.with_broker(connection, self.tables, wanted, database_time(connection))
        return PauseReport(pause=pause, waiting=waiting, with_broker=with_broker, arrive_until=until, dry_run=dry_run)

    def unpause(
        self,
        *,
        on_unpause: OnUnpause | None = None,
        spread: timedelta | float | str | None = None,
        dry_run: bool = False,
        actor: str | None = None,
        because: str | None = None,
        **selection: Unpack[PauseArgs],
    ) -> UnpauseReport:
        """End the pause that :meth:`pause` began with the same criteria.

        A message may be held by several pauses; it waits for the end of all of them.

        :param on_unpause: in place of what the pause says; it also changes a pause that has ended and still spreads.
        :param spread: the same.
        :param dry_run: change nothing, and return what would happen.
        :raises ValueError: nothing is selected, or another value is not allowed.
        """
        wanted, who = self._filter(pauses.check_selection(selection)), actor or self.actor()
        with self._ready():
            pause = pauses.end(
                self.engine,
                self.tables,
                wanted,
                on_unpause=None if on_unpause is None else pauses.check_on_unpause(on_unpause),
                spread=None if spread is None else delay_of(spread, "spread"),
                who=who,
                because=because,
                dry_run=dry_run,
            )
            if pause is None:
                return UnpauseReport(pause=None, dry_run=dry_run)
            with self._reading() as connection:
                due = pauses.waiting(connection, self.tables, pause, due=True)
            cancelled = 0
            if pause.on_unpause == "drop" and not dry_run:
                cancelled = pauses.drop(self.engine, self.tables, pause, who=who, because=because).changed
        return UnpauseReport(pause=pause, due=due, cancelled=cancelled, dry_run=dry_run)

    def cancel(self, ids: Iterable[str] | Unset = UNSET, **options: Unpack[ChangeArgs]) -> Outcomes:
        """Remove messages, failed ones too, and return the outcome for each id.

        The ids are remembered, so that a late retry of the task that stored them does not store them again. A cancelled
        message is never dispatched, unless a dispatcher was killed after it had sent the message and before it could
        record that.

        For :meth:`cancel_grace` the message is kept with all its content, and :meth:`restore` brings it back.

        :raises ValueError: neither ids nor a criterion is given, or both.
        """
        return self._change(Cancel(self.cancel_grace()), ids, **options)

    def restore(
        self, ids: Iterable[str] | Unset = UNSET, *, overdue_ok: bool = False, **options: Unpack[ChangeArgs]
    ) -> Outcomes:
        """Take cancels back, and return the outcome for each id.

        The messages wait again as they were, or are again among the failed ones; their ids are remembered no longer.
        A filter selects cancelled messages that can be restored; ``state="cancelled"`` alone selects all of them. A
        message whose id was stored again is not restored, nor is an expired message.

        :param overdue_ok: also messages whose due time has passed; they are dispatched at once.
        :raises ValueError: neither ids nor a criterion is given, or both; ``state`` is another than "cancelled".
        """
        return self._change(Restore(overdue_ok), ids, **options)

    def withdraw(self, since: datetime, *, seconds: float = 60.0, because: str | None = None) -> WithdrawReport:
        """Remove what :attr:`origin` has stored since a time, as if it had never been stored; its ids are forgotten.

        So the task can store the same messages again, which it cannot after a cancel. Messages that are being
        dispatched stay, and messages of another run that were replaced since, and escalations of notifiers. Nothing
        brings back what was removed.

        :param since: aware; by :meth:`now`.
        :param seconds: begin with no further thousand messages after that.
        """
        origin, change_since = self._own_origin, utc("since", since)
        with self._ready():
            with self._reading() as connection:
                run = run_number(connection, self.tables, origin)
            if run is None:
                return WithdrawReport(withdrawn=0, in_flight=0, complete=True)
            names = {field.name: getattr(origin, field.name) for field in fields(SentBy)}
            found, complete = self._changes.withdraw(
                Withdraw(run, change_since),
                SentBy(**names),
                seconds=seconds,
                who=self.actor(),
                because=because,
            )
        counts = found.counts
        return WithdrawReport(
            withdrawn=counts.get(Outcome.WITHDRAWN, 0), in_flight=counts.get(Outcome.IN_FLIGHT, 0), complete=complete
        )

    def reschedule(
        self,
        ids: Iterable[str] | Unset = UNSET,
        due_at: datetime | None = None,
        *,
        delay: timedelta | float | str | None = None,
        limit: int | None = None,
        after: str | None = None,
        dry_run: bool = False,
        actor: str | None = None,
        because: str | None = None,
        **filters: Unpack[FilterArgs],
    ) -> Outcomes:
        """Change the due time of waiting messages, and return the outcome for each id.

        Failed messages do not change (see ``retry``), nor does a message that would expire before its new due time.
        The task that stored a message may run again: the store recognises the message by its original content, and
        keeps its new due time.

        :param due_at: aware; a message with a past due time is dispatched at once.
        :param delay: instead of ``due_at``, how long from now on, by the database's clock: a timedelta, seconds, or an
            ISO 8601 duration (``"PT10M"``).
        :raises ValueError: neither ids nor a criterion is given, or both; neither or both of due_at and delay.
        :raises NaiveTime: ``due_at`` has no time zone.
        """
        # a wrong keyword is an error before the database is asked for its time
        self._filter(filters)
        if (due_at is None) == (delay is None):
            raise ValueError("reschedule: give due_at= or delay=, and not both")
        if due_at is None:
            with self._ready():
                due_at = due_after(self.now(), delay_of(delay or 0))
        change = Reschedule(utc("due_at", due_at))
        return self._change(
            change, ids, limit=limit, after=after, dry_run=dry_run, actor=actor, because=because, **filters
        )

    def retry(self, ids: Iterable[str] | Unset = UNSET, **options: Unpack[ChangeArgs]) -> Outcomes:
        """Let failed messages wait again with no failures counted; due messages are dispatched at once.

        Expired messages do not change, because they would expire again.

        :raises ValueError: neither ids nor a criterion is given, or both; ``state`` is another than "failed".
        """
        return self._change(Retry(), ids, **options)

    def erase(self, ids: Iterable[str] | Unset = UNSET, **options: Unpack[ChangeArgs]) -> Outcomes:
        """Remove messages and everything about them except the id, for a person's right to erasure.

        Waiting and failed messages, and cancelled ones that can be restored, are removed with body and headers; that is
        final. Of a remembered id all but the id is removed, its tag too; no filter reaches it: name by their ids
        dispatched messages and cancelled ones that can be restored no longer. ``purge`` forgets the id, which stays
        lest a late retry sends the message again. The audit has five ids, and the tag's SHA-256.

        :raises ValueError: neither ids nor a criterion is given, or both; "cancelled" is not the only ``state``.
        """
        return self._change(Erase(), ids, **options)

    def erase_delivered(self, ids: Sequence[str], *, dry_run: bool = False) -> dict[str, int | str]:
        """Delete messages from the queue tables of the store's schema, which have them until a consumer takes them.

        :returns: by table how many rows had one of these ids; or why they stay, such as a right that is missing.
        """
        with self._ready():
            return delete_delivered(self.engine, self.schema, ids, dry_run=dry_run)

    def purge(
        self,
        older_than: timedelta,
        *,
        reason: str | Sequence[str] = REASONS,
        dry_run: bool = False,
        actor: str | None = None,
        because: str | None = None,
    ) -> Outcomes:
        """Remove messages that failed or expired longer ago than a duration, and forget ids that are older.

        The ids of removed messages are remembered from now on. A cancelled message whose id is forgotten cannot be
        restored.

        :param reason: "failed", "expired", "remembered", or several; all of them unless given.
        :raises ValueError: ``older_than`` is negative, or the reason is none of these.
        """
        reasons = [reason] if isinstance(reason, str) else [*reason]
        if not reasons or set(reasons) - set(REASONS):
            raise ValueError(f"reason={reason!r} must be of {', '.join(REASONS)}")
        if older_than < timedelta(0):
            raise ValueError(f"older_than={older_than} is negative")
        with self._ready():
            who = actor or self.actor()
            return self._changes.purge(older_than, reasons, who=who, because=because, dry_run=dry_run)

    def dispatcher(
        self,
        deliver_conn_ids: Sequence[str],
        transports: Callable[[str, Clock], Delivery],
        **policy: Any,
    ) -> Dispatcher:
        """Return a dispatcher of this store.

        :param policy: the parameters of :class:`airflow_delayed.store.policy.DispatchPolicy`, and others of
            :class:`airflow_delayed.store.dispatch.dispatcher.Dispatcher`.
        :raises TopologyError: its tables are missing, or those of another release.
        :raises WrongEnvironment: the store is of another environment than this host; see :meth:`set_environment`.
        """
        # a wrong parameter is an error before the database is asked for anything
        made = Dispatcher(
            self.engine,
            self.tables,
            conn_id=self.conn_id,
            transports=transports,
            deliver_conn_ids=deliver_conn_ids,
            schema=self.schema,
            **policy,
        )
        here = self.host_environment()
        with self._ready():
            if here is not None:
                with self._reading() as connection:
                    check_environment(connection, self.tables, self.conn_id, here)
            return made

    def adopt(
        self,
        *,
        table: str,
        schema: str | None = None,
        columns: Mapping[str, str] | None = None,
        headers: HeaderFormat = "xml",
        destination_of: Callable[[str], str] = queue_of,
        batch_size: int = 500,
        dry_run: bool = False,
    ) -> AdoptReport:
        """Move the messages of another store's table in this database into this store, for its ``deliver_conn_id``.

        Experimental: it may change without a deprecation before (docs/development/stability.md).

        The table has the columns of NServiceBus's SqlServerDelayedMessageStore, or other names for them. Ids, due times
        (read as UTC) and counts of failures do not change. The other store may work at the same time: rows that it has
        locked are skipped. If this is killed, no message is lost: run it again, also while there are ``remaining``
        rows.

        :param table: its name, as the database writes it; NServiceBus's default is ``<endpoint>.timeouts``.
        :param schema: its schema, such as ``dbo``; by default the connection's own.
        :param columns: the other names by NServiceBus's: ``{"Id": "message_id", "State": "body"}``.
        :param headers: ``xml``, as NServiceBus's MSMQ transport writes them, or ``json``, one object.
        :param destination_of: returns the destination for the value in the row. By default it removes the machine of
            an MSMQ address: ``Sales@SERVER1`` is ``Sales``.
        :param batch_size: rows that are locked and copied at a time, 1 to 1000.
        :param dry_run: change no row, and report what would be moved.
        :raises ValueError: the hook's ``on_conflict`` is not ``error``, or an argument is not allowed.
        :raises SourceError: the table does not exist, belongs to this package, or has no unique constraint on its ids.
        :raises UnsupportedColumns: the table lacks a column; the text names it.
        :raises TopologyError: this store's own tables are missing.
        :raises TransportUnavailable: the database cannot be reached; rows that were moved before stay moved.
        """
        if self.on_conflict != "error":
            raise ValueError(
                f"on_conflict={self.on_conflict!r}: a row of an id that is here with other content is left where it is;"
                " take over with a hook of on_conflict='error'"
            )
        reader = Reader(headers, destination_of)
        with database_errors(self.conn_id, self.engine, self.tables):
            source = foreign_table(self.engine, table, schema=schema, columns=columns)
            adopter = Adopter(self.engine, source, self.tables.messages, self, reader, batch_size)
            return adopter.plan() if dry_run else adopter.run()

    def actor(self) -> str:
        """Return the user for the audit: the operating system's."""
        return system_user()

    @cached_property
    def _carried_clock(self) -> CarriedClock:
        return CarriedClock()

    @property
    def _changes(self) -> BulkChanges:
        return BulkChanges(self.engine, self.tables)

    def _change(
        self,
        change: MessageChange,
        ids: Iterable[str] | Unset,
        *,
        limit: int | None = None,
        after: str | None = None,
        dry_run: bool = False,
        actor: str | None = None,
        because: str | None = None,
        **filters: Unpack[FilterArgs],
    ) -> Outcomes:
        wanted, chosen = self._filter_of(change, filters), _ids(ids)
        if chosen is not None and wanted.criteria:
            raise ValueError(f"{change.action}: give ids or a filter, and not both")
        if chosen is None and not wanted.criteria:
            raise ValueError(f"{change.action}: give ids, tag= or another filter; a filter needs a criterion")
        if chosen is not None and not (limit is None and after is None):
            raise ValueError(f"{change.action}: limit= and after= are for a filter")
        who = actor or self.actor()
        changes = self._changes
        with self._ready():
            if chosen is not None:
                return changes.by_ids(change, chosen, who=who, because=because, dry_run=dry_run)
            return changes.by_filter(
                change, wanted, who=who, because=because, dry_run=dry_run, limit=limit, after=after
            )


def _ids(ids: Iterable[str] | Unset) -> Sequence[str] | None:
    """Return ids as a list, also a single text, which would be an id for each letter; None: they were not passed.

    :raises NullCriterion: they were passed, and are None.
    """
    chosen = passed(ids=ids).get("ids")
    if chosen is None:
        return None
    return [chosen] if isinstance(chosen, str) else [*chosen]
