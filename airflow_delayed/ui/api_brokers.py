"""The routes of RabbitMQ and SQS: counts of the messages that wait, and redrive of undeliverable ones."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from datetime import datetime
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from airflow_delayed.delivery import State, delivery_for
from airflow_delayed.diagnosis import one_of_each, with_remedies
from airflow_delayed.message import utcnow
from airflow_delayed.ui import security
from airflow_delayed.ui.hook_pool import CHANGE_SECONDS, HookPool, HookPoolDep
from airflow_delayed.ui.models import (
    WHO_SEES_WHY,
    ApiModel,
    FindingResponse,
    RedriveBody,
    RedriveUnroutableBody,
)
from airflow_delayed.ui.security import is_rabbitmq, is_sqs

if TYPE_CHECKING:
    from airflow_delayed.sqs.stats import QueueDepth

router = APIRouter(tags=["brokers"], route_class=security.GuardedRoute)

#: Messages that one redrive looks at.
MAX_REDRIVEN = 1000
#: Seconds for which it is known, at least and at most, what differs in a RabbitMQ: each of its parts is asked for.
VERIFY_KEPT = 30.0, 45.0


class LevelResponse(ApiModel):
    """The messages in one delay level of RabbitMQ; null: unknown."""

    level: int
    queue: str
    messages: int | None
    stuck: int | None
    earliest: datetime
    latest: datetime


class RabbitMQSummary(ApiModel):
    """The messages in RabbitMQ's delay levels, and when they leave; empty levels are omitted."""

    connection_id: str
    at: datetime
    age_seconds: float
    topology: str
    messages: int | None = Field(description="null: those in a queue of a level are unknown, see ``unavailable``")
    stuck: int | None
    why_unknown: str | None
    levels: list[LevelResponse]
    missing: list[str]
    unroutable_queue: str
    unroutable: int | None = Field(description="null: there is no such queue, or it is among ``unavailable``")
    unavailable: list[str] = Field(
        description="Queues without a leader or with too few members that run, or all if the management API did not"
        " answer in time: what waits in them is unknown"
    )
    findings: list[FindingResponse] = Field(description="What is wrong with the leaders and members of the queues")


class QueueResponse(ApiModel):
    """One queue of SQS; counts are SQS's, and approximate."""

    queue: str
    waiting: int
    delayed: int
    in_flight: int
    retention_seconds: int
    visibility_timeout_seconds: int


class SqsSummary(ApiModel):
    """The queues that messages to one destination pass through; null: there is no such queue."""

    connection_id: str
    queue: str
    at: datetime
    age_seconds: float
    destination: QueueResponse
    delay_queue: QueueResponse | None
    dead_letter_queue: QueueResponse | None
    max_receive_count: int | None
    risk: str | None = Field(description="Why messages could expire unread; null: nothing says so")
    findings: list[FindingResponse] = Field(description="Dead letters, and the risk, with what to do")


class RedriveDestination(ApiModel):
    """A destination of unroutable messages."""

    name: str
    messages: int
    problem: str | None = Field(description="Why nothing would be sent to it unless it is named")


class RedriveResponse(ApiModel):
    """The counts of a redrive: messages moved back to their destination, and messages that remain."""

    dry_run: bool
    waiting: int | None = Field(description="Of a dry run: how many there are")
    destinations: list[RedriveDestination] = Field(
        default=[], description="Of a dry run on RabbitMQ: what the messages that were looked at name"
    )
    moved: int
    remaining: dict[str, int] = Field(description="How many stay in the queue, by reason")
    task: str | None = Field(default=None, description="Of SQS: it moves them by itself, and goes on")


@router.get("/rabbitmq/{connection_id}/summary", dependencies=[is_rabbitmq, security.views])
async def rabbitmq(connection_id: str, pool: HookPoolDep, user: security.User) -> RabbitMQSummary:
    """Return how many messages wait, when they leave, and how many are unroutable or stuck."""
    figures = await _rabbitmq_figures(connection_id, pool)
    changed: dict[str, Any] = {}
    names_hosts = figures.why_unknown or figures.findings
    if names_hosts and not await run_in_threadpool(security.may, "read", connection_id, user):
        if figures.why_unknown:
            changed["why_unknown"] = f"unknown from the management API; {WHO_SEES_WHY}"
        changed["findings"] = [each.without_details() for each in figures.findings]
    return figures.model_copy(update=changed)


async def _rabbitmq_figures(connection_id: str, pool: HookPool) -> RabbitMQSummary:
    def make() -> RabbitMQSummary:
        from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook

        hook = RabbitMQDelayHook(connection_id)
        waiting = hook.waiting()
        return RabbitMQSummary(
            connection_id=connection_id,
            at=waiting.at,
            age_seconds=0,
            topology=hook.topology.name,
            messages=waiting.messages,
            stuck=waiting.stuck,
            why_unknown=waiting.why_unknown,
            levels=[
                LevelResponse.model_validate(level)
                for level in waiting.levels
                if level.messages or level.stuck or level.queue in waiting.unavailable
            ],
            missing=list(waiting.missing),
            unroutable_queue=waiting.unroutable_queue,
            unroutable=waiting.unroutable,
            unavailable=list(waiting.unavailable),
            findings=[FindingResponse.of(finding) for finding in waiting.findings],
        )

    figures, age = await pool.figures(connection_id, f"rabbitmq {connection_id}", make)
    work = lambda: _differing(connection_id)  # noqa: E731
    verified = await pool.slow_figures(connection_id, f"verify {connection_id}", work, kept=VERIFY_KEPT) or ()
    known = {finding.code for finding in figures.findings}
    findings = [*figures.findings, *(finding for finding in verified if finding.code not in known)]
    return figures.model_copy(update={"age_seconds": age, "findings": findings})


def _differing(connection_id: str) -> list[FindingResponse]:
    """Return what is missing or differs in the delay levels, one of each kind, with their number."""
    with closing(delivery_for(connection_id)) as hook:
        errors = [each for each in with_remedies(connection_id, hook.verify(())) if each.severity == "error"]
    found = one_of_each(each for each in errors if each.state is not State.BLOCKED)
    return [FindingResponse.of(each) for each in found]


@router.post("/rabbitmq/{connection_id}/redrive", dependencies=[is_rabbitmq, security.edits])
async def redrive_rabbitmq(
    connection_id: str, redrive: RedriveUnroutableBody, pool: HookPoolDep, user: security.User
) -> RedriveResponse:
    """Send up to 1000 unroutable messages to those of the named destinations that exist."""

    def move() -> RedriveResponse:
        from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook

        hook = RabbitMQDelayHook(connection_id)
        if redrive.dry_run:
            would = hook.redrive(destinations=redrive.destinations, limit=MAX_REDRIVEN, dry_run=True)
            destinations = [
                RedriveDestination(name=name, messages=count, problem=would.problems.get(name))
                for name, count in would.destinations.items()
            ]
            waiting = sum(would.waiting.values())
            return RedriveResponse(
                dry_run=True, waiting=waiting, destinations=destinations, moved=0, remaining=would.remaining
            )
        details = {"connection_id": connection_id, "destinations": redrive.destinations}
        with security.logged("redrive", user, details) as outcome:
            done = hook.redrive(destinations=redrive.destinations, limit=MAX_REDRIVEN)
            outcome.update(moved=done.moved, remaining=done.remaining)
        pool.invalidate(f"rabbitmq {connection_id}")
        return RedriveResponse(dry_run=False, waiting=None, moved=done.moved, remaining=done.remaining)

    return await pool.call(connection_id, move, seconds=CHANGE_SECONDS)


@router.get("/sqs/{connection_id}/{queue}/summary", dependencies=[is_sqs, security.views])
async def sqs(connection_id: str, queue: str, pool: HookPoolDep) -> SqsSummary:
    """Return the counts of one destination's queues."""

    def make() -> SqsSummary:
        from airflow_delayed.hooks.sqs import SqsDelayHook
        from airflow_delayed.sqs.stats import depth_findings, expiry_risk

        with closing(SqsDelayHook(connection_id)) as hook:
            life = hook.life(queue)
        return SqsSummary(
            connection_id=connection_id,
            queue=queue,
            at=utcnow(),
            age_seconds=0,
            destination=_queue(life.destination),
            delay_queue=_queue(life.delay_queue) if life.delay_queue else None,
            dead_letter_queue=_queue(life.dead_letter_queue) if life.dead_letter_queue else None,
            max_receive_count=life.max_receive_count,
            risk=expiry_risk(life.destination),
            findings=[FindingResponse.of(finding) for finding in depth_findings(life)],
        )

    figures, age = await pool.figures(connection_id, f"sqs {connection_id} {queue}", make)
    return figures.model_copy(update={"age_seconds": age})


def _queue(stage: QueueDepth) -> QueueResponse:
    return QueueResponse(
        queue=stage.queue,
        waiting=stage.waiting,
        delayed=stage.delayed,
        in_flight=stage.in_flight,
        retention_seconds=int(stage.retention.total_seconds()),
        visibility_timeout_seconds=int(stage.visibility_timeout.total_seconds()),
    )


@router.post("/sqs/{connection_id}/{queue}/redrive", dependencies=[is_sqs, security.edits])
async def redrive_sqs(
    connection_id: str, queue: str, redrive: RedriveBody, pool: HookPoolDep, user: security.User
) -> RedriveResponse:
    """Move the messages of a destination's dead-letter queue back."""

    def move() -> RedriveResponse:
        from airflow_delayed.hooks.sqs import SqsDelayHook

        with closing(SqsDelayHook(connection_id)) as hook:
            if redrive.dry_run:
                return RedriveResponse(dry_run=True, waiting=hook.life(queue).dead_lettered, moved=0, remaining={})
            with security.logged("redrive", user, {"connection_id": connection_id, "queue": queue}) as outcome:
                done = hook.redrive(queue)
                outcome.update(moved=done.moved, task=done.task is not None)
        pool.invalidate(f"sqs {connection_id} {queue}")
        remaining = Counter({"came from another queue, or just now": done.others})
        remaining.update(done.failures.values())
        return RedriveResponse(
            dry_run=False,
            waiting=None,
            moved=done.moved + done.undeleted,
            remaining={reason: count for reason, count in remaining.items() if count},
            task=done.task,
        )

    return await pool.call(connection_id, move, seconds=CHANGE_SECONDS)
