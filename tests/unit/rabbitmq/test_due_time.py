"""What a message that no destination took tells of its destination and its due time."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pika import BasicProperties

from airflow_delayed.rabbitmq.levels import BITS, split_key
from airflow_delayed.rabbitmq.waiting import read_waited

UTC = timezone.utc
SENT = datetime(2025, 11, 28, 0, 5, 18, 653_833, tzinfo=UTC)
SECOND = timedelta(seconds=1)
DUE_AT = "airflow-delayed-due-at"

delays = st.integers(1, BITS.max_delay) | st.integers(1, 40) | st.integers(0, 27).map(lambda bit: 1 << bit)
names = st.sampled_from(["Sales", "Acme.Sales", "0.1.Sales", "é.x"])


@given(delays, names)
def test_a_key_tells_delay_and_destination(delay: int, name: str) -> None:
    assert split_key(BITS.routing_key(delay, name)) == (delay, name)


@pytest.mark.parametrize(
    "key", ["", "orders", "delayed.level-09", "0." * 7, "0." * 6 + "g.x", "0." * 6 + "x", "00" * 7 + "x"]
)
def test_other_keys_tell_nothing(key: str) -> None:
    assert split_key(key) is None


def test_what_came_out_of_the_levels_is_due() -> None:
    key = BITS.routing_key(90, "Acme.Sales")
    assert read_waited(BasicProperties(), key, now=SENT).due_at == SENT
    later = {DUE_AT: (SENT + SECOND).isoformat()}
    assert read_waited(BasicProperties(headers=later), key, now=SENT).due_at == SENT + SECOND


def test_what_was_put_back_is_due_when_its_headers_say() -> None:
    headers: dict[str, object] = {"airflow-delayed-routing-key": BITS.routing_key(90, "Acme.Sales")}
    found = read_waited(BasicProperties(headers=headers), "delayed.hex.unroutable", now=SENT)
    assert (found.destination, found.problem) == ("Acme.Sales", "no header tells when it is due")
    headers[DUE_AT] = SENT.isoformat()
    found = read_waited(BasicProperties(headers=headers), "delayed.hex.unroutable", now=SENT)
    assert (found.destination, found.due_at, found.problem) == ("Acme.Sales", SENT, None)
    assert read_waited(BasicProperties(), "delayed.hex.unroutable", now=SENT).destination is None
