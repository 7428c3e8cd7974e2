"""When a dispatcher that stays makes its passes, on a clock of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delayed.store.dispatch.loop import LEASED_SLEEP, PASS_EVERY, POLL, DispatchLoop
from airflow_delayed.store.dispatch.report import BreakerTripped, DispatchReport

#: How long a look or a pass takes, in seconds.
STEP = 0.00001


@dataclass
class World:
    """A store in which messages are stored at a time and due at another, its dispatcher, and its sleep."""

    #: (stored at, due at), in seconds.
    messages: Sequence[tuple[float, float]]
    now: float = 0.0
    handed: dict[int, float] = field(default_factory=dict)
    passes: list[float] = field(default_factory=list)
    looks: int = 0
    closed: list[str] = field(default_factory=list)
    unavailable: bool = False
    idle: float | None = None
    stopped: bool = False

    def _there(self) -> list[int]:
        return [
            number
            for number, (stored, _) in enumerate(self.messages)
            if stored <= self.now and number not in self.handed
        ]

    # the dispatcher

    def once(self, most: float | None) -> DispatchReport:
        self.passes.append(self.now)
        self.now += STEP
        ready = [number for number in self._there() if self.messages[number][1] <= self.now and most != 0]
        self.handed.update(dict.fromkeys(ready, self.now))
        self.idle = None if ready else self.now
        return DispatchReport()

    def next_due(self) -> timedelta | None:
        self.looks += 1
        self.now += STEP
        dues = [self.messages[number][1] for number in self._there()]
        if not dues:
            return None
        # as the real one: what the last pass could have got and did not is leased by others
        leased = self.idle is not None and min(dues) <= self.idle
        return max(timedelta(seconds=min(dues) - self.now), LEASED_SLEEP if leased else timedelta(0))

    def finish(self) -> DispatchReport:
        return DispatchReport(dispatched=len(self.handed))

    def close(self) -> None:
        self.closed.append("closed")

    @property
    def sleep(self) -> World:
        return self

    # its sleep

    longest = POLL

    def wait(self, seconds: float) -> bool:
        assert seconds >= 0
        self.now = max(self.now + seconds, self.now + 1e-6)
        return False

    def wake(self) -> None:
        raise AssertionError("nothing wakes it but the dispatcher")


def stay(world: World, until: float | Literal["empty"] | None) -> DispatchLoop:
    return DispatchLoop(world, until, monotonic=lambda: world.now)


def at(times: dict[int, float]) -> object:
    return pytest.approx(times, abs=0.001)


def test_it_sleeps_exactly_until_each_message():
    world = World([(0, 5), (0, 7.25), (0, 7.25)])
    report = stay(world, "empty").run()
    assert report is not None
    assert report.dispatched == 3
    assert world.handed == at({0: 5, 1: 7.25, 2: 7.25})
    assert len(world.passes) <= 4
    assert world.closed == ["closed"]


def test_it_looks_every_second_for_an_earlier_message():
    world = World([(0, 120), (3.5, 8)])
    stay(world, 130).run()
    assert world.handed == at({0: 120, 1: 8})
    assert world.looks < 150


def test_nothing_to_do_is_little_work_and_yet_a_sign_of_life():
    world = World([])
    stay(world, 3600).run()
    assert len(world.passes) == pytest.approx(3600 / PASS_EVERY, abs=2)
    assert world.looks <= 3600 / POLL + 2 * len(world.passes)


def test_it_ends_in_time_whatever_is_left():
    world = World([(0, 500)])
    stay(world, 90).run()
    assert world.now == pytest.approx(90, abs=0.001)
    assert world.handed == {}
    assert world.closed == ["closed"]


def test_a_connection_that_is_given_up_ends_it():
    world = World([(0, 500)], unavailable=True)
    stay(world, 90).run()
    assert world.now < 1


def test_what_is_stopped_before_it_begins_does_nothing():
    world = World([(0, 0)], stopped=True)
    assert stay(world, "empty").run() is None
    assert world.passes == []
    assert world.closed == ["closed"]


def test_one_pass_leaves_what_is_due_later():
    world = World([(0, 0), (0, 5)])
    stay(world, None).run()
    assert (world.handed, len(world.passes)) == (at({0: 0}), 1)


def test_an_error_closes_all(monkeypatch):
    world = World([(0, 0)])

    def fail(most: float) -> DispatchReport:
        raise BreakerTripped("away")

    monkeypatch.setattr(world, "once", fail)
    with pytest.raises(BreakerTripped):
        stay(world, "empty").run()
    assert world.closed == ["closed"]


moments = st.integers(0, 300_000).map(lambda number: number / 1000)


@given(messages=st.lists(st.tuples(moments, moments), max_size=12))
def test_none_is_early_and_none_later_than_it_must_be(messages: list[tuple[float, float]]):
    world = World(messages)
    stay(world, 400).run()
    assert sorted(world.handed) == list(range(len(messages)))
    # what is stored meanwhile may be due at once; where nothing tells of it, it is found at the next look
    allowed = POLL
    for number, (stored, due) in enumerate(messages):
        possible = max(stored, due)
        assert possible <= world.handed[number] <= possible + allowed + 0.001
    # one look or two for each thing that happens, and for each second in which nothing does
    assert world.looks <= 3 * len(messages) + 420
