"""Hostile sources: what memory they take, and what they reach."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import tracemalloc
import zipfile
from datetime import datetime

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from airflow_delayed.errors import SourceError
from airflow_delayed.intake import files
from airflow_delayed.intake.columns import ColumnRules, RowRules
from airflow_delayed.intake.rows import Problem, RowReader
from airflow_delayed.intake.sources import ListSource, open_source
from airflow_delayed.message import UTC

DUE = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
LOCAL = fsspec.filesystem("file")
MB = 1024 * 1024
GOOD = {"value": "a", "destination": "q", "delay_seconds": 1}


def source(path, **options):
    return open_source(LOCAL, str(path), shown_as=str(path), require_success=False, **options)


def count(found, wanted=None):
    """Read all rows as a task does, and return how many are messages and the problems of the others."""
    reader = RowReader(RowRules(anchor=DUE))
    good, problems = 0, []
    for batch in found.batches(wanted or ColumnRules()):
        for item in reader.read(batch):
            if isinstance(item, Problem):
                problems.append(item)
            else:
                good += 1
    return good, problems


class Peak:
    """The most that Python holds within the block."""

    def __enter__(self):
        tracemalloc.start()
        return self

    def __exit__(self, *error):
        self.mb = tracemalloc.get_traced_memory()[1] / MB
        tracemalloc.stop()


def odd_rows(number):
    return [{**GOOD, **{f"{row}-{key}": 1 for key in range(10)}} for row in range(number)]


@pytest.mark.parametrize("listed", [False, True])
def test_rows_with_keys_of_their_own_take_memory_by_their_number(tmp_path, listed):
    rows = odd_rows(4000)
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    with Peak() as peak:
        good, problems = count(ListSource(rows) if listed else source(path))
    assert peak.mb < 100
    assert (good, len(problems)) == (0, 4000)
    assert "unknown columns 7-0, 7-1" in problems[7].problem
    # what is rejected is the row as it was, and no column of another
    assert problems[7].row == rows[7]
    assert count(source(path), ColumnRules(columns={})) == (4000, [])


def test_a_row_with_very_many_columns_has_a_short_problem(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({**GOOD, **{f"key-{number}": 1 for number in range(10_000)}}))
    _, [problem] = count(source(tmp_path))
    assert "and 9,995 more" in str(problem)
    assert len(str(problem)) < 1000


def unpacking_to(path, packing, megabytes, piece):
    with packing.open(path, "wb") as file:
        for _ in range(megabytes):
            file.write(piece)


@pytest.mark.parametrize("packing, ending", [(gzip, ".gz"), (bz2, ".bz2"), (lzma, ".xz")])
def test_a_compressed_file_of_one_huge_line_is_refused(tmp_path, packing, ending):
    path = tmp_path / f"rows.jsonl{ending}"
    unpacking_to(path, packing, 128, b"x" * MB)
    with (
        Peak() as peak,
        pytest.raises(SourceError, match=r"rows\.jsonl.* row 1 is a line of more than 16,777,216 bytes"),
    ):
        count(source(path))
    assert peak.mb < 100


def test_the_longest_line_is_read_and_one_byte_more_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    good = json.dumps(GOOD)
    longest = json.dumps({**GOOD, "value": ""})
    longest = longest.replace('""', '"' + "x" * (files.MAX_LINE - len(longest) - 1) + '"') + "\n"
    assert len(longest) == files.MAX_LINE
    path.write_text(f"{good}\n{longest}{good}\n")
    assert count(source(path)) == (3, [])
    path.write_text(f"{good}\n {longest}{good}\n")
    with pytest.raises(SourceError, match="row 2 is a line of more than"):
        count(source(path))


def test_a_file_that_unpacks_to_far_more_than_its_size_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl.bz2"
    unpacking_to(path, bz2, 65, (b" " * 1023 + b"\n") * 1024)
    with pytest.raises(SourceError, match=r"rows\.jsonl\.bz2 unpacks to more than 67,108,864 bytes"):
        count(source(path))
    # as it may, however often it repeats itself
    unpacking_to(path, bz2, 64, (b" " * 1023 + b"\n") * 1024)
    assert count(source(path)) == (0, [])


def test_a_file_that_unpacks_to_more_than_is_ever_read_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_UNPACKED", 10_000)
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(os.urandom(10_001).replace(b"\n", b"-")))
    with pytest.raises(SourceError, match="unpacks to more than 10,000 bytes"):
        count(source(path))


@pytest.mark.parametrize("ending", ["gz", "bz2", "xz", "zst", "zip", "empty.zip"])
def test_a_damaged_compressed_file_is_named(tmp_path, ending):
    path = tmp_path / f"rows.jsonl.{ending}"
    path.write_bytes(b"not compressed")
    if ending == "empty.zip":
        zipfile.ZipFile(path, "w").close()
    with pytest.raises(SourceError, match=rf"rows\.jsonl\.{ending} cannot be read as lines of text"):
        count(source(path, source_format="json"))


def test_a_folder_whose_name_is_not_text_makes_its_rows_problems(tmp_path):
    folder = os.fsencode(tmp_path / "rows") + b"/tag=\xff"
    os.makedirs(folder)
    parquet(tmp_path / "rows.parquet", ["a", "b"])
    os.rename(tmp_path / "rows.parquet", folder + b"/part-0.parquet")
    good, problems = count(source(tmp_path / "rows"))
    assert good == 0
    assert [problem.column for problem in problems] == ["tag", "tag"]


def test_long_lines_come_in_small_batches(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({**GOOD, "value": "x" * MB}) for _ in range(60)))
    with Peak() as peak:
        assert count(source(path)) == (60, [])
    assert peak.mb < 60


def parquet(path, values, **options):
    size = len(values)
    columns = {"value": values, "destination": ["q"] * size, "delay_seconds": [1] * size}
    pq.write_table(pa.table(columns), path, **options)


def shared(text, few, many):
    """Return a column with one text in many rows, after a few with another."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * few + [1] * many, pa.int32()), ["a", text])


def test_a_text_that_many_rows_share_does_not_multiply(tmp_path):
    # 8,000 MB in a file of 100 KB
    parquet(tmp_path / "rows.parquet", shared("x" * 1_000_000, 5000, 8000), store_schema=False)
    pool = pa.default_memory_pool()
    before, found = pool.bytes_allocated(), 0
    for batch in source(tmp_path).batches(ColumnRules()):
        found += batch.size
        assert batch.records.nbytes < 80 * MB
        assert pool.bytes_allocated() - before < 250 * MB
        if found > 5200:
            break
    assert found > 5200


def test_large_values_of_parquet_come_in_small_batches(tmp_path):
    parquet(tmp_path / "rows.parquet", ["a"] * 5000 + ["x" * 100_000] * 2000, use_dictionary=False)
    batches = list(source(tmp_path).batches(ColumnRules()))
    assert max(batch.records.nbytes for batch in batches) < 64 * MB
    assert [batch.first_row for batch in batches[1:]] == [batch.first_row + batch.size for batch in batches[:-1]]
    assert sum(batch.size for batch in batches) == 7000


@pytest.mark.parametrize(("compression", "dictionary"), [("zstd", True), ("gzip", False)])
def test_a_value_of_parquet_that_unpacks_to_far_more_than_its_size_is_refused(tmp_path, compression, dictionary):
    value = b"x" * (100 * MB)
    parquet(tmp_path / "rows.parquet", [value], compression=compression, use_dictionary=dictionary)
    del value
    pool = pa.default_memory_pool()
    before = pool.bytes_allocated()
    with pytest.raises(
        SourceError, match=r"rows\.parquet: column value unpacks from .* to 10[0-9],[0-9]{3},[0-9]{3} bytes"
    ):
        count(source(tmp_path))
    assert pool.bytes_allocated() - before < 20 * MB
    # one that is not read does not matter
    parquet(tmp_path / "rows.parquet", ["a"])
    table = pq.read_table(tmp_path / "rows.parquet").append_column("more", pa.array([b"x" * (100 * MB)]))
    pq.write_table(table, tmp_path / "rows.parquet", compression=compression, use_dictionary=dictionary)
    assert count(source(tmp_path), ColumnRules(columns={})) == (1, [])


def test_headers_that_rows_share_do_not_multiply(tmp_path):
    names, values = shared("h", 0, 5000), shared("x" * 100_000, 0, 5000)
    headers = pa.MapArray.from_arrays(pa.array(range(5001), pa.int32()), names, values)
    pq.write_table(pa.table({"value": ["a"] * 5000, "headers": headers}), tmp_path / "rows.parquet", store_schema=False)
    batch = next(source(tmp_path).batches(ColumnRules(destination=True, due=True)))
    assert batch.records.schema.field("headers").type == pa.map_(pa.string(), pa.string())
    assert batch.records.nbytes < 80 * MB


DELTA = {"use_dictionary": ["destination"], "column_encoding": {"value": "DELTA_BYTE_ARRAY"}, "compression": "zstd"}


def test_a_long_value_that_equals_the_one_before_does_not_multiply(tmp_path):
    # 400 MB in a file of 2 KB: of each value alone what differs from the one before is stored
    long = pa.array(["x" * 1_000_000] * 8)
    parquet(tmp_path / "rows.parquet", pa.chunked_array([["a"] * 400, *[long] * 50]), **DELTA)
    assert (tmp_path / "rows.parquet").stat().st_size < 5000
    pool = pa.default_memory_pool()
    before, found = pool.bytes_allocated(), 0
    for batch in source(tmp_path).batches(ColumnRules()):
        found += batch.size
        assert pool.bytes_allocated() - before < 250 * MB
        assert batch.records.nbytes < 80 * MB
        if found > 420:
            break
    assert found > 420


def with_headers(path, counts):
    """Write rows with so many headers of one name."""
    ends = [sum(counts[:row]) for row in range(len(counts) + 1)]
    names = pa.array(["k"] * ends[-1])
    headers = pa.MapArray.from_arrays(pa.array(ends, pa.int32()), names, names)
    columns = {"value": ["a"] * len(counts), "destination": ["q"] * len(counts), "delay_seconds": [1] * len(counts)}
    pq.write_table(pa.table({**columns, "headers": headers}), path, compression="zstd")


def test_a_row_of_very_many_headers_is_a_problem_and_they_are_not_made(tmp_path):
    with_headers(tmp_path / "rows.parquet", [1, 1_000_000, 1])
    with Peak() as peak:
        good, [problem] = count(source(tmp_path))
    assert peak.mb < 20
    assert good == 2
    assert "row 2, column headers: has 1,000,000 headers, and a row may have 10,000 at most" in str(problem)
    # rejected without them
    assert str(problem.row["headers"]) == "1,000,000 headers"


@pytest.mark.parametrize("listed", [False, True])
def test_as_many_headers_are_a_problem_wherever_rows_come_from(tmp_path, listed):
    rows = [{**GOOD, "headers": {str(number): "" for number in range(most)}} for most in (10_000, 10_001)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    good, [problem] = count(ListSource(rows) if listed else source(tmp_path))
    assert good == 1
    assert "has 10,001 headers" in problem.problem


def test_more_headers_than_a_file_of_its_size_may_have_are_refused_before_they_are_read(tmp_path):
    with_headers(tmp_path / "rows.parquet", [1, 2_000_009, 1])
    pool = pa.default_memory_pool()
    before = pool.bytes_allocated()
    with pytest.raises(SourceError, match=r"one row group of .* bytes has 2,000,008 headers"):
        count(source(tmp_path))
    assert pool.bytes_allocated() - before < 5 * MB


@pytest.fixture
def secret(tmp_path):
    file = tmp_path / "airflow.cfg"
    file.write_text("sql_alchemy_conn = postgresql://airflow:secret@db/airflow")
    return file


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "part-0.jsonl").write_text(json.dumps(GOOD))
    return folder


def test_a_link_that_leads_out_of_the_folder_is_refused(folder, secret):
    (folder / "part-1.jsonl").symlink_to(secret)
    with pytest.raises(SourceError, match=r"part-1\.jsonl is a link that leads out of the source's folder"):
        source(folder)


def test_so_is_one_that_leads_out_through_another_folder(folder, secret):
    (folder / "more").symlink_to(secret.parent)
    with pytest.raises(SourceError, match="more is a link that leads out"):
        source(folder)


def test_a_link_laid_after_the_listing_is_refused(folder, secret):
    found = source(folder)
    (folder / "part-0.jsonl").unlink()
    (folder / "part-0.jsonl").symlink_to(secret)
    with pytest.raises(SourceError, match="is a link that leads out"):
        count(found)


def test_links_within_the_folder_and_to_it_are_followed(folder, tmp_path):
    (folder / "part-1.jsonl").symlink_to("part-0.jsonl")
    (tmp_path / "latest").symlink_to(folder)
    assert count(source(tmp_path / "latest")) == (2, [])
    (tmp_path / "one.jsonl").symlink_to(folder / "part-0.jsonl")
    assert count(source(tmp_path / "one.jsonl")) == (1, [])


def test_what_is_no_file_is_refused_and_not_waited_for(folder):
    os.mkfifo(folder / "part-1.jsonl")
    with pytest.raises(SourceError, match=r"part-1\.jsonl is no file with content"):
        source(folder)
