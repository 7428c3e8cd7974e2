"""What a store shows: lists by filter, one id, counts; the same on every database."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from support.standing import give_up, hold, mark_dispatched, pause
from support.stores import DATABASES, Store, message, on_postgres_too

from airflow_delayed.errors import NaiveTime
from airflow_delayed.hooks.store import DelayedStoreHook
from airflow_delayed.identity import SentBy
from airflow_delayed.store.records import Remembered, StoredMessage

LATER = datetime(2030, 5, 6, 7, 8, 9, 123456, tzinfo=timezone.utc)
SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)


def names(found) -> list[str]:
    return [one.message_id for one in found]


@pytest.fixture
def hook(store: Store) -> DelayedStoreHook:
    """One message of each kind, its id says which; due in alphabetical order but for those that are due."""
    made = store.installed()
    now = made.now()
    made.send(
        [
            message("due", now - 9 * SECOND, tag="t"),
            message("expired", now - 8 * SECOND, expires_at=now - SECOND),
            message("failed", now - 7 * SECOND, tag="t"),
            message("flying", now - 6 * SECOND),
            message("gone", now - 5 * SECOND),
            message("over", now - 4 * SECOND, expires_at=now - SECOND),
            message("retrying", now - 3 * SECOND),
            message("waiting", now + HOUR, tag="t", destination="r"),
        ]
    )
    store.hook(None).send([message("own", now + 2 * HOUR)])
    hold(made, "flying")
    mark_dispatched(made, "gone")
    give_up(made, "failed")
    give_up(made, "over", reason="expired", error="expired")
    pause(made, ["retrying"], HOUR)
    return made


def test_each_message_tells_how_it_stands(hook: DelayedStoreHook):
    found = {one.message_id: one for one in hook.list()}
    assert {name: one.state.value for name, one in found.items()} == {
        "due": "due",
        "expired": "expired",
        "failed": "failed",
        "flying": "in flight",
        "over": "expired",
        "retrying": "retrying",
        "waiting": "waiting",
        "own": "waiting",
    }
    assert (found["failed"].last_error, found["failed"].retry_count) == ("queue 'q' is not there", 3)
    assert found["failed"].failed_at is not None
    assert (found["retrying"].last_error, found["retrying"].retry_count) == ("refused", 1)
    assert found["retrying"].next_try > hook.now()
    assert (found["due"].failed_at, found["due"].next_try, found["due"].last_error) == (None, None, None)
    # no content
    assert not any(hidden in repr(list(found.values())) for hidden in ("body", "headers"))


FILTERS = [
    ({"state": "due"}, ["due"]),
    ({"state": ["failed", "expired"]}, ["expired", "failed", "over"]),
    ({"state": "in flight"}, ["flying"]),
    ({"state": ["retrying", "waiting"]}, ["retrying", "waiting", "own"]),
    ({"state": []}, []),
    ({"tag": "t"}, ["due", "failed", "waiting"]),
    ({"tag": "t", "state": "failed"}, ["failed"]),
    ({"tag": "T"}, []),
    ({"destination": "r"}, ["waiting"]),
    ({"deliver_conn_id": "broker", "state": "waiting"}, ["waiting"]),
    ({"ids": ["own", "failed", "gone", "none", "own"]}, ["failed", "own"]),
    ({"ids": "own"}, ["own"]),
    ({"ids": ["own", "failed"], "tag": "t"}, ["failed"]),
    ({"limit": 3}, ["due", "expired", "failed"]),
    ({"limit": 0}, []),
]


@on_postgres_too
def test_lists_by_filter(hook: DelayedStoreHook):
    for criteria, wanted in FILTERS:
        assert names(hook.list(**criteria)) == wanted, criteria


def test_a_list_of_the_stores_own_queue_tables(hook: DelayedStoreHook):
    assert names(hook.list(deliver_conn_id=hook.conn_id)) == ["own"]


def test_a_list_by_due_time(hook: DelayedStoreHook):
    due = {one.message_id: one.due_at for one in hook.list()}
    # from: with; until: without
    assert names(hook.list(due_from=due["failed"], due_until=due["waiting"])) == [
        "failed",
        "flying",
        "over",
        "retrying",
    ]
    with pytest.raises(NaiveTime, match="due_from"):
        next(hook.list(due_from=datetime(2030, 1, 1)))


def test_a_list_goes_on_where_another_ended(store: Store):
    hook = store.installed()
    # many with one due time, in both tables, so that pages end among equals
    hook.send(message(f"m{n:04}", LATER + timedelta(seconds=n // 1500)) for n in range(3000))
    give_up(hook, *(f"m{n:04}" for n in range(0, 3000, 3)))
    wanted = [f"m{n:04}" for n in range(3000)]
    assert names(hook.list()) == wanted
    found, after = [], None
    while page := list(hook.list(limit=700, after=after)):
        found += names(page)
        after = page[-1].token
    assert found == wanted
    assert names(hook.list(ids=wanted, after=after)) == []
    assert names(hook.list(ids=wanted, limit=2)) == wanted[:2]
    # no transaction is open between two messages, so others can change them meanwhile: the list goes on behind the
    # last one that it showed, wherever that is now
    begun = hook.list()
    assert next(begun).message_id == "m0000"
    assert store.hook().cancel([*wanted[:500], "m2500"]).changed == 501
    assert names(begun)[999:] == [name for name in wanted[1000:] if name != "m2500"]


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
@pytest.mark.parametrize("wrong", [{"state": "lost"}, {"after": "x"}, {"after": "bm8gdG9rZW4"}, {"limit": -1}])
def test_a_list_that_cannot_be(store: Store, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        next(store.installed().list(**wrong))


def test_what_is_known_of_an_id(hook: DelayedStoreHook):
    for name, state in (("due", "due"), ("flying", "in flight"), ("failed", "failed"), ("over", "expired")):
        known = hook.get(name)
        assert isinstance(known, StoredMessage)
        assert known.state == state
    assert hook.get("never") is None
    due = hook.get("waiting").due_at
    hook.cancel("waiting")
    for name, state in (("gone", "dispatched"), ("waiting", "cancelled")):
        known = hook.get(name)
        assert isinstance(known, Remembered)
        assert known.state == state
        assert abs(known.at - hook.now()) < timedelta(minutes=1)
    assert (known.destination, known.due_at) == ("r", due)


@pytest.mark.parametrize("store", DATABASES, indirect=True)
def test_counts(hook: DelayedStoreHook):
    found = hook.counts(overdue=3 * SECOND, by_destination=True)
    assert found.numbers() == {
        "waiting": 2,
        "due": 1,
        # in flight and retrying ones too
        "overdue": 3,
        "in_flight": 1,
        "retrying": 1,
        "failed": 1,
        "expired": 2,
        "remembered": 1,
    }
    assert found.next_due == hook.get("waiting").due_at
    assert found.oldest_due == hook.get("due").due_at
    assert found.by_destination == {"q": 7, "r": 1}
    first = found.at.replace(minute=0, second=0, microsecond=0)
    assert list(found.by_hour) == [first + number * HOUR for number in range(24)]
    assert {hour: many for hour, many in found.by_hour.items() if many} == {
        hook.get(name).due_at.replace(minute=0, second=0, microsecond=0): 1 for name in ("waiting", "own")
    }
    assert hook.counts(overdue=HOUR).overdue == 0


def test_counts_by_filter(hook: DelayedStoreHook):
    found = hook.counts(tag="t", hours=0)
    assert (found.waiting, found.due, found.failed, found.expired, found.in_flight) == (1, 1, 1, 0, 0)
    assert (found.remembered, found.by_hour, found.by_destination) == (None, {}, {})
    assert hook.counts(destination="q").remembered == 1
    assert hook.counts(destination="r").remembered == 0
    own = hook.counts(deliver_conn_id=hook.conn_id)
    assert (own.waiting, own.due, own.oldest_due, own.next_due) == (1, 0, None, hook.get("own").due_at)
    assert hook.counts(due_from=hook.get("waiting").due_at, tag="t").waiting == 1
    assert hook.counts(sent_by=SentBy(dag_id="nobody's")).waiting == 0
    with pytest.raises(ValueError, match="counts: state= and reason= are of messages in the store alone"):
        hook.counts(state="due")


def test_counts_of_a_long_time(store: Store):
    """What is due far ahead is counted by the index; whatever is added up must come out."""
    hook = store.installed()
    now = hook.now()
    hook.send(message(f"m{n}", now + n * timedelta(hours=5)) for n in range(100))
    found = hook.counts(hours=744)
    assert (found.waiting, found.due, sum(found.by_hour.values())) == (99, 1, 99)
    with pytest.raises(ValueError, match="hours=745 must be 0 to 744"):
        hook.counts(hours=745)
    with pytest.raises(ValueError, match=r"overdue=.* is negative"):
        hook.counts(overdue=-SECOND)
    empty = store.hook(table="empty")
    empty.install([])
    assert set(empty.counts().numbers().values()) == {0}
