"""Files that are made beside a send: for their owner alone, new, and through nobody's link."""

from __future__ import annotations

import json
import os
import stat

import fsspec
import pytest

from airflow_delayed.errors import InputError
from airflow_delayed.intake.duplicates import DuplicateFilter, DuplicateIndex
from airflow_delayed.intake.rows import Problem
from airflow_delayed.intake.sources import Rejects
from airflow_delayed.spark.reporting import SharedFolder

LOCAL = fsspec.filesystem("file")
PROBLEM = Problem("rows row 1", "value", "is null", {"headers": {"token": "secret"}})


@pytest.fixture(autouse=True)
def open_to_all():
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path):
    return stat.S_IMODE(os.stat(path).st_mode)


def rejected(path, run="run-1"):
    with Rejects(LOCAL, str(path), run) as rejects:
        rejects.add(PROBLEM)
    return rejects


def test_rejects_are_for_their_owner_alone(tmp_path):
    path = tmp_path / "new" / "rejects.jsonl"
    for run in ("run-1", "run-1", "run-2"):
        rejected(path, run)
        assert mode(path) == 0o600
    assert mode(tmp_path / "new" / "rejects.run-1.jsonl") == 0o600


@pytest.mark.parametrize("there", [True, False])
def test_rejects_follow_no_link(tmp_path, there):
    other, path = tmp_path / "other", tmp_path / "rejects.jsonl"
    if there:
        other.write_text(json.dumps({"rejected": {"run": "run-1"}}))
    path.symlink_to(other)
    with pytest.raises(InputError, match=r"rejects=.* is a link or a folder; give rejects= a path of its own"):
        rejected(path)
    assert path.is_symlink()
    assert other.exists() == there


def test_rejects_follow_no_link_that_is_laid_while_rows_are_read(tmp_path):
    other, path = tmp_path / "other", tmp_path / "rejects.jsonl"
    rejects = Rejects(LOCAL, str(path), "run-1")
    path.symlink_to(other)
    with pytest.raises(InputError, match="made by somebody else"):
        rejects.add(PROBLEM)
    assert not other.exists()


def test_rejects_of_an_earlier_run_are_moved_into_no_folder(tmp_path):
    rejected(tmp_path / "rejects.jsonl", "run-1")
    kept = tmp_path / "rejects.run-1.jsonl"
    kept.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    rejected(tmp_path / "rejects.jsonl", "run-2")
    assert not kept.is_symlink()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_spools_are_for_their_owner_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    ledger, sieve = DuplicateIndex(memory=40), DuplicateFilter(memory=8)
    for number in range(10):
        ledger.add("same", b"0" * 16, number)
        sieve.add(["same"])
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) == 512
    assert {mode(file) for file in files} == {0o600}
    assert {mode(folder) for folder in tmp_path.iterdir()} == {0o700}
    ledger.close()
    sieve.close()


def test_what_spark_attempts_tell_is_written_through_no_link(tmp_path, monkeypatch):
    class Known:
        hex = "0123456789abcdef"

    monkeypatch.setattr("airflow_delayed.spark.reporting.uuid4", Known)
    (tmp_path / "1.json.01234567.unfinished").symlink_to(tmp_path / "other")
    with pytest.raises(FileExistsError):
        SharedFolder(str(tmp_path / "1.json")).write({})
    assert not (tmp_path / "other").exists()
