from __future__ import annotations

import asyncio
from datetime import datetime, timedelta, timezone

import pytest
from airflow.models.trigger import Trigger
from airflow.triggers.base import TriggerEvent

from airflow_delayed.errors import InvalidMessage, NaiveTime
from airflow_delayed.message import UTC, utcnow
from airflow_delayed.triggers import due_time
from airflow_delayed.triggers.due_time import DueTimeTrigger

START = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


async def fired(trigger):
    return [event async for event in trigger.run()]


class Clock:
    """A clock that sleeping moves, and that may be set while one sleeps."""

    def __init__(self, monkeypatch, set_to=None):
        self.now = START
        self.sleeps = []
        self.set_to = set_to
        monkeypatch.setattr(due_time, "utcnow", lambda: self.now)
        monkeypatch.setattr(due_time.asyncio, "sleep", self.sleep)

    async def sleep(self, seconds):
        self.sleeps.append(seconds)
        self.now += timedelta(seconds=seconds)
        if self.set_to is not None and len(self.sleeps) == 1:
            self.now = self.set_to


def test_last_minute_is_one_exact_sleep(monkeypatch):
    clock = Clock(monkeypatch)
    moment = START + timedelta(minutes=10, seconds=12.345678)
    assert asyncio.run(fired(DueTimeTrigger(moment))) == [TriggerEvent(moment)]
    assert clock.now == moment
    assert clock.sleeps[-1] == pytest.approx(12.345678)


@pytest.mark.parametrize("step", [timedelta(minutes=-30), timedelta(minutes=30)])
def test_clock_that_was_set_makes_it_neither_early_nor_an_hour_late(monkeypatch, step):
    moment = START + timedelta(hours=1)
    clock = Clock(monkeypatch, set_to=START + step)
    asyncio.run(fired(DueTimeTrigger(moment)))
    assert timedelta(0) <= clock.now - moment <= timedelta(seconds=due_time.LOOK_AGAIN)


def test_sleep_that_ends_early_does_not_fire(monkeypatch):
    clock = Clock(monkeypatch, set_to=START + timedelta(seconds=4.999))
    moment = START + timedelta(seconds=5)
    asyncio.run(fired(DueTimeTrigger(moment)))
    assert len(clock.sleeps) == 2
    assert clock.now >= moment


def test_moment_that_is_past_fires_at_once(monkeypatch):
    clock = Clock(monkeypatch)
    assert asyncio.run(fired(DueTimeTrigger(START - timedelta(days=1)))) != []
    assert clock.sleeps == []


def test_real_clock_is_never_early():
    moments = [utcnow() + timedelta(milliseconds=50 + 7 * number) for number in range(20)]

    async def one(moment):
        await fired(DueTimeTrigger(moment))
        return utcnow()

    async def all_of_them():
        return await asyncio.gather(*map(one, moments))

    ends = asyncio.run(all_of_them())
    assert all(end >= moment for end, moment in zip(ends, moments, strict=True))


def test_goes_through_the_database_and_comes_back_the_same():
    trigger = DueTimeTrigger(datetime(2026, 3, 1, 13, 0, 0, 123456, tzinfo=timezone(timedelta(hours=1))))
    path, arguments = trigger.serialize()
    assert path == f"{DueTimeTrigger.__module__}.{DueTimeTrigger.__qualname__}"
    kept = Trigger._decrypt_kwargs(Trigger.encrypt_kwargs(arguments))
    assert DueTimeTrigger(**kept).moment == trigger.moment == START + timedelta(microseconds=123456)


@pytest.mark.parametrize(
    ("moment", "error"), [(datetime(2026, 3, 1), NaiveTime), ("2026-03-01", NaiveTime), ("soon", InvalidMessage)]
)
def test_moment_without_a_zone_is_refused(moment, error):
    with pytest.raises(error):
        DueTimeTrigger(moment)
