"""The route of a store's timeline: what its dispatchers did, and what falls due."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import Field

from airflow_delayed.store.api import Timeline
from airflow_delayed.ui import security
from airflow_delayed.ui.api_stores import forecast
from airflow_delayed.ui.hook_pool import HookPoolDep
from airflow_delayed.ui.models import ApiModel

if TYPE_CHECKING:
    # Python 3.10 does not have it
    from typing_extensions import Self

router = APIRouter(
    prefix="/stores/{connection_id}",
    tags=["stores"],
    dependencies=[security.is_store, security.views],
    route_class=security.GuardedRoute,
)


class PastStepResponse(ApiModel):
    """What dispatchers did from ``begin`` on, for one step."""

    begin: datetime
    dispatched: int = Field(description="Handed over to the broker, or put into the queue table")
    on_time: int = Field(description="Dispatched at most 5 s after the due time, or ahead of it")
    late: int = Field(description="Dispatched later than that")
    failed: int
    expired: int
    retried: int
    max_late_seconds: float
    by_destination: list[int] = Field(description="Dispatched, in the order of ``destinations``")


class FutureStepResponse(ApiModel):
    """How many messages fall due from ``begin`` on, for one step; the present step counts from now."""

    begin: datetime
    messages: int
    by_destination: list[int] = Field(description="In the order of ``destinations``")


class ForecastResponse(ApiModel):
    """Messages that will be more than a minute late, or of which that is not known."""

    conn_id: str
    destination: str | None = Field(description="The destination whose rate limits them; null: the connection does")
    messages: int
    first_due: datetime
    last_due: datetime
    ends_at: datetime | None = Field(description="When the last is dispatched; null: not known yet")
    text: str


class HistoryResponse(ApiModel):
    """The past and the future around ``at``, in steps of ``step_seconds``. Dispatchers write every 10 s."""

    at: datetime
    step_seconds: int
    destinations: list[str] = Field(description="The 20 largest; last an empty name for all others, if there are any")
    past: list[PastStepResponse]
    future: list[FutureStepResponse]
    forecast: list[ForecastResponse] = Field(default=[], description="Of a day, the first by due time first")

    @classmethod
    def of(cls, timeline: Timeline) -> Self:
        """Return the answer for a timeline."""
        names = timeline.destinations
        past = [
            PastStepResponse(
                begin=step.begin,
                dispatched=step.counts.dispatched,
                on_time=step.counts.on_time,
                late=step.counts.dispatched - step.counts.on_time,
                failed=step.counts.failed,
                expired=step.counts.expired,
                retried=step.counts.retried,
                max_late_seconds=step.counts.max_late,
                by_destination=[step.by_destination.get(name, 0) for name in names],
            )
            for step in timeline.past
        ]
        future = [
            FutureStepResponse(
                begin=step.begin,
                messages=step.messages,
                by_destination=[step.by_destination.get(name, 0) for name in names],
            )
            for step in timeline.future
        ]
        return cls(
            at=timeline.at, step_seconds=timeline.step_seconds, destinations=list(names), past=past, future=future
        )


@router.get("/history")
async def history(
    connection_id: str, pool: HookPoolDep, seconds: Annotated[Literal["3600", "86400", "604800"], Query()] = "3600"
) -> HistoryResponse:
    """Return what was dispatched in the last hour, day or week, and what falls due in the next; some seconds old."""
    answer, _ = await pool.store_figures(
        connection_id, lambda hook: HistoryResponse.of(hook.timeline(int(seconds))), name=f"history {seconds}"
    )
    late = await forecast(connection_id, pool)
    texts = [ForecastResponse.model_validate({**asdict(one), "text": str(one)}) for one in late]
    return answer.model_copy(update={"forecast": texts})
