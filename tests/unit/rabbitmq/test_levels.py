from __future__ import annotations

import pytest
from hypothesis import given
from support.topics import delays, destinations

from airflow_delayed.errors import LimitExceeded
from airflow_delayed.rabbitmq.levels import BITS, HEX, DelayDigits

each_form = pytest.mark.parametrize("digits", [BITS, HEX], ids=["bits", "hex"])


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
def test_key_and_entry_of_bits(delay: int, destination: str, key: str, level: int) -> None:
    assert BITS.routing_key(delay, destination) == key
    assert BITS.entry_level(delay) == level


@pytest.mark.parametrize(
    "delay, key, wait",
    [
        (0, zeros(7) + "x", 1),
        (-5, zeros(7) + "x", 1),
        (10, zeros(6) + "a.x", 10),
        (16, zeros(5) + "1.0.x", 16),
        (900, zeros(4) + "3.8.4.x", 3 * 256),
        (268_435_455, "f." * 7 + "x", 15 * 16**6),
    ],
)
def test_key_and_entry_of_hexadecimal_digits(delay: int, key: str, wait: int) -> None:
    assert HEX.routing_key(delay, "x") == key
    assert HEX.wait(HEX.entry_level(delay)) == wait


@each_form
@given(delay=delays)
def test_the_waits_along_the_way_are_the_delay(digits: DelayDigits, delay: int) -> None:
    rest, way = delay, []
    while rest:
        level = digits.entry_level(rest)
        assert rest <= digits.longest(level)
        way.append(level)
        rest -= digits.wait(level)
    assert rest == 0
    assert len({digits.position(level) for level in way}) == len(way) <= digits.count


@each_form
def test_the_levels_are_in_the_order_of_their_waits(digits: DelayDigits) -> None:
    waits = [digits.wait(level) for level in digits.levels]
    assert waits == sorted(set(waits))
    assert digits.longest(digits.levels[-1]) == digits.max_delay == 268_435_455
    assert [level for position in range(digits.count) for level in digits.levels_at(position)] == list(digits.levels)


@each_form
@given(delay=delays, destination=destinations)
def test_a_key_fits_into_a_frame_and_can_be_read(digits: DelayDigits, delay: int, destination: str) -> None:
    key = digits.routing_key(delay, destination)
    assert len(key.encode()) <= 255
    assert digits.split_key(key) == (delay, destination)


@pytest.mark.parametrize("destination", ["a" * 199, "é" * 99 + "a", "a.b.c", "*a.#b", "delayed", "a b"])
def test_destinations_that_fit(destination: str) -> None:
    for digits in (BITS, HEX):
        assert digits.routing_key(1, destination).endswith(f"1.{destination}")


@pytest.mark.parametrize("destination", ["", ".", "a.", ".a", "a..b", "*", "#", "a.*", "#.a", "a" * 242, "é" * 121])
def test_destinations_beyond_the_limits(destination: str) -> None:
    for digits in (BITS, HEX):
        with pytest.raises(LimitExceeded) as error:
            digits.routing_key(1, destination)
        assert error.value.column == "destination"


def test_shorter_keys_have_room_for_longer_destinations() -> None:
    assert (BITS.max_destination_bytes, HEX.max_destination_bytes) == (199, 241)
    assert len(HEX.routing_key(1, "a" * 241)) == 255
    with pytest.raises(LimitExceeded, match="has 200 bytes in UTF-8; with a delay at most 199"):
        BITS.check_destination("a" * 200)


@each_form
def test_a_delay_beyond_the_digits_is_refused(digits: DelayDigits) -> None:
    for use in (lambda delay: digits.routing_key(delay, "a"), digits.entry_level):
        with pytest.raises(LimitExceeded, match="268,435,456 s is more than the 268,435,455 s") as error:
            use(1 << 28)
        assert error.value.column == "delay"


def test_the_key_of_bits_is_kombus() -> None:
    from kombu.transport import native_delayed_delivery as delivery

    for delay in (1, 2, 845, 1 << 27, BITS.max_delay):
        assert BITS.routing_key(delay, "some.queue") == delivery.calculate_routing_key(delay, "some.queue")
