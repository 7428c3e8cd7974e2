from __future__ import annotations

import json
from datetime import datetime, timezone

import pytest

from airflow_delayed.errors import LimitExceeded
from airflow_delayed.message import DelayedMessage
from airflow_delayed.sqs import entries
from airflow_delayed.sqs.entries import MAX_BYTES, attributes_size, decode, direct, pack, through_fifo

DUE = datetime(2030, 1, 1, tzinfo=timezone.utc)


def message(body: bytes = b"hello", headers: dict[str, str] | None = None, **fields) -> DelayedMessage:
    return DelayedMessage(
        **{"destination": "orders", "message_id": "m1", "due_at": DUE, **fields}, body=body, headers=headers or {}
    )


def received(entry) -> dict:
    return {"Body": entry["MessageBody"], "MessageAttributes": entry["MessageAttributes"], "MessageId": "sqs-id"}


def texts(parcel) -> dict[str, str]:
    return {name: value["StringValue"] for name, value in parcel.attributes.items()}


def test_text_and_headers_travel_as_they_are():
    parcel = pack(message("Grüße \U0001f600\n".encode(), {"Kind": "reminder", "NServiceBus.ContentType": "text/plain"}))
    assert parcel.body == "Grüße \U0001f600\n"
    assert texts(parcel) == {
        "NServiceBus.MessageId": "m1",
        "Kind": "reminder",
        "NServiceBus.ContentType": "text/plain",
    }
    assert {value["DataType"] for value in parcel.attributes.values()} == {"String"}


@pytest.mark.parametrize("body", [b"\x00\x01", b"\xff\xfe", b"a\x0bb", "\ufffe".encode()])
def test_what_is_no_text_for_sqs_travels_as_base64(body):
    parcel = pack(message(body))
    assert texts(parcel)["AirflowDelayed.BodyEncoding"] == "base64"
    assert decode(received(direct(parcel.body, parcel.attributes, 0))).body == body


@pytest.mark.parametrize("count, attributes", [(6, 7), (7, 2), (40, 2)])
def test_many_headers_travel_in_one_attribute(count, attributes):
    headers = {f"h{number}": f"wert {number} ü" for number in range(count)}
    parcel = pack(message(b"\x00", headers))
    assert len(parcel.attributes) == attributes + 1
    if attributes == 2:
        assert json.loads(texts(parcel)["NServiceBus.AmazonSQS.Headers"]) == headers
    entry = through_fifo(parcel.body, parcel.attributes, 1925, "m1")
    assert len(entry["MessageAttributes"]) < 10  # there is room for one more
    assert decode(received(entry)).headers == headers


def test_entries_say_the_delay_where_sqs_wants_it():
    parcel = pack(message())
    assert direct(parcel.body, parcel.attributes, 0)["DelaySeconds"] == 0  # a queue's own delay must not count
    entry = through_fifo(parcel.body, parcel.attributes, 1925, "m1")
    assert "DelaySeconds" not in entry
    assert entry["MessageAttributes"]["NServiceBus.AmazonSQS.DelaySeconds"] == {
        "DataType": "String",
        "StringValue": "1925",
    }
    assert entry["MessageDeduplicationId"] == entry["MessageGroupId"] == "m1"
    assert entries.DELAY_SECONDS not in parcel.attributes


@pytest.mark.parametrize(
    "name",
    [
        "a b",
        "ü",
        ".a",
        "a.",
        "a..b",
        "AWS.x",
        "aws.x",
        "Amazon.x",
        "a" * 257,
        "$.diagnostics",
        "a\n",
        "NServiceBus.MessageId",
        "NServiceBus.AmazonSQS.DelaySeconds",
        "AirflowDelayed.x",
    ],
)
@pytest.mark.parametrize("others", [0, 20])
def test_header_names_that_sqs_refuses(name, others):
    with pytest.raises(LimitExceeded, match="headers"):
        pack(message(headers={name: "secret", **{f"h{number}": "x" for number in range(others)}}))


@pytest.mark.parametrize("value", ["", "secret\x00", "\uffff"])
def test_header_values_that_sqs_refuses(value):
    with pytest.raises(LimitExceeded, match="'key'") as caught:
        pack(message(headers={"key": value}))
    assert "secret" not in str(caught.value)


def test_an_empty_body_is_refused():
    with pytest.raises(LimitExceeded, match="empty"):
        pack(message(b""))


def test_a_fifo_queue_is_no_destination():
    with pytest.raises(LimitExceeded, match="FIFO"):
        pack(message(destination="orders.fifo"))


@pytest.mark.parametrize("char", ["a", "é", "\U0001f600"])
def test_the_size_is_counted_in_bytes(char):
    width = len(char.encode())
    room = MAX_BYTES - (pack(message(b"x")).size - 1)
    assert pack(message((char * (room // width)).encode())).size <= MAX_BYTES
    with pytest.raises(LimitExceeded, match="bytes") as caught:
        pack(message((char * (room // width + 1)).encode()))
    assert caught.value.column == "body"


def test_the_size_includes_what_the_delay_adds():
    parcel = pack(message(b"x" * 1000, {"k" * 256: "v" * 1000}))
    entry = through_fifo(parcel.body, parcel.attributes, 2**31 - 1, "m1")
    assert len(entry["MessageBody"].encode()) + attributes_size(entry["MessageAttributes"]) <= parcel.size


def test_binary_bodies_count_as_base64():
    with pytest.raises(LimitExceeded):
        pack(message(b"\x00" * (MAX_BYTES * 3 // 4)))


def test_a_message_of_someone_else_is_read_too():
    arrived = decode({"Body": "hi", "MessageId": "sqs-id"})
    assert (arrived.body, arrived.headers, arrived.message_id) == (b"hi", {}, "sqs-id")


def test_nothing_of_the_content_is_shown():
    parcel = pack(message(b"secret body", {"key": "secret value"}))
    arrived = decode(received(direct(parcel.body, parcel.attributes, 0)))
    assert "secret" not in f"{parcel!r} {arrived!r}"
