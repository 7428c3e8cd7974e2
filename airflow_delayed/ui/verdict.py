"""The verdict on all connections of the page: whether messages are delivered in time; if not, why, and what to do.

It is made of the same figures and findings as the summaries, which are cached. A connection that does not answer is a
cause itself, and holds up no other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from functools import partial
from typing import Literal, TypeVar, get_args

from fastapi import APIRouter
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from airflow_delayed import diagnosis
from airflow_delayed.delivery import Finding, State
from airflow_delayed.message import utcnow
from airflow_delayed.store.api import LATE_AFTER
from airflow_delayed.ui import api_brokers, api_stores, security
from airflow_delayed.ui.api_brokers import RabbitMQSummary, SqsSummary
from airflow_delayed.ui.errors import INTERNAL, ApiError, api_error
from airflow_delayed.ui.hook_pool import HookPool, HookPoolDep
from airflow_delayed.ui.models import (
    HIDDEN,
    ApiModel,
    ConnectionKind,
    ConnectionRights,
    FindingResponse,
    LatenessResponse,
    StoreHealth,
)
from airflow_delayed.ui.security import PageConnection

log = logging.getLogger(__name__)
router = APIRouter(tags=["health"], route_class=security.GuardedRoute)

Status = Literal["ok", "degraded", "failing"]
#: The gravest first.
DestinationState = Literal["failing", "late", "paused", "delivering"]
Summary = StoreHealth | RabbitMQSummary | SqsSummary
S = TypeVar("S", bound=StoreHealth)

#: Of the findings of a store: the states of the messages that a finding is about.
_STATES = {
    "no-dispatcher": ["due", "retrying"],
    "connection-fails": ["due", "retrying"],
    "destination-refuses": ["due", "retrying"],
    "destination-missing": ["failed"],
    "overdue": ["due", "retrying"],
    "failed": ["failed"],
}
#: The codes of errors that keep all messages of a connection, overdue or not.
_OF_CONNECTION = ("connection-fails", "no-dispatcher")
#: The codes of errors of a connection that does not answer in time.
_SILENT = ("too_slow", "busy")
#: Seconds for which messages must be past their time in a delay queue to be stuck there: a broker that has just started
#: still moves them.
STUCK_AFTER = timedelta(seconds=10)
#: A connection that answers late is an error after so long, in which it is asked again; until then a warning.
SILENT_AFTER = timedelta(seconds=4)


class Cause(FindingResponse):
    """A finding of one connection, with what shows more of it."""

    connection_id: str
    kind: ConnectionKind
    queue: str | None = Field(description="Of SQS: the destination")
    states: list[str] = Field(default=[], description="Of a store: the states of the messages that it is about")
    paused_dag: str | None = Field(default=None, description="The DAG of the last dispatcher, if it is paused")
    run_dag: str | None = Field(default=None, description="The same, if it is not paused: a run of it dispatches")
    pause: dict[str, str] | None = Field(default=None, description="What is paused, as pause and unpause take it")


class DestinationVerdict(LatenessResponse):
    """The verdict on one destination of a store, and how late its messages are."""

    store_conn_id: str
    status: DestinationState = Field(default="delivering", description="``failing``: nothing reaches it for 10 s")
    code: str | None = Field(default=None, description="Of the cause, if it has one")
    since: datetime | None = Field(default=None, description="Since when the cause is there")


class Health(ApiModel):
    """The verdict: ``failing`` (an error), ``degraded`` (warnings, or something unknown) or ``ok``."""

    status: Status
    at: datetime = Field(description="When it was so: the time of the oldest figures in it")
    next_due: datetime | None = Field(description="Of all stores")
    lateness: list[DestinationVerdict] = Field(description="By destination, the gravest and latest first")
    causes: list[Cause] = Field(description="The gravest first")
    partly: bool = Field(description="``failing``, and messages reach some destinations all the same")
    hidden: bool = Field(description="Some connections are not looked at, because the user may not view them")


@router.get("/health")
async def health(pool: HookPoolDep, user: security.User) -> Health:
    """Return the verdict on the connections that the user may view."""
    seen = await viewed(user)
    answers = await ask(
        list(seen),
        lambda connection_id: api_stores.health(connection_id, pool, user),
        pool,
        user,
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
    causes = await merged_causes(
        seen,
        answers,
        pool,
        partial(security.may_dag, "read", user=user),
        details={one for one in seen if seen[one].read},
    )
    stores = [(one, answer) for one, answer in zip(seen, answers, strict=True) if isinstance(answer, StoreHealth)]
    oldest = max((one.age_seconds for one in answers if not isinstance(one, Exception)), default=0.0)
    status: Status = "ok" if not causes else "failing" if causes[0].severity == "error" else "degraded"
    lateness = _by_destination({one.connection_id: answer.lateness for one, answer in stores}, causes)
    return Health(
        status=status,
        at=utcnow() - timedelta(seconds=oldest),
        next_due=min((answer.next_due for _, answer in stores if answer.next_due), default=None),
        lateness=lateness,
        causes=causes,
        partly=status == "failing" and any(one.status == "delivering" for one in lateness),
        hidden=len(seen) < len(security.configured()),
    )


def _by_destination(
    lateness: Mapping[str, Sequence[LatenessResponse]], causes: Sequence[Cause]
) -> list[DestinationVerdict]:
    """Return the verdict on each destination with traffic, overdue messages or a cause of its own, gravest first."""
    found = [
        DestinationVerdict(store_conn_id=store, **one.model_dump()) for store, late in lateness.items() for one in late
    ]
    for cause in causes:
        if cause.destination is not None and not any(_concerns(cause, one) for one in found):
            found.append(
                DestinationVerdict(
                    store_conn_id=cause.connection_id,
                    conn_id=cause.deliver_conn_id or "",
                    destination=cause.destination,
                    overdue=0,
                    late_seconds=0,
                    dispatched=0,
                    p99_seconds=None,
                )
            )
    for each in found:
        cause_of_it = next((one for one in causes if _concerns(one, each)), None)
        if cause_of_it is None:
            is_late = each.overdue or (each.p99_seconds or 0) > LATE_AFTER.total_seconds()
            each.status = "late" if is_late else "delivering"
            continue
        each.code, each.since = cause_of_it.code, cause_of_it.since
        if cause_of_it.pause is not None:
            each.status = "paused"
        else:
            each.status = "failing" if cause_of_it.severity == "error" else "late"
    order = get_args(DestinationState)
    return sorted(found, key=lambda one: (order.index(one.status), -one.late_seconds))


def _concerns(cause: Cause, one: DestinationVerdict) -> bool:
    if cause.code in diagnosis.NO_ANSWER:
        return cause.connection_id == one.conn_id
    if cause.connection_id != one.store_conn_id:
        return False
    if cause.pause is not None:
        wanted = {"destination": one.destination, "deliver_conn_id": one.conn_id}
        return cause.pause.items() <= wanted.items()
    if cause.code == "dispatcher-fails":
        return one.overdue > 0
    if cause.deliver_conn_id != one.conn_id:
        return False
    keeps_all = cause.severity == "error" and cause.code in _OF_CONNECTION
    return cause.destination == one.destination or (cause.destination is None and (keeps_all or one.overdue > 0))


async def merged_causes(
    connections: Iterable[PageConnection],
    answers: Sequence[Summary | Exception],
    pool: HookPool,
    may_read: Callable[[str], bool],
    *,
    details: Collection[PageConnection],
) -> list[Cause]:
    """Return what is wrong by the answer of each connection, the gravest first, without what follows from another."""
    found: list[Cause] = []
    for connection, answer in zip(connections, answers, strict=True):
        since = pool.since(connection, isinstance(answer, Exception))
        if isinstance(answer, Exception):
            found.append(_unanswered(connection, known_error(connection, answer, details=connection in details), since))
            continue
        findings = list(findings_of(answer))
        dags: Mapping[str | None, tuple[str, bool]] = {}
        if isinstance(answer, StoreHealth):
            dags = await run_in_threadpool(diagnosis.last_dags, answer.dispatchers, may_read, hidden=HIDDEN)
            findings = diagnosis.with_paused(
                connection.connection_id,
                findings,
                dags,
                answer.lateness,
                answer.next_dues,
                answer.at,
                FindingResponse.of,
            )
        elif isinstance(answer, RabbitMQSummary):
            stuck_since = pool.since((connection, "stuck"), bool(answer.stuck))
            if stuck_since is not None and utcnow() - stuck_since < STUCK_AFTER:
                findings = [one for one in findings if one.code != "stuck"]
        causes = [_cause(connection, finding, dags) for finding in findings]
        if isinstance(answer, StoreHealth):
            paused_causes = (cause for cause in causes if cause.code == "paused")
            for cause, pause in zip(paused_causes, answer.pauses, strict=True):
                cause.pause = pause
                cause.destination = pause.get("destination")
                cause.deliver_conn_id = pause.get("deliver_conn_id")
        if connection in details and any(cause.code == "failed" for cause in causes):
            reason = await _reason(connection.connection_id, pool)
            for cause in causes:
                if cause.code == "failed":
                    cause.what += reason
        found += causes
    return [cause for _, cause in diagnosis.merged([(one.connection_id, one) for one in found], _joined)]


def _joined(cause: Cause, follows: Cause) -> Cause:
    since = min(filter(None, (cause.since, follows.since)), default=None)
    update = {"what": f"{cause.what} ({follows.why or follows.what})", "since": since}
    return cause.model_copy(update={**update, "deliver_conn_id": follows.deliver_conn_id or cause.deliver_conn_id})


def _rights(names: Sequence[str], user: security.User) -> list[ConnectionRights | None]:
    return [security.rights(name, user) for name in names]


async def ask(
    connections: Sequence[PageConnection],
    store: Callable[[str], Awaitable[S]],
    pool: HookPool,
    user: security.User,
) -> list[S | RabbitMQSummary | SqsSummary | Exception]:
    """Return the figures of each connection, or its error; all are asked at once."""

    async def one(connection: PageConnection) -> S | RabbitMQSummary | SqsSummary | Exception:
        name, queue = connection.connection_id, connection.queue
        try:
            if connection.kind == "store":
                return await store(name)
            if queue is None:
                return await api_brokers.rabbitmq(name, pool, user)
            return await api_brokers.sqs(name, queue, pool)
        except Exception as error:
            return error

    return await asyncio.gather(*map(one, connections))


def known_error(connection: PageConnection, error: Exception, *, details: bool) -> ApiError:
    """Return the error of a connection as the API answers it."""
    known = api_error(error)
    if known is None:
        security.log_unexpected(f"the verdict on {connection.connection_id}", error)
        known = INTERNAL
    return known.without_details(connection.connection_id) if known.sensitive and not details else known


async def _reason(connection_id: str, pool: HookPool) -> str:
    try:
        (groups, _), _ = await pool.store_figures(connection_id, lambda hook: hook.failures(), name="failures")
    except Exception as error:
        # the verdict goes without
        log.debug("No reasons of failed messages of connection %r: %s", connection_id, error)
        return ""
    return diagnosis.frequent_reason((group.reason, group.count) for group in groups)


def _unanswered(connection: PageConnection, error: ApiError, since: datetime | None) -> Cause:
    silent = error.code in _SILENT
    away = silent or error.code == "unreachable"
    finding = diagnosis.no_answer(connection.connection_id, error.message, away=away, silent=silent)
    # one late answer may be this server's own fault
    surely = finding.code != "silent" or (since is not None and utcnow() - since >= SILENT_AFTER)
    return Cause(
        code="missing" if error.code == "not_ready" else str(finding.code),
        severity=finding.severity if surely else "warning",
        where=finding.where,
        # each look ends in another way
        what=f"{finding.where} does not answer" if finding.code == "silent" else finding.what,
        remedy=finding.remedy or "look into the API server's log, which has the error",
        **asdict(connection),
        since=since,
    )


def findings_of(summary: Summary) -> Iterator[FindingResponse]:
    """Yield what is wrong by a summary."""
    counted = [FindingResponse.of(one) for one in _of_rabbitmq(summary)] if isinstance(summary, RabbitMQSummary) else []
    known = {one.code for one in counted}
    yield from (one for one in summary.findings if one.severity != "ok" and one.code not in known)
    yield from counted


def _of_rabbitmq(summary: RabbitMQSummary) -> list[Finding]:
    missing = [Finding(state=State.MISSING, resource=f"queue {name}", code="missing") for name in summary.missing]
    found = diagnosis.one_of_each(missing)
    if summary.unroutable:
        found.append(diagnosis.unroutable(summary.unroutable_queue, summary.unroutable))
    if summary.stuck:
        found.append(diagnosis.stuck(f"delay queues of {summary.connection_id!r}", summary.stuck))
    return diagnosis.with_remedies(summary.connection_id, found)


def _cause(connection: PageConnection, finding: FindingResponse, dags: Mapping[str | None, tuple[str, bool]]) -> Cause:
    cause = Cause(**finding.model_dump(), **asdict(connection), states=_STATES.get(finding.code, []))
    if finding.code == "no-dispatcher":
        name = finding.deliver_conn_id
        dag_id, is_paused = dags.get(None if name == connection.connection_id else name, (None, False))
        cause.paused_dag, cause.run_dag = (dag_id, None) if is_paused else (None, dag_id)
    return cause
