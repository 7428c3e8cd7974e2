from __future__ import annotations

import logging
from datetime import datetime, timedelta
from functools import partial

import pytest
from support.memory import peak
from support.recorder import Recorder

from airflow_delayed.delivery import SendReport
from airflow_delayed.errors import InputError, Interrupted, LimitExceeded, SendFailed, SourceError
from airflow_delayed.intake.columns import ColumnRules, RowBatch, RowRules
from airflow_delayed.intake.duplicates import DuplicateFilter
from airflow_delayed.intake.rows import RowReader
from airflow_delayed.intake.sources import ListSource
from airflow_delayed.message import UTC
from airflow_delayed.sending import Route, Sending

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
LOG = logging.getLogger("test")


class Counting(Recorder):
    """Keeps no message."""

    def send(self, messages):
        report = SendReport()
        for message in messages:
            report.add(message)
        return report


class Generated:
    """Rows that are made as they are read."""

    name = "generated"

    def __init__(self, count):
        self.count = count

    def batches(self, wanted):
        for start in range(0, self.count, 4000):
            numbers = range(start, min(start + 4000, self.count))
            columns = {"value": [str(number) for number in numbers], "delay_seconds": [60] * len(numbers)}
            yield RowBatch(columns=columns, size=len(numbers), origin="generated", first_row=start + 1)

    def check_unchanged(self):
        pass


def sending(source, transport=None, clock=lambda: NOW, **options):
    rules = RowRules(anchor=NOW, destination="mail")
    route = options.pop("route", None) or Route(delivery=transport or Counting())
    wanted = ColumnRules(destination=True)
    return Sending(source, wanted, lambda: RowReader(rules), route, began=NOW, clock=clock, log=LOG, **options)


def send_generated(count):
    job = sending(Generated(count))
    job.deliver(job.preflight())
    assert job.sent.sent == count


def test_memory_does_not_grow_with_the_rows(monkeypatch):
    monkeypatch.setattr("airflow_delayed.sending.DuplicateFilter", partial(DuplicateFilter, memory=50_000))
    # two whole batches, of which one is read while the other is still there
    small = peak(partial(send_generated, 8_000))
    # 10,000 more rows kept as ids alone would be 0.8 MB more
    assert peak(partial(send_generated, 18_000)) - small < 400_000


def test_rejected_rows_are_the_same_in_both_passes_although_the_clock_goes_on():
    class Picky(Recorder):
        def check(self, message, now):
            from airflow_delayed.errors import LimitExceeded

            if message.due_at - now > timedelta(seconds=100):
                raise LimitExceeded("due_at", "is too far away")

    now = NOW
    transport = Picky()
    rows = [{"value": str(seconds), "delay_seconds": seconds} for seconds in (50, 101, 150)]
    job = sending(ListSource(rows), transport, clock=lambda: now)
    rejected = []
    found = job.preflight(reject=rejected.append)
    now += timedelta(seconds=60)
    job.deliver(found)
    assert [problem.row["value"] for problem in rejected] == [b"101", b"150"]
    assert [message.body for message in transport.sent] == [b"50"]


def test_source_that_changed_is_not_sent():
    class Changed(ListSource):
        def check_unchanged(self):
            raise SourceError("changed")

    transport = Recorder()
    job = sending(Changed([{"value": "x", "delay_seconds": 1}]), transport)
    found = job.preflight()
    with pytest.raises(SourceError):
        job.deliver(found)
    assert transport.sent == []


class Shrinking(ListSource):
    """Has fewer rows each time it is read, as a file that is written anew."""

    def batches(self, wanted):
        yield from super().batches(wanted)
        self._messages = self._messages[:-1]


def test_source_that_lost_rows_while_it_was_sent_is_no_success():
    job = sending(ListSource([{"value": str(number), "delay_seconds": 1} for number in range(3)]))
    job.deliver(job.preflight())
    job = sending(Shrinking([{"value": str(number), "delay_seconds": 1} for number in range(3)]))
    with pytest.raises(Interrupted, match="had 3 good rows when it was checked, and then 2"):
        job.deliver(job.preflight())


def test_source_that_changed_while_it_was_sent_is_no_success():
    class Changing(ListSource):
        looks = 0

        def check_unchanged(self):
            self.looks += 1
            if self.looks > 1:
                raise SourceError("source changed")

    job = sending(Changing([{"value": "x", "delay_seconds": 1}]))
    with pytest.raises(Interrupted, match="after 1 messages were sent and 0 stored: source changed"):
        job.deliver(job.preflight())


def test_longest_past_is_no_overflow():
    old = [{"value": "x", "due_at": datetime(1, 1, 1, tzinfo=UTC)}]
    job = sending(ListSource(old), max_past=timedelta.max)
    assert job.preflight().past_due == 0


def test_message_that_came_near_while_others_were_sent_goes_to_the_broker():
    now = NOW
    broker, store = Recorder(), Recorder("store")
    rows = [{"value": "a", "delay_seconds": 400}, {"value": "b", "delay_seconds": 1000}]
    job = sending(
        ListSource(rows),
        clock=lambda: now,
        route=Route(delivery=broker, store=store, hold_over=timedelta(seconds=300)),
    )
    found = job.preflight()
    assert (found.direct.sent, found.stored.sent) == (0, 2)
    now += timedelta(seconds=200)
    job.deliver(found)
    assert [message.body for message in broker.sent] == [b"a"]
    assert [message.body for message in store.sent] == [b"b"]


class Strict(Recorder):
    """Refuses bodies of over three bytes, as a broker of which only its refusal says so; the first ends a send."""

    def send(self, messages):
        report = SendReport()
        for message in messages:
            if len(message.body) > 3:
                error = LimitExceeded("body", "is too large for the broker")
                error.message_id = message.message_id
                if not report.sent:
                    raise error
                raise SendFailed(self.conn_id, report, [(message.message_id, str(error))]) from error
            self.sent.append(message)
            report.add(message)
        return report


class Kept:
    """A checkpoint in memory."""

    checkpoint = None

    def get(self):
        return self.checkpoint

    def keep(self, checkpoint):
        self.checkpoint = checkpoint


@pytest.mark.parametrize("rejects", [True, False])
@pytest.mark.parametrize("bodies", [["a", "long", "b", "longer", "c"], ["long", "a", "b", "c", "longer"]])
def test_what_only_the_broker_refuses_is_left_out_and_the_others_are_sent_once(rejects, bodies):
    transport, checkpoints, rejected = Strict(), Kept(), []
    job = sending(ListSource([{"value": body, "delay_seconds": 1} for body in bodies]), transport)
    found = job.preflight()
    if rejects:
        job.deliver(found, checkpoints=checkpoints, reject=rejected.append)
        assert [problem.row["value"] for problem in rejected] == [b"long", b"longer"]
    else:
        with pytest.raises(InputError, match=r"2 of 5 rows cannot be sent: message .* All others were"):
            job.deliver(found, checkpoints=checkpoints)
    assert [message.body for message in transport.sent] == [b"a", b"b", b"c"]
    assert (job.sent.sent, job.refused) == (3, 2)
    # a task that is cleared when the broker takes more sends what was refused
    assert checkpoints.checkpoint is None
