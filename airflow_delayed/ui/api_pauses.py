"""The routes of pauses: what dispatchers do not take for a time.

Who may edit the store's connection may pause anything in it; who may edit a DAG, what that DAG stored.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.concurrency import run_in_threadpool

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.store.api import OnUnpause, Pause, PauseReport, UnpauseReport
from airflow_delayed.ui import security
from airflow_delayed.ui.api_stores import refused_without_dag
from airflow_delayed.ui.hook_pool import CHANGE_SECONDS, HookPool, HookPoolDep
from airflow_delayed.ui.models import HIDDEN, ApiModel, Because, HeldSelection, PausedBody
from airflow_delayed.ui.security import is_store

router = APIRouter(
    prefix="/stores/{connection_id}",
    tags=["pauses"],
    dependencies=[is_store, security.views],
    route_class=security.GuardedRoute,
)

#: Seconds: a year.
_Seconds = Annotated[float, Field(ge=0, le=366 * 86_400, allow_inf_nan=False)]


class UnpauseBody(BaseModel):
    """The end of a pause: of the same selection."""

    model_config = ConfigDict(extra="forbid")

    selection: PausedBody
    dry_run: bool = Field(description="Change nothing, and report what would happen")
    on_unpause: OnUnpause | None = Field(default=None, description="In place of what the pause says")
    spread_seconds: _Seconds | None = Field(default=None, description="The same; 600 for a new pause")
    because: Because | None = Field(default=None, description="The reason, for the audit")

    @model_validator(mode="after")
    def _not_empty(self) -> UnpauseBody:
        if not self.selection.model_dump(exclude_none=True):
            raise ValueError("selection: give at least one criterion")
        return self

    def options(self) -> dict[str, Any]:
        """Return the arguments of the store's hook."""
        options = self.selection.criteria()
        if self.spread_seconds is not None:
            options["spread"] = timedelta(seconds=self.spread_seconds)
        if self.on_unpause is not None:
            options["on_unpause"] = self.on_unpause
        return options


class PauseBody(UnpauseBody):
    """A pause, in place of an earlier one of the same selection."""

    duration_seconds: _Seconds | None = Field(default=None, description="It ends by itself after so long")

    def options(self) -> dict[str, Any]:
        """Return the arguments of the store's hook."""
        ends = {} if self.duration_seconds is None else {"duration": timedelta(seconds=self.duration_seconds)}
        return {**super().options(), **ends}


class PauseResponse(HeldSelection):
    """A pause that holds messages."""

    pause: int = Field(description="The number of its record in the audit")
    at: datetime
    who: str | None
    because: str | None
    may_change: bool = Field(description="This user may end it")


class PauseCollection(ApiModel):
    """All pauses that hold messages, the earliest first."""

    pauses: list[PauseResponse]


class PauseReportResponse(ApiModel):
    """What a pause holds. ``text`` says it in a sentence."""

    text: str
    dry_run: bool
    waiting: int = Field(description="Messages in the store that it holds; counted up to a million")
    with_broker: int = Field(description="Dispatched within a day and not due yet: nobody can stop them")
    arrive_until: datetime | None
    ends_at: datetime | None


class UnpauseReportResponse(ApiModel):
    """What became of a pause. ``text`` says it in a sentence."""

    text: str
    dry_run: bool
    ended: bool = Field(description="There was such a pause")
    due: int = Field(description="Messages that fell due meanwhile; counted up to a million")
    cancelled: int


@router.get("/pauses")
async def pauses(connection_id: str, pool: HookPoolDep, user: security.User) -> PauseCollection:
    """Return the pauses; the reasons only with the right to read the connection."""

    def shown(pause: Pause, may_change: Callable[[str | None], bool], *, reasons: bool) -> PauseResponse:
        summary = PauseResponse.values_of(pause, connection_id)
        if pause.because is not None and not reasons:
            summary["because"] = HIDDEN
        return PauseResponse(**summary, may_change=may_change(pause.selection.get("dag_id")))

    def read(hook: DelayedStoreHook) -> PauseCollection:
        reasons = security.may("read", connection_id, user)
        may_change = security.may_change(connection_id, user)
        return PauseCollection(pauses=[shown(one, may_change, reasons=reasons) for one in hook.pauses()])

    return await pool.call_store(connection_id, read)


@router.post("/pause")
async def pause(connection_id: str, body: PauseBody, pool: HookPoolDep, user: security.User) -> PauseReportResponse:
    """Let no dispatcher take the messages of a selection; each obeys within 2 s."""
    report = await _change(pool, user, connection_id, "pause", body, lambda hook: hook.pause)
    assert isinstance(report, PauseReport)
    return PauseReportResponse(
        text=str(report),
        dry_run=report.dry_run,
        waiting=report.waiting,
        with_broker=report.with_broker,
        arrive_until=report.arrive_until,
        ends_at=report.pause.ends_at,
    )


@router.post("/unpause")
async def unpause(
    connection_id: str, body: UnpauseBody, pool: HookPoolDep, user: security.User
) -> UnpauseReportResponse:
    """End a pause."""
    report = await _change(pool, user, connection_id, "unpause", body, lambda hook: hook.unpause)
    assert isinstance(report, UnpauseReport)
    return UnpauseReportResponse(
        text=str(report),
        dry_run=report.dry_run,
        ended=report.pause is not None,
        due=report.due,
        cancelled=report.cancelled,
    )


async def _change(
    pool: HookPool,
    user: security.User,
    connection_id: str,
    action: str,
    body: UnpauseBody,
    method: Callable[[DelayedStoreHook], Callable[..., PauseReport | UnpauseReport]],
) -> PauseReport | UnpauseReport:
    may_change = await run_in_threadpool(security.may_change, connection_id, user)
    if not await run_in_threadpool(may_change, body.selection.dag_id):
        raise refused_without_dag()
    actor = f"user {security.name_of(user)}"
    options = {**body.options(), "dry_run": body.dry_run, "actor": actor, "because": body.because}

    def work(hook: DelayedStoreHook) -> PauseReport | UnpauseReport:
        change = partial(method(hook), **options)
        if body.dry_run:
            return change()
        details = {"connection_id": connection_id, **body.model_dump(mode="json", exclude_none=True)}
        with security.logged(action, user, details) as outcome:
            report = change()
            outcome["outcome"] = str(report)
        return report

    report = await pool.call_store(connection_id, work, seconds=CHANGE_SECONDS)
    if not body.dry_run:
        pool.invalidate_store(connection_id)
    return report
