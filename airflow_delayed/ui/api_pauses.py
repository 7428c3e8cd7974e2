"""The routes of pauses: destinations and connections for which no dispatcher takes messages."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import partial

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.store.api import PauseReport, UnpauseReport
from airflow_delayed.ui import security
from airflow_delayed.ui.hook_pool import CHANGE_SECONDS, HookPool, HookPoolDep
from airflow_delayed.ui.models import HIDDEN, ApiModel, Because, PausedBody
from airflow_delayed.ui.security import is_store

router = APIRouter(
    prefix="/stores/{connection_id}",
    tags=["pauses"],
    dependencies=[is_store, security.views],
    route_class=security.GuardedRoute,
)


class PauseBody(BaseModel):
    """A pause, or its end."""

    model_config = ConfigDict(extra="forbid")

    selection: PausedBody
    dry_run: bool = Field(description="Change nothing, and report what would happen")
    because: Because | None = Field(default=None, description="The reason, for the audit")


class PauseResponse(ApiModel):
    """A destination or a connection that is paused."""

    pause: int = Field(description="The number of its record in the audit")
    selection: dict[str, str] = Field(description="As pause and unpause take it")
    at: datetime
    who: str | None
    because: str | None


class PauseCollection(ApiModel):
    """All that is paused, the earliest first."""

    pauses: list[PauseResponse]


class PauseReportResponse(ApiModel):
    """What a pause keeps in the store. ``text`` says it in a sentence."""

    text: str
    dry_run: bool
    waiting: int = Field(description="Messages in the store that wait for its end; counted up to a million")
    with_broker: int = Field(description="Dispatched within a day and not due yet: nobody can stop them")
    arrive_until: datetime | None


class UnpauseReportResponse(ApiModel):
    """What became of a pause. ``text`` says it in a sentence."""

    text: str
    dry_run: bool
    ended: bool = Field(description="There was such a pause")
    due: int = Field(description="Messages that fell due meanwhile; counted up to a million")


@router.get("/pauses")
async def pauses(connection_id: str, pool: HookPoolDep, user: security.User) -> PauseCollection:
    """Return what is paused; the reasons only with the right to read the connection."""

    def read(hook: DelayedStoreHook) -> PauseCollection:
        reasons = security.may("read", connection_id, user)
        found = [PauseResponse(**one.summary(connection_id)) for one in hook.pauses()]
        for one in found:
            one.because = one.because if reasons or one.because is None else HIDDEN
        return PauseCollection(pauses=found)

    return await pool.call_store(connection_id, read)


@router.post("/pause", dependencies=[security.edits])
async def pause(connection_id: str, body: PauseBody, pool: HookPoolDep, user: security.User) -> PauseReportResponse:
    """Let no dispatcher take messages to a destination, or for a connection; each obeys within 2 s."""
    report = await _change(pool, user, connection_id, "pause", body, lambda hook: hook.pause)
    assert isinstance(report, PauseReport)
    return PauseReportResponse(
        text=str(report),
        dry_run=report.dry_run,
        waiting=report.waiting,
        with_broker=report.with_broker,
        arrive_until=report.arrive_until,
    )


@router.post("/unpause", dependencies=[security.edits])
async def unpause(connection_id: str, body: PauseBody, pool: HookPoolDep, user: security.User) -> UnpauseReportResponse:
    """End a pause; what fell due meanwhile is sent at once."""
    report = await _change(pool, user, connection_id, "unpause", body, lambda hook: hook.unpause)
    assert isinstance(report, UnpauseReport)
    return UnpauseReportResponse(
        text=str(report), dry_run=report.dry_run, ended=report.pause is not None, due=report.due
    )


async def _change(
    pool: HookPool,
    user: security.User,
    connection_id: str,
    action: str,
    body: PauseBody,
    method: Callable[[DelayedStoreHook], Callable[..., PauseReport | UnpauseReport]],
) -> PauseReport | UnpauseReport:
    actor = f"user {security.name_of(user)}"
    options = {**body.selection.criteria(), "dry_run": body.dry_run, "actor": actor, "because": body.because}

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
