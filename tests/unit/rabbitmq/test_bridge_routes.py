"""What a bridge publishes for each message, without a broker."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pika
import pytest

from airflow_delayed.errors import InvalidMessage, LimitExceeded
from airflow_delayed.rabbitmq.bridge import BridgeRoutes, read_delay
from airflow_delayed.rabbitmq.declare import Binding, Exchange, Queue
from airflow_delayed.rabbitmq.properties import ReceivedProperties
from airflow_delayed.rabbitmq.relay import Publication, TakenMessage
from airflow_delayed.rabbitmq.topology import DELAYED, NSERVICEBUS

NOW = datetime(2026, 1, 31, 8, 30, tzinfo=timezone.utc)
KEYS = ("a" * 32, "b" * 32)
ROUTES = BridgeRoutes("services", "orders", DELAYED, KEYS)


def taken(queue: str, key: str | bytes = "k", body: bytes = b"", **properties: Any) -> TakenMessage:
    return TakenMessage(queue, 1, key, ReceivedProperties.of(pika.BasicProperties(**properties)), body)


def come_due(delayed: Publication, **headers: Any) -> TakenMessage:
    """A message as it comes to the queue of due messages."""
    found = ReceivedProperties.of(delayed.properties)
    return taken(ROUTES.due, headers={**(found.headers or {}), **headers})


def publication(message: TakenMessage, *, now: datetime = NOW, user: str | None = "bridge") -> Publication:
    return ROUTES.publication(message, None, now, user)


@pytest.mark.parametrize(
    ("value", "milliseconds"),
    [(1, 1), (0, 0), (-7, 0), (2**32 - 1, 2**32 - 1), (2**40, 2**40), ("1500", 1500), ("-3", 0), (b"+20", 20)],
)
def test_delays(value: object, milliseconds: int) -> None:
    assert read_delay({"x-delay": value}) == milliseconds


@pytest.mark.parametrize("headers", [None, {}, {"X-Delay": 5}])
def test_no_delay(headers: dict[str, Any] | None) -> None:
    assert read_delay(headers) == 0


@pytest.mark.parametrize("value", ["", "soon", "1.5", " 1", "٣", b"\xff", True, None, Decimal(5), [1], {"a": 1}, NOW])
def test_what_is_no_delay(value: object) -> None:
    with pytest.raises(InvalidMessage, match="it is not a whole number of milliseconds") as raised:
        read_delay({"x-delay": value})
    assert "soon" not in str(raised.value)


@pytest.mark.parametrize(("milliseconds", "seconds"), [(1, 1), (1000, 1), (1001, 2), (2**32 - 1, 4_294_968)])
def test_a_delay_is_rounded_up_to_a_second(milliseconds: int, seconds: int) -> None:
    delayed = publication(taken(ROUTES.intake, headers={"x-delay": milliseconds}))
    assert delayed.key == ROUTES.topology.digits.routing_key(seconds, "delayed.bridge.services.due")
    due = datetime.fromisoformat((come_due(delayed).properties.headers or {})["airflow-delayed-due-at"])
    assert due == NOW + timedelta(milliseconds=milliseconds)


def test_the_longest_delay() -> None:
    most = ROUTES.topology.digits.max_delay * 1000
    assert publication(taken(ROUTES.intake, headers={"x-delay": most})).parked is None
    for more in (most + 1000, 10**17):
        parked = publication(taken(ROUTES.intake, headers={"x-delay": more}))
        assert (parked.exchange, parked.key) == ("", ROUTES.parked)
        assert "delay" in (parked.parked or "")


def test_properties_come_back_byte_for_byte() -> None:
    headers = {"n": 2**40, "CC": ["x"], "BCC": ["y"], "x-death": [{"count": 1}], "t": NOW}
    message = taken(
        ROUTES.intake, b"\xff", headers=headers, expiration="5", message_id="m", priority=9, user_id="bridge"
    )
    delayed = ROUTES.publication(
        taken(ROUTES.intake, b"\xff", headers={**headers, "x-delay": 9}, expiration="5", message_id="m"),
        None,
        NOW,
        None,
    )
    # nothing by which the broker would route or expire it on its way
    on_its_way = ReceivedProperties.of(delayed.properties)
    assert not {"CC", "BCC", "x-death", "x-delay"} & set(on_its_way.headers or {})
    assert (on_its_way.expiration, on_its_way.message_id) == (None, "m")
    due = publication(come_due(delayed), now=NOW + timedelta(seconds=1))
    assert (due.exchange, due.key) == ("orders", b"\xff")
    assert dict(ReceivedProperties.of(due.properties).headers or {}) == {**headers, "x-delay": -9}
    assert publication(message).properties.encode() == message.properties.encode()


def test_another_users_id_is_removed() -> None:
    found = publication(taken(ROUTES.intake, user_id="service", app_id="a"))
    assert found.exchange == "orders"
    assert ReceivedProperties.of(found.properties).user_id is None
    assert ReceivedProperties.of(found.properties).app_id == "a"


def test_a_message_that_a_node_lets_go_too_soon_waits_again() -> None:
    delayed = publication(taken(ROUTES.intake, headers={"x-delay": 20_000}))
    early = publication(come_due(delayed), now=NOW + timedelta(seconds=8))
    assert early.key == ROUTES.topology.digits.routing_key(12, ROUTES.due)
    assert publication(come_due(early), now=NOW + timedelta(seconds=20)).exchange == "orders"


def forged(delayed: Publication, *, body: bytes = b"", due_at: str | None = None, **envelope: Any) -> TakenMessage:
    """A signed message as it comes to the queue of due messages, with something changed."""
    headers = dict(ReceivedProperties.of(delayed.properties).headers or {})
    table = {**headers["airflow-delayed-bridged"], **envelope}
    headers |= {"airflow-delayed-bridged": table, **({"airflow-delayed-due-at": due_at} if due_at else {})}
    return taken(ROUTES.due, body=body, headers=headers)


@pytest.mark.parametrize(
    "change",
    [
        {"key": "admin.run"},
        {"properties": b"\0\0"},
        {"signature": b"\0" * 32},
        {"signature": "text"},
        {"body": b"another"},
        {"due_at": "2026-01-31T08:30:00.000000+00:00"},
    ],
)
def test_what_was_changed_on_its_way_is_parked_and_never_signed(change: dict[str, Any]) -> None:
    delayed = publication(taken(ROUTES.intake, headers={"x-delay": 20_000}))
    later = NOW + timedelta(seconds=20)
    assert publication(forged(delayed), now=later).exchange == "orders"
    parked = publication(forged(delayed, **change), now=later)
    assert parked.key == ROUTES.parked
    assert publication(come_due(parked), now=later).key == ROUTES.parked


def test_a_signature_is_for_one_exchange_and_any_of_the_keys() -> None:
    delayed = publication(taken(ROUTES.intake, headers={"x-delay": 1}))
    later = NOW + timedelta(seconds=1)
    new = "c" * 32

    def exchange(**changes: Any) -> tuple[str, str | None]:
        routes = replace(ROUTES, **changes)
        found = routes.publication(replace(come_due(delayed), queue=routes.due), None, later, None)
        return found.exchange, found.parked

    assert exchange(secrets=(new, *KEYS)) == ("orders", None)
    parked, reason = exchange(secrets=(new,))
    assert parked == ""
    assert "add that key at the end of the list" in (reason or "")
    assert exchange(exchange="others")[0] == ""


@pytest.mark.parametrize("bridged", [None, "text", {}, {"key": "k"}, {"key": 1, "properties": b""}, [1]])
def test_a_foreign_message_is_parked(bridged: object) -> None:
    found = publication(taken(ROUTES.due, headers={"airflow-delayed-bridged": bridged}))
    assert found.key == ROUTES.parked
    assert "by another way" in (found.parked or "")


def test_properties_that_fill_a_frame_are_parked_without_them() -> None:
    found = publication(taken(ROUTES.intake, headers={"x-delay": 5, "large": "x" * 126_900}))
    assert found.key == ROUTES.parked
    headers = ReceivedProperties.of(found.properties).headers or {}
    assert set(headers) == {"airflow-delayed-set-aside-reason", "airflow-delayed-set-aside-from"}


def test_properties_that_cannot_be_read_are_parked() -> None:
    message = TakenMessage(ROUTES.intake, 1, "k", ReceivedProperties(b"\xff\xff"), b"")
    assert "cannot be read" in (publication(message).parked or "")


def test_what_was_parked_on_its_way_in_waits_for_the_rest_when_it_is_redriven() -> None:
    message = taken(ROUTES.intake, headers={"x-delay": 60_000})
    parked = ROUTES.publication(message, "refused", NOW, None)
    redriven = publication(come_due(parked), now=NOW + timedelta(seconds=10))
    assert redriven.key == ROUTES.topology.digits.routing_key(50, ROUTES.due)


def test_the_parts_of_a_bridge() -> None:
    parts = list(ROUTES.parts())
    queues = {part.name: part.arguments for part in parts if isinstance(part, Queue)}
    assert {name for name in queues if "bridge" in name} == {ROUTES.intake, ROUTES.due, ROUTES.parked}
    assert all(queues[name]["x-queue-type"] == "quorum" for name in queues)
    ways = {(part.source.name, part.target.name) for part in parts if isinstance(part, Binding)}
    assert {("services", ROUTES.intake), (DELAYED.delivery_exchange, ROUTES.due)} <= ways
    assert Exchange("services", "topic") in parts


@pytest.mark.parametrize("exchange", ["a..b", ".", "x" * 230])
def test_names_that_are_no_end_of_a_routing_key(exchange: str) -> None:
    with pytest.raises(LimitExceeded):
        BridgeRoutes(exchange, "orders", DELAYED, KEYS)


def test_conventional_routing_is_refused() -> None:
    with pytest.raises(ValueError, match="direct routing"):
        BridgeRoutes("services", "orders", NSERVICEBUS, KEYS)
