from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from airflow_delayed.errors import InvalidMessage, LimitExceeded
from airflow_delayed.sqs.queues import QueueAddress, delay_queue_name, queue_address, queue_name


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


@pytest.mark.parametrize(
    "destination, region, account",
    [
        ("arn:aws:sqs:eu-west-1:123456789012:reminders", "eu-west-1", "123456789012"),
        ("arn:aws-us-gov:sqs:us-gov-west-1:123456789012:reminders", "us-gov-west-1", "123456789012"),
        ("https://sqs.eu-west-1.amazonaws.com/123456789012/reminders", "eu-west-1", "123456789012"),
        ("https://eu-west-1.queue.amazonaws.com/123456789012/reminders", "eu-west-1", "123456789012"),
        ("https://queue.amazonaws.com/123456789012/reminders", None, "123456789012"),
        ("sqs.cn-north-1.amazonaws.com.cn/123456789012/reminders", "cn-north-1", "123456789012"),
        ("https://vpce-0a-1b.sqs.us-east-1.vpce.amazonaws.com/123456789012/reminders", "us-east-1", "123456789012"),
        ("http://localhost:4566/queue/us-east-1/000000000000/reminders", "us-east-1", "000000000000"),
        ("http://127.0.0.1:9324/000000000000/reminders", None, "000000000000"),
    ],
)
def test_a_url_or_arn_is_that_queue(destination, region, account):
    assert queue_address(destination) == QueueAddress(region, account, "reminders")
    # the name is whole, so it has no prefix before it
    assert queue_name(destination, "dev-") == "reminders"
    assert delay_queue_name(destination, "dev-") == "reminders-delay.fifo"


@pytest.mark.parametrize("name", ["orders", "a/b", "eu-west-1/123456789012/orders", "arn", "sqs:orders"])
def test_a_name_is_no_address(name):
    assert queue_address(name) is None


@pytest.mark.parametrize(
    "destination",
    [
        "arn:aws:sns:eu-west-1:123456789012:reminders",
        "ARN:aws:sqs:eu-west-1:123456789012:",
        "https://sqs.eu-west-1.amazonaws.com/",
        "https://user:secret@sqs.eu-west-1.amazonaws.com/123456789012/reminders",
        "https://sqs.eu-west-1.amazonaws.com/123456789012/reminders?Action=SendMessage",
        "amqp://rabbit1/reminders",
    ],
)
def test_another_address_is_refused(destination):
    for make in (queue_name, delay_queue_name):
        with pytest.raises(
            InvalidMessage, match=r"destination: must be .*its URL \(https://sqs\.<region>.*arn:aws:sqs:"
        ):
            make(destination)


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
