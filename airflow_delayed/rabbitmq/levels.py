"""The arithmetic of delay levels: a delay as digits, the keys made of them, and the limits. No network, no names.

A delay in whole seconds is written as digits to a base, the highest first. For each digit but 0 at each position there
is a level: a queue that keeps a message for digit * base**position seconds. A message waits in the level of each of its
digits, from the highest to the lowest. The names and the queue arguments of the levels, and which exchange reads which
digits, are in :class:`airflow_delayed.rabbitmq.topology.Topology`.
"""

from __future__ import annotations

from dataclasses import dataclass

from airflow_delayed.errors import LimitExceeded

#: Bytes of the longest routing key in UTF-8.
_KEY_BYTES = 255
_FORMATS = {2: "b", 16: "x"}


@dataclass(frozen=True, slots=True)
class DelayDigits:
    """How many digits to which base a topology writes a delay in.

    Levels have numbers, from 0 on, in the order of their waits: those of the lowest position first. Position 0 is that
    of the last digit.

    :param base: 2 or 16.
    """

    base: int
    count: int

    @property
    def max_delay(self) -> int:
        """The longest delay in seconds."""
        return int(self.base**self.count) - 1

    @property
    def max_destination_bytes(self) -> int:
        """The longest destination in UTF-8 bytes: each digit takes two bytes of a routing key, for its dot too."""
        return _KEY_BYTES - 2 * self.count

    # limits

    def check_delay(self, delay_seconds: int) -> None:
        """Check a delay against the topology's range.

        :raises LimitExceeded: it is longer than :attr:`max_delay`.
        """
        if delay_seconds > self.max_delay:
            raise LimitExceeded(
                "delay",
                f"{delay_seconds:,} s is more than the {self.max_delay:,} s that RabbitMQ's delay levels can hold;"
                " let it wait in a store first (store_conn_id=...)",
            )

    def check_destination(self, destination: str) -> None:
        """Check that a destination can be the end of a routing key.

        :raises LimitExceeded: it is longer than :attr:`max_destination_bytes`, has an empty word, or a word that is
            ``*`` or ``#``.
        """
        size = len(destination.encode())
        if size > self.max_destination_bytes:
            raise LimitExceeded(
                "destination",
                f"the name has {size} bytes in UTF-8; with a delay at most {self.max_destination_bytes} fit into a"
                " routing key",
            )
        for word in destination.split("."):
            if not word:
                raise LimitExceeded("destination", f"{destination!r} is empty or has a dot at an end or two in a row")
            if word in ("*", "#"):
                raise LimitExceeded(
                    "destination", f"{destination!r} has {word!r} as a word, which is a wildcard in RabbitMQ"
                )

    # a message's key

    def routing_key(self, delay_seconds: int, destination: str) -> str:
        """Return a message's key: the digits, highest first, each with a dot behind it, then the destination.

        A negative delay counts as 0, as in NServiceBus.

        :raises LimitExceeded: the delay or the destination is beyond its limit.
        """
        self.check_destination(destination)
        self.check_delay(delay_seconds)
        return ".".join(f"{self.text(max(0, delay_seconds)):0>{self.count}}") + "." + destination

    def split_key(self, key: str) -> tuple[int, str] | None:
        """Return the delay in seconds and the destination of a routing key; None if it is not the key of a delay."""
        *digits, destination = key.split(".", self.count)
        if len(digits) < self.count or not destination or not all(map(self.is_digit, digits)):
            return None
        return int("".join(digits), self.base), destination

    def text(self, number: int) -> str:
        """Return a number's digits."""
        return f"{number:{_FORMATS[self.base]}}"

    def is_digit(self, word: str) -> bool:
        """Whether a word of a key is a digit."""
        return len(word) == 1 and word in "0123456789abcdef"[: self.base]

    # levels

    @property
    def levels(self) -> range:
        """The numbers of all levels, the shortest wait first."""
        return range(self.count * (self.base - 1))

    def levels_at(self, position: int) -> range:
        """Return the numbers of a position's levels: one for each digit but 0."""
        return self.levels[position * (self.base - 1) : (position + 1) * (self.base - 1)]

    def position(self, level: int) -> int:
        """Return the position of a level's digit."""
        return level // (self.base - 1)

    def digit(self, level: int) -> int:
        """Return a level's digit."""
        return level % (self.base - 1) + 1

    def wait(self, level: int) -> int:
        """Return for how many seconds a level keeps a message."""
        return self.digit(level) * self._unit(level)

    def longest(self, level: int) -> int:
        """Return the longest time in seconds that may remain for a message in a level, with all levels below."""
        return self.wait(level) + self._unit(level) - 1

    def entry_level(self, delay_seconds: int) -> int:
        """Return the level a message starts at: that of its highest digit that is not 0; of 1 s if there is none.

        :raises LimitExceeded: the delay is beyond its limit.
        """
        self.check_delay(delay_seconds)
        position, digit = 0, max(1, delay_seconds)
        while digit >= self.base:
            position, digit = position + 1, digit // self.base
        return self._level(position, digit)

    def binding_key(self, first: int, position: int, digit: int) -> str:
        """Return the key of a binding for messages whose digit at a position has a value.

        :param first: the first position that counts: from there to this position all digits are 0.
        """
        return "*." * (self.count - 1 - first) + "0." * (first - position) + f"{digit:x}.#"

    def _level(self, position: int, digit: int) -> int:
        return self.levels_at(position)[digit - 1]

    def _unit(self, level: int) -> int:
        return int(self.base ** self.position(level))


#: 28 bits: the keys and the waits of NServiceBus.RabbitMQ (DelayInfrastructure.cs) and of kombu
#: (native_delayed_delivery.py). The longest delay is 268,435,455 s, about eight and a half years.
BITS = DelayDigits(2, 28)
#: 7 hexadecimal digits: the same longest delay, and 2.8 levels on average for a delay of up to 900 s in place of 5.
HEX = DelayDigits(16, 7)
