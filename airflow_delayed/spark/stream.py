"""``df.writeStream.format("delayed")``: the writer of a stream's batches; PySpark 4.1 and later.

Spark makes a writer for each batch in the driver, from which the executors get a copy, and another one to commit the
batch. They share nothing but the id of the query and the number of the batch, both of which a replay of the batch has
too: executors read them from the context of their task, and return them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from airflow_delayed.errors import DelayedError
from airflow_delayed.identity import scope_of
from airflow_delayed.message import utcnow
from airflow_delayed.spark.partition import (
    PartitionCommit,
    RejectFile,
    attempts_without_success,
    commit_rejects,
    commits,
    remove_attempts,
    send_partition,
)
from airflow_delayed.spark.reporting import SharedFolder, log_abort, log_commit, logger, manifest_of

if TYPE_CHECKING:
    import pyarrow as pa

    from airflow_delayed.spark.options import Settings

#: The properties of a task that say which query and which batch it works for.
_QUERY, _BATCH = "sql.streaming.queryId", "streaming.sql.batchId"


class DelayedStreamWriter(DataSourceStreamArrowWriter):
    """Sends a batch in the executors, and reports its counts in the driver."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def write(self, iterator: Iterator[pa.RecordBatch]) -> PartitionCommit:
        """Send a partition of a batch."""
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        query, number = context.getLocalProperty(_QUERY), context.getLocalProperty(_BATCH)
        if query is None or number is None:
            raise DelayedError("Spark does not say which batch of which query this is; write it with writeStream")
        batch = int(number)
        settings = replace(self._settings, rules=replace(self._settings.rules, scope=scope_of(query, batch)))
        rejects = None
        if settings.rejects:
            attempt = f"{context.partitionId():06}-{context.attemptNumber()}"
            rejects = RejectFile(_of_batch(settings.rejects, query, batch), attempt, f"query {query} batch {batch}")
        done = send_partition(settings, _job(query, batch), iterator, rejects=rejects)
        return replace(done, query=query)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Log the counts; write those of the batch, and which files of rejected rows count."""
        settings, done = self._settings, commits(messages)
        if not done:
            return
        query = done[0].query
        counts = [(one.earlier, one.counts) for one in done]
        if settings.rejects:
            names = [one.rejects for one in done if one.rejects is not None]
            commit_rejects(_of_batch(settings.rejects, query, batchId), names, sum(one.counts.rejected for one in done))
        failed = attempts_without_success(settings, _job(query, batchId), done)
        log_commit(logger(), settings, counts, failed, batch=batchId, now=utcnow())
        if settings.manifest:
            origin = None if settings.origin is None else settings.origin.to_json()
            content = {"query": query, "batch": batchId, "origin": origin, **manifest_of(settings, counts, failed)}
            _of_batch(settings.manifest, query, batchId, ".json").write(content)
        # the last step, so that a commit that is repeated counts them again
        remove_attempts(settings, _job(query, batchId))

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Log the counts of messages that cannot be recalled; a replay of the batch will count its attempts."""
        settings, done = self._settings, commits(messages)
        failed = attempts_without_success(settings, _job(done[0].query, batchId), done) if done else None
        log_abort(logger(), settings, [one.counts for one in done], len(messages), failed, batch=batchId)


def _job(query: str, batch: int) -> str:
    return f"{query}-{batch}"


def _of_batch(folder: str, query: str, batch: int, ending: str = "") -> SharedFolder:
    # in the order of the batches, also where names are sorted as texts
    return SharedFolder(folder).child(query).child(f"{batch:09}{ending}")
