"""What a run of a task has stored is withdrawn as if it had never been stored: the same on every database."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone

import pytest
from sqlalchemy import select
from support.standing import give_up, hold, mark_dispatched, settle
from support.stores import Store, Transport, message

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.identity import Origin

pytestmark = pytest.mark.mariadb

LATER = datetime(2030, 5, 6, 7, 8, 9, 123456, tzinfo=timezone.utc)
HOUR = timedelta(hours=1)
NAMES = {"dag_id": "d", "run_id": "r", "task_id": "send"}
OWN = Origin(**NAMES)
#: Each differs in one thing.
OTHERS = [
    Origin(**{**NAMES, "dag_id": "other"}),
    Origin(**{**NAMES, "run_id": "other"}),
    Origin(**{**NAMES, "task_id": "other"}),
    Origin(**NAMES, map_index=0),
    Origin(**NAMES, iteration=1),
]


@pytest.fixture
def hook(store: Store) -> DelayedStoreHook:
    store.installed()
    return store.hook(origin=OWN)


def names(prefix: str, count: int = 3) -> list[str]:
    return [f"{prefix}-{number}" for number in range(count)]


def send(hook: DelayedStoreHook, *ids: str, due: datetime = LATER) -> int:
    return hook.send([message(name, due) for name in ids]).sent


def waiting(hook: DelayedStoreHook) -> set[str]:
    return {one.message_id for one in hook.list()}


def test_the_runs_own_messages_go_and_come_again(hook: DelayedStoreHook):
    since = hook.now()
    assert send(hook, *names("own")) == 3
    report = hook.withdraw(since, because="killed")
    assert (report.withdrawn, report.in_flight, report.complete) == (3, 0, True)
    assert (waiting(hook), hook.known(names("own")), hook.get("own-0")) == (set(), set(), None)
    assert send(hook, *names("own")) == 3


def test_nobody_elses_messages_go_and_none_from_before(store: Store, hook: DelayedStoreHook):
    send(hook, "before")
    hook.cancel(["before"])
    hook.restore(["before"])
    for number, origin in enumerate(OTHERS):
        send(store.hook(origin=origin), f"theirs-{number}")
    send(store.hook(), "without-a-task")
    since = hook.now()
    # of the same time and another run
    for number, origin in enumerate(OTHERS):
        send(store.hook(origin=origin), f"late-{number}")
    assert send(hook, "before", "own") == 1
    assert hook.withdraw(since).withdrawn == 1
    there = {"before", "without-a-task", *names("theirs", 5), *names("late", 5)}
    assert waiting(hook) == there


def test_a_message_of_others_that_was_replaced_stays(store: Store, hook: DelayedStoreHook):
    send(store.hook(origin=OTHERS[1]), "theirs")
    since = hook.now()
    replacing = store.hook(origin=OWN, on_conflict="replace")
    assert replacing.send([message("theirs", LATER + HOUR)]).replaced == 1
    assert hook.withdraw(since).withdrawn == 0
    assert hook.get("theirs").due_at == LATER + HOUR


def test_an_escalation_of_the_same_task_stays(hook: DelayedStoreHook):
    since = hook.now()
    hook.send([message("armed", LATER, tag="notifier:d/r")])
    hook.send([message("own", LATER, tag="about notifier:d/r")])
    assert hook.withdraw(since).withdrawn == 1
    assert waiting(hook) == {"armed"}


def test_what_is_being_dispatched_stays_and_what_a_dead_dispatcher_had_comes_again(hook: DelayedStoreHook):
    since = hook.now()
    send(hook, "flying", "left", "gone", "failed", "waiting")
    hold(hook, "flying")
    hold(hook, "left", lease=-HOUR, dispatcher="dead")
    mark_dispatched(hook, "gone")
    give_up(hook, "failed")
    report = hook.withdraw(since)
    assert (report.withdrawn, report.in_flight, report.complete) == (3, 1, True)
    assert waiting(hook) == {"flying"}
    # the send goes again from the top: what has arrived, or is on its way, does not come twice
    assert send(hook, "flying", "left", "gone", "failed", "waiting") == 3
    settle(hook, "flying")
    assert waiting(hook) == {"left", "failed", "waiting"}


def test_a_dispatcher_delivers_what_was_stored_again_once(store: Store, hook: DelayedStoreHook):
    due, since = hook.now() - HOUR, hook.now()
    send(hook, "a", "b", due=due)
    hook.withdraw(since)
    transport = Transport()
    store.dispatcher(hook, transport).run()
    assert transport.sent == []
    send(hook, "a", "b", due=due)
    store.dispatcher(hook, transport).run()
    assert sorted(one.message_id for one in transport.sent) == ["a", "b"]


def test_it_is_in_the_audit_and_a_second_time_finds_nothing(hook: DelayedStoreHook):
    since = hook.now()
    assert hook.withdraw(since).withdrawn == 0
    send(hook, "a")
    hook.withdraw(since, because="the task was killed")
    hook.withdraw(since)
    again, record = hook.audit()
    assert (record.action, record.counts, record.because) == ("withdraw", {"withdrawn": 1}, "the task was killed")
    assert record.selection == {**NAMES, "map_index": -1, "since": since.isoformat()}
    assert (again.action, again.counts) == ("withdraw", {})


def test_it_ends_in_time(hook: DelayedStoreHook):
    since = hook.now()
    send(hook, *names("own", 2500))
    first = hook.withdraw(since, seconds=0)
    assert (first.withdrawn, first.complete) == (1000, False)
    rest = hook.withdraw(since)
    assert (rest.withdrawn, rest.complete) == (1500, True)
    table = hook.tables.audit
    with hook.engine.connect() as connection:
        counts = connection.execute(select(table.c.Counts).order_by(table.c.Seq)).scalars().all()
    assert [json.loads(one) for one in counts] == [{"withdrawn": 1000}, {"withdrawn": 1500}]


def test_a_hook_that_is_no_tasks_has_nothing_to_withdraw(store: Store, hook: DelayedStoreHook):
    with pytest.raises(ValueError, match="has no origin"):
        store.hook().withdraw(LATER)
