"""The arithmetic of the 28 delay levels: bits, keys and limits. No network, no names.

A delay in whole seconds is written as 28 bits. Level n is a topic exchange and a queue that keeps a message for 2**n
seconds if its bit is 1 and passes it on to level n-1; below level 0 lies the delivery exchange. The keys and the waits
are those of NServiceBus.RabbitMQ (DelayInfrastructure.cs) and of kombu (native_delayed_delivery.py). The names and the
queue arguments of the levels are in :class:`airflow_delayed.rabbitmq.topology.Topology`.
"""

from __future__ import annotations

from airflow_delayed.errors import LimitExceeded

BITS = 28
TOP_LEVEL = BITS - 1
#: Longest delay in seconds: 268,435,455, about eight and a half years.
MAX_DELAY_SECONDS = (1 << BITS) - 1
#: Longest destination in UTF-8 bytes: a routing key holds 255, of which the bits and their dots take 56.
MAX_DESTINATION_BYTES = 255 - 2 * BITS


def check_delay(delay_seconds: int) -> None:
    """Check a delay against the topology's range.

    :raises LimitExceeded: it is over 268,435,455 seconds.
    """
    if delay_seconds > MAX_DELAY_SECONDS:
        raise LimitExceeded(
            "delay",
            f"{delay_seconds:,} s is more than the {MAX_DELAY_SECONDS:,} s that RabbitMQ's delay levels can hold;"
            " let it wait in a store first (store_conn_id=...)",
        )


def check_destination(destination: str) -> None:
    """Check that a destination can be the end of a routing key.

    :raises LimitExceeded: it is longer than 199 UTF-8 bytes, has an empty word, or a word that is ``*`` or ``#``.
    """
    size = len(destination.encode())
    if size > MAX_DESTINATION_BYTES:
        raise LimitExceeded(
            "destination",
            f"the name has {size} bytes in UTF-8; with a delay at most {MAX_DESTINATION_BYTES} fit into a routing key",
        )
    for word in destination.split("."):
        if not word:
            raise LimitExceeded("destination", f"{destination!r} is empty or has a dot at an end or two in a row")
        if word in ("*", "#"):
            raise LimitExceeded(
                "destination", f"{destination!r} has {word!r} as a word, which is a wildcard in RabbitMQ"
            )


def routing_key(delay_seconds: int, destination: str) -> str:
    """Return a message's key: 28 bits, highest first, each with a dot behind it, then the destination.

    A negative delay counts as 0, as in NServiceBus.

    :raises LimitExceeded: the delay or the destination is beyond its limit.
    """
    check_destination(destination)
    return bits(delay_seconds) + destination


def bits(delay_seconds: int) -> str:
    """Return a key's first part: 28 bits, highest first, each with a dot behind it.

    :raises LimitExceeded: the delay is beyond its limit.
    """
    check_delay(delay_seconds)
    return ".".join(f"{max(0, delay_seconds):0{BITS}b}") + "."


def entry_level(delay_seconds: int) -> int:
    """Return the level a message starts at: that of the highest bit that is 1; 0 if there is none.

    :raises LimitExceeded: the delay is beyond its limit.
    """
    check_delay(delay_seconds)
    return max(1, delay_seconds).bit_length() - 1


def time_to_live(level: int) -> int:
    """Return how many milliseconds a level's queue keeps a message (``x-message-ttl``): those of 2**level seconds."""
    return (1 << level) * 1000


def level_key(level: int, bit: int) -> str:
    """Return the key that a level's exchange binds for one value of its bit: 1 to its queue, 0 to the next exchange."""
    return "*." * (TOP_LEVEL - level) + f"{bit}.#"
