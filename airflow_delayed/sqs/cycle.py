"""One look at a delay queue: what has waited there for 900 s goes on to its destination, or back for another round.

As in NServiceBus.AmazonSQS (DelayedMessagesPump.cs), but for four things. A message's own due time counts, so nothing
adds up. A failed delete is repeated on the delay queue; the model repeats it on the queue the message was sent to,
where it cannot succeed. What cannot be sent on is tried again after growing pauses, not at once. And a message that
says neither when it is due nor how long it is to wait goes to an error queue, where the model delivers it at once; so
does a message that its destination refuses for good.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from botocore.exceptions import BotoCoreError, ClientError

from airflow_delayed.delivery import Clock
from airflow_delayed.message import from_microseconds, microseconds
from airflow_delayed.sqs.aside import UNREADABLE, set_aside
from airflow_delayed.sqs.brokerclock import BrokerClock
from airflow_delayed.sqs.counts import Counts, billed
from airflow_delayed.sqs.entries import (
    DELAY_SECONDS,
    DUE_AT,
    MAX_ENTRIES,
    attributes_size,
    direct,
    due_text,
    string,
    through_fifo,
)
from airflow_delayed.sqs.faults import NO_QUEUE, UNACCEPTABLE, fault_of
from airflow_delayed.sqs.hops import LONGEST_DELAY, hop_of, remaining_seconds, seconds_until
from airflow_delayed.sqs.parked import delay_of, due_us_of, fill, is_readable, own_id, sent_ms
from airflow_delayed.sqs.post import TRIES, Addressed, Outcome, Poster
from airflow_delayed.sqs.rounds import never

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient
    from mypy_boto3_sqs.literals import MessageSystemAttributeNameType
    from mypy_boto3_sqs.type_defs import MessageTypeDef

    from airflow_delayed.sqs.entries import Attributes


log = logging.getLogger(__name__)

#: Seconds for which a received message is hidden, so also how late it may be if this process dies. SQS's own default.
VISIBILITY = 30
#: Seconds until a message that could not be sent on is visible again: the first time, and at most.
FIRST_BACKOFF = 5
LONGEST_BACKOFF = 300
#: Times that a message is received before it goes to the error queue because a queue refuses it for good: after about
#: twenty minutes, in which a queue that was made too small can be mended.
REFUSALS = 10
#: Seconds for which SQS takes a message with the same deduplication id for a copy, and drops it; one more is taken for
#: the broker's machines, whose clocks need not agree.
SAME_WINDOW = 301

#: How many messages that were sent on and not deleted are remembered.
_MAX_REMEMBERED = 10_000
_SYSTEM: Sequence[MessageSystemAttributeNameType] = (
    "MessageDeduplicationId",
    "SentTimestamp",
    "ApproximateFirstReceiveTimestamp",
    "ApproximateReceiveCount",
)


class DestinationGone(Exception):
    """The destination's queue does not exist; its messages are in the delay queue still."""


def backoff_seconds(receive_count: int) -> int:
    """Return for how long a message that could not be sent on stays hidden: 5 s, then twice as long, up to 300 s."""
    return min(FIRST_BACKOFF << min(max(0, receive_count - 1), 16), LONGEST_BACKOFF)


def _is_refused_for_good(outcome: Outcome[MessageTypeDef]) -> bool:
    count = int(outcome.item["Attributes"]["ApproximateReceiveCount"])
    return outcome.fault is not None and outcome.fault.code in UNACCEPTABLE and count >= REFUSALS


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where a message is going: when it is due (microseconds since 1970), and its delay if it goes there directly."""

    due_us: int
    direct: int | None


@dataclass(slots=True)
class FifoCycle:
    """The delay queue of one destination.

    ``clock`` counts only for messages that were received before, and only where the broker does not tell the time.
    ``error_url`` is asked for when it is needed, and may raise a DelayedError.
    """

    client: SQSClient
    poster: Poster
    fifo_url: str
    destination_url: str
    error_url: Callable[[], str]
    clock: Clock
    now: BrokerClock = field(default_factory=BrokerClock)
    #: Received and not yet dealt with: SQS ids and receipt handles.
    _held: dict[str, str] = field(default_factory=dict)
    #: SQS ids of messages that were sent on and are in the delay queue still.
    _sent_on: dict[str, None] = field(default_factory=dict)
    _plans: dict[str, _Plan] = field(default_factory=dict)

    def run(self, wait_seconds: int, stop: Callable[[], bool] = never) -> Counts:
        """Send on everything that is visible, and return when nothing more is.

        :param wait_seconds: how long to wait for the first message if there is none: 0 to 20.
        :param stop: asked before each batch; what was received and not yet sent on becomes visible again at once.
        :raises DestinationGone: there is nowhere to deliver to.
        :raises botocore.exceptions.ClientError: SQS refused; nothing is lost.
        :raises botocore.exceptions.BotoCoreError: SQS could not be reached; nothing is lost.
        """
        counts = Counts()
        before = self.poster.requests.copy()
        self._held.clear()
        try:
            while not stop() and (received := self._receive(wait_seconds, counts)):
                self._held.update((message["MessageId"], message["ReceiptHandle"]) for message in received)
                if stop():
                    break
                self._move(received, counts)
                wait_seconds = min(1, wait_seconds)
        finally:
            self._release(dict.fromkeys(self._held.values(), 0), counts)
            spent = self.poster.requests - before
            counts.fifo_requests += spent.pop(self.fifo_url, 0)
            counts.standard_requests += spent.total()
        return counts

    def depth(self) -> tuple[int, int]:
        """Return about how many messages the delay queue holds (visible, delayed, in flight), and its retention."""
        found = self.client.get_queue_attributes(
            QueueUrl=self.fifo_url,
            AttributeNames=[
                "ApproximateNumberOfMessages",
                "ApproximateNumberOfMessagesDelayed",
                "ApproximateNumberOfMessagesNotVisible",
                "MessageRetentionPeriod",
            ],
        )["Attributes"]
        retention = int(found.pop("MessageRetentionPeriod", 0))
        return sum(int(count) for count in found.values()), retention

    def _receive(self, wait_seconds: int, counts: Counts) -> Sequence[MessageTypeDef]:
        began = self.now.tick()
        answer = self._patiently(
            lambda: self.client.receive_message(
                QueueUrl=self.fifo_url,
                MaxNumberOfMessages=MAX_ENTRIES,
                WaitTimeSeconds=wait_seconds,
                VisibilityTimeout=VISIBILITY,
                MessageAttributeNames=["All"],
                MessageSystemAttributeNames=_SYSTEM,
            ),
            counts,
        )
        received = cast("Sequence[MessageTypeDef]", answer.get("Messages", ()))
        self.now.heard(
            began,
            answer["ResponseMetadata"].get("HTTPHeaders", {}),
            [int(message["Attributes"]["ApproximateFirstReceiveTimestamp"]) for message in received],
        )
        # the first 64 KiB are counted already
        size = sum(len(message["Body"]) + attributes_size(message.get("MessageAttributes", {})) for message in received)
        counts.fifo_requests += billed(size) - 1
        for message in received:
            counts.oldest = max(counts.oldest, (self._now_ms(message) - sent_ms(message)) // 1000)
        return received

    def _patiently(self, ask: Callable[[], Any], counts: Counts) -> Any:
        """Make a request; if SQS has too much to do, again after growing pauses."""
        for tries in range(1, TRIES + 1):
            counts.fifo_requests += 1
            try:
                return ask()
            except ClientError as error:
                fault = fault_of(error)
                if tries == TRIES or fault is None or fault.final:
                    raise
            self.poster.pause(tries)
        raise AssertionError("unreachable")

    def _now_ms(self, message: MessageTypeDef) -> int:
        """Return the present by the broker's clock; by this machine's only if the broker does not tell."""
        now = self.now.now_ms()
        if now is not None:
            return now
        system = message["Attributes"]
        if int(system["ApproximateReceiveCount"]) <= 1:
            return int(system["ApproximateFirstReceiveTimestamp"])
        return microseconds(self.clock()) // 1000

    def _move(self, received: Sequence[MessageTypeDef], counts: Counts) -> None:
        # sent on before, by this very process: all that is missing is the delete
        sent = [message for message in received if message["MessageId"] in self._sent_on]
        left = [message for message in received if message["MessageId"] not in self._sent_on]
        readable = [message for message in left if is_readable(message)]
        young = {message["MessageId"]: message for message in readable if self._is_too_young(message)}
        failed: list[Outcome[MessageTypeDef]] = []
        self._plans.clear()
        try:
            ready = [message for message in readable if message["MessageId"] not in young]
            for outcome in self.poster.each(ready, self._address):
                if outcome.fault:
                    failed.append(outcome)
                    continue
                sent.append(outcome.item)
                self._count(outcome.item, counts)
            hopeless = {message["MessageId"]: UNREADABLE for message in left if not is_readable(message)}
            refused = {outcome.item["MessageId"]: outcome for outcome in failed if _is_refused_for_good(outcome)}
            hopeless |= {
                name: f"queue {outcome.url.rpartition('/')[2]} refuses it: {outcome.fault}"
                for name, outcome in refused.items()
            }
            if hopeless:
                failed = [outcome for outcome in failed if outcome.item["MessageId"] not in refused]
                messages = [message for message in left if message["MessageId"] in hopeless]
                aside, not_aside = set_aside(self.poster, self.error_url, self.fifo_url, messages, hopeless)
                counts.set_aside += len(aside)
                sent += aside
                failed += not_aside
        finally:
            # also when the way to SQS broke: what is known to be sent must not be sent again
            for message in sent:
                self._held.pop(message["MessageId"], None)
            self._delete(sent, counts)
        self._give_back(failed, counts)
        self._hold_back(list(young.values()), counts)

    def _count(self, message: MessageTypeDef, counts: Counts) -> None:
        plan = self._plans[message["MessageId"]]
        if plan.direct is None:
            counts.moved_back += 1
            return
        counts.delivered += 1
        counts.note_late(max(0, self._now_ms(message) + plan.direct * 1000 - plan.due_us // 1000))

    def _address(self, message: MessageTypeDef) -> Addressed:
        attributes = cast("Attributes", dict(message.get("MessageAttributes", {})))
        system = message["Attributes"]
        attributes.pop(DELAY_SECONDS, None)
        had_due = attributes.pop(DUE_AT, None)
        due_us, seconds = self._remaining(message)
        due = {DUE_AT: due_text(from_microseconds(due_us))}
        hop = hop_of(seconds)
        self._plans[message["MessageId"]] = _Plan(due_us, None if hop.through_fifo else hop.delay_seconds)
        if hop.through_fifo:
            # the delay first: without it an NServiceBus endpoint would deliver at once
            attributes[DELAY_SECONDS] = string(str(hop.delay_seconds))
            size = fill(message["Body"], attributes, {**due, **own_id(message)})
            dedup_id = system["MessageDeduplicationId"]
            entry = through_fifo(message["Body"], attributes, hop.delay_seconds, dedup_id)
            return Addressed(self.fifo_url, entry, size)
        size = fill(message["Body"], attributes, {**(due if had_due else {}), **own_id(message)})
        return Addressed(self.destination_url, direct(message["Body"], attributes, hop.delay_seconds), size)

    def _remaining(self, message: MessageTypeDef) -> tuple[int, int]:
        """Return when a message is due (microseconds since 1970), and in how many seconds that is."""
        due_us = due_us_of(message)
        if due_us is not None:
            seconds = seconds_until(due_us, self._now_ms(message))
            if seconds <= LONGEST_DELAY:
                return due_us, seconds
        system = message["Attributes"]
        delay = delay_of(message) or 0
        seconds = remaining_seconds(
            delay,
            sent_ms=sent_ms(message),
            first_received_ms=int(system["ApproximateFirstReceiveTimestamp"]),
            receive_count=int(system["ApproximateReceiveCount"]),
            now_ms=self._now_ms(message),
        )
        return (sent_ms(message) + delay * 1000) * 1000, seconds

    def _is_too_young(self, message: MessageTypeDef) -> bool:
        """Return whether it would go back so soon after its send that SQS dropped it as a copy of itself."""
        if self._now_ms(message) - sent_ms(message) >= SAME_WINDOW * 1000:
            return False
        return hop_of(self._remaining(message)[1]).through_fifo

    def _give_back(self, failed: Sequence[Outcome[MessageTypeDef]], counts: Counts) -> None:
        """Hide what could not be sent on for a while, the longer the more often it was tried."""
        counts.failed += len(failed)
        for outcome in failed:
            if outcome.fault and outcome.fault.code in NO_QUEUE and outcome.url == self.destination_url:
                raise DestinationGone(self.destination_url)
        timeouts: dict[str, int] = {}
        reasons: dict[str, list[Outcome[MessageTypeDef]]] = {}
        for outcome in failed:
            system = outcome.item["Attributes"]
            timeouts[outcome.item["ReceiptHandle"]] = backoff_seconds(int(system["ApproximateReceiveCount"]))
            if outcome.fault:
                reasons.setdefault(outcome.fault.code, []).append(outcome)
            self._held.pop(outcome.item["MessageId"], None)
        for alike in reasons.values():
            log.warning(
                "%s messages could not be sent on, and will be tried again, such as SQS message %s: %s",
                len(alike),
                alike[0].item["MessageId"],
                alike[0].fault,
            )
        self._release(timeouts, counts)

    def _hold_back(self, young: Sequence[MessageTypeDef], counts: Counts) -> None:
        """Hide what came back too soon until it may be sent back."""
        if not young:
            return
        counts.failed += len(young)
        ages = [(self._now_ms(message) - sent_ms(message)) // 1000 for message in young]
        log.warning(
            "%s messages came back from %s after %s s, which has to delay by 900 s; they are held back, since SQS drops"
            " what is sent twice within 5 minutes. Run TopologyInstallOperator(..., repair=True)",
            f"{len(young):,}",
            self.fifo_url.rpartition("/")[2],
            max(0, min(ages)),
        )
        timeouts = {
            message["ReceiptHandle"]: SAME_WINDOW - max(0, age) for message, age in zip(young, ages, strict=True)
        }
        for message in young:
            self._held.pop(message["MessageId"], None)
        self._release(timeouts, counts)

    def _delete(self, messages: Sequence[MessageTypeDef], counts: Counts) -> None:
        """Delete from the delay queue, what fails in the batch again, and remember what stays."""
        left = list(messages)
        # remembered until it is deleted, so also if this is interrupted
        self._sent_on.update((message["MessageId"], None) for message in left)
        for tries in range(1, TRIES + 1):
            if not left:
                break
            left = self._delete_once(left, counts)
            if left and tries < TRIES:
                self.poster.pause(tries)
        counts.undeleted += len(left)
        for message in left:
            log.warning(
                "SQS message %s was sent on and could not be deleted from the delay queue; whoever receives it next may"
                " send it once more",
                message["MessageId"],
            )
        while len(self._sent_on) > _MAX_REMEMBERED:
            del self._sent_on[next(iter(self._sent_on))]

    def _delete_once(self, messages: list[MessageTypeDef], counts: Counts) -> list[MessageTypeDef]:
        counts.fifo_requests += 1
        try:
            answer = self.client.delete_message_batch(
                QueueUrl=self.fifo_url,
                Entries=[
                    {"Id": str(position), "ReceiptHandle": message["ReceiptHandle"]}
                    for position, message in enumerate(messages)
                ],
            )
        except ClientError as error:
            fault = fault_of(error)
            if fault is None or fault.final:
                raise
            return messages
        except BotoCoreError:
            return messages
        for entry in answer.get("Successful", ()):
            del self._sent_on[messages[int(entry["Id"])]["MessageId"]]
        return [messages[int(entry["Id"])] for entry in answer.get("Failed", ())]

    def _release(self, timeouts: Mapping[str, int], counts: Counts) -> None:
        """Make messages visible after so many seconds, by receipt handle; where that fails it is after 30."""
        pairs = list(timeouts.items())
        with suppress(BotoCoreError, ClientError):
            for start in range(0, len(pairs), MAX_ENTRIES):
                counts.fifo_requests += 1
                self.client.change_message_visibility_batch(
                    QueueUrl=self.fifo_url,
                    Entries=[
                        {"Id": str(position), "ReceiptHandle": handle, "VisibilityTimeout": seconds}
                        for position, (handle, seconds) in enumerate(pairs[start : start + MAX_ENTRIES])
                    ],
                )
