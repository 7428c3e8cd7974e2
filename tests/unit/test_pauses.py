from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from airflow_delayed.clock import EXACT, LONGEST, pause

YEAR = 365 * 86_400.0


@given(st.floats(min_value=1e-6, max_value=100 * YEAR))
def test_a_pause_never_goes_past_the_end_nor_is_it_endless(left):
    assert 0 < pause(left) <= left
    assert pause(left) <= LONGEST


@given(st.floats(min_value=1e-6, max_value=EXACT))
def test_the_last_minute_is_one_exact_sleep(left):
    assert pause(left) == left


@given(st.floats(min_value=EXACT, max_value=YEAR))
def test_a_clock_that_is_set_meanwhile_is_seen_after_a_tenth_of_what_was_left(left):
    assert pause(left) <= max(EXACT, left / 10)


@given(st.floats(min_value=1, max_value=3 * YEAR))
def test_looks_are_few(left):
    looks, rest = 0, left
    while rest > 0:
        rest -= pause(rest)
        looks += 1
    assert looks <= left / LONGEST + 60
