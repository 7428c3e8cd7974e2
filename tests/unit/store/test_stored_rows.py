"""Messages as rows and back; ids as uuids; the carried clock."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from uuid import UUID, uuid5

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delayed.errors import InvalidMessage
from airflow_delayed.identity import digest_of
from airflow_delayed.message import DelayedMessage
from airflow_delayed.store.dispatch.queue_tables import row_id
from airflow_delayed.store.engine import CarriedClock
from airflow_delayed.store.records import to_message, to_row

UTC = timezone.utc
DUE = datetime(2030, 1, 1, tzinfo=UTC)
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20)
IDS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=128)

MESSAGES = st.builds(
    DelayedMessage,
    destination=TEXT,
    body=st.binary(),
    due_at=st.datetimes(timezones=st.just(UTC)),
    message_id=IDS,
    headers=st.dictionaries(TEXT, st.text(st.characters(exclude_categories=["Cs"]))),
    tag=st.none() | TEXT,
)


@given(MESSAGES, st.none() | TEXT)
def test_a_row_says_all_that_its_message_said(message, deliver_conn_id):
    row = to_row(message, deliver_conn_id)
    assert to_message(row) == message
    assert row["Digest"] == digest_of(to_message(row))
    assert (row["DeliverConnId"], len(row["Digest"])) == (deliver_conn_id, 16)


@pytest.mark.parametrize("headers", [b"", b"[]", b'{"a": "b"', b"\xff", b'"text"', b'{"a": 1}'])
def test_headers_that_are_none_are_an_error_that_does_not_show_them(headers):
    row = to_row(DelayedMessage(destination="q", body=b"", due_at=DUE, message_id="a"), None)
    with pytest.raises(InvalidMessage, match="headers") as caught:
        to_message({**row, "Headers": headers})
    assert caught.value.__cause__ is None


@given(st.sets(IDS, min_size=2))
def test_different_ids_are_different_rows(ids):
    assert len({row_id(one) for one in ids}) == len(ids)


def test_the_row_of_an_id():
    name = "8d5d2a8c-9c4f-4f0e-9d5e-0a8f6f1f2f3a"
    same = [name, name.upper(), name.replace("-", ""), f"{{{name}}}", f"urn:uuid:{name}"]
    assert row_id(name) == UUID(name)
    assert len({row_id(one) for one in same}) == len(same)
    # fixed for ever: another result would make a message that is delivered again a new one
    assert row_id("order-17") == uuid5(UUID("b1f6b5a6-6f0c-5d0f-9a63-1f2a7c0e4d11"), "order-17")
    assert str(row_id("order-17")) == "29efeb27-68d0-5683-ac66-0e52ba5ef827"


def test_the_carried_clock_goes_on_by_the_monotonic_one():
    seconds = 100.0
    clock = CarriedClock(lambda: seconds)
    assert abs(clock() - datetime.now(UTC)) < timedelta(minutes=1)
    clock.set(DUE)
    seconds = 103.5
    assert clock() == DUE + timedelta(seconds=3.5)
    clock.set(DUE - timedelta(days=1))
    assert clock() == DUE - timedelta(days=1)
