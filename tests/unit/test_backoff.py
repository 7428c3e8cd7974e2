"""How sleeps between two tries grow."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from airflow_delayed.clock import Backoff, next_sleep

DAY = 86_400.0


@given(st.integers(1, 10_000), st.floats(0.001, 10_000 * DAY), st.floats(1, 1e13))
def test_no_sleep_is_longer_than_the_longest_whatever_the_first_one_is(failures, first, longest):
    seconds = next_sleep(failures, first=first, longest=longest, chance=lambda: 0)
    assert min(first, longest) <= seconds <= longest
    assert next_sleep(10_000, first=first, longest=longest, chance=lambda: 0) == longest


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_sleeps_double_up_to_the_longest_and_chance_takes_at_most_half(failures, chance):
    full = min(300, 2 ** min(failures - 1, 20))
    assert full / 2 <= next_sleep(failures, first=1, longest=300, chance=lambda: chance) <= full
    assert next_sleep(failures, first=1, longest=300, chance=lambda: 0) == full


def test_those_that_failed_together_do_not_come_back_together():
    assert len({next_sleep(3, first=1, longest=300) for _ in range(10)}) > 1


def test_sleeps_begin_with_the_shortest_when_it_worked():
    backoff = Backoff(first=1, longest=100)
    assert 0.5 <= backoff.next() <= 1
    assert 1 <= backoff.next() <= 2
    assert 2 <= backoff.next() <= 4
    backoff.reset()
    assert 0.5 <= backoff.next() <= 1
