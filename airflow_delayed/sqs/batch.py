"""Requests for up to 10 messages at once: sent in batches, deleted, and hidden from other consumers.

Entries that SQS did not confirm are sent again with growing pauses, at last one by one. Requests that failed as a whole
are repeated by botocore.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Generic, TypeVar

from botocore.exceptions import ClientError

from airflow_delayed.clock import next_sleep
from airflow_delayed.delivery import Clock, SendReport
from airflow_delayed.errors import (
    InputError,
    InvalidMessage,
    LimitExceeded,
    SendFailed,
    TopologyError,
    TransportUnavailable,
)
from airflow_delayed.message import DelayedMessage, delay_seconds
from airflow_delayed.sqs.client import BUSY, NO_QUEUE, REFUSED, EntryFault, fault_of, translated
from airflow_delayed.sqs.entries import MAX_BYTES, MAX_ENTRIES, RAW, Parcel, direct, pack, through_fifo
from airflow_delayed.sqs.hops import Hop, hop_of
from airflow_delayed.sqs.settings import MAX_VISIBILITY, Duration, seconds_of
from airflow_delayed.sqs.stats import billed

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient
    from mypy_boto3_sqs.type_defs import MessageTypeDef

    from airflow_delayed.sqs.entries import Entry

T = TypeVar("T")

#: Tries of an entry at most, and the seconds before the second and the last one.
TRIES = 4
_FIRST_SLEEP, _LONGEST_SLEEP = 0.2, 0.8

_NO_ANSWER = EntryFault("NoAnswer", "the answer names it neither as sent nor as failed", final=False)
#: How long a message waits at most for a full batch: it may be due at once.
LINGER = timedelta(seconds=1)
#: Bytes that wait for full batches, over all queues; beyond, the oldest batches are sent as they are.
MAX_WAITING = 16 * MAX_BYTES
#: After so many unconfirmed messages the rest is not tried: the list of failures must not grow without end.
MAX_FAILURES = 1_000

#: Returns the URL of the queue that a hop of a message to a destination leads to.
Locate = Callable[[str, bool], str]


@dataclass(frozen=True, slots=True)
class AddressedEntry:
    """An entry, the URL of its queue, and its size in bytes."""

    url: str
    entry: Entry = field(repr=False)
    size: int


@dataclass(frozen=True, slots=True)
class EntryOutcome(Generic[T]):
    """The result of sending one item to a queue: without a fault SQS confirmed it."""

    item: T
    sent: AddressedEntry
    fault: EntryFault | None


class BatchSender:
    """Sends items in batches. Each is addressed again at every try, so that its delay is right at that moment.

    :param patient: False: an item is not sent again while its queue is too busy.
    """

    def __init__(self, client: SQSClient, sleep: Callable[[float], None], *, patient: bool = True) -> None:
        self.patient = patient
        self._client = client
        self._sleep = sleep
        #: Requests so far, as SQS bills them, by the queue's URL.
        self.requests: Counter[str] = Counter()

    def send_each(self, items: Iterable[T], address: Callable[[T], AddressedEntry]) -> Iterator[EntryOutcome[T]]:
        """Send items and yield each outcome as soon as it is known, of some even if SQS is away afterwards."""
        pairs = [(item, address(item)) for item in items]
        for tries in range(1, TRIES + 1):
            last = tries == TRIES
            again: list[T] = []
            # a fault of the whole batch may be caused by one entry
            for url, batch in _batches(pairs, 1 if last else MAX_ENTRIES):
                for outcome in self._request(url, batch):
                    if not last and outcome.fault and not (outcome.fault.final or self.refuses(outcome.fault)):
                        again.append(outcome.item)
                    else:
                        yield outcome
            if not again:
                return
            self.pause(tries)
            pairs = [(item, address(item)) for item in again]

    def refuses(self, fault: EntryFault) -> bool:
        """Return whether a fault means that a queue takes no messages at present, and that this sender gives up."""
        return not self.patient and fault.code in BUSY

    def pause(self, failures: int) -> None:
        """Sleep after so many failures in a row."""
        self._sleep(next_sleep(failures, first=_FIRST_SLEEP, longest=_LONGEST_SLEEP))

    def _request(self, url: str, batch: Sequence[tuple[T, AddressedEntry]]) -> Iterator[EntryOutcome[T]]:
        entries = [{**addressed.entry, "Id": str(position)} for position, (_, addressed) in enumerate(batch)]
        self.requests[url] += billed(sum(addressed.size for _, addressed in batch))
        try:
            answer = self._client.send_message_batch(QueueUrl=url, Entries=entries)  # type: ignore[arg-type]
        except ClientError as error:
            fault = fault_of(error)
            if fault is None:
                raise
            if len(batch) > 1 and fault.final and fault.code not in NO_QUEUE and not self.refuses(fault):
                # one entry may be at fault: this finds out which; and a busy queue may take single entries
                for single in batch:
                    yield from self._request(url, [single])
                return
            yield from (EntryOutcome(item, addressed, fault) for item, addressed in batch)
            return
        faults: dict[str, EntryFault | None] = {entry["Id"]: None for entry in answer.get("Successful", ())}
        for entry in answer.get("Failed", ()):
            code, final = entry["Code"], entry["SenderFault"] and entry["Code"] not in BUSY
            faults[entry["Id"]] = EntryFault(code, entry.get("Message", ""), final=final)
        for position, (item, addressed) in enumerate(batch):
            yield EntryOutcome(item, addressed, faults.get(str(position), _NO_ANSWER))


def _batches(
    pairs: Iterable[tuple[T, AddressedEntry]], most: int
) -> Iterator[tuple[str, list[tuple[T, AddressedEntry]]]]:
    waiting: dict[str, list[tuple[T, AddressedEntry]]] = {}
    for pair in pairs:
        url, size = pair[1].url, pair[1].size
        batch = waiting.setdefault(url, [])
        if len(batch) == most or (batch and sum(other.size for _, other in batch) + size > MAX_BYTES):
            yield url, batch
            batch = waiting[url] = []
        batch.append(pair)
    yield from ((url, batch) for url, batch in waiting.items() if batch)


@dataclass(slots=True)
class _OpenBatch:
    opened: datetime
    parcels: list[Parcel] = field(default_factory=list)
    size: int = 0


class MessageSender:
    """Sends a stream of messages: to their destinations up to 900 s, beyond through the delay queues.

    :param largest: returns the bytes of the largest message that passes through a destination's delay queue; called
        after the delay queue was located.
    """

    def __init__(
        self,
        conn_id: str,
        sender: BatchSender,
        locate: Locate,
        clock: Clock,
        form: str = RAW,
        *,
        largest: Callable[[str], int] = lambda _: MAX_BYTES,
    ) -> None:
        self._largest = largest
        self._conn_id = conn_id
        self._sender = sender
        self._locate = locate
        self._clock = clock
        self._form = form
        self._batches: dict[str, _OpenBatch] = {}  # by URL, the oldest first
        self._waiting = 0
        self._began = False
        self._report = SendReport()
        self._failures: list[tuple[str, str]] = []
        #: The first error that another try cannot help.
        self._cause: InputError | None = None
        #: Destinations whose queues are too busy.
        self._refusing: dict[str, str] = {}

    def send(self, messages: Iterable[DelayedMessage]) -> SendReport:
        """Send all messages, in batches of their queue, and return when all are confirmed."""
        for message in messages:
            try:
                self._put(message)
            except (InputError, TopologyError) as error:
                if isinstance(error, InvalidMessage):
                    error.message_id = message.message_id
                if not self._began:
                    raise
                # too late to say that nothing was sent
                self._failures.append((message.message_id, str(error)))
                if isinstance(error, InputError):
                    self._cause = self._cause or error
            if len(self._failures) >= MAX_FAILURES:
                break
        for url in list(self._batches):
            self._flush(url)
        if self._failures:
            raise SendFailed(self._conn_id, self._report, self._failures, self._refusing) from self._cause
        return self._report

    def _put(self, message: DelayedMessage) -> None:
        if (why := self._refusing.get(message.destination)) is not None:
            self._failures.append((message.message_id, why))
            return
        parcel = pack(message, self._form)
        now = self._clock()
        # a message in a delay queue needs its destination as well
        url = self._locate(message.destination, False)
        if self._hop(parcel, now).through_fifo:
            url = self._locate(message.destination, True)
            if parcel.size > (most := self._largest(message.destination)):
                # the delay queue might take it, and the destination refuse it until the delay queue forgets it
                raise LimitExceeded(
                    "body",
                    f"makes {parcel.size:,} bytes with its attributes, and {message.destination} or its delay queue"
                    f" takes {most:,} (MaximumMessageSize); set that to {MAX_BYTES:,}, or send a smaller body",
                )
        batch = self._batches.get(url)
        if batch and batch.size + parcel.size > MAX_BYTES:
            self._flush(url)
            batch = None
        if batch is None:
            batch = self._batches[url] = _OpenBatch(now)
        batch.parcels.append(parcel)
        batch.size += parcel.size
        self._waiting += parcel.size
        if len(batch.parcels) == MAX_ENTRIES:
            self._flush(url)
        while self._batches and self._overdue(now):
            self._flush(next(iter(self._batches)))

    def _overdue(self, now: datetime) -> bool:
        oldest = next(iter(self._batches.values()))
        return now - oldest.opened >= LINGER or self._waiting > MAX_WAITING

    def _flush(self, url: str) -> None:
        batch = self._batches.pop(url)
        self._waiting -= batch.size
        self._began = True
        try:
            with translated(self._conn_id, f"send more than {self._report.sent:,} messages"):
                for outcome in self._sender.send_each(batch.parcels, self._address):
                    if outcome.fault is None:
                        self._report.add(outcome.item.message)
                        continue
                    message, why = outcome.item.message, str(outcome.fault)
                    if self._sender.refuses(outcome.fault):
                        why = self._refusing[message.destination] = f"SQS is too busy for its queue: {why}."
                    self._failures.append((message.message_id, why))
        except TransportUnavailable as error:
            error.report = self._report
            raise

    def _address(self, parcel: Parcel) -> AddressedEntry:
        message = parcel.message
        hop = self._hop(parcel, self._clock())
        url = self._locate(message.destination, hop.through_fifo)
        if hop.through_fifo:
            entry = through_fifo(parcel.body, parcel.attributes, hop.delay_seconds, message.message_id, message.due_at)
        else:
            entry = direct(parcel.body, parcel.attributes, hop.delay_seconds)
        return AddressedEntry(url, entry, parcel.size)

    @staticmethod
    def _hop(parcel: Parcel, now: datetime) -> Hop:
        return hop_of(delay_seconds(parcel.message.due_at, now))


def delete_batch(client: SQSClient, url: str, messages: Sequence[MessageTypeDef]) -> Sequence[MessageTypeDef]:
    """Delete up to 10 received messages, and return the messages that SQS did not delete."""
    entries = [
        {"Id": str(position), "ReceiptHandle": message["ReceiptHandle"]} for position, message in enumerate(messages)
    ]
    answer = client.delete_message_batch(QueueUrl=url, Entries=entries)  # type: ignore[arg-type]
    return [messages[int(entry["Id"])] for entry in answer.get("Failed", ())]


def visibility_seconds(span: Duration, *, received_at: datetime | None, now: datetime) -> int:
    """Return a visibility timeout in seconds from now.

    :param received_at: when the messages were received; the 12 hours that SQS allows in all count from then.
    :raises ValueError: it is negative, or more than what is left of 12 hours.
    """
    seconds = seconds_of("seconds", span)
    # a second is begun when it has begun
    passed = 0 if received_at is None else max(0, -(-(now - received_at) // timedelta(seconds=1)))
    most = MAX_VISIBILITY - passed
    if not 0 <= seconds <= most:
        spent = f", of which {passed:,} s have passed" if passed else ""
        raise ValueError(
            f"seconds={seconds:,} must be 0 to {max(0, most):,}: a message is hidden for at most 12 hours from its"
            f" receive{spent}. Delete it, and send it again with a delay, if that is too short"
        )
    return seconds


def change_visibility(client: SQSClient, url: str, seconds: Mapping[str, int]) -> dict[str, str]:
    """Hide received messages for so many seconds from now, by receipt handle; return the reasons of refusals."""
    refused: dict[str, str] = {}
    handles = list(seconds)
    for start in range(0, len(handles), MAX_ENTRIES):
        batch = handles[start : start + MAX_ENTRIES]
        try:
            answer = client.change_message_visibility_batch(
                QueueUrl=url,
                Entries=[
                    {"Id": str(position), "ReceiptHandle": handle, "VisibilityTimeout": seconds[handle]}
                    for position, handle in enumerate(batch)
                ],
            )
        except ClientError as error:
            fault = fault_of(error)
            if fault is None or fault.code not in REFUSED:
                raise
            # the whole batch, because of one message
            if len(batch) == 1:
                refused[batch[0]] = str(fault)
            else:
                for handle in batch:
                    refused |= change_visibility(client, url, {handle: seconds[handle]})
            continue
        for entry in answer.get("Failed", ()):
            refused[batch[int(entry["Id"])]] = f"{entry['Code']}: {entry.get('Message', '')}"
    return refused
