"""What the driver adds up, tells and writes down."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delayed.delivery import SendReport
from airflow_delayed.errors import SourceError
from airflow_delayed.reports import largest_destinations
from airflow_delayed.spark.options import settings_of
from airflow_delayed.spark.partition import slot
from airflow_delayed.spark.reporting import (
    EVERY,
    MOST_DESTINATIONS,
    AttemptFile,
    FailedAttempts,
    PartitionCounts,
    SharedFolder,
    check_manifest,
    failed_attempts,
    log_abort,
    log_commit,
    manifest_of,
    total,
)

NOW = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)
SETTINGS = settings_of({"deliver": "broker"}, NOW)
LOG = logging.getLogger("airflow_delayed.spark")


def counts(sent: int = 0, stored: int = 0, destination: str = "mail", **more: int) -> PartitionCounts:
    dues = {"first_due": NOW, "last_due": NOW + timedelta(hours=1)}
    return PartitionCounts(
        rows=sent + stored,
        sent=SendReport(sent=sent, by_destination={destination: sent} if sent else {}, **(dues if sent else {})),
        stored=SendReport(sent=stored, by_destination={destination: stored} if stored else {}, **more),
    )


reports = st.builds(
    SendReport,
    sent=st.integers(0, 99),
    duplicates=st.integers(0, 99),
    replaced=st.integers(0, 99),
    not_replaced=st.integers(0, 99),
    first_due=st.none() | st.datetimes(timezones=st.just(timezone.utc)),
    last_due=st.none() | st.datetimes(timezones=st.just(timezone.utc)),
    by_destination=st.dictionaries(st.sampled_from("abc"), st.integers(1, 9)),
)
all_counts = st.builds(
    PartitionCounts, rows=st.integers(0, 99), skipped=st.integers(0, 99), sent=reports, stored=reports
)


@given(all_counts)
def test_counts_survive_json(one: PartitionCounts) -> None:
    import json

    assert PartitionCounts.from_json(json.loads(json.dumps(one.to_json()))) == one


@given(st.lists(all_counts))
def test_counts_add_up(many: list[PartitionCounts]) -> None:
    found = total(many)
    assert found.out == sum(one.out for one in many)
    assert found.rows == sum(one.rows for one in many)
    destinations = largest_destinations(found.by_destination())["destinations"]
    assert sum(destinations.values()) == sum(sum(one.by_destination().values()) for one in many)
    assert list(destinations.values()) == sorted(destinations.values(), reverse=True)


def test_what_failed_attempts_sent_is_added_up(tmp_path: Path) -> None:
    folder = SharedFolder(str(tmp_path / "attempts"))
    assert failed_attempts(folder, ()).attempts == 0
    now = 100.0
    killed = AttemptFile(folder, "000000-1", monotonic=lambda: now)
    killed.progress(counts(sent=5))
    now += EVERY - 1
    killed.progress(counts(sent=6))  # not yet
    AttemptFile(folder, "000001-2").progress(counts(sent=70))  # it succeeded in the end
    failed = AttemptFile(folder, "000002-3")
    failed.failed(counts(stored=4))
    found = failed_attempts(folder, {"000001-2"})
    assert (found.attempts, found.exact, found.counts.sent.sent, found.counts.stored.sent) == (2, False, 5, 4)
    now += 1
    killed.progress(counts(sent=7))
    assert failed_attempts(folder, {"000001-2"}).counts.sent.sent == 7
    killed.failed(counts(sent=8))
    assert failed_attempts(folder, {"000001-2"}).exact
    folder.remove()
    folder.remove()
    assert not (tmp_path / "attempts").exists()


def test_a_job_that_succeeded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log_commit(LOG, SETTINGS, [(0, counts(sent=1000)), (0, counts(stored=5, destination="sms"))], None)
    assert "all confirmed: 1,000 sent by connection broker and 5 stored, of 1,005 rows" in caplog.messages[0]
    assert caplog.messages[1:] == ["mail: 1,000", "sms: 5"]
    caplog.clear()
    log_commit(LOG, SETTINGS, [(0, counts(sent=1000)), (1, counts(sent=5))], None)
    assert "1 partitions succeeded only after another attempt" in caplog.messages[-1]
    assert "not known where they were killed: the option attempts names a folder" in caplog.messages[-1]
    caplog.clear()
    others = FailedAttempts(2, total([counts(sent=7), counts(stored=3)]), exact=False)
    log_commit(LOG, SETTINGS, [(0, counts(sent=1))], others)
    assert "2 other attempts had sent at least 7 messages and stored at least 3 (10 to mail)" in caplog.messages[-1]
    caplog.clear()
    log_commit(LOG, SETTINGS, [(0, counts(sent=1, destination=f"q{n}")) for n in range(MOST_DESTINATIONS + 3)], None)
    assert caplog.messages[-1] == "and 3 other destinations"


def test_a_job_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    others = FailedAttempts(4, counts(sent=40), exact=True)
    log_abort(LOG, SETTINGS, [counts(sent=1000, stored=20)], 3, others)
    assert "1 of 3 partitions had been sent in full: 1,000 messages by connection broker" in caplog.messages[-1]
    assert "20 in the store, where they can be cancelled. 4 other attempts had sent 40 messages" in caplog.messages[-1]
    assert "if it is given the same anchor and scope, or its rows have ids" in caplog.messages[-1]


def test_the_manifest(tmp_path: Path) -> None:
    file = SharedFolder(str(tmp_path / "new/folder/manifest.json"))
    file.write({"old": True})
    file.write(
        manifest_of(
            SETTINGS, [(0, counts(sent=3)), (2, counts(stored=2))], FailedAttempts(1, counts(sent=9), exact=True)
        )
    )
    found = check_manifest(file.read(), "it")
    assert (found["summary"]["sent"], found["summary"]["stored"], found["partitions"]) == (3, 2, 2)
    assert found["other_attempts"] == {"attempts": 1, "sent": 9, "stored": 0, "exact": True}
    assert found["repeated"] == 1
    assert found["anchor"] == NOW.isoformat()
    assert [path.name for path in (tmp_path / "new/folder").iterdir()] == ["manifest.json"]
    for other in ([], {"version": 0, "summary": {}}, {"version": 1}):
        with pytest.raises(SourceError, match="no manifest of this release"):
            check_manifest(other, "it")


def test_places_by_url(tmp_path: Path) -> None:
    SharedFolder(f"file://{tmp_path}/a.json").write([1])
    assert SharedFolder(str(tmp_path / "a.json")).read() == [1]
    SharedFolder("memory://told/a.json").write([2])  # of fsspec
    assert SharedFolder("memory://told/a.json").read() == [2]
    with pytest.raises(SourceError, match="nowhere:// cannot be opened"):
        SharedFolder("nowhere://a")


def test_an_executors_slots(tmp_path: Path) -> None:
    class Full(Exception):
        pass

    def full(seconds: float) -> None:
        raise Full

    with slot(2, folder=tmp_path, group=1), slot(2, folder=tmp_path, group=1):
        with pytest.raises(Full), slot(2, folder=tmp_path, group=1, sleep=full):
            pass
        with slot(2, folder=tmp_path, group=2, sleep=full), slot(None):
            pass
    with slot(2, folder=tmp_path, group=1, sleep=full):
        pass
