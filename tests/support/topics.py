"""AMQP's topic rule, and delays and destinations to try it with."""

from __future__ import annotations

from hypothesis import strategies as st

from airflow_delayed.rabbitmq.levels import BITS

delays = st.integers(0, BITS.max_delay) | st.integers(0, 28).map(lambda bit: min(1 << bit, BITS.max_delay))
words = st.text(st.characters(exclude_characters=".*#", exclude_categories=("Cs",)), min_size=1, max_size=8)
destinations = (
    st.lists(words, min_size=1, max_size=5)
    .map(".".join)
    .filter(lambda name: len(name.encode()) <= BITS.max_destination_bytes)
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
