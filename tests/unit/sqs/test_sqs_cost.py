from __future__ import annotations

from datetime import date, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delayed.sqs import stats
from airflow_delayed.sqs.hops import hop_of
from airflow_delayed.sqs.stats import estimate

YEAR = timedelta(seconds=31_536_000)


def test_a_year_as_the_documentation_counts_it_and_as_it_is():
    year = estimate(YEAR)
    assert year.fifo_formula is not None
    assert (year.fifo_formula.requests, year.fifo_formula.dollars) == (70_080, 0.03504)
    assert year.fifo_single is not None
    assert year.fifo_single.requests == 105_118  # with the deletes, which the formula leaves out
    assert year.fifo_single.dollars == pytest.approx(0.05256, abs=5e-6)
    assert year.stored.requests == 1
    assert year.direct is None
    assert estimate(YEAR, 10).fifo_batched == year.fifo_single  # 10,512 a message


@pytest.mark.parametrize(
    "seconds, rounds, formula, single",
    [
        (901, 1, 2, 4),
        (1800, 1, 4, 4),
        (1801, 2, 4, 7),
        (1925, 2, 4, 7),
        (3600, 3, 8, 10),
        (86_400, 95, 192, 286),
        (30 * 86_400, 2879, 5760, 8638),
    ],
)
def test_requests_of_one_message(seconds, rounds, formula, single):
    found = estimate(timedelta(seconds=seconds))
    assert found.fifo_formula is not None
    assert found.fifo_single is not None
    assert (found.rounds, found.fifo_formula.requests, found.fifo_single.requests) == (rounds, formula, single)


@pytest.mark.parametrize("delay", [0, 1, 900])
def test_up_to_900_s_there_is_only_the_send(delay):
    found = estimate(timedelta(seconds=delay), 1001)
    assert found.direct == found.stored == stats.Prices().cost(standard=101)
    assert (found.stored.requests, found.stored.dollars) == (101, 101 * 0.40 / 1e6)
    assert found.fifo_single is found.fifo_batched is found.fifo_formula is None


def test_a_begun_second_is_a_second():
    assert estimate(timedelta(seconds=900.5)).rounds == 1


@given(seconds=st.integers(901, 10**6))
def test_rounds_are_those_that_a_message_makes(seconds):
    hop, made = hop_of(seconds), 0
    while hop.through_fifo:
        made += 1
        hop = hop_of(hop.delay_seconds - 900)
    assert stats.rounds(seconds) == made


@given(seconds=st.integers(901, 10**8), messages=st.integers(1, 10**6))
def test_batches_save_and_a_store_saves_more(seconds, messages):
    found = estimate(timedelta(seconds=seconds), messages)
    assert found.fifo_single is not None
    assert found.fifo_batched is not None
    assert found.fifo_single.requests == messages * (3 * found.rounds + 1)
    assert found.stored.requests < found.fifo_batched.requests <= found.fifo_single.requests
    assert found.fifo_batched.requests * 10 >= found.fifo_single.requests


@pytest.mark.parametrize("delay, messages", [(-1, 1), (1, -1)])
def test_nothing_negative(delay, messages):
    with pytest.raises(ValueError, match="negative"):
        estimate(timedelta(seconds=delay), messages)


def test_advice_only_where_it_is_worth_it():
    assert stats.advice(0, timedelta(0)) is None
    assert stats.advice(19, 19 * YEAR) is None  # $0.9986
    advice = stats.advice(20, 20 * YEAR)
    assert advice is not None
    assert "35,039 times: 2,102,360 requests ($1.05), or 210,236 ($0.1051) if every batch" in advice
    assert "store_conn_id=) they would need 2 requests (under $0.0001). Prices of 2026-11-21" in advice


def test_an_amount_never_stands_without_the_day_of_its_prices():
    cost = estimate(YEAR, 1000, prices=stats.Prices(standard=4, fifo=5, as_of=date(2027, 1, 31))).fifo_single
    assert str(cost) == "105,118,000 requests ($525.59 at prices of 2027-01-31)"
    assert str(estimate(YEAR).stored) == "1 requests (under $0.0001 at prices of 2026-11-21)"
