"""Whatever a transport does with a batch, each message is accounted for, and none that was not confirmed is removed."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_delayed.delivery import SendReport
from airflow_delayed.errors import (
    DestinationMissing,
    InputError,
    LimitExceeded,
    MessageConflict,
    SendFailed,
    TransportUnavailable,
)
from airflow_delayed.message import DelayedMessage
from airflow_delayed.store.dispatch.attempt import deliver

NOW = datetime(2030, 1, 1, tzinfo=timezone.utc)


def batch(*kinds: str) -> list[DelayedMessage]:
    return [
        DelayedMessage(destination=kind, body=b"", due_at=NOW, message_id=f"{number}-{kind}")
        for number, kind in enumerate(kinds)
    ]


class Broker:
    """Treats each message by its destination; ``stops`` as RabbitMQ does at the first that fails, or as SQS goes on."""

    def __init__(self, *, stops: bool, counts: bool = True) -> None:
        self.stops = stops
        self.counts = counts
        self.arrived: list[str] = []

    def check(self, message, now) -> None:
        if message.destination == "too-long":
            raise LimitExceeded("body", "has too many bytes")

    def send(self, messages) -> SendReport:
        report, failures, cause = SendReport(), [], None
        for message in messages:
            if message.destination == "missing":
                cause = DestinationMissing("c", ["missing"], "make it")
                if not (report.sent or report.duplicates or failures):
                    raise cause
                failures.append((message.message_id, str(cause)))
            elif message.destination == "refused":
                failures.append((message.message_id, "refused"))
            elif message.destination == "odd":
                if not (report.sent or report.duplicates or failures):
                    raise MessageConflict("odd")
                failures.append((message.message_id, "odd"))
            elif message.destination == "lost":
                cause = TransportUnavailable("reset by peer")
                if not (report.sent or report.duplicates or failures) or not self.counts:
                    raise cause
                failures.append((message.message_id, "lost"))
                break
            elif message.destination == "twice":
                self.arrived.append(message.message_id)
                report.duplicates += 1
            else:
                self.arrived.append(message.message_id)
                report.add(message)
            if failures and self.stops:
                break
        if failures:
            raise SendFailed("c", report, failures) from cause
        return report


KINDS = st.lists(st.sampled_from(["good", "good", "fine", "twice", "missing", "refused", "odd", "too-long", "lost"]))


@given(kinds=KINDS, stops=st.booleans(), counts=st.booleans())
def test_each_message_is_accounted_for(kinds, stops, counts):
    messages = batch(*kinds)
    broker = Broker(stops=stops, counts=counts)
    done = deliver(broker, messages, NOW)
    confirmed = done.confirmed
    assert len(set(confirmed)) == len(confirmed)
    assert set(confirmed) <= set(broker.arrived)
    assert not set(confirmed) & set(done.failures)
    if done.connection_error is None:
        assert set(confirmed) | set(done.failures) == {message.message_id for message in messages}
        # nobody is delayed
        wanted = [one.message_id for one in messages if one.destination in ("good", "fine", "twice")]
        assert sorted(confirmed) == sorted(wanted)
        assert sorted(broker.arrived) == sorted(wanted)
    else:
        assert "lost" in kinds
        assert not any(name.endswith(("good", "fine", "twice", "lost")) for name in done.failures)
    assert set(done.closed_destinations) <= {"missing"}


def test_what_was_confirmed_before_the_loss_is_told():
    done = deliver(Broker(stops=True), batch("good", "fine", "lost", "good"), NOW)
    assert done.confirmed == ["0-good", "1-fine"]
    assert done.failures == {}
    assert str(done.connection_error) == "reset by peer"


def test_a_count_that_does_not_add_up_confirms_nothing():
    class Forgetful(Broker):
        def send(self, messages):
            try:
                return super().send(messages)
            except SendFailed as error:
                raise SendFailed("c", SendReport(), error.failures) from None

    done = deliver(Forgetful(stops=False), batch("good", "refused", "good"), NOW)
    assert done.confirmed == []
    assert set(done.failures) == {"0-good", "1-refused", "2-good"}


@pytest.mark.parametrize(
    "error", [DestinationMissing("c", ["elsewhere"], "make it"), SendFailed("c", SendReport(), [])]
)
def test_a_refusal_that_names_none_of_them_comes_to_an_end(error):
    class Refusing(Broker):
        def send(self, messages):
            raise error

    done = deliver(Refusing(stops=False), batch("good", "fine"), NOW)
    assert done.confirmed == []
    assert set(done.failures) == {"0-good", "1-fine"}


class Shut:
    """Lets nothing pass from the beginning, or when the transport asks for its first message."""

    def __init__(self, answers: int) -> None:
        self.answers = answers

    def hold(self, due_at: datetime) -> None:
        pass

    def may_send(self) -> bool:
        self.answers -= 1
        return self.answers >= 0

    def now(self) -> datetime:
        return NOW


@pytest.mark.parametrize(
    ("kinds", "gate", "answered"),
    [
        (["good"], None, True),
        (["refused"], None, True),
        (["missing"], None, True),
        (["too-long", "good"], None, True),
        (["too-long"], None, False),
        (["lost"], None, False),
        (["good"], Shut(0), False),
        (["good"], Shut(1), False),
        (["good"], Shut(2), True),
    ],
)
def test_a_broker_that_was_not_asked_has_not_answered(kinds, gate, answered):
    assert deliver(Broker(stops=True), batch(*kinds), NOW, gate).answered is answered


def test_an_error_of_the_input_is_pinned_to_its_message():
    class Strict(Broker):
        def send(self, messages):
            taken = list(messages)
            if any(message.destination == "odd" for message in taken):
                raise InputError("one of them is odd")
            return super().send(taken)

    done = deliver(Strict(stops=False), batch("good", "odd", "fine", "missing", "lost", "good"), NOW)
    assert done.confirmed == ["0-good", "2-fine"]
    assert set(done.failures) == {"1-odd", "3-missing"}
    assert done.connection_error is not None
