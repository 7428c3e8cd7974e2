from __future__ import annotations

from datetime import date, datetime, timedelta, timezone
from decimal import Context, Decimal, Inexact, Rounded, localcontext
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delayed.errors import InvalidMessage
from airflow_delayed.identity import MAX_TYPED, content_digest, key_id, scope_of, typed_key_ids
from airflow_delayed.message import UTC

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


def test_ids_stay_the_same_in_every_version():
    """Ids made by a release must be made by all later ones: these were made by 0.1.0."""
    assert key_id(["order", "kind"], [17, "reminder"]) == "c769142903f0f964cea33aedf506c1bd"
    digest = content_digest("mail", 1_772_366_400_000_000, {"a": "1", "b": "2"}, b"hello", scope=scope_of("dag", "run"))
    assert digest.hex() == "d6fa7abaaca4a1ca1eefac8a78d5dde8"
    ends = datetime(2026, 3, 1, 13, 0, 0, 1, tzinfo=UTC)
    digest = content_digest("mail", 1_772_366_400_000_000, {}, b"hello", ("tag-ü", ends))
    assert digest.hex() == "650ebdb91680dfd1a37bbf4868e97447"


def test_order_of_headers_says_nothing():
    assert content_digest("q", 1, {"a": "1", "b": "2"}, b"") == content_digest("q", 1, {"b": "2", "a": "1"}, b"")


BASE = {"destination": "q", "due_us": 1, "headers": {"a": "1"}, "body": b"x"}


@pytest.mark.parametrize(
    "change",
    [
        {"destination": "q2"},
        {"due_us": 2},
        {"headers": {"a": "2"}},
        {"headers": {"b": "1"}},
        {"headers": {}},
        {"body": b"y"},
        {"optional": ("t", None)},
        {"optional": ("", None)},
        {"optional": (None, NOON)},
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


#: Made by 0.1.0 of whole numbers and fractions of up to 28 digits.
GOLDEN = {
    "0": "73c44b065be34bacadd0a856f4635e9e",
    "-0.00": "73c44b065be34bacadd0a856f4635e9e",
    "7": "0e0672638f6e06630763c3c51c0af1fb",
    "7.00": "0e0672638f6e06630763c3c51c0af1fb",
    "-12.5": "95e2feb0517b6cf01ce2894016e69913",
    "1.50": "4d0c34fe99bffaa907cd87a2cfdfc108",
    "0.1": "2bb2efced613dd55ef059fed4ff42111",
    "1E-7": "580d8926745c628c10ac623ad0cc1b1c",
    "1E+3": "cd77cd8e1cb5b534475ee1864e52d6be",
    "123.4500": "c3a51caab4150b4c8307cba741d721c0",
    "1234567890123456789012345678": "d48453bb3f9e3f06cf8e0efc3353a687",
    "1234567890123456789012345678.00": "d48453bb3f9e3f06cf8e0efc3353a687",
    "123456789012345678901234567.8": "65c8a72be0b291594f231aceba263dcf",
    "-0.0000000000000000000000000001": "8cdfbce8d4ea2013ebe904dd4cbab617",
    "9.999999999999999999999999999": "b1619b40a2e3e175207c543ab01ff097",
    "1E-28": "459c1bef7436d6dc89c1cd50c58602ce",
    "1E+300": "c21506a0cdc1a05640b3777bc704c020",
    "1E-5000": "29ae522b3663451e96d9945e5dd91fbb",
}


@pytest.mark.parametrize("text", GOLDEN)
@pytest.mark.parametrize("precision", [1, 28, 100])
def test_ids_of_decimals_stay_the_same_whatever_the_callers_context(text, precision):
    with localcontext() as context:
        context.prec = precision
        context.traps[Inexact] = context.traps[Rounded] = True
        assert key_id(["k"], [Decimal(text)]) == GOLDEN[text]


DECIMALS = st.builds(
    lambda digits, places, sign: Decimal(f"{sign}{digits}").scaleb(-places, Context(prec=100)),
    st.integers(10**28, 10**76 - 1) | st.integers(0, 10**28),
    st.integers(0, 40),
    st.sampled_from(["", "-"]),
)


@given(DECIMALS, DECIMALS, st.integers(-3, 3))
def test_ids_of_decimals_of_a_databases_widest_columns_are_alike_only_if_they_are(one, other, step):
    neighbour = Context(prec=100).add(one, Decimal(step).scaleb(one.as_tuple().exponent, Context(prec=100)))
    for another in (other, neighbour):
        assert (key_id(["k"], [one]) == key_id(["k"], [another])) == (one == another)
    if one == one.to_integral_value():
        assert key_id(["k"], [one]) == key_id(["k"], [int(one)])


@given(st.integers(1, 300), st.integers(0, 300))
def test_zeros_at_the_end_say_nothing(number, zeros):
    assert key_id(["k"], [Decimal(f"{number}.5{'0' * zeros}")]) == key_id(["k"], [Decimal(f"{number}.5")])
    assert key_id(["k"], [Decimal(f"{number}E+{zeros}")]) == key_id(["k"], [number * 10**zeros])


@pytest.mark.parametrize("kind", [int, Decimal])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_whole_number_has_4300_digits_at_most(kind, sign):
    longest = 10**4300 - 1
    assert key_id(["order"], [kind(sign * longest)]) == key_id(["order"], [sign * longest])
    with pytest.raises(InvalidMessage, match="order: has more than 4,300 digits, and cannot be part of a key"):
        key_id(["order"], [kind(sign * (longest + 1))])


@pytest.mark.parametrize("text", ["1E+999999999999999999", "-1E+5000", "1E-999999999999999999"])
def test_a_decimal_without_end_is_refused_at_once(text):
    with pytest.raises(InvalidMessage, match="4,300 digits"):
        key_id(["order"], [Decimal(text)])


def test_a_time_outside_the_calendar_is_refused():
    for edge, hours in ((datetime.max, -1), (datetime.min, 1)):
        with pytest.raises(InvalidMessage, match=r"at: .* outside the years 1 to 9999"):
            key_id(["at"], [edge.replace(tzinfo=timezone(timedelta(hours=hours)))])


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


@pytest.mark.parametrize(
    ("typed", "key"),
    [
        ("order_id=1001", {"order_id": 1001}),
        ("order_id=1001", {"order_id": "1001"}),
        ("order_id=1001", {"order_id": 1001.0}),
        ("order_id = 1001", None),
        ('order_id="1001"', {"order_id": "1001"}),
        ("n=007", {"n": "007"}),
        ("n=-7", {"n": -7}),
        ("price=1.50", {"price": Decimal("1.5")}),
        ("price=1.50", {"price": 1.5}),
        ("price=1e-05", {"price": 1e-05}),
        ("on=2026-03-01", {"on": date(2026, 3, 1)}),
        ("at=2026-03-01T13:00:00+01:00", {"at": NOON}),
        ("at=2026-03-01T12:00:00Z", {"at": NOON}),
        ("at=2026-03-01 12:00:00", {"at": "2026-03-01 12:00:00"}),
        ("paid=True", {"paid": True}),
        ("name=Ada Lovelace", {"name": "Ada Lovelace"}),
        ("name=Ada Lovelace, order_id=5", {"order_id": 5, "name": "Ada Lovelace"}),
        ("order_id=5 line=2", {"line": 2, "order_id": "5"}),
        ('note="a=b, c=d" order_id=5', {"note": "a=b, c=d", "order_id": 5}),
        ("a=1,b=2,c=3,d=4", {"d": 4, "b": 2, "c": 3, "a": 1}),
        ("id=0e98b8b6-79c9-4cc5-9c4f-1c1a8a1a4bb8", {"id": UUID("0e98b8b6-79c9-4cc5-9c4f-1c1a8a1a4bb8")}),
        ("appointment-17", None),
        ("=5", None),
        ("order_id=", None),
        ("", None),
    ],
)
def test_a_key_is_found_as_a_person_types_it(typed, key):
    found = typed_key_ids(typed)
    assert (key_id([*key], [*key.values()]) in found) if key else found == []


def test_ids_of_a_typed_key_are_few():
    assert typed_key_ids("order_id=1001")[0] == key_id(["order_id"], [1001])
    assert len(typed_key_ids("order_id=1001")) == 2
    assert len(typed_key_ids(",".join(f"c{number}=1.5" for number in range(9)))) == MAX_TYPED


@given(st.text(max_size=250))
def test_whatever_is_typed_is_a_key_or_none(text):
    assert len(typed_key_ids(text)) <= MAX_TYPED
