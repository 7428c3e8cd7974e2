"""QueueSettings: what a user wants of a destination; what is left out is neither set nor compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

from airflow_delayed.sqs.queues import FIFO, MAX_DELAY, MIN_RETENTION

#: Encryption with a key that SQS manages; any other value is a KMS key.
SSE_SQS = "sse-sqs"
#: Seconds: the longest retention, 14 days.
MAX_RETENTION = 1_209_600
#: Seconds: the longest that a message stays invisible after a receive, 12 hours in all.
MAX_VISIBILITY = 43_200
#: Seconds: the longest that a receive waits for a message.
MAX_WAIT = 20
#: How many receives SQS can count before a message goes to the dead-letter queue.
MAX_RECEIVES = 1_000

Duration = timedelta | int


#: The least and the most of each, in seconds.
_LIMITS = {
    "retention": (MIN_RETENTION, MAX_RETENTION),
    "visibility_timeout": (0, MAX_VISIBILITY),
    "receive_wait": (0, MAX_WAIT),
    "delay": (0, MAX_DELAY),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """What a destination shall be like. Durations are a timedelta or seconds, whole ones.

    :param retention: how long a message is kept, counted from its send, its delay included: 30 minutes to 14 days.
    :param visibility_timeout: how long a received message is hidden from other consumers: 0 to 12 hours.
    :param receive_wait: how long a receive waits for a message: 0 to 20 s. 20 s costs the fewest requests.
    :param delay: the queue's own delay: 0 to 900 s. It does not count for what this package sends, which says its own.
    :param encryption: "sse-sqs", or the id, alias or ARN of a KMS key; of the delay queue and the dead-letter queue
        too, since the same bodies wait there.
    :param dead_letter_queue: the name of the queue that takes what was received ``max_receive_count`` times and not
        deleted. It gets 14 days of retention: time in the destination counts in it.
    :param max_receive_count: 1 to 1,000; goes with ``dead_letter_queue``.
    :raises ValueError: a value is beyond what SQS takes.
    """

    retention: Duration | None = None
    visibility_timeout: Duration | None = None
    receive_wait: Duration | None = None
    delay: Duration | None = None
    encryption: str | None = None
    dead_letter_queue: str | None = None
    max_receive_count: int | None = None

    def __post_init__(self) -> None:
        for name, limits in _LIMITS.items():
            if (seconds := self.seconds(name)) is not None:
                _check(name, seconds, *limits, unit=" s")
        if (self.dead_letter_queue is None) != (self.max_receive_count is None):
            raise ValueError("dead_letter_queue and max_receive_count go together; give both or neither")
        if self.max_receive_count is not None:
            _check("max_receive_count", self.max_receive_count, 1, MAX_RECEIVES)
        if self.dead_letter_queue is not None and self.dead_letter_queue.endswith(FIFO):
            raise ValueError("dead_letter_queue is a FIFO queue, and that of a standard queue must be a standard one")
        if self.encryption is not None and not self.encryption.strip():
            raise ValueError("encryption is blank; use 'sse-sqs', or the id, alias or ARN of a KMS key")

    def seconds(self, name: str) -> int | None:
        """Return a duration in seconds, or None if it was left out."""
        value = getattr(self, name)
        return None if value is None else seconds_of(name, value)


def settings_of(given: QueueSettings | Mapping[str, Any]) -> QueueSettings:
    """Return settings that may be given as a dictionary of their fields.

    :raises ValueError: a field is unknown, or beyond what SQS takes.
    """
    if isinstance(given, QueueSettings):
        return given
    known = [field.name for field in fields(QueueSettings)]
    if unknown := sorted(set(given) - set(known)):
        raise ValueError(f"settings have no {', '.join(unknown)}; known are {', '.join(known)}")
    return QueueSettings(**given)


def seconds_of(name: str, value: Duration) -> int:
    """Return a duration in whole seconds.

    :raises ValueError: it has a fraction of a second, or is no duration.
    """
    if isinstance(value, timedelta):
        whole, rest = divmod(value, timedelta(seconds=1))
        if rest:
            raise ValueError(f"{name}={value} has a fraction of a second, and SQS counts whole seconds")
        return whole
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={value!r} must be a timedelta or whole seconds")
    return value


def _check(name: str, value: int, least: int, most: int, *, unit: str = "") -> None:
    if not least <= value <= most:
        raise ValueError(f"{name}={value:,}{unit} must be {least:,} to {most:,}{unit}")
