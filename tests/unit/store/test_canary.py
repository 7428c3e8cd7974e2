"""Canaries, with a broker and a clock of the test's own: what is lost, late or hangs is reported in time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from threading import Event

import pytest

from airflow_delayed.delivery import Delivery, TemporaryQueue
from airflow_delayed.errors import TopologyError, TransportUnavailable
from airflow_delayed.message import UTC, DelayedMessage
from airflow_delayed.store.dispatch.canary import DELAY, IN_LEVELS, ROUND_EVERY, WHEN_DUE, Canary
from airflow_delayed.store.dispatch.report import Trouble
from airflow_delayed.store.dispatch.settle import BatchOutcome

BEGIN = datetime(2026, 1, 31, 9, tzinfo=UTC)
#: Seconds from a fault to the verdict, less those from a sign of life to the next, and less the age of a figure.
SOON_ENOUGH = 90 - 3 - 5


class Queue(TemporaryQueue):
    def __init__(self, broker: Broker, name: str) -> None:
        super().__init__(name)
        self.broker = broker

    def arrives(self, seconds: float) -> bool:
        return self.broker.arrives(seconds)

    def end(self) -> None:
        self.broker.left = self.awaited


@dataclass
class Broker:
    """Delays messages, and reads them back; time passes while somebody waits for it."""

    seconds: float = 0.0
    #: When the fault begins and ends; what it is.
    fault: str = "none"
    begins: float = float("inf")
    ends: float = float("inf")
    #: Beside the clock's: how late it delivers.
    late: float = 0.02
    #: When each message arrives, and whether it waits in a level until then.
    arrivals: list[tuple[float, bool]] = field(default_factory=list)
    #: How many messages levels have lost.
    lost: int = 0
    #: Whether a queue stays after its block.
    left: bool = False
    canary: Canary = field(init=False)
    stop: Event = field(default_factory=Event)
    outcomes: list[tuple[str, float]] = field(default_factory=list)
    #: When the trouble began and ended, as signs of life would have it.
    reports: list[tuple[float, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.canary = Canary("rabbit", lambda: Fake(self), self.clock, self.stop, self.arrived)

    def clock(self) -> datetime:
        return BEGIN + timedelta(seconds=self.seconds)

    def arrived(self, conn_id: str, outcome: BatchOutcome) -> None:
        (row,) = outcome.delivered
        assert conn_id == "rabbit"
        assert outcome.at is not None
        self.outcomes.append((row["Destination"], (outcome.at - row["Time"]).total_seconds()))

    def is_broken(self, fault: str) -> bool:
        return self.fault == fault and self.begins <= self.seconds < self.ends

    def trouble(self) -> Trouble | None:
        return self.canary.trouble(self.clock())

    def pass_time(self, seconds: float) -> None:
        end = self.seconds + seconds
        while self.seconds < end:
            self.seconds = min(end, self.seconds + 0.25)
            if self.is_broken("level lost"):
                left = [(at, delayed) for at, delayed in self.arrivals if not delayed or at - self.late <= self.seconds]
                self.lost += len(self.arrivals) - len(left)
                self.arrivals = left
            is_reported = self.trouble() is not None
            if is_reported != (self.reports[-1][1] if self.reports else False):
                self.reports.append((self.seconds, is_reported))

    def arrives(self, seconds: float) -> bool:
        first = min(self.arrivals, default=(float("inf"), False))
        if self.is_broken("frozen") or first[0] > self.seconds + seconds:
            self.pass_time(seconds)
            return False
        self.pass_time(max(0.0, first[0] - self.seconds))
        if first not in self.arrivals:
            return False
        self.arrivals.remove(first)
        return True

    def play(self, until: float) -> None:
        while self.seconds < until:
            self.pass_time(ROUND_EVERY)
            self.canary.round()


class Fake(Delivery):
    def __init__(self, broker: Broker) -> None:
        super().__init__()
        self.broker = broker

    @property
    def horizon(self) -> timedelta:
        return timedelta(days=1)

    @contextmanager
    def temporary_queue(self, name: str, seconds: float) -> Iterator[TemporaryQueue]:
        if self.broker.is_broken("frozen"):
            self.broker.pass_time(120)
            raise TransportUnavailable("connection 'rabbit': no answer in time")
        if self.broker.is_broken("away"):
            raise TransportUnavailable("connection 'rabbit': refused")
        if self.broker.is_broken("no right"):
            raise TopologyError("connection 'rabbit': no right on the queue")
        queue = Queue(self.broker, name)
        yield queue
        queue.end()

    def send(self, messages: list[DelayedMessage]) -> None:  # type: ignore[override]
        (one,) = messages
        due = (one.due_at - BEGIN).total_seconds()
        self.broker.arrivals.append((max(due, self.broker.seconds) + self.broker.late, due > self.broker.seconds))

    install = verify = check = None  # type: ignore[assignment]

    def close(self) -> None:
        pass


def test_a_broker_that_is_well_is_measured_and_nothing_is_said_of_it() -> None:
    broker = Broker()
    broker.play(300)
    assert broker.reports == []
    assert not broker.left
    names, lateness = zip(*broker.outcomes, strict=True)
    assert names == (WHEN_DUE, IN_LEVELS) * (len(names) // 2)
    assert len(names) in range(8, 12), "two a minute"
    assert all(0 < late < 0.1 for late in lateness)


def test_whenever_it_breaks_it_is_said_within_90_s_and_taken_back() -> None:
    for begins in range(60, 130, 2):
        broker = Broker(fault="level lost", begins=begins, ends=begins + 300)
        broker.play(begins + 600)
        assert [one for _, one in broker.reports] == [True, False], (begins, broker.reports)
        (first, _), (last, _) = broker.reports
        assert begins <= first <= begins + SOON_ENOUGH, begins
        assert last >= broker.ends
        assert (trouble := broker.trouble()) is None, trouble


def test_a_broker_that_hangs_while_a_message_is_awaited_is_said() -> None:
    broker = Broker(fault="frozen", begins=ROUND_EVERY + 1, ends=300)
    broker.play(600)
    assert [one for _, one in broker.reports] == [True, False], broker.reports
    assert broker.reports[0][0] <= broker.begins + SOON_ENOUGH


@pytest.mark.parametrize("fault", ["away", "frozen", "no right"])
def test_a_queue_that_cannot_be_made_is_no_late_message_and_is_logged_once(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    broker = Broker(fault=fault, begins=0)
    broker.play(600)
    assert broker.reports == []
    (line,) = caplog.messages
    assert line.startswith("connection 'rabbit': canaries cannot be sent: ")


def test_what_is_lost_is_named_since_the_first_that_is() -> None:
    broker = Broker(fault="level lost", begins=0)
    broker.play(200)
    trouble = broker.trouble()
    assert trouble is not None
    assert trouble.since == BEGIN + timedelta(seconds=ROUND_EVERY + broker.late) + DELAY
    assert "a message through the delay levels, at 2026-01-31 09:0" in trouble.reason
    assert trouble.reason.endswith("UTC, has not arrived")
    assert broker.left, "a queue to which a message may be on its way was deleted"
    # repaired, and the lost ones are moved back
    broker.fault = "none"
    broker.arrivals += [(broker.seconds, False)] * broker.lost
    broker.play(broker.seconds + 100)
    assert broker.trouble() is None
    assert not broker.left


def test_what_is_late_is_measured_and_said() -> None:
    broker = Broker(late=12)
    broker.play(50)
    assert [round(late) for _, late in broker.outcomes] == [12]
    trouble = broker.trouble()
    assert trouble is not None
    assert trouble.reason.endswith("was 12.0 s late")


def test_a_clock_that_goes_back_makes_no_message_late() -> None:
    broker = Broker(late=-0.3)
    broker.play(100)
    assert broker.reports == []
    assert [name for name, _ in broker.outcomes][:2] == [WHEN_DUE, IN_LEVELS]


def test_an_end_in_the_middle_leaves_the_queue_to_the_message_on_its_way() -> None:
    broker = Broker()
    wait = broker.pass_time

    def end(seconds: float) -> None:
        wait(seconds)
        if broker.outcomes:
            broker.stop.set()

    broker.pass_time = end  # type: ignore[method-assign]
    broker.canary.round()
    assert [name for name, _ in broker.outcomes] == [WHEN_DUE]
    assert broker.left
    assert broker.trouble() is None
