"""Changes by filter that work in the background, and are watched and stopped from elsewhere. No Airflow here.

A job is one row of the audit, which has its user, its selection and its counts, and a row of the table ``_jobs`` with
the same number. The transaction of each thousand messages or so also writes a sign of life, and reads whether somebody
has stopped the job. So all processes see the same, and the counts are exact even if a process is killed. Who starts the
same change again continues it: the filter matches what is not changed yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import Enum
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select, update
from typing_extensions import Unpack

from airflow_delayed.errors import DelayedError, WrongState
from airflow_delayed.provider_info import CANCEL_GRACE
from airflow_delayed.store import leases
from airflow_delayed.store.audit import MAX_WHO, AuditEntry, AuditRecord, columns_of, record_of
from airflow_delayed.store.bulk_changes import MAX_COUNTED, BulkChanges, hides_tag, selection_of
from airflow_delayed.store.changes import Cancel, Erase, MessageChange, Reschedule, Restore, Retry
from airflow_delayed.store.dialects import database_time, dialect_of
from airflow_delayed.store.engine import retried
from airflow_delayed.store.filters import CANCELLED, FilterArgs, MessageFilter, MessageState, take_left
from airflow_delayed.store.outcomes import Outcome
from airflow_delayed.store.overview import StoreOverview
from airflow_delayed.store.schema import MAX_ERROR, Tables

#: A job without a sign of life for this long is interrupted: its process was killed, or does not reach the database.
JOB_SILENT = timedelta(seconds=30)
#: So many jobs are kept, the latest; the audit keeps the change of each.
JOBS_KEPT = 50
#: The changes that can be jobs.
JOB_ACTIONS: Mapping[str, Callable[..., MessageChange]] = {
    "cancel": Cancel,
    "restore": Restore,
    "reschedule": Reschedule,
    "retry": Retry,
    "erase": Erase,
}

#: The state of the messages that a change is about, by the change's name; another state in its filter is an error.
_ONLY = {Restore.action: CANCELLED, Retry.action: MessageState.FAILED.value}
_DONE = {Restore.action: "restored", Retry.action: "retried"}


#: The mark that a transaction locks which begins a job.
_BEGINNING = f"{leases.MARK_BEGINS}jobs"


class TooManyJobs(DelayedError):
    """As many jobs are at work as may be. Nothing was begun."""


class JobState(str, Enum):
    """How far a job is."""

    RUNNING = "running"
    #: Somebody has stopped it, and it ends behind the messages that it works on, 2500 at most.
    STOPPING = "stopping"
    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"
    #: It gave no sign of life for :data:`JOB_SILENT`.
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSeen:
    """A job as the database has it."""

    #: When it began, its user, its selection, and how many messages by outcome so far.
    change: AuditRecord
    #: How many messages there were when it began, counted up to a million.
    total: int
    state: JobState
    #: Its last sign of life.
    seen_at: datetime
    ended_at: datetime | None
    #: The user who stopped it.
    stopped_by: str | None
    #: Why it failed.
    problem: str | None

    @property
    def total_at_least(self) -> bool:
        """Whether there were more messages than were counted."""
        return self.total > MAX_COUNTED

    @property
    def is_running(self) -> bool:
        """Whether it works."""
        return self.state in (JobState.RUNNING, JobState.STOPPING)


class JobEntry(AuditEntry):
    """The row of a job in the audit, with the job's own row.

    :param total: how many messages there are.
    """

    def __init__(
        self, who: str, action: str, selection: Mapping[str, Any], *, because: str | None, hide_tag: bool, total: int
    ) -> None:
        super().__init__(who, action, selection, because=because, hide_tag=hide_tag)
        self._total = total
        #: Somebody has stopped the job.
        self.is_stopped = False
        #: How many messages by outcome so far.
        self.counts: dict[Outcome, int] = {}

    def write(self, connection: Connection, tables: Tables, counts: Mapping[Outcome, int], at: datetime) -> int:
        """Write the counts and a sign of life, and read whether the job is stopped."""
        begins, jobs = self._seq is None, tables.jobs
        self.counts = dict(counts)
        seq = super().write(connection, tables, counts, at)
        if begins:
            row = {"Seq": seq, "Total": self._total, "State": JobState.RUNNING.value, "SeenAt": at}
            connection.execute(insert(jobs).values(row))
        else:
            connection.execute(update(jobs).where(jobs.c.Seq == seq).values(SeenAt=at))
            self.is_stopped = connection.execute(select(jobs.c.StoppedBy).where(jobs.c.Seq == seq)).scalar() is not None
        return seq


class Job:
    """A change that was begun: it works while its caller iterates, on up to 2500 messages at each step."""

    def __init__(self, store: StoreJobs, seq: int, entry: JobEntry, steps: Iterator[None]) -> None:
        self.seq = seq
        self._store = store
        self._entry = entry
        self._steps = steps

    def __iter__(self) -> Iterator[None]:
        """Work until all messages are changed, or somebody has stopped the job.

        :raises DelayedError: the database refused, or cannot be reached; write its text by :meth:`fail`.
        """
        with self._store._ready():
            for _ in self._steps:
                yield
                if self._entry.is_stopped:
                    break
        self._end(JobState.STOPPED if self._entry.is_stopped else JobState.DONE)

    @property
    def counts(self) -> Mapping[str, int]:
        """How many messages by outcome so far."""
        return {outcome.value: count for outcome, count in self._entry.counts.items()}

    def fail(self, problem: str) -> None:
        """Record why it failed."""
        self._end(JobState.FAILED, problem[:MAX_ERROR])

    def _end(self, state: JobState, problem: str | None = None) -> None:
        jobs = self._store.tables.jobs

        def work(connection: Connection) -> None:
            now = database_time(connection)
            row = {"State": state.value, "SeenAt": now, "EndedAt": now, "Problem": problem}
            connection.execute(update(jobs).where(jobs.c.Seq == self.seq).values(row))

        with self._store._ready():
            retried(self._store.engine, work)


class StoreJobs(StoreOverview):
    """The jobs of a store, see :class:`airflow_delayed.store.api.Store`."""

    def cancel_grace(self) -> timedelta:
        """Return how long a cancel can be taken back; zero: a cancelled message is removed at once."""
        return timedelta(seconds=CANCEL_GRACE)

    def begin_job(
        self,
        action: str,
        options: Mapping[str, Any],
        *,
        actor: str,
        limit: int | None = None,
        because: str | None = None,
        at_once: int | None = None,
        **filters: Unpack[FilterArgs],
    ) -> Job:
        """Count the messages of a change by filter, record it as a job, and return the job, which works when iterated.

        :param action: of ``JOB_ACTIONS``.
        :param options: of the change, such as ``due_at`` of a reschedule.
        :param limit: consider at most so many messages.
        :param at_once: begin only if fewer jobs than so many are at work.
        :raises TooManyJobs: so many are at work.
        :raises ValueError: the filter has no criterion, or a state that the change cannot select.
        """
        if action == Cancel.action:
            options = {"grace": self.cancel_grace(), **options}
        change = JOB_ACTIONS[action](**options)
        wanted = self._filter_of(change, filters)
        if not wanted.criteria:
            raise ValueError(f"{action}: a job needs a criterion")
        changes = BulkChanges(self.engine, self.tables)
        with self._ready():
            would = changes.by_filter(change, wanted, who=actor, dry_run=True, limit=1)
            total = would.total + would.more
            if limit is not None:
                total = limit if total > MAX_COUNTED else min(limit, total)
            entry = JobEntry(
                actor,
                change.action,
                selection_of(change, wanted),
                because=because,
                hide_tag=hides_tag(change),
                total=total,
            )
            seq = retried(self.engine, lambda connection: self._begin(connection, entry, at_once))
        entry.written(seq)
        return Job(self, seq, entry, changes.steps(change, wanted, entry, limit=limit))

    def _filter_of(self, change: MessageChange, filters: FilterArgs) -> MessageFilter:
        """Return the filter of a change; that of a restore or an erase may have the state "cancelled".

        :raises WrongState: it has a state whose messages the change leaves as they are.
        :raises ValueError: it has another state of messages that have left the store.
        """
        only, state = _ONLY.get(change.action), filters.get("state")
        if only is not None and state not in (None, only, [only], (only,)):
            raise WrongState(f"{change.action}: state={state!r}: only {only} messages are {_DONE[change.action]}")
        left = take_left(filters) if "cancelled" in change.where else ()
        if left not in ((), (CANCELLED,)):
            raise ValueError(f"{change.action}: state={left[0]!r}: only the ids of these messages are there")
        return replace(self._filter(filters), cancelled=bool(left))

    def _begin(self, connection: Connection, entry: JobEntry, at_once: int | None) -> int:
        jobs, now = self.tables.jobs, database_time(connection)
        # of several transactions that would begin a job, each counts the jobs that the transaction before has begun
        leases.lock_marks(connection, self.tables, [_BEGINNING], now)
        if at_once is not None:
            at_work = [jobs.c.EndedAt.is_(None), jobs.c.SeenAt >= now - JOB_SILENT]
            many = connection.execute(select(func.count()).select_from(jobs).where(*at_work)).scalar_one()
            if many >= at_once:
                raise TooManyJobs(
                    f"{many} jobs of store {self.conn_id!r} are at work; wait until one ends, or stop one"
                )
        older = connection.execute(
            select(jobs.c.Seq).order_by(jobs.c.Seq.desc()).offset(JOBS_KEPT - 1).limit(1)
        ).scalar()
        if older is not None:
            connection.execute(delete(jobs).where(jobs.c.Seq <= older))
        return entry.write(connection, self.tables, {}, now)

    def jobs(self, seq: int | None = None, *, seen_within: timedelta | None = None) -> list[JobSeen]:
        """Return the latest jobs, up to 50, the newest first.

        :param seq: only this one.
        :param seen_within: only jobs that gave a sign of life within this time.
        """
        jobs, audit = self.tables.jobs, self.tables.audit
        with self._ready(), dialect_of(self.engine).read_only(self.engine) as connection:
            now = database_time(connection)
            own = [column for column in jobs.columns if column is not jobs.c.Seq]
            statement = select(*columns_of(self.engine, self.tables), *own).join_from(
                jobs, audit, audit.c.Seq == jobs.c.Seq
            )
            if seq is not None:
                statement = statement.where(jobs.c.Seq == seq)
            if seen_within is not None:
                statement = statement.where(jobs.c.SeenAt > now - seen_within)
            rows = connection.execute(statement.order_by(jobs.c.Seq.desc()).limit(JOBS_KEPT)).all()
        return [_seen(dict(row._mapping), now) for row in rows]

    def stop_job(self, seq: int, *, actor: str) -> None:
        """Let a job end behind the messages that it works on, 2500 at most; what it has changed stays changed."""
        jobs = self.tables.jobs
        running = jobs.c.Seq == seq, jobs.c.EndedAt.is_(None), jobs.c.StoppedBy.is_(None)
        with self._ready():
            retried(
                self.engine,
                lambda connection: connection.execute(update(jobs).where(*running).values(StoppedBy=actor[:MAX_WHO])),
            )


def _seen(row: Mapping[str, Any], now: datetime) -> JobSeen:
    try:
        state = JobState(row["State"])
    except ValueError:
        # no job of this package wrote it
        state = JobState.FAILED
    if row["EndedAt"] is None:
        if now - row["SeenAt"] > JOB_SILENT:
            state = JobState.INTERRUPTED
        elif row["StoppedBy"] is not None:
            state = JobState.STOPPING
    return JobSeen(
        change=record_of(row),
        total=int(row["Total"]),
        state=state,
        seen_at=row["SeenAt"],
        ended_at=row["EndedAt"],
        stopped_by=row["StoppedBy"],
        problem=row["Problem"],
    )
