"""The routes of jobs: changes of many messages by filter, which a thread of the API server works on.

A job has a thread of its own, which answers no request, and its own connections to the database. Its state is
in the store: any process of the API server answers for it. The rights are those of its user when it begins.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Path
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.message import due_after, utc
from airflow_delayed.store.api import Job, JobSeen
from airflow_delayed.threads import in_thread
from airflow_delayed.ui import errors, security
from airflow_delayed.ui.api_stores import check_reason, logged_selection, refused_without_dag, span_of
from airflow_delayed.ui.hook_pool import CHANGE_SECONDS, STATEMENT_SECONDS, HookPoolDep
from airflow_delayed.ui.models import HIDDEN, ApiModel, AuditEntryResponse, JobBody, OutOfReachResponse
from airflow_delayed.ui.security import is_store

log = logging.getLogger(__name__)

router = APIRouter(
    prefix="/stores/{connection_id}/jobs",
    tags=["changes"],
    dependencies=[is_store, security.views],
    route_class=security.GuardedRoute,
)

#: Jobs of one store that work at once.
MOST_JOBS = 3
#: The first screen shows jobs that gave a sign of life within this time.
SHOWN = timedelta(minutes=10)

JobId = Annotated[str, Path(pattern=r"^\d{1,18}$")]
#: Whether a user may do an action with the messages of a DAG; None: of any sender.
MayDo = Callable[[str, str | None], bool]


class JobResponse(AuditEntryResponse):
    """A change that works in the background; ``at`` is when it began, ``counts`` what became of messages so far."""

    job: str
    total: int = Field(description="Messages that matched when it began")
    total_at_least: bool = Field(description="There were more than were counted")
    considered: int = Field(description="Messages that it has looked at")
    state: Literal["running", "stopping", "done", "stopped", "failed", "interrupted"] = Field(
        description="Interrupted: it gave no sign of life for a while; to start the same again goes on"
    )
    seen_at: datetime = Field(description="Its last sign of life")
    ended_at: datetime | None
    stopped_by: str | None
    problem: str | None = Field(description="Why it failed")
    may_stop: bool = Field(description="This user may stop it")
    out_of_reach: list[OutOfReachResponse] = Field(
        default=[], description="In the answer that starts it: dispatched before, not due yet, by connection"
    )

    @classmethod
    def of_job(cls, seen: JobSeen, *, reasons: bool, may: MayDo) -> JobResponse:
        """Return a job.

        :param reasons: show why it failed, and the reason of failures by which its messages were selected.
        """
        change = AuditEntryResponse.of(seen.change, reasons=reasons)
        return cls(
            **change.model_dump(),
            job=str(seen.change.seq),
            total=seen.total,
            total_at_least=seen.total_at_least,
            considered=sum(change.counts.values()),
            state=seen.state.value,
            seen_at=seen.seen_at,
            ended_at=seen.ended_at,
            stopped_by=seen.stopped_by,
            problem=seen.problem if reasons or seen.problem is None else HIDDEN,
            may_stop=may(change.action, seen.change.selection.get("dag_id")),
        )


class JobCollection(ApiModel):
    """The latest jobs of a store, the newest first."""

    jobs: list[JobResponse]


def _responses(found: Sequence[JobSeen], connection_id: str, user: security.User) -> list[JobResponse]:
    reasons = security.may("read", connection_id, user)
    may = _may(connection_id, user)
    return [JobResponse.of_job(one, reasons=reasons, may=may) for one in found]


def _may(connection_id: str, user: security.User) -> MayDo:
    of_dag = security.may_change(connection_id, user)
    # what is erased does not come back, so it needs the right to edit the connection
    return lambda action, dag_id: of_dag(None if action == "erase" else dag_id)


def _one(hook: DelayedStoreHook, seq: int) -> JobSeen:
    found = hook.jobs(seq)
    if not found:
        raise HTTPException(404, "the store has no such job, or keeps it no longer; the audit has its change")
    return found[0]


def shown(hook: DelayedStoreHook, connection_id: str, user: security.User) -> list[JobResponse]:
    """Return the jobs that the first screen shows."""
    found = hook.jobs(seen_within=SHOWN)
    return _responses(found, connection_id, user) if found else []


@router.get("")
async def jobs(connection_id: str, pool: HookPoolDep, user: security.User) -> JobCollection:
    """Return the latest 50 jobs, the newest first."""
    found = await pool.call_store(connection_id, lambda hook: _responses(hook.jobs(), connection_id, user))
    return JobCollection(jobs=found)


@router.get("/{job}")
async def job(connection_id: str, job: JobId, pool: HookPoolDep, user: security.User) -> JobResponse:
    """Return one job."""
    found = await pool.call_store(connection_id, lambda hook: _responses([_one(hook, int(job))], connection_id, user))
    return found[0]


@router.post("")
async def start(connection_id: str, body: JobBody, pool: HookPoolDep, user: security.User) -> JobResponse:
    """Start a change by filter, and return at once."""
    if not await run_in_threadpool(_may(connection_id, user), body.action, body.filter.dag_id):
        raise refused_without_dag()
    check_reason(body.filter, reasons=await run_in_threadpool(security.may, "read", connection_id, user))

    def changed() -> None:
        pool.invalidate_store(connection_id)

    def begin() -> JobResponse:
        # its own connections: those of the pool are closed from time to time
        hook = DelayedStoreHook(connection_id)
        try:
            hook.limit_statements(STATEMENT_SECONDS)
            begun = hook.begin_job(
                body.action,
                _options(hook, body),
                actor=f"user {security.name_of(user)}",
                limit=body.most,
                because=body.because,
                at_once=MOST_JOBS,
                **body.filter.criteria(),
            )
            (answer,) = _responses([_one(hook, begun.seq)], connection_id, user)
            answer.out_of_reach = [OutOfReachResponse(**row) for row in begun.out_of_reach.rows()]
        except BaseException:
            hook.close()
            raise
        details = {"connection_id": connection_id, "job": answer.job, **logged_selection(body.action, body)}
        in_thread(lambda: _work(hook, begun, body.action, user, details, changed))
        return answer

    return await pool.call(connection_id, begin, seconds=CHANGE_SECONDS)


def _options(hook: DelayedStoreHook, body: JobBody) -> dict[str, Any]:
    """Return the parameters of a change beside its messages."""
    if body.action == "restore":
        return {"overdue_ok": body.overdue_ok}
    if body.action != "reschedule":
        return {}
    return {"due_at": utc("due_at", body.due_at or due_after(hook.now(), span_of(body.delay_seconds or 0)))}


def _work(
    hook: DelayedStoreHook,
    job: Job,
    action: str,
    user: security.User,
    details: Mapping[str, Any],
    changed: Callable[[], None],
) -> None:
    try:
        with security.logged(action, user, details) as outcome:
            try:
                for _ in job:
                    pass
            finally:
                outcome["outcomes"] = job.counts
    except Exception as error:
        known = errors.api_error(error)
        if known is None:
            security.log_unexpected(f"job {job.seq} of store {hook.conn_id!r}", error)
        else:
            log.warning("Job %s of store %r failed: %s", job.seq, hook.conn_id, error)
        job.fail((known or errors.INTERNAL).message)
    finally:
        changed()
        hook.close()


@router.post("/{job}/stop")
async def stop(connection_id: str, job: JobId, pool: HookPoolDep, user: security.User) -> JobResponse:
    """Let a job end; what it has changed stays changed."""

    def work(hook: DelayedStoreHook) -> JobResponse:
        change = _one(hook, int(job)).change
        if not _may(connection_id, user)(change.action, change.selection.get("dag_id")):
            raise refused_without_dag()
        with security.logged("stop", user, {"connection_id": connection_id, "job": job}):
            hook.stop_job(int(job), actor=f"user {security.name_of(user)}")
        return _responses([_one(hook, int(job))], connection_id, user)[0]

    return await pool.call_store(connection_id, work)
