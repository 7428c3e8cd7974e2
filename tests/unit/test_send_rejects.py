"""Where DelayedSendOperator writes the rows that it rejects, and what it never overwrites."""

from __future__ import annotations

import json

import pytest
from airflow.sdk.exceptions import AirflowFailException
from support.send_runs import rows


def test_bad_rows_are_rejected_and_can_be_mended(run, tmp_path, log):
    rejects = tmp_path / "new" / "rejects.jsonl"
    bad = [{"value": "x", "delay_seconds": -1}, *rows(2), {"value": "y" * 101, "delay_seconds": 1, "tag": "t"}]
    summary = run.execute(messages=bad, rejects=str(rejects))
    assert (summary["sent"], summary["rejected"]) == (2, 2)
    assert [message.body for message in run.transport.sent] == [b"body 0", b"body 1"]
    first, second = (json.loads(line) for line in rejects.read_text().splitlines())
    assert (first["delay_seconds"], first["rejected"]["place"]) == (-1, "messages row 1")
    assert (first["rejected"]["column"], second["rejected"]["column"]) == ("delay_seconds", "body")
    assert str(rejects) in log.text
    # mended, they are sent by themselves, with the ids that they had
    mended = tmp_path / "mended.jsonl"
    mended.write_text("\n".join(json.dumps({**row, "value": "m", "delay_seconds": 1}) for row in (first,)))
    run.transport.sent.clear()
    assert run.execute(source=str(mended))["sent"] == 1
    # and the next try leaves no old file behind
    run.execute(messages=rows(1), rejects=str(rejects))
    assert not rejects.exists()


def test_rejects_of_another_run_are_kept_beside(run, tmp_path, log):
    rejects = tmp_path / "rejects.jsonl"
    parameters = {"rejects": str(rejects)}
    run.execute(messages=[{"value": "of yesterday", "delay_seconds": -1}], **parameters)
    run.run_id, run.try_number = "run 2", 0
    run.execute(messages=[{"value": "of today", "delay_seconds": -1}], **parameters)
    kept = tmp_path / "rejects.dag.run-1.send.jsonl"
    assert f"an earlier run rejected are in {kept} now" in log.text
    assert [json.loads(file.read_text())["value"] for file in (kept, rejects)] == ["of yesterday", "of today"]
    # a retry writes its own anew
    run.clear()
    run.execute(messages=[{"value": "of today again", "delay_seconds": -1}], **parameters)
    assert json.loads(rejects.read_text())["value"] == "of today again"


def test_rejects_of_mapped_tasks_are_files_of_their_own(run, tmp_path):
    for index in (0, 1):
        run.map_index, run.try_number = index, 0
        bad = [{"value": str(index), "delay_seconds": -1}]
        run.execute(messages=bad, rejects=str(tmp_path / "rejects.jsonl"))
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["rejects-0.jsonl", "rejects-1.jsonl"]
    assert [json.loads(file.read_text())["value"] for file in files] == ["0", "1"]


def test_rejects_overwrite_nothing_else(run, tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    with pytest.raises(AirflowFailException, match="holds no rejected rows"):
        run.execute(messages=rows(1), rejects=str(file))
    assert file.read_text() == "mine"


def test_rejects_never_overwrite_the_source(run, tmp_path):
    source = tmp_path / "rows.jsonl"
    source.write_text('{"value": "x", "delay_seconds": -1}')
    with pytest.raises(AirflowFailException, match="lies in the source"):
        run.execute(source=str(source), rejects=str(source))
    assert source.read_text()
