"""Which timestamps of Parquet files are instants: files that Spark wrote, and footers that nobody should believe."""

from __future__ import annotations

import json
import shutil
from datetime import datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from airflow.sdk.exceptions import AirflowFailException
from support.spark_times import MOMENTS, OLD, ZONE

from airflow_delayed.clock import resolve, zone
from airflow_delayed.intake import parquet, time_columns
from airflow_delayed.intake.rows import MAX_DEPTH
from airflow_delayed.message import UTC
from airflow_delayed.sources import ParquetSource

RECORDED = Path(__file__).parent / "spark_files"
VERSIONS = sorted(folder.name for folder in RECORDED.iterdir() if folder.is_dir())
WALL_CLOCK = datetime(2026, 3, 29, 12, 30)
SPARK = "org.apache.spark.sql.parquet.row.metadata"


def moment(seconds):
    return datetime.fromtimestamp(int(seconds), UTC)


def at_once(run, path, **options):
    """Send all rows of a file or folder, whatever the year, and return the messages."""
    run.execute(source=ParquetSource(path, require_success=False), past_due="send", **options)
    return run.transport.sent


def refusal(run, path, **options):
    with pytest.raises(AirflowFailException) as caught:
        at_once(run, path, **options)
    assert run.transport.sent == []
    return str(caught.value)


def schema(*fields, **types):
    return {"type": "struct", "fields": [{"name": name, "type": kind} for name, kind in [*fields, *types.items()]]}


def write(path, footer=None, *, int96=True, **columns):
    """Write one row, due at 12:30 of no zone, with entries in its footer: texts, or what JSON has."""
    columns = {"value": [path.name], "due_at": pa.array([WALL_CLOCK], pa.timestamp("us")), **columns}
    texts = {key: text if isinstance(text, str | bytes) else json.dumps(text) for key, text in (footer or {}).items()}
    table = pa.table(columns)
    path.parent.mkdir(exist_ok=True)
    with pq.ParquetWriter(path, table.schema, use_deprecated_int96_timestamps=int96, store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(texts)
    return path


def without_logical_type(path):
    """Leave the time's column the older of its two types, TIMESTAMP_MICROS, which is all that old writers wrote."""
    data = path.read_bytes()
    length = int.from_bytes(data[-8:-4], "little")
    rows, footer = data[: -8 - length], data[-8 - length : -8]
    # in Thrift's compact protocol: field 10, which has field 8, which has adjusted=true and the unit microseconds
    logical_type = bytes.fromhex("4c8c111c2c00000000")
    assert footer.count(logical_type) == 1
    footer = footer.replace(logical_type, b"")
    path.write_bytes(rows + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    return path


def old_writer(path, footer):
    due_at = pa.array([WALL_CLOCK], pa.timestamp("us", tz="UTC"))
    return without_logical_type(write(path, footer, int96=False, due_at=due_at))


@pytest.mark.parametrize("timezone", [None, "America/New_York"])
@pytest.mark.parametrize("kind", ["default", "micros"])
@pytest.mark.parametrize("version", VERSIONS)
def test_sparks_timestamp_is_an_instant_whatever_its_session_and_the_task_have_for_a_zone(run, version, kind, timezone):
    sent = at_once(run, RECORDED / version / f"{kind}.parquet", timezone=timezone)
    assert [message.due_at for message in sent] == [moment(message.body) for message in sent]
    assert len(sent) == len(MOMENTS)


@pytest.mark.parametrize("version", VERSIONS)
def test_wall_clocks_of_spark_are_refused_with_how_to_name_their_zone(run, version):
    text = refusal(run, RECORDED / version / "ntz.parquet")
    assert "column due_at has no time zone (timestamp_ntz in Spark's schema); pass timezone= to name the zone" in text
    assert "add a column timezone" in text
    # neither what was set already, nor a zone that is as likely wrong
    assert "outputTimestampType" not in text
    assert "UTC" not in text


@pytest.mark.parametrize("version", VERSIONS)
def test_wall_clocks_are_read_in_the_zone_that_is_named_and_the_log_names_it(run, log, version):
    sent = at_once(run, RECORDED / version / "ntz.parquet", timezone=ZONE)
    berlin = zone(ZONE)
    local = [moment(message.body).astimezone(berlin).replace(tzinfo=None) for message in sent]
    # of what the clock shows twice the first
    assert [message.due_at for message in sent] == [resolve("due_at", time, berlin)[0] for time in local]
    moved = [moment(message.body) - message.due_at for message in sent]
    assert moved.count(timedelta(0)) == len(MOMENTS) - 4
    assert moved.count(timedelta(hours=1)) == 4
    assert "column due_at has no time zone (timestamp_ntz in Spark's schema): it is read in Europe/Berlin" in log.text


def test_the_zone_of_a_row_is_for_wall_clocks_alone(run, tmp_path):
    row = {"timezone": ["Europe/Berlin"], "expires_at": pa.array([WALL_CLOCK + timedelta(days=1)], pa.timestamp("us"))}
    write(tmp_path / "in" / "a.parquet", {SPARK: schema(due_at="timestamp", expires_at="timestamp_ntz")}, **row)
    [message] = at_once(run, tmp_path / "in")
    assert message.due_at == WALL_CLOCK.replace(tzinfo=UTC)
    assert message.expires_at == (WALL_CLOCK + timedelta(hours=22)).replace(tzinfo=UTC)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_time_before_1900_of_sparks_old_calendar_is_a_problem_of_its_row(run, version, tmp_path):
    path = RECORDED / version / "legacy.parquet"
    assert pq.ParquetFile(path).metadata.metadata[b"org.apache.spark.legacyINT96"] == b""
    text = refusal(run, path)
    assert f"legacy.parquet row {len(MOMENTS) + 1}, column due_at: is before 1900, in a file whose times" in text
    assert "spark.sql.parquet.int96RebaseModeInWrite=CORRECTED" in text
    sent = at_once(run, path, rejects=str(tmp_path / "rejects.jsonl"))
    assert [(int(message.body), message.due_at) for message in sent] == [(at, moment(at)) for at in MOMENTS]
    [rejected] = map(json.loads, (tmp_path / "rejects.jsonl").read_text().splitlines())
    assert rejected["value"] == str(OLD)


@pytest.mark.parametrize(
    ("footer", "int96", "refused"),
    [
        ({"org.apache.spark.version": "3.1.0"}, True, False),
        ({"org.apache.spark.version": "4.2.0-SNAPSHOT"}, True, False),
        ({"org.apache.spark.version": "3.0.3"}, True, True),
        ({"org.apache.spark.version": "2.4.8"}, True, True),
        ({"org.apache.spark.version": "four"}, True, True),
        ({"org.apache.spark.version": "9" * 5000}, True, True),
        ({}, True, True),
        ({"org.apache.spark.version": "4.0.0", "org.apache.spark.legacyINT96": ""}, True, True),
        ({"org.apache.spark.version": "4.0.0", "org.apache.spark.legacyINT96": ""}, False, False),
        ({"org.apache.spark.version": "4.0.0", "org.apache.spark.legacyDateTime": ""}, False, True),
        ({"org.apache.spark.version": "3.0.0"}, False, False),
    ],
)
def test_which_release_and_key_of_spark_may_have_written_old_times(run, tmp_path, footer, int96, refused):
    # one before 1900 and one of that year
    old = pa.array([datetime(1899, 12, 31, 23, 59, 59), datetime(1900, 1, 1)], pa.timestamp("us"))
    due_at = old if int96 else old.cast(pa.timestamp("us", tz="UTC"))
    footer = {SPARK: schema(due_at="timestamp"), **footer}
    path = write(tmp_path / "a.parquet", footer, int96=int96, value=["a", "b"], due_at=due_at)
    if refused:
        assert "1 of 2 rows cannot be sent" in refusal(run, path)
    else:
        assert [message.due_at.year for message in at_once(run, path)] == [1899, 1900]


def test_ids_of_instants_are_the_same_however_they_are_stored(run, tmp_path):
    folder = RECORDED / VERSIONS[-1]
    ids = []
    for kind in ("default", "micros"):
        run.transport.sent.clear()
        at_once(run, folder / f"{kind}.parquet", id_columns=["due_at"])
        ids.append(run.ids())
    assert ids[0] == ids[1]
    assert len({*ids[0]}) == len(MOMENTS)


# Other writers: pandas and Iceberg leave a schema too, and a writer without one leaves today's rules.


@pytest.mark.parametrize(
    ("footer", "meaning"),
    [
        ({SPARK: schema(due_at="timestamp")}, "instant"),
        ({SPARK: schema(due_at="timestamp_ntz")}, "timestamp_ntz in Spark's schema"),
        ({"iceberg.schema": schema(due_at="timestamptz")}, "instant"),
        ({"iceberg.schema": schema(due_at="timestamptz_ns")}, "instant"),
        ({"iceberg.schema": schema(due_at="timestamp")}, "timestamp in Iceberg's schema"),
        ({"pandas": {"columns": [{"name": "due_at", "pandas_type": "datetimetz"}]}}, "instant"),
        ({"pandas": {"columns": [{"name": None}, {"name": "due_at", "pandas_type": "datetimetz"}]}}, "instant"),
        ({"pandas": {"columns": [{"name": "due_at", "pandas_type": "datetime"}]}}, "datetime in pandas' schema"),
    ],
)
@pytest.mark.parametrize("writer", [write, old_writer])
def test_the_schema_of_the_writer_decides_where_the_type_does_not(run, tmp_path, footer, meaning, writer):
    path = writer(tmp_path / "a.parquet", footer)
    if meaning == "instant":
        [message] = at_once(run, path)
        assert message.due_at == WALL_CLOCK.replace(tzinfo=UTC)
    else:
        assert meaning in refusal(run, path)
        [message] = at_once(run, path, timezone="Asia/Tokyo")
        assert message.due_at == (WALL_CLOCK - timedelta(hours=9)).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("footer", "reason"),
    [
        ({}, "no schema of Spark, Iceberg or pandas for it"),
        ({SPARK: schema(expires_at="timestamp")}, "no schema of Spark, Iceberg or pandas for it"),
        (
            {SPARK: schema(due_at="timestamp"), "iceberg.schema": schema(due_at="timestamp")},
            "schemas that contradict each other",
        ),
    ],
)
def test_without_one_schema_the_type_decides(run, tmp_path, footer, reason):
    text = refusal(run, write(tmp_path / "a.parquet", footer))
    assert f"column due_at has no time zone (INT96, and the file has {reason})" in text
    assert "timezone='UTC' if its writer stores UTC, as Spark does" in text
    # Parquet's own rule for its older type
    [message] = at_once(run, old_writer(tmp_path / "b.parquet", footer))
    assert message.due_at == WALL_CLOCK.replace(tzinfo=UTC)


def test_no_schema_makes_an_instant_of_a_type_without_a_zone(run, tmp_path):
    # as pyarrow writes what it read of Spark's file and changed, with the footer that it read
    path = write(tmp_path / "a.parquet", {SPARK: schema(due_at="timestamp")}, int96=False)
    assert "column due_at has no time zone (isAdjustedToUTC=false); pass timezone=" in refusal(run, path)


# Files that disagree.

KINDS = {
    "instants (timestamp in Spark's schema)": {"footer": {SPARK: schema(due_at="timestamp")}},
    "times without a time zone (timestamp_ntz in Spark's schema)": {
        "footer": {SPARK: schema(due_at="timestamp_ntz")},
        "int96": False,
    },
    "times of an unknown time zone (INT96, ": {},
    "instants (isAdjustedToUTC=true)": {"due_at": pa.array([WALL_CLOCK], pa.timestamp("us", tz="UTC")), "int96": False},
}


@pytest.mark.parametrize("timezone", [None, "UTC"])
@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", KINDS)
def test_files_that_disagree_are_an_error_that_names_both(run, tmp_path, first, second, timezone):
    paths = [
        write(tmp_path / "in" / name, **KINDS[kind]) for name, kind in (("a.parquet", first), ("b.parquet", second))
    ]
    if first.split("(")[0] == second.split("(")[0]:
        if timezone or first.startswith("instants"):
            assert len(at_once(run, tmp_path / "in", timezone=timezone)) == 2
        return
    text = refusal(run, tmp_path / "in", timezone=timezone)
    for kind, path in zip((first, second), paths, strict=True):
        assert kind in text
        assert str(path) in text
    assert "send them by tasks of their own" in text


def test_files_that_disagree_in_an_ignored_column_do_not_matter(run, tmp_path):
    for name, kind in (("a.parquet", "timestamp"), ("b.parquet", "timestamp_ntz")):
        made = pa.array([WALL_CLOCK], pa.timestamp("us"))
        write(tmp_path / "in" / name, {SPARK: schema(due_at="timestamp", made=kind)}, made=made)
    assert len(at_once(run, tmp_path / "in", columns={})) == 2


def test_a_folder_that_is_written_by_two_releases_of_spark_is_one_source(run, tmp_path):
    for version in VERSIONS:
        for kind in ("default", "micros"):
            shutil.copy(RECORDED / version / f"{kind}.parquet", tmp_path / f"{version}-{kind}.parquet")
    # the rows are alike in all files, and so copies
    assert {message.due_at for message in at_once(run, tmp_path)} == {moment(at) for at in MOMENTS}


# Footers that nobody should believe: each is as if it were not there.

GOOD = schema(due_at="timestamp")


def deep(levels):
    return '{"type": "struct", "fields": [{"name": "due_at", "type": "timestamp", "metadata": %s}]}' % (
        "[" * levels + "]" * levels
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "[]",
        "7",
        '"timestamp"',
        b"\xff\xfe",
        json.dumps(GOOD).encode("utf-16"),
        "[" * 100_000,
        deep(MAX_DEPTH),
        deep(100_000),
        "9" * 100_000,
        json.dumps(GOOD)[:-1],
        {"type": "struct"},
        {"type": "struct", "fields": {"due_at": "timestamp"}},
        {"type": "struct", "fields": "due_at"},
        {"type": "struct", "fields": [*GOOD["fields"], "due_at"]},
        {"type": "struct", "fields": [*GOOD["fields"], None]},
        schema(*GOOD["fields"][:0], due_at=["timestamp"]),
        schema(due_at={"type": "timestamp"}),
        schema(due_at=True),
        schema(due_at=None),
        schema(due_at="TIMESTAMP"),
        schema(("due_at", "timestamp"), ("due_at", "timestamp")),
        schema(("due_at", "timestamp"), ("due_at", "timestamp_ntz")),
        schema(("due_at", "timestamp"), (7, "timestamp")),
        schema(("due_at", "timestamp"), (["due_at"], "timestamp")),
    ],
    ids=lambda text: repr(text)[:40],
)
def test_a_malformed_schema_counts_as_none(run, tmp_path, text):
    path = write(tmp_path / "a.parquet", {SPARK: text})
    assert "and the file has no schema of Spark, Iceberg or pandas for it" in refusal(run, path)


@pytest.mark.parametrize(("more", "read"), [(0, True), (1, False)])
def test_a_schema_is_read_up_to_its_bound(run, tmp_path, more, read):
    text = json.dumps(GOOD)
    text = text + " " * (time_columns.MAX_SCHEMA - len(text) + more)
    path = write(tmp_path / "a.parquet", {SPARK: text})
    if read:
        assert len(at_once(run, path)) == 1
    else:
        assert "no schema of Spark" in refusal(run, path)


def test_a_footer_that_is_too_long_is_not_read(run, tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", {SPARK: json.dumps(GOOD), "other": "x" * parquet.MAX_FOOTER})
    opened = []
    monkeypatch.setattr(parquet.pq, "ParquetFile", lambda *args, **options: opened.append(args))
    assert "has a footer of 8,38" in refusal(run, path)
    assert opened == []


def test_a_file_that_claims_a_longer_footer_than_it_is_itself_is_refused(run, tmp_path):
    path = write(tmp_path / "a.parquet")
    path.write_bytes(path.read_bytes()[:-8] + (100_000).to_bytes(4, "little") + b"PAR1")
    assert "cannot be read as Parquet" in refusal(run, path)


def test_a_column_whose_name_is_no_text_is_refused(run, tmp_path):
    path = write(tmp_path / "a.parquet", {SPARK: GOOD}, colour=["red"])
    path.write_bytes(path.read_bytes().replace(b"colour", b"\xff\xfeour"))
    assert f"{path} cannot be read as Parquet" in refusal(run, path, columns={})


def test_a_column_that_is_there_twice_is_refused(run, tmp_path):
    twice = pa.array([WALL_CLOCK], pa.timestamp("us", tz="UTC"))
    table = pa.Table.from_arrays([pa.array(["a"]), twice, twice], ["value", "due_at", "due_at"])
    pq.write_table(table, tmp_path / "a.parquet")
    assert "has more than one column due_at; rename one" in refusal(run, tmp_path / "a.parquet")


# Types that are no timestamps.


@pytest.mark.parametrize(
    ("due_at", "remedy"),
    [
        (pa.array(["2026-03-29"]), "is string, and must be a timestamp; in Spark to_timestamp(due_at) makes one"),
        (pa.array(["2026"], pa.large_string()), "in pandas to_datetime(due_at, utc=True)"),
        (pa.array([1_774_738_800]), "is int64, and must be a timestamp; in Spark timestamp_seconds(due_at), "),
        (pa.array([1.5]), "is double, and must be a timestamp; in Spark timestamp_seconds(due_at), "),
        (pa.array([WALL_CLOCK.date()]), "and cast(due_at as timestamp) of a date"),
    ],
)
def test_a_due_time_of_a_wrong_type_names_how_to_make_one(run, tmp_path, due_at, remedy):
    path = write(tmp_path / "a.parquet", int96=False, due_at=due_at)
    assert remedy in refusal(run, path)
