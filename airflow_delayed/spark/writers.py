"""What Spark's executors run for a partition, and what its driver does with the results: the writer of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import uuid4

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from airflow_delayed.message import utcnow

if TYPE_CHECKING:
    import pyarrow as pa

    from airflow_delayed.spark.options import Settings
    from airflow_delayed.spark.partition import RejectFile
    from airflow_delayed.spark.reporting import FailedAttempts, PartitionCounts, SharedFolder


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


class DelayedWriter(DataSourceArrowWriter):
    """Sends in the executors, and reports the counts in the driver."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        #: Keeps apart the files that jobs keep in one folder.
        self._job = uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> PartitionCommit:
        """Send a partition."""
        return send_partition(self._settings, self._job, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Log the counts, and write the manifest."""
        from airflow_delayed.spark.reporting import SharedFolder, log_commit, logger, manifest_of

        done = commits(messages)
        failed = attempts_without_success(self._settings, self._job, done)
        remove_attempts(self._settings, self._job)
        counts = [(one.earlier, one.counts) for one in done]
        log_commit(logger(), self._settings, counts, failed)
        if self._settings.manifest:
            SharedFolder(self._settings.manifest).write(manifest_of(self._settings, counts, failed))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Log the counts of messages that cannot be recalled."""
        from airflow_delayed.spark.reporting import log_abort, logger

        done = commits(messages)
        failed = attempts_without_success(self._settings, self._job, done)
        remove_attempts(self._settings, self._job)
        log_abort(logger(), self._settings, [one.counts for one in done], len(messages), failed)


def send_partition(
    settings: Settings, job: str, iterator: Iterator[pa.RecordBatch], *, rejects: RejectFile | None = None
) -> PartitionCommit:
    """Send a partition, in a task of an executor.

    :param job: names the job in a folder that several jobs share for the files of their attempts.
    """
    from pyspark import TaskContext

    from airflow_delayed.spark.connections import route_of, with_headers
    from airflow_delayed.spark.partition import PartitionSend, place_of, slot
    from airflow_delayed.spark.reporting import AttemptFile, NoAttemptFile, logger

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
    from airflow_delayed.spark.reporting import SharedFolder

    assert settings.attempts is not None
    return SharedFolder(settings.attempts).child(job)


def attempts_without_success(settings: Settings, job: str, done: Sequence[PartitionCommit]) -> FailedAttempts | None:
    """Return the counts of attempts without success; None if there is no folder."""
    from airflow_delayed.spark.reporting import failed_attempts

    if settings.attempts is None:
        return None
    return failed_attempts(_folder(settings, job), {one.name for one in done})


def remove_attempts(settings: Settings, job: str) -> None:
    """Remove the files of attempts, if there is a folder."""
    if settings.attempts is not None:
        _folder(settings, job).remove()
