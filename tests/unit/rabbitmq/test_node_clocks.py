"""How the clocks of nodes are compared, from readings alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delayed.rabbitmq.node_clocks import ClockReading, compare


def exact(node: str, ahead: float) -> ClockReading:
    """A reading by ``connected_at``: 20 ms to connect."""
    return ClockReading.of(node, 1000 + ahead, 0.001, asked=99.99, answered=100.01)


def by_date(node: str, ahead: float) -> ClockReading:
    """A reading by the header ``Date`` of a node whose clock is so far ahead."""
    return ClockReading.of(node, int(1000 + ahead), 2.0, asked=99.99, answered=100.01)


@pytest.mark.parametrize(
    "readings, found",
    [
        ([exact("a", 0), exact("b", 0)], None),
        ([exact("a", 0), exact("b", 0.9)], None),
        ([exact("a", 0), exact("b", 12)], "b is at least 12.0 s ahead of a"),
        ([exact("a", 1.2), exact("b", 0), exact("c", 0.1)], "a is at least 1.2 s ahead of b"),
        # behind is as bad as ahead
        ([exact("a", 0), exact("b", 0), exact("c", -5)], "is at least 5.0 s ahead of c"),
        ([by_date("a", 0.5), by_date("b", 2.5)], None),
        ([by_date("a", 0.5), by_date("b", 12.5)], "b is at least 10.0 s ahead of a"),
        # of two readings of a node the more exact one counts
        ([by_date("a", 3), exact("a", 0), exact("b", 0)], None),
        ([exact("a", 0), by_date("b", 1.8), exact("b", 1.8)], "b is at least 1.8 s ahead of a"),
        ([exact("a", 0), by_date("b", 12)], "b is at least 12.0 s ahead of a"),
        ([exact("a", 0)], None),
        ([], None),
    ],
)
def test_a_difference_is_reported_if_it_is_certain(readings: list[ClockReading], found: str | None) -> None:
    texts = [str(finding.found) for finding in compare(readings)]
    if found is None:
        assert texts == []
    else:
        (text,) = texts
        assert found in text


@given(
    st.lists(st.tuples(st.floats(0, 0.999), st.floats(0, 1), st.floats(0, 2)), min_size=2, max_size=5),
    st.floats(0, 1),
)
def test_clocks_that_agree_to_a_second_are_never_reported(
    answers: list[tuple[float, float, float]], difference: float
) -> None:
    readings = []
    for number, (fraction, stale, took) in enumerate(answers):
        # by the reference clock it is 100 when the node looks, somewhere between the question and the answer
        clock = 5000 + fraction + (difference if number == 0 else 0)
        readings.append(
            ClockReading.of(f"node{number}", int(clock - stale), 2.0, asked=100 - took / 2, answered=100 + took)
        )
    apart = [5000 + fraction + (difference if number == 0 else 0) for number, (fraction, _, _) in enumerate(answers)]
    if max(apart) - min(apart) <= 1:
        assert list(compare(readings)) == []
