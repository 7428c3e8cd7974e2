"""What a send finds and does is the same whether rows are looked at by columns or one by one."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import datetime, timedelta

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lengths import length
from support.recorder import Recorder

from airflow_delayed.errors import InputError
from airflow_delayed.intake.arrow import to_batch
from airflow_delayed.intake.columns import ColumnRules, RowRules
from airflow_delayed.intake.files import SourceFile
from airflow_delayed.intake.rows import RowReader
from airflow_delayed.message import UTC, microseconds
from airflow_delayed.sending import Route, Sending

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
HOUR = timedelta(hours=1)
FILE = SourceFile(path="rows", format="parquet", partition={}, version=())


class Bounded(Recorder):
    """Says of many messages at once whether they are within its limit."""

    asked = 0

    def check(self, message, now):
        self.asked += 1
        super().check(message, now)

    def fits(self, extremes, now):
        return extremes.longest_body <= 100


class Arrow:
    """Record batches, as columns or as rows."""

    name = "rows"

    def __init__(self, batches, *, columns):
        self._batches = batches
        self._columns = columns

    def batches(self, wanted):
        first = 1
        for records in self._batches:
            batch = to_batch(records, FILE, first)
            yield batch if self._columns else replace(batch, records=None)
            first += batch.size

    def check_unchanged(self):
        pass


def records(rows, *, ids):
    return pa.RecordBatch.from_pydict(
        {
            "value": pa.array(["x" * size for size, *_ in rows]),
            "destination": pa.array([destination for _, destination, *_ in rows]),
            "due_at": pa.array([microseconds(NOW + due) for *_, due, _ in rows]).cast(pa.timestamp("us", tz="UTC")),
            **({"message_id": pa.array([name for *_, name in rows])} if ids else {}),
        }
    )


def outcome(batches, *, columns, kind, past_due, reject, stored=(), dry_run=False):
    """Return all that can be told of one send."""
    transport, store = Bounded(horizon=HOUR / 2), Bounded("store", destinations=())
    store.sent += stored
    routes = {
        "direct": Route(delivery=transport),
        "store": Route(delivery=transport, store=store, hold_over=HOUR / 4),
        "all": Route(delivery=store, store=store),
    }
    job = Sending(
        Arrow(batches, columns=columns),
        ColumnRules(),
        lambda: RowReader(RowRules(anchor=NOW)),
        routes[kind],
        began=NOW,
        past_due=past_due,
        max_past=HOUR / 60,
        clock=lambda: NOW,
        log=logging.getLogger("test"),
    )
    rejected = []
    try:
        found = job.preflight(reject=rejected.append if reject else None)
        job.deliver(found, dry_run=dry_run)
    except InputError as error:
        return str(error), [str(problem) for problem in rejected]
    return found, rejected, transport.sent, store.sent, job.sent, job.stored, job.skipped


DUES = st.sampled_from([timedelta(minutes=minutes) for minutes in (1, 10, 20, 40, 100)])
USUAL = st.tuples(st.integers(1, 3), st.sampled_from(["mail", "sms"]), DUES, st.integers(0, 10**6).map(str))
ODD = st.tuples(
    st.sampled_from([1, 101]),
    st.sampled_from(["mail", ""]),
    st.sampled_from([HOUR, -HOUR]),
    st.sampled_from(["1", "2", "a b"]),
)


@settings(max_examples=length("examples of columns and rows that are sent", 20, 150))
@given(
    st.lists(st.lists(USUAL, min_size=1, max_size=5), min_size=1, max_size=3),
    st.lists(ODD, max_size=2),
    st.booleans(),
    st.sampled_from(["direct", "store", "all"]),
    st.sampled_from(["fail", "send", "skip"]),
    st.booleans(),
    st.booleans(),
)
def test_columns_and_rows_are_sent_alike(parts, odd, ids, kind, past_due, reject, dry_run):
    parts[-1] += odd
    batches = [records(part, ids=ids) for part in parts]
    options = {"kind": kind, "past_due": past_due, "reject": reject, "dry_run": dry_run}
    assert outcome(batches, columns=True, **options) == outcome(batches, columns=False, **options)


ROWS = [(3, "mail", HOUR, str(number)) for number in range(20)]


@pytest.mark.parametrize("kind", ["direct", "store", "all"])
def test_rows_within_the_limits_are_not_asked_for_one_by_one(kind):
    found, _, direct, to_store, *_ = outcome(
        [records(ROWS, ids=True)], columns=True, kind=kind, past_due="fail", reject=False
    )
    assert (found.good, len(direct) + len(to_store), found.far) == (20, 20, 20 if kind == "direct" else 0)


def test_copies_and_conflicts_are_found_across_batches():
    options = {"columns": True, "kind": "direct", "past_due": "fail", "reject": False}
    found, _, sent, *_ = outcome([records(ROWS, ids=True), records(ROWS[5:7], ids=True)], **options)
    assert (found.duplicates.copies, len(sent)) == ({20, 21}, 20)
    other = [(4, "mail", HOUR, "7")]
    text, _ = outcome([records(ROWS, ids=True), records(other, ids=True)], **options)
    assert "rows row 8 and rows row 21" in text


def test_conflict_with_what_the_store_has_is_found():
    there = RowReader(RowRules(anchor=NOW)).read(to_batch(records([(9, "mail", HOUR, "7")], ids=True), FILE, 1))
    text, _ = outcome(
        [records(ROWS, ids=True)], columns=True, kind="store", past_due="fail", reject=False, stored=list(there)
    )
    assert "under the same ids: 7" in text
