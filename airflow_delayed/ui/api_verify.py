"""The routes that verify a connection: what is wrong with it, and what install would do. Nothing is changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing

from fastapi import APIRouter
from pydantic import Field

from airflow_delayed.delivery import Delivery, State, TopologyReport
from airflow_delayed.ui import security
from airflow_delayed.ui.hook_pool import CHANGE_SECONDS, HookPool, HookPoolDep
from airflow_delayed.ui.models import ApiModel, FindingResponse
from airflow_delayed.ui.security import is_rabbitmq, is_sqs, is_store

router = APIRouter(tags=["verify"], dependencies=[security.verifies], route_class=security.GuardedRoute)

#: What an install leaves as it is, or does not know.
_NOT_PLANNED = (State.OK, State.WARNING, State.UNKNOWN)


class VerifyResponse(ApiModel):
    """What is wrong with a connection, and what an install would do about it."""

    findings: list[FindingResponse] = Field(description="As verify() and airflow delayed doctor have them")
    plan: list[str] = Field(description="One line for each part that an install would make, or that differs")


@router.get("/stores/{connection_id}/verify", dependencies=[is_store])
async def verify_store(connection_id: str, pool: HookPoolDep) -> VerifyResponse:
    """Verify a store's tables, and look for what keeps its messages from being dispatched."""
    from airflow_delayed.hooks.store import DelayedStoreHook

    return await _verify(pool, connection_id, lambda: DelayedStoreHook(connection_id), [])


@router.get("/rabbitmq/{connection_id}/verify", dependencies=[is_rabbitmq])
async def verify_rabbitmq(connection_id: str, pool: HookPoolDep) -> VerifyResponse:
    """Verify the delay queues of a RabbitMQ."""
    from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook

    return await _verify(pool, connection_id, lambda: RabbitMQDelayHook(connection_id), [])


@router.get("/sqs/{connection_id}/{queue}/verify", dependencies=[is_sqs])
async def verify_sqs(connection_id: str, queue: str, pool: HookPoolDep) -> VerifyResponse:
    """Verify the queues of one destination of SQS."""
    from airflow_delayed.hooks.sqs import SqsDelayHook

    return await _verify(pool, connection_id, lambda: SqsDelayHook(connection_id), [queue])


async def _verify(
    pool: HookPool, connection_id: str, make: Callable[[], Delivery], destinations: Sequence[str]
) -> VerifyResponse:
    def work() -> tuple[TopologyReport, TopologyReport]:
        with closing(make()) as hook:
            return hook.verify(destinations), hook.install(destinations, dry_run=True)

    report, planned = await pool.call(connection_id, work, seconds=CHANGE_SECONDS)
    return VerifyResponse(
        findings=[FindingResponse.of(finding) for finding in report if finding.severity != "ok"],
        plan=[str(finding) for finding in planned if finding.state not in _NOT_PLANNED],
    )
