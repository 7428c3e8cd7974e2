"""Changes by filter that work in the background, and are watched and stopped from elsewhere. No Airflow here.

A job is one row of the audit, which has its user, its selection and its counts, and a row of the table ``_jobs`` with
the same number. The transaction of each thousand messages or so also writes a sign of life, and reads whether somebody
has stopped the job. So all processes see the same, and the counts are exact even if a process is killed. Who starts the
same change again continues it: the filter matches what is not changed yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import Any

from sqlalchemy import Connection, Engine, delete, func, insert, select, update

from airflow_delayed.errors import DelayedError
from airflow_delayed.store import remembered_ids
from airflow_delayed.store.audit import MAX_WHO, AuditEntry, AuditRecord, columns_of, record_of
from airflow_delayed.store.bulk_changes import MAX_COUNTED
from airflow_delayed.store.changes import Cancel, Erase, MessageChange, Reschedule, Restore, Retry
from airflow_delayed.store.dialects import database_time, dialect_of
from airflow_delayed.store.engine import retried
from airflow_delayed.store.filters import MessageFilter
from airflow_delayed.store.outcomes import Outcome, OutOfReach
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
#: The mark that a transaction locks which begins a job.
_BEGINNING = f"{remembered_ids.MARK_BEGINS}jobs"


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
        self, who: str, change: MessageChange, wanted: MessageFilter, *, because: str | None, total: int
    ) -> None:
        super().__init__(who, change.action, change.selection(wanted), because=because, hide_tag=change.hides_tag)
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
    """A change that was begun: it works while its caller iterates, on up to 2500 messages at each step.

    :param ready: a block in which the database's errors are those of this package.
    :param out_of_reach: what had been dispatched before it began and was not due yet.
    """

    def __init__(
        self,
        engine: Engine,
        tables: Tables,
        ready: Callable[[], AbstractContextManager[None]],
        entry: JobEntry,
        seq: int,
        steps: Iterator[None],
        out_of_reach: OutOfReach,
    ) -> None:
        self.seq = seq
        self.out_of_reach = out_of_reach
        self._engine = engine
        self._tables = tables
        self._ready = ready
        self._entry = entry
        self._steps = steps

    def __iter__(self) -> Iterator[None]:
        """Work until all messages are changed, or somebody has stopped the job.

        :raises DelayedError: the database refused, or cannot be reached; write its text by :meth:`fail`.
        """
        with self._ready():
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
        jobs = self._tables.jobs

        def work(connection: Connection) -> None:
            now = database_time(connection)
            row = {"State": state.value, "SeenAt": now, "EndedAt": now, "Problem": problem}
            connection.execute(update(jobs).where(jobs.c.Seq == self.seq).values(row))

        with self._ready():
            retried(self._engine, work)


def begin(connection: Connection, tables: Tables, entry: JobEntry, *, conn_id: str, at_once: int | None) -> int:
    """Record a job, and return its number.

    :param at_once: only if fewer jobs than so many are at work.
    :raises TooManyJobs: so many are at work.
    """
    jobs, now = tables.jobs, database_time(connection)
    # of several transactions that would begin a job, each counts the jobs that the transaction before has begun
    remembered_ids.lock_mark(connection, tables, _BEGINNING, now)
    if at_once is not None:
        at_work = [jobs.c.EndedAt.is_(None), jobs.c.SeenAt >= now - JOB_SILENT]
        many = connection.execute(select(func.count()).select_from(jobs).where(*at_work)).scalar_one()
        if many >= at_once:
            raise TooManyJobs(f"{many} jobs of store {conn_id!r} are at work; wait until one ends, or stop one")
    older = connection.execute(select(jobs.c.Seq).order_by(jobs.c.Seq.desc()).offset(JOBS_KEPT - 1).limit(1)).scalar()
    if older is not None:
        connection.execute(delete(jobs).where(jobs.c.Seq <= older))
    return entry.write(connection, tables, {}, now)


def latest(engine: Engine, tables: Tables, seq: int | None = None, *, within: timedelta | None = None) -> list[JobSeen]:
    """Return the latest jobs, the newest first.

    :param seq: only this one.
    :param within: only jobs that gave a sign of life within this time.
    """
    jobs, audit = tables.jobs, tables.audit
    with dialect_of(engine).read_only(engine) as connection:
        now = database_time(connection)
        own = [column for column in jobs.columns if column is not jobs.c.Seq]
        statement = select(*columns_of(engine, tables), *own).join_from(jobs, audit, audit.c.Seq == jobs.c.Seq)
        if seq is not None:
            statement = statement.where(jobs.c.Seq == seq)
        if within is not None:
            statement = statement.where(jobs.c.SeenAt > now - within)
        rows = connection.execute(statement.order_by(jobs.c.Seq.desc()).limit(JOBS_KEPT)).all()
    return [_seen(dict(row._mapping), now) for row in rows]


def stop(connection: Connection, tables: Tables, seq: int, *, actor: str) -> None:
    """Record who stops a job."""
    jobs = tables.jobs
    running = jobs.c.Seq == seq, jobs.c.EndedAt.is_(None), jobs.c.StoppedBy.is_(None)
    connection.execute(update(jobs).where(*running).values(StoppedBy=actor[:MAX_WHO]))


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
