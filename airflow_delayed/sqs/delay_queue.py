"""A delay queue: messages that have waited there for 900 s go on to their destination, or back for another round.

As in NServiceBus.AmazonSQS (DelayedMessagesPump.cs), but for four things. A message's own due time counts, so nothing
adds up. A failed delete is repeated on the delay queue; the model repeats it on the queue the message was sent to,
where it cannot succeed. A message that could not be sent on is tried again after growing pauses, not at once. And a
message with neither a due time nor a delay goes to an error queue, where the model delivers it at once; so does a
message that its destination refuses for good.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from botocore.exceptions import BotoCoreError, ClientError

from airflow_delayed.delivery import Clock
from airflow_delayed.errors import AccessDenied, DelayedError, InvalidMessage, RetentionAtRisk, TopologyError
from airflow_delayed.message import delay_seconds, from_microseconds, microseconds, parse_moment, plain_span
from airflow_delayed.sqs.batch import TRIES, AddressedEntry, BatchSender, EntryOutcome, change_visibility, delete_batch
from airflow_delayed.sqs.client import (
    NO_QUEUE,
    UNACCEPTABLE,
    EntryFault,
    denied_actions,
    denied_queue,
    fault_of,
    is_busy,
    is_denied,
)
from airflow_delayed.sqs.entries import (
    DELAY_SECONDS,
    DUE_AT,
    MAX_ENTRIES,
    add_attributes,
    attributes_size,
    direct,
    due_text,
    own_id,
    string,
    through_fifo,
)
from airflow_delayed.sqs.hops import (
    LONGEST_DELAY,
    delay_of,
    due_us_of,
    hop_of,
    is_readable,
    remaining_seconds,
    seconds_until,
    sent_ms,
)
from airflow_delayed.sqs.stats import CycleCounts, billed

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient
    from mypy_boto3_sqs.literals import MessageSystemAttributeNameType
    from mypy_boto3_sqs.type_defs import MessageTypeDef, ReceiveMessageResultTypeDef

    from airflow_delayed.sqs.entries import Attributes

#: The value of ``until`` that is no time.
EMPTY = "empty"
#: Seconds after which the next destination has its turn, although more is visible in this one's queue.
TURN = 10.0
#: Seconds after which a round ends although messages are visible, so that a sensor reaches its timeout.
LONGEST_ROUND = 300.0
#: Seconds between two lines of the log on the progress.
PROGRESS = 600.0

log = logging.getLogger(__name__)


def never() -> bool:
    """Do not stop."""
    return False


class CyclingHook(Protocol):
    """The methods of SqsDelayHook that the loop calls."""

    conn_id: str

    @property
    def clock(self) -> Clock:
        """The present."""

    def cycle(
        self, destination: str, wait_seconds: int = 0, *, error_queue: str | None = None, stop: Callable[[], bool] = ...
    ) -> CycleCounts:
        """Send on the visible messages."""

    def waiting(self, destination: str) -> int:
        """Return how many messages there are."""

    def retention(self, destination: str) -> int:
        """Return the seconds after which a message is forgotten."""


def end_of(until: datetime | timedelta | str, began: datetime) -> datetime | None:
    """Return when to end, or None for "empty".

    :raises ValueError: it is neither "empty", nor an aware time, ISO 8601 text with an offset, or a timedelta that is
        not negative.
    """
    if until == EMPTY:
        return None
    if isinstance(until, timedelta):
        if until < timedelta(0):
            raise ValueError(f"until={until} is negative")
        return began + plain_span("until", until)
    try:
        return parse_moment("until", until)
    except InvalidMessage as error:
        raise ValueError(
            f"until={until!r} must be 'empty', a timedelta, or a time with an offset such as 2026-01-31T09:30:00+01:00"
            f" ({error.problem})"
        ) from None


class DelayQueueLoop:
    """One task's passes through the delay queues of its destinations.

    :param end: None to go on until the queues are empty.
    :param wait_seconds: of each round; shared among the destinations.
    :param looks: how many rounds in a row must be without a message, since SQS counts only approximately.
    :param max_late: a message delivered later than that is a warning.
    :raises ValueError: there are no destinations.
    """

    def __init__(
        self,
        hook: CyclingHook,
        destinations: Sequence[str],
        *,
        end: datetime | None,
        wait_seconds: int,
        looks: int,
        error_queue: str | None = None,
        max_late: timedelta | None = None,
        counts: CycleCounts | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        meter: Callable[[CycleCounts], object] | None = None,
    ) -> None:
        self._hook = hook
        self._destinations = list(dict.fromkeys(destinations))
        if not self._destinations:
            # a task without a queue would succeed
            raise ValueError("destination is empty; name one queue at least")
        self.end = end
        self._wait = wait_seconds
        self._looks = looks
        self._error_queue = error_queue
        self._max_late = max_late
        self._retention: dict[str, int] = {}
        self.counts = counts or CycleCounts()
        self._monotonic = monotonic
        self._meter = meter
        self._is_first = True
        #: Counts that are not logged yet, by destination, and when they were logged last.
        self._unlogged: dict[str, CycleCounts] = {}
        self._logged_at: float | None = None

    def go(self, stop: Callable[[], bool] = never, *, once: bool = False) -> bool:
        """Do one round, or without an end as many as show that the queues are empty; return whether the task is done.

        :raises TopologyError: a queue does not exist. The other destinations had their turn.
        :raises AccessDenied: the role may not do something with a queue. The other destinations had their turn.
        :raises RetentionAtRisk: messages have waited for too long. What could be sent on was.
        :raises TransportUnavailable: SQS cannot be reached or refuses the connection. Nothing is lost.
        """
        if self.end is not None:
            # a task that starts after its end does one whole round; if the end passes in the first round, that has at
            # least TURN seconds
            first, self._is_first = self._is_first, False
            least = self._monotonic() + (TURN if first else 0)
            late = self._is_over()
            self._round(stop if late else lambda: stop() or (self._is_over() and self._monotonic() >= least))
            return self._is_over()
        if once:
            self._round(stop)
            return False
        return all(not stop() and self._round(stop) for _ in range(self._looks))

    def log_counts(self) -> None:
        """Log the counts of the whole task."""
        self._log_progress(at_once=True)
        log.info("delay queues of %s: %s", ", ".join(self._destinations), self.counts)

    def summary(self) -> dict[str, Any]:
        """Return the result of the whole task: counts and seconds."""
        return self.counts.summary()

    def _round(self, stop: Callable[[], bool]) -> bool:
        """Return whether nothing was to do, and nothing waits."""
        problem: Exception | None = None
        quiet = True
        began = self._monotonic()
        left = deque(self._destinations)
        while left:
            name = left.popleft()
            try:
                nothing, drained = self._turn(name, stop)
            except (TopologyError, AccessDenied, RetentionAtRisk) as error:
                # of one queue, for which the others do not wait
                problem = problem or error
                continue
            quiet = nothing and quiet
            if not drained and not stop() and self._monotonic() - began < LONGEST_ROUND:
                left.append(name)
        self._log_progress()
        if problem:
            raise problem
        return quiet

    def _turn(self, name: str, stop: Callable[[], bool]) -> tuple[bool, bool]:
        """Return whether nothing was to do and nothing waits, and whether all visible messages were sent on."""
        wait = self._wait_now()
        ends = self._monotonic() + wait + (TURN if len(self._destinations) > 1 else LONGEST_ROUND)

        def is_over() -> bool:
            return self._monotonic() >= ends

        found = self._hook.cycle(name, wait, error_queue=self._error_queue, stop=lambda: stop() or is_over())
        self.counts.merge(found)
        if not found.is_quiet:
            self._unlogged.setdefault(name, CycleCounts()).merge(found)
            if self._meter is not None:
                self._meter(found)
        self._check_age(name, found.oldest_seconds)
        if not found.is_quiet:
            # SQS counts late, so a pass that moved something proves nothing yet
            return False, not is_over()
        if self.end is not None:
            return True, True
        self.counts.fifo_requests += 1
        return self._hook.waiting(name) == 0, True

    def _log_progress(self, *, at_once: bool = False) -> None:
        """Log the counts since the last line, the first at once and then every ten minutes."""
        now = self._monotonic()
        if not self._unlogged or not (at_once or self._logged_at is None or now - self._logged_at >= PROGRESS):
            return
        for name, counts in self._unlogged.items():
            log.info("delay queue of %s: %s", name, counts)
            if self._max_late is not None and (late := counts.later_than(self._max_late)):
                log.warning("%s messages to %s were later than %s", f"{late:,}", name, self._max_late)
        self._unlogged.clear()
        self._logged_at = now

    def _wait_now(self) -> int:
        wait = -(-self._wait // max(1, len(self._destinations)))
        return wait if self.end is None else min(wait, delay_seconds(self.end, self._hook.clock()))

    def _is_over(self) -> bool:
        return self.end is not None and self._hook.clock() >= self.end

    def _check_age(self, name: str, oldest: int) -> None:
        if not oldest:
            return
        if name not in self._retention:
            self.counts.fifo_requests += 1
            self._retention[name] = self._hook.retention(name)
        if oldest * 2 > self._retention[name]:
            raise RetentionAtRisk(self._hook.conn_id, f"the delay queue of {name}", oldest, self._retention[name])


#: Seconds for which a received message is hidden, and by which it is late if this process dies. SQS's own default.
VISIBILITY = 30
#: Seconds until a message that could not be sent on is visible again: the first time, and at most.
FIRST_BACKOFF = 5
LONGEST_BACKOFF = 300
#: Receives of a message before it goes to the error queue because a queue refuses it for good: about twenty minutes, in
#: which a queue that was made too small can be repaired.
REFUSALS = 10
#: Seconds for which SQS drops a message with the same deduplication id as a copy, and one more, since the clocks of the
#: broker's machines need not agree.
SAME_WINDOW = 301

#: Attributes of a message in the error queue: the reason, and the name of the queue that it comes from.
REASON = "AirflowDelayed.Reason"
FROM_QUEUE = "AirflowDelayed.FromQueue"
UNREADABLE = f"neither {DELAY_SECONDS} nor {DUE_AT} can be read"

#: Messages at most that are remembered as sent on and not deleted.
_MAX_REMEMBERED = 10_000
_SYSTEM: Sequence[MessageSystemAttributeNameType] = (
    "MessageDeduplicationId",
    "SentTimestamp",
    "ApproximateFirstReceiveTimestamp",
    "ApproximateReceiveCount",
)


class DestinationGone(Exception):
    """The destination's queue does not exist; its messages are still in the delay queue."""


def backoff_seconds(receive_count: int) -> int:
    """Return the seconds for which a message that could not be sent on is hidden: 5, then twice as many, up to 300."""
    return min(FIRST_BACKOFF << min(max(0, receive_count - 1), 16), LONGEST_BACKOFF)


class _Unsent(NamedTuple):
    """A received message that was not sent on; ``fault`` is None if it is for an error queue that cannot be used."""

    message: MessageTypeDef
    url: str
    fault: EntryFault | None


def _is_refused_for_good(unsent: _Unsent) -> bool:
    count = int(unsent.message["Attributes"]["ApproximateReceiveCount"])
    return unsent.fault is not None and unsent.fault.code in UNACCEPTABLE and count >= REFUSALS


@dataclass(slots=True)
class DelayQueue:
    """The delay queue of one destination.

    :param error_url: returns the URL of the error queue when a message has to go there; it may raise a DelayedError.
    :param clock: this machine's; used only if SQS's answers carry no date, for messages received more than once.
    """

    client: SQSClient
    sender: BatchSender
    fifo_url: str
    destination_url: str
    error_url: Callable[[], str]
    clock: Clock
    #: Received, and neither sent on nor given back: SQS ids and receipt handles.
    _in_hand: dict[str, str] = field(default_factory=dict)
    #: SQS ids of messages that were sent on and are in the delay queue still.
    _sent_on: dict[str, None] = field(default_factory=dict)

    def run(self, wait_seconds: int, stop: Callable[[], bool] = never) -> CycleCounts:
        """Send on all visible messages, until no more are visible.

        :param wait_seconds: how long to wait for the first message if there is none: 0 to 20.
        :param stop: asked before each batch; received messages that are not sent on yet become visible again at once.
        :raises DestinationGone: there is nowhere to deliver to.
        """
        counts = CycleCounts()
        before = self.sender.requests.copy()
        self._in_hand.clear()
        try:
            while not stop() and (received := self._receive(wait_seconds, counts)):
                self._in_hand.update((message["MessageId"], message["ReceiptHandle"]) for message in received)
                if stop():
                    break
                self._move(received, counts)
                wait_seconds = min(1, wait_seconds)
        finally:
            self._release(dict.fromkeys(self._in_hand.values(), 0), counts)
            spent = self.sender.requests - before
            counts.fifo_requests += spent.pop(self.fifo_url, 0)
            counts.standard_requests += spent.total()
        return counts

    def depth(self) -> tuple[int, int]:
        """Return about how many messages the delay queue holds (visible, delayed, in flight), and its retention."""
        attributes = self.client.get_queue_attributes(
            QueueUrl=self.fifo_url,
            AttributeNames=[
                "ApproximateNumberOfMessages",
                "ApproximateNumberOfMessagesDelayed",
                "ApproximateNumberOfMessagesNotVisible",
                "MessageRetentionPeriod",
            ],
        )["Attributes"]
        retention = int(attributes.pop("MessageRetentionPeriod", 0))
        return sum(int(count) for count in attributes.values()), retention

    def _receive(self, wait_seconds: int, counts: CycleCounts) -> Sequence[MessageTypeDef]:
        answer = self._request(wait_seconds, counts)
        received = cast("Sequence[MessageTypeDef]", answer.get("Messages", ()))
        # the first 64 KiB are counted already
        size = sum(len(message["Body"]) + attributes_size(message.get("MessageAttributes", {})) for message in received)
        counts.fifo_requests += billed(size) - 1
        for message in received:
            counts.oldest_seconds = max(counts.oldest_seconds, (self._now_ms(message) - sent_ms(message)) // 1000)
        return received

    def _request(self, wait_seconds: int, counts: CycleCounts) -> ReceiveMessageResultTypeDef:
        """Receive up to 10 messages; again after growing pauses if SQS is too busy in a way that botocore ignores."""
        for tries in range(1, TRIES + 1):
            counts.fifo_requests += 1
            try:
                return self.client.receive_message(
                    QueueUrl=self.fifo_url,
                    MaxNumberOfMessages=MAX_ENTRIES,
                    WaitTimeSeconds=wait_seconds,
                    VisibilityTimeout=VISIBILITY,
                    MessageAttributeNames=["All"],
                    MessageSystemAttributeNames=_SYSTEM,
                )
            except ClientError as error:
                fault = fault_of(error)
                if tries == TRIES or fault is None or fault.final:
                    raise
            self.sender.pause(tries)
        raise AssertionError("unreachable")

    def _now_ms(self, message: MessageTypeDef) -> int:
        """Return the present: the broker's time of the first receive, or this machine's on a later one."""
        system = message["Attributes"]
        if int(system["ApproximateReceiveCount"]) <= 1:
            return int(system["ApproximateFirstReceiveTimestamp"])
        return microseconds(self.clock()) // 1000

    def _move(self, received: Sequence[MessageTypeDef], counts: CycleCounts) -> None:
        # sent on before by this very process, and not deleted
        sent = [message for message in received if message["MessageId"] in self._sent_on]
        left = [message for message in received if message["MessageId"] not in self._sent_on]
        readable = [message for message in left if is_readable(message)]
        young = {message["MessageId"]: message for message in readable if self._is_too_young(message)}
        failed: list[_Unsent] = []
        try:
            ready = [message for message in readable if message["MessageId"] not in young]
            for outcome in self.sender.send_each(ready, self._address):
                if outcome.fault:
                    failed.append(_Unsent(outcome.item, outcome.sent.url, outcome.fault))
                    continue
                sent.append(outcome.item)
                self._count(outcome, counts)
            hopeless = {message["MessageId"]: UNREADABLE for message in left if not is_readable(message)}
            refused = {unsent.message["MessageId"]: unsent for unsent in failed if _is_refused_for_good(unsent)}
            hopeless |= {
                name: f"queue {unsent.url.rpartition('/')[2]} refuses it: {unsent.fault}"
                for name, unsent in refused.items()
            }
            if hopeless:
                failed = [unsent for unsent in failed if unsent.message["MessageId"] not in refused]
                messages = [message for message in left if message["MessageId"] in hopeless]
                rejected, still_here = _reject(self.sender, self.error_url, self.fifo_url, messages, hopeless)
                counts.to_error_queue += len(rejected)
                sent += rejected
                failed += still_here
        finally:
            # also when SQS cannot be reached any more: a message known to be sent must not be sent again
            for message in sent:
                self._in_hand.pop(message["MessageId"], None)
            self._delete(sent, counts)
        self._give_back(failed, counts)
        self._hold_back(list(young.values()), counts)

    def _count(self, outcome: EntryOutcome[MessageTypeDef], counts: CycleCounts) -> None:
        if outcome.sent.url == self.fifo_url:
            counts.requeued += 1
            return
        counts.delivered += 1
        message, delay = outcome.item, outcome.sent.entry["DelaySeconds"]
        counts.note_late(max(0, self._now_ms(message) + delay * 1000 - self._remaining(message)[0] // 1000))

    def _address(self, message: MessageTypeDef) -> AddressedEntry:
        attributes = cast("Attributes", dict(message.get("MessageAttributes", {})))
        attributes.pop(DELAY_SECONDS, None)
        had_due = attributes.pop(DUE_AT, None)
        due_us, seconds = self._remaining(message)
        due = {DUE_AT: due_text(from_microseconds(due_us))}
        hop = hop_of(seconds)
        if hop.through_fifo:
            # the delay first: without it an NServiceBus endpoint would deliver at once
            attributes[DELAY_SECONDS] = string(str(hop.delay_seconds))
            size = add_attributes(message["Body"], attributes, {**due, **own_id(message)})
            dedup_id = message["Attributes"]["MessageDeduplicationId"]
            entry = through_fifo(message["Body"], attributes, hop.delay_seconds, dedup_id)
            return AddressedEntry(self.fifo_url, entry, size)
        size = add_attributes(message["Body"], attributes, {**(due if had_due else {}), **own_id(message)})
        return AddressedEntry(self.destination_url, direct(message["Body"], attributes, hop.delay_seconds), size)

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
        """Return whether a message needs another round so soon that SQS would drop the new copy as a duplicate."""
        if self._now_ms(message) - sent_ms(message) >= SAME_WINDOW * 1000:
            return False
        return hop_of(self._remaining(message)[1]).through_fifo

    def _give_back(self, failed: Sequence[_Unsent], counts: CycleCounts) -> None:
        counts.failed += len(failed)
        for unsent in failed:
            if unsent.fault and unsent.fault.code in NO_QUEUE and unsent.url == self.destination_url:
                raise DestinationGone(self.destination_url)
        timeouts: dict[str, int] = {}
        reasons: dict[str, list[_Unsent]] = {}
        for unsent in failed:
            count = int(unsent.message["Attributes"]["ApproximateReceiveCount"])
            timeouts[unsent.message["ReceiptHandle"]] = backoff_seconds(count)
            if unsent.fault:
                reasons.setdefault(unsent.fault.code, []).append(unsent)
            self._in_hand.pop(unsent.message["MessageId"], None)
        for alike in reasons.values():
            log.warning(
                "%s messages could not be sent on, and will be tried again, such as SQS message %s: %s",
                len(alike),
                alike[0].message["MessageId"],
                alike[0].fault,
            )
        self._release(timeouts, counts)

    def _hold_back(self, young: Sequence[MessageTypeDef], counts: CycleCounts) -> None:
        if not young:
            return
        counts.failed += len(young)
        ages = [(self._now_ms(message) - sent_ms(message)) // 1000 for message in young]
        log.warning(
            "%s messages came back from %s after %s s, which has to delay by 900 s; they wait, since SQS drops"
            " what is sent twice within 5 minutes. Run TopologyInstallOperator(..., repair=True)",
            f"{len(young):,}",
            self.fifo_url.rpartition("/")[2],
            max(0, min(ages)),
        )
        timeouts = {
            message["ReceiptHandle"]: SAME_WINDOW - max(0, age) for message, age in zip(young, ages, strict=True)
        }
        for message in young:
            self._in_hand.pop(message["MessageId"], None)
        self._release(timeouts, counts)

    def _delete(self, left: Sequence[MessageTypeDef], counts: CycleCounts) -> None:
        # remembered until they are deleted, so also if this is interrupted
        self._sent_on.update((message["MessageId"], None) for message in left)
        for tries in range(1, TRIES + 1):
            if not left:
                break
            counts.fifo_requests += 1
            try:
                failed = delete_batch(self.client, self.fifo_url, left)
            except ClientError as error:
                if not is_busy(error):
                    raise
                break
            except BotoCoreError:
                break
            remaining = {message["MessageId"] for message in failed}
            for message in left:
                if message["MessageId"] not in remaining:
                    del self._sent_on[message["MessageId"]]
            left = failed
            if left and tries < TRIES:
                self.sender.pause(tries)
        counts.undeleted += len(left)
        for message in left:
            log.warning(
                "SQS message %s was sent on and could not be deleted from the delay queue; whoever receives it next may"
                " send it once more",
                message["MessageId"],
            )
        while len(self._sent_on) > _MAX_REMEMBERED:
            del self._sent_on[next(iter(self._sent_on))]

    def _release(self, timeouts: Mapping[str, int], counts: CycleCounts) -> None:
        """Make messages visible after so many seconds, by receipt handle; where that fails it is after 30."""
        counts.fifo_requests += -(-len(timeouts) // MAX_ENTRIES)
        with suppress(BotoCoreError, ClientError):
            change_visibility(self.client, self.fifo_url, timeouts)


def _reject(
    sender: BatchSender,
    error_url: Callable[[], str],
    fifo_url: str,
    messages: Sequence[MessageTypeDef],
    reasons: Mapping[str, str],
) -> tuple[list[MessageTypeDef], list[_Unsent]]:
    """Send messages to the error queue as they are; return the sent messages, and the messages that were not sent."""
    unsent = [_Unsent(message, fifo_url, None) for message in messages]
    try:
        url = error_url()
    except DelayedError as error:
        log.error("%s messages cannot be delivered, and there is no error queue: %s", f"{len(messages):,}", error)
        return [], unsent

    def address(message: MessageTypeDef) -> AddressedEntry:
        attributes = cast("Attributes", dict(message.get("MessageAttributes", {})))
        why = {REASON: reasons[message["MessageId"]], FROM_QUEUE: fifo_url.rpartition("/")[2], **own_id(message)}
        size = add_attributes(message["Body"], attributes, why)
        return AddressedEntry(url, direct(message["Body"], attributes, 0), size)

    try:
        outcomes = list(sender.send_each(messages, address))
    except ClientError as error:
        if not is_denied(error):
            raise
        log.error(
            "%s messages cannot be delivered, and the role may not do %s on queue %s to move them to the error queue",
            f"{len(messages):,}",
            ", ".join(denied_actions(error)),
            denied_queue(error),
        )
        return [], unsent
    sent = [outcome.item for outcome in outcomes if outcome.fault is None]
    for message in sent:
        log.error(
            "SQS message %s in %s: %s; it is in %s now, whole. Send it back when that is mended, or delete it",
            message["MessageId"],
            fifo_url,
            reasons[message["MessageId"]],
            url,
        )
    return sent, [_Unsent(outcome.item, url, outcome.fault) for outcome in outcomes if outcome.fault]
