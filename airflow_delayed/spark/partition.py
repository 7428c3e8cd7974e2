"""One attempt at one partition: from Arrow batches to confirmed messages, row by row."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from airflow_delayed.delivery import Clock
from airflow_delayed.errors import DelayedError, InputError, InvalidMessage, PastDue
from airflow_delayed.intake.arrow import to_batch
from airflow_delayed.intake.files import SourceFile
from airflow_delayed.intake.rows import Problem, RowReader
from airflow_delayed.message import DelayedMessage, utcnow
from airflow_delayed.route import Route
from airflow_delayed.sending import PROGRESS_SECONDS, Log
from airflow_delayed.spark.options import Settings
from airflow_delayed.spark.reporting import (
    AttemptFile,
    FailedAttempts,
    NoAttemptFile,
    PartitionCounts,
    SharedFolder,
    failed_attempts,
    logger,
)


class PartitionFailed(DelayedError):
    """An attempt at a partition failed; the text counts the messages that it had sent."""

    def __init__(self, place: str, counts: PartitionCounts, error: DelayedError) -> None:
        had = ", ".join(f"{count:,} to {name}" for name, count in list(counts.by_destination().items())[:5])
        sent = f"It had sent or stored {counts.out:,} messages ({had})" if counts.out else "It had sent nothing"
        super().__init__(f"{place}: {error}. {sent}; another attempt means the same messages, with the same ids")


class PartitionSend:
    """Sends the rows of one partition.

    :param route: None only counts, for a dry run.
    """

    def __init__(
        self,
        settings: Settings,
        route: Route | None,
        *,
        place: str,
        clock: Clock,
        log: Log,
        progress: Callable[[PartitionCounts], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = PartitionCounts()
        self._settings = settings
        self._route = route
        self._place = place
        self._clock = clock
        self._log = log
        self._progress = progress
        self._monotonic = monotonic
        self._logged_at = monotonic()
        self._away: DelayedError | None = None
        self._direct: list[DelayedMessage] = []
        self._to_store: list[DelayedMessage] = []

    def run(self, batches: Iterable[pa.RecordBatch]) -> PartitionCounts:
        """Send everything and return when all is confirmed; ``counts`` holds also after an error."""
        reader = RowReader(self._settings.rules)
        used: list[int] | None = None
        try:
            for records in batches:
                if used is None:
                    names = enumerate(records.schema.names)
                    used = [index for index, name in names if self._settings.wanted.uses(name)]
                self._read(reader, records.select(used))
            self._flush()
            if self._away is not None:
                raise self._away
        except DelayedError as error:
            raise PartitionFailed(self._place, self.counts, error) from error
        return self.counts

    def _read(self, reader: RowReader, records: pa.RecordBatch) -> None:
        file = SourceFile(path="its", format="arrow", partition={}, version=())
        now = self._clock()
        for item in reader.read(to_batch(records, file, self.counts.rows + 1)):
            self.counts.rows += 1
            if isinstance(item, Problem):
                # every further attempt fails at the same row, and so does the job
                raise InputError(str(item))
            if item.due_at < self._settings.oldest and self._skips(item):
                continue
            self._sort(item, now)
            if len(self._direct) + len(self._to_store) >= self._settings.batch_rows:
                self._flush()
                now = self._clock()

    def _skips(self, message: DelayedMessage) -> bool:
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
            column = self._settings.wanted.label(error.column)
            raise InputError(f"its row {self.counts.rows:,}, column {column}: {error.problem}") from None
        (self._to_store if route.holds(message, now) else self._direct).append(message)

    def _flush(self) -> None:
        route = self._route
        if route is None:
            for message in self._direct:
                self.counts.sent.add(message)
        else:
            route.leave_known(self._direct, self._to_store)
            if self._away is not None:
                # what waits is stored nevertheless
                self._direct.clear()
            sent, stored = self.counts.sent, self.counts.stored
            away = route.publish(self._direct, self._to_store, self._clock(), sent=sent, stored=stored)
            self._away = self._away or away
        self._direct.clear()
        self._to_store.clear()
        self._progress(self.counts)
        if self._monotonic() - self._logged_at >= PROGRESS_SECONDS:
            self._logged_at = self._monotonic()
            self._log.info("%s: %s messages sent or stored so far", self._place, f"{self.counts.out:,}")


def place_of(partition: int, attempt: int) -> str:
    """Name an attempt at a partition for a person."""
    return f"partition {partition}" + (f", attempt {attempt + 1}" if attempt else "")


#: Seconds between two tries to take a slot.
SLOT_PAUSE = 0.05


@contextmanager
def slot(
    most: int | None,
    *,
    folder: Path | None = None,
    group: int | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[None]:
    """Take one of the executor's slots within the block; wait until one is free.

    The kernel frees the slot of a killed worker.

    :param most: slots of an executor; None: no limit.
    :param group: a number that the workers of an executor share, by default their parent's process id.
    """
    if most is None:
        yield
        return
    # of the same user only: another one could not open the file
    name = f"airflow-delayed-{os.getuid()}-{group or os.getppid()}"
    files = [Path(folder or tempfile.gettempdir(), f"{name}-{number}.slot") for number in range(most)]
    while True:
        for file in files:
            handle = os.open(file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
                continue
            try:
                yield
            finally:
                os.close(handle)
            return
        sleep(SLOT_PAUSE)


@dataclass
class PartitionCommit(WriterCommitMessage):
    """The counts of a successful attempt.

    :param earlier: how many attempts at this partition came before.
    """

    name: str
    earlier: int
    counts: PartitionCounts


def send_partition(settings: Settings, job: str, iterator: Iterator[pa.RecordBatch]) -> PartitionCommit:
    """Send a partition, in a task of an executor.

    :param job: names the job in a folder that several jobs share for the files of their attempts.
    """
    from pyspark import TaskContext

    from airflow_delayed.spark.connections import route_of, with_headers

    settings = with_headers(settings)
    context = TaskContext.get()
    assert context is not None
    partition, earlier = context.partitionId(), context.attemptNumber()
    name = f"{partition:06}-{context.taskAttemptId()}"
    attempt = AttemptFile(_folder(settings, job), name) if settings.attempts else NoAttemptFile()
    with ExitStack() as stack:
        route = None
        if not settings.dry_run:
            stack.enter_context(slot(settings.connections))
            route = route_of(settings, clock=utcnow)
            stack.callback(route.close)
            stack.enter_context(route.delivery.kept_open())
        sending = PartitionSend(
            settings,
            route,
            place=place_of(partition, earlier),
            clock=utcnow,
            log=logger(),
            progress=attempt.progress,
        )
        try:
            counts = sending.run(iterator)
        except BaseException:
            attempt.failed(sending.counts)
            raise
    return PartitionCommit(name, earlier, counts)


def commits(messages: Sequence[WriterCommitMessage | None]) -> list[PartitionCommit]:
    """Return the results of the partitions that were sent."""
    return [message for message in messages if isinstance(message, PartitionCommit)]


def _folder(settings: Settings, job: str) -> SharedFolder:
    assert settings.attempts is not None
    return SharedFolder(settings.attempts).child(job)


def attempts_without_success(settings: Settings, job: str, done: Sequence[PartitionCommit]) -> FailedAttempts | None:
    """Return the counts of attempts without success; None if there is no folder."""
    if settings.attempts is None:
        return None
    return failed_attempts(_folder(settings, job), {one.name for one in done})


def remove_attempts(settings: Settings, job: str) -> None:
    """Remove the files of attempts, if there is a folder."""
    if settings.attempts is not None:
        _folder(settings, job).remove()
