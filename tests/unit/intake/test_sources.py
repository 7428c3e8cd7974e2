from __future__ import annotations

import gzip
import json
import lzma
import re
from datetime import datetime, timedelta
from uuid import UUID

import fsspec
import fsspec.implementations.local
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from airflow_delayed.clock import zone
from airflow_delayed.errors import SourceError, UnsupportedColumns
from airflow_delayed.identity import key_id
from airflow_delayed.intake.columns import ColumnRules, RowRules
from airflow_delayed.intake.rows import Problem, RowReader
from airflow_delayed.intake.sources import ListSource, Rejects, open_source
from airflow_delayed.message import UTC, DelayedMessage

DUE = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
LOCAL = fsspec.filesystem("file")
NONE_GIVEN = ColumnRules()


def source(path, **options):
    return open_source(LOCAL, str(path), shown_as=str(path), **options)


def messages(found, wanted=NONE_GIVEN, **rules):
    reader = RowReader(RowRules(**{"anchor": DUE, **rules}))
    return [message for batch in found.batches(wanted) for message in reader.read(batch)]


def spark_folder(tmp_path, table, name="part-00000.snappy.parquet", marker=True):
    folder = tmp_path / "out"
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, folder / name)
    (folder / "._SUCCESS.crc").write_bytes(b"x")
    (folder / "_temporary").mkdir(exist_ok=True)
    pq.write_table(table, folder / "_temporary" / "part-00000.parquet")
    if marker:
        (folder / "_SUCCESS").touch()
    return folder


def table(**columns):
    base = {
        "value": pa.array(["a", "b"]),
        "destination": pa.array(["mail", "sms"]),
        "due_at": pa.array([DUE, DUE + timedelta(seconds=1)], pa.timestamp("us", tz="UTC")),
    }
    return pa.table({name: column for name, column in {**base, **columns}.items() if column is not None})


def test_parquet_folder_as_spark_writes_it(tmp_path):
    headers = pa.array([[("a", "1")], None], pa.map_(pa.string(), pa.string()))
    found = messages(source(spark_folder(tmp_path, table(headers=headers))))
    assert [(m.destination, m.body, dict(m.headers)) for m in found] == [("mail", b"a", {"a": "1"}), ("sms", b"b", {})]
    assert found[1].due_at == DUE + timedelta(seconds=1)


UUIDS = [UUID(int=1), UUID(int=2)]
RAW = [one.bytes for one in UUIDS]
TEXTS = {
    "string": pa.array(["a", "b"]),
    "large_string": pa.array(["a", "b"], pa.large_string()),
    "string_view": pa.array(["a", "b"], pa.string_view()),
    "dictionary": pa.array(["a", "b"]).dictionary_encode(),
    "json": pa.ExtensionArray.from_storage(pa.json_(), pa.array(["a", "b"])),
    "uuid": pa.ExtensionArray.from_storage(pa.uuid(), pa.array(RAW, pa.binary(16))),
}
BYTES = {
    "binary": pa.array([b"a", b"b"]),
    "large_binary": pa.array([b"a", b"b"], pa.large_binary()),
    "binary_view": pa.array([b"a", b"b"], pa.binary_view()),
    "fixed_size_binary": pa.array([b"a", b"b"], pa.binary(1)),
    "dictionary of binary": pa.array([b"a", b"b"]).dictionary_encode(),
}


@pytest.mark.parametrize("kind", [*TEXTS, *BYTES])
def test_a_body_of_every_arrow_type_of_text_and_bytes(tmp_path, kind):
    found = source(spark_folder(tmp_path, table(value={**TEXTS, **BYTES}[kind])))
    [batch] = found.batches(NONE_GIVEN)
    rows = RowReader(RowRules(anchor=DUE))
    assert [m.body.decode() for m in rows.read(batch)] == (list(map(str, UUIDS)) if kind == "uuid" else ["a", "b"])
    # the same by its columns as row by row
    assert rows.check(batch) is not None
    assert list(rows.read(batch)) == list(rows.by_row(batch))


@pytest.mark.parametrize("kind", TEXTS)
def test_ids_keys_and_headers_of_every_arrow_type_of_text(tmp_path, kind):
    texts = TEXTS[kind]
    headers = pa.MapArray.from_arrays([0, 1, 2], pa.array(["n", "n"]), texts)
    folder = spark_folder(tmp_path, table(message_id=texts, tag=texts, headers=headers))
    found = messages(source(folder))
    expected = list(map(str, UUIDS)) if kind == "uuid" else ["a", "b"]
    assert [m.message_id for m in found] == [m.tag for m in found] == [m.headers["n"] for m in found] == expected

    pq.write_table(table(order=texts), folder / "part-00000.snappy.parquet")
    [first, _] = messages(source(folder), ColumnRules(id_columns=("order",)), id_columns=("order",))
    assert first.message_id == key_id(("order",), (expected[0],))


def test_nanoseconds_are_rounded_up_never_early(tmp_path):
    first = 1_772_366_400_000_000_001
    due_at = pa.array([first, first - 1], pa.timestamp("ns", tz="UTC"))
    folder = spark_folder(tmp_path, table(due_at=due_at))
    assert [m.due_at.microsecond for m in messages(source(folder))] == [1, 0]


COUNTS = pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.int64()))


@pytest.mark.parametrize(
    ("columns", "wanted", "says"),
    [
        ({"value": None}, NONE_GIVEN, "no column value"),
        ({"destination": None}, NONE_GIVEN, "no column destination"),
        ({"due_at": None}, NONE_GIVEN, "no column due_at or delay_seconds"),
        ({"body": pa.array(["a", "b"])}, NONE_GIVEN, "both value and body"),
        ({"price": pa.array([1, 2])}, NONE_GIVEN, "unknown columns price"),
        ({"value": None, "VALUE": pa.array(["a", "b"])}, NONE_GIVEN, "be sent?; VALUE: names are in lower case"),
        ({"Tag": pa.array(["a", "b"])}, NONE_GIVEN, "parquet: Tag: names are in lower case"),
        (
            {"due_at": None, "Due_At": pa.array(["a", "b"])},
            ColumnRules(columns={}),
            "due_at= or delay=; Due_At: names are in lower case",
        ),
        ({}, ColumnRules(id_columns=("order",)), "no column order, which id_columns= names"),
        (
            {"message_id": pa.array(["a", "b"]), "order": pa.array([1, 2])},
            ColumnRules(id_columns=("order",)),
            "message_id",
        ),
        ({"value": pa.array([1, 2])}, NONE_GIVEN, "column value is int64, and must be text or binary"),
        ({"due_at": pa.array(["2026", "2027"])}, NONE_GIVEN, "column due_at is string, and must be a timestamp"),
        ({"headers": pa.array(["a", "b"])}, NONE_GIVEN, "column headers is string, and must be a map of text to text"),
        ({"destination": pa.array([1, 2])}, NONE_GIVEN, "is int64, and must be text; in Spark cast(destination as str"),
        ({"message_id": pa.array(RAW, pa.binary(16))}, NONE_GIVEN, "hex(message_id) of bytes that are no text"),
        ({"value": pa.array([{"a": 1}, {"a": 2}])}, NONE_GIVEN, "in Spark to_json(value) makes text of a structure"),
        ({"delay_seconds": pa.array(["1", "2"])}, NONE_GIVEN, "must be a number; in Spark cast(delay_seconds as doub"),
        ({"headers": COUNTS}, NONE_GIVEN, "in Spark cast(headers as map<string, string>)"),
    ],
)
def test_wrong_columns_are_refused_by_name(tmp_path, columns, wanted, says):
    folder = spark_folder(tmp_path, table(**columns))
    with pytest.raises(UnsupportedColumns, match="part-00000") as caught:
        messages(source(folder), wanted)
    assert says in str(caught.value)


def test_columns_that_mean_nothing_can_be_ignored(tmp_path):
    folder = spark_folder(tmp_path, table(price=pa.array([1, 2])))
    assert len(messages(source(folder), ColumnRules(columns={}))) == 2


def test_partition_folders_add_their_column(tmp_path):
    folder = spark_folder(tmp_path, table(destination=None), "destination=a%20b/part-0.parquet")
    pq.write_table(table(destination=None), folder / "destination=a%20b" / "part-1.parquet")
    assert {m.destination for m in messages(source(folder))} == {"a b"}


def test_rows_of_a_folder_without_success_are_not_sent(tmp_path):
    folder = spark_folder(tmp_path, table(), marker=False)
    with pytest.raises(SourceError, match="require_success=False"):
        source(folder)
    assert len(messages(source(folder, require_success=False))) == 2


@pytest.mark.parametrize(
    ("mark", "path", "says"),
    [
        ("_delta_log/00000000000000000000.json", "", "is a Delta table"),
        ("_delta_log/00000000000000000000.json", "day=2026-03-01/hour=9", "is a part of a Delta table"),
        (".hoodie/hoodie.properties", "", "is a Hudi table"),
        ("day=2026-03-01/.hoodie_partition_metadata", "day=2026-03-01", "is a Hudi table"),
        (".hoodie/hoodie.properties", "day=2026-03-01", "is a part of a Hudi table"),
        ("metadata/00000-a1.metadata.json", "", "is an Iceberg table"),
        ("metadata/v1.metadata.json", "data/day=2026-03-01", "is a part of an Iceberg table"),
        ("orders/_delta_log/00000000000000000000.json", "", "is a Delta table"),
    ],
)
@pytest.mark.parametrize("require_success", [True, False])
def test_a_table_is_not_read_as_plain_parquet(tmp_path, mark, path, says, require_success):
    parts = ["day=2026-03-01/hour=9", "data/day=2026-03-01"]
    folders = [spark_folder(tmp_path, table(), f"{part}/part-0.parquet", marker=False) for part in parts]
    (folders[0] / mark).parent.mkdir(parents=True, exist_ok=True)
    (folders[0] / mark).write_text("{}")
    with pytest.raises(SourceError, match="Let Spark write the rows to send as Parquet") as caught:
        source(folders[0] / path, require_success=require_success)
    assert says in str(caught.value)


def test_missing_source_says_so(tmp_path):
    with pytest.raises(SourceError, match="does not exist"):
        source(tmp_path / "nothing")


def test_row_is_numbered_within_its_file(tmp_path):
    folder = spark_folder(tmp_path, table())
    pq.write_table(table(value=pa.array(["a", None])), folder / "part-00001.parquet")
    problems = [found for found in messages(source(folder)) if isinstance(found, Problem)]
    assert [problem.place for problem in problems] == [f"{folder}/part-00001.parquet row 2"]


@pytest.mark.parametrize("packed", [False, True])
def test_json_lines(tmp_path, packed):
    lines = [
        {"value": "a", "destination": "mail", "due_at": "2026-03-01T12:00:00Z"},
        {"body": {"n": 1}, "destination": "sms", "delay_seconds": 5, "headers": {"h": "1"}},
    ]
    text = "\n\n".join(json.dumps(line) for line in lines).encode()
    path = tmp_path / ("rows.jsonl.gz" if packed else "rows.jsonl")
    path.write_bytes(gzip.compress(text) if packed else text)
    first, second = messages(source(path))
    assert (first.body, first.due_at) == (b"a", DUE)
    assert (second.body, second.due_at, dict(second.headers)) == (b'{"n":1}', DUE + timedelta(seconds=5), {"h": "1"})


NUMBERS = ["12345678901234567.89", "1.10", "1e5", "-0.0", "1E-400", "2.50e+400", "123456789012345678901234567890", "7"]


def test_numbers_of_an_object_are_sent_as_they_are_written(tmp_path):
    listed = ",".join(NUMBERS)
    line = f'{{"value": {{"n": [{listed}], "é": {{"a": 1.10, "b": [true, null, "1.10"]}}}}, "delay_seconds": 1.50}}'
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{line}\n{{"value": [1.10], "delay_seconds": 1, "headers": {{"n": 1.10}}}}\n')
    first, second = messages(source(path), ColumnRules(destination=True), destination="q")
    assert first.body.decode() == f'{{"n":[{listed}],"é":{{"a":1.10,"b":[true,null,"1.10"]}}}}'
    assert first.due_at == DUE + timedelta(seconds=1.5)
    assert (second.column, second.problem) == ("headers", "the value of 'n' must be text, not Number")
    # and so is a rejected row, which can be mended and sent
    with Rejects(LOCAL, str(tmp_path / "rejects.jsonl"), "run") as rejects:
        rejects.add(second)
    assert '{"value": [1.10], ' in (tmp_path / "rejects.jsonl").read_text()


def test_a_number_in_a_key_is_a_number_however_it_is_written(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"value": "a", "delay_seconds": 1, "price": 1.10, "destination": "q"}')
    [message] = messages(source(path), ColumnRules(id_columns=("price",)), id_columns=("price",))
    assert message.message_id == key_id(("price",), (1.1,))


@pytest.mark.parametrize("text", ["{bom}{row}\n{row}", "{bom}\n{row}\n{row}", "{row}\n{bom}{row}\n"])
def test_byte_order_marks_are_passed_over(tmp_path, text):
    row = '{"value": "a", "destination": "q", "delay_seconds": 1}'
    (tmp_path / "rows.jsonl").write_text(text.format(bom="\ufeff", row=row), encoding="utf-8")
    assert [message.body for message in messages(source(tmp_path / "rows.jsonl"))] == [b"a", b"a"]


@pytest.mark.parametrize(
    ("text", "column", "says"),
    [
        ('{"value": "a"', "line", "is not JSON"),
        ("[" * 100_000, "line", "is not JSON"),
        ("[1]", "line", "must be a JSON object"),
        ('{"value": "a", "destination": "q", "delay_seconds": 1, "x": 1}', "fields", "unknown columns x"),
        ('{"destination": "q", "delay_seconds": 1}', "fields", "no column value"),
        ('{"value": "\udcff"}', "line", "is not text in UTF-8"),
        ('{"value": "a", "destination": "q", "delay_seconds": 1, "message_id": null}', "message_id", "null"),
    ],
)
def test_bad_line_is_a_problem_of_its_own(tmp_path, text, column, says):
    good = '{"value": "a", "destination": "q", "delay_seconds": 1}'
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{good}\n\n{text}\n{good}", errors="surrogateescape")
    before, problem, after = messages(source(path))
    assert (problem.place, problem.column) == (f"{path} row 3", column)
    assert says in problem.problem
    assert before.body == after.body == b"a"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl.gz", gzip.compress(b'{"value": "a"}' * 1000)[:-20]),
        ("rows.jsonl.xz", lzma.compress(b'{"value": "a"}' * 1000)[:-20]),
        ("rows.parquet", b"PAR1"),
    ],
    ids=["gzip", "xz", "parquet"],
)
def test_torn_file_is_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=re.escape(f"{tmp_path / name} cannot be read")):
        messages(source(tmp_path / name))


def test_changed_source_is_noticed(tmp_path):
    folder = spark_folder(tmp_path, table())
    opened = source(folder)
    opened.check_unchanged()
    pq.write_table(table(), folder / "part-00001.parquet")
    with pytest.raises(SourceError, match="changed"):
        opened.check_unchanged()


def test_folder_of_two_kinds_and_unknown_endings_are_refused(tmp_path):
    folder = spark_folder(tmp_path, table())
    (folder / "more.jsonl").write_text("{}")
    with pytest.raises(SourceError, match="json and parquet"):
        source(folder)
    (tmp_path / "rows.orc").write_text("a,b")
    with pytest.raises(SourceError, match=r"rows\.orc is neither"):
        source(tmp_path / "rows.orc")


def test_list_takes_dictionaries_of_different_fields_and_messages():
    ready = DelayedMessage(destination="q", body=b"z", due_at=DUE, message_id="ready")
    rows = [{"value": "a", "delay_seconds": 1}, {"body": b"b", "due_at": DUE, "destination": "sms"}, ready]
    found = messages(ListSource(rows), ColumnRules(destination=True), destination="mail")
    assert [(m.destination, m.body) for m in found] == [("mail", b"a"), ("sms", b"b"), ("q", b"z")]
    assert found[2] == ready


def test_field_missing_in_one_entry_of_a_list_names_it():
    good = {"value": "a", "delay_seconds": 1, "destination": "q"}
    found = messages(ListSource([good, {"value": "a", "delay_seconds": 1}, "text", {1: 2}, good]))
    assert [str(problem)[:45] for problem in found if isinstance(problem, Problem)] == [
        "messages row 2, column fields: no column dest",
        "messages row 3, column message: must be a dic",
        "messages row 4, column fields: have a name th",
    ]
    assert len(found) == 5


@pytest.mark.parametrize("written", ["out", "./out", "../rows/out", "{}/rows/../rows/out/"])
def test_folder_is_read_however_its_path_is_written(run, tmp_path, monkeypatch, written):
    # a folder above that looks like one that Spark is writing must hide nothing
    rows = tmp_path / "_temporary" / "rows"
    spark_folder(rows, table())
    monkeypatch.chdir(rows)
    run.transport.destinations.add("sms")
    assert run.execute(source=written.format(rows.parent))["sent"] == 2


def test_file_that_is_named_is_read_whatever_its_name(tmp_path):
    pq.write_table(table(), tmp_path / "_rows.parquet")
    assert len(messages(source(tmp_path / "_rows.parquet"))) == 2


def test_sparks_own_timestamps_do_not_wrap_around(tmp_path):
    due_at = pa.array([datetime(2300, 1, 1), datetime(2026, 1, 1)], pa.timestamp("us"))
    folder = tmp_path / "out"
    folder.mkdir()
    pq.write_table(table(due_at=due_at), folder / "part-0.parquet", use_deprecated_int96_timestamps=True)
    found = messages(source(folder, require_success=False, naive_ok=True), zone=zone("UTC"))
    assert [message.due_at.year for message in found] == [2300, 2026]


def test_time_out_of_range_is_a_problem_of_its_row(tmp_path):
    due_at = pa.array([400_000_000_000_000_000, 0], pa.int64()).cast(pa.timestamp("us", tz="UTC"))
    bad, good = messages(source(spark_folder(tmp_path, table(due_at=due_at))))
    assert (bad.column, good.body) == ("due_at", b"b")


@pytest.mark.parametrize(
    "info, shown",
    [
        ({"mtime": 1.5}, True),
        ({"modificationTime": 1_700_000_000_000}, True),
        ({"modify": "20260301120000"}, True),
        ({"ETag": '"abc"'}, True),
        ({}, False),
        ({"mtime": None}, False),
    ],
)
def test_a_source_whose_changes_do_not_show_has_no_fingerprint(tmp_path, monkeypatch, info, shown):
    """As WebHDFS, FTP, S3 and DBFS describe a file."""
    (tmp_path / "rows.jsonl").write_text('{"value": "x", "delay_seconds": 1}')
    found = LOCAL.find(str(tmp_path), withdirs=True, detail=True)
    described = {name: {"type": each["type"], "size": each["size"], **info} for name, each in found.items()}
    monkeypatch.setattr(type(LOCAL), "find", lambda *args, **options: described)
    assert (source(tmp_path, require_success=False).fingerprint() is not None) == shown
