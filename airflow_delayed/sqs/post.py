"""Entries sent in batches; what fails is sent again, with growing pauses, and at last one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from botocore.exceptions import ClientError

from airflow_delayed.backoff import next_sleep
from airflow_delayed.sqs.counts import billed
from airflow_delayed.sqs.entries import MAX_BYTES, MAX_ENTRIES
from airflow_delayed.sqs.faults import BUSY, REFUSED, Fault, fault_of

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient

    from airflow_delayed.sqs.entries import Entry

T = TypeVar("T")

#: How often an entry is sent at most, and the seconds before its second and last try.
TRIES = 4
_FIRST_SLEEP, _LONGEST_SLEEP = 0.2, 0.8

_NO_ANSWER = Fault("NoAnswer", "the answer names it neither as sent nor as failed", final=False)


@dataclass(frozen=True, slots=True)
class Addressed:
    """An entry, the URL of its queue, and its size in bytes."""

    url: str
    entry: Entry = field(repr=False)
    size: int


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """What became of one item at a queue: no fault means that SQS confirmed it."""

    item: T
    url: str
    fault: Fault | None


class Poster:
    """Sends items. Each is addressed anew at every try, so that its delay is right at that moment."""

    def __init__(self, client: SQSClient, sleep: Callable[[float], None]) -> None:
        self._client = client
        self._sleep = sleep
        #: What was spent so far, in requests as SQS bills them, by the queue's URL.
        self.requests: Counter[str] = Counter()

    def post(self, items: Iterable[T], address: Callable[[T], Addressed]) -> list[Outcome[T]]:
        """Send items and return what became of each, in no order; raises as :meth:`each`."""
        return list(self.each(items, address))

    def each(self, items: Iterable[T], address: Callable[[T], Addressed]) -> Iterator[Outcome[T]]:
        """Send items and yield what became of each, as it is known: of some even if the way to SQS breaks then.

        :raises botocore.exceptions.ClientError: SQS refused for a reason that is not about the messages.
        :raises botocore.exceptions.BotoCoreError: SQS could not be reached.
        """
        pairs = [(item, address(item)) for item in items]
        for tries in range(1, TRIES + 1):
            last = tries == TRIES
            again: list[T] = []
            # what all of a batch suffers from may be one entry's doing
            for url, batch in _batches(pairs, 1 if last else MAX_ENTRIES):
                for outcome in self._request(url, batch):
                    if not last and outcome.fault and not outcome.fault.final:
                        again.append(outcome.item)
                    else:
                        yield outcome
            if not again:
                return
            self.pause(tries)
            pairs = [(item, address(item)) for item in again]

    def pause(self, failures: int) -> None:
        """Sleep after so many failures in a row."""
        self._sleep(next_sleep(failures, first=_FIRST_SLEEP, longest=_LONGEST_SLEEP))

    def _request(self, url: str, batch: Sequence[tuple[T, Addressed]]) -> Iterator[Outcome[T]]:
        entries = [{**addressed.entry, "Id": str(position)} for position, (_, addressed) in enumerate(batch)]
        self.requests[url] += billed(sum(addressed.size for _, addressed in batch))
        try:
            answer = self._client.send_message_batch(QueueUrl=url, Entries=entries)  # type: ignore[arg-type]
        except ClientError as error:
            fault = fault_of(error)
            if fault is None:
                raise
            if fault.code in REFUSED and len(batch) > 1:
                # one entry may be at fault; this finds out which
                for single in batch:
                    yield from self._request(url, [single])
                return
            yield from (Outcome(item, url, fault) for item, _ in batch)
            return
        faults: dict[str, Fault | None] = {entry["Id"]: None for entry in answer.get("Successful", ())}
        for entry in answer.get("Failed", ()):
            code = entry["Code"]
            faults[entry["Id"]] = Fault(code, entry.get("Message", ""), final=entry["SenderFault"] and code not in BUSY)
        for position, (item, _) in enumerate(batch):
            yield Outcome(item, url, faults.get(str(position), _NO_ANSWER))


def _batches(pairs: Iterable[tuple[T, Addressed]], most: int) -> Iterator[tuple[str, list[tuple[T, Addressed]]]]:
    """Group by queue, and cut into batches of so many entries at most, and 1 MiB."""
    waiting: dict[str, list[tuple[T, Addressed]]] = {}
    for pair in pairs:
        url, size = pair[1].url, pair[1].size
        batch = waiting.setdefault(url, [])
        if len(batch) == most or (batch and sum(other.size for _, other in batch) + size > MAX_BYTES):
            yield url, batch
            batch = waiting[url] = []
        batch.append(pair)
    yield from ((url, batch) for url, batch in waiting.items() if batch)
