"""A broker that confirms nothing any more, or refuses a message for long; the clock of the send is the test's."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from datetime import datetime

import pika
import pytest
from pika.exceptions import NackError
from support.proxy import Proxy, proxy
from support.rabbitmq import VirtualHost, messages

from airflow_delayed.errors import SendFailed, TransportUnavailable
from airflow_delayed.hooks.rabbitmq import RabbitMQDelayHook
from airflow_delayed.message import DelayedMessage, utcnow
from airflow_delayed.rabbitmq.publisher import Publisher


class Stopwatch:
    """A clock that jumps at each look while it runs; six seconds are the most that counts at a time."""

    def __init__(self, runs: Callable[[], object], jump: float = 6) -> None:
        self.now = 0.0
        self._runs = runs
        self._jump = jump

    def __call__(self) -> float:
        self.now += self._jump if self._runs() else 0
        return self.now


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("airflow_delayed.rabbitmq.confirm_timer._INTERVAL", 0.05)


@pytest.fixture
def proxies(vhost: VirtualHost) -> Iterator[tuple[Proxy, Proxy]]:
    broker = vhost.port, str(vhost.connection["host"])
    vhost.declare("orders", "letters")
    with proxy(*broker) as one, proxy(*broker) as other:
        yield one, other


def hosts(vhost: VirtualHost, *proxies: Proxy) -> list[pika.ConnectionParameters]:
    login = vhost.parameters.credentials
    return [pika.ConnectionParameters("127.0.0.1", each.port, vhost.name, login) for each in proxies]


def silenced(
    batch: list[DelayedMessage], by: Callable[[], object], taken: list[DelayedMessage]
) -> Iterator[DelayedMessage]:
    for number, message in enumerate(batch):
        if number == 800:
            by()
        taken.append(message)
        yield message


def lost(vhost: VirtualHost, batch: list[DelayedMessage]) -> set[str]:
    ids = {message.message_id for message in batch}
    return ids - {arrival.message_id for arrival in vhost.collect("orders", enough=ids)}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "has confirmed nothing for" in text]


def test_a_broker_that_stops_confirming_is_an_error_that_counts_and_says_what_may_arrive(
    vhost: VirtualHost, proxies: tuple[Proxy, Proxy], caplog: pytest.LogCaptureFixture
) -> None:
    # by a clock that stands, so that the levels are the same however slow the machine is
    began = utcnow()
    batch = messages("orders", [number % 3 for number in range(3000)], start=began)
    taken: list[DelayedMessage] = []
    stops: list[int] = []
    publisher = Publisher(
        hosts(vhost, proxies[0]), conn_id="rabbit", clock=lambda: began, monotonic=Stopwatch(lambda: stops)
    )
    with pytest.raises(SendFailed) as error:
        publisher.send(silenced(batch, lambda: stops.append(proxies[0].swallow_answers()), taken))
    named = [message_id for message_id, _ in error.value.failures]
    confirmed = error.value.report.sent
    assert 1 <= len(named) <= 1000
    # each message that was taken is one or the other
    assert confirmed + len(named) == len(taken)
    assert set(named) <= {message.message_id for message in taken}

    host = f"127.0.0.1:{proxies[0].port}"
    where = f"while {len(named):,} messages are unconfirmed: "
    text = str(error.value)
    assert f"confirmed {confirmed:,} messages and not {len(named):,}: messages " in text
    assert f"connection 'rabbit': {host}: no confirm for 60 s, {where}" in text
    assert "Sending ended after 60 s without a confirm (the connection's extra confirm_timeout)" in text
    assert "what is unconfirmed may still arrive, and a retry sends it with the same ids" in text
    assert isinstance(error.value.__cause__, TransportUnavailable)
    # a look takes six seconds of this clock, so the first one after ten is at twelve
    found = warnings(caplog)
    assert [text.partition(" while")[0] for text in found] == [
        f"Connection 'rabbit': {host} has confirmed nothing for {seconds} s," for seconds in (12, 24, 42)
    ]
    for each in (text, found[-1]):
        for queue in ("queue orders", "queue delayed.hex.0000001", "queue delayed.hex.0000002"):
            assert f" in {queue}" in each

    # the retry
    assert Publisher(hosts(vhost, proxies[0]), conn_id="rabbit").send(batch).sent == 3000
    assert lost(vhost, batch) == set()


def test_of_two_hosts_the_other_one_is_tried_before_the_end(
    vhost: VirtualHost, proxies: tuple[Proxy, Proxy], caplog: pytest.LogCaptureFixture
) -> None:
    batch = messages("orders", [0] * 1500)
    clock = Stopwatch(lambda: stops and "was lost after" not in caplog.text)
    stops: list[int] = []
    publisher = Publisher(hosts(vhost, *proxies), conn_id="rabbit", monotonic=clock)
    assert publisher.send(silenced(batch, lambda: stops.append(proxies[0].swallow_answers()), [])).sent == 1500
    assert caplog.text.count("was lost after") == 1
    assert "messages (no confirm for 30 s, while" in caplog.text
    assert lost(vhost, batch) == set()
    # it asks both hosts why nothing is confirmed
    for thread in threading.enumerate():
        if thread.name == "delayed-silence-check":
            thread.join()
    before = proxies[0].taken, proxies[1].taken
    # the next send begins where this one ended
    assert Publisher(hosts(vhost, *proxies), conn_id="rabbit").send(messages("orders", [0])).sent == 1
    assert (proxies[0].taken, proxies[1].taken) == (before[0], before[1] + 1)


def test_a_binding_that_is_not_answered_is_named(
    vhost: VirtualHost, proxies: tuple[Proxy, Proxy], caplog: pytest.LogCaptureFixture
) -> None:
    stops: list[int] = []
    publisher = Publisher(
        hosts(vhost, proxies[0]),
        conn_id="rabbit",
        window=1,
        monotonic=Stopwatch(lambda: stops),
        on_confirm=lambda _: stops.append(proxies[0].swallow_answers()),
    )
    with pytest.raises(SendFailed, match="no confirm for 60 s, while destination 'letters' is being bound") as error:
        publisher.send([*messages("orders", [0]), *messages("letters", [0], prefix="letter")])
    assert (error.value.report.sent, [message_id for message_id, _ in error.value.failures]) == (1, ["letter0"])
    assert "while destination 'letters' is being bound" in warnings(caplog)[0]


@pytest.fixture
def full(vhost: VirtualHost) -> str:
    """A queue that refuses messages (basic.nack), as RabbitMQ 3.10 does for a queue without a leader."""
    vhost.declare("full", **{"x-queue-type": "classic", "x-max-length": 1, "x-overflow": "reject-publish"})
    with vhost.channel() as channel:
        channel.confirm_delivery()
        with contextlib.suppress(NackError):
            while True:
                channel.basic_publish("", "full", b"")
    return "full"


def test_what_is_refused_again_and_again_is_sent_when_the_queue_takes_it(
    vhost: VirtualHost, full: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("airflow_delayed.rabbitmq.session._LONGEST_SLEEP", 0.02)
    published = 0

    def clock() -> datetime:
        nonlocal published
        published += 1
        if published == 20:
            with vhost.channel() as channel:
                channel.queue_purge(full)
        return utcnow()

    assert Publisher(vhost.parameters, conn_id="rabbit", clock=clock).send(messages(full, [0])).sent == 1
    assert published >= 20
    assert [arrival.message_id for arrival in vhost.collect(full, enough=1)] == ["m0"]


def test_what_is_refused_is_named_when_the_broker_closes_the_channel(
    vhost: VirtualHost, full: str, connect: Callable[..., str]
) -> None:
    """Each message that was taken is confirmed or named, also those that wait to be sent again."""
    vhost.declare("gone")
    with vhost.channel() as channel:
        for name in (full, "gone"):
            channel.exchange_declare(name, "fanout", durable=True)
            channel.queue_bind(name, name)

    def source() -> Iterator[DelayedMessage]:
        yield from messages(full, [0], prefix="refused")
        yield from messages("gone", [0], prefix="arrives")
        vhost.until(gone=1)
        with vhost.channel() as channel:
            channel.exchange_delete("gone")
        yield from messages("gone", [0], prefix="late")

    hook = RabbitMQDelayHook(connect("rabbit", **vhost.connection), topology="nservicebus", routing="conventional")
    hook.install([])
    with pytest.raises(SendFailed) as error:
        hook.send(source())
    assert error.value.report.sent == 1
    assert sorted(name for name, _ in error.value.failures) == ["late0", "refused0"]


def test_what_is_refused_for_long_is_logged_and_ends_the_send_though_others_are_confirmed(
    vhost: VirtualHost, full: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # short, for this clock runs faster than the pauses
    monkeypatch.setattr("airflow_delayed.rabbitmq.session._LONGEST_SLEEP", 0.05)
    # five seconds in all, in which a broker on a slow machine refuses often enough
    monkeypatch.setattr("airflow_delayed.rabbitmq.confirm_timer._INTERVAL", 0.25)
    vhost.declare("orders")
    clock = Stopwatch(lambda: True, jump=3)
    # each time that the one is sent again, so is one of the others
    publisher = Publisher(vhost.parameters, conn_id="rabbit", window=2, monotonic=clock)
    with pytest.raises(SendFailed) as error:
        publisher.send([*messages(full, [0], prefix="full"), *messages("orders", [0] * 1000)])
    ((message_id, why),) = error.value.failures
    found = re.fullmatch(
        r"refused by the broker (\d+) times in (\d+) s \(confirm_timeout 60 s\)\. Is a queue full, or .*leader\?",
        why,
    )
    assert found, why
    assert message_id == "full0"
    assert int(found[1]) > 5
    # this clock jumps by three seconds
    assert 50 <= int(found[2]) <= 63
    # that is no fault of the connection
    assert error.value.__cause__ is None
    assert error.value.report.by_destination == {"orders": vhost.count("orders")}
    assert error.value.report.sent > 5
    assert [text for text in caplog.messages if text.startswith("Connection 'rabbit'")] == [
        f"Connection 'rabbit': {vhost.parameters.host}:{vhost.port} refuses 1 messages, the first for {seconds} s: 1 in"
        " queue full. Is a queue full, or without a leader? 'airflow delayed doctor' shows it. Sending ends after 60 s"
        " (confirm_timeout)"
        for seconds in (12, 21, 42)
    ]
