"""Rows that go through a spool are the rows that a list has."""

from __future__ import annotations

import logging
import tempfile
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from uuid import UUID

from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_delayed.intake import spool
from airflow_delayed.intake.columns import ColumnRules, RowRules
from airflow_delayed.intake.rows import Problem, RowReader
from airflow_delayed.intake.sources import ListSource
from airflow_delayed.intake.spool import Spool, SpooledSource
from airflow_delayed.message import UTC, DelayedMessage

ANCHOR = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
TEXTS = st.text("aé\0 \ud800", max_size=3)
TIMES = st.one_of(
    st.datetimes(datetime(2026, 3, 28), datetime(2026, 11, 1)),
    st.datetimes(datetime(2026, 3, 28), datetime(2026, 11, 1), timezones=st.just(timezone(timedelta(hours=5)))),
    st.sampled_from(["2026-07-01T12:00:00Z", "2026-07-01T12:00:00.1234567", "soon", 5, date(2026, 7, 1)]),
)
JUNK = st.sampled_from([None, 5, 1.5, True, b"\xff", [1], {"a": [1]}, object(), {1: 2}, Decimal("NaN"), set()])
KEYS = st.one_of(
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.decimals(-9, 9, places=3),
    TEXTS,
    st.binary(max_size=2),
    st.booleans(),
    st.dates(date(2026, 1, 1)),
    TIMES,
    st.just(UUID(int=7)),
    JUNK,
)
ROWS = st.fixed_dictionaries(
    {},
    optional={
        "value": st.one_of(TEXTS, st.binary(max_size=3), st.just({"a": [1]}), JUNK),
        "body": TEXTS,
        "destination": st.one_of(TEXTS, JUNK),
        "due_at": TIMES,
        "delay_seconds": st.one_of(st.integers(-1, 2**64), st.floats(), st.decimals(0, 9, places=7), JUNK),
        "headers": st.one_of(st.dictionaries(TEXTS, TEXTS, max_size=2), st.just([("a", "b")]), JUNK),
        "message_id": st.one_of(st.text("ab", max_size=2), JUNK),
        "tag": st.one_of(TEXTS, JUNK),
        "expires_at": st.one_of(TIMES, JUNK),
        "timezone": st.one_of(st.sampled_from(["UTC", "Europe/Berlin", "Mars", None]), JUNK),
        "order": KEYS,
        "other": JUNK,
    },
)


def read(found, wanted, rules):
    reader = RowReader(rules)
    return [(batch.place(0), item) for batch in found.batches(wanted) for item in reader.read(batch)]


def spooled(rows, wanted):
    with tempfile.TemporaryDirectory() as folder:
        made = Spool(folder, b"task", reuse=False, check_count=lambda count: None, log=logging.getLogger())
        found = SpooledSource("messages", b"", lambda _: rows, made)
        yield from found.batches(wanted)
        made.delete()


class Spooled:
    """The batches of rows that went through a spool."""

    def __init__(self, rows):
        self.rows = rows

    def batches(self, wanted):
        return spooled(self.rows, wanted)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.one_of(ROWS, JUNK), max_size=6), st.booleans(), st.booleans())
def test_the_same_messages_and_problems_as_of_a_list(rows, keyed, fill):
    keys = ("order",) if keyed else ()
    wanted = ColumnRules(destination=fill, due=fill, id_columns=keys, columns={})
    due = ANCHOR + timedelta(hours=1) if fill else None
    rules = RowRules(anchor=ANCHOR, destination="mail" if fill else None, due_at=due, id_columns=keys)
    listed = [item for _, item in read(ListSource(rows), wanted, rules)]
    found = [item for _, item in read(Spooled(rows), wanted, rules)]
    assert len(found) == len(listed)
    for number, (one, other) in enumerate(zip(listed, found, strict=True), 1):
        assert isinstance(one, Problem) == isinstance(other, Problem), (one, other)
        if isinstance(one, DelayedMessage):
            assert one == other
        else:
            assert (other.place, one.place) == (f"messages row {number}",) * 2


def test_rows_of_many_kinds_in_several_batches_keep_their_order_and_numbers(monkeypatch):
    monkeypatch.setattr(spool, "BATCH_ROWS", 7)
    kinds = ["text", b"bytes", {"json": 1}]
    rows = [
        {
            "value": kinds[number % 3],
            "delay_seconds": [1, 1.5, Decimal(2)][number % 3],
            "order": [number, str(number)][number % 2],
        }
        for number in range(50)
    ]
    wanted, rules = (
        ColumnRules(destination=True, id_columns=("order",)),
        RowRules(anchor=ANCHOR, destination="mail", id_columns=("order",)),
    )
    listed = [item for _, item in read(ListSource(rows), wanted, rules)]
    assert [item for _, item in read(Spooled(rows), wanted, rules)] == listed
    places = [batch.place(index) for batch in Spooled(rows).batches(wanted) for index in range(batch.size)]
    assert places == [f"messages row {number}" for number in range(1, 51)]
