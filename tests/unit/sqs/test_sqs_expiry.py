from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delayed.sqs.life import expiry_risk, stage
from airflow_delayed.sqs.visibility import checked_seconds

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)
DAY = 86_400


def queue(waiting: int = 0, in_flight: int = 0, retention: int = 4 * DAY, visibility: int = 30):
    return stage(
        "orders",
        {
            "ApproximateNumberOfMessages": str(waiting),
            "ApproximateNumberOfMessagesNotVisible": str(in_flight),
            "MessageRetentionPeriod": str(retention),
            "VisibilityTimeout": str(visibility),
        },
    )


@pytest.mark.parametrize(
    "there, told",
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
def test_what_could_expire_unread(there, told):
    risk = expiry_risk(there)
    assert (risk is None) if told is None else (risk is not None and told in risk)


def test_an_age_that_sqs_does_not_tell_is_not_invented():
    assert queue(waiting=5).oldest is None


@pytest.mark.parametrize(
    "seconds, passed, allowed",
    [
        (0, None, True),
        (43_200, None, True),
        (43_201, None, False),
        (-1, None, False),
        (43_200, 0, True),
        (43_200, 1, False),
        (43_199, 1, True),
        (43_199, 1.1, False),
        (0, 43_200, True),
        (0, 43_201, False),
        (timedelta(hours=12), None, True),
    ],
)
def test_twelve_hours_in_all(seconds, passed, allowed):
    received = None if passed is None else NOW - timedelta(seconds=passed)
    if allowed:
        whole = 43_200 if isinstance(seconds, timedelta) else seconds
        assert checked_seconds(seconds, received_at=received, now=NOW) == whole
    else:
        with pytest.raises(ValueError, match="at most 12 hours"):
            checked_seconds(seconds, received_at=received, now=NOW)


@given(seconds=st.integers(0, 43_200), passed=st.floats(0, 50_000))
def test_never_over_twelve_hours(seconds, passed):
    received = NOW - timedelta(seconds=passed)
    try:
        checked_seconds(seconds, received_at=received, now=NOW)
    except ValueError:
        assert NOW + timedelta(seconds=seconds) > received + timedelta(hours=12) - timedelta(seconds=1)
    else:
        assert NOW + timedelta(seconds=seconds) <= received + timedelta(hours=12)
