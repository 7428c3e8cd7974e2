"""Files of comma-separated values as a source of rows."""

from __future__ import annotations

import gzip
from datetime import datetime, timedelta

import fsspec
import pytest

from airflow_delayed.errors import SourceError, UnsupportedColumns
from airflow_delayed.intake import csv_files
from airflow_delayed.intake.columns import ColumnRules, RowRules
from airflow_delayed.intake.rows import Problem, RowReader
from airflow_delayed.intake.sources import open_source
from airflow_delayed.message import UTC

DUE = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
HEAD = "value,destination,due_at,delay_seconds,headers,message_id,tag\n"


def source(path, **options):
    return open_source(fsspec.filesystem("file"), str(path), shown_as=str(path), require_success=False, **options)


@pytest.fixture
def read(tmp_path):
    """Read a text as a file of CSV, row by row."""

    def rows(text, wanted=None, *, name="rows.csv", **rules):
        data = text if isinstance(text, bytes) else text.encode()
        (tmp_path / name).write_bytes(data)
        reader = RowReader(RowRules(anchor=DUE, destination="mail", **rules))
        wanted = wanted or ColumnRules(destination=True, id_columns=rules.get("id_columns", ()))
        batches = list(source(tmp_path / name).batches(wanted))
        return [item for batch in batches for item in reader.read(batch)]

    return rows


def test_fields_of_all_kinds(read):
    first, second = read(
        "\ufeff" + HEAD + '"say ""hi"",\nthen go",sms,2026-03-01T13:00:00+01:00,,"{""a"": ""b""}",id-1,customer-7\n'
        '"",,,1.0000005,,id-2,\n'
    )
    assert (first.body, first.destination, first.due_at) == (b'say "hi",\nthen go', "sms", DUE)
    assert (dict(first.headers), first.message_id, first.tag) == ({"a": "b"}, "id-1", "customer-7")
    # quoted, it is an empty text; and a fraction of a microsecond is rounded up
    assert (second.body, second.destination, second.tag) == (b"", "mail", None)
    assert second.due_at == DUE + timedelta(seconds=1, microseconds=1)


@pytest.mark.parametrize(
    "row, column, says",
    [
        ("x,,soon,,,id,", "due_at", "'soon' is not a time"),
        ("x,,2026-03-01T13:00:00,,,id,", "due_at", "has no time zone"),
        ("x,,,five,,id,", "delay_seconds", "'five' is not a number of seconds"),
        ("x,,,-1,,id,", "delay_seconds", "is negative"),
        ("x,,,1e999999999999,,id,", "delay_seconds", "is neither a number of seconds"),
        ("x,,,5,a=b,id,", "headers", "are not JSON"),
        ('x,,,5,"{""a"": 1}",id,', "headers", "must be text, not int"),
        ('x,,,5,"[]",id,', "headers", "must be a JSON object, not list"),
        (",,,5,,id,", "value", "is null"),
        ("x,,,5,,,", "message_id", "is null"),
        ("x,,,,,id,", "due_at", "is null"),
    ],
)
def test_a_row_that_cannot_be_sent_is_a_problem_of_its_own(read, row, column, says):
    good = "y,,,5,,id-2,"
    problem, message = read(f"{HEAD}{row}\n{good}\n")
    assert isinstance(problem, Problem)
    assert (problem.column, says in problem.problem) == (column, True), problem
    assert problem.place.endswith("rows.csv row 1")
    assert message.body == b"y"


def test_times_of_seven_digits_and_local_times(read):
    text = "value,due_at,timezone\nx,2026-03-01T12:00:00.0000001Z,\ny,2026-03-01 13:00,Europe/Berlin\n"
    assert [message.due_at for message in read(text)] == [DUE + timedelta(microseconds=1), DUE]


def test_keys_are_text(read):
    [one] = read("value,delay_seconds,order\nx,5,007\n", id_columns=("order",))
    [other] = read("value,delay_seconds,order\nx,5,7\n", id_columns=("order",))
    assert one.message_id != other.message_id


def test_many_rows_in_several_batches_and_packed(read, monkeypatch):
    monkeypatch.setattr(csv_files, "BATCH_ROWS", 100)
    text = "value,delay_seconds\n" + "".join(f"body {number},{number}\n" for number in range(1000))
    found = read(gzip.compress(text.encode()), name="rows.csv.gz")
    assert [message.body for message in found] == [f"body {number}".encode() for number in range(1000)]
    [problem] = (item for item in read(text.replace("body 777,777", "body 777,x")) if isinstance(item, Problem))
    assert problem.place.endswith("row 778")


@pytest.mark.parametrize(
    "text, error, says",
    [
        ("", SourceError, "is empty; the first line of a CSV file names its columns"),
        ("a,delay_seconds\n1,2\n", UnsupportedColumns, "no column value"),
        ("value,delay_seconds,value\n1,2,3\n", UnsupportedColumns, "more than one column value"),
        ("value,delay_seconds\n1,2,3\n", SourceError, "cannot be read as CSV"),
        (b"value,delay_seconds\n\xff,2\n", SourceError, "cannot be read as CSV"),
    ],
)
def test_a_file_that_is_none(read, text, error, says):
    with pytest.raises(error, match=says):
        read(text)


def test_no_rows_and_a_folder(read, tmp_path):
    assert read("value,delay_seconds\n") == []
    folder = tmp_path / "out" / "tag=customer-7"
    folder.mkdir(parents=True)
    (folder / "part-0.csv").write_text("value,delay_seconds\nx,5\n")
    [batch] = source(tmp_path / "out").batches(ColumnRules(destination=True))
    [message] = RowReader(RowRules(anchor=DUE, destination="mail")).read(batch)
    assert message.tag == "customer-7"
