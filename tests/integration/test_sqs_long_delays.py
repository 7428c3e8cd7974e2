"""Delays of minutes to days, or a month, on a real SQS server whose clock is moved.

They are never early, and at most 2 s late in all.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from datetime import datetime, timedelta

import pytest
from support.lengths import length
from support.sqs import ClockedWorld

from airflow_delayed.hooks.sqs import SqsDelayHook
from airflow_delayed.message import DelayedMessage
from airflow_delayed.sensors.fifo_cycle import FifoCycleSensor
from airflow_delayed.triggers.fifo_cycle import FifoCycleTrigger

LONGEST = timedelta(days=length("days of the longest delay through SQS", 2, 30))
OF_NET = timedelta(days=length("days of the delay of an NServiceBus endpoint, through SQS", 1.5, 3))
OUTAGE = length("days of the longest outage of a sensor for SQS", 0.8, 4)
DELAYS = {
    "half an hour": timedelta(minutes=32, seconds=5),
    "a day": timedelta(days=1),
    "the longest": LONGEST,
}


class Life:
    """Lets the clock run on after each pass, and looks at the destination shortly before and after a due time.

    A pass comes up to ``gap`` seconds after messages became visible: that is how long a sensor may pause. With
    ``outages`` it comes now and then only after hours or days, unless a message is due before.
    """

    def __init__(
        self, world: ClockedWorld, messages: list[DelayedMessage], gap: float, *, outages: bool = False
    ) -> None:
        self.world = world
        self.due = {message.message_id: message.due_at for message in messages}
        self.arrived: list[str] = []
        self.passes = 0
        self.pauses = 0
        self.gap = gap
        self.outages = outages
        self._random = random.Random(4)

    def goes_on(self, delivered: int) -> None:
        self.passes += 1
        next_pass = self.world.now() + timedelta(seconds=900 + self._random.random() * self.gap)
        if self.outages and self.passes % 20 == 0:
            back = next_pass + timedelta(days=self._random.uniform(0.3, OUTAGE))
            if not any(next_pass < due_at < back + timedelta(hours=1) for due_at in self.due.values()):
                next_pass = back
                self.pauses += 1
        if delivered:
            self._look(next_pass)
        self._advance_to(next_pass)

    def _look(self, until: datetime) -> None:
        for message_id, due_at in sorted(self.due.items(), key=lambda pair: pair[1]):
            if message_id in self.arrived or due_at > until:
                continue
            self._advance_to(due_at - timedelta(seconds=0.2))
            early = self.world.ids()
            assert self.world.now() > due_at or early == []
            self._advance_to(due_at + timedelta(seconds=2))
            self.arrived += early + self.world.ids()
            assert message_id in self.arrived, f"{message_id} is over 2 s late"

    def _advance_to(self, moment: datetime) -> None:
        self.world.advance(max(0.0, (moment - self.world.now()).total_seconds()))


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Callable[[Life], None]:
    """Let a life go on after each pass, whoever makes it."""

    def start(life: Life) -> None:
        cycle = SqsDelayHook.cycle

        def pass_by(self: SqsDelayHook, *arguments: object, **named: object) -> object:
            counts = cycle(self, *arguments, **named)  # type: ignore[arg-type]
            life.goes_on(counts.delivered)
            return counts

        monkeypatch.setattr(SqsDelayHook, "cycle", pass_by)

    return start


def by_poke(world: ClockedWorld) -> dict:
    sensor = FifoCycleSensor(
        task_id="cycle", conn_id=world.conn_id, destination=world.destination, wait_time_seconds=0, poke_interval=0
    )
    return sensor.execute({})


def by_trigger(world: ClockedWorld) -> dict:
    async def only_event() -> dict:
        trigger = FifoCycleTrigger(world.conn_id, [world.destination], wait_time_seconds=0, poke_interval=0)
        (event,) = [event async for event in trigger.run()]
        return event.payload

    payload = asyncio.run(only_event())
    assert payload["status"] == "done", payload["error"]
    return payload["summary"]


def send_all(world: ClockedWorld) -> list[DelayedMessage]:
    """Send one message for each delay, and one as an NServiceBus endpoint does: it says only how long."""
    world.install()
    messages = [
        world.message(delay.total_seconds(), name.replace(" ", "-"), headers={}) for name, delay in DELAYS.items()
    ]
    world.hook.send(messages)
    of_net = world.message(OF_NET.total_seconds(), "of-net")
    world.client.send_message(
        QueueUrl=world.url_of(world.fifo),
        MessageBody="{}",
        MessageGroupId="of-net",
        MessageDeduplicationId="of-net",
        MessageAttributes={
            "NServiceBus.AmazonSQS.DelaySeconds": {
                "DataType": "String",
                "StringValue": str(OF_NET // timedelta(seconds=1)),
            },
            "NServiceBus.MessageId": {"DataType": "String", "StringValue": "of-net"},
        },
    )
    world.advance(900)
    return [*messages, of_net]


def test_never_early_and_at_most_two_seconds_late_in_all(clocked: ClockedWorld, live):
    life = Life(clocked, send_all(clocked), gap=1.0)
    live(life)

    summary = by_poke(clocked)

    assert sorted(life.arrived) == sorted(life.due)  # once each
    assert life.passes > LONGEST / timedelta(seconds=901)
    assert summary["delivered"] == len(life.due)
    assert 0 <= summary["late_max"] <= 2
    # a receive that finds something and one that finds nothing, a send and a delete for all in it
    assert summary["requests"] <= 4 * life.passes + 30


def test_nor_in_the_triggerer_nor_after_outages(clocked: ClockedWorld, live):
    # a round as such is the same code; what many of them add up to is seen above, and a year in the benchmark
    life = Life(clocked, send_all(clocked), gap=1.0, outages=True)
    live(life)

    summary = by_trigger(clocked)

    assert life.pauses > 0
    assert sorted(life.arrived) == sorted(life.due)
    assert summary["delivered"] == len(life.due)
    assert 0 <= summary["late_max"] <= 2


@pytest.mark.parametrize("ahead", [timedelta(hours=-3), timedelta(hours=3)])
def test_this_machines_clock_does_not_count_on_a_first_receive(clocked: ClockedWorld, ahead):
    clocked.install()
    message = clocked.message(1500)
    clocked.hook.send([message])
    wrong = SqsDelayHook(clocked.conn_id, clock=lambda: clocked.now() + ahead)
    clocked.advance(905)
    assert wrong.cycle(clocked.destination).delivered == 1
    clocked.advance((message.due_at - clocked.now()).total_seconds() - 0.2)
    assert clocked.now() > message.due_at or clocked.ids() == []
    clocked.advance(2.2)
    assert clocked.ids() == ["m1"]
