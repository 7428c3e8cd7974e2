"""What a message that no destination took tells of its destination and its due time."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from pika import BasicProperties

from airflow_delayed.rabbitmq.levels import BITS, HEX
from airflow_delayed.rabbitmq.redrive import TakenMessage, read_taken

UTC = timezone.utc
SENT = datetime(2025, 11, 28, 0, 5, 18, 653_833, tzinfo=UTC)
SECOND = timedelta(seconds=1)


@pytest.mark.parametrize(
    "key", ["", "orders", "delayed.level-09", "0." * 7, "0." * 6 + "g.x", "0." * 6 + "x", "00" * 7 + "x"]
)
def test_other_keys_tell_nothing(key: str) -> None:
    assert (BITS.split_key(key), HEX.split_key(key)) == (None, None)


def taken(key: str, **headers: object) -> TakenMessage:
    properties = BasicProperties(headers={name.replace("_", "-"): value for name, value in headers.items()})
    return read_taken(properties, key, b"", BITS, SENT)


def test_what_came_out_of_the_levels_is_due() -> None:
    key = BITS.routing_key(90, "Acme.Sales")
    assert taken(key).due_at == SENT
    assert taken(key, airflow_delayed_due_at=(SENT + SECOND).isoformat()).due_at == SENT + SECOND


def test_what_was_put_back_is_due_when_its_headers_say() -> None:
    key = BITS.routing_key(90, "Acme.Sales")
    found = taken("delayed.hex.unroutable", airflow_delayed_routing_key=key)
    assert (found.destination, found.problem) == ("Acme.Sales", "no header tells when it is due")
    found = taken("delayed.hex.unroutable", airflow_delayed_routing_key=key, airflow_delayed_due_at=SENT.isoformat())
    assert (found.destination, found.due_at, found.problem) == ("Acme.Sales", SENT, None)
    assert taken("delayed.hex.unroutable").problem == "neither its routing key nor a header tells its destination"
