"""A cancel that is taken back: what returns, until when, and what it meets meanwhile; on every database."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone

import pytest
from sqlalchemy import Connection, Engine, event, select, update
from support.standing import give_up, pause
from support.stores import Store, Transport, message

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.identity import Origin, SentBy

pytestmark = pytest.mark.mariadb

PAST = datetime(2020, 1, 1, tzinfo=timezone.utc)
LATER = datetime(2030, 5, 6, 7, 8, 9, 123456, tzinfo=timezone.utc)
HOUR = timedelta(hours=1)
MONDAY = Origin(dag_id="billing", run_id="monday", task_id="remind")
TRACE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


@pytest.fixture
def hook(store: Store) -> DelayedStoreHook:
    """Four messages: one waits with all that a message can have, one is retried, one has failed, one is plain."""
    store.installed()
    made = store.hook(origin=MONDAY, until_due=True)
    whole = {"tag": "ann", "headers": {"h": "v"}, "expires_at": LATER + HOUR, "trace": TRACE, "body": b"\x00\xff"}
    made.send([message("whole", LATER, **whole)])
    store.hook().send([message(name, LATER) for name in ("retried", "failed", "plain")])
    pause(made, ["retried"], HOUR)
    give_up(made, "failed", error="no such queue")
    return made


def rows(hook: DelayedStoreHook) -> dict[str, tuple]:
    """All columns of all messages, waiting and failed."""
    with hook.engine.connect() as connection:
        return {
            row.Id: tuple(row)
            for table in (hook.tables.messages, hook.tables.failed)
            for row in connection.execute(select(table))
        }


def kept(hook: DelayedStoreHook) -> set[str]:
    """The ids whose content is kept after a cancel."""
    with hook.engine.connect() as connection:
        return set(connection.execute(select(hook.tables.cancelled.c.Id)).scalars())


def end_grace(hook: DelayedStoreHook, *ids: str) -> None:
    """Let these cancels be too old to be taken back."""
    table = hook.tables.cancelled
    with hook.engine.begin() as connection:
        connection.execute(update(table).where(table.c.Id.in_(ids)).values(Until=PAST))


def test_all_of_a_message_returns(store: Store, hook: DelayedStoreHook):
    before, listed = rows(hook), {one.message_id: one for one in hook.list()}
    assert hook.cancel(["whole", "retried", "failed", "plain"]).counts == {"cancelled": 4}
    assert rows(hook) == {}
    gone = hook.get("whole")
    assert gone.at + timedelta(days=1) == gone.restorable_until
    assert {one.restorable_until for one in hook.page(state="cancelled").remembered} == {gone.restorable_until}
    assert hook.page(ids=["plain"]).remembered[0].restorable_until == gone.restorable_until
    # what would happen, and a filter by what is remembered of it
    assert hook.restore(state="cancelled", dry_run=True).counts == {"restored": 4}
    assert hook.restore(tag="ann", sent_by=SentBy(dag_id="billing")) == {"whole": "restored"}
    again = store.hook().restore(state=["cancelled"], due_from=LATER, limit=2)
    assert (again.counts, again.next is None) == ({"restored": 2}, False)
    assert hook.restore(state="cancelled", after=again.next).counts == {"restored": 1}
    assert rows(hook) == before
    assert {one.message_id: one for one in hook.list()} == listed
    assert (store.past(hook), kept(hook)) == ({}, set())
    # the same again finds nothing to do
    assert hook.restore(["whole", "failed", "never"]) == {
        "whole": "already stored",
        "failed": "already stored",
        "never": "absent",
    }
    assert [one.action for one in hook.audit()][:4] == ["restore"] * 4
    # they are dispatched and retried as any other
    hook.reschedule(["whole", "plain", "retried"], PAST + HOUR)
    broker = Transport()
    assert store.dispatcher(hook, broker).run().dispatched == 3
    (whole,) = (one for one in broker.sent if one.message_id == "whole")
    assert (whole.body, dict(whole.headers), whole.tag, dict(whole.trace)) == (b"\x00\xff", {"h": "v"}, "ann", TRACE)
    assert hook.retry(["failed"]) == {"failed": "retried"}
    assert hook.restore(["whole"]) == {"whole": "dispatched"}


def test_it_ends_after_the_grace(store: Store, hook: DelayedStoreHook, monkeypatch: pytest.MonkeyPatch):
    hook.cancel(["whole", "plain", "failed"])
    end_grace(hook, "whole", "failed")
    assert hook.get("whole").restorable_until is None
    assert hook.restore(["whole", "never"], dry_run=True) == {"whole": "already cancelled", "never": "absent"}
    assert hook.restore(state="cancelled", dry_run=True) == {"plain": "restored"}
    # a dispatcher removes what is over, and so does the next cancel
    store.dispatcher(hook, Transport()).run()
    assert kept(hook) == {"plain"}
    end_grace(hook, "plain")
    monkeypatch.setenv("AIRFLOW__DELAYED__CANCEL_GRACE", "0")
    hook.cancel(["retried"])
    assert kept(hook) == set()
    assert hook.get("retried").restorable_until is None
    assert hook.restore(["retried", "plain"]).counts == {"already cancelled": 2}
    assert hook.restore(state="cancelled").counts == {}


def test_what_is_overdue_is_asked_about(store: Store, hook: DelayedStoreHook):
    hook.send([message("due", PAST, tag="t"), message("short", PAST, expires_at=LATER, tag="t")])
    hook.reschedule(["plain"], PAST)
    hook.cancel(["due", "short", "plain", "failed"])
    table = hook.tables.cancelled
    with hook.engine.begin() as connection:
        connection.execute(update(table).where(table.c.Id == "short").values(ExpiresAt=PAST + HOUR))
        # what has failed is not dispatched
        connection.execute(update(table).where(table.c.Id == "failed").values(Time=PAST, ExpiresAt=PAST + HOUR))
    assert hook.restore(tag="t") == {"due": "overdue", "short": "expired"}
    assert hook.restore(["plain", "failed"]) == {"plain": "overdue", "failed": "restored"}
    assert hook.restore(["plain", "due", "short"], overdue_ok=True).counts == {"restored": 2, "expired": 1}
    broker = Transport()
    store.dispatcher(hook, broker).run()
    assert sorted(broker.ids) == ["due", "plain"]


def test_an_erase_and_a_purge_reach_what_is_kept(store: Store, hook: DelayedStoreHook):
    hook.send([message(name, LATER, tag="bob") for name in ("b1", "b2", "b3")])
    hook.cancel(["whole", "b1", "plain", "failed"])
    assert hook.erase(["plain"]) == {"plain": "erased"}
    assert hook.erase(tag="ann") == {"whole": "erased"}
    assert hook.erase(state=["waiting"], tag="bob", dry_run=True).counts == {"erased": 2}
    assert hook.erase(tag="bob").counts == {"erased": 3}
    assert kept(hook) == {"failed"}
    for name in ("plain", "whole", "b1"):
        gone = hook.get(name)
        assert (gone.state, gone.tag, gone.destination, gone.restorable_until) == ("erased", None, None, None)
    assert hook.restore(["plain", "whole", "b1"]).counts == {"already removed": 3}
    assert hook.erase(state="cancelled") == {"failed": "erased"}
    # one whose time is over, and which nobody has removed yet
    hook.cancel(["retried"])
    end_grace(hook, "retried")
    assert hook.erase(["retried"]) == {"retried": "erased"}
    assert kept(hook) == set()
    hook.send([message("last", LATER)])
    hook.cancel(["last"])
    hook.purge(timedelta(0), reason="remembered")
    assert (hook.restore(["last"]), kept(hook)) == ({"last": "absent"}, set())
    for wrong in ({"state": "dispatched"}, {"state": ["cancelled", "failed"]}):
        with pytest.raises(ValueError, match="state"):
            hook.erase(**wrong)
        with pytest.raises(ValueError, match="state"):
            hook.restore(**wrong)
    with pytest.raises(ValueError, match="give ids"):
        hook.restore()


servers_only = pytest.mark.parametrize("store", ["postgres", "mariadb"], indirect=True)


def first(engine: Engine, pattern: str, then: Callable[[], object]) -> None:
    """Do something before the first statement that looks so."""
    left = [then]

    def look(connection, cursor, statement, parameters, context, executemany) -> None:
        if left and re.search(pattern, statement, re.DOTALL):
            left.pop()()

    event.listen(engine, "before_cursor_execute", look)


def gated(engine: Engine, *, commits: bool = True) -> tuple[threading.Event, threading.Event]:
    """Let each transaction wait before its commit; return the events of having come there, and of going on."""
    there, go_on = threading.Event(), threading.Event()

    @event.listens_for(engine, "commit")
    def commit(connection: Connection) -> None:
        there.set()
        assert go_on.wait(60)
        if not commits:
            raise RuntimeError("ended before its commit")

    return there, go_on


@servers_only
@pytest.mark.parametrize("commits", [True, False])
def test_a_send_and_a_dispatcher_that_meet_a_restore(store: Store, hook: DelayedStoreHook, commits: bool):
    hook.cancel(["plain"])
    restoring, sending, broker = store.hook(), store.hook(), Transport()
    at_commit, go_on = gated(restoring.engine, commits=commits)
    first(sending.engine, "INSERT INTO.*delayed_messages", go_on.set)
    with ThreadPoolExecutor(1) as threads:
        restored = threads.submit(restoring.restore, ["plain"])
        assert at_commit.wait(60)
        # what is not committed is not dispatched, and is not stored a second time
        assert store.dispatcher(store.hook(), broker, lookahead=timedelta(days=9999)).run().dispatched == 0
        report = sending.send([message("plain", LATER)])
        assert (restored.exception(60) is None) is commits
    assert (report.sent, report.duplicates) == (0, 1)
    assert hook.get("plain").state == ("waiting" if commits else "cancelled")
    assert kept(hook) == (set() if commits else {"plain"})
    assert hook.cancel(["plain"]) == {"plain": "cancelled" if commits else "already cancelled"}


@servers_only
def test_a_send_does_not_pass_the_restore_of_a_failed_message(store: Store, hook: DelayedStoreHook):
    """It looks among the failed messages before, and among the remembered ids after the restore's commit."""
    hook.cancel(["failed"])
    restoring, sending, ended = store.hook(), store.hook(), threading.Event()
    at_commit, go_on = gated(restoring.engine)

    def between() -> None:
        go_on.set()
        assert ended.wait(60)

    sending.known(["failed"])  # what is asked once for each connection is asked now
    first(sending.engine, "SELECT.*_past", between)
    # it has waited for a lock
    event.listen(sending.engine, "rollback", lambda connection: go_on.set())
    with ThreadPoolExecutor(1) as threads:
        restored = threads.submit(restoring.restore, ["failed"])
        restored.add_done_callback(lambda _: ended.set())
        assert at_commit.wait(60)
        report = sending.send([message("failed", LATER)])
        assert restored.result(60) == {"failed": "restored"}
    assert (report.sent, report.duplicates) == (0, 1)
    assert [one.state for one in hook.list(ids=["failed"])] == ["failed"]
    assert hook.retry(["failed"]) == {"failed": "retried"}


@servers_only
def test_a_cancel_does_not_lose_what_is_restored_between_two_looks(store: Store, hook: DelayedStoreHook):
    """It is in no table of messages at first, and is remembered no longer in the end."""
    hook.cancel(["plain"])
    cancelling, restoring = store.hook(), store.hook()
    cancelling.known(["plain"])
    first(cancelling.engine, "SELECT.*_past", lambda: restoring.restore(["plain"]))
    assert cancelling.cancel(["plain"]) == {"plain": "cancelled"}
    assert hook.restore(["plain"]) == {"plain": "restored"}


@servers_only
@pytest.mark.parametrize("known", [True, False])
def test_a_restore_that_meets_a_send(store: Store, hook: DelayedStoreHook, known: bool):
    """The send finds the id as cancelled, and leaves it so; an id that is forgotten it stores again."""
    hook.cancel(["plain"])
    if not known:
        store.sql(hook, """DELETE FROM {s}"delayed_messages_past" WHERE "Id" = 'plain'""")
    restoring, sending = store.hook(), store.hook()
    at_commit, go_on = gated(sending.engine)
    first(restoring.engine, "INSERT INTO.*delayed_messages", go_on.set)
    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(sending.send, [message("plain", LATER, body=b"new")])
        assert at_commit.wait(60)
        restored = restoring.restore(["plain"])
        assert sent.result(60).sent == (0 if known else 1)
    assert restored == {"plain": "restored" if known else "already stored"}
    assert hook.content("plain", body_limit=99).body == (b"body of plain" if known else b"new")


def test_two_who_take_the_same_back(store: Store, hook: DelayedStoreHook):
    hook.send(message(f"m{number:04}", LATER, tag="t") for number in range(1500))
    hook.cancel(tag="t")
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda one: one.restore(tag="t").counts, [store.hook(), store.hook()]))
    assert sum(one.get("restored", 0) for one in found) == 1500
    assert set().union(*found) <= {"restored", "already stored", "in flight"}
    assert (hook.matching(9999, tag="t"), kept(hook)) == (1500, set())
