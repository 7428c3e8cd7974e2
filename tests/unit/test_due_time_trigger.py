from __future__ import annotations

import asyncio
from datetime import datetime, timedelta, timezone

import pytest
from airflow.models.trigger import Trigger
from airflow.triggers.base import TaskSuccessEvent, TriggerEvent
from hypothesis import given
from hypothesis import strategies as st

from airflow_delayed.clock import EXACT
from airflow_delayed.errors import InvalidMessage, NaiveTime
from airflow_delayed.message import UTC, utcnow
from airflow_delayed.triggers.due_time import DueTimeTrigger

START = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


async def fired(trigger):
    return [event async for event in trigger.run()]


class Clock:
    """A clock that sleeping moves, and that is set by as much as soon as one sleeps, which is the worst moment."""

    def __init__(self, *steps):
        self.now = START
        self.sleeps = []
        self.steps = list(steps)
        self.set_to = START

    async def sleep(self, seconds):
        self.sleeps.append(seconds)
        self.now += timedelta(seconds=self.steps.pop(0) if self.steps else 0)
        self.set_to = self.now
        self.now += timedelta(seconds=seconds)

    def trigger(self, moment, **arguments):
        return DueTimeTrigger(moment, clock=lambda: self.now, sleep=self.sleep, **arguments)


def test_last_minute_is_one_exact_sleep():
    clock = Clock()
    moment = START + timedelta(minutes=10, seconds=12.345678)
    assert asyncio.run(fired(clock.trigger(moment))) == [TriggerEvent(moment)]
    assert clock.now == moment
    assert 1 < len(clock.sleeps) < 15
    assert clock.sleeps[-1] <= EXACT


@given(
    st.floats(min_value=-60, max_value=7 * 86_400),
    st.lists(st.floats(min_value=-7200, max_value=7200), max_size=5),
)
def test_clock_that_is_set_makes_it_never_early_and_late_by_one_pause_at_most(seconds, steps):
    clock = Clock(*steps)
    trigger = clock.trigger(START + timedelta(seconds=seconds))
    asyncio.run(fired(trigger))
    assert clock.now >= trigger.moment
    if clock.sleeps:
        left = abs(seconds) + sum(map(abs, steps))
        assert clock.now - max(clock.set_to, trigger.moment) <= timedelta(seconds=max(EXACT, left / 10))


@pytest.mark.parametrize("moment", [START - timedelta(days=1), START, datetime(1, 1, 1, tzinfo=UTC)])
def test_moment_that_is_past_fires_at_once(moment):
    clock = Clock()
    assert asyncio.run(fired(clock.trigger(moment))) == [TriggerEvent(moment)]
    assert clock.sleeps == []


def test_it_ends_the_task_where_asked():
    clock = Clock()
    (event,) = asyncio.run(fired(clock.trigger(START, end_from_trigger=True)))
    assert isinstance(event, TaskSuccessEvent)


def test_real_clock_is_never_early():
    moments = [utcnow() + timedelta(milliseconds=50 + 7 * number) for number in range(20)]

    async def one(moment):
        await fired(DueTimeTrigger(moment))
        return utcnow()

    async def all_of_them():
        return await asyncio.gather(*map(one, moments))

    ends = asyncio.run(all_of_them())
    assert all(end >= moment for end, moment in zip(ends, moments, strict=True))


def stored(arguments):
    return Trigger._decrypt_kwargs(Trigger.encrypt_kwargs(arguments))


def test_goes_through_the_database_and_comes_back_the_same():
    moment = datetime(2026, 3, 1, 13, 0, 0, 123456, tzinfo=timezone(timedelta(hours=1)))
    trigger = DueTimeTrigger(moment, end_from_trigger=True)
    path, arguments = trigger.serialize()
    assert path == f"{DueTimeTrigger.__module__}.{DueTimeTrigger.__qualname__}"
    again = DueTimeTrigger(**stored(arguments))
    assert again.moment == trigger.moment == START + timedelta(microseconds=123456)
    assert again.serialize() == trigger.serialize()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"moment": datetime(2026, 3, 1)}, NaiveTime),
        ({"moment": "2026-03-01T12:00"}, NaiveTime),
        ({"moment": "soon"}, InvalidMessage),
    ],
)
def test_moment_that_is_none_is_refused(arguments, error):
    with pytest.raises(error):
        DueTimeTrigger(**arguments)
