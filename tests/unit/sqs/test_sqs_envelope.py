from __future__ import annotations

import base64
import json
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delayed.errors import InvalidMessage, LimitExceeded
from airflow_delayed.message import DelayedMessage
from airflow_delayed.sqs.entries import (
    FORMS,
    HEADERS,
    MAX_BYTES,
    attributes_size,
    decode,
    direct,
    due_of,
    due_text,
    pack,
    string,
    through_fifo,
    unwrap,
)

DUE = datetime(2030, 1, 1, 0, 0, 0, 1, tzinfo=timezone.utc)
DUE_TEXT = "2030-01-01 00:00:00:000001 Z"


def message(body: bytes = b"hello", headers: dict[str, str] | None = None, **fields) -> DelayedMessage:
    return DelayedMessage(
        **{"destination": "orders", "message_id": "m1", "due_at": DUE, **fields}, body=body, headers=headers or {}
    )


def received(entry) -> dict:
    return {"Body": entry["MessageBody"], "MessageAttributes": entry["MessageAttributes"], "MessageId": "sqs-id"}


def arriving(headers: dict[str, str], form: str) -> dict[str, str]:
    """Return the headers with which a message arrives."""
    return headers if form == "raw" else {**headers, "NServiceBus.DeliverAt": DUE_TEXT}


def by_nservicebus(got: dict) -> bytes:
    """Read a body as InputQueuePump.ExtractTransportMessage does."""
    attributes, body = got["MessageAttributes"], got["Body"]
    if "NServiceBus.AmazonSQS.Headers" not in attributes:
        body = json.loads(body)["Body"]
        if body == "empty message":
            return b""
    try:
        return base64.b64decode("".join(body.split()), validate=True)
    except ValueError:
        return body.encode()


def test_the_envelope_is_that_of_nservicebus():
    parcel = pack(message(b"{}"), "nservicebus")
    # the upstream tests' approval file, but for the due time
    due = f'"NServiceBus.DeliverAt":"{DUE_TEXT}"'
    assert parcel.body == f'{{"Body":"e30=","S3BodyKey":null,"Headers":{{{due},"NServiceBus.MessageId":"m1"}}}}'
    assert parcel.attributes == {"NServiceBus.MessageId": string("m1")}


def test_an_envelope_takes_what_sqs_would_refuse_without():
    parcel = pack(
        message(
            b"",
            arriving({"a b": "", "ü": "\x00\ufffe"}, "nservicebus"),
        ),
        "nservicebus",
    )
    assert json.loads(parcel.body)["Body"] == "empty message"
    arrived = decode(received(direct(parcel.body, parcel.attributes, 0)))
    assert (arrived.body, arrived.headers) == (
        b"",
        arriving({"a b": "", "ü": "\x00\ufffe"}, "nservicebus"),
    )
    assert parcel.body.isascii()


def test_the_size_of_an_envelope_is_that_of_its_base64():
    body = b"x" * (MAX_BYTES * 3 // 4)
    pack(message(body))
    with pytest.raises(LimitExceeded, match="bytes"):
        pack(message(body), "nservicebus")


@pytest.mark.parametrize("form", FORMS)
def test_names_of_the_transports_own_are_refused(form):
    with pytest.raises(LimitExceeded, match="headers"):
        pack(message(headers={"AirflowDelayed.DueAt": "x"}), form)


@pytest.mark.parametrize("form", ["nservicebus", "nservicebus-unwrapped"])
def test_an_endpoint_reads_the_due_time_whatever_the_user_wrote(form):
    parcel = pack(message(headers={"NServiceBus.DeliverAt": "2001-01-01 00:00:00:000000 Z"}), form)
    assert decode(received(direct(parcel.body, parcel.attributes, 0))).headers == {"NServiceBus.DeliverAt": DUE_TEXT}


@pytest.mark.parametrize("body", [b"1234", b"true", b"    ", b"AAAA\nAAAA", b"{}", b"hello!", b"\x00\xff"])
def test_nservicebus_finds_the_same_bytes_in_an_unwrapped_body(body):
    parcel = pack(message(body, {"Kind": "reminder"}), "nservicebus-unwrapped")
    got = received(direct(parcel.body, parcel.attributes, 0))
    assert by_nservicebus(got) == body
    assert json.loads(got["MessageAttributes"]["NServiceBus.AmazonSQS.Headers"]["StringValue"]) == {
        "Kind": "reminder",
        "NServiceBus.DeliverAt": DUE_TEXT,
        "NServiceBus.MessageId": "m1",
    }
    assert decode(got).body == body


@given(
    form=st.sampled_from(FORMS),
    body=st.binary(min_size=1, max_size=60)
    | st.text(min_size=1).map(lambda text: text.encode("utf-8", "ignore") or b"x")
    | st.sampled_from([b"1234", b"empty message", b'{"Headers":{"NServiceBus.MessageId":"x"}}', b'{"Headers":null}']),
    headers=st.dictionaries(
        st.from_regex(r"[b-z]{1,8}(\.[a-z]{1,8})?", fullmatch=True),
        st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cn"]), min_size=1, max_size=20),
        max_size=12,
    ),
    far=st.booleans(),
)
def test_what_was_packed_is_read_back_in_each_form(form, body, headers, far):
    parcel = pack(message(body, headers), form)
    entry = (
        through_fifo(parcel.body, parcel.attributes, 2**31 - 1, "m1", DUE)
        if far
        else direct(parcel.body, parcel.attributes, 5)
    )
    assert len(entry["MessageAttributes"]) <= 10
    assert len(entry["MessageBody"].encode()) + attributes_size(entry["MessageAttributes"]) <= parcel.size
    got = received(entry)
    arrived = decode(got)
    assert (arrived.body, arrived.headers, arrived.message_id) == (body, arriving(headers, form), "m1")
    assert arrived.due_at == (DUE if far else None)
    if form != "raw":
        assert by_nservicebus(got) == body
    assert "secret" not in repr(arrived)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hi",
        "[]",
        '{"Headers"',
        '{"Body":"e30=","Headers":null}',
        '{"Body":"e30=","Headers":{}}',
        '{"Body":"e30=","Headers":{"Kind":"x"}}',
        '["Headers"]',
        '{"Headers":' * 100_000,
    ],
)
def test_what_is_no_envelope(text):
    assert unwrap(text) is None


@pytest.mark.parametrize(
    "text, body, headers",
    [
        ('{"Headers":{"NServiceBus.EnclosedMessageTypes":"T"},"Body":"plain text"}', b"plain text", "T"),
        ('{"Body":"","S3BodyKey":"keys/1","Headers":{"NServiceBus.EnclosedMessageTypes":"T"}}', b"", "T"),
        ('{"Body":null,"Headers":{"NServiceBus.EnclosedMessageTypes":"T","None":null}}', b"", "T"),
    ],
)
def test_envelopes_of_others(text, body, headers):
    arrived = decode({"Body": text, "MessageId": "sqs-id"})
    assert (arrived.body, arrived.headers) == (body, {"NServiceBus.EnclosedMessageTypes": headers})
    assert arrived.message_id == "sqs-id"
    assert arrived.s3_body_key == ("keys/1" if "keys" in text else None)


def test_a_native_message_is_no_envelope_whatever_it_looks_like():
    text = '{"Body":"e30=","Headers":{"NServiceBus.MessageId":"x"}}'
    arrived = decode({"Body": text, "MessageId": "i", "MessageAttributes": {"MessageTypeFullName": string("T")}})
    assert (arrived.body, arrived.headers) == (text.encode(), {"MessageTypeFullName": "T"})


RECORDED = json.loads(Path(__file__).with_name("nservicebus_sqs.json").read_text())


@pytest.mark.parametrize("sent", RECORDED["bodies_in_s3"]["requests"])
def test_an_endpoints_message_whose_body_is_in_s3(sent):
    entry = sent["entry"]
    arrived = decode({"Body": entry["MessageBody"], "MessageAttributes": entry["MessageAttributes"], "MessageId": "i"})
    assert arrived.body == b""
    assert arrived.s3_body_key == entry["MessageAttributes"]["S3BodyKey"]["StringValue"]
    assert arrived.message_id == entry["MessageAttributes"]["NServiceBus.MessageId"]["StringValue"]
    assert arrived.headers["NServiceBus.EnclosedMessageTypes"].startswith("Wake, ")
    assert "S3BodyKey" not in arrived.headers


@pytest.mark.parametrize("sent", RECORDED["requests"])
def test_each_message_that_an_endpoint_sent(sent):
    entry = sent["entry"]
    arrived = decode({"Body": entry["MessageBody"], "MessageAttributes": entry["MessageAttributes"], "MessageId": "i"})
    assert json.loads(arrived.body)["Text"].startswith("theirs ")
    assert arrived.s3_body_key is None
    assert arrived.message_id == entry["MessageAttributes"]["NServiceBus.MessageId"]["StringValue"]
    assert (arrived.headers["NServiceBus.MessageIntent"], arrived.headers["NServiceBus.ReplyToAddress"]) == (
        "Send",
        "reminders",
    )


def test_an_empty_body_of_an_endpoint_without_envelope():
    headers = {HEADERS: string(json.dumps({"NServiceBus.MessageId": "m1", "Kind": "a"}))}
    arrived = decode({"Body": "empty message", "MessageAttributes": headers, "MessageId": "i"})
    assert (arrived.body, arrived.headers, arrived.message_id) == (b"", {"Kind": "a"}, "m1")


# half of a surrogate pair too
ANY_TEXT = st.text(st.characters(exclude_categories=[]) | st.sampled_from(["\ud800", "\udfff"]), max_size=8)
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT | st.sampled_from(["e30=", "empty message"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(ANY_TEXT, inner, max_size=2),
    max_leaves=4,
)
ENVELOPES = st.fixed_dictionaries(
    {
        "Headers": ANY_JSON
        | st.dictionaries(ANY_TEXT, ANY_JSON).map(lambda some: {**some, "NServiceBus.MessageId": "x"})
    },
    optional={"Body": ANY_JSON, "S3BodyKey": ANY_JSON},
).map(json.dumps)


@pytest.mark.fuzz
@given(
    body=ENVELOPES,
    headers=st.dictionaries(st.sampled_from("bcdefghij"), st.just("value"), max_size=9),
    form=st.sampled_from(FORMS),
)
def test_whatever_looks_like_an_envelope_is_packed_and_read_back(body, headers, form):
    parcel = pack(message(body.encode(), headers), form)
    arrived = decode(received(direct(parcel.body, parcel.attributes, 0)))
    assert (arrived.body, arrived.headers, arrived.message_id) == (body.encode(), arriving(headers, form), "m1")


def test_half_of_a_surrogate_pair_in_what_looks_like_an_envelope():
    body = rb'{"Body":"\ud800","Headers":{"NServiceBus.MessageId":"x"}}'
    parcel = pack(message(body))
    assert decode(received(direct(parcel.body, parcel.attributes, 0))).body == body
    with pytest.raises(InvalidMessage, match="body: holds half of a surrogate pair"):
        decode({"Body": body.decode(), "MessageId": "sqs-id"})


def test_an_envelope_that_one_reader_may_read_and_another_not_is_sent_as_none():
    """Python's limit of depth counts from where it is called."""
    body = b'{"Body":' + b"[" * 900 + b"]" * 900 + b',"Headers":{"NServiceBus.MessageId":"x"}}'
    for nested in (0, 100, 200, 300):
        parcel = within(nested, lambda: pack(message(body)))
        assert decode(received(direct(parcel.body, parcel.attributes, 0))).body == body


def within(calls, work):
    return within(calls - 1, work) if calls else work()


@pytest.mark.parametrize(
    "received, column, says",
    [
        ({"Headers": "[]"}, "headers", "must be a JSON object, not list"),
        ({"Headers": '"ab"'}, "headers", "must be a JSON object, not str"),
        ({"Headers": "5"}, "headers", "must be a JSON object, not int"),
        ({"Headers": "{"}, "headers", "cannot be read as JSON"),
        ({"Headers": "[" * 100_000}, "headers", "cannot be read as JSON"),
        ({"Headers": "9" * 5000}, "headers", "cannot be read as JSON"),
        ({"Headers": '{"a":{"b":1}}'}, "headers", "the value of 'a' must be text, not dict"),
        ({"Headers": r'{"a":"\ud800"}'}, "headers", "surrogate"),
        ({"Headers": r'{"\ud800":"a"}'}, "headers", "surrogate"),
        ({"Encoding": "base64", "Body": "a"}, "body", "is not base64"),
        ({"Encoding": "base64", "Body": "ü"}, "body", "is not base64"),
        ({"Body": '{"Headers":{"NServiceBus.MessageId":"x","a":[1]}}'}, "headers", "must be text, not list"),
        ({"Body": r'{"S3BodyKey":"\ud800","Headers":{"NServiceBus.MessageId":"x"}}'}, "S3BodyKey", "surrogate"),
    ],
)
def test_a_message_that_cannot_be_read_has_one_error(received, column, says):
    names = {"Headers": "NServiceBus.AmazonSQS.Headers", "Encoding": "AirflowDelayed.BodyEncoding"}
    attributes = {names[name]: string(value) for name, value in received.items() if name in names}
    with pytest.raises(InvalidMessage, match=says) as caught:
        decode({"Body": received.get("Body", "x"), "MessageAttributes": attributes, "MessageId": "sqs-id"})
    assert caught.value.column == column


@pytest.mark.fuzz
@given(
    body=ANY_TEXT | ANY_JSON.map(json.dumps) | ENVELOPES,
    attributes=st.dictionaries(
        st.sampled_from(
            [
                "NServiceBus.MessageId",
                "NServiceBus.AmazonSQS.Headers",
                "AirflowDelayed.BodyEncoding",
                "AirflowDelayed.DueAt",
                "MessageTypeFullName",
                "Kind",
            ]
        ),
        (ANY_TEXT | ANY_JSON.map(json.dumps) | st.just("base64")).map(string)
        | st.just({"DataType": "Binary", "BinaryValue": b"x"}),
    ),
)
def test_whatever_was_received_is_text_or_the_one_error(body, attributes):
    try:
        arrived = decode({"Body": body, "MessageAttributes": attributes, "MessageId": "sqs-id"})
    except InvalidMessage:
        return
    assert isinstance(arrived.body, bytes)
    for text in (*arrived.headers, *arrived.headers.values(), arrived.message_id, arrived.s3_body_key or ""):
        text.encode()


@given(st.datetimes(timezones=st.just(timezone.utc)))
def test_a_due_time_is_read_back_exactly(due_at):
    text = due_text(due_at)
    assert len(text) == len("2026-01-31T08:30:00.000000Z")
    assert due_of({"AirflowDelayed.DueAt": string(text)}) == due_at


@pytest.mark.parametrize("text", ["", "tomorrow", "2026-01-31T08:30:00"])
def test_a_due_time_that_cannot_be_read_is_none(text):
    assert due_of({"AirflowDelayed.DueAt": string(text)}) is None
    assert due_of({"AirflowDelayed.DueAt": {"DataType": "Binary", "BinaryValue": b"x"}}) is None
    assert due_of({}) is None


def test_the_form_of_the_due_time():
    berlin = datetime(2026, 1, 31, 9, 30, tzinfo=timezone(timedelta(hours=1)))
    assert due_text(message(due_at=berlin).due_at) == "2026-01-31T08:30:00.000000Z"
