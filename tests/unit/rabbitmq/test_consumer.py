"""What a consumer hands out when connections are lost at any moment, against a model of a broker; and its pauses."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pika import BasicProperties, ConnectionParameters

from airflow_delayed.rabbitmq import consumer
from airflow_delayed.rabbitmq.consumer import Arrival, Consumer, ReceivedMessage


class ModelLink:
    """A connection to the model: what it was handed, by tag, is the broker's again when it is lost."""

    def __init__(self) -> None:
        self.unacked: dict[int, str] = {}
        self.acked: list[str] = []
        self.lost = False

    def ack(self, tag: int) -> None:
        if not self.lost:
            self.acked.append(self.unacked.pop(tag))


async def never() -> list[ConnectionParameters]:
    raise AssertionError("not asked here")


class AnyMoment(RuleBasedStateMachine):
    """Messages are delivered, done, and delivered again after a loss of the connection at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.consumer = Consumer("c", "q", never, prefetch=50)
        self.link = ModelLink()
        self.sent = 0
        self.again: list[str] = []
        self.acked: list[str] = []
        self.reports: Counter[str] = Counter()
        self.in_hand: list[tuple[str, ReceivedMessage]] = []
        self.done: list[str] = []
        self.tag = 0

    def deliver(self, name: str, redelivered: bool) -> None:
        self.tag += 1
        self.link.unacked[self.tag] = name
        # every third has no id: it cannot be recognised
        properties = BasicProperties(message_id=None if int(name) % 3 == 0 else name)
        found = self.consumer._take(self.link, Arrival.of(self.tag, redelivered, properties, name.encode()))
        if found is not None:
            self.reports[name] += 1
            self.in_hand.append((name, found))

    @precondition(lambda self: not self.in_hand)
    @rule(new=st.integers(0, 3), again=st.integers(0, 3))
    def a_batch(self, new: int, again: int) -> None:
        for _ in range(min(again, len(self.again))):
            self.deliver(self.again.pop(0), redelivered=True)
        for _ in range(new):
            self.sent += 1
            self.deliver(str(self.sent), redelivered=False)

    @precondition(lambda self: self.in_hand)
    @rule(data=st.data())
    def one_is_done(self, data: st.DataObject) -> None:
        name, found = self.in_hand.pop(data.draw(st.integers(0, len(self.in_hand) - 1)))
        self.done.append(name)
        self.consumer.done(found)

    @rule(data=st.data())
    def the_connection_is_lost(self, data: st.DataObject) -> None:
        """Of what was acknowledged last, the broker may not have heard."""
        unheard = data.draw(st.integers(0, len(self.link.acked)))
        heard = len(self.link.acked) - unheard
        self.acked += self.link.acked[:heard]
        self.again = [*self.link.acked[heard:], *self.link.unacked.values(), *self.again]
        self.link.lost = True
        self.link = ModelLink()

    @invariant()
    def nothing_is_lost_or_told_twice(self) -> None:
        assert set(self.acked) | set(self.link.acked) <= set(self.done)
        known = Counter([*self.acked, *self.link.acked, *self.link.unacked.values(), *self.again])
        assert known == Counter(map(str, range(1, self.sent + 1)))
        # one that was in hand when the connection was lost is done before it comes again
        for name, times in self.reports.items():
            assert times == 1 or int(name) % 3 == 0, f"{name} was told {times} times"

    def teardown(self) -> None:
        while self.in_hand or self.again:
            for name, found in self.in_hand:
                self.done.append(name)
                self.consumer.done(found)
            self.in_hand.clear()
            self.a_batch(0, len(self.again))
        assert self.link.unacked == {}
        assert self.reports.keys() == set(map(str, range(1, self.sent + 1)))


TestAnyMoment = AnyMoment.TestCase


class Enough(Exception):
    pass


def pauses(number: int, clock, chance: Callable[[], float] = lambda: 0.0) -> list[float]:
    """The pauses of a consumer that finds no broker."""
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == number:
            raise Enough

    async def hosts() -> list[ConnectionParameters]:
        return [ConnectionParameters(host="127.0.0.1", port=1)]

    async def run() -> None:
        with pytest.raises(Enough):
            async for _ in Consumer("c", "q", hosts, prefetch=1, sleep=sleep, monotonic=clock, chance=chance).batches():
                pass

    asyncio.run(run())
    return waited


def test_pauses_grow_to_half_a_minute_and_never_end(caplog: pytest.LogCaptureFixture):
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 30
        return now

    caplog.set_level(logging.INFO)
    assert pauses(45, clock) == [1, 2, 4, 8, 16] + [30] * 40
    reports = [record.getMessage() for record in caplog.records]
    assert reports[0] == (
        "connection 'c': cannot watch queue 'q': 127.0.0.1:1: nothing listens on that host and port. Still trying"
    )
    # 45 rounds of half a minute: told at once, and every ten minutes
    assert len(reports) == 3


def test_consumers_that_lost_their_broker_together_do_not_come_back_together():
    assert pauses(6, lambda: 0.0, lambda: 0.5) == [0.75, 1.5, 3, 6, 12, 22.5]


def test_what_a_sender_sent_twice_is_told_twice():
    found = Consumer("c", "q", never, prefetch=2)
    link = ModelLink()
    for tag in (1, 2, 3):
        link.unacked[tag] = "a"
        taken = found._take(link, Arrival.of(tag, False, BasicProperties(message_id="a"), b""))
        assert taken is not None
        # in hand together, or one after the other
        if tag == 2:
            found.done(taken)


def test_what_is_remembered_is_bounded():
    found = Consumer("c", "q", never, prefetch=2)
    link = ModelLink()
    for number in range(100):
        link.unacked[number] = str(number)
        taken = found._take(link, Arrival.of(number, False, BasicProperties(message_id=str(number)), b""))
        assert taken is not None
        found.done(taken)
    assert len(found._done) == consumer._REMEMBERED * 2
