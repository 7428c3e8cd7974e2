from __future__ import annotations

import json
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delayed.sqs.stats import CycleCounts, billed


@pytest.mark.parametrize("size, requests", [(0, 1), (1, 1), (65_536, 1), (65_537, 2), (1_048_576, 16)])
def test_sqs_bills_each_64_kib(size, requests):
    assert billed(size) == requests


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=300))
def test_lateness_is_told_to_two_digits_and_never_too_small(lates):
    counts = CycleCounts()
    for late in lates:
        counts.note_late(late)
    exact = sorted(lates)[-(-len(lates) * 99 // 100) - 1] / 1000
    assert exact <= counts.p99() <= exact * 1.1 + 0.1
    assert counts.summary()["late_max"] == max(lates) / 1000
    assert len(counts.late) < 1000


def test_how_many_were_too_late():
    counts = CycleCounts()
    for late in (0, 100, 1_999, 2_000, 2_001, 60_000):
        counts.note_late(late)
    assert counts.later_than(timedelta(seconds=2)) == 2
    assert counts.later_than(timedelta(0)) == 5


@given(
    st.builds(CycleCounts, requeued=st.integers(0), delivered=st.integers(0), oldest_seconds=st.integers(0)),
    st.lists(st.integers(0, 10**6)),
)
def test_a_state_is_read_back(counts, lates):
    for late in lates:
        counts.note_late(late)
    state = json.loads(json.dumps(counts.to_json()))
    assert CycleCounts.from_json(state) == counts
    assert CycleCounts.from_json({**state, "of a later version": 1}) == counts
    assert CycleCounts.from_json({}) == CycleCounts()


def test_what_two_passes_did_together():
    one, other = (
        CycleCounts(requeued=1, delivered=2, oldest_seconds=900),
        CycleCounts(delivered=3, failed=1, oldest_seconds=950),
    )
    other.note_late(700)
    one.merge(other)
    assert (one.requeued, one.delivered, one.failed, one.oldest_seconds, one.moved) == (1, 5, 1, 950, 6)
    assert "5 delivered" in str(one)
    assert "0.7 s at most" in str(one)
