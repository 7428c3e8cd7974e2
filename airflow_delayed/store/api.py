"""Store: the one door to the messages in a database. A program sends, reads, changes, counts and dispatches them here.

Each method checks its arguments and the version of the tables; a module of functions does the work. No Airflow here:
the hook adds the connection, the metrics and the user.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import airflow_delayed.store.alchemy  # noqa: F401
from airflow_delayed import lineage
from airflow_delayed.criteria import UNSET, Unset, one_of, passed
from airflow_delayed.delivery import (
    BatchBounds,
    Clock,
    DelayStore,
    Delivery,
    Finding,
    SendReport,
    TopologyReport,
)
from airflow_delayed.identity import Origin, typed_key_ids
from airflow_delayed.lineage import Dataset
from airflow_delayed.message import DelayedMessage, delay_of, due_after, plain_span, utc
from airflow_delayed.provider_info import CANCEL_GRACE
from airflow_delayed.store import (
    audit,
    counts,
    enqueue,
    overview,
    pauses,
    queries,
    runs,
    setup,
)
from airflow_delayed.store.audit import MAX_BECAUSE, AuditRecord, hash_of, of_ids, system_user
from airflow_delayed.store.bulk_changes import (
    MAX_COUNTED,
    REMEMBERED,
    BulkChanges,
    ChangeArgs,
)
from airflow_delayed.store.changes import (
    Cancel,
    Erase,
    MessageChange,
    Reschedule,
    Restore,
    Retry,
    cancel_or_remember,
)
from airflow_delayed.store.counts import DispatcherSeen, Progress, StoreCounts
from airflow_delayed.store.database import Dialect
from airflow_delayed.store.dialects import database_time, dialect_named, dialect_of
from airflow_delayed.store.dispatch import report
from airflow_delayed.store.dispatch.dispatcher import Dispatcher
from airflow_delayed.store.engine import (
    CarriedClock,
    close_engine,
    database_errors,
    engine_options,
    first_line,
    prepare,
    retried,
)
from airflow_delayed.store.filters import FilterArgs, MessageFilter, MessageState, filter_of, take_left
from airflow_delayed.store.health import NAMES_HOSTS, StoreCondition, condition
from airflow_delayed.store.lateness import LATE_AFTER
from airflow_delayed.store.network import first_address
from airflow_delayed.store.outcomes import NOT_ERASED, Outcome, Outcomes
from airflow_delayed.store.overview import MAX_MATCHES, FailureGroup, SearchMatch
from airflow_delayed.store.pauses import Pause, PauseArgs, PauseReport, UnpauseReport
from airflow_delayed.store.policy import OnConflict, check_on_conflict
from airflow_delayed.store.queries import DeliveredMessage, Page
from airflow_delayed.store.records import (
    Content,
    Remembered,
    StoredMessage,
    check_limits,
    check_queue_name,
    count_rows,
    read_content,
    within_bounds,
)
from airflow_delayed.store.remembered_ids import DISPATCHED
from airflow_delayed.store.schema import TABLE, store_tables
from airflow_delayed.store.script import install_script as install_script
from airflow_delayed.store.timeline import Timeline, timeline
from airflow_delayed.store.version import (
    check_ready,
    problem,
    recorded_version,
)

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine, Table
    from typing_extensions import Unpack


__all__ = [
    "DISPATCHED",
    "LATE_AFTER",
    "MAX_BECAUSE",
    "MAX_COUNTED",
    "NAMES_HOSTS",
    "REASONS",
    "AuditRecord",
    "DeliveredMessage",
    "DispatcherSeen",
    "FailureGroup",
    "Outcome",
    "Outcomes",
    "Pause",
    "PauseArgs",
    "PauseReport",
    "Progress",
    "SearchMatch",
    "Store",
    "StoreCondition",
    "StoreCounts",
    "UnpauseReport",
    "close_engine",
    "dialect_named",
    "engine_options",
    "first_line",
    "hash_of",
    "of_ids",
    "prepare",
    "system_user",
]

#: The reasons of :meth:`Store.purge`.
REASONS = (MessageState.FAILED.value, MessageState.EXPIRED.value, REMEMBERED)


class Store(DelayStore):
    """Messages in the tables of one database.

    ``list`` and ``page`` read, and ``cancel``, ``restore``, ``reschedule``, ``retry`` and ``erase`` change, the
    messages that match a filter or have these ids. The keywords of a filter are those of
    :class:`airflow_delayed.store.filters.FilterArgs`: ``destination``, ``deliver_conn_id``, ``tag``, ``due_from``,
    ``due_until``, ``state`` and ``sent_by``.

    A change needs ids or at least one criterion, and is safe beside dispatchers at work. It works on up to
    2500 messages a transaction, returns for each id whether it came in time, waits up to half a second in all for
    messages in flight, and leaves a row in the audit table: who, when, what, and how many; no content. Its further
    keywords are those of :class:`airflow_delayed.store.bulk_changes.ChangeArgs`.

    :param conn_id: names the connection in errors.
    :param engine: makes the engine, which ``prepare`` of this module has prepared; called when one is first needed.
    :param deliver_conn_id: the connection that delivers in the end. Without it, or if it is ``conn_id``, each
        destination is a queue table in the same database.
    :param table: the name of the table of messages.
    :param schema: of the tables; by default the connection's own.
    :param on_conflict: what ``send`` does with an id that is known with other content.
    :param origin: the run of the task whose messages ``send`` stores.
    :param until_due: no dispatcher takes the messages that ``send`` stores before they are due, however far it looks
        ahead; until then they can be cancelled.
    """

    def __init__(
        self,
        conn_id: str,
        engine: Callable[[], Engine],
        deliver_conn_id: str | None = None,
        *,
        table: str = TABLE,
        schema: str | None = None,
        on_conflict: OnConflict = "error",
        origin: Origin | None = None,
        until_due: bool = False,
    ) -> None:
        super().__init__()
        self.conn_id = conn_id
        self.deliver_conn_id = None if deliver_conn_id == conn_id else deliver_conn_id
        self.schema = schema
        self.tables = store_tables(table, schema)
        self.table: Table = self.tables.messages
        self.on_conflict = check_on_conflict(on_conflict)
        self.origin = origin
        self.until_due = until_due
        self._new_engine = engine
        self._checked = False

    @cached_property
    def engine(self) -> Engine:
        """The connection's engine."""
        return self._new_engine()

    @property
    def dialect(self) -> Dialect:
        """What differs by database."""
        return dialect_of(self.engine)

    @property
    def horizon(self) -> timedelta:
        """Zero: the store delivers no message before its due time."""
        return timedelta(0)

    # tables

    def install(
        self,
        destinations: Iterable[str],
        *,
        create_destinations: bool = False,
        dry_run: bool = False,
    ) -> TopologyReport:
        """Create missing tables, and the queue tables of these destinations if this database delivers.

        :raises TopologyError: a table exists and differs, or a queue table is missing and may not be created.
        :raises LimitExceeded: a destination's name is longer than a table's may be.
        """
        names = self._queue_names(destinations)
        with database_errors(self.conn_id, self.engine):
            if not dry_run:
                self.dialect.allow_readers(self.engine)
            report = setup.install(
                self.engine,
                self.tables,
                names,
                conn_id=self.conn_id,
                create_queues=create_destinations,
                dry_run=dry_run,
            )
        if not dry_run and (error := problem(self.conn_id, report)):
            raise error
        return report

    def verify(self, destinations: Iterable[str], *, max_delay: timedelta | None = None) -> TopologyReport:
        """Compare the tables, and the queue tables of these destinations if this database delivers.

        The report also has the findings of :meth:`health`, if the tables are there.
        """
        names = self._queue_names(destinations)
        with database_errors(self.conn_id, self.engine):
            report = setup.verify(self.engine, self.tables, names, conn_id=self.conn_id)
        lacks_tables = any(finding.destination is None for finding in report.problems)
        return report if lacks_tables else TopologyReport((*report.findings, *self.health()))

    def describe_server(self) -> str:
        """Connect, look for the store's tables, and return the server's name and version.

        :raises TopologyError: the tables are missing, or those of another release.
        """
        with database_errors(self.conn_id, self.engine):
            with self.engine.connect().execution_options(read_only=True) as connection:
                name = self.dialect.server_name(connection)
            check_ready(self.conn_id, self.engine, self.tables)
            with self.engine.connect().execution_options(read_only=True) as connection:
                version = recorded_version(connection, self.tables)
        return f"Connected to {name}; the tables are of version {version.number if version else 'unknown'}"

    def limit_statements(self, seconds: int) -> None:
        """Let the database end statements that take longer, where it can; call it once, before any other use."""
        self.dialect.limit_statements(self.engine, seconds)

    def close(self) -> None:
        """Close all connections."""
        if "engine" in self.__dict__:
            close_engine(self.engine)
            del self.engine
        self._checked = False

    # sending

    def fits(self, extremes: BatchBounds, now: datetime) -> bool:
        """Return whether :meth:`check` passes all messages within these bounds; False where that is not sure."""
        return within_bounds(extremes, queue_tables=self.deliver_conn_id is None)

    def check(self, message: DelayedMessage, now: datetime) -> None:
        """Check a message against the columns: destination 200 characters (63 bytes for a queue table), tag 250.

        :raises LimitExceeded: one is longer.
        """
        check_limits(message)
        if self.deliver_conn_id is None:
            check_queue_name(message.destination)

    def send(self, messages: Iterable[DelayedMessage]) -> SendReport:
        """Store messages, in transactions of 2500; the same message again is counted as a duplicate.

        An id is also known after its message was dispatched or cancelled, for as long as the store remembers it.

        :raises MessageConflict: an id is known with other content and ``on_conflict`` is "error"; nothing of its 2500
            was stored.
        :raises LimitExceeded: a message does not fit; nothing of its 2500 was stored.
        :raises TopologyError: the table is missing.
        """

        def checked() -> Iterator[DelayedMessage]:
            for message in messages:
                self.check(message, message.due_at)
                yield message

        with self._ready():
            return enqueue.enqueue(
                self.engine,
                self.tables,
                # enqueue checks all other limits
                checked() if self.deliver_conn_id is None else messages,
                self.deliver_conn_id,
                on_conflict=self.on_conflict,
                origin=self.origin,
                until_due=self.until_due,
            )

    def conflicting(self, digests: Mapping[str, bytes]) -> Sequence[str]:
        """Return the ids for which ``send`` would raise MessageConflict; none unless ``on_conflict`` is "error".

        :param digests: by id, see :func:`airflow_delayed.identity.digest_of`.
        """
        if self.on_conflict != "error":
            return []
        with self._ready(), self._reading() as connection:
            return enqueue.conflicting(connection, self.tables, digests, self.deliver_conn_id)

    def known(self, ids: Sequence[str]) -> set[str]:
        """Return the ids whose messages wait or have failed, and ids that are remembered."""
        with self._ready(), self._reading() as connection:
            return enqueue.known(connection, self.tables, ids)

    def note_sent(self, messages: Sequence[DelayedMessage]) -> None:
        """Remember messages, without their content, that another transport has confirmed and that never waited here.

        A later ``send`` of them is a duplicate or a conflict, as after a dispatch; and they are listed and counted by
        tag, connection and run as dispatched messages.

        :raises TopologyError: the table is missing.
        """
        with self._ready():
            enqueue.note_sent(self.engine, self.tables, messages, self.deliver_conn_id, origin=self.origin)

    def anchor(self, turn: str | None) -> datetime | None:
        """Return the time that ``keep_anchor`` stored for this turn of :attr:`origin`; None: no time.

        :raises TopologyError: the table is missing.
        """
        with self._reading() as connection:
            self._check_version()
            return runs.anchor_of(connection, self.tables, self._own_origin, turn)

    def keep_anchor(self, turn: str | None, anchor: datetime) -> None:
        """Store the time from which the relative delays of :attr:`origin` count, for as long as ids are remembered.

        :param turn: identifies the tries between two clears of the task, where each clear makes new messages.
        :raises TopologyError: the table is missing.
        """
        with self._ready():
            origin = self._own_origin
            retried(self.engine, lambda connection: runs.keep_anchor(connection, self.tables, origin, turn, anchor))

    # messages

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
        :param after: continue behind a message, by its ``token``.
        :raises ValueError: an unknown state, or ``after`` is no token.
        :raises TopologyError: the table is missing.
        """
        return self._messages(self._filter(filters), _ids(ids), limit, after)

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

    def search(self, text: str) -> Sequence[SearchMatch]:
        """Return up to five ids, tags, destinations and DAGs each that begin with a text, an exact one first.

        Texts are compared byte by byte. The ids are those of messages in the store, and remembered ones. A key such as
        ``order_id=1001`` is the ids that :func:`airflow_delayed.identity.typed_key_ids` makes of it.
        """
        keys = self.ids_of(text)
        with self._ready():
            found = overview.search(self.engine, self.tables, text)
        return [*(SearchMatch(field="id", value=one, exact=True) for one in keys[:MAX_MATCHES]), *found]

    def ids_of(self, key: str) -> Sequence[str]:
        """Return the ids that the store knows of a key such as ``order_id=1001``: the values of ``id_columns``."""
        ids = typed_key_ids(key)
        there = self.known(ids) if ids else ()
        return [one for one in ids if one in there]

    def destinations(self) -> Mapping[str, Sequence[str]]:
        """Return the destinations of messages that wait or have failed, by the connection that delivers them.

        The store's own connection stands for its queue tables. At most 10,000 waiting messages, the first by due time,
        and 10,000 failed ones are looked at.
        """
        with self._ready():
            found = queries.destinations(self.engine, self.tables)
        return {self.conn_id if name is None else name: some for name, some in found.items()}

    def last_dispatched(self) -> DeliveredMessage | None:
        """Return the message that was dispatched last; None: none is remembered."""
        with self._ready():
            return queries.last_delivered(self.engine, self.tables)

    # numbers

    def count(self) -> int:
        """Return how many messages wait or are being dispatched, for all connections.

        Expired messages count until a dispatcher moves them to the failed ones; failed ones do not count.
        See :meth:`airflow_delayed.store.api.Store.counts` for all of them.
        """
        with self._reading() as connection:
            return count_rows(connection, self.table)

    def counts(
        self,
        *,
        overdue: timedelta = LATE_AFTER,
        hours: int = 24,
        minutes: int = 0,
        by_destination: bool = False,
        **filters: Unpack[FilterArgs],
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
        :raises ValueError: ``hours``, ``minutes`` or ``overdue`` is out of range; or ``state`` or ``reason`` is among
            the criteria: messages that have left the store have none.
        """
        wanted = self._filter_of_all("counts", filters)
        with self._ready(), dialect_of(self.engine).snapshot(self.engine) as connection:
            return counts.count(
                connection,
                self.tables,
                wanted,
                database_time(connection),
                overdue=overdue,
                hours=hours,
                minutes=minutes,
                by_destination=by_destination,
            )

    def by_state(self, **filters: Unpack[FilterArgs]) -> tuple[Mapping[str, int], bool]:
        """Count the messages that match a filter without states, by state; see :func:`counts.by_state`."""
        with self._ready():
            return counts.by_state(self.engine, self.tables, self._filter(filters))

    def matching(self, limit: int, **filters: Unpack[FilterArgs]) -> int:
        """Count the messages that match a filter, failed ones too, up to a limit."""
        with self._ready():
            return overview.matching(self.engine, self.tables, self._filter(filters), limit)

    def failures(self) -> tuple[Sequence[FailureGroup], bool]:
        """Group the failed messages by cause; the largest group is first.

        :return: up to 50 groups, and whether there are more than the 10,000 messages that were looked at.
        """
        with self._ready():
            return overview.failures(self.engine, self.tables)

    def progress(self, *, ids: Iterable[str] | Unset = UNSET, **filters: Unpack[FilterArgs]) -> Progress:
        """Count messages by outcome: in the store, and after they have left it for as long as ids are remembered.

        Messages that a send handed to the transport at once count as dispatched, if it had this store. With ``sent_by``
        alone, messages that notifiers stored about a run do not count; with their ``tag`` they do.

        :raises ValueError: ``state`` or ``reason`` is among the criteria: messages that have left the store have none.
        :raises TopologyError: the table is missing.
        """
        wanted = self._filter_of_all("progress", filters)
        with self._ready():
            return counts.progress(self.engine, self.tables, wanted, ids=_ids(ids))

    def next_due(self) -> datetime | None:
        """Return when the next of the messages that are not due yet falls due; None: there is none."""
        with self._ready():
            return overview.next_due(self.engine, self.tables)

    def oldest_due_seconds(self) -> float:
        """Return for how long the message has been due that was due first, and is not paused; 0: there is none."""
        with self._ready():
            return overview.oldest_due_seconds(self.engine, self.tables)

    def timeline(self, seconds: int = 3600) -> Timeline:
        """Return what was dispatched in the last hour or day, by minute or hour, and what falls due in the next.

        The past counts the remembered ids of that time, the newest million of them. The future counts the messages that
        fall due within that time.

        :raises ValueError: ``seconds`` is neither 3600 nor 86400.
        """
        with self._ready():
            return timeline(self.engine, self.tables, seconds)

    def now(self) -> datetime:
        """Return the database's time."""
        with (
            database_errors(self.conn_id, self.engine),
            self.engine.connect().execution_options(read_only=True) as connection,
        ):
            return database_time(connection)

    # health

    def health(self) -> Sequence[Finding]:
        """Return what keeps messages from being dispatched in time, such as that no dispatcher is at work.

        Nothing if all is well. The codes are ``no-dispatcher``, ``dispatcher-fails``, ``connection-fails``,
        ``destination-refuses``, ``destination-missing``, ``lease-too-short``, ``overdue``,
        ``failed``, ``paused``, ``version`` and ``clock-difference``.

        :raises TopologyError: a table is missing.
        """
        return self.condition().findings

    def condition(self) -> StoreCondition:
        """Return the findings of :meth:`health`, and how late the messages of each destination are.

        :raises TopologyError: a table is missing.
        """
        with self._ready(), dialect_of(self.engine).read_only(self.engine) as connection:
            return condition(connection, self.tables, self.conn_id)

    def figures(self, *, hours: int, minutes: int) -> tuple[StoreCounts, StoreCondition]:
        """Return :meth:`counts` and :meth:`condition` of one moment, so that their numbers agree."""
        with self._ready(), dialect_of(self.engine).snapshot(self.engine) as connection:
            found = condition(connection, self.tables, self.conn_id)
            counted = counts.count(
                connection,
                self.tables,
                MessageFilter(),
                found.at,
                overdue=LATE_AFTER,
                hours=hours,
                minutes=minutes,
                by_destination=False,
            )
        return counted, found

    def last_seen(self) -> datetime | None:
        """Return when a dispatcher was last at work for ``deliver_conn_id``; None: not within about a day."""
        with self._reading() as connection:
            return report.last_seen(connection, self.tables, self.deliver_conn_id)

    def dispatchers(self) -> Sequence[DispatcherSeen]:
        """Return the runs of dispatchers of the last day, up to a thousand, the one seen last first."""
        with self._ready(), dialect_of(self.engine).read_only(self.engine) as connection:
            return counts.dispatchers(connection, self.tables)

    def lookaheads(self) -> Mapping[str, timedelta]:
        """Return by connection how long before its due time a dispatcher takes a message, so that it stays no longer.

        It is the longest of the dispatchers of the last day; a connection that no dispatcher delivers for is missing.
        The store's own connection stands for its queue tables.
        """
        with self._reading() as connection:
            self._check_version()
            found = report.lookaheads(connection, self.tables)
        return {self.conn_id if name is None else name: ahead for name, ahead in found.items()}

    # changes

    def cancel(self, ids: Iterable[str] | Unset = UNSET, **options: Unpack[ChangeArgs]) -> Outcomes:
        """Remove messages, failed ones too, and return the outcome for each id.

        The ids are remembered, so that a late retry of the task that stored them does not store them again. A cancelled
        message is never dispatched, unless a dispatcher was killed after it had sent the message and before it could
        record that.

        For :meth:`cancel_grace` the message is kept with all its content, and :meth:`restore` brings it back.

        What was dispatched to a broker and is not due yet cannot be taken back: ``out_of_reach`` of the result says how
        many there are, and until when they arrive; as after a reschedule and an erase.

        :raises ValueError: neither ids nor a criterion is given, or both.
        """
        return self._change(Cancel(self.cancel_grace()), ids, **options)

    def cancel_or_remember(self, ids: Sequence[str], *, actor: str) -> Mapping[str, Outcome]:
        """Cancel messages, and remember the ids that the store does not know, so that a later send stores nothing.

        It is for notifiers, where a success may be heard before the failure that it ends. All in one transaction; a
        message that is being dispatched is waited for as by :meth:`cancel`, in case its dispatcher cannot deliver it.

        :return: the outcome by id; ABSENT: it was unknown, and is remembered.
        """
        change = Cancel(self.cancel_grace())
        with self._ready():
            work = partial(cancel_or_remember, tables=self.tables, ids=ids, change=change, who=actor)
            outcomes = retried(self.engine, work)
        in_flight = [one for one, outcome in outcomes.items() if outcome is Outcome.IN_FLIGHT]
        return {**outcomes, **self.cancel(in_flight, actor=actor)} if in_flight else outcomes

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

    def reschedule(
        self,
        ids: Iterable[str] | Unset = UNSET,
        due_at: datetime | None = None,
        *,
        delay: timedelta | float | str | None = None,
        limit: int | None = None,
        after: str | None = None,
        audit_seq: int | None = None,
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
        one_of(due_at=due_at, delay=delay)
        if due_at is None:
            with self._ready():
                due_at = due_after(self.now(), delay_of(delay or 0))
        change = Reschedule(utc("due_at", due_at))
        return self._change(
            change,
            ids,
            limit=limit,
            after=after,
            audit_seq=audit_seq,
            dry_run=dry_run,
            actor=actor,
            because=because,
            **filters,
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
        lest a late retry sends the message again. The audit has five ids, and the tag's SHA-256. Only the store's
        tables are reached: ``beyond`` of the outcomes says where else a message may be.

        :raises ValueError: neither ids nor a criterion is given, or both; "cancelled" is not the only ``state``.
        """
        found = self._change(Erase(), ids, **options)
        found.beyond = NOT_ERASED
        return found

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
        older_than = plain_span("older_than", older_than)
        with self._ready():
            who = actor or self.actor()
            return self._changes.purge(older_than, reasons, who=who, because=because, dry_run=dry_run)

    def cancel_grace(self) -> timedelta:
        """Return how long a cancel can be taken back; zero: a cancelled message is removed at once."""
        return timedelta(seconds=CANCEL_GRACE)

    def actor(self) -> str:
        """Return the user for the audit: the operating system's."""
        return system_user()

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

    # pauses

    def pauses(self) -> Sequence[Pause]:
        """Return what is paused, since when, by whom and why; the earliest first."""
        with self._ready(), self._reading() as connection:
            return list(pauses.read(connection, self.tables, reasons=True))

    def pause(
        self,
        *,
        dry_run: bool = False,
        actor: str | None = None,
        because: str | None = None,
        **selection: Unpack[PauseArgs],
    ) -> PauseReport:
        """Let no dispatcher take messages to a destination, or for a connection, until :meth:`unpause` ends that.

        Each dispatcher obeys from its next claim on, within two seconds; it sends what it has claimed. The messages
        wait in the store, also messages that are stored meanwhile; nothing of them changes. A message that expires
        meanwhile is not delivered afterwards. What a dispatcher has handed over to a broker that delays it, and what
        was sent without a store, cannot be paused: the report counts what the store knows of it. What is paused
        already stays so, with its time, user and reason.

        :param dry_run: pause nothing, and return what would be paused.
        :raises ValueError: not exactly one of ``destination`` and ``deliver_conn_id`` is given, or there are 50 pauses.
        """
        wanted, who = self._filter(pauses.check_selection(selection)), actor or self.actor()
        with self._ready():
            pause = pauses.begin(self.engine, self.tables, wanted, who=who, because=because, dry_run=dry_run)
            with self._reading() as connection:
                waiting = pauses.waiting(connection, self.tables, wanted)
                with_broker, until = pauses.with_broker(connection, self.tables, wanted, database_time(connection))
        return PauseReport(pause=pause, waiting=waiting, with_broker=with_broker, arrive_until=until, dry_run=dry_run)

    def unpause(
        self,
        *,
        dry_run: bool = False,
        actor: str | None = None,
        because: str | None = None,
        **selection: Unpack[PauseArgs],
    ) -> UnpauseReport:
        """End the pause of a destination or a connection; what fell due meanwhile is sent at once.

        A message waits for as long as its destination or its connection is paused.

        :param dry_run: change nothing, and return what would happen.
        :raises ValueError: not exactly one of ``destination`` and ``deliver_conn_id`` is given.
        """
        wanted, who = self._filter(pauses.check_selection(selection)), actor or self.actor()
        with self._ready():
            pause = pauses.end(self.engine, self.tables, wanted, who=who, because=because, dry_run=dry_run)
            if pause is None:
                return UnpauseReport(pause=None, dry_run=dry_run)
            with self._reading() as connection:
                due = pauses.waiting(connection, self.tables, wanted, due_by=database_time(connection))
        return UnpauseReport(pause=pause, due=due, dry_run=dry_run)

    # dispatching

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
        with self._ready():
            return made

    # queue tables

    def dataset(self, destination: str) -> Dataset:
        """Return OpenLineage's name of a queue table of this database; of several hosts it names the first."""
        with database_errors(self.conn_id, self.engine), self.engine.connect() as connection:
            # a connection's default schema is known once it is open
            schema, url = self.schema or self.engine.dialect.default_schema_name, self.engine.url
            host, port = first_address(connection)
        return lineage.table(url.get_backend_name(), host, port, url.database, schema, destination)

    def own_dataset(self) -> Dataset:
        """Return OpenLineage's name of the store's own table."""
        return self.dataset(self.table.name)

    def _messages(
        self, wanted: MessageFilter, ids: Sequence[str] | None, limit: int | None, after: str | None
    ) -> Iterator[StoredMessage]:
        with self._ready():
            yield from queries.messages(self.engine, self.tables, wanted, ids=ids, limit=limit, after=after)

    def _filter(self, filters: FilterArgs) -> MessageFilter:
        return filter_of(filters, own_conn_id=self.conn_id)

    def _filter_of_all(self, method: str, filters: FilterArgs) -> MessageFilter:
        wanted = self._filter(filters)
        if wanted.states is not None or wanted.reason is not None:
            raise ValueError(f"{method}: state= and reason= are of messages in the store alone; leave them out")
        return wanted

    def _change(
        self,
        change: MessageChange,
        ids: Iterable[str] | Unset,
        *,
        limit: int | None = None,
        after: str | None = None,
        audit_seq: int | None = None,
        dry_run: bool = False,
        actor: str | None = None,
        because: str | None = None,
        **filters: Unpack[FilterArgs],
    ) -> Outcomes:
        chosen = _ids(ids)
        wanted = change.check(chosen, filters, own_conn_id=self.conn_id, limit=limit, after=after, audit_seq=audit_seq)
        who = actor or self.actor()
        changes = self._changes
        with self._ready():
            if chosen is not None:
                return changes.by_ids(change, chosen, who=who, because=because, dry_run=dry_run)
            return changes.by_filter(
                change,
                wanted,
                who=who,
                because=because,
                dry_run=dry_run,
                limit=limit,
                after=after,
                audit_seq=audit_seq,
            )

    @property
    def _changes(self) -> BulkChanges:
        return BulkChanges(self.engine, self.tables)

    @cached_property
    def _carried_clock(self) -> CarriedClock:
        return CarriedClock()

    @property
    def _own_origin(self) -> Origin:
        if self.origin is None:
            raise ValueError("this hook has no origin: pass origin=Origin(dag_id=..., run_id=..., task_id=...)")
        return self.origin

    @contextmanager
    def _ready(self) -> Iterator[None]:
        """Check the version of the tables, and raise the database's errors as those of this package."""
        with database_errors(self.conn_id, self.engine, self.tables):
            self._check_version()
            yield

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with (
            database_errors(self.conn_id, self.engine, self.tables),
            self.engine.connect().execution_options(read_only=True) as connection,
        ):
            yield connection

    def _check_version(self) -> None:
        if not self._checked:
            check_ready(self.conn_id, self.engine, self.tables)
            self._checked = True

    def _queue_names(self, destinations: Iterable[str]) -> Sequence[str]:
        names = list(dict.fromkeys(destinations)) if self.deliver_conn_id is None else ()
        for name in names:
            check_queue_name(name)
        return names


def _ids(ids: Iterable[str] | Unset) -> Sequence[str] | None:
    """Return ids as a list, also a single text, which would be an id for each letter; None: they were not passed."""
    chosen = passed(ids=ids).get("ids")
    if chosen is None:
        return None
    return [chosen] if isinstance(chosen, str) else [*chosen]
