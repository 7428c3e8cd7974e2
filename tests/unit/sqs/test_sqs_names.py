from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from airflow_delayed.errors import InvalidMessage, LimitExceeded
from airflow_delayed.sqs.queues import delay_queue_name, queue_name


@pytest.mark.parametrize(
    "name, prefix, expected",
    [
        ("orders", "", "orders"),
        ("Sales.Orders", "", "Sales-Orders"),
        ("orders", "dev-", "dev-orders"),
        ("dev-orders", "dev-", "dev-orders"),  # not twice
        ("Dev-orders", "dev-", "dev-Dev-orders"),  # letter by letter
        ("orders", "my.team.", "my-team-orders"),
        ("orders.fifo", "", "orders.fifo"),
        ("a.fifo.b", "", "a-fifo-b"),
        ("a_b-c/d e", "", "a_b-c-d-e"),
        ("\U0001f600", "", "--"),  # two UTF-16 units for NServiceBus
        ("-fifo0", ".fifo", "-fifo0"),  # a finished name, whose prefix ends as a FIFO queue's name does
        ("a-b.fifo", "a.b.", "a-b.fifo"),
        ("a" * 80, "", "a" * 80),
    ],
)
def test_queue_name(name, prefix, expected):
    assert queue_name(name, prefix) == expected


@pytest.mark.parametrize(
    "name, prefix, expected",
    [
        ("orders", "", "orders-delay.fifo"),
        ("Sales.Orders", "dev-", "dev-Sales-Orders-delay.fifo"),
        ("dev-orders", "dev-", "dev-orders-delay.fifo"),
        ("a" * 69, "", "a" * 69 + "-delay.fifo"),
    ],
)
def test_delay_queue_name(name, prefix, expected):
    assert delay_queue_name(name, prefix) == expected


@pytest.mark.parametrize("name, prefix", [("a" * 81, ""), ("a" * 80, "b")])
def test_a_name_over_80_characters_is_refused(name, prefix):
    with pytest.raises(LimitExceeded, match="80"):
        queue_name(name, prefix)


def test_a_delay_queue_needs_a_shorter_name():
    assert queue_name("a" * 70)
    with pytest.raises(LimitExceeded, match="80"):
        delay_queue_name("a" * 70)


@pytest.mark.parametrize("name", ["", " ", "\t"])
def test_a_blank_name_is_refused(name):
    with pytest.raises(InvalidMessage, match="blank"):
        queue_name(name, "prefix-")
    with pytest.raises(InvalidMessage, match="blank"):
        delay_queue_name(name, "prefix-")


@pytest.mark.parametrize("make", [queue_name, delay_queue_name])
@given(name=st.text(min_size=1, max_size=20).filter(str.strip), prefix=st.text(max_size=10))
@example(name="0", prefix=".fifo")
@example(name="fifo", prefix="a.b.")
def test_names_are_legal_and_stay_as_they_are(make, name, prefix):
    made = make(name, prefix)
    assert re.fullmatch(r"[A-Za-z0-9_-]*(\.fifo)?", made)
    assert make(made, prefix) == made
