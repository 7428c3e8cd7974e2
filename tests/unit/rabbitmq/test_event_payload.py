"""What an event of a message says, and what it keeps to itself."""

from __future__ import annotations

import base64
import json
from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pika import BasicProperties

from airflow_delayed.rabbitmq.consumer import event_payload
from airflow_delayed.rabbitmq.properties import DESTINATION, DUE_AT

VALUES = st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.datetimes() | st.lists(st.integers())
NAMES = st.sampled_from([DESTINATION, DUE_AT, "other"])


@given(st.dictionaries(NAMES, VALUES), st.binary(max_size=40), st.none() | st.integers(0, 40))
def test_whatever_arrives_json_can_hold_it(headers, body, limit):
    payload = event_payload(BasicProperties(headers=headers, message_id="m"), body, redelivered=False, body_limit=limit)
    assert json.loads(json.dumps(payload)) == payload
    assert (payload["message_id"], payload["body_bytes"]) == ("m", len(body))
    whole = payload.pop("body", None)
    coded = payload.pop("body_base64", None)
    if limit is None or len(body) > limit:
        assert (whole, coded) == (None, None)
    else:
        assert (base64.b64decode(coded) if whole is None else whole.encode()) == body
    # nothing of any header but two
    assert payload.keys() == {"message_id", "destination", "due_at", "redelivered", "body_bytes"}


@given(st.datetimes(timezones=st.just(timezone.utc)))
def test_the_due_time_is_told_as_it_was_sent(due):
    found = BasicProperties(headers={DUE_AT: due.isoformat(timespec="microseconds"), DESTINATION: "orders"})
    payload = event_payload(found, b"", redelivered=True)
    assert datetime.fromisoformat(payload["due_at"]) == due
    assert (payload["destination"], payload["redelivered"], payload["message_id"]) == ("orders", True, None)


@pytest.mark.parametrize("body", [b"\xff", b"a\0b"])
def test_what_is_no_text_for_a_database_is_encoded(body):
    payload = event_payload(BasicProperties(), body, redelivered=False, body_limit=9)
    assert "body" not in payload
    assert base64.b64decode(payload["body_base64"]) == body
