"""What a role has to be allowed to do: the one source for the docs and for the error when something is denied.

Batch requests have no IAM actions of their own (Service Authorization Reference, "Actions for Amazon SQS"). A queue
that is encrypted with a KMS key needs actions on the key too ("Amazon SQS key management").
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient

DESTINATION, DELAY_QUEUE, DEAD_LETTER_QUEUE = "destination", "delay queue", "dead-letter queue"
ERROR_QUEUE = "error queue"

#: What a sender and a receiver need of the KMS key of an encrypted queue.
KMS_SEND = ("kms:GenerateDataKey", "kms:Decrypt")
KMS_RECEIVE = ("kms:Decrypt",)


@dataclass(frozen=True, slots=True)
class Need:
    """IAM actions that one method of SqsDelayHook needs on one kind of queue."""

    method: str
    queue: str
    actions: Sequence[str]
    #: When; empty: always.
    when: str = ""


def _sqs(*names: str) -> tuple[str, ...]:
    return tuple(f"sqs:{name}" for name in names)


_LOOK = _sqs("GetQueueUrl", "GetQueueAttributes")

#: Every IAM action that is needed, by method and queue.
NEEDS: Sequence[Need] = (
    Need("verify", DESTINATION, _LOOK),
    Need("verify", DELAY_QUEUE, _LOOK, "unrestricted_delay is on"),
    Need("verify", DEAD_LETTER_QUEUE, _LOOK, "settings name one"),
    Need("install", DESTINATION, _LOOK),
    Need("install", DESTINATION, _sqs("CreateQueue"), "create_destinations=True"),
    Need("install", DESTINATION, _sqs("SetQueueAttributes"), "repair=True"),
    Need("install", DELAY_QUEUE, (*_LOOK, *_sqs("CreateQueue")), "unrestricted_delay is on"),
    Need("install", DELAY_QUEUE, _sqs("SetQueueAttributes"), "unrestricted_delay is on and repair=True"),
    Need("install", DEAD_LETTER_QUEUE, _LOOK, "settings name one"),
    Need("install", DEAD_LETTER_QUEUE, _sqs("CreateQueue"), "settings name one and create_destinations=True"),
    Need("install", DEAD_LETTER_QUEUE, _sqs("SetQueueAttributes"), "settings name one and repair=True"),
    Need("send", DESTINATION, _sqs("GetQueueUrl", "SendMessage")),
    Need("send", DESTINATION, _sqs("GetQueueAttributes"), "a message is due in over 900 s"),
    Need("send", DELAY_QUEUE, (*_LOOK, *_sqs("SendMessage")), "a message is due in over 900 s"),
    Need("cycle", DESTINATION, _sqs("GetQueueUrl", "SendMessage")),
    Need(
        "cycle",
        DELAY_QUEUE,
        _sqs(
            "GetQueueUrl",
            "GetQueueAttributes",
            "ReceiveMessage",
            "SendMessage",
            "DeleteMessage",
            "ChangeMessageVisibility",
        ),
    ),
    Need(
        "cycle",
        ERROR_QUEUE,
        _sqs("GetQueueUrl", "CreateQueue", "SendMessage"),
        "a message cannot be read, or is refused for good",
    ),
    Need("life", DESTINATION, _LOOK),
    Need("life", DELAY_QUEUE, _LOOK),
    Need("life", DEAD_LETTER_QUEUE, _LOOK, "the destination has one"),
    Need("extend_visibility", DESTINATION, _sqs("GetQueueUrl", "ChangeMessageVisibility")),
    Need("redrive", DESTINATION, (*_LOOK, *_sqs("SendMessage"))),
    Need(
        "redrive",
        DEAD_LETTER_QUEUE,
        (*_LOOK, *_sqs("ListDeadLetterSourceQueues", "StartMessageMoveTask", "ReceiveMessage", "DeleteMessage")),
    ),
    Need("redrive", DEAD_LETTER_QUEUE, _sqs("ChangeMessageVisibility"), "SQS does not move them itself"),
    Need("test_connection", "*", _sqs("ListQueues")),
)

#: Where the name differs from that of the request.
_ACTIONS: Mapping[str, str] = {
    "SendMessageBatch": "SendMessage",
    "DeleteMessageBatch": "DeleteMessage",
    "ChangeMessageVisibilityBatch": "ChangeMessageVisibility",
}
#: Where an error keeps the queue of its request.
_QUEUE = "airflow_delayed.queue"
#: The queue in the text of an answer.
_ARN = re.compile(r"\barn:aws[\w-]*:sqs:[\w-]*:\d*:([\w.-]*[\w-])")


def is_denied(error: ClientError) -> bool:
    """Return whether an error says that a role may not do something; of SQS or of KMS."""
    return "AccessDenied" in error.response.get("Error", {}).get("Code", "")


def denied_actions(error: ClientError) -> tuple[str, ...]:
    """Return the IAM actions that an answer says are not allowed."""
    request = _ACTIONS.get(error.operation_name, error.operation_name)
    if "kms" in error.response.get("Error", {}).get("Code", "").lower():
        return KMS_SEND if request == "SendMessage" else KMS_RECEIVE
    return (f"sqs:{request}",)


def name_queues(client: SQSClient) -> None:
    """Let the errors of a client say which queue they are about: SQS's own answer need not, and a batch has many."""

    def note(params: Mapping[str, Any], context: dict[str, Any], **_: object) -> None:
        context[_QUEUE] = params.get("QueueUrl") or params.get("QueueName")

    def tell(parsed: dict[str, Any], context: Mapping[str, Any], **_: object) -> None:
        if "Error" in parsed and context.get(_QUEUE):
            parsed["Error"][_QUEUE] = context[_QUEUE]

    # with an id, so that a client that comes twice is not told twice
    client.meta.events.register("before-parameter-build.sqs", note, unique_id="airflow-delayed-note-queue")
    client.meta.events.register("after-call.sqs", tell, unique_id="airflow-delayed-tell-queue")


def denied_queue(error: ClientError) -> str | None:
    """Return the name of the queue that an answer is about, if that is known."""
    problem = error.response.get("Error", {})
    if named := problem.get(_QUEUE):
        return str(named).rsplit("/", 1)[-1]
    found = _ARN.search(problem.get("Message", ""))
    return found[1] if found else None
