"""The names of queues, and what is demanded of their settings.

Names and demands are those of NServiceBus.AmazonSQS (QueueCache.cs, TransportConstraints.cs, DelayedMessagesPump.cs),
so that its endpoints and this package find the same queues.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from airflow_delayed.delivery import Finding, State
from airflow_delayed.errors import InvalidMessage, LimitExceeded

DELAY_SUFFIX = "-delay.fifo"
FIFO = ".fifo"
#: Longest name of a queue, in UTF-16 units as NServiceBus counts; for ASCII these are characters.
MAX_NAME = 80
#: Seconds: the longest delay of a message or a queue, and the one that every delay queue has.
MAX_DELAY = 900
#: Seconds: a delay queue is made with 14 days, the most there is, so that a pause of its sensor loses nothing.
DELAY_RETENTION = 1_209_600
#: Seconds: 4 days, the least that a delay queue may have.
MIN_DELAY_RETENTION = 345_600
#: Seconds: a destination is made with 4 days, the default of SQS and of NServiceBus.
RETENTION = 345_600
#: Seconds: retention counts from the send, so a destination must keep a message for longer than it may be delayed.
MIN_RETENTION = 2 * MAX_DELAY

#: A setting that is not as demanded: its name, what was wanted and what was found.
Problem = tuple[str, object, object]

_ILLEGAL = re.compile(r"[^A-Za-z0-9_-]")


def queue_name(name: str, prefix: str = "") -> str:
    """Return the name that a queue has in SQS: the prefix, unless it is there already, and only legal characters.

    Whatever is not an ASCII letter, a digit, ``-`` or ``_`` becomes ``-``, but for a trailing ``.fifo``. A name that
    came out of this function goes through it unchanged.

    :raises LimitExceeded: name and prefix have more than 80 characters.
    :raises InvalidMessage: the name is blank.
    """
    if not name.strip():
        raise InvalidMessage("destination", "must be the name of a queue, and is blank")
    # a prefix with illegal characters is in a finished name in its legal form
    whole = name if name.startswith((prefix, _legal(prefix))) else prefix + name
    length = len(whole.encode("utf-16-le", "surrogatepass")) // 2
    if length > MAX_NAME:
        raise LimitExceeded(
            "destination",
            f"the queue name {whole!r} has {length} characters and SQS allows {MAX_NAME}; use a shorter name or prefix",
        )
    return _legal(whole)


def _legal(name: str) -> str:
    stem, ending = (name[: -len(FIFO)], FIFO) if name.endswith(FIFO) else (name, "")
    # NServiceBus replaces UTF-16 units, of which a character such as an emoji has two
    return _ILLEGAL.sub(lambda char: "--" if ord(char[0]) > 0xFFFF else "-", stem) + ending


def delay_queue_name(name: str, prefix: str = "") -> str:
    """Return the name of a destination's delay queue, ``<destination>-delay.fifo``.

    A name that came out of this function goes through it unchanged.

    :raises LimitExceeded: it has more than 80 characters, so a destination's name and prefix have at most 69.
    :raises InvalidMessage: the name is blank.
    """
    if not name.strip():
        raise InvalidMessage("destination", "must be the name of a queue, and is blank")
    return queue_name(name if name.endswith(DELAY_SUFFIX) else name + DELAY_SUFFIX, prefix)


def delay_queue_attributes() -> dict[str, str]:
    """Return the settings that a new delay queue gets; it has no RedrivePolicy."""
    return {
        "FifoQueue": "true",
        "DelaySeconds": str(MAX_DELAY),
        "MessageRetentionPeriod": str(DELAY_RETENTION),
    }


def destination_attributes() -> dict[str, str]:
    """Return the settings that a new destination gets."""
    return {"MessageRetentionPeriod": str(RETENTION)}


def compare_delay_queue(name: str, found: Mapping[str, str], destination: str) -> list[Finding]:
    """Return what is wrong with a delay queue, or that it is as demanded.

    The demands are NServiceBus's: a delivery delay of 900 s, a retention of at least 4 days, and no redrive policy,
    which would move messages away that are only waiting.
    """
    problems: list[Problem] = []
    delay = int(found.get("DelaySeconds", 0))
    if delay < MAX_DELAY:
        problems.append(("DelaySeconds", MAX_DELAY, delay))
    problems += _retention(found, MIN_DELAY_RETENTION)
    if policy := found.get("RedrivePolicy"):
        problems.append(("RedrivePolicy", "none", policy))
    return _findings(name, problems, destination)


def compare_destination(name: str, found: Mapping[str, str], destination: str) -> list[Finding]:
    """Return what is wrong with a destination, or that it is as demanded: it keeps messages longer than their delay."""
    return _findings(name, _retention(found, MIN_RETENTION), destination)


def resource(name: str) -> str:
    """Return how findings call a queue."""
    return f"queue {name}"


def _retention(found: Mapping[str, str], least: int) -> list[Problem]:
    seconds = int(found.get("MessageRetentionPeriod", 0))
    return [] if seconds >= least else [("MessageRetentionPeriod", f"at least {least}", seconds)]


def _findings(name: str, problems: list[Problem], destination: str) -> list[Finding]:
    return [
        Finding(
            state=State.DIFFERS,
            resource=resource(name),
            argument=argument,
            wanted=wanted,
            found=value,
            destination=destination,
        )
        for argument, wanted, value in problems
    ] or [Finding(state=State.OK, resource=resource(name), destination=destination)]
