"""The verdict on all connections of the page: whether messages are delivered in time; if not, why, and what to do.

It is made of the same figures and findings as the summaries, which are cached. A connection that does not answer is a
cause itself, and holds up no other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from itertools import islice
from shlex import quote
from typing import Literal, TypeVar

from airflow.models.dag import DagModel
from airflow.models.serialized_dag import SerializedDagModel
from airflow.utils.session import create_session
from fastapi import APIRouter
from pydantic import Field
from sqlalchemy import select
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from airflow_delayed.delivery import Finding, State
from airflow_delayed.errors import some
from airflow_delayed.message import utcnow
from airflow_delayed.reports import SEVERITIES
from airflow_delayed.ui import api_brokers, api_stores, security
from airflow_delayed.ui.api_brokers import RabbitMQSummary, SqsSummary
from airflow_delayed.ui.errors import INTERNAL, ApiError, api_error
from airflow_delayed.ui.hook_pool import HookPool, HookPoolDep
from airflow_delayed.ui.models import ApiModel, ConnectionKind, ConnectionRights, FindingResponse, StoreHealth
from airflow_delayed.ui.security import PageConnection

log = logging.getLogger(__name__)
router = APIRouter(tags=["health"], route_class=security.GuardedRoute)

Status = Literal["ok", "degraded", "failing"]
Summary = StoreHealth | RabbitMQSummary | SqsSummary
S = TypeVar("S", bound=StoreHealth)

#: Of the findings of a store: the states of the messages that a finding is about.
_STATES = {
    "no-dispatcher": ["due", "retrying"],
    "connection-fails": ["due", "retrying"],
    "overdue": ["due", "retrying"],
    "throttled": ["due", "retrying"],
    "forecast": ["waiting"],
    "failed": ["failed"],
}
#: The codes of findings for a connection that gave an error, as airflow delayed doctor has them.
_UNANSWERED = {"unreachable": "unreachable", "too_slow": "silent", "busy": "silent", "not_ready": "missing"}
#: What to do about a connection that gave an error, by the code of the finding.
_REMEDIES = {
    "unreachable": "look whether its server runs and can be reached from the API server, with the host, port and login"
    " that Airflow has for it under Admin, Connections; until then its messages wait",
    "silent": "look whether its database or broker hangs (frozen, disk full, waiting for locks) or a firewall drops"
    " packets; until then its messages wait",
    "not-examined": "look into the API server's log, which has the error",
}
#: DAGs of a store's last dispatchers, at most, that are looked at.
MOST_DAGS = 10


class Cause(FindingResponse):
    """A finding of one connection, with what shows more of it."""

    connection_id: str
    kind: ConnectionKind
    queue: str | None = Field(description="Of SQS: the destination")
    since: datetime | None = Field(default=None, description="When this api-server first saw that it does not answer")
    states: list[str] = Field(default=[], description="Of a store: the states of the messages that it is about")
    paused_dag: str | None = Field(default=None, description="The DAG of the last dispatcher, if it is paused")


class Health(ApiModel):
    """The verdict: ``failing`` (an error), ``degraded`` (warnings, or something unknown) or ``ok``."""

    status: Status
    at: datetime
    next_due: datetime | None = Field(description="Of all stores")
    causes: list[Cause] = Field(description="The gravest first")
    hidden: bool = Field(description="Some connections are not looked at, because the user may not view them")


@router.get("/health")
async def health(pool: HookPoolDep, user: security.User) -> Health:
    """Return the verdict on the connections that the user may view."""
    seen = await viewed(user)
    answers = await ask(
        list(seen),
        lambda connection_id: api_stores.health(connection_id, pool, user),
        lambda connection_id: api_brokers.rabbitmq(connection_id, pool, user),
        pool,
    )
    return await verdict(seen, answers, pool, user)


async def viewed(user: security.User) -> dict[PageConnection, ConnectionRights]:
    """Return the connections that a user may view, in the order of the configuration, with the user's rights."""
    listed = security.configured()
    names = sorted({one.connection_id for one in listed})
    allowed = dict(zip(names, await run_in_threadpool(_rights, names, user), strict=True))
    return {one: rights for one in listed if (rights := allowed[one.connection_id]) is not None}


async def verdict(
    seen: Mapping[PageConnection, ConnectionRights],
    answers: Sequence[Summary | Exception],
    pool: HookPool,
    user: security.User,
) -> Health:
    """Return the verdict on connections by the answer of each."""
    causes: list[Cause] = []
    for (connection, rights), answer in zip(seen.items(), answers, strict=True):
        if isinstance(answer, Exception):
            since = pool.unanswered_since(connection, failed=True)
            error = known_error(connection, answer, details=rights.read)
            causes.append(_unanswered(connection, error, since))
            continue
        pool.unanswered_since(connection, failed=False)
        findings = list(findings_of(answer))
        paused = await run_in_threadpool(_paused_dag, answer, user) if _lacks_dispatcher(findings) else None
        of_store = [_cause(connection, finding, paused) for finding in findings]
        if rights.read and any(cause.code == "failed" for cause in of_store):
            reasons = await _reasons(connection.connection_id, pool)
            for cause in of_store:
                if cause.code == "failed" and reasons:
                    cause.what += f": {reasons}"
        causes += of_store
    causes.sort(key=lambda cause: SEVERITIES.index(cause.severity))
    dues = [one.next_due for one in answers if isinstance(one, StoreHealth) and one.next_due]
    return Health(
        status="ok" if not causes else "failing" if causes[0].severity == "error" else "degraded",
        at=utcnow(),
        next_due=min(dues, default=None),
        causes=causes,
        hidden=len(seen) < len(security.configured()),
    )


def _rights(names: Sequence[str], user: security.User) -> list[ConnectionRights | None]:
    return [security.rights(name, user) for name in names]


async def ask(
    connections: Sequence[PageConnection],
    store: Callable[[str], Awaitable[S]],
    rabbitmq: Callable[[str], Awaitable[RabbitMQSummary]],
    pool: HookPool,
) -> list[S | RabbitMQSummary | SqsSummary | Exception]:
    """Return the figures of each connection, or its error; all are asked at once.

    :param store: returns the figures of a store, or only what its verdict needs.
    :param rabbitmq: returns the figures of a RabbitMQ.
    """

    async def one(connection: PageConnection) -> S | RabbitMQSummary | SqsSummary | Exception:
        name, queue = connection.connection_id, connection.queue
        try:
            if connection.kind == "store":
                return await store(name)
            if queue is None:
                return await rabbitmq(name)
            return await api_brokers.sqs(name, queue, pool)
        except Exception as error:
            return error

    return await asyncio.gather(*map(one, connections))


def known_error(connection: PageConnection, error: Exception, *, details: bool) -> ApiError:
    """Return the error of a connection as the API answers it.

    :param details: the user may read the connection.
    """
    known = api_error(error)
    if known is None:
        security.log_unexpected(f"the verdict on {connection.connection_id}", error)
        known = INTERNAL
    return known.without_details(connection.connection_id) if known.sensitive and not details else known


async def _reasons(connection_id: str, pool: HookPool) -> str:
    """Return the most frequent reasons of a store's failed messages; they may name hosts and users."""
    try:
        (groups, _), _ = await pool.store_figures(connection_id, lambda hook: hook.failures(), name="failures")
    except Exception as error:
        # the verdict goes without
        log.debug("No reasons of failed messages of connection %r: %s", connection_id, error)
        return ""
    known = list(dict.fromkeys(group.reason for group in groups if group.reason))
    return some(known) if known else ""


def _unanswered(connection: PageConnection, error: ApiError, since: datetime | None) -> Cause:
    code = _UNANSWERED.get(error.code, "not-examined")
    return Cause(
        code=code,
        severity="error",
        where=f"connection {connection.connection_id!r}",
        what=error.message,
        remedy=_REMEDIES.get(code),
        **asdict(connection),
        since=since,
    )


def findings_of(summary: Summary) -> Iterator[FindingResponse]:
    """Yield what is wrong by a summary."""
    if isinstance(summary, SqsSummary):
        yield from map(FindingResponse.of, _of_sqs(summary))
        return
    yield from (finding for finding in summary.findings if finding.severity != "ok")
    if isinstance(summary, RabbitMQSummary):
        yield from map(FindingResponse.of, _of_rabbitmq(summary))


def _of_rabbitmq(summary: RabbitMQSummary) -> Iterator[Finding]:
    name = summary.connection_id
    if summary.missing:
        yield Finding(
            state=State.BLOCKED,
            resource=f"delay queues of {name!r}",
            found=f"{len(summary.missing)} are missing, such as {summary.missing[0]}",
            code="missing",
            remedy=f"run the TopologyInstallOperator, or: airflow delayed install --conn-id {quote(name)}",
        )
    if summary.unroutable:
        yield Finding(
            state=State.WARNING,
            resource=f"queue {summary.unroutable_queue}",
            found=f"{summary.unroutable:,} messages were due and had no destination to go to",
            code="unroutable",
            remedy="make their destinations, then move the messages back: on this page, or by"
            f" airflow delayed redrive --conn-id {quote(name)}",
        )
    if summary.stuck:
        yield Finding(
            state=State.WARNING,
            resource=f"delay queues of {name!r}",
            found=f"{summary.stuck:,} messages are past their time and have not gone on",
            code="stuck",
            remedy="their next queue does not accept them: it is full, or was deleted; airflow delayed doctor names it",
        )


def _of_sqs(summary: SqsSummary) -> Iterator[Finding]:
    dead = summary.dead_letter_queue
    if dead is not None and dead.waiting:
        yield Finding(
            state=State.WARNING,
            resource=f"queue {dead.queue}",
            found=f"{dead.waiting:,} dead letters: messages that their consumer received again and again, and never"
            " deleted",
            code="dead-letters",
            remedy="when the consumer is repaired, move them back: on this page, or by SqsDelayHook.redrive",
        )
    if summary.risk:
        yield Finding(
            state=State.WARNING,
            resource=f"queue {summary.queue}",
            found=summary.risk,
            code="could-expire",
            remedy="start more consumers, or raise the queue's retention",
        )


def _lacks_dispatcher(findings: Sequence[FindingResponse]) -> bool:
    return any(finding.code == "no-dispatcher" for finding in findings)


def _paused_dag(summary: Summary, user: security.User) -> str | None:
    """Return the DAG of the store's last dispatcher, if it is paused and the user may read it.

    Whoever may write the table of dispatchers can name any DAG there: a DAG counts only if a task of it dispatches.
    """
    assert isinstance(summary, StoreHealth)
    names = dict.fromkeys(one.dag_id for one in summary.dispatchers if one.dag_id is not None)
    with create_session() as session:
        for dag_id in islice(names, MOST_DAGS):
            if security.may_dag("read", dag_id, user) and _dispatches(dag_id, session):
                paused = session.scalar(select(DagModel.is_paused).where(DagModel.dag_id == dag_id))
                return dag_id if paused else None
    return None


def _dispatches(dag_id: str, session: Session) -> bool:
    """Return whether a task of a DAG is a StoreDispatchOperator, or of a class that inherits from it."""
    written = SerializedDagModel.get(dag_id, session=session)
    tasks = written.data["dag"]["tasks"] if written is not None and written.data else []
    return any({"store_conn_id", "deliver_conn_ids"} <= {*task["__var"].get("template_fields", ())} for task in tasks)


def _cause(connection: PageConnection, finding: FindingResponse, paused_dag: str | None) -> Cause:
    cause = Cause(**finding.model_dump(), **asdict(connection), states=_STATES.get(finding.code, []))
    if finding.code == "no-dispatcher" and paused_dag is not None:
        cause.paused_dag = paused_dag
        cause.what += f"; the DAG of the last dispatcher, {paused_dag}, is paused"
        cause.remedy = f"unpause the DAG {paused_dag}"
    if finding.code == "failed":
        name = connection.connection_id
        cause.remedy = (
            f"repair the cause, then retry them: on this page, or by airflow delayed retry --store-conn-id"
            f" {quote(name)}"
        )
    return cause
