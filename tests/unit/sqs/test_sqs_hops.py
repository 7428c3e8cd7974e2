from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delayed.errors import LimitExceeded
from airflow_delayed.sqs.hops import LONGEST_DELAY, Hop, hop_of, remaining_seconds


@pytest.mark.parametrize(
    "delay, hop",
    [
        (-5, Hop(0, False)),
        (0, Hop(0, False)),
        (1, Hop(1, False)),
        (845, Hop(845, False)),  # the seeds' first example
        (900, Hop(900, False)),
        (901, Hop(901, True)),
        (1925, Hop(1925, True)),  # and the second
        (LONGEST_DELAY, Hop(LONGEST_DELAY, True)),
    ],
)
def test_where_a_message_goes(delay, hop):
    assert hop_of(delay) == hop


def test_more_than_68_years_are_refused():
    with pytest.raises(LimitExceeded, match="68 years"):
        hop_of(LONGEST_DELAY + 1)


def _left(delay: int, elapsed_ms: int) -> int:
    return remaining_seconds(delay, sent_ms=5_000, first_received_ms=5_000 + elapsed_ms, receive_count=1, now_ms=0)


def test_the_example_of_1925_seconds():
    assert _left(1925, 900_000) == 1025
    assert _left(1025, 900_000) == 125
    assert hop_of(125) == Hop(125, False)


@pytest.mark.parametrize("elapsed_ms, left", [(900_999, 1), (900_000, 1), (901_000, 0), (2_000_000, 0), (899_999, 2)])
def test_elapsed_time_is_rounded_down(elapsed_ms, left):
    assert _left(901, elapsed_ms) == left


@pytest.mark.parametrize("count, left", [(0, 1025), (1, 1025), (2, 125), (9, 125)])
def test_the_clients_clock_counts_only_after_a_first_receive(count, left):
    assert remaining_seconds(1925, sent_ms=0, first_received_ms=900_000, receive_count=count, now_ms=1_800_000) == left


def test_a_clients_clock_that_is_behind_adds_nothing():
    assert remaining_seconds(1925, sent_ms=10_000, first_received_ms=910_000, receive_count=2, now_ms=0) == 1925


@given(
    delay=st.integers(0, 40 * 900),
    waits=st.lists(st.tuples(st.integers(900_000, 960_000), st.integers(0, 5_000)), min_size=60, max_size=60),
)
def test_all_waits_together_are_never_shorter_than_the_delay(delay, waits):
    """Each round waits 900 s or more in the delay queue, and some more until what was received is sent on."""
    waited_ms, rounds, hop = 0, 0, hop_of(delay)
    while hop.through_fifo:
        in_queue, until_sent = waits[rounds]
        hop = hop_of(_left(hop.delay_seconds, in_queue))
        waited_ms += in_queue + until_sent
        rounds += 1
    waited_ms += hop.delay_seconds * 1000
    assert waited_ms >= delay * 1000
    # a round is late by less than a second, and by what it took to send on; the last one by the time past the end
    spent = sum(until_sent + 1000 for _, until_sent in waits[:rounds])
    assert waited_ms <= delay * 1000 + spent + 60_000
