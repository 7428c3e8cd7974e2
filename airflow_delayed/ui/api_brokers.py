"""What waits in RabbitMQ and in SQS, and moving back what could not be delivered."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool

from airflow_delayed.message import utcnow
from airflow_delayed.ui import security
from airflow_delayed.ui.asking import CHANGING
from airflow_delayed.ui.event_log import logged
from airflow_delayed.ui.models import Destination, LevelShown, QueueShown, RabbitMQSummary, Redriven, SqsSummary
from airflow_delayed.ui.parts import AskingDep, is_rabbitmq, is_sqs
from airflow_delayed.ui.requests import Redrive, RedriveUnroutable
from airflow_delayed.ui.route import GuardedRoute

if TYPE_CHECKING:
    from airflow_delayed.sqs.life import Stage

router = APIRouter(tags=["brokers"], route_class=GuardedRoute)

#: Messages that one call looks at.
MOST = 1000


@router.get("/rabbitmq/{connection_id}/summary", dependencies=[is_rabbitmq, security.sees])
async def rabbitmq(connection_id: str, asking: AskingDep, user: security.User) -> RabbitMQSummary:
    """Return what waits and when it leaves, what is unroutable and what is stuck."""

    def make() -> RabbitMQSummary:
        from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook

        hook = RabbitMQDelayHook(connection_id)
        found = hook.waiting()
        return RabbitMQSummary(
            connection_id=connection_id,
            at=found.at,
            age_seconds=0,
            topology=hook.topology.name,
            messages=found.messages,
            stuck=found.stuck,
            why_unknown=found.why_unknown,
            levels=[
                LevelShown(
                    level=one.level,
                    queue=one.queue,
                    messages=one.messages,
                    stuck=one.stuck,
                    earliest=one.earliest,
                    latest=one.latest,
                )
                for one in found.levels
                if one.messages or one.stuck
            ],
            missing=list(found.missing),
            unroutable_queue=found.unroutable_queue,
            unroutable=found.unroutable,
        )

    found, age = await asking.figures(connection_id, f"rabbitmq {connection_id}", make)
    told: dict[str, Any] = {"age_seconds": age}
    if found.why_unknown and not await run_in_threadpool(security.may, "GET", connection_id, user):
        # it names the broker's address
        told["why_unknown"] = "the management API does not tell; those who may read the connection see why"
    return found.model_copy(update=told)


@router.post("/rabbitmq/{connection_id}/redrive", dependencies=[is_rabbitmq, security.edits])
async def redrive_rabbitmq(
    connection_id: str, redrive: RedriveUnroutable, asking: AskingDep, user: security.User
) -> Redriven:
    """Send up to 1000 unroutable messages to those of the named destinations that exist."""

    def move() -> Redriven:
        from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook

        hook = RabbitMQDelayHook(connection_id)
        if redrive.dry_run:
            would = hook.redrive(destinations=redrive.destinations, limit=MOST, dry_run=True)
            destinations = [
                Destination(name=name, messages=many, problem=would.problems.get(name))
                for name, many in would.destinations.items()
            ]
            waiting = sum(would.waiting.values())
            return Redriven(dry_run=True, waiting=waiting, destinations=destinations, moved=0, left=would.left)
        about = {"connection_id": connection_id, "destinations": redrive.destinations}
        with logged("redrive", user, about) as outcome:
            done = hook.redrive(destinations=redrive.destinations, limit=MOST)
            outcome.update(moved=done.moved, left=done.left)
        asking.changed(f"rabbitmq {connection_id}")
        return Redriven(dry_run=False, waiting=None, moved=done.moved, left=done.left)

    return await asking.connection(connection_id, move, seconds=CHANGING)


@router.get("/sqs/{connection_id}/{queue}/summary", dependencies=[is_sqs, security.sees])
async def sqs(connection_id: str, queue: str, asking: AskingDep) -> SqsSummary:
    """Return what the queues of one destination hold."""

    def make() -> SqsSummary:
        from airflow_delayed.hooks.sqs import SqsDelayHook
        from airflow_delayed.sqs.life import expiry_risk

        with closing(SqsDelayHook(connection_id)) as hook:
            found = hook.life(queue)
        return SqsSummary(
            connection_id=connection_id,
            queue=queue,
            at=utcnow(),
            age_seconds=0,
            destination=_shown(found.destination),
            delay_queue=_shown(found.delay_queue) if found.delay_queue else None,
            dead_letter_queue=_shown(found.dead_letter_queue) if found.dead_letter_queue else None,
            max_receive_count=found.max_receive_count,
            risk=expiry_risk(found.destination),
        )

    found, age = await asking.figures(connection_id, f"sqs {connection_id} {queue}", make)
    return found.model_copy(update={"age_seconds": age})


def _shown(stage: Stage) -> QueueShown:
    return QueueShown(
        queue=stage.queue,
        waiting=stage.waiting,
        delayed=stage.delayed,
        in_flight=stage.in_flight,
        retention_seconds=int(stage.retention.total_seconds()),
        visibility_timeout_seconds=int(stage.visibility_timeout.total_seconds()),
    )


@router.post("/sqs/{connection_id}/{queue}/redrive", dependencies=[is_sqs, security.edits])
async def redrive_sqs(
    connection_id: str, queue: str, redrive: Redrive, asking: AskingDep, user: security.User
) -> Redriven:
    """Move the messages of a destination's dead-letter queue back."""

    def move() -> Redriven:
        from airflow_delayed.hooks.sqs import SqsDelayHook

        with closing(SqsDelayHook(connection_id)) as hook:
            if redrive.dry_run:
                return Redriven(dry_run=True, waiting=hook.life(queue).dead_lettered, moved=0, left={})
            with logged("redrive", user, {"connection_id": connection_id, "queue": queue}) as told:
                done = hook.redrive(queue)
                told.update(moved=done.moved, task=done.task is not None)
        asking.changed(f"sqs {connection_id} {queue}")
        left = Counter({"came from another queue, or just now": done.others})
        left.update(done.failures.values())
        return Redriven(
            dry_run=False,
            waiting=None,
            moved=done.moved + done.undeleted,
            left={why: many for why, many in left.items() if many},
            task=done.task,
        )

    return await asking.connection(connection_id, move, seconds=CHANGING)
