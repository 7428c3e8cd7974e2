"""One attempt at one partition: from Arrow batches to confirmed messages, as a stream, and the rows that it rejects."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from airflow_delayed.addresses import shown
from airflow_delayed.delivery import Clock, SendReport
from airflow_delayed.errors import (
    DelayedError,
    DestinationMissing,
    InputError,
    InvalidMessage,
    MessageConflict,
    PastDue,
    SendFailed,
    some,
)
from airflow_delayed.identity import digest_of
from airflow_delayed.intake.arrow import to_batch
from airflow_delayed.intake.columns import row_of
from airflow_delayed.intake.files import SourceFile
from airflow_delayed.intake.rows import Problem, RowReader
from airflow_delayed.intake.sources import rejected_line
from airflow_delayed.message import DelayedMessage, utcnow
from airflow_delayed.route import Route, confirmed
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

_MANIFEST = "manifest.json"


class PartitionFailed(DelayedError):
    """An attempt at a partition failed; the text counts the messages that it had sent."""

    def __init__(self, place: str, counts: PartitionCounts, error: DelayedError) -> None:
        had = ", ".join(f"{count:,} to {name}" for name, count in list(counts.by_destination().items())[:5])
        sent = f"It had sent or stored {counts.out:,} messages ({had})" if counts.out else "It had sent nothing"
        super().__init__(f"{place}: {error}. {sent}; another attempt means the same messages, with the same ids")


class PartitionSend:
    """Sends the rows of one partition.

    :param place: the partition's name in log lines and errors.
    :param route: None only counts, for a dry run.
    :param rejects: takes rows that cannot be sent; None: such a row is an error.
    :param progress: called with the counts after each batch.
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
        progress: Callable[[PartitionCounts], None],
        rejects: RejectFile | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = PartitionCounts()
        self._settings = settings
        self._route = route
        self._place = place
        self._clock = clock
        self._log = log
        self._progress = progress
        self._rejects = rejects
        self._monotonic = monotonic
        self._logged_at = monotonic()
        self._away: DelayedError | None = None
        self._direct: list[DelayedMessage] = []
        self._to_store: list[DelayedMessage] = []

    def run(self, batches: Iterable[pa.RecordBatch]) -> PartitionCounts:
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
            if self._away is not None:
                raise self._away
        except DelayedError as error:
            raise PartitionFailed(self._place, self.counts, error) from error
        return self.counts

    def _read(self, reader: RowReader, records: pa.RecordBatch) -> None:
        file = SourceFile(path="its", format="arrow", partition={}, version=())
        now, oldest, newest = self._clock(), self._settings.oldest, self._settings.newest
        for item in reader.read(to_batch(records, file, self.counts.rows + 1)):
            self.counts.rows += 1
            if isinstance(item, Problem):
                self._refuse(item.column, item.problem, item.row)
            elif oldest <= item.due_at <= newest or self._in_time(item):
                self._sort(item, now)
            if len(self._direct) + len(self._to_store) >= self._settings.batch_rows:
                self._flush()
                now = self._clock()

    def _refuse(self, column: str, problem: str, row: Mapping[str, object]) -> None:
        """Reject the row that was read last.

        :raises InputError: the job keeps no rejected rows; every further attempt fails at the same row, and so does it.
        """
        if self._rejects is None:
            raise InputError(f"its row {self.counts.rows:,}, column {column}: {problem}")
        self._reject(Problem(f"{self._place}, row {self.counts.rows:,}", column, problem, row))

    def _reject(self, problem: Problem) -> None:
        assert self._rejects is not None
        self._rejects.add(problem)
        self.counts.rejected += 1

    def _row_of(self, message: DelayedMessage) -> Mapping[str, object]:
        """Return a message as a row, without the headers that all rows have."""
        given = self._settings.rules.headers
        own = {name: value for name, value in message.headers.items() if given.get(name) != value}
        return row_of(message) | {"headers": own}

    def _in_time(self, message: DelayedMessage) -> bool:
        """Return whether a message is to be sent that is past due or too far off."""
        settings = self._settings
        if message.due_at > settings.newest:
            problem = f"is {message.due_at:%Y-%m-%d %H:%M:%S} UTC, further off than max_future={settings.max_future}"
            self._refuse(settings.wanted.label("due_at"), problem, self._row_of(message))
            return False
        if settings.past_due == "send":
            return True
        if settings.past_due == "skip":
            self.counts.skipped += 1
            return False
        problem = f"was due {message.due_at:%Y-%m-%d %H:%M:%S} UTC, more than {settings.max_past} before this job began"
        if self._rejects is None:
            raise PastDue(
                f"row {self.counts.rows:,} {problem}. If this is a backfill, give the option past_due=skip; to deliver"
                " it now, past_due=send"
            )
        self._refuse("due_at", problem, self._row_of(message))
        return False

    def _sort(self, message: DelayedMessage, now: datetime) -> None:
        route = self._route
        if route is None:
            self._direct.append(message)
            return
        try:
            route.check(message, now)
        except InvalidMessage as error:
            self._refuse(self._settings.wanted.label(error.column), error.problem, self._row_of(message))
            return
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
            while not self._published(route):
                pass
        self._direct.clear()
        self._to_store.clear()
        self._progress(self.counts)
        if self._monotonic() - self._logged_at >= PROGRESS_SECONDS:
            self._logged_at = self._monotonic()
            self._log.info("%s: %s messages sent or stored so far", self._place, f"{self.counts.out:,}")

    def _published(self, route: Route) -> bool:
        """Publish what waits here; False: some of it was rejected, and the rest is to be published again."""
        stored = self.counts.stored
        before = _taken(stored)
        try:
            away = route.publish(self._direct, self._to_store, self._clock(), sent=self.counts.sent, stored=stored)
            self._away = self._away or away
        except MessageConflict as error:
            if self._rejects is None:
                raise
            # all for the broker is confirmed by then, and the store takes messages in their order
            self._direct.clear()
            del self._to_store[: _taken(stored) - before]
            self._settle_conflicts(route, error)
        except (InputError, SendFailed) as error:
            if self._rejects is None:
                raise
            self._settle_faults(error)
        else:
            return True
        return False

    def _settle_faults(self, error: InputError | SendFailed) -> None:
        """Reject the rows that can never be sent, and leave the messages that are to be sent again.

        :raises DelayedError: the error, if it is no fault of single rows.
        """
        cause: BaseException | None = error
        if isinstance(error, SendFailed):
            cause = error.__cause__
            # two rows may have one id
            done = set(map(id, confirmed(self._direct, error)))
            self._direct = [message for message in self._direct if id(message) not in done]
        column, problem, names = "destination", str(cause), frozenset[str]()
        if isinstance(cause, InvalidMessage):
            column, problem = cause.column, cause.problem
            faulty = [message for message in self._direct if message.message_id == cause.message_id]
        else:
            if isinstance(cause, DestinationMissing):
                names = frozenset(cause.destinations)
            elif isinstance(error, SendFailed):
                names, problem = error.denied, error.failures[0][1]
            faulty = [message for message in self._direct if message.destination in names]
        # what is wrong with the destination of all rows is no fault of a row
        if not faulty or self._settings.rules.destination in names:
            raise error
        for message in faulty:
            self._reject(Problem(self._place, column, problem, self._row_of(message)))
        rejected = set(map(id, faulty))
        self._direct = [message for message in self._direct if id(message) not in rejected]

    def _settle_conflicts(self, route: Route, error: MessageConflict) -> None:
        """Leave one message of each id, and reject those whose id the store knows with other content."""
        assert route.store is not None
        settings, stored = self._settings, self.counts.stored
        kept: dict[str, tuple[DelayedMessage, bytes]] = {}
        rejected: list[tuple[DelayedMessage, str]] = []
        for message in self._to_store:
            digest = digest_of(message)
            other, known = kept.setdefault(message.message_id, (message, digest))
            if other is message:
                continue
            if known == digest or settings.on_conflict == "keep":
                stored.duplicates += 1
            elif settings.on_conflict == "replace":
                stored.replaced += 1
                kept[message.message_id] = max((other, known), (message, digest), key=lambda one: one[0].due_at)
            else:
                rejected.append((message, "stands twice in this batch, with different content"))
        conflicts = set(route.store.conflicting({name: digest for name, (_, digest) in kept.items()}))
        rejected += ((kept.pop(name)[0], "is known with other content") for name in conflicts)
        if len(kept) == len(self._to_store):
            # what was in the way is gone by now, and another attempt will find that
            raise error
        for message, problem in rejected:
            self._reject(Problem(self._place, "message_id", problem, self._row_of(message)))
        self._to_store = [message for message, _ in kept.values()]


def _taken(report: SendReport) -> int:
    return report.sent + report.duplicates + report.replaced + report.not_replaced


def place_of(partition: int, attempt: int) -> str:
    """Name an attempt at a partition for a person."""
    return f"partition {partition}" + (f", attempt {attempt + 1}" if attempt else "")


class RejectFile:
    """The rows of a stream that could not be sent, of one attempt at one partition; without any there is no file.

    ``<rejects>/<query>/<batch>/<partition>-<attempt>-<suffix>.jsonl`` has a row as JSON in each line, with its problem
    in ``rejected``; once corrected, it can be a source itself. ``manifest.json`` beside it names the files of the
    attempts that succeeded. A batch without rejected rows has no folder.

    :param folder: of the batch.
    :param attempt: names partition and attempt; another driver may make an attempt of the same name.
    :param run: names query and batch; it stands in each row.
    """

    def __init__(self, folder: SharedFolder, attempt: str, run: str) -> None:
        self._folder = folder
        self._attempt = attempt
        self._run = run
        self._file: Any = None
        #: The name of the file in its folder, once there is one.
        self.name: str | None = None

    def add(self, problem: Problem) -> None:
        """Write one row."""
        if self._file is None:
            self.name = f"{self._attempt}-{uuid4().hex[:8]}.jsonl"
            self._file = self._folder.child(self.name).create()
        self._file.write(rejected_line(problem, self._run).encode())

    def close(self) -> None:
        """End the file, which the commit may name from then on."""
        if self._file is not None:
            self._file.close()


def commit_rejects(folder: SharedFolder, names: Sequence[str], rows: int) -> None:
    """Write the manifest of a batch, and remove the files of attempts that do not count.

    A replay may have other partitions, so that its files do not replace those of the batch's first run.

    :raises DelayedError: a file is gone that counts; the batch is not committed then.
    """
    if not names:
        folder.remove()
        return
    there = folder.names()
    if gone := sorted({*names} - {*there}):
        raise DelayedError(
            f"files of rejected rows are gone from {shown(folder.url)}: {some(gone, separator=', ')}. Does another"
            " driver run this stream? The batch is not committed, so that the next run sends it again"
        )
    folder.child(_MANIFEST).write({"files": sorted(names), "rows": rows})
    for name in there:
        if name not in {*names, _MANIFEST}:
            folder.child(name).remove()


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

    :param name: of the attempt, unlike that of any other.
    :param earlier: how many attempts at this partition came before.
    :param query: of a stream, the id of its query.
    :param rejects: the name of the file of rejected rows, if there are any.
    """

    name: str
    earlier: int
    counts: PartitionCounts
    query: str = ""
    rejects: str | None = None


def send_partition(
    settings: Settings, job: str, iterator: Iterator[pa.RecordBatch], *, rejects: RejectFile | None = None
) -> PartitionCommit:
    """Send a partition, in a task of an executor.

    :param job: names the job in a folder that several jobs share for the files of their attempts.
    """
    from pyspark import TaskContext

    from airflow_delayed.spark.connections import route_of, with_headers

    settings = with_headers(settings)
    context = TaskContext.get()
    assert context is not None
    partition, earlier = context.partitionId(), context.attemptNumber()
    # of a stream's batch that is replayed, another driver's tasks may have the same numbers
    name = f"{partition:06}-{context.taskAttemptId()}-{uuid4().hex[:8]}"
    attempt = AttemptFile(_folder(settings, job), name) if settings.attempts else NoAttemptFile()
    with ExitStack() as stack:
        route = None
        if rejects is not None:
            stack.callback(rejects.close)
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
            rejects=rejects,
        )
        try:
            counts = sending.run(iterator)
        except BaseException:
            attempt.failed(sending.counts)
            raise
    return PartitionCommit(name, earlier, counts, rejects=None if rejects is None else rejects.name)


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
