"""Whose turn it is, and what is told, with passes that take their time."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta, timezone

import pytest

from airflow_delayed.delivery import TopologyReport
from airflow_delayed.errors import AccessDenied, RetentionAtRisk, TopologyError
from airflow_delayed.sqs.delay_queue import LONGEST_ROUND, TURN, DelayQueueLoop
from airflow_delayed.sqs.stats import CycleCounts

START = datetime(2026, 1, 1, tzinfo=timezone.utc)


class Queues:
    """Stands for a hook: to ``busy`` queues messages come without end; a batch takes a tenth of a second."""

    conn_id = "c"

    def __init__(self, *busy: str) -> None:
        self.busy = busy
        self.seconds = 0.0
        self.passes: list[str] = []
        self.wrong: dict[str, Exception] = {}
        self.stopped: set[str] = set()

    def monotonic(self) -> float:
        return self.seconds

    def clock(self) -> datetime:
        return START + timedelta(seconds=self.seconds)

    def cycle(self, destination, wait_seconds=0, *, error_queue=None, stop) -> CycleCounts:
        self.passes.append(destination)
        if destination in self.wrong:
            raise self.wrong[destination]
        counts = CycleCounts()
        if destination not in self.busy:
            self.seconds += wait_seconds
            return counts
        while not stop():
            self.seconds += 0.1
            counts.delivered += 10
            counts.note_late(100)
        return counts

    def waiting(self, destination) -> int:
        return 0

    def retention(self, destination) -> int:
        return 1_209_600


def rounds_of(queues: Queues, *names: str, **fields) -> DelayQueueLoop:
    return DelayQueueLoop(
        queues, names, **{"end": None, "wait_seconds": 0, "looks": 3, "monotonic": queues.monotonic, **fields}
    )


def test_a_queue_without_end_does_not_keep_the_others_waiting():
    queues = Queues("busy")
    assert not rounds_of(queues, "busy", "other").go()
    turns = Counter(queues.passes)
    assert queues.passes[:2] == ["busy", "other"]
    assert turns["busy"] > 1  # a round takes what it can
    assert queues.seconds <= LONGEST_ROUND + TURN + 1

    both = Queues("one", "two")
    assert not rounds_of(both, "one", "two").go()
    assert both.passes[:4] == ["one", "two", "one", "two"]
    assert both.seconds <= LONGEST_ROUND + 2 * TURN + 1


def test_nor_does_it_keep_a_sensor_from_its_timeout():
    queues = Queues("busy")
    assert not rounds_of(queues, "busy", wait_seconds=20).go()
    assert LONGEST_ROUND <= queues.seconds <= LONGEST_ROUND + 21


@pytest.mark.parametrize(
    "error",
    [
        TopologyError("c", TopologyReport(())),
        AccessDenied("c", ["sqs:ReceiveMessage"], "one", "cycle one", "AccessDenied: no"),
        RetentionAtRisk("c", "the delay queue of one", 700_000, 1_209_600),
    ],
)
def test_what_is_wrong_with_one_queue_does_not_hold_the_others_up(error):
    queues = Queues()
    queues.wrong["one"] = error
    with pytest.raises(type(error)):
        rounds_of(queues, "one", "two", "three").go()
    assert queues.passes == ["one", "two", "three"]
