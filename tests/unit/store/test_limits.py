"""When a breaker trips, and what it says; how rates are limited."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from hypothesis import given
from hypothesis import strategies as st

from airflow_delayed.store.dispatch.limits import RATE_WINDOW, Breaker, RateBreaker, RateLimit

SECOND = timedelta(seconds=1)
START = datetime(2030, 1, 1, tzinfo=timezone.utc)


class Time:
    """Seconds that a test lets pass."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def now(self) -> datetime:
        return START + timedelta(seconds=self.seconds)


def breaker(time: Time, limit: timedelta = 30 * SECOND) -> Breaker:
    return Breaker("reading", limit, time, time.now)


def test_a_breaker_without_time_trips_at_once():
    assert breaker(Time(), timedelta(0)).failure("once")


@given(st.lists(st.tuples(st.floats(0, 40), st.booleans()), min_size=1))
def test_a_breaker_is_tripped_exactly_when_nothing_worked_for_its_time(events):
    time, since = Time(), None
    one = breaker(time)
    for after, worked in events:
        time.seconds += after
        if worked:
            one.success()
            since = None
        else:
            since = time.seconds if since is None else since
            assert one.failure("x") == (time.seconds - since >= 30)


@given(
    events=st.lists(st.tuples(st.floats(0, 20), st.integers(1, 20)), min_size=1),
    rate=st.sampled_from([0.5, 1, 2]),
)
def test_a_rate_breaker_trips_at_more_than_its_rate_over_half_a_minute(events, rate):
    time, seen, tripped = Time(), [], False
    one = RateBreaker("noting", rate, time, time.now)
    for after, count in events:
        time.seconds += after
        seen.append((time.seconds, count))
        tripped |= sum(n for at, n in seen if time.seconds - at <= RATE_WINDOW) > 30 * rate
        assert one.failure("x", count) == tripped == one.tripped


def test_a_rate_breaker_says_what_and_when():
    time = Time()
    one = RateBreaker("noting failures", 1, time, time.now)
    assert not one.failure("no space", 30)
    time.seconds = 5
    assert one.failure("still no space")
    assert str(one) == (
        "noting failures has failed more often than 1 times a second by 2030-01-01 00:00:05 UTC, last with: still no"
        " space"
    )


@given(
    rate=st.floats(0.1, 1000),
    steps=st.lists(st.tuples(st.floats(0, 5), st.integers(1, 2000)), min_size=1, max_size=50),
)
def test_a_bucket_never_gives_more_than_its_rate_over_any_stretch(rate, steps):
    time = Time()
    bucket = RateLimit(rate, time)
    taken: list[tuple[float, int]] = []
    for after, wanted in steps:
        time.seconds += after
        got = bucket.take(wanted)
        assert 0 <= got <= wanted
        taken.append((time.seconds, got))
        for n, (began, _) in enumerate(taken):
            most = max(1.0, rate) + rate * (time.seconds - began)
            assert sum(count for _, count in taken[n:]) <= most + 1e-6 * most


@given(rate=st.floats(0.1, 1000))
def test_after_its_wait_a_bucket_has_what_a_claim_is_worth_while_for(rate):
    time = Time()
    bucket = RateLimit(rate, time)
    while bucket.take(1000):
        pass
    time.seconds += bucket.wait + 1e-5
    assert bucket.take(1000) == int(max(1.0, rate / 10))


def test_without_a_rate_nothing_is_waited_for():
    none = RateLimit(None, Time())
    none.give_back(10)
    assert (none.limits, none.take(7), none.wait) == (False, 7, 0)


def test_what_was_not_used_can_be_used_later():
    bucket = RateLimit(10, Time())
    assert bucket.take(10) == 10
    bucket.give_back(4)
    assert bucket.take(10) == 4
