"""What differs between a queue and what is wanted of it, why it matters, and what a repair does to messages in it.

The demands on a delay queue are NServiceBus's (DelayedMessagesPump.cs): a delivery delay of 900 s, a retention of at
least 4 days, no redrive policy. What a change does to messages that are there already is from AWS's Developer Guide
("Amazon SQS delay queues", "Encryption at rest", "Setting-up dead-letter queue retention") and from SetQueueAttributes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from airflow_delayed.delivery import Finding, State
from airflow_delayed.sqs import queues
from airflow_delayed.sqs.settings import MAX_RETENTION, SSE_SQS, QueueSettings

#: A queue's settings as SQS tells them.
Attributes = Mapping[str, str]

#: What is offered wherever a delay queue is at fault.
STORE_INSTEAD = "or let messages wait in a store (store_conn_id=) instead"

_KEPT_LONGER = "within 15 minutes also applies to messages already there: they are kept longer"
_KEPT_SHORTER = "within 15 minutes also applies to messages already there, and deletes those that are older"


@dataclass(frozen=True, slots=True)
class Difference:
    """One setting that is not as wanted.

    :param why: what happens because of it.
    :param touches: what a repair does to messages already there; None: it cannot be repaired.
    :param attributes: what SetQueueAttributes is told to repair it.
    """

    setting: str
    wanted: object
    found: object
    why: str
    touches: str | None
    attributes: Mapping[str, str] = field(default_factory=dict)

    def finding(self, name: str, destination: str | None, state: State = State.DIFFERS) -> Finding:
        """Return it as part of a report."""
        return Finding(
            state=state,
            resource=queues.resource(name),
            argument=self.setting,
            wanted=self.wanted,
            found=self.found,
            destination=destination,
            why=self.why,
            repair=self.touches,
        )


def compare_delay_queue(found: Attributes, settings: QueueSettings) -> list[Difference]:
    """Return what is wrong with a delay queue."""
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
    if (delay := _number(found, "DelaySeconds")) < queues.MAX_DELAY:
        problems.append(
            Difference(
                "DelaySeconds",
                queues.MAX_DELAY,
                delay,
                f"each message comes back after {delay} s, and every round costs requests",
                "also applies to messages already there: in a FIFO queue they come back later, and none is late",
                {"DelaySeconds": str(queues.MAX_DELAY)},
            )
        )
    if (kept := _number(found, "MessageRetentionPeriod")) < queues.MIN_DELAY_RETENTION:
        problems.append(
            Difference(
                "MessageRetentionPeriod",
                f"at least {queues.MIN_DELAY_RETENTION}",
                kept,
                "messages are lost if no FifoCycleSensor runs for that many seconds",
                _KEPT_LONGER,
                {"MessageRetentionPeriod": str(queues.DELAY_RETENTION)},
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
    """Return what is wrong with a destination.

    :param dead_letter: the name in SQS of the dead-letter queue that is wanted.
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
    for name, attribute, why, touches in _PLAIN:
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
    """Return what is wrong with a dead-letter queue: it has to keep messages for longer than the destination."""
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


def delay_queue_attributes(settings: QueueSettings) -> dict[str, str]:
    """Return the settings that a new delay queue gets; it has no RedrivePolicy."""
    return {
        "FifoQueue": "true",
        "DelaySeconds": str(queues.MAX_DELAY),
        "MessageRetentionPeriod": str(queues.DELAY_RETENTION),
        **_encrypted(settings),
    }


def destination_attributes(settings: QueueSettings, target: str | None = None) -> dict[str, str]:
    """Return the settings that a new destination gets; ``target`` is the ARN of its dead-letter queue."""
    made = {"MessageRetentionPeriod": str(settings.seconds("retention") or queues.RETENTION), **_encrypted(settings)}
    for name, attribute, _, _ in _PLAIN:
        if (wanted := settings.seconds(name)) is not None:
            made[attribute] = str(wanted)
    if target is not None and settings.max_receive_count is not None:
        made["RedrivePolicy"] = _policy(target, settings.max_receive_count)
    return made


def dead_letter_attributes(settings: QueueSettings) -> dict[str, str]:
    """Return the settings that a new dead-letter queue gets."""
    return {"MessageRetentionPeriod": str(MAX_RETENTION), **_encrypted(settings)}


#: Settings that are as wanted or not: field, attribute, why it matters, what a repair touches.
_PLAIN: Sequence[tuple[str, str, str, str]] = (
    (
        "visibility_timeout",
        "VisibilityTimeout",
        "what a consumer has not deleted by then is received again",
        "applies to messages already there from their next receive on; those in flight keep what they have",
    ),
    (
        "receive_wait",
        "ReceiveMessageWaitTimeSeconds",
        "a receive that waits costs fewer requests, and misses no message",
        "touches no message, only how long receives wait",
    ),
    (
        "delay",
        "DelaySeconds",
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
    elif kept < queues.MIN_RETENTION:
        yield Difference(
            "MessageRetentionPeriod",
            f"at least {queues.MIN_RETENTION}",
            kept,
            "it counts from the send, so a message may be lost while it is delayed",
            _KEPT_LONGER,
            {"MessageRetentionPeriod": str(queues.RETENTION)},
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
        {**_encrypted(settings), **off},
    )


def _same_key(one: str, other: str) -> bool:
    """Whether one is the other's ARN; SQS tells a key as it was given."""
    return any(
        whole.startswith("arn:") and whole.endswith((f"/{part}", f":{part}"))
        for whole, part in ((one, other), (other, one))
    )


def _encrypted(settings: QueueSettings) -> dict[str, str]:
    if settings.encryption is None:
        return {}
    if settings.encryption == SSE_SQS:
        return {"SqsManagedSseEnabled": "true"}
    return {"KmsMasterKeyId": settings.encryption}


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
        {} if target is None else {"RedrivePolicy": _policy(target, receives)},
    )


def redrive_policy(found: Attributes) -> tuple[str, int] | None:
    """Return the ARN of a queue's dead-letter queue and its maxReceiveCount, or None if it has none."""
    if not (text := found.get("RedrivePolicy")):
        return None
    policy = json.loads(text)
    return str(policy["deadLetterTargetArn"]), int(policy["maxReceiveCount"])


def _policy(target: str, receives: int) -> str:
    return json.dumps({"deadLetterTargetArn": target, "maxReceiveCount": receives})


def _number(found: Attributes, name: str) -> int:
    return int(found.get(name, 0))
