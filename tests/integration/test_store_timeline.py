"""The timeline of a store: what dispatchers write of their work, and what is read of it."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from sqlalchemy import func, select
from support.stores import Store, Transport

from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.message import DelayedMessage

SECOND = timedelta(seconds=1)


def send(hook: DelayedStoreHook, late: timedelta, *names: str, destination: str = "q") -> None:
    due = hook.now() - late
    hook.send([DelayedMessage(destination=destination, body=b"x", due_at=due, message_id=name) for name in names])


def history(hook: DelayedStoreHook) -> dict[str, int]:
    """Return the sums over all rows."""
    table = hook.tables.history
    names = ("Dispatched", "Failed", "Expired", "Retried")
    with hook.engine.connect() as connection:
        row = connection.execute(select(*(func.coalesce(func.sum(table.c[name]), 0) for name in names))).one()
    return dict(zip(names, map(int, row), strict=True))


def rows(hook: DelayedStoreHook) -> list[tuple[datetime, int, str, int]]:
    table = hook.tables.history
    with hook.engine.connect() as connection:
        found = connection.execute(select(table).order_by(table.c.At, table.c.Dispatcher, table.c.Destination))
        return [(row.At, row.Seconds, row.Destination, row.Dispatched) for row in found]


def move(hook: DelayedStoreHook, by: timedelta) -> None:
    """Make all rows older."""
    table = hook.tables.history
    with hook.engine.begin() as connection:
        for (at,) in connection.execute(select(table.c.At).distinct()).all():
            connection.execute(table.update().where(table.c.At == at).values(At=at - by))


def housekeeping(store: Store, hook: DelayedStoreHook) -> None:
    """Run a dispatcher that has nothing to dispatch."""
    store.dispatcher(hook, Transport()).run()


def test_counts_and_lateness_of_what_was_dispatched(store: Store):
    hook = store.installed()
    send(hook, timedelta(minutes=3), "late", "late-2", destination="slow")
    send(hook, timedelta(), "now")
    store.dispatcher(hook, Transport()).run()
    timeline = hook.timeline()
    (step,) = [one for one in timeline.past if one.counts.dispatched]
    assert (step.counts.dispatched, step.counts.on_time) == (3, 1)
    assert 180 <= step.counts.max_late < 240
    assert step.by_destination == {"slow": 2, "q": 1}
    assert timeline.destinations == ["slow", "q"]


def test_what_falls_due_by_destination(store: Store):
    hook = store.installed()
    send(hook, timedelta(minutes=-10), "a", "b", destination="mail")
    send(hook, timedelta(minutes=-40), "c", destination="sms")
    send(hook, timedelta(days=-3), "d", destination="sms")
    hour, week = hook.timeline(3600), hook.timeline(604_800)
    assert [one.by_destination for one in hour.future if one.messages] == [{"mail": 2}, {"sms": 1}]
    assert sum(one.messages for one in week.future) == 4
    assert (hour.step_seconds, len(hour.future)) == (60, 61)
    assert sum(one.counts.dispatched for one in hour.past) == 0


def test_more_than_20_destinations(store: Store):
    hook = store.installed()
    for number in range(25):
        send(hook, SECOND, *(f"{number}-{one}" for one in range(25 - number)), destination=f"q{number:02}")
    store.dispatcher(hook, Transport()).run()
    timeline = hook.timeline()
    assert timeline.destinations == [*(f"q{number:02}" for number in range(20)), ""]
    assert sum(one.counts.dispatched for one in timeline.past) == sum(range(1, 26))
    assert sum(one.by_destination.get("", 0) for one in timeline.past) == 1 + 2 + 3 + 4 + 5


def test_two_dispatchers_write_rows_of_their_own(store: Store):
    hook = store.installed()
    for name in ("first", "second"):
        send(hook, SECOND, name)
        store.dispatcher(hook, Transport()).run()
    assert history(hook)["Dispatched"] == 2
    assert len(rows(hook)) == 2


def test_minutes_become_hours_after_a_day_and_end_after_14(store: Store):
    hook = store.installed()
    for name in ("first", "second"):
        send(hook, SECOND, name)
        store.dispatcher(hook, Transport()).run()
    housekeeping(store, hook)
    before = history(hook)
    assert [row[1] for row in rows(hook)] == [60, 60]
    move(hook, timedelta(hours=26))
    housekeeping(store, hook)
    ((at, seconds, destination, dispatched),) = rows(hook)
    assert (at.minute, seconds, destination, dispatched) == (0, 3600, "q", 2)
    assert history(hook) == before
    # a further minute of the same hour
    send(hook, SECOND, "third")
    store.dispatcher(hook, Transport()).run()
    table = hook.tables.history
    with hook.engine.begin() as connection:
        connection.execute(table.update().where(table.c.Seconds == 60).values(At=at + timedelta(minutes=7)))
    housekeeping(store, hook)
    assert {row[1] for row in rows(hook)} == {3600}
    assert history(hook)["Dispatched"] == 3
    assert sum(one.counts.dispatched for one in hook.timeline(604_800).past) == 3
    move(hook, timedelta(days=14))
    housekeeping(store, hook)
    assert rows(hook) == []


def test_a_clock_that_goes_back_loses_no_counts(store: Store):
    hook = store.installed()
    back = timedelta()

    def moved(connection: object) -> datetime:
        return datetime.now(timezone.utc) - back

    dispatcher = store.dispatcher(hook, Transport(), database_time=moved)
    send(hook, timedelta(minutes=20), "first")
    dispatcher.once()
    back = timedelta(minutes=10)
    send(hook, timedelta(minutes=20), "second")
    dispatcher.once()
    dispatcher.close()
    assert history(hook)["Dispatched"] == 2


def test_failures_and_retries_are_counted(store: Store):
    hook = store.installed()
    send(hook, SECOND, "bad")
    dispatcher = store.dispatcher(hook, Transport(refused={"bad"}), number_of_retries=0)
    dispatcher.once()
    dispatcher.close()
    assert history(hook)["Failed"] == 1
    assert sum(one.counts.failed for one in hook.timeline().past) == 1


def test_the_rate_of_a_dispatcher(store: Store):
    hook = store.installed()
    send(hook, SECOND, "a", "b")
    dispatcher = store.dispatcher(hook, Transport())
    dispatcher.once()
    (seen,) = hook.dispatchers()
    assert seen.per_minute == 0
    dispatcher.close()
    (seen,) = hook.dispatchers()
    assert seen.per_minute is None
    assert datetime.now(timezone.utc) - seen.seen_at < timedelta(minutes=5)


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
