"""The routes of a store: reading it, and changing its messages.

Figures, lists and the names of headers need less than bodies, and changes need more: see ``security``.

A change is a POST with ``Content-Type: application/json`` from the page itself, or from a program. By a filter, one
call works on 10,000 messages, and answers with ``next`` if there are more: the page drives all of them, call by call.
A change that is no dry run leaves a row in the store's audit, to which each call adds, and each call an entry in
Airflow's event log, both with the user's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from functools import cache, partial
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, HTTPException, Query
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from airflow_delayed import config
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.message import due_after
from airflow_delayed.store.api import MAX_COUNTED, Outcome, Outcomes, hash_of, of_ids
from airflow_delayed.store.records import Remembered, StoredMessage
from airflow_delayed.ui import security
from airflow_delayed.ui.hook_pool import CHANGE_SECONDS, HookPool, HookPoolDep
from airflow_delayed.ui.models import (
    HIDDEN,
    ApiModel,
    AuditEntryResponse,
    AuditPage,
    ChangeBody,
    ChangeResponse,
    EraseBody,
    FilterBody,
    ListQuery,
    MessageBody,
    MessageDetail,
    MessageId,
    MessageOutcome,
    MessagePage,
    MessageResponse,
    OutOfReachResponse,
    RescheduleBody,
    RestoreBody,
    StoreHealth,
    StoreSummary,
    TombstoneResponse,
)
from airflow_delayed.ui.security import is_store

router = APIRouter(
    prefix="/stores/{connection_id}",
    tags=["stores"],
    dependencies=[is_store, security.views],
    route_class=security.GuardedRoute,
)
change_router = APIRouter(
    prefix="/stores/{connection_id}",
    tags=["changes"],
    dependencies=[is_store, security.views],
    route_class=security.GuardedRoute,
)

#: Entries of a message's history that come from the audit.
MAX_AUDIT_ENTRIES = 50
#: Messages that one change by filter looks at.
MAX_CHANGED = 10_000
#: Ids of each outcome that the answer to a change by filter names.
MAX_NAMED = 100

Work = Callable[..., Outcomes]


H = TypeVar("H", bound=StoreHealth)


@router.get("/summary")
async def summary(connection_id: str, pool: HookPoolDep, user: security.User) -> StoreSummary:
    """Return the figures of the store; what dispatchers wrote, and hosts, only with the right to read it."""
    return await for_user(await figures(connection_id, pool), connection_id, user)


async def for_user(health: H, connection_id: str, user: security.User) -> H:
    """Return what a user may see of a store's figures."""

    def visible() -> H:
        if security.may("read", connection_id, user):
            return health
        return health.without_hosts(cache(lambda dag_id: security.may_dag("read", dag_id, user)))

    return await run_in_threadpool(visible)


async def figures(connection_id: str, pool: HookPool) -> StoreSummary:
    """Return the figures of the store, with the names of hosts; they may be some seconds old."""

    def make(hook: DelayedStoreHook) -> StoreSummary:
        return StoreSummary.of(connection_id, *hook.figures(hours=24, minutes=60), hook.last_dispatched())

    made, age = await pool.store_figures(connection_id, make)
    return made.model_copy(update={"age_seconds": age})


async def health(connection_id: str, pool: HookPool, user: security.User) -> StoreHealth:
    """Return what the verdict on the store is made of, as the user may see it; it may be some seconds old."""

    def make(hook: DelayedStoreHook) -> StoreHealth:
        return StoreHealth.of_condition(connection_id, hook.condition(), hook.next_due())

    made, age = await pool.store_figures(connection_id, make, name="health")
    return await for_user(made.model_copy(update={"age_seconds": age}), connection_id, user)


@router.get("/messages")
async def messages(
    connection_id: str, query: Annotated[ListQuery, Query()], pool: HookPoolDep, user: security.User
) -> MessagePage:
    """Return one page of messages, failed ones too; why they failed only with the right to read the connection."""
    reasons = await run_in_threadpool(security.may, "read", connection_id, user)
    _check_reason(query, reasons=reasons)

    def read(hook: DelayedStoreHook) -> MessagePage:
        chosen: dict[str, Any] = {} if query.id is None else {"ids": query.id}
        page = hook.page(**query.criteria(), **chosen, limit=query.limit, after=query.after)
        may_change, ahead = security.may_change(connection_id, user), _lookaheads(hook, pool)
        return MessagePage(
            at=page.at,
            messages=[_row(stored, page.at, ahead, reasons=reasons, may_change=may_change) for stored in page.messages],
            remembered=[_tombstone(remembered, may_change) for remembered in page.remembered],
            next=page.next,
        )

    return await pool.call_store(connection_id, read)


def _lookaheads(hook: DelayedStoreHook, pool: HookPool) -> Mapping[str, timedelta]:
    return pool.cached(f"lookahead {hook.conn_id}", hook.lookaheads)


def _check_reason(query: FilterBody, *, reasons: bool) -> None:
    """Refuse a filter by the reason of a failure."""
    if query.reason is not None and not reasons:
        raise HTTPException(403, "reason: only users who may read the connection may filter by the reason of a failure")


def _row(
    stored: StoredMessage,
    at: datetime,
    ahead: Mapping[str, timedelta],
    *,
    reasons: bool,
    may_change: Callable[[str | None], bool],
) -> MessageResponse:
    message = MessageResponse.of(stored, reasons=reasons)
    message.cancellable_until = _cancellable_until(stored, at, ahead)
    message.may_change = may_change(stored.origin.dag_id if stored.origin else None)
    return message


def _tombstone(remembered: Remembered, may_change: Callable[[str | None], bool]) -> TombstoneResponse:
    response = TombstoneResponse.of(remembered)
    response.may_change = may_change(remembered.origin.dag_id if remembered.origin else None)
    return response


def _cancellable_until(stored: StoredMessage, at: datetime, ahead: Mapping[str, timedelta]) -> datetime | None:
    """Return until when no dispatcher takes a message that waits; None: unknown, or it may be taken now."""
    when_due = stored.until_due or stored.deliver_conn_id is None
    lookahead = timedelta(0) if when_due else ahead.get(stored.deliver_conn_id or "")
    if stored.state not in ("waiting", "retrying") or lookahead is None:
        return None
    left = max(stored.due_at - at - lookahead, timedelta(0))
    taken = max(at + left, stored.next_try or at)
    return taken if taken > at else None


class StateCounts(ApiModel):
    """How many messages match, by state; of each table up to a thousand are counted."""

    counts: dict[str, int] = Field(
        description="With dispatched and cancelled ones by tag or run; otherwise these two are missing"
    )
    at_least: bool = Field(description="There are more than were counted")


@router.get("/states")
async def states(
    connection_id: str, query: Annotated[FilterBody, Query()], pool: HookPoolDep, user: security.User
) -> StateCounts:
    """Count the messages that match, whatever their state, by state."""
    _check_reason(query, reasons=await run_in_threadpool(security.may, "read", connection_id, user))
    criteria = {name: value for name, value in query.criteria().items() if name != "state"}
    counts, at_least = await pool.call_store(connection_id, lambda hook: hook.by_state(**criteria))
    return StateCounts(counts=dict(counts), at_least=at_least)


@router.get("/message")
async def message(
    connection_id: str, id: Annotated[MessageId, Query()], pool: HookPoolDep, user: security.User
) -> MessageDetail:
    """Return the details of an id; header values and reasons only with the right to read the connection."""
    values = await run_in_threadpool(security.may, "read", connection_id, user)

    def read(hook: DelayedStoreHook) -> MessageDetail:
        known = hook.get(id)
        if known is None:
            raise HTTPException(404, "the store has no message of this id, or has forgotten it")
        content = hook.content(id, body_limit=0)
        since = known.stored_at if isinstance(known, StoredMessage) else None
        changes = list(hook.audit(message_id=id, since=since, limit=MAX_AUDIT_ENTRIES))
        detail = MessageDetail.of(hook.now(), known, content, changes, values=values)
        may_change = security.may_change(connection_id, user)
        if isinstance(known, Remembered):
            detail.remembered = _tombstone(known, may_change)
        else:
            detail.message = _row(known, detail.at, _lookaheads(hook, pool), reasons=values, may_change=may_change)
        return detail

    return await pool.call_store(connection_id, read)


@router.get("/audit")
async def audit(
    connection_id: str,
    pool: HookPoolDep,
    user: security.User,
    after: Annotated[str | None, Query(pattern=r"^\d{1,18}$")] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> AuditPage:
    """Return who changed messages of the store, and what became of them."""

    reasons = await run_in_threadpool(security.may, "read", connection_id, user)

    def read(hook: DelayedStoreHook) -> AuditPage:
        records = list(hook.audit(limit=limit, after=after))
        return AuditPage(
            entries=[AuditEntryResponse.of(record, reasons=reasons) for record in records],
            next=records[-1].token if len(records) == limit else None,
        )

    return await pool.call_store(connection_id, read)


@router.get("/body", dependencies=[security.reads])
async def body(connection_id: str, id: Annotated[MessageId, Query()], pool: HookPoolDep) -> MessageBody:
    """Return a body; needs the right to read the connection."""

    def read(hook: DelayedStoreHook) -> MessageBody:
        content = hook.content(id, body_limit=config.page_body_limit())
        if content is None:
            raise HTTPException(
                404, "the store has no message of this id; a body is not kept once its message is dispatched"
            )
        return MessageBody.of(id, content)

    return await pool.call_store(connection_id, read)


@change_router.post("/cancel")
async def cancel(connection_id: str, change: ChangeBody, pool: HookPoolDep, user: security.User) -> ChangeResponse:
    """Remove messages, failed ones too, and remember their ids as cancelled."""
    return await _change(pool, user, connection_id, "cancel", change, lambda hook: hook.cancel)


@change_router.post("/restore")
async def restore(connection_id: str, change: RestoreBody, pool: HookPoolDep, user: security.User) -> ChangeResponse:
    """Take cancels back, for as long as the messages are kept."""

    def work(hook: DelayedStoreHook) -> Work:
        return partial(hook.restore, overdue_ok=change.overdue_ok)

    return await _change(pool, user, connection_id, "restore", change, work)


@change_router.post("/reschedule")
async def reschedule(
    connection_id: str, change: RescheduleBody, pool: HookPoolDep, user: security.User
) -> ChangeResponse:
    """Give messages that wait another due time."""
    due_at = change.due_at

    def work(hook: DelayedStoreHook) -> Work:
        nonlocal due_at
        if due_at is None:
            due_at = due_after(hook.now(), _span_of(change.delay_seconds or 0))
        return partial(hook.reschedule, due_at=due_at)

    answer = await _change(pool, user, connection_id, "reschedule", change, work)
    return answer.model_copy(update={"due_at": due_at})


@change_router.post("/retry")
async def retry(connection_id: str, change: ChangeBody, pool: HookPoolDep, user: security.User) -> ChangeResponse:
    """Let failed messages wait again."""
    return await _change(pool, user, connection_id, "retry", change, lambda hook: hook.retry)


@change_router.post("/erase", dependencies=[security.edits])
async def erase(connection_id: str, change: EraseBody, pool: HookPoolDep, user: security.User) -> ChangeResponse:
    """Remove messages, and cancelled ones that are kept, and all that is known of them but the id."""
    return await _change(pool, user, connection_id, "erase", change, lambda hook: hook.erase)


def _span_of(seconds: float) -> timedelta:
    try:
        return timedelta(seconds=seconds)
    except OverflowError:
        raise HTTPException(400, "delay_seconds ends after the year 9999") from None


async def _change(
    pool: HookPool,
    user: security.User,
    connection_id: str,
    action: str,
    change: ChangeBody,
    work: Callable[[DelayedStoreHook], Work],
) -> ChangeResponse:
    """Change the messages, or with ``dry_run`` only predict the outcomes."""
    await _check_sender(pool, user, connection_id, action, change)
    arguments: dict[str, Any] = {"dry_run": change.dry_run, "actor": f"user {security.name_of(user)}"}
    arguments["because"] = change.because
    if change.ids is not None:
        arguments["ids"] = change.ids
    if change.filter is not None:
        arguments |= {
            **change.filter.criteria(),
            "limit": min(MAX_CHANGED, change.most or MAX_CHANGED),
            "after": change.after,
            "audit_seq": None if change.audit is None else int(change.audit),
        }

    def run(hook: DelayedStoreHook) -> Outcomes:
        if change.dry_run:
            return work(hook)(**arguments)
        details = {"connection_id": connection_id, **_logged_selection(action, change)}
        with security.logged(action, user, details) as outcome:
            outcomes = work(hook)(**arguments)
            outcome["outcomes"] = {name.value: count for name, count in outcomes.counts.items()}
        return outcomes

    outcomes = await pool.call_store(connection_id, run, seconds=CHANGE_SECONDS)
    if not change.dry_run:
        pool.invalidate_store(connection_id)
    return _answer(change, outcomes)


async def _check_sender(
    pool: HookPool, user: security.User, connection_id: str, action: str, change: ChangeBody
) -> None:
    """Refuse a change by a user who may edit neither the connection nor each DAG that sent the messages."""
    may_change = await run_in_threadpool(security.may_change, connection_id, user)
    if await run_in_threadpool(may_change, None):
        return
    if change.filter is not None:
        _check_reason(change.filter, reasons=await run_in_threadpool(security.may, "read", connection_id, user))
        if change.filter.dag_id is not None and await run_in_threadpool(may_change, change.filter.dag_id):
            return
        raise refused_without_dag()
    ids = change.ids or []

    def not_theirs(hook: DelayedStoreHook) -> int:
        page = hook.page(ids=ids, limit=len(ids))
        origins = [one.origin for one in page.messages]
        if action == "restore":
            origins += [one.origin for one in page.remembered]
        return len(set(ids)) - sum(may_change(one.dag_id if one else None) for one in origins)

    if many := await pool.call_store(connection_id, not_theirs):
        raise HTTPException(
            403,
            f"{many} of these messages were sent by no DAG that you may edit, or are no longer in the store; changing"
            " them needs the right to edit the connection",
        )


def refused_without_dag() -> HTTPException:
    """Return the refusal of a change by filter."""
    return HTTPException(
        403, "without the right to edit the connection, a filter needs dag_id of a DAG that you may edit"
    )


def _logged_selection(action: str, change: ChangeBody) -> dict[str, Any]:
    """Return a selection as the event log has it, which more users see than the store's audit.

    In place of the tag of an erase there is its hash, as in the audit, and no reason of a failure, which is a broker's
    text.
    """
    options = change.model_dump(mode="json", exclude_none=True, exclude={"ids", "filter", "dry_run", "most", "after"})
    if change.ids is not None:
        return {**of_ids(change.ids), **options}
    assert change.filter is not None
    criteria = change.filter.model_dump(mode="json", exclude_none=True)
    if action == "erase" and change.filter.tag is not None:
        criteria["tag"] = hash_of(change.filter.tag)
    if change.filter.reason is not None:
        criteria["reason"] = HIDDEN
    return {"filter": criteria, **options}


def _answer(change: ChangeBody, outcomes: Outcomes) -> ChangeResponse:
    named: dict[Outcome, int] = {}
    messages = []
    for message_id, outcome in outcomes.items():
        named[outcome] = named.get(outcome, 0) + 1
        if change.ids is not None or named[outcome] <= MAX_NAMED:
            messages.append(MessageOutcome(message_id=message_id, outcome=outcome.value))
    return ChangeResponse(
        dry_run=change.dry_run,
        matching=outcomes.total + outcomes.more,
        matching_at_least=outcomes.more >= MAX_COUNTED,
        total=outcomes.total,
        changed=outcomes.changed,
        outcomes={outcome.value: count for outcome, count in outcomes.counts.items()},
        messages=messages,
        next=outcomes.next if outcomes.more else None,
        audit=None if outcomes.audit_seq is None else str(outcomes.audit_seq),
        out_of_reach=[OutOfReachResponse(**row) for row in outcomes.out_of_reach.rows()],
        out_of_reach_at_least=outcomes.out_of_reach.at_least,
    )


class PastStepResponse(ApiModel):
    """What was dispatched from ``begin`` on, for one step."""

    begin: datetime
    dispatched: int = Field(description="Handed over to the broker, or put into the queue table")
    late: int = Field(description="Those of them that were dispatched more than 5 s after the due time")
    max_late_seconds: float


class FutureStepResponse(ApiModel):
    """How many messages fall due from ``begin`` on, for one step; the present step counts from now."""

    begin: datetime
    messages: int


class TimelineResponse(ApiModel):
    """The past and the future around ``at``, in steps of ``step_seconds``."""

    at: datetime
    step_seconds: int
    past: list[PastStepResponse]
    past_is_cut: bool = Field(description="Over a million ids have left the store since; the older ones do not count")
    future: list[FutureStepResponse]


@router.get("/timeline")
async def timeline(
    connection_id: str, pool: HookPoolDep, seconds: Annotated[Literal["3600", "86400"], Query()] = "3600"
) -> TimelineResponse:
    """Return what was dispatched in the last hour or day, and what falls due in the next; some seconds old."""
    answer, _ = await pool.store_figures(
        connection_id,
        lambda hook: TimelineResponse.model_validate(hook.timeline(int(seconds))),
        name=f"timeline {seconds}",
    )
    return answer
