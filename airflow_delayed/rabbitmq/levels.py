"""The 28 delay levels: names, keys and queue arguments. Pure arithmetic, no network.

A delay in whole seconds is written as 28 bits. Level n is a topic exchange and a queue that keeps a message for 2**n
seconds if its bit is 1 and passes it on to level n-1; below level 0 lies the delivery exchange. The keys, the waits and
the queue arguments are those of NServiceBus.RabbitMQ (DelayInfrastructure.cs, "v2"); the names are our own, so that the
two never change each other's topology, and destinations are bound exactly (see :func:`binding_key`).
"""

from __future__ import annotations

from airflow_delayed.errors import LimitExceeded

BITS = 28
TOP_LEVEL = BITS - 1
#: Longest delay in seconds: 268,435,455, about eight and a half years.
MAX_DELAY_SECONDS = (1 << BITS) - 1
#: Longest destination in UTF-8 bytes: a routing key holds 255, of which the bits and their dots take 56.
MAX_DESTINATION_BYTES = 255 - 2 * BITS

#: Topic exchange behind level 0, to which destinations are bound.
DELIVERY_EXCHANGE = "delayed.delivery"
#: Fanout exchange and queue that take what no destination took. With at-least-once dead-lettering such a message
#: would else stay at the head of its level and block all others.
UNROUTABLE = "delayed.unroutable"

_PREFIX = "delayed.level-"


def level_name(level: int) -> str:
    """Return the name of a level's exchange and of its queue."""
    return f"{_PREFIX}{level:02d}"


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
    if destination == UNROUTABLE or destination.startswith(_PREFIX):
        raise LimitExceeded("destination", f"{destination!r} is a queue of the delay levels themselves; choose another")


def routing_key(delay_seconds: int, destination: str) -> str:
    """Return a message's key: 28 bits, highest first, each with a dot behind it, then the destination.

    A negative delay counts as 0, as in NServiceBus.

    :raises LimitExceeded: the delay or the destination is beyond its limit.
    """
    check_delay(delay_seconds)
    check_destination(destination)
    return ".".join(f"{max(0, delay_seconds):0{BITS}b}") + "." + destination


def entry_level(delay_seconds: int) -> int:
    """Return the level a message starts at: that of the highest bit that is 1; 0 if there is none.

    :raises LimitExceeded: the delay is beyond its limit.
    """
    check_delay(delay_seconds)
    return max(1, delay_seconds).bit_length() - 1


def level_key(level: int, bit: int) -> str:
    """Return the key that a level's exchange binds for one value of its bit: 1 to its queue, 0 to the next exchange."""
    return "*." * (TOP_LEVEL - level) + f"{bit}.#"


def binding_key(destination: str) -> str:
    """Return the key that binds a destination to the delivery exchange.

    It stands for any delay and this destination alone. NServiceBus and kombu bind ``#.destination``, which also takes
    the messages for ``other.destination``.

    :raises LimitExceeded: the destination is beyond its limit.
    """
    check_destination(destination)
    return "*." * BITS + destination


def queue_arguments(level: int) -> dict[str, str | int]:
    """Return the arguments of a level's queue; its time to live, in milliseconds, is what makes the delay.

    There is no dead-letter routing key: a message keeps its own.
    """
    return {
        "x-queue-type": "quorum",
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
        "x-message-ttl": (1 << level) * 1000,
        "x-dead-letter-exchange": level_name(level - 1) if level else DELIVERY_EXCHANGE,
    }
