"""Hostile files against harmless ones of the same size: memory and time by their ratio; and files of random damage."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from datetime import datetime
from random import Random

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.lengths import length

from airflow_delayed.errors import InputError, SourceError, UnsupportedColumns
from airflow_delayed.intake.columns import MAX_COLUMNS, ColumnRules, RowRules
from airflow_delayed.intake.rows import Problem, RowReader
from airflow_delayed.intake.sources import Rejects, open_source
from airflow_delayed.message import UTC

DUE = datetime(2030, 5, 6, 12, tzinfo=UTC)
LOCAL = fsspec.filesystem("file")
MB = 1024 * 1024
PROBLEM = Problem("rows row 1", "value", "is null", {"value": None})
DAMAGED = length("damaged files of Parquet", 150, 5000)


def source(path, **options):
    return open_source(LOCAL, str(path), shown_as=str(path), require_success=False, **options)


def count(found, rules=None):
    rules = rules or ColumnRules()
    reader = RowReader(RowRules(anchor=DUE, id_columns=rules.id_columns))
    return sum(not isinstance(item, Problem) for batch in found.batches(rules) for item in reader.read(batch))


def shared(size, rows):
    """Return a column with one text in all rows, which says in Arrow's schema that it is a dictionary."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), ["x" * size])


def parquet(path, values, **options):
    rows = len(values)
    columns = {"value": values, "destination": ["q"] * rows, "delay_seconds": [1] * rows}
    pq.write_table(pa.table(columns), path, **options)


def peak(path, rules=None):
    """Return the most bytes that Arrow holds while the first rows of a file become messages."""
    pool = pa.default_memory_pool()
    before, most, rows = pool.bytes_allocated(), 0, 0
    reader = RowReader(RowRules(anchor=DUE))
    for batch in source(path).batches(rules or ColumnRules()):
        most = max(most, pool.bytes_allocated() - before, batch.records.nbytes)
        # each value decodes to this, as Python's objects do too
        value = batch.records.column("value")
        texts = value.dictionary_decode() if pa.types.is_dictionary(value.type) else value
        most = max(most, texts.nbytes)
        rows += sum(1 for _ in reader.read(batch))
        if rows > 150:
            break
    assert rows > 150
    return most


@pytest.mark.parametrize(("size", "stored"), [(1_000_000, True), (100_000, False)])
def test_a_categorical_column_takes_no_more_than_the_same_texts_in_full(tmp_path, size, stored):
    parquet(tmp_path / "hostile.parquet", shared(size, 5000), store_schema=stored)
    parquet(
        tmp_path / "harmless.parquet",
        ["x" * size] * max(160, 80 * MB // size),
        use_dictionary=False,
        compression="none",
    )
    assert (tmp_path / "hostile.parquet").stat().st_size < MB
    assert peak(tmp_path / "hostile.parquet") < 3 * peak(tmp_path / "harmless.parquet")


def test_a_column_of_values_of_a_fixed_length_comes_in_small_batches(tmp_path):
    rows, size = 1500, 100_000
    key = pa.array([b"x" * size] * rows, pa.binary(size))
    columns = {"value": ["a"] * rows, "destination": ["q"] * rows, "delay_seconds": [1] * rows, "key": key}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    del key, columns
    assert (tmp_path / "rows.parquet").stat().st_size < MB
    pool = pa.default_memory_pool()
    before, read = pool.bytes_allocated(), 0
    for batch in source(tmp_path).batches(ColumnRules(id_columns=("key",))):
        read += batch.size
        # a part of what was read at a time keeps all of it
        assert pool.bytes_allocated() - before < 100 * MB
    assert read == rows


def test_a_key_of_lists_is_refused_before_a_row_is_read(tmp_path):
    kinds = pa.list_(pa.string())
    columns = {"value": ["a"], "destination": ["q"], "delay_seconds": [1], "key": pa.array([["x"]], kinds)}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    with pytest.raises(UnsupportedColumns, match=r"column key is list<.*>, which cannot be part of a key"):
        count(source(tmp_path), ColumnRules(id_columns=("key",)))
    # where it is no part of the key it is not read
    assert count(source(tmp_path), ColumnRules(columns={})) == 1


def test_as_many_columns_as_are_read_and_one_more(tmp_path):
    ignoring = ColumnRules(columns={})
    for columns, refused in ((MAX_COLUMNS, False), (MAX_COLUMNS + 1, True)):
        names = ["value", "destination", "delay_seconds", *map(str, range(columns - 3))]
        pq.write_table(pa.table([["a"], ["q"], [1], *[[1]] * (columns - 3)], names), tmp_path / "rows.parquet")
        if refused:
            with pytest.raises(
                UnsupportedColumns, match=r"rows\.parquet has 10,001 columns, and at most 10,000 are read"
            ):
                count(source(tmp_path / "rows.parquet"), ignoring)
        else:
            assert count(source(tmp_path / "rows.parquet"), ignoring) == 1


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_blank_lines_without_end_are_refused_early(tmp_path, ending):
    path = tmp_path / f"rows.jsonl{ending}"
    row = json.dumps({"value": "a", "destination": "q", "delay_seconds": 1})
    write = gzip.open if ending else open

    def written(text):
        with write(path, "wt") as file:
            file.write(text)
        return source(path)

    # as many as there are rows, and 100,000 more
    assert count(written("\n" * 100_000 + f"{row}\n\n" * 5)) == 5
    with pytest.raises(SourceError, match=r"rows\.jsonl.* has more than 100,000 blank lines in its first 100,001"):
        count(written(" \n" * 3_000_000 + row))


@pytest.mark.parametrize("first", ["[" * 100_000, '{"rejected": {"run": ' + "[" * 900 + "]" * 900 + "}}", "[1]", '"a"'])
def test_a_hostile_file_in_the_place_of_rejects_is_an_error_of_the_input(tmp_path, first):
    path = tmp_path / "rejects.jsonl"
    path.write_text(first + "\n")
    if "run" in first:
        # whatever it says, another run's rows are kept
        assert Rejects(LOCAL, str(path), "run-1").moved_to is not None
        return
    with pytest.raises(InputError, match="is there already and holds no rejected rows"):
        Rejects(LOCAL, str(path), "run-1")
    assert path.read_text() == first + "\n"


@pytest.fixture
def of_another_user(monkeypatch):
    """Make a link one of another user, or this process that of another user."""

    def change(link):
        if os.getuid() == 0:
            os.lchown(link, 65534, 65534)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    return change


@pytest.mark.parametrize("when", ["before", "while rows are read"])
@pytest.mark.parametrize("deep", ["", "more/"])
def test_rejects_follow_no_link_of_another_user_on_their_way(tmp_path, of_another_user, when, deep):
    (tmp_path / "elsewhere" / "more").mkdir(parents=True)
    public = tmp_path / "public"
    public.mkdir()
    public.chmod(0o1777)
    path = f"{public}/team/{deep}rejects.jsonl"
    rejects = Rejects(LOCAL, path, "run-1") if when != "before" else None
    (public / "team").symlink_to(tmp_path / "elsewhere")
    of_another_user(public / "team")
    with pytest.raises(InputError, match=r"rejects=.* leads through .*public/team, a link that another user made"):
        (rejects or Rejects(LOCAL, path, "run-1")).add(PROBLEM)
    assert [file for file in (tmp_path / "elsewhere").rglob("*") if file.is_file()] == []


def test_links_of_the_machine_and_of_the_tasks_own_user_are_followed(tmp_path, of_another_user):
    public = tmp_path / "public"
    (public / "real").mkdir(parents=True)
    public.chmod(0o1777)
    (public / "own").symlink_to("../public/real")
    # nobody else can write here, so whoever is named as its owner, an administrator laid it
    (tmp_path / "home").symlink_to(public)
    with Rejects(LOCAL, str(tmp_path / "home" / "own" / "rejects.jsonl"), "run-1") as rejects:
        rejects.add(PROBLEM)
    assert (public / "real" / "rejects.jsonl").exists()


def damaged(chance, data):
    """Return bytes of which some are other ones, are there twice, or are not there."""
    data = bytearray(data)
    for _ in range(chance.randrange(1, 6)):
        place = chance.randrange(len(data))
        kind = chance.randrange(4)
        if kind == 0:
            data[place] = chance.randrange(256)
        elif kind == 1:
            data[place : place + chance.randrange(1, 9)] = chance.randbytes(chance.randrange(9))
        elif kind == 2:
            data[place:place] = data[place : place + chance.randrange(1, 40)]
        else:
            data[place] ^= 1 << chance.randrange(8)
    return bytes(data)


def rows_or_error(found):
    """Read a source; it gives rows, or an error that says so, and of Arrow's memory it takes little."""
    pool = pa.default_memory_pool()
    before = pool.bytes_allocated()
    try:
        rows = count(found(), ColumnRules(columns={}))
    except InputError:
        return 0
    assert pool.bytes_allocated() - before < 100 * MB
    return rows


def footer_of(path):
    """Return a Parquet file's bytes up to its footer, and the footer."""
    whole = path.read_bytes()
    start = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    return whole[:start], whole[start:-8]


def write_footer(path, before, footer):
    path.write_bytes(before + footer + len(footer).to_bytes(4, "little") + b"PAR1")


def test_a_footer_that_contradicts_itself_ends_no_process(tmp_path):
    path = tmp_path / "rows.parquet"
    parquet(path, ["a", None])
    good, about = footer_of(path)
    # how many values of the first column are null, and how many are not: one number in the place of two
    assert b"\x19\x26\x02\x02" in about
    write_footer(path, good, about.replace(b"\x19\x26\x02\x02", b"\x19\x16\x04", 1))
    # in a process of its own, for the sake of this one
    code = (
        "import sys, fsspec; from airflow_delayed.errors import SourceError;"
        "from airflow_delayed.intake.columns import ColumnRules;"
        "from airflow_delayed.intake.sources import open_source\n"
        "try: list(open_source(fsspec.filesystem('file'), sys.argv[1], shown_as='rows').batches(ColumnRules()))\n"
        "except SourceError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert (done.returncode, "cannot be read as Parquet" in done.stdout) == (0, True), done


@pytest.mark.fuzz
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("footer, compression", [(True, "snappy"), (False, "snappy"), (False, "zstd")])
def test_whatever_a_file_of_parquet_says_of_itself_it_gives_rows_or_an_error(tmp_path, footer, compression):
    chance = Random(32)
    path = tmp_path / "rows.parquet"
    parquet(path, shared(1000, 50), compression=compression)
    good, about = footer_of(path)
    read = 0
    for _ in range(DAMAGED):
        if footer:
            write_footer(path, good, damaged(chance, about))
        else:
            data = damaged(chance, good[4:])[: len(good) - 4].ljust(len(good) - 4)
            write_footer(path, good[:4] + data, about)
        read += rows_or_error(lambda: source(path))
    assert read
