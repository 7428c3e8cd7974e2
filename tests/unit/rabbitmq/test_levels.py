from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from airflow_delayed.errors import LimitExceeded
from airflow_delayed.rabbitmq import levels

delays = st.integers(0, levels.MAX_DELAY_SECONDS) | st.integers(0, 28).map(
    lambda bit: min(1 << bit, levels.MAX_DELAY_SECONDS)
)
words = st.text(st.characters(exclude_characters=".*#", exclude_categories=("Cs",)), min_size=1, max_size=8)
destinations = (
    st.lists(words, min_size=1, max_size=5)
    .map(".".join)
    .filter(lambda name: len(name.encode()) <= 199 and not name.startswith("delayed."))
)


def matches(pattern: str, key: str) -> bool:
    """AMQP's topic rule: * is one word, # any number of words."""

    def match(pattern: list[str], key: list[str]) -> bool:
        if not pattern:
            return not key
        if pattern[0] == "#":
            return any(match(pattern[1:], key[start:]) for start in range(len(key) + 1))
        return bool(key) and pattern[0] in ("*", key[0]) and match(pattern[1:], key[1:])

    return match(pattern.split("."), key.split("."))


def way(key: str, level: int) -> tuple[int, str]:
    """Follow a message through the levels by their bindings and arguments alone: milliseconds waited, last exchange."""
    exchange, waited = levels.level_name(level), 0
    by_name = {levels.level_name(number): number for number in range(levels.BITS)}
    while exchange in by_name:
        level = by_name[exchange]
        to_queue = matches(levels.level_key(level, 1), key)
        # one way and no other
        assert to_queue != matches(levels.level_key(level, 0), key)
        arguments = levels.queue_arguments(level)
        if to_queue:
            waited += int(arguments["x-message-ttl"])
        after = levels.level_name(level - 1) if level else levels.DELIVERY_EXCHANGE
        assert arguments["x-dead-letter-exchange"] == after
        exchange = after
    return waited, exchange


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
    assert levels.routing_key(delay, destination) == key
    assert levels.entry_level(delay) == level


@given(delays, destinations)
def test_the_waits_along_a_key_add_up_to_the_delay(delay: int, destination: str) -> None:
    key = levels.routing_key(delay, destination)
    assert way(key, levels.entry_level(delay)) == (delay * 1000, levels.DELIVERY_EXCHANGE)
    # the short cut leaves nothing out
    assert way(key, levels.TOP_LEVEL) == (delay * 1000, levels.DELIVERY_EXCHANGE)


@given(delays, destinations, destinations)
def test_a_binding_takes_its_own_destination_and_no_other(delay: int, one: str, other: str) -> None:
    for destination in (one, f"{other}.{one}", f"{one}.{other}", other):
        assume(len(destination.encode()) <= levels.MAX_DESTINATION_BYTES)
        found = matches(levels.binding_key(one), levels.routing_key(delay, destination))
        assert found == (destination == one)


@given(delays, destinations)
def test_a_key_fits_into_a_frame(delay: int, destination: str) -> None:
    assert len(levels.routing_key(delay, destination).encode()) <= 255


@pytest.mark.parametrize("destination", ["a" * 199, "é" * 99 + "a", "a.b.c", "*a.#b", "delayed", "a b"])
def test_destinations_that_fit(destination: str) -> None:
    assert levels.routing_key(1, destination).endswith(f"1.{destination}")


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
        "delayed.level-03",
        "delayed.unroutable",
    ],
)
def test_destinations_beyond_the_limits(destination: str) -> None:
    for use in (lambda name: levels.routing_key(1, name), levels.binding_key):
        with pytest.raises(LimitExceeded) as error:
            use(destination)
        assert error.value.column == "destination"


def test_a_delay_beyond_28_bits_is_refused() -> None:
    for use in (lambda delay: levels.routing_key(delay, "a"), levels.entry_level):
        with pytest.raises(LimitExceeded, match="268,435,456 s is more than the 268,435,455 s") as error:
            use(1 << 28)
        assert error.value.column == "delay"


@pytest.mark.parametrize(
    "level, milliseconds, after",
    [(27, 134_217_728_000, "delayed.level-26"), (1, 2000, "delayed.level-00"), (0, 1000, "delayed.delivery")],
)
def test_queue_arguments(level: int, milliseconds: int, after: str) -> None:
    assert levels.queue_arguments(level) == {
        "x-queue-type": "quorum",
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
        "x-message-ttl": milliseconds,
        "x-dead-letter-exchange": after,
    }


def test_the_key_is_kombus() -> None:
    from kombu.transport import native_delayed_delivery as delivery

    for delay in (1, 2, 845, 1 << 27, levels.MAX_DELAY_SECONDS):
        assert levels.routing_key(delay, "some.queue") == delivery.calculate_routing_key(delay, "some.queue")
