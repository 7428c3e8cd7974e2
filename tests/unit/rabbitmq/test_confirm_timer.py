"""When a send has been without a confirm for too long, by a clock that the tests move."""

from __future__ import annotations

import pytest

from airflow_delayed.rabbitmq.confirm_timer import ConfirmTimer


class Timer(ConfirmTimer):
    """A timer that is looked at every half second of its own clock."""

    def __init__(self, timeout: float = 60, hosts: int = 1) -> None:
        self.now = 1000.0
        super().__init__(timeout, hosts, monotonic=lambda: self.now)
        self.connect(0)

    def pass_on(self, seconds: float, *, answers: int = 0, awaits: bool = True, blocked: bool = False) -> list[float]:
        """Let time pass; return after how many seconds there was a warning."""
        began, warnings = self.now, []
        while self.now < began + seconds:
            self.now += self.interval
            self.advance(answers, awaits=awaits, blocked=blocked)
            if self.warns(self.silent):
                warnings.append(self.now - began)
        return warnings


def test_warnings_come_at_growing_times_and_the_first_within_ten_seconds() -> None:
    assert Timer(timeout=600).pass_on(300) == [9, 19, 39, 79, 159]


def test_it_is_over_after_the_timeout() -> None:
    timer = Timer()
    timer.pass_on(59.5)
    assert not timer.over
    timer.pass_on(0.5)
    assert timer.over


def test_what_nothing_is_awaited_in_does_not_count() -> None:
    timer = Timer()
    assert timer.pass_on(500, awaits=False) == []
    timer.pass_on(59.5)
    assert not timer.over


def test_warnings_of_one_message_come_at_growing_times_though_others_are_confirmed() -> None:
    timer, warnings = Timer(timeout=600), []
    for second in range(100):
        timer.advance(second, awaits=True, blocked=False)
        if timer.warns(second):
            warnings.append(second)
    assert timer.silent == 0
    assert warnings == [9, 19, 39, 79]
    # the next message that is refused begins again
    assert [timer.warns(seconds) for seconds in (0, 5, 9, 10)] == [False, False, True, False]


def test_it_stands_still_while_an_alarm_blocks_the_connection() -> None:
    timer = Timer()
    timer.pass_on(30)
    assert timer.pass_on(500, blocked=True) == []
    assert (timer.silent, timer.elapsed) == (30, 30)
    timer.pass_on(30)
    assert timer.over


def test_a_source_that_takes_a_minute_for_a_message_is_no_silence_of_the_broker() -> None:
    """Its messages may not even be written, and the confirms not be read."""
    timer = Timer()
    timer.pass_on(5)
    timer.now += 90
    timer.advance(0, awaits=True, blocked=False)
    assert (timer.silent, timer.elapsed) == (11, 11)
    timer.pass_on(1, answers=1)
    assert timer.silent < 1


@pytest.mark.parametrize("hosts, share", [(1, 60), (2, 30), (3, 20), (7, 20)])
def test_each_of_several_hosts_has_a_share_of_the_time_and_the_whole_ends_the_send(hosts: int, share: float) -> None:
    timer = Timer(hosts=hosts)
    for number in range(1, int(60 / share) + 1):
        timer.connect(0)
        timer.pass_on(share - 0.5)
        assert not timer.host_over
        timer.pass_on(0.5)
        assert timer.host_over
        assert timer.over == (number * share == 60)
