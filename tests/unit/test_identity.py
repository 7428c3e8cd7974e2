from __future__ import annotations

from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delayed.errors import InvalidMessage
from airflow_delayed.identity import content_digest, key_id, scope_of
from airflow_delayed.message import UTC

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


def test_ids_stay_the_same_in_every_version():
    """Ids made by a release must be made by all later ones: these were made by 0.1.0."""
    assert key_id(["order", "kind"], [17, "reminder"]) == "c769142903f0f964cea33aedf506c1bd"
    digest = content_digest("mail", 1_772_366_400_000_000, {"a": "1", "b": "2"}, b"hello", scope=scope_of("dag", "run"))
    assert digest.hex() == "d6fa7abaaca4a1ca1eefac8a78d5dde8"


def test_order_of_headers_says_nothing():
    assert content_digest("q", 1, {"a": "1", "b": "2"}, b"") == content_digest("q", 1, {"b": "2", "a": "1"}, b"")


BASE = {"destination": "q", "due_us": 1, "headers": {"a": "1"}, "body": b"x", "tag": None, "expires_us": None}


@pytest.mark.parametrize(
    "change",
    [
        {"destination": "q2"},
        {"due_us": 2},
        {"headers": {"a": "2"}},
        {"headers": {"b": "1"}},
        {"headers": {}},
        {"body": b"y"},
        {"tag": "t"},
        {"tag": ""},
        {"expires_us": 2},
        {"scope": scope_of("other")},
    ],
)
def test_every_part_counts(change):
    assert content_digest(**BASE) != content_digest(**{**BASE, **change})


@given(st.lists(st.text(), max_size=3), st.lists(st.text(), max_size=3))
def test_scopes_do_not_run_into_each_other(one, other):
    assert (scope_of(*one) == scope_of(*other)) == (one == other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (5, Decimal("5.00")),  # Spark's decimal(10,2) and its long
        (5, 5.0),  # pandas' integers beside a null
        (0.0, -0.0),
        (5, np.int32(5)),
        (1.5, np.float64(1.5)),
        (NOON, NOON.astimezone(timezone(timedelta(hours=5)))),
        (Decimal("1.50"), Decimal("1.5")),
        (UUID(int=7), str(UUID(int=7))),
    ],
)
def test_equal_keys(one, other):
    assert key_id(["k"], [one]) == key_id(["k"], [other])


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, "1"), (1, True), (1, 1.5), ("a", b"a"), (date(2026, 1, 1), "2026-01-01"), (Decimal("1.5"), "1.5")],
)
def test_different_keys(one, other):
    assert key_id(["k"], [one]) != key_id(["k"], [other])


def test_name_of_the_column_is_part_of_the_key():
    assert key_id(["order"], [1]) != key_id(["customer"], [1])


@pytest.mark.parametrize(
    "value", [None, [1], {"a": 1}, Decimal("NaN"), float("nan"), np.nan, float("inf"), datetime(2026, 1, 1)]
)
def test_bad_key_names_its_column(value):
    with pytest.raises(InvalidMessage) as caught:
        key_id(["order"], [value])
    assert caught.value.column == "order"
