from __future__ import annotations

from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delayed.sqs.hops import BrokerClock, hop_of, seconds_until

START = 1_800_000_000_000  # milliseconds


class Time:
    """The broker's milliseconds, and a machine's seconds, which run as fast."""

    def __init__(self, ahead: int = 0) -> None:
        self.broker = START + ahead
        self.seconds = 1000.0

    def passes(self, milliseconds: float) -> None:
        self.broker += milliseconds
        self.seconds += milliseconds / 1000


def date(milliseconds: float) -> dict[str, str]:
    return {"date": formatdate(milliseconds // 1000, usegmt=True)}


def made() -> tuple[Time, BrokerClock]:
    time = Time()
    return time, BrokerClock(lambda: time.seconds)


def test_it_does_not_know_before_an_answer():
    _, clock = made()
    assert clock.now_ms() is None


@pytest.mark.parametrize("headers", [{}, {"date": ""}, {"date": "yesterday"}, {"date": "Sat, 21 Nov 2026 14:30:31"}])
def test_an_answer_without_a_date_says_nothing(headers):
    _, clock = made()
    clock.heard(clock.tick(), headers, [START])
    assert clock.now_ms() is None


def test_a_date_is_cut_off_to_the_second():
    time, clock = made()
    time.passes(999)
    clock.heard(clock.tick(), date(time.broker))
    assert clock.now_ms() == START


def test_what_was_just_received_is_exact():
    time, clock = made()
    time.passes(999)
    clock.heard(clock.tick(), date(time.broker), [int(time.broker)])
    assert clock.now_ms() == START + 999


def test_a_moment_that_the_date_denies_does_not_count():
    time, clock = made()
    clock.heard(clock.tick(), date(time.broker), [START + 1_001, START + 3_600_000])
    assert clock.now_ms() == START


def test_the_answer_to_a_long_wait_may_have_the_date_of_its_beginning():
    time, clock = made()
    began = clock.tick()
    headers = date(time.broker)
    time.passes(20_000)
    clock.heard(began, headers, [int(time.broker) - 3])
    assert clock.now_ms() == time.broker - 3


def test_several_answers_tell_more_than_one():
    time, clock = made()
    for _ in range(50):
        clock.heard(clock.tick(), date(time.broker))
        time.passes(119)
    assert time.broker - 120 <= clock.now_ms() <= time.broker


def test_a_clock_that_was_set_back_is_believed():
    time, clock = made()
    clock.heard(clock.tick(), date(time.broker))
    time.passes(1000)
    clock.heard(clock.tick(), date(time.broker - 3_600_000))
    assert clock.now_ms() == time.broker - 3_600_000


def test_a_clock_that_was_set_forward_is_believed():
    time, clock = made()
    clock.heard(clock.tick(), date(time.broker))
    clock.heard(clock.tick(), date(time.broker + 3_600_000))
    assert clock.now_ms() == START + 3_600_000


answers = st.lists(
    st.tuples(
        st.integers(0, 25_000),  # how long the request took
        st.integers(0, 25_000),  # and how long before its end the date was made
        st.booleans(),  # whether it brought a message
        st.integers(0, 900_000),  # the pause after it
    ),
    min_size=1,
    max_size=30,
)


def hear(time: Time, clock: BrokerClock, took: int, before: int, brought: bool) -> None:
    began = clock.tick()
    time.passes(took)
    clock.heard(began, date(time.broker - min(before, took)), [int(time.broker)] if brought else [])


@given(answers=answers, phase=st.integers(0, 999), speed=st.floats(-1e-4, 1e-4))
def test_it_is_never_ahead_of_the_broker(answers, phase, speed):
    time = Time(phase)
    clock = BrokerClock(lambda: time.seconds * (1 + speed))
    for took, before, brought, pause in answers:
        hear(time, clock, took, before, brought)
        assert clock.now_ms() <= time.broker
        time.passes(pause)
        assert clock.now_ms() <= time.broker


@given(
    delay_us=st.integers(0, 3 * 86_400_000_000),
    phase=st.integers(0, 999),
    rounds=st.lists(st.tuples(st.integers(0, 3_000), st.integers(0, 500), st.booleans()), min_size=60, max_size=60),
)
def test_never_early_and_at_most_two_seconds_late_however_often_it_goes_round(delay_us, phase, rounds):
    """Each round is 900 s and what it takes until the message is received, and then until it is sent on."""
    time = Time(phase)
    clock = BrokerClock(lambda: time.seconds)
    due_us = time.broker * 1000 + delay_us
    hop = hop_of(seconds_until(due_us, time.broker))
    passed = 0
    while hop.through_fifo:
        until_received, until_sent, first = rounds[passed % len(rounds)]
        time.passes(900_000)
        time.passes(until_received)
        began = clock.tick()
        time.passes(5)
        clock.heard(began, date(time.broker), [int(time.broker)] if first else [])
        hop = hop_of(seconds_until(due_us, clock.now_ms()))
        time.passes(until_sent)
        passed += 1
    late_us = time.broker * 1000 + hop.delay_seconds * 1_000_000 - due_us
    assert late_us >= 0
    # a pump that comes late to what is due within its pause is late by that; nothing else adds up
    after_due = max(0, time.broker * 1000 - due_us) if passed else 0
    assert late_us <= max(2_000_000 + (500_000 if passed else 0), after_due + 1_000_000)
