"""Properties as they came: read where they can be, never an error, and written again as they were."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pika import BasicProperties
from support import poison

from airflow_delayed.rabbitmq.properties import MAX_HEADERS, ReceivedProperties

NAMES = ("content_type", "content_encoding", "correlation_id", "reply_to", "message_id", "type", "user_id", "app_id")
short = st.text(max_size=60, alphabet=st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | short
    | st.datetimes(datetime(1970, 1, 1), timezones=st.just(timezone.utc)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(short, inner, max_size=3),
    max_leaves=5,
).map(lambda value: value.replace(microsecond=0) if isinstance(value, datetime) else value)


@given(
    st.dictionaries(st.sampled_from(NAMES), short),
    st.none() | st.dictionaries(short, values, max_size=3),
    st.none() | st.integers(0, 2**64 - 1),
    st.none() | st.integers(0, 255),
)
def test_what_pika_can_decode_is_the_same(
    texts: dict[str, str], headers: dict[str, Any] | None, timestamp: int | None, priority: int | None
) -> None:
    encoded = b"".join(BasicProperties(headers=headers, timestamp=timestamp, priority=priority, **texts).encode())
    pika, ours = BasicProperties().decode(encoded), ReceivedProperties(encoded)
    assert ours.problem is None
    for name in (*NAMES, "timestamp", "priority", "delivery_mode", "expiration", "cluster_id"):
        assert getattr(ours, name) == getattr(pika, name)
    assert (None if ours.headers is None else dict(ours.headers)) == pika.headers


@given(st.binary(max_size=80) | st.binary(max_size=80).map(lambda data: b"\x20\x00" + poison.long(data)))
def test_no_bytes_at_all_are_an_error(data: bytes) -> None:
    found = ReceivedProperties(data)
    assert isinstance(found.message_id, str | None)
    assert found.problem is None or "cannot be read: " in found.problem
    dict(found.headers or {})
    assert b"".join(found.encode()) == data


@pytest.mark.parametrize("name", [*poison.CRAFTED, *poison.INFINITE])
def test_what_is_published_again_is_byte_for_byte_what_came(name: str) -> None:
    came = (poison.CRAFTED | poison.INFINITE)[name]
    found = ReceivedProperties(came.raw)
    assert found.problem is None
    dict(found.headers or {})
    (again,) = found.again(without=frozenset(), added={}, user=None).encode()
    assert again[2:].endswith(came.raw[2 + 4 + len(came.table or b"") if came.table else 2 :])
    assert (came.table or b"") in again
    (changed,) = found.again(without=frozenset(["x"]), added={"mine": "1"}, user=None).encode()
    assert (came.table or b"") + poison.table({"mine": b"S" + poison.long(b"1")}) in changed


def test_a_header_is_replaced_and_left_out_under_all_its_names() -> None:
    """A table may have two of one name."""
    twice = poison.raw(poison.table({"a": b"t\x01"}) + poison.table({"b": b"V"}) + poison.table({"a": b"t\x00"}))
    found = ReceivedProperties(twice.raw)
    assert dict(found.headers or {}) == {"a": False, "b": None}
    (changed,) = found.again(without=frozenset(["b"]), added={"a": "1"}, user=None).encode()
    assert BasicProperties().decode(changed).headers == {"a": "1"}


def test_what_the_user_and_the_time_to_live_make_of_them() -> None:
    found = ReceivedProperties.of(BasicProperties(user_id="sales", expiration="1000", app_id="a"))
    for user, expires, kept in (("sales", True, ("sales", "1000")), ("other", False, (None, None))):
        (written,) = found.again(added={}, user=user, expires=expires).encode()
        again = BasicProperties().decode(written)
        assert (again.user_id, again.expiration, again.app_id) == (*kept, "a")


@pytest.mark.parametrize("more", [0, 1, 60_000])
def test_more_headers_than_are_read_are_a_problem_and_stay(more: int) -> None:
    """Each costs as much as a long one: a frame full of empty ones would hold up all other messages of a process."""
    table = poison.table({"a": b"t\x01"}) + b"\x00V" * (MAX_HEADERS - 1 + more)
    found = ReceivedProperties(poison.raw(table, message_id=poison.short(b"m")).raw)
    assert found.problem == ("its headers cannot be read: there are more than 2,000" if more else None)
    assert (found.message_id, dict(found.headers or {})) == ("m", {"a": True, "": None})
    (again,) = found.again(added={"c": "1"}, user=None).encode()
    assert table + poison.table({"c": b"S" + poison.long(b"1")}) in again


def test_headers_of_an_unknown_type_have_a_problem_and_stay() -> None:
    table = poison.table({"a": b"t\x01", "b": b"?\x00\x00"})
    found = ReceivedProperties(poison.raw(table, message_id=poison.short(b"m")).raw)
    assert found.problem == "its headers cannot be read: one is of the unknown type '?'"
    assert found.message_id == "m"
    (again,) = found.again(added={"c": "1"}, user=None).encode()
    assert table + poison.table({"c": b"S" + poison.long(b"1")}) in again
