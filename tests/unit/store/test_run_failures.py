"""The failures that a message stands for, and which of them a success ends."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from airflow_delayed.store.escalations import HEADER, MAX_HEADER, NAMED_FAILURES, RunAttempt, RunFailure, RunFailures

NOON = datetime(2030, 1, 1, 12, tzinfo=timezone.utc)


def failure(hours: float, *, run: str = "r", started: bool = True, **fields: Any) -> RunFailure:
    """One that began so many hours after noon, and took half an hour."""
    begun = NOON + timedelta(hours=hours)
    half = timedelta(minutes=30)
    return RunFailure(dag_id="d", run_id=run, failed_at=begun + half, started_at=begun if started else None, **fields)


def success(hours: float | None, *, run: str = "r", run_after: datetime | None = None) -> RunAttempt:
    begun = None if hours is None else NOON + timedelta(hours=hours)
    return RunAttempt(name=f"d/{run}", run_id=run, tag="t", started_at=begun, run_after=run_after)


def of_all(*failures: RunFailure) -> RunFailures:
    found = RunFailures()
    for one in failures:
        found = found.and_also(one)
    return found


@pytest.mark.parametrize(
    ("green", "red", "ends"),
    [
        (success(1), failure(0), True),
        (success(1), failure(1), True),
        (success(1), failure(2), False),
        # where the start is unknown, a success of the same run ends it
        (success(None), failure(2), True),
        (success(1), failure(2, started=False), True),
        (success(5, run="s"), failure(0), False),
        (success(5, run="s", run_after=NOON), failure(0), False),
        (success(5, run="s"), failure(0, run_after=NOON), False),
        (success(0, run="s", run_after=NOON + timedelta(days=1)), failure(9, run_after=NOON), True),
        (success(0, run="s", run_after=NOON), failure(9, run_after=NOON), False),
        (success(9, run="s", run_after=NOON), failure(0, run_after=NOON + timedelta(days=1)), False),
        # its own run by the attempt, whatever the order of runs
        (success(1, run_after=NOON), failure(2, run_after=NOON), False),
    ],
)
def test_what_a_success_ends(green: RunAttempt, red: RunFailure, ends: bool) -> None:
    assert green.ends(red) is ends
    assert of_all(red).after(green).count == (0 if ends else 1)


def test_the_newest_are_named_and_all_are_counted() -> None:
    every = [failure(number, run=str(number), run_after=NOON + timedelta(days=number)) for number in range(15)]
    found = of_all(*reversed(every))
    assert (found.count, list(found.latest)) == (15, every[-NAMED_FAILURES:])
    # of those that are not named some have ended; how many is not known
    older = found.after(success(99, run="x", run_after=NOON + timedelta(days=2)))
    assert (older.count, list(older.latest)) == (15, every[-NAMED_FAILURES:])
    newer = found.after(success(99, run="x", run_after=NOON + timedelta(days=12)))
    assert (newer.count, list(newer.latest)) == (3, every[-3:])
    assert found.after(success(99, run="x", run_after=NOON + timedelta(days=99))) == RunFailures([], 0)


def test_they_come_back_from_a_header() -> None:
    one = failure(0, task_id="t", map_index=3, reason="task_failure", run_url="https://a/b", problem="ü")
    found = of_all(one, failure(1, run_after=NOON, started=False))
    assert RunFailures.of(found.header()) == RunFailures(list(found.latest), 2)
    assert found.header()[HEADER].isascii()
    assert json.loads(found.body()) == {
        **found.latest[-1].plain(),
        "failures": 2,
        "latest": [each.plain() for each in found.latest],
    }
    alone = of_all(one)
    assert json.loads(alone.body()) == {**one.plain(), "failures": 1}


def test_long_names_leave_room_for_fewer() -> None:
    found = of_all(*(failure(number, run="x" * 2000, task_id=str(number)) for number in range(12)))
    plain = json.loads(found.header()[HEADER])
    assert (plain["failures"], [one["task_id"] for one in plain["latest"]]) == (12, ["9", "10", "11"])
    assert len(found.header()[HEADER]) <= MAX_HEADER
    huge = of_all(failure(0, run="x" * 9000), failure(1, run="y" * 9000))
    assert [one["run_id"][0] for one in json.loads(huge.header()[HEADER])["latest"]] == ["y"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "7",
        "{}",
        '{"failures": 1}',
        '{"failures": 1, "latest": []}',
        '{"failures": 1, "latest": [7]}',
        '{"failures": 1, "latest": [{"dag_id": "d"}]}',
        '{"failures": 1, "latest": [{"dag_id": "d", "run_id": "r", "failed_at": "soon"}]}',
        '{"failures": 1, "latest": [{"dag_id": "d", "run_id": "r", "failed_at": "2030-01-01T00:00:00"}]}',
        '{"failures": 1, "latest": [{"dag_id": "d", "run_id": "r", "failed_at": "2030-01-01T00:00Z", "more": 1}]}',
        '{"failures": "many", "latest": [{"dag_id": "d", "run_id": "r", "failed_at": "2030-01-01T00:00Z"}]}',
        "[" * 100_000,
    ],
)
def test_a_header_that_another_program_wrote_stands_for_nothing(text: str) -> None:
    assert RunFailures.of({HEADER: text}) == RunFailures()
    assert RunFailures.of({}) == RunFailures()
