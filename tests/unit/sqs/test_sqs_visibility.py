"""For how long messages are hidden: from other consumers, and after they could not be sent on."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delayed.message import EPOCH
from airflow_delayed.sqs.transport import SqsTransport

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)
NOW_MS = (NOW - EPOCH) // timedelta(milliseconds=1)


class Client:
    """Has each queue that is asked for, gives the messages out once, takes none, and keeps visibility timeouts."""

    def __init__(self, messages: Sequence[dict[str, Any]] = ()) -> None:
        self.messages = list(messages)
        #: By receipt handle, in seconds.
        self.timeouts: dict[str, int] = {}

    def get_queue_url(self, **request: Any) -> dict[str, str]:
        return {"QueueUrl": f"https://sqs.example/1/{request['QueueName']}"}

    def get_queue_attributes(self, **request: Any) -> dict[str, Any]:
        return {"Attributes": {}}

    def receive_message(self, **request: Any) -> dict[str, Any]:
        received, self.messages = self.messages, []
        return {"Messages": received, "ResponseMetadata": {}}

    def send_message_batch(self, **request: Any) -> dict[str, Any]:
        fault = {"Code": "InternalError", "SenderFault": False}
        return {"Failed": [{"Id": entry["Id"], **fault} for entry in request["Entries"]]}

    def change_message_visibility_batch(self, **request: Any) -> dict[str, Any]:
        self.timeouts.update({entry["ReceiptHandle"]: entry["VisibilityTimeout"] for entry in request["Entries"]})
        return {}


def transport_of(client: Client) -> SqsTransport:
    return SqsTransport("c", lambda: client, dict, clock=lambda: NOW, sleep=lambda seconds: None)


def hidden_for(seconds: timedelta | float, received_at: datetime | None) -> dict[str, int]:
    client = Client()
    try:
        assert transport_of(client).extend_visibility("orders", ["handle"], seconds, received_at=received_at) == {}
    except ValueError:
        assert client.timeouts == {}
        raise
    return client.timeouts


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
        assert hidden_for(seconds, received) == {"handle": whole}
    else:
        with pytest.raises(ValueError, match="at most 12 hours"):
            hidden_for(seconds, received)


@given(seconds=st.integers(0, 43_200), passed=st.floats(0, 50_000))
def test_never_over_twelve_hours(seconds, passed):
    received = NOW - timedelta(seconds=passed)
    try:
        hidden_for(seconds, received)
    except ValueError:
        assert NOW + timedelta(seconds=seconds) > received + timedelta(hours=12) - timedelta(seconds=1)
    else:
        assert NOW + timedelta(seconds=seconds) <= received + timedelta(hours=12)


def test_pauses_grow_up_to_five_minutes():
    """Of messages that could not be sent on, by how often they were received."""
    received = [
        {
            "MessageId": str(count),
            "ReceiptHandle": str(count),
            "Body": "x",
            "MessageAttributes": {"NServiceBus.DelaySeconds": {"DataType": "String", "StringValue": "900"}},
            "Attributes": {
                "MessageDeduplicationId": str(count),
                "SentTimestamp": str(NOW_MS - 900_000),
                "ApproximateFirstReceiveTimestamp": str(NOW_MS),
                "ApproximateReceiveCount": str(count),
            },
        }
        for count in (0, 1, 2, 3, 7, 8, 10_000)
    ]
    client = Client(received)
    counts = transport_of(client).cycle("orders")
    assert (counts.delivered, counts.moved) == (0, 0)
    assert list(client.timeouts.values()) == [5, 5, 10, 20, 300, 300, 300]
    assert list(client.timeouts) == [message["ReceiptHandle"] for message in received]
