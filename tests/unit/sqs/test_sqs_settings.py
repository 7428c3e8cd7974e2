"""What a user wants of a queue, and what differs from it."""

from __future__ import annotations

import json
import re
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delayed.delivery import State
from airflow_delayed.sqs.settings import (
    QueueSettings,
    compare_dead_letter_queue,
    compare_delay_queue,
    compare_destination,
    delay_queue_attributes,
    destination_attributes,
)

NONE = QueueSettings()
KEY = "1234abcd-12ab-34cd-56ef-1234567890ab"
ARN = f"arn:aws:kms:us-east-1:111122223333:key/{KEY}"


@pytest.mark.parametrize(
    "settings, text",
    [
        ({"retention": 1799}, r"retention=1,799 s must be 1,800 to 1,209,600 s"),
        ({"retention": timedelta(days=14, seconds=1)}, "1,209,600"),
        ({"visibility_timeout": timedelta(hours=12, seconds=1)}, "0 to 43,200 s"),
        ({"visibility_timeout": -1}, "0 to 43,200 s"),
        ({"receive_wait": 21}, "0 to 20 s"),
        ({"delay": 901}, "0 to 900 s"),
        ({"delay": timedelta(seconds=0.5)}, "fraction of a second"),
        ({"delay": True}, "timedelta or whole seconds"),
        ({"delay": "900"}, "timedelta or whole seconds"),
        ({"dead_letter_queue": "dead"}, "go together"),
        ({"max_receive_count": 3}, "go together"),
        ({"dead_letter_queue": "dead", "max_receive_count": 0}, "1 to 1,000"),
        ({"dead_letter_queue": "dead", "max_receive_count": 1001}, "1 to 1,000"),
        ({"dead_letter_queue": "dead.fifo", "max_receive_count": 3}, "must be a standard one"),
        ({"encryption": " "}, "blank"),
    ],
)
def test_what_sqs_would_not_take_is_refused(settings, text):
    with pytest.raises(ValueError, match=text):
        QueueSettings(**settings)


@given(
    retention=st.none() | st.integers(1800, 1_209_600),
    visibility=st.none() | st.integers(0, 43_200),
    wait=st.none() | st.integers(0, 20),
    delay=st.none() | st.integers(0, 900).map(lambda seconds: timedelta(seconds=seconds)),
    encryption=st.sampled_from([None, "sse-sqs", "alias/orders"]),
)
def test_a_new_queue_is_as_wanted(retention, visibility, wait, delay, encryption):
    settings = QueueSettings(
        retention=retention,
        visibility_timeout=visibility,
        receive_wait=wait,
        delay=delay,
        encryption=encryption,
        dead_letter_queue="dead",
        max_receive_count=3,
    )
    target = "arn:aws:sqs:us-east-1:1:dead"
    made = destination_attributes(settings, target)
    # SQS adds its defaults
    found = {"VisibilityTimeout": "30", "DelaySeconds": "0", "ReceiveMessageWaitTimeSeconds": "0", **made}
    assert compare_destination(found, settings, dead_letter="dead", target=target) == []
    assert compare_destination(found, NONE) == []
    assert compare_delay_queue(delay_queue_attributes(settings), settings) == []


def test_a_new_delay_queue():
    assert delay_queue_attributes(NONE) == {
        "FifoQueue": "true",
        "DelaySeconds": "900",
        "MessageRetentionPeriod": "1209600",
    }
    assert compare_delay_queue(delay_queue_attributes(NONE), NONE) == []


@pytest.mark.parametrize(
    "setting, problem, repair",
    [
        (
            {"DelaySeconds": "899"},
            r"queue q DelaySeconds: wanted 900, found 899 \(.* costs requests\); .* also applies to messages already",
            {"DelaySeconds": "900"},
        ),
        (
            {"MessageRetentionPeriod": "345599"},
            r"MessageRetentionPeriod: wanted 'at least 345600', found 345599 \(messages are lost .*\); .*kept longer",
            {"MessageRetentionPeriod": "1209600"},
        ),
        (
            {"RedrivePolicy": '{"maxReceiveCount":3}'},
            r"RedrivePolicy: wanted 'none', found '.* \(it takes messages away .*\); .*leaves messages already there",
            {"RedrivePolicy": ""},
        ),
        ({"FifoQueue": "false"}, r"FifoQueue: wanted 'true', found 'false' \(.*install again\)$", {}),
    ],
)
def test_each_wrong_setting_of_a_delay_queue(setting, problem, repair):
    (difference,) = compare_delay_queue({**delay_queue_attributes(NONE), **setting}, NONE)
    finding = difference.finding("q", "orders")
    assert (finding.state, finding.destination) == (State.DIFFERS, "orders")
    assert difference.attributes == repair
    assert re.search(problem, str(finding)), str(finding)


def test_four_days_of_retention_are_enough():
    found = {**delay_queue_attributes(NONE), "MessageRetentionPeriod": "345600"}
    assert compare_delay_queue(found, NONE) == []


@pytest.mark.parametrize(
    "wanted, setting, touches, repair",
    [
        ({}, {"MessageRetentionPeriod": "60"}, "kept longer", {"MessageRetentionPeriod": "345600"}),
        (
            {"retention": timedelta(days=5)},
            {},
            "kept longer",
            {"MessageRetentionPeriod": "432000"},
        ),
        ({"retention": 3600}, {}, "deletes older ones", {"MessageRetentionPeriod": "3600"}),
        ({"visibility_timeout": 60}, {}, "those in flight keep", {"VisibilityTimeout": "60"}),
        ({"receive_wait": 20}, {}, "touches no message", {"ReceiveMessageWaitTimeSeconds": "20"}),
        ({"delay": 5}, {}, "not to those already there", {"DelaySeconds": "5"}),
        ({"delay": 0}, {"DelaySeconds": "7"}, "not to those already there", {"DelaySeconds": "0"}),
        ({"encryption": "sse-sqs"}, {}, "stay as they were stored", {"SqsManagedSseEnabled": "true"}),
        (
            {"encryption": "sse-sqs"},
            {"KmsMasterKeyId": KEY},
            "stay as they were stored",
            {"SqsManagedSseEnabled": "true", "KmsMasterKeyId": ""},
        ),
        (
            {"encryption": KEY},
            {"SqsManagedSseEnabled": "true"},
            "stay as they were stored",
            {"KmsMasterKeyId": KEY},
        ),
    ],
)
def test_what_differs_in_a_destination(wanted, setting, touches, repair):
    found = {"MessageRetentionPeriod": "345600", "VisibilityTimeout": "30", **setting}
    (difference,) = compare_destination(found, QueueSettings(**wanted))
    assert touches in (difference.touches or "")
    assert difference.attributes == repair


def test_a_fifo_queue_is_no_destination_and_cannot_be_made_one():
    (difference,) = compare_destination({"FifoQueue": "true", "MessageRetentionPeriod": "345600"}, NONE)
    assert (difference.setting, difference.touches) == ("FifoQueue", None)


@pytest.mark.parametrize(
    "wanted, found, same",
    [
        (KEY, KEY, True),
        (KEY, ARN, True),
        (ARN, KEY, True),
        ("alias/orders", "arn:aws:kms:us-east-1:111122223333:alias/orders", True),
        (KEY, KEY[:-1] + "c", False),
        (ARN, ARN[:-1] + "c", False),
        ("alias/orders", "arn:aws:kms:us-east-1:111122223333:alias/old/orders", False),
    ],
)
def test_a_key_by_its_id_or_its_arn(wanted, found, same):
    queue = {"MessageRetentionPeriod": "345600", "KmsMasterKeyId": found}
    assert (compare_destination(queue, QueueSettings(encryption=wanted)) == []) is same


@pytest.mark.parametrize(
    "policy, found",
    [
        (None, "none"),
        ({"deadLetterTargetArn": "arn:aws:sqs:us-east-1:1:other", "maxReceiveCount": 3}, "other after 3 receives"),
        ({"deadLetterTargetArn": "arn:aws:sqs:us-east-1:1:dead", "maxReceiveCount": "5"}, "dead after 5 receives"),
        # AWS tells the number as text or as a number, as it was given
        ({"deadLetterTargetArn": "arn:aws:sqs:us-east-1:1:dead", "maxReceiveCount": "3"}, None),
    ],
)
def test_the_dead_letter_queue(policy, found):
    queue = {"MessageRetentionPeriod": "345600", **({"RedrivePolicy": json.dumps(policy)} if policy else {})}
    settings = QueueSettings(dead_letter_queue="dead", max_receive_count=3)
    target = "arn:aws:sqs:us-east-1:1:dead"
    differences = compare_destination(queue, settings, dead_letter="dead", target=target)
    assert [one.found for one in differences] == ([] if found is None else [found])
    for one in differences:
        assert json.loads(one.attributes["RedrivePolicy"]) == {"deadLetterTargetArn": target, "maxReceiveCount": 3}
    # nothing to lead to yet: it differs, and cannot be repaired
    for one in compare_destination(queue, settings, dead_letter="dead"):
        assert one.attributes == {}


@pytest.mark.parametrize(
    "dead, destination, enough",
    [(345_600, 345_600, False), (345_601, 345_600, True), (1_209_600, 1_209_600, True), (60, 1800, False)],
)
def test_a_dead_letter_queue_keeps_messages_for_longer(dead, destination, enough):
    found = {"MessageRetentionPeriod": str(dead)}
    differences = compare_dead_letter_queue(found, NONE, destination_retention=destination)
    assert [one.attributes for one in differences] == ([] if enough else [{"MessageRetentionPeriod": "1209600"}])
