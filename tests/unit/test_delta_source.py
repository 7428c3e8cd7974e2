"""A Delta table as a source: which version is read, and which cannot be."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from airflow.sdk.exceptions import AirflowFailException
from deltalake import DeltaTable, write_deltalake
from support.recorder import Recorder

from airflow_delayed.errors import SourceError
from airflow_delayed.sources import DeltaSource

DUE = datetime(2030, 5, 6, 12, tzinfo=timezone.utc)


def table(*bodies):
    return pa.table({"value": bodies, "due_at": [DUE] * len(bodies), "tag": ["customer 7"] * len(bodies)})


@pytest.fixture
def path(tmp_path):
    """A table of two versions, partitioned by a name that has to be encoded; the second replaces the first."""
    folder = str(tmp_path / "table")
    write_deltalake(folder, table("old 1", "old 2"), partition_by=["tag"])
    write_deltalake(folder, table("new"), mode="overwrite")
    return folder


def vacuum(path):
    DeltaTable(path).vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)


def test_the_newest_version_is_read_and_its_partitions(run, path):
    run.execute(source=DeltaSource(path))
    [message] = run.transport.sent
    assert (message.body, message.tag, message.due_at) == (b"new", "customer 7", DUE)


def test_int96_is_what_the_log_declares(run, path):
    [file] = DeltaTable(path).file_uris()
    # as Flink and others write it, without a schema in the footer
    rows = pa.table({"value": ["new"], "due_at": pa.array([DUE.replace(tzinfo=None)], pa.timestamp("us"))})
    pq.write_table(rows, file, use_deprecated_int96_timestamps=True, store_schema=False)
    run.execute(source=DeltaSource(path))
    [message] = run.transport.sent
    assert message.due_at == DUE


def test_a_wall_clock_of_a_table_needs_the_zone_that_it_is_in(run, tmp_path):
    naive = pa.array([DUE.replace(tzinfo=None)], pa.timestamp("us"))
    write_deltalake(str(tmp_path / "naive"), pa.table({"value": ["a"], "due_at": naive}))
    source = DeltaSource(str(tmp_path / "naive"))
    with pytest.raises(AirflowFailException, match=r"\(timestamp_ntz in the table's schema\); pass timezone="):
        run.execute(source=source)
    run.execute(source=source, timezone="Asia/Tokyo")
    [message] = run.transport.sent
    assert message.due_at == DUE - timedelta(hours=9)


@pytest.mark.parametrize("version", [0, "0"])
def test_an_older_version_by_its_number(run, path, version):
    run.execute(source=DeltaSource(path, version=version))
    assert sorted(run.bodies()) == ["old 1", "old 2"]


def test_what_is_written_after_the_first_pass_began_is_not_sent(run, path):
    class Slow(Recorder):
        def verify(self, destinations, **options):
            write_deltalake(path, table("newest"), mode="overwrite")
            return super().verify(destinations, **options)

    run.transport = Slow()
    run.execute(source=DeltaSource(path))
    assert run.bodies() == ["new"]


def test_a_version_that_was_vacuumed_away_is_named_and_nothing_is_sent(run, path):
    vacuum(path)
    with pytest.raises(AirflowFailException, match=r"version 0 of Delta .*table has lost 1 of its 1 files.*VACUUM"):
        run.execute(source=DeltaSource(path, version=0))
    assert run.bodies() == []


def test_a_version_that_is_vacuumed_away_between_the_passes(run, path):
    class Vacuumed(Recorder):
        def verify(self, destinations, **options):
            vacuum(path)
            return super().verify(destinations, **options)

    run.transport = Vacuumed()
    with pytest.raises(AirflowFailException, match=r"version 0 of Delta table .*VACUUM"):
        run.execute(source=DeltaSource(path, version=0))
    assert run.bodies() == []


@pytest.mark.parametrize(
    "options, says",
    [
        ({"version": 99}, "version 99 of Delta table .* cannot be read"),
        ({"version": "last"}, "version='last' of DeltaSource is no number"),
    ],
)
def test_versions_that_are_none(run, path, options, says):
    with pytest.raises(AirflowFailException, match=says):
        run.execute(source=DeltaSource(path, **options))


def test_a_folder_that_is_no_table(run, tmp_path):
    with pytest.raises(AirflowFailException, match=r"Delta table .*nothing cannot be read"):
        run.execute(source=DeltaSource(str(tmp_path / "nothing")))


def test_a_table_whose_files_alone_are_not_its_rows(run, tmp_path):
    folder = str(tmp_path / "table")
    write_deltalake(folder, table("x"), configuration={"delta.enableDeletionVectors": "true"})
    with pytest.raises(AirflowFailException, match="has deletionVectors, which cannot be read here"):
        run.execute(source=DeltaSource(folder))


def test_without_deltalake_the_error_names_the_extra(path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "deltalake", None)
    with pytest.raises(SourceError, match=r"airflow-provider-delayed\[delta\]"):
        DeltaSource(path).open(None, naive_ok=True)


def test_options_of_the_storage_are_not_shown():
    source = DeltaSource("s3://bucket/table", version=3, storage_options={"AWS_SECRET_ACCESS_KEY": "hush"})
    assert source.serialize() == {"source": "DeltaSource", "path": "s3://bucket/table", "version": 3}
