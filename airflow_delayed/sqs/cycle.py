"""One look at a delay queue: what has waited there for 900 s goes on to its destination, or back for another round.

As in NServiceBus.AmazonSQS (DelayedMessagesPump.cs), but that a failed delete is repeated on the delay queue itself:
the model repeats it on the queue the message was sent to, where it cannot succeed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from botocore.exceptions import BotoCoreError, ClientError

from airflow_delayed.delivery import Clock
from airflow_delayed.message import microseconds
from airflow_delayed.sqs.entries import (
    DELAY_SECONDS,
    MAX_ATTRIBUTES,
    MAX_ENTRIES,
    MESSAGE_ID,
    attributes_size,
    direct,
    string,
    through_fifo,
)
from airflow_delayed.sqs.faults import NO_QUEUE
from airflow_delayed.sqs.hops import LONGEST_DELAY, hop_of, remaining_seconds
from airflow_delayed.sqs.post import Addressed, Outcome, Poster

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient
    from mypy_boto3_sqs.type_defs import MessageTypeDef

    from airflow_delayed.sqs.entries import Attributes


log = logging.getLogger(__name__)

#: How often a delete that failed is repeated, one message at a time.
DELETE_TRIES = 3


@dataclass(slots=True)
class Counts:
    """What one pass did. ``undeleted`` were sent on and could not be removed: they will be sent once more."""

    moved_back: int = 0
    delivered: int = 0
    failed: int = 0
    undeleted: int = 0

    @property
    def moved(self) -> int:
        """How many messages left the place in the delay queue where they were."""
        return self.moved_back + self.delivered


class DestinationGone(Exception):
    """The destination's queue does not exist; its messages are in the delay queue still."""


@dataclass(slots=True)
class FifoCycle:
    """The delay queue of one destination. ``clock`` counts only for messages that were received before."""

    client: SQSClient
    poster: Poster
    fifo_url: str
    destination_url: str
    clock: Clock
    #: SQS ids of messages that could not be sent on in this pass, with their receipt handles.
    _failed: dict[str, str] = field(default_factory=dict)

    def run(self, wait_seconds: int) -> Counts:
        """Send on everything that is visible, and return when nothing more is.

        :param wait_seconds: how long to wait for the first message if there is none: 0 to 20.
        :raises DestinationGone: there is nowhere to deliver to.
        :raises botocore.exceptions.ClientError: SQS refused; nothing is lost.
        :raises botocore.exceptions.BotoCoreError: SQS could not be reached; nothing is lost.
        """
        counts = Counts()
        self._failed.clear()
        try:
            while received := self._receive(wait_seconds):
                # what failed in this pass and is visible again waits for the next pass
                fresh = [message for message in received if message["MessageId"] not in self._failed]
                self._failed.update((message["MessageId"], message["ReceiptHandle"]) for message in received)
                if not fresh:
                    break
                self._move(fresh, counts)
                wait_seconds = min(1, wait_seconds)
        finally:
            counts.failed = len(self._failed)
            self._release()
        return counts

    def remaining(self) -> int:
        """Return about how many messages the delay queue holds: visible, delayed and in flight."""
        found = self.client.get_queue_attributes(
            QueueUrl=self.fifo_url,
            AttributeNames=[
                "ApproximateNumberOfMessages",
                "ApproximateNumberOfMessagesDelayed",
                "ApproximateNumberOfMessagesNotVisible",
            ],
        )["Attributes"]
        return sum(int(count) for count in found.values())

    def _receive(self, wait_seconds: int) -> Sequence[MessageTypeDef]:
        answer = self.client.receive_message(
            QueueUrl=self.fifo_url,
            MaxNumberOfMessages=MAX_ENTRIES,
            WaitTimeSeconds=wait_seconds,
            MessageAttributeNames=["All"],
            MessageSystemAttributeNames=[
                "MessageDeduplicationId",
                "SentTimestamp",
                "ApproximateFirstReceiveTimestamp",
                "ApproximateReceiveCount",
            ],
        )
        return answer.get("Messages", [])

    def _move(self, received: Sequence[MessageTypeDef], counts: Counts) -> None:
        readable = [message for message in received if _delay(message) is not None]
        for message in received:
            if _delay(message) is None:
                log.warning(
                    "SQS message %s in %s has no attribute %s that can be read and stays there; receive and delete it",
                    message["MessageId"],
                    self.fifo_url,
                    DELAY_SECONDS,
                )
        outcomes = self.poster.post(readable, self._address)
        sent = [outcome for outcome in outcomes if outcome.fault is None]
        for outcome in sent:
            self._failed.pop(outcome.item["MessageId"], None)
            if outcome.url == self.fifo_url:
                counts.moved_back += 1
            else:
                counts.delivered += 1
        counts.undeleted += self._delete([outcome.item for outcome in sent])
        self._complain([outcome for outcome in outcomes if outcome.fault])

    def _address(self, message: MessageTypeDef) -> Addressed:
        attributes = cast("Attributes", dict(message.get("MessageAttributes", {})))
        system = message["Attributes"]
        attributes.pop(DELAY_SECONDS, None)
        dedup_id = system["MessageDeduplicationId"]
        if MESSAGE_ID not in attributes and len(attributes) < MAX_ATTRIBUTES - 1:
            attributes[MESSAGE_ID] = string(message["MessageId"])
        hop = hop_of(
            remaining_seconds(
                _delay(message) or 0,
                sent_ms=int(system["SentTimestamp"]),
                first_received_ms=int(system["ApproximateFirstReceiveTimestamp"]),
                receive_count=int(system["ApproximateReceiveCount"]),
                now_ms=microseconds(self.clock()) // 1000,
            )
        )
        size = len(message["Body"].encode()) + attributes_size(message.get("MessageAttributes", {}))
        if hop.through_fifo:
            return Addressed(
                self.fifo_url, through_fifo(message["Body"], attributes, hop.delay_seconds, dedup_id), size
            )
        return Addressed(self.destination_url, direct(message["Body"], attributes, hop.delay_seconds), size)

    def _complain(self, failed: Sequence[Outcome[MessageTypeDef]]) -> None:
        for outcome in failed:
            fault = outcome.fault
            if fault and fault.code in NO_QUEUE:
                raise DestinationGone(self.destination_url)
            log.warning("SQS message %s could not be sent on: %s", outcome.item["MessageId"], fault)

    def _delete(self, messages: Sequence[MessageTypeDef]) -> int:
        """Delete from the delay queue, what fails in the batch one by one; return how many could not be deleted."""
        if not messages:
            return 0
        answer = self.client.delete_message_batch(
            QueueUrl=self.fifo_url,
            Entries=[
                {"Id": str(position), "ReceiptHandle": message["ReceiptHandle"]}
                for position, message in enumerate(messages)
            ],
        )
        left = [messages[int(entry["Id"])] for entry in answer.get("Failed", ())]
        undeleted = [message for message in left if not self._delete_one(message)]
        for message in undeleted:
            log.warning(
                "SQS message %s was sent on and could not be deleted from the delay queue; it will be sent once more",
                message["MessageId"],
            )
        return len(undeleted)

    def _delete_one(self, message: MessageTypeDef) -> bool:
        for _ in range(DELETE_TRIES):
            answer = self.client.delete_message_batch(
                QueueUrl=self.fifo_url, Entries=[{"Id": "0", "ReceiptHandle": message["ReceiptHandle"]}]
            )
            if not answer.get("Failed"):
                return True
        return False

    def _release(self) -> None:
        """Make visible again what could not be sent on; what does not become so does by itself, a little later."""
        handles = list(self._failed.values())
        with suppress(BotoCoreError, ClientError):
            for start in range(0, len(handles), MAX_ENTRIES):
                self.client.change_message_visibility_batch(
                    QueueUrl=self.fifo_url,
                    Entries=[
                        {"Id": str(position), "ReceiptHandle": handle, "VisibilityTimeout": 0}
                        for position, handle in enumerate(handles[start : start + MAX_ENTRIES])
                    ],
                )


def _delay(message: MessageTypeDef) -> int | None:
    """Return the delay in a message's attribute, or None if it has none that can be read."""
    try:
        delay = int(message["MessageAttributes"][DELAY_SECONDS]["StringValue"])
    except (KeyError, ValueError):
        return None
    return delay if delay <= LONGEST_DELAY else None
