from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delayed.delivery import State
from airflow_delayed.errors import InvalidMessage, LimitExceeded
from airflow_delayed.sqs.queues import (
    compare_delay_queue,
    compare_destination,
    delay_queue_attributes,
    delay_queue_name,
    destination_attributes,
    queue_name,
)


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
def test_names_are_legal_and_stay_as_they_are(make, name, prefix):
    made = make(name, prefix)
    assert re.fullmatch(r"[A-Za-z0-9_-]*(\.fifo)?", made)
    assert make(made, prefix) == made


def test_new_queues_are_as_demanded():
    for compare, attributes in (
        (compare_delay_queue, delay_queue_attributes()),
        (compare_destination, destination_attributes()),
    ):
        (finding,) = compare("q", attributes, "q")
        assert finding.state is State.OK
    assert delay_queue_attributes() == {
        "FifoQueue": "true",
        "DelaySeconds": "900",
        "MessageRetentionPeriod": "1209600",
    }


@pytest.mark.parametrize(
    "setting, text",
    [
        ({"DelaySeconds": "899"}, "queue q DelaySeconds: wanted 900, found 899"),
        (
            {"MessageRetentionPeriod": "345599"},
            "queue q MessageRetentionPeriod: wanted 'at least 345600', found 345599",
        ),
        ({"RedrivePolicy": '{"maxReceiveCount":3}'}, "queue q RedrivePolicy: wanted 'none', found '{"),
    ],
)
def test_each_wrong_setting_of_a_delay_queue_is_named(setting, text):
    (finding,) = compare_delay_queue("q", {**delay_queue_attributes(), **setting}, "orders")
    assert finding.state is State.DIFFERS
    assert finding.destination == "orders"
    assert str(finding).startswith(text)


def test_four_days_of_retention_are_enough():
    (finding,) = compare_delay_queue("q", {**delay_queue_attributes(), "MessageRetentionPeriod": "345600"}, "orders")
    assert finding.state is State.OK


def test_all_wrong_settings_are_named_at_once():
    found = {"DelaySeconds": "0", "MessageRetentionPeriod": "60", "RedrivePolicy": "{}"}
    assert [finding.argument for finding in compare_delay_queue("q", found, "orders")] == [
        "DelaySeconds",
        "MessageRetentionPeriod",
        "RedrivePolicy",
    ]


def test_a_destination_that_forgets_before_a_message_is_due():
    (finding,) = compare_destination("q", {"MessageRetentionPeriod": "60"}, "q")
    assert str(finding) == "queue q MessageRetentionPeriod: wanted 'at least 1800', found 60"
