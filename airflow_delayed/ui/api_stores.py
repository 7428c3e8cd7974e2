"""Looking into a store. Figures, lists and the names of headers need less than bodies, see ``security``."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, HTTPException, Query
from starlette.concurrency import run_in_threadpool

from airflow_delayed import config
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.store.stored import StoredMessage
from airflow_delayed.ui import security, shown
from airflow_delayed.ui.models import Body, MessageDetail, Messages, StoreSummary
from airflow_delayed.ui.parts import AskingDep, is_store
from airflow_delayed.ui.requests import Listing, MessageId
from airflow_delayed.ui.route import GuardedRoute

router = APIRouter(
    prefix="/stores/{connection_id}",
    tags=["stores"],
    dependencies=[is_store, security.sees],
    route_class=GuardedRoute,
)

#: Due for longer than this is overdue.
OVERDUE = timedelta(minutes=1)
#: Lines of a message's history that come from the audit.
CHANGES = 50


@router.get("/summary")
async def summary(connection_id: str, asking: AskingDep) -> StoreSummary:
    """Return how the store stands; the figures may be some seconds old."""

    def make(hook: DelayedStoreHook) -> StoreSummary:
        counts = hook.counts(overdue=OVERDUE, hours=24, minutes=60)
        return shown.summary(connection_id, counts, hook.last_dispatched(), hook.dispatchers())

    found, age = await asking.store_figures(connection_id, make)
    return found.model_copy(update={"age_seconds": age})


@router.get("/messages")
async def messages(
    connection_id: str, query: Annotated[Listing, Query()], asking: AskingDep, user: security.User
) -> Messages:
    """Return one page of messages, failed ones too; why they failed only with the right to read the connection."""
    reasons = await run_in_threadpool(security.may, "GET", connection_id, user)

    def look(hook: DelayedStoreHook) -> Messages:
        page = hook.page(**query.criteria(), ids=query.id, limit=query.limit, after=query.after)
        return Messages(
            at=page.at,
            messages=[shown.message(one, reasons=reasons) for one in page.messages],
            remembered=[shown.remembered(one) for one in page.remembered],
            next=page.next,
        )

    return await asking.store(connection_id, look)


@router.get("/message")
async def message(
    connection_id: str, id: Annotated[MessageId, Query()], asking: AskingDep, user: security.User
) -> MessageDetail:
    """Return all that is known of an id; header values and reasons only with the right to read the connection."""
    values = await run_in_threadpool(security.may, "GET", connection_id, user)

    def look(hook: DelayedStoreHook) -> MessageDetail:
        known = hook.get(id)
        if known is None:
            raise HTTPException(404, "the store knows no message of this id, or has forgotten it")
        content = hook.content(id, body_limit=0) if isinstance(known, StoredMessage) else None
        since = known.stored_at if isinstance(known, StoredMessage) else None
        changes = list(hook.audit(message_id=id, since=since, limit=CHANGES))
        return shown.detail(hook.now(), known, content, changes, values=values)

    return await asking.store(connection_id, look)


@router.get("/body", dependencies=[security.reads])
async def body(connection_id: str, id: Annotated[MessageId, Query()], asking: AskingDep) -> Body:
    """Return a body; needs the right to read the connection."""

    def look(hook: DelayedStoreHook) -> Body:
        content = hook.content(id, body_limit=config.page_body_limit())
        if content is None:
            raise HTTPException(404, "the store has no message of this id; a body is not kept once it is handed over")
        return shown.body(id, content)

    return await asking.store(connection_id, look)
