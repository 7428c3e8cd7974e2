"""Messages of a dead-letter queue, moved back to the queue that they came from.

SQS does it by itself where only one queue uses the dead-letter queue. Else, and where SQS offers no such task, they
are received, sent and deleted here, in that order: whatever stops it, each message is in one of the queues or in both,
never in neither. Either way they are new messages to SQS, with a retention and a receive count of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from botocore.exceptions import BotoCoreError, ClientError

from airflow_delayed.sqs.entries import MAX_ENTRIES, attributes_size
from airflow_delayed.sqs.post import Addressed, Poster

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient
    from mypy_boto3_sqs.type_defs import MessageTypeDef

    from airflow_delayed.sqs.entries import Entry

#: Seconds that a message is hidden from others while it is moved.
HIDDEN = 120
#: Seconds that a receive waits: it has to ask all of SQS's servers, or it may find nothing where there is something.
WAIT = 2
#: What an endpoint answers that has no such request.
_NO_TASKS = frozenset({"InvalidAction", "UnsupportedOperation", "AWS.SimpleQueueService.UnsupportedOperation"})


@dataclass(slots=True)
class Redriven:
    """What became of a dead-letter queue's messages.

    :param task: the handle of SQS's own task, which goes on by itself; None: they were moved here, and it is done.
    :param moved: were sent back and deleted.
    :param undeleted: were sent back, and are in the dead-letter queue still: duplicates.
    :param others: stay there: they came from another queue, were sent to the dead-letter queue itself, or were sent
        after this began, such as what was sent back and failed again.
    :param failures: the ids, by SQS, of messages that could not be sent, each with the reason; they stay there.
    """

    task: str | None = None
    moved: int = 0
    undeleted: int = 0
    others: int = 0
    failures: dict[str, str] = field(default_factory=dict)


def start_task(client: SQSClient, source_url: str, source_arn: str, destination_arn: str) -> str | None:
    """Let SQS move all messages, and return the task's handle; None where it cannot, or would move too much.

    :raises botocore.exceptions.ClientError: SQS refused.
    """
    try:
        users = client.list_dead_letter_source_queues(QueueUrl=source_url, MaxResults=2)
        name = destination_arn.rsplit(":", 1)[-1]
        if [url.rsplit("/", 1)[-1] for url in users.get("queueUrls", ())] != [name]:
            return None
        # without a destination each message goes where it came from
        return client.start_message_move_task(SourceArn=source_arn)["TaskHandle"]
    except ClientError as error:
        if error.response.get("Error", {}).get("Code") in _NO_TASKS:
            return None
        raise


@dataclass(slots=True)
class Mover:
    """Moves messages one batch after another. Every message is taken once, also if it comes back meanwhile."""

    client: SQSClient
    poster: Poster
    source_url: str
    destination_url: str
    destination_arn: str
    #: SQS's ids of messages that stay, with their receipt handles.
    _left: dict[str, str] = field(default_factory=dict)
    #: Milliseconds since 1970, by the broker.
    _began: float = math.inf

    def run(self) -> Redriven:
        """Move all that is visible, and return what became of it.

        :raises botocore.exceptions.ClientError: SQS refused; nothing is lost.
        :raises botocore.exceptions.BotoCoreError: SQS could not be reached; nothing is lost.
        """
        done = Redriven()
        known = 0
        try:
            while received := self._receive():
                fresh = [message for message in received if message["MessageId"] not in self._left]
                self._left.update((message["MessageId"], message["ReceiptHandle"]) for message in received)
                self._move(fresh, done)
                # what stays becomes visible again if this takes long; seen all once more, there is nothing else
                known = 0 if fresh else known + len(received)
                if known > len(self._left):
                    break
        finally:
            self._release()
        return done

    def _receive(self) -> Sequence[MessageTypeDef]:
        answer = self.client.receive_message(
            QueueUrl=self.source_url,
            MaxNumberOfMessages=MAX_ENTRIES,
            WaitTimeSeconds=WAIT,
            VisibilityTimeout=HIDDEN,
            MessageAttributeNames=["All"],
            MessageSystemAttributeNames=[
                "DeadLetterQueueSourceArn",
                "AWSTraceHeader",
                "MessageGroupId",
                "SentTimestamp",
            ],
        )
        if self._began == math.inf and (date := answer["ResponseMetadata"]["HTTPHeaders"].get("date")):
            # it tells whole seconds
            self._began = (parsedate_to_datetime(date).timestamp() + 1) * 1000
        return answer.get("Messages", [])

    def _move(self, received: Sequence[MessageTypeDef], done: Redriven) -> None:
        ours = [message for message in received if self._is_ours(message)]
        done.others += len(received) - len(ours)
        outcomes = self.poster.post(ours, self._address)
        for outcome in outcomes:
            if outcome.fault is not None:
                done.failures[outcome.item["MessageId"]] = str(outcome.fault)
        sent = [outcome.item for outcome in outcomes if outcome.fault is None]
        undeleted = self._delete(sent)
        done.undeleted += undeleted
        done.moved += len(sent) - undeleted

    def _is_ours(self, message: MessageTypeDef) -> bool:
        system = message.get("Attributes", {})
        # else what fails at once would go round and round
        before = int(system.get("SentTimestamp", 0)) < self._began
        return before and system.get("DeadLetterQueueSourceArn") == self.destination_arn

    def _address(self, message: MessageTypeDef) -> Addressed:
        system = message.get("Attributes", {})
        attributes = message.get("MessageAttributes", {})
        entry: Entry = {
            "Id": "",
            "MessageBody": message["Body"],
            "MessageAttributes": attributes,
            # 0 is said: the queue may have a delay of its own, and these have waited
            "DelaySeconds": 0,
        }
        if "AWSTraceHeader" in system:
            entry["MessageSystemAttributes"] = {
                "AWSTraceHeader": {"DataType": "String", "StringValue": system["AWSTraceHeader"]}
            }
        if "MessageGroupId" in system:
            entry["MessageGroupId"] = system["MessageGroupId"]
        return Addressed(self.destination_url, entry, len(message["Body"].encode()) + attributes_size(attributes))

    def _delete(self, messages: Sequence[MessageTypeDef]) -> int:
        """Delete what was sent, what fails once more; return how many are there still."""
        for message in messages:
            self._left.pop(message["MessageId"], None)
        for _ in range(2):
            if not messages:
                break
            answer = self.client.delete_message_batch(
                QueueUrl=self.source_url,
                Entries=[
                    {"Id": str(position), "ReceiptHandle": message["ReceiptHandle"]}
                    for position, message in enumerate(messages)
                ],
            )
            messages = [messages[int(entry["Id"])] for entry in answer.get("Failed", ())]
        return len(messages)

    def _release(self) -> None:
        """Make visible again what stays; what does not become so does by itself, a little later."""
        handles = list(self._left.values())
        with suppress(BotoCoreError, ClientError):
            for start in range(0, len(handles), MAX_ENTRIES):
                self.client.change_message_visibility_batch(
                    QueueUrl=self.source_url,
                    Entries=[
                        {"Id": str(position), "ReceiptHandle": handle, "VisibilityTimeout": 0}
                        for position, handle in enumerate(handles[start : start + MAX_ENTRIES])
                    ],
                )
