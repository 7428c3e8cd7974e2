from __future__ import annotations

import random
from datetime import datetime, timedelta
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest

from airflow_delayed.clock import zone
from airflow_delayed.intake.columns import RowRules, batch_of
from airflow_delayed.intake.rows import Problem, RowReader, Shifts
from airflow_delayed.message import UTC

ANCHOR = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
DUE = ANCHOR + timedelta(hours=1)


def read(*rows, **rules):
    reader = RowReader(RowRules(**{"anchor": ANCHOR, "destination": "mail", **rules}))
    return list(reader.read(batch_of(rows, "rows")))


def one(row, **rules):
    (found,) = read(row, **rules)
    return found


def test_row_becomes_a_message():
    found = one(
        {
            "destination": "sms",
            "value": "hällo",
            "due_at": DUE,
            "headers": {"a": "1"},
            "message_id": "id-1",
            "tag": "customer-7",
            "expires_at": DUE + timedelta(hours=1),
        }
    )
    assert (found.destination, found.body, found.due_at, found.message_id) == ("sms", "hällo".encode(), DUE, "id-1")
    assert (dict(found.headers), found.tag, found.expires_at) == ({"a": "1"}, "customer-7", DUE + timedelta(hours=1))


def test_delay_counts_from_the_anchor():
    assert one({"value": "x", "delay_seconds": 1.5}).due_at == ANCHOR + timedelta(seconds=1.5)


def test_delay_of_every_kind_of_number():
    for delay in (90, 90.0, Decimal("90.00"), np.int64(90), np.float32(90)):
        assert one({"value": "x", "delay_seconds": delay}).due_at == ANCHOR + timedelta(seconds=90)


def test_pandas_nanoseconds_are_rounded_up():
    due = one({"value": "x", "due_at": pd.Timestamp("2026-03-01T13:00:00.000000001Z")}).due_at
    assert (type(due), due) == (datetime, DUE + timedelta(microseconds=1))


def test_spread_moves_each_message_within_its_span_evenly():
    rows = [{"value": "x", "due_at": DUE, "message_id": f"m{number}"} for number in range(2000)]
    after = [(one.due_at - DUE).total_seconds() for one in read(*rows, spread=timedelta(seconds=100))]
    assert 0 <= min(after) < 1
    assert 99 < max(after) < 100
    # 200 in each tenth, give or take five standard deviations
    assert all(133 < sum(part * 10 <= each < part * 10 + 10 for each in after) < 267 for part in range(10))


def test_spread_is_the_same_again_and_part_of_an_id_made_of_content():
    row = {"value": "x", "due_at": DUE, "destination": "mail"}
    alone, spread, wider = one(row), one({**row, "spread_seconds": 100}), one({**row, "spread_seconds": 200})
    assert len({each.message_id for each in (alone, spread, wider)}) == 3
    assert one(row, spread=timedelta(seconds=100)) == spread
    # no other release may move what was sent already
    assert (spread.message_id, spread.due_at - DUE) == (
        "f0798eb0481ec5bc11c77dec11ddf19f",
        timedelta(microseconds=48225798),
    )
    assert one({**row, "spread_seconds": 0}, spread=timedelta(seconds=100)) == alone


def test_naive_key_means_the_given_zone():
    naive, aware = (
        {"value": "x", "due_at": DUE, "at": at} for at in (datetime(2026, 3, 1, 13), DUE - timedelta(hours=1))
    )
    berlin = {"id_columns": ("at",), "zone": zone("Europe/Berlin")}
    assert one(naive, **berlin).message_id == one(aware, **berlin).message_id


def test_null_takes_what_is_given_for_all_rows_and_headers_join():
    defaults = {"due_at": DUE, "optional": {"tag": "all"}, "headers": {"a": "all", "b": "all"}}
    found = one({"value": "x", "destination": None, "due_at": None, "tag": None, "headers": {"a": "row"}}, **defaults)
    assert (found.destination, found.due_at, found.tag) == ("mail", DUE, "all")
    assert dict(found.headers) == {"a": "row", "b": "all"}


def test_a_value_that_cannot_be_compared_costs_its_row_alone():
    """As pandas.NA, which a data frame's dictionaries have."""

    class Missing:
        def __eq__(self, other):
            raise TypeError("boolean value of NA is ambiguous")

        __hash__ = None

    bad, good = read({"value": "x", "due_at": DUE, "tag": Missing()}, {"value": "y", "due_at": DUE})
    assert (bad.column, bad.problem, good.body) == ("tag", "must be text, or absent", b"y")


def test_rows_in_another_order_have_the_same_ids():
    rows = [{"value": f"body {number}", "delay_seconds": number} for number in range(50)]
    shuffled = random.Random(1).sample(rows, len(rows))
    ids = {message.body: message.message_id for message in read(*rows, scope=b"run 1")}
    assert {message.body: message.message_id for message in read(*shuffled, scope=b"run 1")} == ids
    assert len(set(ids.values())) == 50
    other_run = {message.message_id for message in read(*rows, scope=b"run 2")}
    assert other_run.isdisjoint(ids.values())


def test_key_names_a_message_whatever_it_says():
    first = one({"value": "old", "due_at": DUE, "order": 7}, id_columns=("order",), scope=b"run 1")
    again = one({"value": "new", "delay_seconds": 5, "order": 7}, id_columns=("order",), scope=b"run 2")
    assert first.message_id == again.message_id


@pytest.mark.parametrize(
    ("row", "column", "says"),
    [
        ({"value": None, "due_at": DUE}, "value", "null"),
        ({"value": 5, "due_at": DUE}, "value", "must be text, bytes"),
        ({"value": "x", "due_at": DUE, "tag": "\ud800"}, "tag", "UTF-8"),
        ({"value": "x", "due_at": DUE, "destination": "\ud800"}, "destination", "UTF-8"),
        ({"value": "x", "due_at": DUE, "headers": {"a": "\ud800"}}, "headers", "UTF-8"),
        ({"value": {"a": object()}, "due_at": DUE}, "value", "JSON"),
        ({"value": "\ud800", "due_at": DUE}, "value", "UTF-8"),
        ({"value": "x", "due_at": None}, "due_at", "null"),
        ({"value": "x", "due_at": "tomorrow"}, "due_at", "2026-01-31T09:30:00"),
        ({"value": "x", "due_at": datetime(2026, 3, 1)}, "due_at", "no time zone"),
        ({"value": "x", "due_at": DUE, "delay_seconds": 5}, "delay_seconds", "one of them"),
        ({"value": "x", "delay_seconds": -1}, "delay_seconds", "negative"),
        ({"value": "x", "delay_seconds": "5"}, "delay_seconds", "must be a number"),
        ({"value": "x", "delay_seconds": True}, "delay_seconds", "must be a number"),
        ({"value": "x", "due_at": pd.NaT}, "due_at", "NaT"),
        ({"value": "x", "due_at": DUE, "headers": 0}, "headers", "map"),
        ({"value": "x", "due_at": DUE, "destination": 7}, "destination", "queue"),
        ({"value": "x", "due_at": DUE, "destination": ""}, "destination", "give destination="),
        ({"value": "x", "due_at": DUE, "headers": {"a": 1}}, "headers", "'a' must be text"),
        ({"value": "x", "due_at": DUE, "headers": "a=1"}, "headers", "map"),
        ({"value": "x", "due_at": DUE, "message_id": "a b"}, "message_id", "ASCII"),
        ({"value": "x", "due_at": DUE, "tag": 5}, "tag", "text"),
        ({"value": "x", "due_at": DUE, "expires_at": DUE}, "expires_at", "not after"),
        ({"value": "x", "due_at": DUE, "spread_seconds": -1}, "spread_seconds", "-1 is negative"),
        ({"value": "x", "due_at": DUE, "spread_seconds": "60"}, "spread_seconds", "must be a number"),
        (
            {"value": "x", "due_at": DUE, "spread_seconds": 61, "expires_at": DUE + timedelta(minutes=1)},
            "spread_seconds",
            "expires before",
        ),
    ],
)
def test_bad_row_names_row_and_column_and_the_others_go_on(row, column, says):
    good = {"value": "x", "due_at": DUE}
    before, found, after = read(good, row, good)
    assert isinstance(found, Problem)
    assert str(found).startswith(f"rows row 2, column {column}: ")
    assert says in found.problem
    assert before.body == after.body == b"x"


def test_error_shows_neither_body_nor_header_value():
    found = one({"value": "secret-body", "due_at": DUE, "headers": {"token": 5, "other": "secret-value"}})
    assert "secret" not in repr(found)


def test_column_body_is_the_same_as_value_and_named_as_written():
    assert one({"body": "x", "due_at": DUE}).body == b"x"
    assert one({"body": None, "due_at": DUE}).column == "body"


def test_key_without_bytes_in_utf8_is_an_error():
    assert one({"value": "x", "due_at": DUE, "order": "\ud800"}, id_columns=("order",)).column == "order"


def test_null_in_a_key_is_an_error():
    assert str(one({"value": "x", "due_at": DUE, "order": None}, id_columns=("order",))).startswith(
        "rows row 1, column order: is null"
    )


def test_naive_times_mean_the_given_zone_and_shifts_are_counted():
    rules = RowRules(anchor=ANCHOR, destination="mail", zone=zone("Europe/Berlin"))
    reader = RowReader(rules)
    rows = [
        {"value": "x", "due_at": "2026-03-29T02:30:00"},
        {"value": "x", "due_at": datetime(2026, 10, 25, 2, 30)},
        {"value": "x", "due_at": "2026-07-01T12:00:00"},
        {"value": "x", "due_at": "2026-07-01T12:00:00Z"},
    ]
    dues = [message.due_at for message in reader.read(batch_of(rows, "rows"))]
    assert [due.strftime("%m-%d %H:%M") for due in dues] == ["03-29 01:30", "10-25 00:30", "07-01 10:00", "07-01 12:00"]
    assert reader.shifts == Shifts(gaps=1, folds=1)


@pytest.mark.parametrize("rules", [{}, {"zone": zone("Asia/Tokyo")}])
def test_a_row_may_have_a_zone_of_its_own(rules):
    local = datetime(2026, 3, 29, 2, 30)
    berlin = {"value": "x", "due_at": local, "timezone": "Europe/Berlin", "expires_at": "2026-03-29T04:30:00"}
    reader = RowReader(RowRules(anchor=ANCHOR, destination="mail", **rules))
    [message] = reader.read(batch_of([berlin], "rows"))
    assert (f"{message.due_at:%H:%M}", f"{message.expires_at:%H:%M}") == ("01:30", "02:30")
    assert reader.shifts == Shifts(gaps=1)
    # its offset wins over a zone
    aware = {"value": "x", "due_at": "2026-03-29T02:30:00+00:00", "timezone": "no zone at all"}
    assert f"{one(aware, **rules).due_at:%H:%M}" == "02:30"
    keyed = {"value": "x", "due_at": DUE, "at": datetime(2026, 3, 1, 13), "timezone": "Europe/Berlin"}
    same = {"value": "x", "due_at": DUE, "at": ANCHOR}
    assert one(keyed, id_columns=("at",), **rules).message_id == one(same, id_columns=("at",)).message_id


@pytest.mark.parametrize("name", ["Mars", "", "Europe", "../etc/passwd", 5, "Europe/Berlin\0"])
def test_a_zone_that_is_none(name):
    problem = one({"value": "x", "due_at": "2026-03-29T02:30:00", "timezone": name})
    assert problem.column == "timezone"
    assert problem.problem.endswith("is not an IANA time zone; write it as 'Europe/Berlin' or 'UTC'")


def test_a_row_without_a_zone_and_no_rule_is_refused():
    problem = one({"value": "x", "due_at": "2026-03-29T02:30:00", "timezone": None})
    assert (problem.column, "has no time zone" in problem.problem) == ("due_at", True)
