"""The bucket of a destination's rate: never more than the rate and one second's burst, however it is asked."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delayed.store import rates
from airflow_delayed.store.rates import DestinationRate

NOON = datetime(2030, 1, 1, 12, tzinfo=timezone.utc)
#: How many microseconds pass, and how many messages are wanted then.
ASKED = st.lists(st.tuples(st.integers(0, 3_000_000), st.integers(1, 5_000)), max_size=30)


@given(per_second=st.floats(rates.LEAST_RATE, 10_000), asked=ASKED)
def test_no_stretch_of_time_has_more_than_its_rate_and_one_burst(per_second, asked):
    rate = DestinationRate(destination="sms", per_second=per_second, empty_at=NOON - timedelta(days=1))
    now, taken = NOON, [(NOON, 0)]
    for microseconds, wanted in asked:
        now += timedelta(microseconds=microseconds)
        count = min(wanted, rate.tokens(now))
        rate = rate.taken(count, now) if count else rate
        taken.append((now, count))
    for first, (begin, _) in enumerate(taken):
        total = 0
        for moment, count in taken[first:]:
            total += count
            assert total <= per_second * (moment - begin).total_seconds() + max(1, per_second) + 1e-6


@pytest.mark.parametrize("per_second", [rates.LEAST_RATE, 0.3, 1, 3, 7.5, 50, 1234, rates.MOST_RATE])
def test_the_rate_is_reached(per_second):
    """Who asks as soon as the bucket is ready gets all that the rate allows."""
    rate = DestinationRate(destination="sms", per_second=per_second, empty_at=NOON)
    count, now = 0, NOON
    for _ in range(100):
        assert not rate.tokens(now)
        now = rate.ready_at
        tokens = rate.tokens(now)
        assert tokens
        rate, count = rate.taken(tokens, now), count + tokens
    assert count >= 0.99 * per_second * (now - NOON).total_seconds() - 1


@pytest.mark.parametrize(
    "wanted, reason",
    [
        ({"sms": 0}, "the rate 0 of destination 'sms' must be from 0.000001 to 1,000,000"),
        ({"sms": -1}, "the rate -1 of"),
        ({"sms": float("nan")}, "the rate nan of"),
        ({"sms": float("inf")}, "the rate inf of"),
        ({"sms": 2e6}, "destination 'sms'"),
        ({"": 1}, "destination '': a name must have 1 to 200 characters"),
        ({"x" * 201: 1}, "must have 1 to 200 characters"),
        ({"a\0": None}, "without null"),
    ],
)
def test_what_is_no_rate_is_an_error_that_names_it(wanted, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        rates.check(wanted)
