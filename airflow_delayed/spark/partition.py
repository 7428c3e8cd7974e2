"""One attempt at one partition: from Arrow batches to confirmed messages, as a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import datetime

import pyarrow as pa

from airflow_delayed.confirmed import send_and_note
from airflow_delayed.delivery import Clock
from airflow_delayed.errors import DelayedError, InputError, InvalidMessage, PastDue
from airflow_delayed.intake.arrow import to_batch
from airflow_delayed.intake.files import SourceFile
from airflow_delayed.intake.rows import Problem, RowReader
from airflow_delayed.message import DelayedMessage
from airflow_delayed.route import Route
from airflow_delayed.sending import PROGRESS_SECONDS, Log
from airflow_delayed.spark.counts import Counts
from airflow_delayed.spark.options import Settings


class PartitionFailed(DelayedError):
    """An attempt at a partition ended without success; the text says what it had sent."""

    def __init__(self, place: str, counts: Counts, error: DelayedError) -> None:
        had = ", ".join(f"{count:,} to {name}" for name, count in list(counts.by_destination().items())[:5])
        said = f"It had sent or stored {counts.out:,} messages ({had})" if counts.out else "It had sent nothing"
        super().__init__(f"{place}: {error}. {said}; another attempt means the same messages, with the same ids")


class PartitionSend:
    """Sends the rows of one partition.

    :param place: what the partition is called.
    :param route: None only counts, for a dry run.
    :param going: called with the counts after each batch that was handed over.
    :param monotonic: seconds, for the rate of progress.
    """

    def __init__(
        self,
        settings: Settings,
        route: Route | None,
        *,
        place: str,
        clock: Clock,
        log: Log,
        going: Callable[[Counts], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = Counts()
        self._settings = settings
        self._route = route
        self._place = place
        self._clock = clock
        self._log = log
        self._going = going
        self._monotonic = monotonic
        self._told = monotonic()
        self._direct: list[DelayedMessage] = []
        self._held: list[DelayedMessage] = []

    def run(self, batches: Iterable[pa.RecordBatch]) -> Counts:
        """Send everything and return when all is confirmed; ``counts`` holds also after an error.

        :raises PartitionFailed: a row breaks a rule, is past due, or was not confirmed.
        """
        reader = RowReader(self._settings.rules)
        used: list[int] | None = None
        try:
            for records in batches:
                if used is None:
                    names = enumerate(records.schema.names)
                    used = [index for index, name in names if self._settings.wanted.uses(name)]
                self._read(reader, records.select(used))
            self._flush()
        except DelayedError as error:
            raise PartitionFailed(self._place, self.counts, error) from error
        return self.counts

    def _read(self, reader: RowReader, records: pa.RecordBatch) -> None:
        file = SourceFile(path="its", format="arrow", partition={}, version=())
        now = self._clock()
        for item in reader.read(to_batch(records, file, self.counts.rows + 1)):
            self.counts.rows += 1
            if isinstance(item, Problem):
                # another try finds it again, and the job fails
                raise InputError(str(item))
            if item.due_at < self._settings.oldest and self._passes_over(item):
                continue
            self._sort(item, now)
            if len(self._direct) + len(self._held) >= self._settings.batch_rows:
                self._flush()
                now = self._clock()

    def _passes_over(self, message: DelayedMessage) -> bool:
        if self._settings.past_due == "fail":
            raise PastDue(
                f"row {self.counts.rows:,} was due {message.due_at:%Y-%m-%d %H:%M:%S} UTC, more than"
                f" {self._settings.max_past} before this job began. If this is a backfill, give the option"
                " past_due=skip; to deliver it now, past_due=send"
            )
        if self._settings.past_due == "skip":
            self.counts.skipped += 1
            return True
        return False

    def _sort(self, message: DelayedMessage, now: datetime) -> None:
        route = self._route
        if route is None:
            self._direct.append(message)
            return
        try:
            route.check(message, now)
        except InvalidMessage as error:
            raise InputError(f"its row {self.counts.rows:,}, column {error.column}: {error.problem}") from None
        (self._held if route.holds(message, now) else self._direct).append(message)

    def _flush(self) -> None:
        route = self._route
        if route is None:
            for message in self._direct:
                self.counts.sent.add(message)
        else:
            route.leave_known(self._direct, self._held)
            if self._direct:
                note = None if route.store is None or route.holds_all else route.store.note_sent
                send_and_note(route.delivery, self._direct, self.counts.sent, note)
            if self._held:
                assert route.store is not None
                send_and_note(route.store, self._held, self.counts.held)
        self._direct.clear()
        self._held.clear()
        self._going(self.counts)
        if self._monotonic() - self._told >= PROGRESS_SECONDS:
            self._told = self._monotonic()
            self._log.info("%s: %s messages sent or stored so far", self._place, f"{self.counts.out:,}")


def place_of(partition: int, attempt: int) -> str:
    """Name an attempt at a partition for a person."""
    return f"partition {partition}" + (f", attempt {attempt + 1}" if attempt else "")
