"""Cancel, reschedule, retry, purge, erase: the same on every database."""

from __future__ import annotations

import getpass
import json
import threading
import time
from datetime import datetime, timedelta, timezone

import pytest
from sqlalchemy import event, select
from support.standing import give_up, hold, lock, mark_dispatched, pause, release, renew, settle
from support.stores import Store, message, on_postgres_too

from airflow_delayed.errors import MessageConflict, NaiveTime, NullCriterion, WrongState
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.identity import SentBy
from airflow_delayed.store.api import Outcome
from airflow_delayed.store.bulk_changes import BulkChanges
from airflow_delayed.store.changes import Cancel
from airflow_delayed.store.records import remove_rows

pytestmark = pytest.mark.mariadb

LATER = datetime(2030, 5, 6, 7, 8, 9, 123456, tzinfo=timezone.utc)
HOUR = timedelta(hours=1)


@pytest.fixture
def hook(store: Store) -> DelayedStoreHook:
    """One message of each kind; its id says which."""
    made = store.installed()
    expires = made.now() - HOUR
    made.send(
        [
            *(message(name, LATER, tag="t") for name in ("waiting", "failed", "flying", "left", "gone", "cancelled")),
            message("lives", LATER, tag="t", expires_at=LATER + HOUR),
            message("over", expires - HOUR, tag="t", expires_at=expires),
            message("other", LATER, tag="T"),
        ]
    )
    made.cancel(["cancelled"], actor="before")
    hold(made, "flying")
    hold(made, "left", lease=-HOUR, dispatcher="dead")
    mark_dispatched(made, "gone")
    give_up(made, "failed")
    give_up(made, "over", reason="expired", error="expired")
    return made


KINDS = ["waiting", "failed", "flying", "left", "gone", "cancelled", "lives", "over", "none"]


def left(hook: DelayedStoreHook) -> set[str]:
    return {one.message_id for one in hook.list()}


def test_counts_are_of_one_moment(store: Store) -> None:
    """Whatever is stored and leased between two of their statements."""
    hook, other = store.installed(), store.hook()
    hook.send([message("waits", LATER)])
    began = []

    @event.listens_for(hook.engine, "after_cursor_execute")
    def change(connection: object, cursor: object, statement: str, *_: object) -> None:
        if "overdue" in statement and not began:
            began.append(statement)
            other.send([message(f"due{number}", other.now() - HOUR) for number in range(3)])
            for number in range(3):
                hold(other, f"due{number}")

    assert {name: number for name, number in hook.counts().numbers().items() if number} == {"waiting": 1}
    assert began
    later = {name: number for name, number in hook.counts().numbers().items() if number}
    assert later == {"waiting": 1, "in_flight": 3, "overdue": 3}


def audit(hook: DelayedStoreHook) -> list[tuple[str, str, dict, dict]]:
    """Who, what, which, and how it ended; of all calls but those of the fixture."""
    table = hook.tables.audit
    with hook.engine.connect() as connection:
        rows = connection.execute(select(table).where(table.c.Who != "before").order_by(table.c.Seq)).all()
    assert all(abs(row.At - hook.now()) < timedelta(minutes=1) for row in rows)
    return [(row.Who, row.Action, json.loads(row.Selection), json.loads(row.Counts)) for row in rows]


@pytest.mark.parametrize("dry_run", [True, False])
def test_cancel_tells_of_each_id_whether_it_came_in_time(hook: DelayedStoreHook, dry_run):
    before = left(hook)
    found = hook.cancel([*KINDS, "waiting"], actor="alice", dry_run=dry_run)
    assert found == {
        "waiting": "cancelled",
        "failed": "cancelled",
        "flying": "in flight",
        "left": "cancelled",
        "gone": "dispatched",
        "cancelled": "already cancelled",
        "lives": "cancelled",
        "over": "cancelled",
        "none": "absent",
    }
    assert list(found) == KINDS
    assert (found.total, found.changed) == (9, 5)
    assert found.counts == {"cancelled": 5, "in flight": 1, "dispatched": 1, "already cancelled": 1, "absent": 1}
    assert left(hook) == (before if dry_run else {"flying", "other"})
    if dry_run:
        assert audit(hook) == []
        return
    assert audit(hook) == [
        ("alice", "cancel", {"ids": 9, "first": KINDS[:5]}, {key.value: many for key, many in found.counts.items()})
    ]
    assert hook.cancel("left") == {"left": "already cancelled"}
    # neither a retry of the task that stored it nor its dead dispatcher brings it back
    assert renew(hook, "left", dispatcher="dead") == 0


def test_cancel_by_tag(hook: DelayedStoreHook):
    wanted = {"waiting", "failed", "flying", "left", "lives", "over"}
    would = hook.cancel(tag="t", dry_run=True)
    assert set(would) == wanted
    found = hook.cancel(tag="t", actor="alice")
    assert found == would
    assert found.counts == {"cancelled": 5, "in flight": 1}
    assert left(hook) == {"flying", "other"}
    assert hook.cancel(tag="nobody", actor="bob") == {}
    assert audit(hook) == [
        ("alice", "cancel", {"tag": "t"}, {"cancelled": 5, "in flight": 1}),
        ("bob", "cancel", {"tag": "nobody"}, {}),
    ]


def test_other_filters(hook: DelayedStoreHook):
    for criteria, wanted in (
        ({"destination": "q"}, {"waiting", "failed", "flying", "left", "lives", "over", "other"}),
        ({"state": "failed"}, {"failed"}),
        ({"tag": "t", "state": ["waiting", "expired"]}, {"waiting", "left", "lives", "over"}),
        ({"due_until": LATER}, {"over"}),
        ({"tag": "T", "due_from": LATER}, {"other"}),
        ({"deliver_conn_id": "another"}, set()),
    ):
        assert set(hook.cancel(**criteria, dry_run=True)) == wanted, criteria
    assert hook.cancel(tag="t", state=["waiting", "expired"]).counts == {"cancelled": 4}
    assert left(hook) == {"failed", "flying", "other"}


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
@pytest.mark.parametrize("change", ["cancel", "reschedule", "retry", "erase"])
def test_nothing_is_meant_by_all_there_is(hook: DelayedStoreHook, change):
    options = {"delay": 5} if change == "reschedule" else {}
    before = left(hook)
    with pytest.raises(ValueError, match=f"{change}: give ids, tag= or another filter"):
        getattr(hook, change)(**options)
    with pytest.raises(ValueError, match=f"{change}: give ids or a filter, and not both"):
        getattr(hook, change)(["waiting"], tag="t", **options)
    # what a template that found nothing makes of itself
    assert getattr(hook, change)([], **options) == getattr(hook, change)(tag="", **options) == {}
    assert left(hook) == before


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
@pytest.mark.parametrize("change, other", [("retry", "waiting"), ("restore", "failed")])
def test_a_state_that_a_change_leaves_as_it_is(hook: DelayedStoreHook, change: str, other: str):
    before = left(hook), audit(hook)
    for state in (other, [other], ("failed", "cancelled")):
        with pytest.raises(WrongState, match=f"{change}: state=.*: only [a-z]+ messages are "):
            getattr(hook, change)(state=state)
    assert (left(hook), audit(hook)) == before


CRITERIA = ["ids", "tag", "destination", "deliver_conn_id", "reason", "due_from", "due_until", "state", "sent_by"]


@on_postgres_too
@pytest.mark.parametrize("change", ["cancel", "restore", "reschedule", "retry", "erase", "list", "page", "matching"])
def test_a_criterion_that_is_none_selects_nothing(hook: DelayedStoreHook, change: str):
    """A null of somebody's row: without the criterion, the messages of all others would match."""
    options = {"delay": 5} if change == "reschedule" else {}
    options |= {"limit": 1} if change == "matching" else {}
    before = list(hook.list()), audit(hook)
    for name in CRITERIA if change != "matching" else CRITERIA[1:]:
        other = {"destination": "q"} if name != "destination" else {"tag": "t"}
        with pytest.raises(NullCriterion, match=f"^{name}= is None, which would select more messages, so nothing is"):
            getattr(hook, change)(**{name: None}, **other, **options)
        if name == "ids":
            with pytest.raises(NullCriterion, match="ids= is None"):
                hook.cancel(None, tag="t")
    for name in ("tag", "destination", "deliver_conn_id"):
        with pytest.raises(NullCriterion, match=f"{name}= is None"):
            hook.counts(**{name: None})
    with pytest.raises(NullCriterion, match="run_id= is None"):
        SentBy(dag_id="d", run_id=None)
    assert (list(hook.list()), audit(hook)) == before


@pytest.mark.parametrize("dry_run", [True, False])
def test_reschedule(hook: DelayedStoreHook, dry_run):
    pause(hook, ["waiting"], HOUR)
    found = hook.reschedule(KINDS, LATER + HOUR, actor="alice", dry_run=dry_run)
    assert found == {
        "waiting": "rescheduled",
        "failed": "failed",
        "flying": "in flight",
        "left": "rescheduled",
        "gone": "dispatched",
        "cancelled": "already cancelled",
        "lives": "expires first",
        "over": "expired",
        "none": "absent",
    }
    if dry_run:
        assert hook.get("waiting").due_at == hook.get("left").due_at == LATER
        return
    assert hook.get("waiting").due_at == hook.get("left").due_at == LATER + HOUR
    assert (hook.get("waiting").state, hook.get("waiting").retry_count) == ("waiting", 1)
    assert hook.get("lives").due_at == hook.get("flying").due_at == LATER
    assert audit(hook)[0][2] == {"ids": 9, "first": KINDS[:5], "to": (LATER + HOUR).isoformat()}
    assert hook.reschedule(["waiting"], LATER + HOUR) == {"waiting": "unchanged"}
    # a dispatcher that was thought dead has lost it
    assert renew(hook, "left", dispatcher="dead") == 0
    # the task that stored it runs again: it is known by what it said
    report = hook.send([message("waiting", LATER, tag="t")])
    assert (report.sent, report.duplicates) == (0, 1)
    assert hook.get("waiting").due_at == LATER + HOUR


def test_reschedule_by_filter_meets_no_message_twice(store: Store):
    hook = store.installed()
    # to a time among the others, so that those moved come up further on
    hook.send(message(f"m{n}", LATER + timedelta(seconds=n), tag="t") for n in range(2500))
    found = hook.reschedule(tag="t", due_at=LATER + timedelta(seconds=1200))
    assert found.counts == {"rescheduled": 2499}
    assert {one.due_at for one in hook.list()} == {LATER + timedelta(seconds=1200)}


def test_reschedule_from_now_on(hook: DelayedStoreHook):
    before = hook.now()
    assert hook.reschedule(tag="T", delay=timedelta(minutes=5)) == {"other": "rescheduled"}
    # SQLite's clock has milliseconds
    assert before <= hook.get("other").due_at - timedelta(minutes=5) <= hook.now() + timedelta(milliseconds=1)
    for wrong in ({}, {"due_at": LATER, "delay": 5}):
        with pytest.raises(ValueError, match="give due_at= or delay="):
            hook.reschedule(["other"], **wrong)
    with pytest.raises(NaiveTime, match="due_at"):
        hook.reschedule(["other"], datetime(2030, 1, 1))


@pytest.mark.parametrize("dry_run", [True, False])
def test_retry(hook: DelayedStoreHook, store: Store, dry_run):
    stored = hook.get("failed")
    found = hook.retry(KINDS, actor="alice", dry_run=dry_run)
    assert found == {
        "waiting": "unchanged",
        "failed": "retried",
        "flying": "in flight",
        "left": "unchanged",
        "gone": "dispatched",
        "cancelled": "already cancelled",
        "lives": "unchanged",
        "over": "expired",
        "none": "absent",
    }
    if dry_run:
        assert hook.get("failed") == stored
        return
    again = hook.get("failed")
    assert (again.state, again.retry_count, again.next_try, again.failed_at) == ("waiting", 0, None, None)
    assert (again.tag, again.due_at, again.stored_at) == (stored.tag, stored.due_at, stored.stored_at)
    with hook.engine.connect() as connection:
        table = hook.tables.messages
        row = connection.execute(select(table).where(table.c.Id == "failed")).one()
    assert bytes(row.State) == b"body of failed"
    assert hook.send([message("failed", LATER, tag="t")]).duplicates == 1


def test_erase_leaves_an_id_and_nothing_else(hook: DelayedStoreHook):
    found = hook.erase(KINDS, actor="alice")
    assert found == {
        "waiting": "erased",
        "failed": "erased",
        "flying": "in flight",
        "left": "erased",
        "gone": "dispatched",
        "cancelled": "erased",
        "lives": "erased",
        "over": "erased",
        "none": "absent",
    }
    assert left(hook) == {"flying", "other"}
    for name in ("waiting", "failed", "gone", "cancelled"):
        known = hook.get(name)
        assert (known.state, known.destination, known.due_at) == ("erased", None, None)
    past = hook.tables.past
    with hook.engine.connect() as connection:
        erased = connection.execute(select(past).where(past.c.Outcome == "erased")).mappings().all()
    assert {name for row in erased for name, value in row.items() if value is not None} == {"Id", "Outcome", "At"}
    assert hook.erase("waiting") == {"waiting": "already removed"}
    assert hook.cancel("waiting") == {"waiting": "already removed"}
    settle(hook, "flying")
    assert hook.erase("flying") == {"flying": "dispatched"}
    assert hook.erase(tag="T", dry_run=True) == hook.erase(tag="T") == {"other": "erased"}


def test_purge(hook: DelayedStoreHook):
    assert hook.purge(HOUR).counts == {}
    would = hook.purge(timedelta(0), reason="failed", dry_run=True)
    assert would == hook.purge(timedelta(0), reason="failed", actor="alice") == {"failed": "purged"}
    assert (hook.get("failed").state, hook.cancel("failed")["failed"]) == ("purged", "already removed")
    assert hook.get("over").state == "expired"
    # cancelled, purged, and one that was left, which does no harm; a lease is still needed
    would = hook.purge(timedelta(0), reason=["expired", "remembered"], dry_run=True)
    done = hook.purge(timedelta(0), reason=["expired", "remembered"], actor="bob")
    assert would == done == {"over": "purged"}
    assert would.counts == done.counts == {"purged": 1, "forgotten": 3}
    assert [hook.get(name) for name in ("cancelled", "failed")] == [None] * 2
    assert hook.get("over").state == "purged"
    assert (hook.get("flying").state, hook.get("waiting").state) == ("in flight", "waiting")
    assert audit(hook)[-1][1:] == (
        "purge",
        {"older_than": 0, "reasons": ["expired", "remembered"]},
        {"forgotten": 3, "purged": 1},
    )


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    "older_than, reason, text",
    [
        (-HOUR, "failed", "older_than=.* is negative"),
        (HOUR, "waiting", "reason='waiting' must be of failed, expired, remembered"),
        (HOUR, [], "must be of"),
    ],
)
def test_a_purge_that_cannot_be(hook: DelayedStoreHook, older_than, reason, text):
    with pytest.raises(ValueError, match=text):
        hook.purge(older_than, reason=reason)


def test_purge_of_many(store: Store):
    hook = store.installed()
    hook.send(message(f"m{n:04}", LATER) for n in range(2500))
    hook.cancel(destination="q", due_until=LATER + HOUR)
    assert hook.purge(timedelta(0), reason="remembered").counts == {"forgotten": 2500}
    assert hook.counts().remembered == 0
    assert hook.send([message("m0000", LATER)]).sent == 1


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
def test_who_it_was(store: Store, monkeypatch):
    hook = store.installed()
    hook.cancel("a")
    hook.cancel("a", actor="x" * 300)
    assert [who for who, *_ in audit(hook)] == [getpass.getuser(), "x" * 250]

    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found")

    # as in a container whose user has no name
    monkeypatch.setattr(getpass, "getuser", nobody)
    hook.cancel("a")
    assert audit(hook)[-1][0].startswith("uid ")


def test_an_id_that_is_being_dispatched_is_waited_for(hook: DelayedStoreHook):
    """Half a second in all; what happens to it meanwhile is told."""
    hook.send([message("returned", LATER), message("sent", LATER)])
    hold(hook, "returned", "sent")
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            settle(hook, "sent")
            release(hook, "returned")

    operations = BulkChanges(hook.engine, hook.tables, sleep=sleep, monotonic=lambda: sum(naps))
    found = operations.by_ids(Cancel(), ["flying", "returned", "sent"], who="alice")
    assert found == {"flying": "in flight", "returned": "cancelled", "sent": "dispatched"}
    assert found.counts == {"in flight": 1, "cancelled": 1, "dispatched": 1}
    assert sum(naps) == pytest.approx(0.5, abs=0.1)
    assert audit(hook)[-1][3] == {"in flight": 1, "cancelled": 1, "dispatched": 1}


@pytest.mark.parametrize("store", ["postgres", "mariadb"], indirect=True)
def test_a_row_that_another_transaction_has_is_not_waited_for(hook: DelayedStoreHook, store: Store):
    """A claim that is not yet committed, of a message and of a failed one; the others are changed meanwhile."""
    table = hook.tables.failed
    with hook.engine.begin() as connection:
        lock(connection, hook.tables, "waiting")
        connection.execute(select(table.c.Id).where(table.c.Id == "failed").with_for_update()).all()
        begun = time.monotonic()
        found = store.hook().cancel(["waiting", "failed", "lives"])
        # it would have waited for as long as the other one does
        assert time.monotonic() - begun < 30
    assert found == {"waiting": "in flight", "failed": "in flight", "lives": "cancelled"}
    assert hook.cancel(["waiting", "failed"]).changed == 2


@pytest.mark.parametrize("store", ["postgres", "mariadb"], indirect=True)
def test_what_was_stored_anew_while_it_was_retried(hook: DelayedStoreHook, store: Store):
    """The id is there, uncommitted: the retry waits, sees it then, and leaves both to who stores."""
    row = {"Destination": "q", "State": b"new", "Time": LATER, "Headers": b"{}", "RetryCount": 0}
    found = []
    thread = threading.Thread(target=lambda: found.append(store.hook().retry(["failed"])))
    with hook.engine.begin() as connection:
        connection.execute(hook.tables.messages.insert(), [{"Id": "failed", **row}])
        thread.start()
        thread.join(0.3)
        remove_rows(connection, hook.tables.failed, ["failed"])
    thread.join(60)
    assert found == [{"failed": "unchanged"}]
    assert [one.state for one in hook.list(ids=["failed"])] == ["waiting"]


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
def test_a_change_by_filter_names_ten_thousand(store: Store, monkeypatch):
    monkeypatch.setattr("airflow_delayed.store.bulk_changes.NAMED_IDS", 10)
    hook = store.installed()
    hook.send(message(f"m{n:02}", LATER, tag="t") for n in range(30))
    hold(hook, "m03", "m29")
    found = hook.cancel(tag="t")
    assert (len(found), found.total, found.counts) == (12, 30, {"cancelled": 28, "in flight": 2})
    assert {name for name, outcome in found.items() if outcome is Outcome.IN_FLIGHT} == {"m03", "m29"}


def test_the_same_id_with_other_content_is_still_an_error_after_reschedule(hook: DelayedStoreHook):
    hook.reschedule(["other"], LATER + HOUR)
    with pytest.raises(MessageConflict):
        hook.send([message("other", LATER + 2 * HOUR, tag="T")])
