from __future__ import annotations

import pytest
from hypothesis import given
from support.topics import delays, destinations

from airflow_delayed.errors import LimitExceeded
from airflow_delayed.rabbitmq.levels import BITS


def zeros(count: int) -> str:
    return "0." * count


@pytest.mark.parametrize(
    "delay, destination, key, level",
    [
        # NServiceBus.RabbitMQ, When_calculating_a_routing_key.cs
        (0, "some-address", zeros(28) + "some-address", 0),
        (-5, "some-address", zeros(28) + "some-address", 0),
        (1, "some-address", zeros(27) + "1.some-address", 0),
        (10, "destination", zeros(24) + "1.0.1.0.destination", 3),
        (15, "x", zeros(24) + "1.1.1.1.x", 3),
        (28, "short-delay", zeros(23) + "1.1.1.0.0.short-delay", 4),
        (268_435_454, "almost-max", "1." * 27 + "0.almost-max", 27),
        (268_435_455, "max", "1." * 28 + "max", 27),
        (3, "Acme.Sales", zeros(26) + "1.1.Acme.Sales", 1),
    ],
)
def test_key_and_entry(delay: int, destination: str, key: str, level: int) -> None:
    assert BITS.routing_key(delay, destination) == key
    assert BITS.entry_level(delay) == level


@given(delays, destinations)
def test_a_key_fits_into_a_frame(delay: int, destination: str) -> None:
    assert len(BITS.routing_key(delay, destination).encode()) <= 255


@pytest.mark.parametrize("destination", ["a" * 199, "é" * 99 + "a", "a.b.c", "*a.#b", "delayed", "a b"])
def test_destinations_that_fit(destination: str) -> None:
    assert BITS.routing_key(1, destination).endswith(f"1.{destination}")


@pytest.mark.parametrize(
    "destination",
    [
        "",
        ".",
        "a.",
        ".a",
        "a..b",
        "*",
        "#",
        "a.*",
        "#.a",
        "a" * 200,
        "é" * 100,
    ],
)
def test_destinations_beyond_the_limits(destination: str) -> None:
    with pytest.raises(LimitExceeded) as error:
        BITS.routing_key(1, destination)
    assert error.value.column == "destination"


def test_a_delay_beyond_28_bits_is_refused() -> None:
    for use in (lambda delay: BITS.routing_key(delay, "a"), BITS.entry_level):
        with pytest.raises(LimitExceeded, match="268,435,456 s is more than the 268,435,455 s") as error:
            use(1 << 28)
        assert error.value.column == "delay"


def test_the_key_is_kombus() -> None:
    from kombu.transport import native_delayed_delivery as delivery

    for delay in (1, 2, 845, 1 << 27, BITS.max_delay):
        assert BITS.routing_key(delay, "some.queue") == delivery.calculate_routing_key(delay, "some.queue")
