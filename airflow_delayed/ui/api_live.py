"""The routes of the page's first screen: verdict, figures and list in one answer; failures by cause; search."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from typing import Annotated, get_args

from fastapi import APIRouter, Query
from pydantic import Field, StringConstraints
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.store.api import FailureGroup, SearchMatch
from airflow_delayed.ui import api_brokers, api_stores, security, verdict
from airflow_delayed.ui.errors import ErrorInfo
from airflow_delayed.ui.hook_pool import HookPool, HookPoolDep, TooSlow
from airflow_delayed.ui.models import (
    HIDDEN,
    ApiModel,
    ConnectionKind,
    ConnectionRights,
    LeftName,
    ListQuery,
    MessagePage,
    StateName,
    StoreSummary,
)
from airflow_delayed.ui.security import PageConnection

router = APIRouter(tags=["health"], route_class=security.GuardedRoute)

Figures = StoreSummary | api_brokers.RabbitMQSummary | api_brokers.SqsSummary

#: Seconds after which an answer goes without a connection that has not answered.
PATIENCE = 2.0
#: Matching messages are counted up to this number.
MAX_MATCHING = 10_000
#: The states of what is in a store, with the names of their numbers.
_IN_STORE = {name: name.replace(" ", "_") for name in get_args(StateName)}


class LiveQuery(ListQuery):
    """The query of the list, and its store."""

    store: str | None = Field(default=None, description="The connection of the list; without it there is no list")


class Matching(ApiModel):
    """How many messages match the query."""

    count: int
    at_least: bool = Field(description="There are more than were counted")


class LiveConnection(ApiModel):
    """The figures of one connection. With an error they are the last ones, if there are any."""

    connection_id: str
    kind: ConnectionKind
    queue: str | None
    summary: Figures | None
    error: ErrorInfo | None
    age_seconds: float | None


class Live(ApiModel):
    """All that the first screen shows."""

    health: verdict.Health
    connections: list[LiveConnection]
    page: MessagePage | None
    matching: Matching | None = Field(description="Null: there is no list, it is by ids, or of messages that have left")
    error: ErrorInfo | None = Field(description="Why there is no list")


@router.get("/live")
async def live(query: Annotated[LiveQuery, Query()], pool: HookPoolDep, user: security.User) -> Live:
    """Return the verdict, the figures of all connections that the user may view, and a page of messages.

    After two seconds it answers without connections that have not answered.
    """
    seen = await verdict.viewed(user)
    listed = PageConnection(query.store, "store") if query.store is not None else None
    if listed is not None and listed not in seen:
        if listed in security.configured():
            raise HTTPException(403, "Forbidden")
        raise HTTPException(404, "store: not named by page_stores of Airflow's configuration, section [delayed]")
    figures = asyncio.gather(*(_figures(one, rights, pool, user) for one, rights in seen.items()))
    listing = asyncio.ensure_future(_listing(query, listed, pool, user)) if listed is not None else None
    answers = await figures
    health = await verdict.verdict(seen, [answer for answer, _ in answers], pool, user)
    page, matching, problem = (None, None, None) if listing is None else await listing
    if _is_of_figures(query):
        shown = (summary for one, (_, summary) in zip(seen, answers, strict=True) if one == listed)
        matching = next((_of_figures(query, one) for one in shown if isinstance(one, StoreSummary)), None)
    connections = [
        LiveConnection(
            **asdict(one),
            summary=summary,
            error=_info(one, answer, rights) if isinstance(answer, Exception) else None,
            age_seconds=None if summary is None else summary.age_seconds,
        )
        for (one, rights), (answer, summary) in zip(seen.items(), answers, strict=True)
    ]
    return Live(
        health=health,
        connections=connections,
        page=page,
        matching=matching,
        error=None if listed is None or problem is None else _info(listed, problem, seen[listed]),
    )


def _is_of_figures(query: LiveQuery) -> bool:
    """Return whether the figures of the store have the number of what matches, so that it is not counted again."""
    return query.id is None and query.criteria().keys() <= {"state"} and {*(query.state or ())} <= {*_IN_STORE}


def _of_figures(query: LiveQuery, summary: StoreSummary) -> Matching:
    return Matching(count=sum(getattr(summary, _IN_STORE[each]) for each in query.state or _IN_STORE), at_least=False)


def _info(connection: PageConnection, error: Exception, rights: ConnectionRights) -> ErrorInfo:
    if isinstance(error, HTTPException):
        return ErrorInfo(code="forbidden", message=str(error.detail))
    return ErrorInfo.model_validate(verdict.known_error(connection, error, details=rights.read))


async def _figures(
    connection: PageConnection, rights: ConnectionRights, pool: HookPool, user: security.User
) -> tuple[Figures | Exception, Figures | None]:
    """Return the answer of a connection, and the figures to show: after an error, the last ones."""
    asked = verdict.ask(
        [connection],
        lambda name: api_stores.summary(name, pool, user),
        pool,
        user,
    )
    answer: Figures | Exception
    try:
        (answer,) = await asyncio.wait_for(asked, PATIENCE)
    except asyncio.TimeoutError:
        answer = TooSlow(
            f"connection {connection.connection_id!r} did not answer within {PATIENCE:g} seconds; it is asked again"
        )
    if not isinstance(answer, Exception):
        return answer, answer
    names = (connection.kind, connection.connection_id, connection.queue)
    last = pool.last_figures(" ".join(name for name in names if name is not None))
    if last is None or (connection.kind == "rabbitmq" and not rights.read):
        return answer, None
    summary, age = last
    if isinstance(summary, StoreSummary):
        summary = await api_stores.for_user(summary, connection.connection_id, user)
    return answer, summary.model_copy(update={"age_seconds": age})


async def _listing(
    query: LiveQuery, connection: PageConnection, pool: HookPool, user: security.User
) -> tuple[MessagePage | None, Matching | None, Exception | None]:
    in_store = {*get_args(LeftName)}.isdisjoint(query.state or ())
    counted = query.id is None and in_store and not _is_of_figures(query)

    def count(hook: DelayedStoreHook) -> int:
        return hook.matching(MAX_MATCHING + 1, **query.criteria())

    async def all_() -> tuple[MessagePage, Matching | None]:
        page = await api_stores.messages(connection.connection_id, query, pool, user)
        if not counted:
            return page, None
        many = await pool.call_store(connection.connection_id, count)
        return page, Matching(count=min(many, MAX_MATCHING), at_least=many > MAX_MATCHING)

    try:
        page, matching = await asyncio.wait_for(all_(), PATIENCE)
    except asyncio.TimeoutError:
        return None, None, TooSlow(f"connection {connection.connection_id!r} did not return the list in time")
    except Exception as error:
        return None, None, error
    return page, matching, None


class FailureGroups(ApiModel):
    """Failed messages by cause, the largest group first."""

    groups: list[FailureGroup] = Field(description="Give a reason as reason= of the list to see its messages")
    at_least: bool = Field(description="There are more messages than were looked at")


class SearchMatches(ApiModel):
    """Up to five values of each field."""

    matches: list[SearchMatch]


@api_stores.router.get("/failures")
async def failures(connection_id: str, pool: HookPoolDep, user: security.User) -> FailureGroups:
    """Return failed messages by cause and destination; reasons only with the right to read the connection."""
    reasons = await run_in_threadpool(security.may, "read", connection_id, user)
    groups, at_least = await pool.call_store(connection_id, lambda hook: hook.failures())
    if not reasons:
        groups = [replace(one, reason=HIDDEN) if one.reason is not None else one for one in groups]
    return FailureGroups(groups=list(groups), at_least=at_least)


@api_stores.router.get("/search")
async def search(
    connection_id: str,
    q: Annotated[str, Query(), StringConstraints(min_length=1, max_length=250, pattern=r"^[^\x00]*$")],
    pool: HookPoolDep,
) -> SearchMatches:
    """Return up to five ids, tags, destinations and DAGs each that begin with a text, or ids whose key it is."""
    return SearchMatches(matches=list(await pool.call_store(connection_id, lambda hook: hook.search(q))))
