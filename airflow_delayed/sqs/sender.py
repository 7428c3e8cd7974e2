"""Sends a stream of messages: straight to their destinations up to 900 s, beyond through the delay queues."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from airflow_delayed.delivery import Clock, SendReport
from airflow_delayed.errors import InputError, LimitExceeded, SendFailed, TopologyError, TransportUnavailable
from airflow_delayed.message import DelayedMessage, delay_seconds
from airflow_delayed.sqs.entries import MAX_BYTES, MAX_ENTRIES, RAW, Parcel, direct, pack, through_fifo
from airflow_delayed.sqs.faults import translated
from airflow_delayed.sqs.hops import Hop, hop_of
from airflow_delayed.sqs.post import Addressed, Poster

#: How long a message may wait for others to make a batch full: it may be due at once.
LINGER = timedelta(seconds=1)
#: Bytes that wait for full batches, over all queues; beyond, all batches are sent as they are.
MAX_WAITING = 16 * MAX_BYTES
#: After so many messages that were not confirmed, the rest is not tried: the list of them must not grow without end.
MAX_FAILURES = 1_000

#: Returns the URL of the queue that a hop of a message to a destination leads to.
Locate = Callable[[str, bool], str]


@dataclass(slots=True)
class _Batch:
    opened: datetime
    parcels: list[Parcel] = field(default_factory=list)
    size: int = 0


class Sender:
    """One send. ``clock`` says what time it is whenever a delay is computed, which is just before each request."""

    def __init__(
        self,
        conn_id: str,
        poster: Poster,
        locate: Locate,
        clock: Clock,
        form: str = RAW,
        *,
        largest: Callable[[str], int] = lambda _: MAX_BYTES,
    ) -> None:
        # asked for what goes through a delay queue, when that was located
        self._largest = largest
        self._conn_id = conn_id
        self._poster = poster
        self._locate = locate
        self._clock = clock
        self._form = form
        self._batches: dict[str, _Batch] = {}  # by URL, the oldest first
        self._waiting = 0
        self._began = False
        self._report = SendReport()
        self._failures: list[tuple[str, str]] = []

    def send(self, messages: Iterable[DelayedMessage]) -> SendReport:
        """Send all messages, in batches of their queue, and return when all are confirmed.

        :raises LimitExceeded: SQS would refuse a message. Nothing was sent.
        :raises DestinationMissing: a destination's queue does not exist. Nothing was sent.
        :raises TopologyError: a delay queue does not exist. Nothing was sent.
        :raises SendFailed: some were not confirmed, after several tries; or one of the above, after others were sent.
        :raises TransportUnavailable: SQS cannot be reached or refuses the connection. Others may have been sent.
        """
        for message in messages:
            try:
                self._put(message)
            except (InputError, TopologyError) as error:
                if not self._began:
                    raise
                # too late to say that nothing was sent
                self._failures.append((message.message_id, str(error)))
            if len(self._failures) >= MAX_FAILURES:
                break
        for url in list(self._batches):
            self._flush(url)
        if self._failures:
            raise SendFailed(self._conn_id, self._report, self._failures)
        return self._report

    def _put(self, message: DelayedMessage) -> None:
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
            batch = self._batches[url] = _Batch(now)
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
                for outcome in self._poster.each(batch.parcels, self._address):
                    if outcome.fault is None:
                        self._report.add(outcome.item.message)
                    else:
                        self._failures.append((outcome.item.message.message_id, str(outcome.fault)))
        except TransportUnavailable as error:
            error.report = self._report
            raise

    def _address(self, parcel: Parcel) -> Addressed:
        message = parcel.message
        hop = self._hop(parcel, self._clock())
        url = self._locate(message.destination, hop.through_fifo)
        if hop.through_fifo:
            entry = through_fifo(parcel.body, parcel.attributes, hop.delay_seconds, message.message_id, message.due_at)
        else:
            entry = direct(parcel.body, parcel.attributes, hop.delay_seconds)
        return Addressed(url, entry, parcel.size)

    @staticmethod
    def _hop(parcel: Parcel, now: datetime) -> Hop:
        return hop_of(delay_seconds(parcel.message.due_at, now))
