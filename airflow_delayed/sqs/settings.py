"""QueueSettings, the settings that a user wants of a destination, and how a queue differs from them.

The demands on a delay queue are NServiceBus's (DelayedMessagesPump.cs): a delivery delay of 900 s, a retention of at
least 4 days, no redrive policy. The effects of a change on messages in the queue are from AWS's Developer Guide
("Amazon SQS delay queues", "Encryption at rest", "Setting-up dead-letter queue retention") and from SetQueueAttributes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any

from airflow_delayed.delivery import Finding, State
from airflow_delayed.message import plain_span
from airflow_delayed.sqs.queues import (
    DELAY_RETENTION,
    FIFO,
    MAX_DELAY,
    MIN_DELAY_RETENTION,
    MIN_RETENTION,
    RETENTION,
    resource,
)

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
#: A queue's settings as SQS returns them.
Attributes = Mapping[str, str]
#: The attributes of a queue that a setting is copied to.
ATTRIBUTES = {
    "visibility_timeout": "VisibilityTimeout",
    "receive_wait": "ReceiveMessageWaitTimeSeconds",
    "delay": "DelaySeconds",
}


#: The alternative to a delay queue, wherever one is at fault.
STORE_INSTEAD = "or let messages wait in a store (store_conn_id=) instead"

_KEPT_LONGER = "within 15 minutes also applies to messages already there: they are kept longer"
_KEPT_SHORTER = "within 15 minutes also applies to messages already there, and deletes older ones"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """The settings that a destination should have. Durations are a timedelta or seconds, whole ones.

    :param retention: how long a message is kept, counted from its send, its delay included: 30 minutes to 14 days.
    :param visibility_timeout: how long a received message is hidden from other consumers: 0 to 12 hours.
    :param receive_wait: how long a receive waits for a message: 0 to 20 s. 20 s costs the fewest requests.
    :param delay: the queue's own delay: 0 to 900 s. It does not count for what this package sends, which has its own.
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
    """Return settings; a dictionary of their fields is converted."""
    if isinstance(given, QueueSettings):
        return given
    known = [each.name for each in fields(QueueSettings)]
    if unknown := sorted(set(given) - set(known)):
        raise ValueError(f"settings have no {', '.join(unknown)}; known are {', '.join(known)}")
    return QueueSettings(**given)


def seconds_of(name: str, value: Duration) -> int:
    """Return a duration in whole seconds."""
    if isinstance(value, timedelta):
        whole, rest = divmod(plain_span(name, value), timedelta(seconds=1))
        if rest:
            raise ValueError(f"{name}={value} has a fraction of a second, and SQS counts whole seconds")
        return whole
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={value!r} must be a timedelta or whole seconds")
    return value


def _check(name: str, value: int, least: int, most: int, *, unit: str = "") -> None:
    if not least <= value <= most:
        raise ValueError(f"{name}={value:,}{unit} must be {least:,} to {most:,}{unit}")


def delay_queue_attributes(settings: QueueSettings) -> dict[str, str]:
    """Return the settings that a new delay queue gets; it has no RedrivePolicy."""
    return {
        "FifoQueue": "true",
        "DelaySeconds": str(MAX_DELAY),
        "MessageRetentionPeriod": str(DELAY_RETENTION),
        **encryption_attributes(settings),
    }


def destination_attributes(settings: QueueSettings, target: str | None = None) -> dict[str, str]:
    """Return the settings that a new destination gets; ``target`` is the ARN of its dead-letter queue."""
    made = {
        "MessageRetentionPeriod": str(settings.seconds("retention") or RETENTION),
        **encryption_attributes(settings),
    }
    for name, attribute in ATTRIBUTES.items():
        if (wanted := settings.seconds(name)) is not None:
            made[attribute] = str(wanted)
    if target is not None and settings.max_receive_count is not None:
        made["RedrivePolicy"] = policy_text(target, settings.max_receive_count)
    return made


def dead_letter_attributes(settings: QueueSettings) -> dict[str, str]:
    """Return the settings that a new dead-letter queue gets."""
    return {"MessageRetentionPeriod": str(MAX_RETENTION), **encryption_attributes(settings)}


def encryption_attributes(settings: QueueSettings) -> dict[str, str]:
    """Return the attributes by which a queue is encrypted as wanted."""
    if settings.encryption is None:
        return {}
    if settings.encryption == SSE_SQS:
        return {"SqsManagedSseEnabled": "true"}
    return {"KmsMasterKeyId": settings.encryption}


def redrive_policy(found: Attributes) -> tuple[str, int] | None:
    """Return the ARN of a queue's dead-letter queue and its maxReceiveCount, or None if it has none."""
    if not (text := found.get("RedrivePolicy")):
        return None
    policy = json.loads(text)
    return str(policy["deadLetterTargetArn"]), int(policy["maxReceiveCount"])


def policy_text(target: str, receives: int) -> str:
    """Return the attribute RedrivePolicy; ``target`` is the ARN of the dead-letter queue."""
    return json.dumps({"deadLetterTargetArn": target, "maxReceiveCount": receives})


@dataclass(frozen=True, slots=True)
class Difference:
    """One setting of a queue that is not as wanted.

    :param why: its effect.
    :param touches: the effect of a repair on messages already there; None: it cannot be repaired.
    :param attributes: the arguments of SetQueueAttributes that repair it.
    """

    setting: str
    wanted: object
    found: object
    why: str
    touches: str | None
    attributes: Mapping[str, str] = field(default_factory=dict)

    def finding(self, name: str, destination: str | None, state: State = State.DIFFERS) -> Finding:
        """Return the difference as a finding of a report."""
        return Finding(
            state=state,
            resource=resource(name),
            argument=self.setting,
            wanted=self.wanted,
            found=self.found,
            destination=destination,
            why=self.why,
            repair=self.touches,
        )


def compare_delay_queue(found: Attributes, settings: QueueSettings) -> list[Difference]:
    """Return the settings of a delay queue that are not as demanded."""
    problems: list[Difference] = []
    if found.get("FifoQueue") != "true":
        problems.append(
            Difference(
                "FifoQueue",
                "true",
                found.get("FifoQueue", "false"),
                "only a FIFO queue drops what is sent on twice; delete it when it is empty, and install again",
                None,
            )
        )
    if (delay := _number(found, "DelaySeconds")) < MAX_DELAY:
        problems.append(
            Difference(
                "DelaySeconds",
                MAX_DELAY,
                delay,
                f"each message comes back after {delay} s, and every round costs requests",
                "also applies to messages already there: in a FIFO queue they come back later, and none is late",
                {"DelaySeconds": str(MAX_DELAY)},
            )
        )
    if (kept := _number(found, "MessageRetentionPeriod")) < MIN_DELAY_RETENTION:
        problems.append(
            Difference(
                "MessageRetentionPeriod",
                f"at least {MIN_DELAY_RETENTION}",
                kept,
                "messages are lost if no FifoCycleSensor runs for that many seconds",
                _KEPT_LONGER,
                {"MessageRetentionPeriod": str(DELAY_RETENTION)},
            )
        )
    if policy := found.get("RedrivePolicy"):
        problems.append(
            Difference(
                "RedrivePolicy",
                "none",
                policy,
                "it takes messages away that are only waiting",
                "leaves messages already there; what was moved to the dead-letter queue before stays in that",
                {"RedrivePolicy": ""},
            )
        )
    return problems + list(_encryption(found, settings))


def compare_destination(
    found: Attributes, settings: QueueSettings, *, dead_letter: str | None = None, target: str | None = None
) -> list[Difference]:
    """Return the settings of a destination that are not as wanted.

    :param target: its ARN; without it the redrive policy can be compared, and not repaired.
    """
    problems: list[Difference] = []
    if found.get("FifoQueue") == "true":
        problems.append(
            Difference(
                "FifoQueue",
                "false",
                "true",
                "messages of a FIFO queue cannot have delays of their own; use a standard queue",
                None,
            )
        )
    problems += _kept(found, settings)
    for name, why, touches in _PLAIN:
        attribute = ATTRIBUTES[name]
        wanted, value = settings.seconds(name), _number(found, attribute)
        if wanted is not None and wanted != value:
            problems.append(Difference(attribute, wanted, value, why, touches, {attribute: str(wanted)}))
    problems += _encryption(found, settings)
    if dead_letter is not None and settings.max_receive_count is not None:
        problems += _redrive(found, dead_letter, settings.max_receive_count, target)
    return problems


def compare_dead_letter_queue(
    found: Attributes, settings: QueueSettings, *, destination_retention: int
) -> list[Difference]:
    """Return the wrong settings of a dead-letter queue, which must keep messages longer than the destination does."""
    problems: list[Difference] = []
    kept = _number(found, "MessageRetentionPeriod")
    if kept <= destination_retention and kept < MAX_RETENTION:
        problems.append(
            Difference(
                "MessageRetentionPeriod",
                MAX_RETENTION,
                kept,
                "the time in the destination counts in it, so a message may be gone as soon as it is dead-lettered",
                _KEPT_LONGER,
                {"MessageRetentionPeriod": str(MAX_RETENTION)},
            )
        )
    return problems + list(_encryption(found, settings))


#: Settings that a queue has or not: field, why it matters, what a repair touches.
_PLAIN: Sequence[tuple[str, str, str]] = (
    (
        "visibility_timeout",
        "what a consumer has not deleted by then is received again",
        "applies to messages already there from their next receive on; those in flight keep what they have",
    ),
    (
        "receive_wait",
        "a receive that waits costs fewer requests, and misses no message",
        "touches no message, only how long receives wait",
    ),
    (
        "delay",
        "what others send without a delay of its own becomes visible after it",
        "of a standard queue applies to messages sent from now on, not to those already there",
    ),
)


def _kept(found: Attributes, settings: QueueSettings) -> Iterator[Difference]:
    kept, wanted = _number(found, "MessageRetentionPeriod"), settings.seconds("retention")
    if wanted is not None and kept != wanted:
        yield Difference(
            "MessageRetentionPeriod",
            wanted,
            kept,
            "a message that is not read within so many seconds of its send, its delay included, is lost",
            _KEPT_LONGER if wanted > kept else _KEPT_SHORTER,
            {"MessageRetentionPeriod": str(wanted)},
        )
    elif kept < MIN_RETENTION:
        yield Difference(
            "MessageRetentionPeriod",
            f"at least {MIN_RETENTION}",
            kept,
            "it counts from the send, so a message may be lost while it is delayed",
            _KEPT_LONGER,
            {"MessageRetentionPeriod": str(RETENTION)},
        )


def _encryption(found: Attributes, settings: QueueSettings) -> Iterator[Difference]:
    key = found.get("KmsMasterKeyId", "")
    current = key or (SSE_SQS if found.get("SqsManagedSseEnabled") == "true" else "none")
    wanted = settings.encryption
    if wanted is None or current == wanted or _same_key(current, wanted):
        return
    # a queue has one kind of encryption at a time
    off = {"KmsMasterKeyId": ""} if key and wanted == SSE_SQS else {}
    yield Difference(
        "encryption",
        wanted,
        current,
        "bodies are stored otherwise than you want them to be",
        "applies to messages sent from now on; those already there stay as they were stored",
        {**encryption_attributes(settings), **off},
    )


def _same_key(one: str, other: str) -> bool:
    """Return whether one is the other's ARN; SQS returns a key in the form in which it was set."""
    return any(
        whole.startswith("arn:") and whole.endswith((f"/{part}", f":{part}"))
        for whole, part in ((one, other), (other, one))
    )


def _redrive(found: Attributes, dead_letter: str, receives: int, target: str | None) -> Iterator[Difference]:
    policy = redrive_policy(found)
    current = None if policy is None else (policy[0].rsplit(":", 1)[-1], policy[1])
    if current == (dead_letter, receives):
        return
    yield Difference(
        "RedrivePolicy",
        f"{dead_letter} after {receives} receives",
        "none" if current is None else f"{current[0]} after {current[1]} receives",
        "what no consumer can read is received again until it expires, or lands where nobody looks",
        "also applies to messages already there: those received that often go at their next receive",
        {} if target is None else {"RedrivePolicy": policy_text(target, receives)},
    )


def _number(found: Attributes, name: str) -> int:
    return int(found.get(name, 0))
