"""Changing messages of a store; needs the right to edit the connection.

A POST with ``Content-Type: application/json`` from the page itself, or from a program. By a filter, one call works on
some thousand messages and answers with ``next`` if there are more. Each call that is no dry run leaves a row in the
store's audit and an entry in Airflow's event log, both with the user's name.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from fastapi import APIRouter, HTTPException

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.message import due_after
from airflow_delayed.store.audit import NAMED
from airflow_delayed.store.id_pages import MOST as MOST_COUNTED
from airflow_delayed.store.outcomes import Outcome, Outcomes
from airflow_delayed.ui import models, security
from airflow_delayed.ui.asking import CHANGING, Asking
from airflow_delayed.ui.event_log import logged
from airflow_delayed.ui.models import Changed
from airflow_delayed.ui.parts import AskingDep, is_store
from airflow_delayed.ui.requests import Change, Rescheduling
from airflow_delayed.ui.route import GuardedRoute

router = APIRouter(
    prefix="/stores/{connection_id}",
    tags=["changes"],
    dependencies=[is_store, security.edits],
    route_class=GuardedRoute,
)

#: Messages that one call by filter looks at.
MOST = 5000
#: Ids that are named of each outcome, of a change by filter.
SHOWN = 100

#: The only table that is looked into, of some changes.
_WHERE = {"reschedule": "messages", "retry": "failed"}

Work = Callable[..., Outcomes]


@router.post("/cancel")
async def cancel(connection_id: str, change: Change, asking: AskingDep, user: security.User) -> Changed:
    """Remove messages, failed ones too, and remember their ids as cancelled."""
    return await _change(asking, user, connection_id, "cancel", change, lambda hook: hook.cancel)


@router.post("/reschedule")
async def reschedule(connection_id: str, change: Rescheduling, asking: AskingDep, user: security.User) -> Changed:
    """Give messages that wait another due time."""
    due_at = change.due_at

    def work(hook: DelayedStoreHook) -> Work:
        nonlocal due_at
        if due_at is None:
            due_at = due_after(hook.now(), _span(change.delay_seconds or 0))
        moment = due_at

        def move(ids: list[str] | None, **arguments: Any) -> Outcomes:
            return hook.reschedule(ids, moment, **arguments)

        return move

    found = await _change(asking, user, connection_id, "reschedule", change, work)
    return found.model_copy(update={"due_at": due_at})


@router.post("/retry")
async def retry(connection_id: str, change: Change, asking: AskingDep, user: security.User) -> Changed:
    """Let failed messages wait again."""
    if change.filter is not None and change.filter.state not in (None, ["failed"]):
        raise HTTPException(400, "only failed messages can be retried; leave state out of the filter")
    return await _change(asking, user, connection_id, "retry", change, _retry)


def _retry(hook: DelayedStoreHook) -> Work:
    def again(ids: list[str] | None, *, state: object = None, **arguments: Any) -> Outcomes:
        return hook.retry(ids, **arguments)

    return again


@router.post("/erase")
async def erase(connection_id: str, change: Change, asking: AskingDep, user: security.User) -> Changed:
    """Remove messages and all that is known of them but the id."""
    return await _change(asking, user, connection_id, "erase", change, lambda hook: hook.erase)


def _span(seconds: float) -> timedelta:
    try:
        return timedelta(seconds=seconds)
    except OverflowError:
        raise HTTPException(400, "delay_seconds ends after the year 9999") from None


async def _change(
    asking: Asking,
    user: security.User,
    connection_id: str,
    action: str,
    change: Change,
    work: Callable[[DelayedStoreHook], Work],
) -> Changed:
    """Do it, or try it dry, and tell what became of the messages."""
    if change.after is not None and not change.after.startswith(_WHERE.get(action, "")):
        raise HTTPException(400, "after: it is of another change; give the last answer's next")
    arguments: dict[str, Any] = {"dry_run": change.dry_run, "actor": f"user {security.name_of(user)}"}
    if change.filter is not None:
        arguments |= {**change.filter.criteria(), "limit": min(MOST, change.most or MOST), "after": change.after}

    def do(hook: DelayedStoreHook) -> Outcomes:
        if change.dry_run:
            return work(hook)(change.ids, **arguments)
        with logged(action, user, {"connection_id": connection_id, **_told(change)}) as outcome:
            found = work(hook)(change.ids, **arguments)
            outcome["outcomes"] = {one.value: many for one, many in found.counts.items()}
        return found

    found = await asking.store(connection_id, do, seconds=CHANGING)
    if not change.dry_run:
        asking.changed(f"store {connection_id}")
    return _answer(change, found)


def _told(change: Change) -> dict[str, Any]:
    """Return what the event log says of a selection."""
    told = change.model_dump(mode="json", exclude_none=True, exclude={"ids", "filter", "dry_run", "most", "after"})
    if change.ids is not None:
        return {"ids": len(change.ids), "first": change.ids[:NAMED], **told}
    assert change.filter is not None
    return {"filter": change.filter.model_dump(mode="json", exclude_none=True), **told}


def _answer(change: Change, found: Outcomes) -> Changed:
    named: dict[Outcome, int] = {}
    messages = []
    for message_id, outcome in found.items():
        named[outcome] = named.get(outcome, 0) + 1
        if change.ids is not None or named[outcome] <= SHOWN:
            messages.append(models.Became(message_id=message_id, outcome=outcome.value))
    return Changed(
        dry_run=change.dry_run,
        matching=found.total + found.more,
        matching_at_least=found.more >= MOST_COUNTED,
        total=found.total,
        changed=found.changed,
        outcomes={outcome.value: many for outcome, many in found.counts.items()},
        messages=messages,
        next=found.next,
    )
