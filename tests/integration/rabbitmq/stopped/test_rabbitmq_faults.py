"""What happens when the broker goes away: sent, arrived, twice and lost are counted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from support.rabbitmq import VirtualHost, messages
from support.stores import Store

from airflow_delayed.delivery import Clock, SendReport
from airflow_delayed.errors import SendFailed, TransportUnavailable
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.message import DelayedMessage
from airflow_delayed.rabbitmq.publisher import Publisher
from airflow_delayed.store.dispatch.dispatcher import Dispatcher
from airflow_delayed.store.dispatch.report import DispatchFailed, DispatchReport
from services import rabbitmq


@pytest.fixture
def hook(hook: RabbitMQDelayHook, vhost: VirtualHost) -> RabbitMQDelayHook:
    vhost.declare("orders")
    return hook


def test_a_broker_that_restarts_in_the_middle_of_a_batch(
    broker: rabbitmq.Broker, hook: RabbitMQDelayHook, vhost: VirtualHost
) -> None:
    batch = messages("orders", [number % 9 for number in range(3000)])
    waits = 0

    def stream() -> Iterator[DelayedMessage]:
        for number, message in enumerate(batch):
            if number == 1500:
                broker.stop()
            yield message

    def wait(seconds: float) -> None:
        nonlocal waits
        waits += 1
        if waits == 3:
            # the first tries to connect again have found nobody
            broker.start()
        else:
            time.sleep(seconds)

    # by default it waits longer and longer, up to 10 s
    publisher = Publisher(vhost.parameters, conn_id="rabbit", reconnect_waits=[0.5] * 200, sleep=wait)
    report = publisher.send(stream())
    assert waits >= 3
    assert report.sent == 3000

    # a level sends again after some time what the next queue has not confirmed, such as a queue still starting
    arrivals = vhost.collect("orders", enough=3000, seconds=120)
    times = Counter(arrival.message_id for arrival in arrivals)
    lost = [message.message_id for message in batch if not times[message.message_id]]
    twice = sum(times.values()) - len(times)
    assert (len(lost), len(times)) == (0, 3000)
    # at most what was unconfirmed when the connection was lost
    assert twice <= 1000
    assert [arrival for arrival in arrivals if arrival.received_at < arrival.due_at] == []


def test_a_broker_that_stays_away(broker: rabbitmq.Broker, hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    """The error counts what was confirmed, and what arrives afterwards is no less than that."""
    batch = messages("orders", [2] * 1200)
    waited: list[float] = []

    def stream() -> Iterator[DelayedMessage]:
        for number, message in enumerate(batch):
            if number == 1100:
                broker.close()
            yield message

    publisher = Publisher(vhost.parameters, conn_id="rabbit", reconnect_waits=(0.1, 0.2), sleep=waited.append)
    try:
        with pytest.raises(SendFailed, match="nothing listens on that host and port; 2 tries") as error:
            publisher.send(stream())
        assert waited == [0.1, 0.2]
        with pytest.raises(TransportUnavailable, match=r"'rabbit': 127.0.0.1:\d+: nothing listens .* Nothing was sent"):
            hook.send(messages("orders", [1]))
    finally:
        broker.open()
    confirmed, named = error.value.report.sent, {message_id for message_id, _ in error.value.failures}
    assert confirmed >= 100
    assert confirmed + len(named) in range(1100, 1201)
    sure = {message.message_id for message in batch[:1100]} - named
    arrived = {arrival.message_id for arrival in vhost.collect("orders", enough=sure)}
    assert sure <= arrived


def test_a_broker_that_stays_away_is_no_fault_of_stored_messages(
    broker: rabbitmq.Broker, hook: RabbitMQDelayHook, vhost: VirtualHost, connect: Callable[..., str], tmp_path: Path
) -> None:
    """Stopped in the middle of a dispatcher's batch: what is confirmed leaves the store, the rest is as it was."""
    store = Store(connect("store", conn_type="sqlite", host=str(tmp_path / "store.db")), None)
    stored = store.installed(deliver_conn_id="rabbit")
    batch = [
        DelayedMessage(destination="orders", body=b"", due_at=stored.now(), message_id=f"m{number}")
        for number in range(1500)
    ]
    stored.send(batch)

    class Impatient(RabbitMQDelayHook):
        def send(self, messages: Iterable[DelayedMessage]) -> SendReport:
            waits = {"reconnect_waits": (0.1, 0.2), "sleep": lambda seconds: None}
            return Publisher(vhost.parameters, conn_id="rabbit", clock=self._clock, **waits).send(messages)

    class Stopping:
        """The dispatcher's clock, asked once for each message that is published."""

        def __init__(self, clock: Callable[[], datetime]) -> None:
            self.clock, self.asked = clock, 0

        def __call__(self) -> datetime:
            self.asked += 1
            if self.asked == 1200:
                broker.close()
            return self.clock()

    def dispatch(clock: Callable[[Clock], Clock]) -> DispatchReport:
        return Dispatcher(
            stored.engine,
            stored.tables,
            conn_id="store",
            transports=lambda conn_id, database_clock: Impatient(conn_id, clock=clock(database_clock)),
            deliver_conn_ids=["rabbit"],
            lookahead=timedelta(0),
            batch_size=1500,
            time_to_trigger_dispatch_circuit_breaker=timedelta(0),
        ).run()

    try:
        with pytest.raises(DispatchFailed, match="nothing listens on that host and port; 2 tries") as error:
            dispatch(Stopping)
    finally:
        broker.open()
    left = store.failures_of(stored)
    assert (len(left), error.value.report.failed) == (1500 - error.value.report.dispatched, 0)
    assert 100 <= error.value.report.dispatched <= 1300
    assert set(left.values()) == {0}
    assert dispatch(lambda clock: clock).dispatched == len(left)
    stored.close()
    ids = {message.message_id for message in batch}
    assert {arrival.message_id for arrival in vhost.collect("orders", enough=ids)} == ids


def test_an_interrupt_loses_nothing_that_was_written(hook: RabbitMQDelayHook, vhost: VirtualHost) -> None:
    def stream() -> Iterator[DelayedMessage]:
        yield from messages("orders", [0] * 10)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hook.send(stream())
    assert len(vhost.collect("orders", enough=10)) == 10
