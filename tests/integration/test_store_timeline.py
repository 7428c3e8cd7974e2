"""The timeline of a store: what was dispatched, by the ids that it remembers, and what falls due."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from support.stores import Store, Transport

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.message import DelayedMessage

SECOND = timedelta(seconds=1)


def send(hook: DelayedStoreHook, late: timedelta, *names: str, destination: str = "q") -> None:
    due = hook.now() - late
    hook.send([DelayedMessage(destination=destination, body=b"x", due_at=due, message_id=name) for name in names])


def dispatched_before(hook: DelayedStoreHook, ago: timedelta, *names: str) -> datetime:
    """Have messages as they are so long after they were dispatched, a minute late; return when they were."""
    past, at = hook.tables.past, hook.now() - ago
    with hook.engine.begin() as connection:
        times = {"At": at, "Time": at - timedelta(minutes=1), "ClaimedUntil": at + timedelta(minutes=1)}
        connection.execute(past.update().where(past.c.Id.in_(names)).values(times))
    return at


def test_what_was_dispatched_on_time_and_late(store: Store):
    hook = store.installed()
    send(hook, timedelta(minutes=3), "late", "late-2", destination="slow")
    send(hook, timedelta(), "now")
    # it leaves the store without being sent
    send(hook, -timedelta(minutes=3), "cancelled")
    hook.cancel(["cancelled"])
    store.dispatcher(hook, Transport()).run()
    for seconds in (3600, 86_400):
        found = hook.timeline(seconds)
        (step,) = [one for one in found.past if one.dispatched]
        assert (step.dispatched, step.late, found.past_is_cut) == (3, 2, False)
        assert 180 <= step.max_late_seconds < 240


def test_how_late_each_destination_was_in_the_last_two_minutes(store: Store):
    hook = store.installed()
    send(hook, timedelta(minutes=3), "late", "late-2", destination="slow")
    send(hook, timedelta(minutes=3), "before", destination="long ago")
    send(hook, timedelta(), "now")
    store.dispatcher(hook, Transport()).run()
    dispatched_before(hook, timedelta(minutes=4), "before")
    slow, fast = hook.condition().lateness
    assert (slow.conn_id, slow.destination, slow.dispatched, slow.overdue) == ("broker", "slow", 2, 0)
    assert 180 <= slow.p99_seconds < 240
    assert (fast.destination, fast.dispatched) == ("q", 1)
    assert 0 <= fast.p99_seconds < 60


def test_each_was_dispatched_in_its_minute_and_its_hour(store: Store):
    hook = store.installed()
    send(hook, SECOND, "recent", "old", "older")
    store.dispatcher(hook, Transport()).run()
    minute = dispatched_before(hook, timedelta(minutes=30), "recent").replace(second=0, microsecond=0)
    hour = dispatched_before(hook, timedelta(hours=5), "old").replace(minute=0, second=0, microsecond=0)
    dispatched_before(hook, timedelta(hours=30), "older")
    found = hook.timeline(3600)
    assert (found.step_seconds, len(found.past), len(found.future)) == (60, 61, 61)
    assert [(one.begin, one.late) for one in found.past if one.dispatched] == [(minute, 1)]
    found = hook.timeline(86_400)
    assert (found.step_seconds, len(found.past), len(found.future)) == (3600, 25, 25)
    (first, _) = [(one.begin, one.late) for one in found.past if one.dispatched]
    assert first == (hour, 1)


def test_a_lease_in_force_is_no_dispatch(store: Store):
    hook = store.installed()

    class LookingTransport(Transport):
        def send(self, messages):
            seen.append([sum(one.dispatched for one in hook.timeline(seconds).past) for seconds in (3600, 86_400)])
            return super().send(messages)

    seen: list[list[int]] = []
    send(hook, SECOND, "a", "b")
    store.dispatcher(hook, LookingTransport()).run()
    assert seen == [[0, 0]]
    assert sum(one.dispatched for one in hook.timeline().past) == 2


def test_what_falls_due(store: Store):
    hook = store.installed()
    send(hook, timedelta(minutes=-10), "a", "b")
    send(hook, timedelta(minutes=-40), "c")
    send(hook, timedelta(hours=-20), "d")
    send(hook, timedelta(days=-3), "e")
    hour, day = hook.timeline(3600), hook.timeline(86_400)
    assert [one.messages for one in hour.future if one.messages] == [2, 1]
    assert sum(one.messages for one in day.future) == 4
    assert sum(one.dispatched for one in hour.past) == 0


def test_of_very_many_ids_the_newest_are_counted(store: Store, monkeypatch: pytest.MonkeyPatch):
    hook = store.installed()
    send(hook, SECOND, *(f"old-{number}" for number in range(5)), *(f"new-{number}" for number in range(3)))
    store.dispatcher(hook, Transport()).run()
    dispatched_before(hook, timedelta(minutes=20), *(f"old-{number}" for number in range(5)))
    dispatched_before(hook, timedelta(minutes=10), *(f"new-{number}" for number in range(3)))
    monkeypatch.setattr("airflow_delayed.store.timeline.MOST_COUNTED", 3)
    found = hook.timeline()
    assert (sum(one.dispatched for one in found.past), found.past_is_cut) == (3, True)


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
def test_only_an_hour_or_a_day(store: Store):
    with pytest.raises(ValueError, match="seconds=604800 must be one of 3600, 86400"):
        store.installed().timeline(604_800)


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
def test_the_last_dispatched_message_is_known_after_a_cancel_of_very_many(
    store: Store, monkeypatch: pytest.MonkeyPatch
):
    hook = store.installed()
    send(hook, timedelta(), "sent")
    store.dispatcher(hook, Transport()).run()
    names = [f"m{number}" for number in range(5)]
    send(hook, -timedelta(hours=1), *names)
    hook.cancel(names)
    # as if these were tens of thousands
    monkeypatch.setattr("airflow_delayed.store.queries.MAX_LOOKED_AT", 3)
    last = hook.last_dispatched()
    assert last is not None
    assert last.message_id == "sent"
