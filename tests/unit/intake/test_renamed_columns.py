"""Columns of another name, ``columns=``: a table of cases for the sources of rows."""

from __future__ import annotations

import json
import logging
from datetime import datetime, timedelta

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from airflow_delayed.errors import UnsupportedColumns
from airflow_delayed.identity import key_id
from airflow_delayed.intake.columns import ColumnRules, RowRules, check_renames
from airflow_delayed.intake.rows import RowReader
from airflow_delayed.intake.sources import ListSource, open_source
from airflow_delayed.intake.spool import Spool, SpooledSource
from airflow_delayed.message import UTC

DUE = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
BASE = {"value": "text", "due_at": "remind_at"}
ROWS = [
    {"text": "a", "remind_at": DUE, "customer_id": "c1", "price": 1.5},
    {"text": "b", "remind_at": DUE + timedelta(seconds=1), "customer_id": "c2", "price": 2.5},
]
KINDS = ("parquet", "json", "list", "spool")
# sources whose rows each have names of their own, so that a problem is one of its row
BY_ROW = ("json", "list", "spool")


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def made(kind, tmp_path):
    """Makes a source of rows."""
    spool = Spool(str(tmp_path), b"task", reuse=False, check_count=lambda count: None, log=logging.getLogger())

    def make(rows):
        if kind == "list":
            return ListSource(rows)
        if kind == "spool":
            return SpooledSource("rows", b"", lambda wanted: rows, spool)
        if kind == "parquet":
            path = tmp_path / "rows.parquet"
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            path = tmp_path / "rows.jsonl"
            path.write_text("".join(json.dumps(row, default=str) + "\n" for row in rows))
        return open_source(fsspec.filesystem("file"), str(path), shown_as=str(path))

    yield make
    spool.delete()


def read(source, columns, destination="mail", **rules):
    """All rows, by columns where that can be, and the same row by row."""
    wanted = ColumnRules(destination=destination is not None, columns=columns, id_columns=rules.get("id_columns", ()))
    reader = RowReader(RowRules(anchor=DUE, destination=destination, columns=columns, **rules))
    batches = list(source.batches(wanted))
    items = [item for batch in batches for item in reader.read(batch)]
    assert items == [item for batch in batches for item in reader.by_row(batch)]
    return items


def problems(read_all):
    """The texts of what is wrong with a source: one of its columns, or those of its rows."""
    try:
        return [str(item) for item in read_all()]
    except UnsupportedColumns as error:
        return [str(error)]


@pytest.mark.parametrize(
    ("columns", "rows", "rules", "expected"),
    [
        pytest.param(BASE, ROWS, {}, {"body": b"a", "due_at": DUE, "tag": None}, id="two renamed, others ignored"),
        pytest.param({**BASE, "tag": "customer_id"}, ROWS, {}, {"tag": "c1"}, id="an optional field"),
        pytest.param(
            {**BASE, "tag": "customer_id"},
            ROWS,
            {"id_columns": ("customer_id",)},
            {"tag": "c1", "message_id": key_id(("customer_id",), ("c1",))},
            id="one column as tag and as key",
        ),
        pytest.param(
            {**BASE, "tag": "customer_id", "message_id": "customer_id"},
            ROWS,
            {},
            {"tag": "c1", "message_id": "c1"},
            id="one column twice",
        ),
        pytest.param(
            {**BASE, "tag": "text"},
            ROWS,
            {"id_columns": ("text",)},
            {"body": b"a", "tag": "a", "message_id": key_id(("text",), ("a",))},
            id="a body that is also tag and key",
        ),
        pytest.param(
            {"value": "text", "delay_seconds": "price"},
            ROWS,
            {},
            {"due_at": DUE + timedelta(seconds=1.5)},
            id="a delay",
        ),
        pytest.param(
            {"due_at": "remind_at", "body": "text"}, ROWS, {}, {"body": b"a"}, id="the body by its other name"
        ),
        pytest.param(
            BASE,
            [{**row, "body": "not this", "due_at": 5, "tag": "t"} for row in ROWS],
            {},
            {"body": b"a", "due_at": DUE, "tag": "t"},
            id="columns of our names beside",
        ),
        pytest.param(
            {"value": "tag", "due_at": "expires_at", "tag": "value"},
            [{"tag": "a", "value": "t", "expires_at": DUE}],
            {},
            {"body": b"a", "tag": "t", "due_at": DUE, "expires_at": None},
            id="our names for other things",
        ),
        pytest.param(
            {},
            [{"value": "a", "due_at": DUE, "colour": "red"}],
            {},
            {"body": b"a"},
            id="nothing renamed, others ignored",
        ),
        pytest.param(
            {**BASE, "destination": "queue"},
            [{**row, "queue": None} for row in ROWS],
            {},
            {"destination": "mail"},
            id="all of a column null",
        ),
    ],
)
def test_columns_are_read_by_the_names_of_the_source(made, columns, rows, rules, expected):
    found = read(made(rows), columns, **rules)
    assert len(found) == len(rows)
    assert {name: getattr(found[0], name) for name in expected} == expected


@pytest.mark.parametrize(
    ("columns", "rows", "rules", "says"),
    [
        pytest.param(
            {**BASE, "tag": "custmer"}, ROWS, {}, "no column custmer (tag), which columns= names", id="a typo"
        ),
        pytest.param(None, ROWS, {}, "unknown columns customer_id, price, remind_at", id="no columns="),
        pytest.param(None, ROWS, {}, "pass columns=", id="no columns=, what to do"),
        pytest.param(
            {**BASE, "message_id": "customer_id"},
            ROWS,
            {"id_columns": ("price",)},
            "a column customer_id (message_id), and id_columns= too",
            id="an id and a key",
        ),
        pytest.param(BASE, ROWS, {"destination": None}, "no column destination", id="nowhere to"),
        pytest.param({**BASE, "tag": "price"}, ROWS, {}, "column price (tag)", id="a column of a wrong type"),
        pytest.param(
            {**BASE, "message_id": "id"},
            [{**row, "id": None} for row in ROWS],
            {},
            "column id (message_id): is null",
            id="a null id",
        ),
        pytest.param(
            {"value": "text", "due_at": "remind_at"},
            [{**row, "text": None} for row in ROWS],
            {},
            "column text (value): is null",
            id="a null body",
        ),
        pytest.param(
            {"value": "text", "delay_seconds": "customer_id"},
            ROWS,
            {},
            "column customer_id (delay_seconds)",
            id="a text as delay",
        ),
    ],
)
def test_wrong_columns_are_named_by_the_sources_name_and_ours(made, columns, rows, rules, says):
    found = problems(lambda: read(made(rows), columns, **rules))
    assert found
    assert all(says in text for text in found)


@pytest.mark.parametrize("kind", BY_ROW, indirect=True)
def test_a_row_may_lack_an_optional_column_if_another_row_has_it(made):
    first = {name: value for name, value in ROWS[0].items() if name != "customer_id"}
    found = read(made([first, ROWS[1]]), {**BASE, "tag": "customer_id"})
    assert [message.tag for message in found] == [None, "c2"]
    # an id that is missing would be made from content, and the message would not be found by its own
    without_id, _ = read(made([first, ROWS[1]]), {**BASE, "message_id": "customer_id"})
    assert "column customer_id (message_id): is null" in str(without_id)


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"text": "value"}, "columns= has text, and its keys are our names: destination, value,"),
        ({"value": "text", "body": "text"}, "both value and body"),
        ({"value": 5}, "must be a dictionary"),
        ({"value": ""}, "must be a dictionary"),
        (["value"], "must be a dictionary"),
        ("value", "must be a dictionary"),
    ],
)
def test_what_columns_cannot_be(columns, says):
    with pytest.raises(ValueError, match=says):
        check_renames(columns)
