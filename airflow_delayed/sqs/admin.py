"""The queues of a connection: created, compared with their planned settings, repaired, and redriven.

A redrive moves messages of a dead-letter queue back to the queue that they came from. SQS has a task for this, which is
used where only one queue has the dead-letter queue. Else, and where SQS offers no task, messages are received, sent and
deleted here, in that order: wherever it stops, each message is in one of the queues or in both, never in neither.
Either way they are new messages to SQS, with a new retention and receive count.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from botocore.exceptions import BotoCoreError, ClientError

from airflow_delayed.delivery import Finding, State, TopologyReport
from airflow_delayed.errors import AccessDenied, LimitExceeded, TopologyError, TransportUnavailable
from airflow_delayed.sqs import queues
from airflow_delayed.sqs.batch import AddressedEntry, BatchSender, change_visibility, delete_batch
from airflow_delayed.sqs.client import QueueUrls, is_missing, translated
from airflow_delayed.sqs.entries import MAX_BYTES, MAX_ENTRIES, attributes_size, string
from airflow_delayed.sqs.settings import (
    STORE_INSTEAD,
    Attributes,
    Difference,
    QueueSettings,
    compare_dead_letter_queue,
    compare_delay_queue,
    compare_destination,
    dead_letter_attributes,
    delay_queue_attributes,
    destination_attributes,
    redrive_policy,
)
from airflow_delayed.sqs.stats import QueueDepths, depth_findings, depth_of

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient
    from mypy_boto3_sqs.type_defs import MessageTypeDef

    from airflow_delayed.sqs.entries import Entry

log = logging.getLogger(__name__)

#: Stands for the ARN of a dead-letter queue that is only planned.
_PLANNED = "planned"


@dataclass(frozen=True, slots=True)
class ExistingQueue:
    """A queue that exists, with its settings and counts."""

    name: str
    url: str
    attributes: Attributes


def _depths(there: ExistingQueue, dead: ExistingQueue | None, fifo: ExistingQueue | None = None) -> QueueDepths:
    policy = redrive_policy(there.attributes)
    return QueueDepths(
        destination=depth_of(there.name, there.attributes),
        delay_queue=depth_of(fifo.name, fifo.attributes) if fifo else None,
        dead_letter_queue=depth_of(dead.name, dead.attributes) if dead else None,
        max_receive_count=policy[1] if policy else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallMode:
    """Whether missing queues are created, and differing ones repaired; by default nothing is changed."""

    make_delay_queues: bool = False
    #: Destinations, and their dead-letter queues.
    make_others: bool = False
    repair: bool = False
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class QueueAdmin:
    """Reads the settings of queues, and changes them."""

    conn_id: str
    client: SQSClient
    urls: QueueUrls

    def look(self, destination: str, fifo: bool = False) -> ExistingQueue | None:
        """Return a queue with its settings and counts, or None if it does not exist."""
        name, url = self.urls.name(destination, fifo), self.urls.url(destination, fifo)
        if url is None:
            return None
        attributes = self.attributes(name, url)
        if attributes is None:
            self.urls.forget(destination, fifo)
            return None
        return ExistingQueue(name, url, attributes)

    def largest(self, destination: str) -> int:
        """Return the bytes of the largest message that both the delay queue and the destination take."""
        both = [queue for fifo in (True, False) if (queue := self.look(destination, fifo))]
        sizes = (int(queue.attributes.get("MaximumMessageSize", MAX_BYTES)) for queue in both)
        return min(sizes, default=MAX_BYTES)

    def destination(self, destination: str) -> ExistingQueue:
        """Return a destination with its settings and counts."""
        if there := self.look(destination):
            return there
        raise self.urls.missing(destination)

    def by_arn(self, arn: str) -> ExistingQueue | None:
        """Return the queue of an ARN, which need not have the connection's prefix, or None if it does not exist."""
        account, name = arn.split(":")[-2:]
        with translated(self.conn_id, f"look up queue {name}"):
            try:
                url = self.client.get_queue_url(QueueName=name, QueueOwnerAWSAccountId=account)["QueueUrl"]
            except ClientError as error:
                if is_missing(error):
                    return None
                raise
        attributes = self.attributes(name, url)
        return None if attributes is None else ExistingQueue(name, url, attributes)

    def depths(self, destination: str) -> QueueDepths:
        """Return the counts of a destination, its delay queue and its dead-letter queue."""
        there = self.destination(destination)
        return _depths(there, self._dead_letter_queue(there), self.look(destination, True))

    def _dead_letter_queue(self, there: ExistingQueue) -> ExistingQueue | None:
        policy = redrive_policy(there.attributes)
        return self.by_arn(policy[0]) if policy else None

    def attributes(self, name: str, url: str) -> Attributes | None:
        """Return a queue's settings and counts, or None if it does not exist."""
        with translated(self.conn_id, f"read the settings of queue {name}"):
            try:
                answer = self.client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
            except ClientError as error:
                if is_missing(error):
                    return None
                raise
        return {str(key): value for key, value in answer.items()}

    def install(
        self, destinations: Iterable[str], settings: QueueSettings, mode: InstallMode, *, far: bool
    ) -> list[Finding]:
        """Compare queues, and create and repair them as far as ``mode`` allows."""
        names = list(dict.fromkeys(destinations))
        for destination in names:
            if destination.endswith(queues.FIFO):
                raise LimitExceeded(
                    "destination", f"{destination} is a FIFO queue, whose messages cannot have delays of their own"
                )
        found = {destination: self.look(destination) for destination in names}
        findings, target = self._dead_letter(settings, mode, found.values()) if names else ([], None)
        for destination, there in found.items():
            if there is None and (foreign := self.urls.foreign(destination)):
                findings.append(foreign)
                continue
            findings += self._destination(destination, there, settings, mode, target)
            if far:
                findings += self.delay_queue(destination, settings, mode)
            if there and mode == InstallMode():
                depths = (replace(one, destination=destination) for one in self._depth_findings(there))
                findings += (one for one in depths if one not in findings)
        return findings

    def _depth_findings(self, there: ExistingQueue) -> Iterator[Finding]:
        try:
            dead = self._dead_letter_queue(there)
        except (AccessDenied, TransportUnavailable):
            # a sender need not have rights on it, nor wait for it
            dead = None
        return depth_findings(_depths(there, dead))

    def delay_queue(self, destination: str, settings: QueueSettings, mode: InstallMode) -> list[Finding]:
        """Compare, make or repair the delay queue of one destination."""
        there = self.look(destination, True)
        if there is None:
            name = self.urls.name(destination, True)
            if mode.make_delay_queues:
                return [self._create(name, delay_queue_attributes(settings), destination, mode)]
            # a delay queue that is missing does not make its destination a missing one
            why = f"what is due in over {queues.MAX_DELAY} s waits in it; {STORE_INSTEAD}"
            return [Finding(state=State.MISSING, resource=queues.resource(name), why=why)]
        findings = self._repair(there, compare_delay_queue(there.attributes, settings), destination, mode)
        if findings[0].state is State.DIFFERS:
            findings[0] = replace(findings[0], why=f"{findings[0].why}; {STORE_INSTEAD}")
        return findings

    def error_queue(self, name: str) -> str:
        """Return the URL of the queue for messages that cannot be delivered; it is created if it does not exist."""
        url = self.urls.url(name)
        if url is None:
            if self.urls.foreign(name):
                raise self.urls.missing(name)
            queue = self.urls.name(name)
            with translated(self.conn_id, f"create queue {queue}"):
                # it keeps messages for as long as SQS can
                self.client.create_queue(
                    QueueName=queue, Attributes={"MessageRetentionPeriod": str(queues.DELAY_RETENTION)}
                )
            log.warning("made queue %s, for messages that cannot be delivered", queue)
            url = self.urls.existing(name)
        return url

    def _destination(
        self,
        destination: str,
        there: ExistingQueue | None,
        settings: QueueSettings,
        mode: InstallMode,
        target: str | None,
    ) -> list[Finding]:
        if there is None:
            name = self.urls.name(destination, False)
            if mode.make_others:
                return [self._create(name, destination_attributes(settings, target), destination, mode)]
            return [Finding(state=State.MISSING, resource=queues.resource(name), destination=destination)]
        dead_letter = settings.dead_letter_queue and self.urls.name(settings.dead_letter_queue, False)
        differences = compare_destination(there.attributes, settings, dead_letter=dead_letter, target=target)
        return self._repair(there, differences, destination, mode)

    def _dead_letter(
        self, settings: QueueSettings, mode: InstallMode, destinations: Iterable[ExistingQueue | None]
    ) -> tuple[list[Finding], str | None]:
        wanted = settings.dead_letter_queue
        if wanted is None:
            return [], None
        there, name = self.look(wanted), self.urls.name(wanted, False)
        if there is None:
            if foreign := self.urls.foreign(wanted):
                return [replace(foreign, destination=None)], None
            if not mode.make_others:
                return [Finding(state=State.MISSING, resource=queues.resource(name))], None
            made = self._create(name, dead_letter_attributes(settings), None, mode)
            there = None if mode.dry_run else self.look(wanted)
            return [made], there.attributes["QueueArn"] if there else _PLANNED
        kept = [int(one.attributes["MessageRetentionPeriod"]) for one in destinations if one]
        retention = settings.seconds("retention") or max(kept, default=queues.RETENTION)
        differences = compare_dead_letter_queue(there.attributes, settings, destination_retention=retention)
        return self._repair(there, differences, None, mode), there.attributes["QueueArn"]

    def _create(self, name: str, attributes: Attributes, destination: str | None, mode: InstallMode) -> Finding:
        if not mode.dry_run:
            with translated(self.conn_id, f"create queue {name}"):
                self.client.create_queue(QueueName=name, Attributes=dict(attributes))  # type: ignore[arg-type]
        state = State.PLANNED if mode.dry_run else State.CREATED
        return Finding(state=state, resource=queues.resource(name), destination=destination)

    def _repair(
        self, there: ExistingQueue, differences: Sequence[Difference], destination: str | None, mode: InstallMode
    ) -> list[Finding]:
        if not differences:
            return [Finding(state=State.OK, resource=queues.resource(there.name), destination=destination)]
        changes = {name: value for one in differences for name, value in one.attributes.items()} if mode.repair else {}
        if changes and not mode.dry_run:
            with translated(self.conn_id, f"change the settings of queue {there.name}"):
                self.client.set_queue_attributes(QueueUrl=there.url, Attributes=changes)  # type: ignore[arg-type]
        done = State.WOULD_REPAIR if mode.dry_run else State.REPAIRED
        return [
            one.finding(there.name, destination, done if mode.repair and one.attributes else State.DIFFERS)
            for one in differences
        ]


#: Seconds that a message is hidden from others while it is moved.
MOVING_SECONDS = 120
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
    """Have SQS move all messages, and return the task's handle; None where it cannot, or would move too many."""
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
        """Move all visible messages."""
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
            VisibilityTimeout=MOVING_SECONDS,
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
            entry["MessageSystemAttributes"] = {"AWSTraceHeader": string(system["AWSTraceHeader"])}
        if "MessageGroupId" in system:
            entry["MessageGroupId"] = system["MessageGroupId"]
        return AddressedEntry(self.destination_url, entry, len(message["Body"].encode()) + attributes_size(attributes))

    def _delete(self, messages: Sequence[MessageTypeDef]) -> int:
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
