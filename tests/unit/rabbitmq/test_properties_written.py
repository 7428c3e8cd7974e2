from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pika import BasicProperties

from airflow_delayed.errors import LimitExceeded
from airflow_delayed.message import DelayedMessage
from airflow_delayed.nservicebus import nservicebus_time
from airflow_delayed.rabbitmq.properties import BROKERS_OWN, MessagePropertiesWriter
from airflow_delayed.rabbitmq.topology import (
    NSERVICEBUS_DELAY,
    NSERVICEBUS_NON_PERSISTENT,
    NSERVICEBUS_TIME_SENT,
    check_headers,
)

NOW = datetime(2025, 11, 28, 0, 5, 18, 653_833, tzinfo=timezone.utc)
TYPE = "Acme.OrderPlaced, Acme.Messages, Version=1.0.0.0"


def read(written: BasicProperties) -> BasicProperties:
    """Read properties as their receiver does."""
    return BasicProperties().decode(b"".join(written.encode()))


def message(delay: float = 90, **headers: str) -> DelayedMessage:
    due = NOW + timedelta(seconds=delay)
    return DelayedMessage(destination="Sales", body=b"{}", due_at=due, message_id="id-1", headers=headers)


def test_plain_properties() -> None:
    sent = read(MessagePropertiesWriter("plain").properties(message(customer="7"), NOW, 90))
    assert (sent.message_id, sent.delivery_mode, sent.content_type) == ("id-1", 2, "application/octet-stream")
    assert sent.timestamp == 1_764_288_318
    assert sent.headers == {
        "customer": "7",
        "airflow-delayed-due-at": "2025-11-28T00:06:48.653833+00:00",
        "airflow-delayed-destination": "Sales",
    }


@pytest.mark.parametrize(
    "headers, task_id",
    [
        ({"task": "shop.remind", "lang": "py"}, "id-1"),
        ({"task": "shop.remind", "lang": "py", "id": "own"}, "own"),
        ({"task": "clean the floor"}, None),
    ],
)
def test_the_id_of_a_celery_task_is_the_messages(headers: dict[str, str], task_id: str | None) -> None:
    sent = read(MessagePropertiesWriter("plain").properties(message(**headers), NOW, 90))
    assert sent.headers.get("id") == task_id


texts = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=40)


NAMES = ["content-type", "a", "é" * 127, NSERVICEBUS_TIME_SENT, NSERVICEBUS_DELAY, NSERVICEBUS_NON_PERSISTENT]
NAMES += [f"NServiceBus.{name}" for name in ("ContentType", "CorrelationId", "ReplyToAddress", "EnclosedMessageTypes")]
# the broker's own are left out
header_names = st.sampled_from(NAMES) | texts.filter(lambda name: name not in BROKERS_OWN)
batches = st.lists(
    st.builds(
        DelayedMessage,
        destination=texts,
        body=st.just(b""),
        due_at=st.datetimes(timezones=st.just(timezone.utc)),
        message_id=st.text("abc-1~!", min_size=1, max_size=128),
        headers=st.dictionaries(header_names, texts | st.just("") | st.just("A, B"), max_size=6),
    ),
    max_size=4,
)
levels_entered = st.none() | st.sampled_from(["delayed.level-00", "delayed.level-27"])


def ours(message: DelayedMessage, level: str | None) -> dict[str, object]:
    """The headers that every message gets."""
    due_at = message.due_at.isoformat(timespec="microseconds")
    return {
        "airflow-delayed-due-at": due_at,
        "airflow-delayed-destination": message.destination,
        **({"BCC": [level]} if level else {}),
    }


@given(batches, levels_entered)
def test_what_is_encoded_here_is_what_pika_would_write(batch: list[DelayedMessage], level: str | None) -> None:
    writer = MessagePropertiesWriter("plain")
    for each in batch:
        by_pika = BasicProperties(
            content_type=each.headers.get("content-type", "application/octet-stream"),
            headers={**each.headers, **ours(each, level)},
            delivery_mode=2,
            message_id=each.message_id,
            timestamp=1_764_288_318,
        )
        assert b"".join(writer.properties(each, NOW, 1, level).encode()) == b"".join(by_pika.encode())


@given(batches, levels_entered, st.sampled_from([-1, 0, 1, 90, 268_435_455]))
def test_nservicebus_properties_are_what_pika_would_write(
    batch: list[DelayedMessage], level: str | None, delay: int
) -> None:
    """By BasicPropertiesExtensions.cs, with ours among the headers."""
    writer = MessagePropertiesWriter("nservicebus")
    for each in batch:
        headers: dict[str, object] = {**each.headers, **ours(each, level)}
        persistent = headers.pop(NSERVICEBUS_NON_PERSISTENT, None) is None
        headers.pop(NSERVICEBUS_DELAY, None)
        headers["NServiceBus.DeliverAt"] = nservicebus_time(each.due_at)
        if delay > 0:
            headers |= {NSERVICEBUS_DELAY: delay, NSERVICEBUS_TIME_SENT: nservicebus_time(NOW)}
        else:
            headers.setdefault(NSERVICEBUS_TIME_SENT, nservicebus_time(NOW))
        types = each.headers.get("NServiceBus.EnclosedMessageTypes")
        wanted = BasicProperties(
            content_type=each.headers.get(
                "NServiceBus.ContentType", each.headers.get("content-type", "application/octet-stream")
            ),
            headers=headers,
            delivery_mode=2 if persistent else 1,
            correlation_id=each.headers.get("NServiceBus.CorrelationId"),
            reply_to=each.headers.get("NServiceBus.ReplyToAddress"),
            message_id=each.message_id,
            type=None if types is None else types.partition(",")[0],
        )
        written = b"".join(writer.properties(each, NOW, delay, level).encode())
        # the same to the byte but for the order of the headers
        assert len(written) == len(b"".join(wanted.encode()))
        assert vars(BasicProperties().decode(written)) == vars(read(wanted))


def test_nservicebus_properties() -> None:
    headers = {
        "NServiceBus.ContentType": "application/json",
        "NServiceBus.CorrelationId": "c",
        "NServiceBus.EnclosedMessageTypes": TYPE,
        "NServiceBus.ReplyToAddress": "Shop",
    }
    sent = read(MessagePropertiesWriter("nservicebus").properties(message(**headers), NOW, 90))
    assert (sent.message_id, sent.delivery_mode) == ("id-1", 2)
    assert (sent.content_type, sent.correlation_id, sent.reply_to) == ("application/json", "c", "Shop")
    assert sent.type == "Acme.OrderPlaced"
    ours = {name: value for name, value in sent.headers.items() if not name.startswith("airflow-delayed-")}
    assert ours == {
        **headers,
        "NServiceBus.DeliverAt": "2025-11-28 00:06:48:653833 Z",
        "NServiceBus.Transport.RabbitMQ.DelayInSeconds": 90,
        "NServiceBus.TimeSent": "2025-11-28 00:05:18:653833 Z",
    }


@pytest.mark.parametrize("delay", [0, 90])
def test_an_endpoint_reads_the_due_time_whatever_the_user_wrote(delay: int) -> None:
    given = message(delay, **{"NServiceBus.DeliverAt": "2001-01-01 00:00:00:000000 Z"})
    sent = read(MessagePropertiesWriter("nservicebus").properties(given, NOW, delay))
    assert sent.headers["NServiceBus.DeliverAt"] == nservicebus_time(given.due_at)
    assert "NServiceBus.DeliverAt" not in read(MessagePropertiesWriter("plain").properties(message(), NOW, 90)).headers


def test_the_delay_is_an_int32() -> None:
    encoded = b"".join(MessagePropertiesWriter("nservicebus").properties(message(), NOW, 90).encode())
    name = b"NServiceBus.Transport.RabbitMQ.DelayInSeconds"
    assert bytes([len(name)]) + name + b"I\x00\x00\x00\x5a" in encoded


@pytest.mark.parametrize("delay, time_sent", [(0, "2020-01-01 00:00:00:000000 Z"), (90, nservicebus_time(NOW))])
def test_a_message_that_is_passed_on_is_not_migrated_early(delay: int, time_sent: str) -> None:
    """``delays migrate`` takes time sent and delay for the due time."""
    old_headers = {NSERVICEBUS_TIME_SENT: "2020-01-01 00:00:00:000000 Z", NSERVICEBUS_DELAY: "3"}
    sent = read(MessagePropertiesWriter("nservicebus").properties(message(delay, **old_headers), NOW, delay))
    assert sent.headers[NSERVICEBUS_TIME_SENT] == time_sent
    assert sent.headers.get(NSERVICEBUS_DELAY) == (delay or None)


@pytest.mark.parametrize("style", ["plain", "nservicebus"])
def test_a_received_message_is_sent_without_its_deaths(style: str) -> None:
    """RabbitMQ before 4.0.1 takes them for a cycle and drops the message (celery, task.py: X_DEATH_HEADERS)."""
    deaths = ["x-death"]
    deaths += [f"x-{which}-death-{what}" for which in ("first", "last") for what in ("exchange", "queue", "reason")]
    old_headers = {
        **dict.fromkeys(deaths, "old"),
        "airflow-delayed-due-at": "old",
        "airflow-delayed-destination": "old",
    }
    sent = read(MessagePropertiesWriter(style).properties(message(**old_headers, own="1"), NOW, 90, "delayed.level-06"))
    assert not set(deaths) & set(sent.headers)
    assert "old" not in sent.headers.values()
    assert sent.headers["own"] == "1"
    assert sent.headers["BCC"] == ["delayed.level-06"]


@pytest.mark.parametrize("header", ["ContentType", "CorrelationId", "ReplyToAddress", "EnclosedMessageTypes"])
def test_what_becomes_a_property_has_its_limit(header: str) -> None:
    long = message(**{f"NServiceBus.{header}": "é" * 128})
    check_headers(long)
    with pytest.raises(LimitExceeded, match="more than 255 bytes") as error:
        check_headers(long, "nservicebus")
    assert error.value.column == "headers"


def test_only_the_first_type_has_to_fit() -> None:
    check_headers(message(**{"NServiceBus.EnclosedMessageTypes": f"{TYPE};{'x' * 300}"}), "nservicebus")


@pytest.mark.parametrize("name", ["expiration", "Expiration", "NServiceBus.TimeToBeReceived"])
@pytest.mark.parametrize("style", ["plain", "nservicebus"])
def test_what_would_expire_while_it_waits_is_refused(style: str, name: str) -> None:
    """As NServiceBus refuses it; what is due takes the header along, and does not expire by it."""
    expiring = message(**{name: "00:00:05"})
    with pytest.raises(LimitExceeded, match=f"{name}': postponed delivery of messages with a time") as error:
        check_headers(expiring, style, 1)
    assert error.value.column == "headers"
    check_headers(expiring, style, 0)
    sent = read(MessagePropertiesWriter(style).properties(expiring, NOW, 0))
    assert sent.headers[name] == "00:00:05"
    assert sent.expiration is None


def test_a_time_as_nservicebus_writes_it() -> None:
    assert nservicebus_time(NOW) == "2025-11-28 00:05:18:653833 Z"
    assert nservicebus_time(datetime(2026, 1, 2, tzinfo=timezone.utc)) == "2026-01-02 00:00:00:000000 Z"
