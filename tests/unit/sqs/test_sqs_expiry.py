from __future__ import annotations

import pytest

from airflow_delayed.sqs.stats import depth_of, expiry_risk

DAY = 86_400


def queue(waiting: int = 0, in_flight: int = 0, retention: int = 4 * DAY, visibility: int = 30):
    return depth_of(
        "orders",
        {
            "ApproximateNumberOfMessages": str(waiting),
            "ApproximateNumberOfMessagesNotVisible": str(in_flight),
            "MessageRetentionPeriod": str(retention),
            "VisibilityTimeout": str(visibility),
        },
    )


@pytest.mark.parametrize(
    "depth, text",
    [
        (queue(), None),
        (queue(waiting=99), None),
        (queue(waiting=100), "100 messages wait and none is being read; a message is kept for 4 days, 0:00:00"),
        (queue(waiting=100, in_flight=1), None),
        # 4 days less 15 minutes, by 30 s each
        (queue(waiting=11_490, in_flight=1), None),
        (queue(waiting=11_491, in_flight=1), "11,491 messages wait and 1 are in flight, which can take up to 4.0 days"),
        (queue(waiting=11_491, in_flight=2), None),
        (queue(retention=4500), None),
        (queue(retention=4499), "of which its delay takes up to 0:15:00: 0:59:59 are left to read it"),
        (queue(retention=60), "0:00:00 are left"),
    ],
)
def test_what_could_expire_unread(depth, text):
    risk = expiry_risk(depth)
    assert (risk is None) if text is None else (risk is not None and text in risk)


def test_an_age_that_sqs_does_not_tell_is_not_invented():
    assert queue(waiting=5).oldest is None
