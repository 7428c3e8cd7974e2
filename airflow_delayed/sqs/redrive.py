"""Redrive: messages of a dead-letter queue are moved back to the queue that they came from.

SQS has a task for this, which is used where only one queue has the dead-letter queue. Else, and where SQS offers no
task, messages are received, sent and deleted here, in that order: wherever it stops, each message is in one of the
queues or in both, never in neither. Either way they are new messages to SQS, with a new retention and receive count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from botocore.exceptions import BotoCoreError, ClientError

from airflow_delayed.delivery import Finding, State, TopologyReport
from airflow_delayed.errors import TopologyError
from airflow_delayed.sqs import queues
from airflow_delayed.sqs.admin import QueueAdmin
from airflow_delayed.sqs.batch import AddressedEntry, BatchSender, change_visibility, delete_batch
from airflow_delayed.sqs.client import translated
from airflow_delayed.sqs.entries import MAX_ENTRIES, attributes_size
from airflow_delayed.sqs.settings import redrive_policy

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient
    from mypy_boto3_sqs.type_defs import MessageTypeDef

    from airflow_delayed.sqs.entries import Entry

#: Seconds that a message is hidden from others while it is moved.
HIDDEN = 120
#: Seconds that a receive waits: it has to ask all of SQS's servers, or it may find nothing where there is something.
WAIT = 2
#: Errors of an endpoint that has no such request.
_NO_TASKS = frozenset({"InvalidAction", "UnsupportedOperation", "AWS.SimpleQueueService.UnsupportedOperation"})


@dataclass(slots=True)
class RedriveResult:
    """The result of moving a dead-letter queue's messages back.

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
    """Have SQS move all messages, and return the task's handle; None where it cannot, or would move too many.

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


def redrive(admin: QueueAdmin, sender: BatchSender, destination: str, *, by_sqs: bool) -> RedriveResult:
    """Move the messages of a destination's dead-letter queue back; see SqsDelayHook.redrive."""
    there = admin.destination(destination)
    policy = redrive_policy(there.attributes)
    if policy is None:
        why = "messages that nobody could read stay in it; set dead_letter_queue= and max_receive_count="
        raise _missing(admin.conn_id, f"for dead letters of {there.name}", why=why)
    dead = admin.by_arn(policy[0])
    if dead is None:
        raise _missing(admin.conn_id, policy[0].rsplit(":", 1)[-1])
    arn = there.attributes["QueueArn"]
    with translated(admin.conn_id, f"move messages of {dead.name} back to {there.name}"):
        task = start_task(admin.client, dead.url, policy[0], arn) if by_sqs else None
        if task is not None:
            return RedriveResult(task=task)
        return DeadLetterMover(admin.client, sender, dead.url, there.url, arn).run()


def _missing(conn_id: str, name: str, *, why: str | None = None) -> TopologyError:
    finding = Finding(state=State.MISSING, resource=queues.resource(name), why=why)
    return TopologyError(conn_id, TopologyReport((finding,)))


@dataclass(slots=True)
class DeadLetterMover:
    """Moves messages one batch after another. Every message is taken once, also if it comes back meanwhile."""

    client: SQSClient
    sender: BatchSender
    source_url: str
    destination_url: str
    destination_arn: str
    #: SQS's ids of messages that stay, with their receipt handles.
    _left: dict[str, str] = field(default_factory=dict)
    #: Milliseconds since 1970, by the broker.
    _began: float = math.inf

    def run(self) -> RedriveResult:
        """Move all visible messages.

        :raises botocore.exceptions.ClientError: SQS refused; nothing is lost.
        :raises botocore.exceptions.BotoCoreError: SQS could not be reached; nothing is lost.
        """
        done = RedriveResult()
        known = 0
        try:
            while received := self._receive():
                fresh = [message for message in received if message["MessageId"] not in self._left]
                self._left.update((message["MessageId"], message["ReceiptHandle"]) for message in received)
                self._move(fresh, done)
                # messages that stay become visible again if this takes long; all received once more, no others are left
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
            # the header has whole seconds
            self._began = (parsedate_to_datetime(date).timestamp() + 1) * 1000
        return answer.get("Messages", [])

    def _move(self, received: Sequence[MessageTypeDef], done: RedriveResult) -> None:
        own = [message for message in received if self._is_own(message)]
        done.others += len(received) - len(own)
        outcomes = list(self.sender.send_each(own, self._address))
        for outcome in outcomes:
            if outcome.fault is not None:
                done.failures[outcome.item["MessageId"]] = str(outcome.fault)
        sent = [outcome.item for outcome in outcomes if outcome.fault is None]
        undeleted = self._delete(sent)
        done.undeleted += undeleted
        done.moved += len(sent) - undeleted

    def _is_own(self, message: MessageTypeDef) -> bool:
        system = message.get("Attributes", {})
        # a message that fails again at once would be moved for ever
        before = int(system.get("SentTimestamp", 0)) < self._began
        return before and system.get("DeadLetterQueueSourceArn") == self.destination_arn

    def _address(self, message: MessageTypeDef) -> AddressedEntry:
        system = message.get("Attributes", {})
        attributes = message.get("MessageAttributes", {})
        entry: Entry = {
            "Id": "",
            "MessageBody": message["Body"],
            "MessageAttributes": attributes,
            # without it the queue's own delay would count, and these messages have waited already
            "DelaySeconds": 0,
        }
        if "AWSTraceHeader" in system:
            entry["MessageSystemAttributes"] = {
                "AWSTraceHeader": {"DataType": "String", "StringValue": system["AWSTraceHeader"]}
            }
        if "MessageGroupId" in system:
            entry["MessageGroupId"] = system["MessageGroupId"]
        return AddressedEntry(self.destination_url, entry, len(message["Body"].encode()) + attributes_size(attributes))

    def _delete(self, messages: Sequence[MessageTypeDef]) -> int:
        """Delete messages that were sent back, failed deletes once more; return how many were not deleted."""
        for message in messages:
            self._left.pop(message["MessageId"], None)
        for _ in range(2):
            if not messages:
                break
            messages = delete_batch(self.client, self.source_url, messages)
        return len(messages)

    def _release(self) -> None:
        """Make the messages that stay visible again; where that fails, they become so by themselves a little later."""
        with suppress(BotoCoreError, ClientError):
            change_visibility(self.client, self.source_url, dict.fromkeys(self._left.values(), 0))
