from __future__ import annotations

from datetime import datetime, timedelta

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lengths import length

from airflow_delayed.clock import zone
from airflow_delayed.identity import digest_of
from airflow_delayed.intake import arrow
from airflow_delayed.intake.arrow import to_batch
from airflow_delayed.intake.columns import RowRules
from airflow_delayed.intake.files import SourceFile
from airflow_delayed.intake.rows import Problem, RowReader
from airflow_delayed.message import UTC, microseconds

ANCHOR = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
DUE = 1_772_400_000_000_000
TEXT = pa.string()
MAP = pa.map_(TEXT, TEXT)
MICROS = pa.timestamp("us", tz="UTC")


def batch(records, **partition):
    return to_batch(records, SourceFile(path="rows", format="parquet", partition=partition, version=()), 1)


def both(records, rules, **partition):
    """Read by columns where that can be, and row by row; the same must come out."""
    fast, slow = RowReader(rules), RowReader(rules)
    rows = batch(records, **partition)
    found = list(fast.read(rows))
    assert found == list(slow.by_row(rows))
    assert fast.shifts == slow.shifts
    return found


def times(unit="us", tz="UTC"):
    kind = pa.timestamp(unit, tz=tz)
    factor = {"s": 1_000_000, "ms": 1000, "us": 1, "ns": 1}[unit]
    usual = st.integers(DUE, DUE + 50).map(lambda value: value // factor * (1000 if unit == "ns" else 1))
    return usual, st.sampled_from([0, -1, 400_000_000_000_000_000, 1_774_747_800_000_000 // factor]), kind


LATIN = st.text("abc-é", min_size=1, max_size=3)
ODD = st.sampled_from(["", "a b", "é" * 200, "\0", "x" * 129])
KINDS = [TEXT, pa.large_string(), pa.dictionary(pa.int32(), TEXT)]
BYTES = st.binary(max_size=3), st.just(b"\xff"), pa.binary()


def rarely(draw):
    # not 0, which hypothesis likes best
    return draw(st.integers(0, 19)) == 13


def column(draw, size, choices, *, nulls):
    """Draw an array: mostly of usual values, mostly without nulls."""
    usual, odd, kind = draw(st.sampled_from(choices))
    values = draw(st.lists(usual, min_size=size, max_size=size))
    if size and rarely(draw):
        values[draw(st.integers(0, size - 1))] = draw(odd)
    if size and nulls and draw(st.booleans()):
        values[draw(st.integers(0, size - 1))] = None
    if pa.types.is_timestamp(kind):
        return pa.array(values, pa.int64()).cast(kind)
    if pa.types.is_dictionary(kind):
        return pa.array(values, kind.value_type).dictionary_encode()
    return pa.array(values, kind)


@st.composite
def maps(draw, size):
    """Draw maps, of which a null may have entries all the same, and names in any order and more than once."""
    rows = [
        draw(st.lists(st.tuples(st.sampled_from(["a", "b", "é", "zz"]), st.text("xé\0", max_size=2)), max_size=3))
        for _ in range(size)
    ]
    if draw(st.booleans()):
        rows = [list(dict(row).items()) for row in rows]
    if size and rarely(draw):
        rows[0] = [*rows[0], draw(st.sampled_from([("", "x"), ("n", None)]))]
    offsets, pairs = [0], []
    for row in rows:
        pairs += row
        offsets.append(len(pairs))
    mask = pa.array([draw(st.integers(0, 4)) == 3 for _ in rows], pa.bool_())
    kind = draw(st.sampled_from([TEXT, pa.large_string()]))
    names, values = (pa.array([pair[index] for pair in pairs], kind) for index in (0, 1))
    return pa.MapArray.from_arrays(pa.array(offsets, pa.int32()), names, values, mask=mask if any(mask) else None)


@st.composite
def sources(draw):
    """Draw records, rules, and what folders are called."""
    size = draw(st.integers(0 if rarely(draw) else 2, 6))
    texts = [(LATIN, ODD, kind) for kind in KINDS]
    where = draw(st.sampled_from([None, zone("UTC"), zone("UTC"), zone("Europe/Berlin")]))
    zones = ["UTC", "Europe/Berlin", *([None] if where or rarely(draw) else [])]
    stamps = [times(unit, tz) for unit in ("us", "ns", "ms", "s") for tz in zones]
    numbers = [
        (st.integers(0, 2000), st.sampled_from([-1, 10**13]), pa.int64()),
        (st.integers(0, 90), st.just(-1), pa.int16()),
        (st.floats(0, 1e6), st.sampled_from([-1.0, float("nan"), float("inf"), 1e10]), pa.float64()),
        (st.floats(0, 1000, width=32), st.just(-1.0), pa.float32()),
        (st.decimals(0, 99, places=2), st.just(0), pa.decimal128(10, 2)),
    ]
    content = [*texts, (LATIN.map(str.encode), st.just(b"\xff"), pa.binary()), (BYTES[0], BYTES[1], pa.large_binary())]
    ids = [(st.text("ab1-", min_size=1, max_size=3), ODD, kind) for kind in KINDS]
    keys = [(st.integers(-5, 5), st.just(7), pa.int32()), *texts, numbers[2], numbers[4], stamps[0]]
    columns = {draw(st.sampled_from(["value", "value", "body"])): column(draw, size, content, nulls=False)}
    fills = draw(st.booleans())
    due = draw(st.sampled_from(["due_at", "delay_seconds", "both", *(["neither"] if fills else [])]))
    if due in ("due_at", "both"):
        columns["due_at"] = column(draw, size, stamps, nulls=fills or due == "both")
    if due in ("delay_seconds", "both"):
        columns["delay_seconds"] = column(draw, size, numbers, nulls=fills)
        if due == "both" and not rarely(draw):
            taken = columns["due_at"].is_valid()
            columns["delay_seconds"] = pc.if_else(taken, None, columns["delay_seconds"])
    keyed = draw(st.booleans())
    wanted = {
        "destination": (texts, fills),
        "tag": (texts, True),
        **({"order": (keys, rarely(draw))} if keyed else {"message_id": (ids, rarely(draw))}),
    }
    for name, (choices, nulls) in wanted.items():
        if name == "order" or draw(st.booleans()):
            columns[name] = column(draw, size, choices, nulls=nulls)
    if draw(st.integers(0, 3)) == 1:
        names = st.sampled_from(["UTC", "Europe/Berlin", "America/New_York"])
        columns["timezone"] = column(draw, size, [(names, st.just("Mars"), kind) for kind in KINDS], nulls=True)
    if draw(st.integers(0, 3)) == 2:
        later = [value + draw(st.sampled_from([10**12, 10**12, 0])) for value in range(DUE, DUE + size)]
        columns["expires_at"] = pc.if_else(pa.array([value % 3 > 0 for value in later]), pa.array(later), None).cast(
            MICROS
        )
    if draw(st.integers(0, 3)) == 3:
        columns["spread_seconds"] = column(draw, size, numbers, nulls=True)
    if draw(st.booleans()):
        columns["headers"] = draw(maps(size))
    if rarely(draw):
        columns[draw(st.sampled_from(["tag", "headers", "value", "message_id"]))] = pa.nulls(size)
    records = pa.RecordBatch.from_pydict(columns)
    if size:
        start = draw(st.integers(0, 1))
        records = records.slice(start, draw(st.integers(1, size)))
    later = ANCHOR + timedelta(days=2)
    rules = RowRules(
        anchor=ANCHOR,
        scope=draw(st.sampled_from([b"", b"run"])),
        destination=draw(st.sampled_from(["mail", ""])) if fills else None,
        due_at=later if fills else None,
        headers=draw(st.sampled_from([{}, {}, {"a": "all", "g": "1"}])),
        message_id=draw(st.sampled_from([None, None, "given", *(["no id"] if rarely(draw) else [])])),
        id_columns=("order",) if keyed else (),
        optional={
            "tag": draw(st.sampled_from([None, "all"])),
            "expires_at": draw(st.sampled_from([None, later + timedelta(days=1)])),
        },
        spread=draw(st.sampled_from([timedelta(0), timedelta(0), timedelta(minutes=10), timedelta(days=2)])),
        zone=where,
    )
    partition = draw(
        st.sampled_from(
            [{}, {}, {"destination": "folder"}, {"tag": None, "destination": "b"}, {"due_at": "2026-04-01"}]
        )
    )
    return records, rules, partition


@settings(max_examples=length("examples of columns and rows that are checked", 40, 300))
@given(sources())
def test_columns_and_rows_say_the_same(source):
    records, rules, partition = source
    both(records, rules, **partition)


def usual(**columns):
    defaults = {
        "value": pa.array(["a", "b", "c"]),
        "destination": pa.array(["mail", "sms", "mail"]),
        "due_at": pa.array([DUE, DUE + 1, DUE + 2]).cast(MICROS),
        "message_id": pa.array(["1", "2", "3"]),
        "headers": pa.array([[("b", "1"), ("a", "2")], None, []], MAP),
        "tag": pa.array(["t", None, "é"]),
        "expires_at": pa.array([None, DUE + 5, None]).cast(pa.int64()).cast(MICROS),
    }
    named = {**defaults, **columns}
    return pa.RecordBatch.from_pydict({name: values for name, values in named.items() if values is not None})


@pytest.mark.parametrize(
    ("columns", "rules"),
    [
        ({}, {}),
        ({"value": None, "body": pa.array([b"a", b"\xff", b""])}, {}),
        ({"value": pa.array(["a", "b", "a"]).dictionary_encode()}, {}),
        ({"destination": pa.array(["q", None, "r"], pa.large_string())}, {"destination": "mail"}),
        ({"destination": None}, {"destination": "mail"}),
        ({"due_at": pa.array([DUE * 1000 + 1] * 3).cast(pa.timestamp("ns", tz="Mars/Olympus"))}, {}),
        ({"due_at": pa.array([DUE] * 3).cast(pa.timestamp("us"))}, {"zone": zone("UTC")}),
        ({"due_at": None, "delay_seconds": pa.array([1, 2, 3])}, {}),
        ({"due_at": None, "delay_seconds": pa.array([0.1, 1.0000001, 3]), "expires_at": None}, {}),
        ({"due_at": pa.array([DUE, None, DUE]).cast(MICROS), "delay_seconds": pa.array([None, 9, None])}, {}),
        ({"due_at": None}, {"due_at": ANCHOR}),
        ({"message_id": None}, {"scope": b"run"}),
        ({"message_id": None}, {"headers": {"a": "all"}, "optional": {"tag": "all"}}),
        ({"message_id": None, "headers": None, "tag": None}, {"headers": {"a": "all"}, "optional": {"tag": "all"}}),
        ({"message_id": None, "order": pa.array([1, 2, 3])}, {"id_columns": ("order",)}),
        ({"message_id": None, "order": pa.array(["x", "y", "z"])}, {"id_columns": ("order", "value")}),
        ({"expires_at": pa.nulls(3), "tag": pa.nulls(3)}, {"optional": {"expires_at": ANCHOR + timedelta(days=9)}}),
        ({"headers": pa.array([[("a", "1"), ("a", "2")]] * 3, MAP), "message_id": None}, {}),
        ({"expires_at": None}, {"spread": timedelta(minutes=5)}),
        ({"message_id": None, "expires_at": None}, {"spread": timedelta(minutes=5), "scope": b"run"}),
        ({"message_id": None, "spread_seconds": pa.array([0, None, 3600]), "expires_at": None}, {}),
        ({"spread_seconds": pa.array([0.5, None, 1e-6])}, {"spread": timedelta(microseconds=3)}),
    ],
)
def test_what_is_usual_is_read_by_its_columns(columns, rules):
    records, rules = usual(**columns), RowRules(**{"anchor": ANCHOR, **rules})
    assert not [found for found in both(records, rules) if isinstance(found, Problem)]
    checked = RowReader(rules).check(batch(records))
    assert checked is not None
    assert checked.digests() == [digest_of(message) for message in checked.messages()]
    assert list(checked.first(2).messages()) == list(checked.messages())[:2]


def test_text_that_is_no_utf8_is_a_problem_of_its_row():
    torn = pa.array([b"a", b"\xff", b"c"]).view(TEXT)
    for name in ("value", "destination", "message_id", "tag"):
        found = both(usual(**{name: torn}), RowRules(anchor=ANCHOR))
        assert [isinstance(one, Problem) and one.column for one in found] == [False, name, False]
    entries = [pa.array(["n", "n"]), pa.array([b"a", b"\xff"]).view(TEXT)]
    assert (
        len(
            both(
                usual(headers=pa.MapArray.from_arrays(pa.array([0, 1, 1, 2], pa.int32()), *entries)),
                RowRules(anchor=ANCHOR),
            )
        )
        == 3
    )


@pytest.mark.parametrize("numpy", [True, False])
def test_times_are_alike_with_numpy_and_without(monkeypatch, numpy):
    monkeypatch.setattr(arrow, "NUMPY", numpy)
    moments = [datetime.min.replace(tzinfo=UTC), ANCHOR + timedelta(microseconds=1), datetime.max.replace(tzinfo=UTC)]
    values = pa.array([0, *map(microseconds, moments)])[1:]
    found = arrow.moments(values)
    assert found == moments
    assert {moment.tzinfo for moment in found} == {UTC}
