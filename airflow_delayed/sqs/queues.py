"""The names of queues, and the limits of their settings.

Names and numbers are those of NServiceBus.AmazonSQS (QueueCache.cs, TransportConstraints.cs, DelayedMessagesPump.cs),
so that its endpoints and this package find the same queues.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from airflow_delayed.errors import InvalidMessage, LimitExceeded

DELAY_SUFFIX = "-delay.fifo"
ERROR_SUFFIX = "-error"
FIFO = ".fifo"
#: Longest name of a queue, in UTF-16 units as NServiceBus counts; for ASCII these are characters.
MAX_NAME = 80
#: Seconds: the longest delay of a message or a queue; every delay queue has it.
MAX_DELAY = 900
#: Seconds: a delay queue is made with 14 days, the most there is, so that a pause of its sensor loses nothing.
DELAY_RETENTION = 1_209_600
#: Seconds: 4 days, the least that a delay queue may have.
MIN_DELAY_RETENTION = 345_600
#: Seconds: a destination is made with 4 days, the default of SQS and of NServiceBus.
RETENTION = 345_600
#: Seconds: retention counts from the send, so a destination must keep a message for longer than it may be delayed.
MIN_RETENTION = 2 * MAX_DELAY

_ILLEGAL = re.compile(r"[^A-Za-z0-9_-]")
_REGION = r"[a-z]{2}(?:-[a-z]+)+-\d+"
_NAME = r"(?P<name>[A-Za-z0-9_-]+(?:\.fifo)?)"
_ARN = re.compile(rf"arn:[a-z-]+:sqs:(?P<region>{_REGION}):(?P<account>\d+):{_NAME}")
#: A URL's host may stand without ``https://``, as in older consoles.
_URL = re.compile(rf"(?:https?://[^/@\s]+|[\w.-]+\.amazonaws\.com(?:\.cn)?)/(?:\S+/)?(?P<account>[^/\s]+)/{_NAME}")
_REGION_OF_URL = re.compile(rf"(?<![\w-]){_REGION}(?![\w-])")


class QueueAddress(NamedTuple):
    """A queue that is named by its URL or ARN. Some URLs have no region."""

    region: str | None
    account: str
    name: str


def queue_address(destination: str) -> QueueAddress | None:
    """Read a destination that is a queue's URL or ARN; None: it is a name.

    :raises InvalidMessage: it is another URL or ARN.
    """
    if parts := _ARN.fullmatch(destination):
        return QueueAddress(parts["region"], parts["account"], parts["name"])
    if parts := _URL.fullmatch(destination):
        region = _REGION_OF_URL.search(destination.removesuffix(parts["name"]))
        return QueueAddress(region[0] if region else None, parts["account"], parts["name"])
    if destination.lower().startswith("arn:") or "://" in destination:
        raise InvalidMessage(
            "destination",
            "must be the name of a queue in SQS, its URL (https://sqs.<region>.amazonaws.com/<account>/<name>), or its"
            " ARN (arn:aws:sqs:<region>:<account>:<name>)",
        )
    return None


def queue_name(name: str, prefix: str = "") -> str:
    """Return the name that a queue has in SQS: the prefix, unless it is there already, and only legal characters.

    Whatever is not an ASCII letter, a digit, ``-`` or ``_`` becomes ``-``, but for a trailing ``.fifo``. A name that
    came out of this function goes through it unchanged. The name in a URL or an ARN stays, without the prefix.

    :raises LimitExceeded: name and prefix have more than 80 characters.
    :raises InvalidMessage: the name is blank, or a URL or an ARN that is not a queue's.
    """
    if not name.strip():
        raise InvalidMessage("destination", "must be the name of a queue, and is blank")
    address = queue_address(name)
    prefixed = name if _has_prefix(name, prefix) else prefix + name
    whole = address.name if address else prefixed
    length = len(whole.encode("utf-16-le", "surrogatepass")) // 2
    if length > MAX_NAME:
        raise LimitExceeded(
            "destination",
            f"the queue name {whole!r} has {length} characters and SQS allows {MAX_NAME}; use a shorter name or prefix",
        )
    return _legal(whole)


def _has_prefix(name: str, prefix: str) -> bool:
    # a prefix with illegal characters is in a finished name in its legal form, but that the two may share a ".fifo"
    plain = _plain(prefix)
    return name.startswith((prefix, plain)) or (name == _legal(name) and _plain(name).startswith(plain))


def _legal(name: str) -> str:
    return _plain(name[: -len(FIFO)]) + FIFO if name.endswith(FIFO) else _plain(name)


def _plain(name: str) -> str:
    # NServiceBus replaces UTF-16 units, of which a character such as an emoji has two
    return _ILLEGAL.sub(lambda char: "--" if ord(char[0]) > 0xFFFF else "-", name)


def delay_queue_name(name: str, prefix: str = "") -> str:
    """Return the name of a destination's delay queue, ``<destination>-delay.fifo``.

    A name that came out of this function goes through it unchanged.

    :raises LimitExceeded: it has more than 80 characters, so a destination's name and prefix have at most 69.
    :raises InvalidMessage: the name is blank.
    """
    if not name.strip():
        raise InvalidMessage("destination", "must be the name of a queue, and is blank")
    return queue_name(name if name.endswith(DELAY_SUFFIX) else name + DELAY_SUFFIX, prefix)


def resource(name: str) -> str:
    """Return the name of a queue in findings."""
    return f"queue {name}"
