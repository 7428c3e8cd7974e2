"""``format("delayed")``: executors send the rows of a DataFrame, each to arrive at its own due time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING
from uuid import uuid4

from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import (
    BinaryType,
    DataType,
    MapType,
    NullType,
    NumericType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from airflow_delayed.errors import InputError, UnsupportedColumns
from airflow_delayed.intake.columns import COLUMNS, ColumnRules, wrong_type
from airflow_delayed.message import utcnow

if TYPE_CHECKING:
    import pyarrow as pa

    from airflow_delayed.spark.options import Settings
    from airflow_delayed.spark.partition import PartitionCommit


class DelayedDataSource(DataSource):
    """Sends the rows of a DataFrame as delayed messages.

    ``df.write.format("delayed").mode("append").option("deliver", "broker").save()``. Columns are those that
    DelayedSendOperator's sources have: ``value`` (or ``body``), ``destination``, ``due_at`` or ``delay_seconds``,
    ``headers``, ``message_id``, ``tag``, ``expires_at``, ``spread_seconds``, ``timezone``. A wrong column or option is
    an AnalysisException before the first task; a wrong row fails its task, when other rows may have been sent.

    Options hold names and sizes, for Spark shows them; where connections come from, see
    :func:`airflow_delayed.spark.connections.find`.

    - ``deliver``: the name of the connection that delivers (rabbitmq, amqp, amqps, aws, or a SQL connection whose
      database has the destination as a queue table). ``store``: the name of a SQL connection, in whose store
      messages wait that are due later than ``hold_over`` seconds from now (900); with ``until_due`` (``true``) all of
      them, until they are due. ``on_conflict``: ``error``, ``keep`` or ``replace``.
    - ``destination``, ``due_at`` or ``delay`` (seconds, or as ``PT10M``), ``headers`` (a JSON object), ``tag``,
      ``expires_at``: for rows without the column or with a null in it. ``timezone``: of times without an offset.
      ``spread``: seconds, or as ``PT10M``, within which after its time a message is due.
    - ``id_columns``: columns, separated by commas, whose values name a message. Without, and without a column
      ``message_id``, the id is a hash of all that the message says, and of ``scope`` (text, or a JSON list as
      DelayedSendOperator's: DAG, run, task, map index).
    - ``origin``: the run of a task that sends the messages, for lists and filters of the store: a JSON object of
      ``dag_id``, ``run_id``, ``task_id`` and, of a mapped task, ``map_index``; in a task loop ``iteration``.
      DelayedSparkSendOperator gives it.
    - ``anchor``: what relative delays count from; by default the present in the driver, made once. Give it, with
      ``scope``, so that a driver that is started again sends the same ids. ``unknown`` refuses relative delays.
    - ``past_due``: ``fail``, ``send`` or ``skip`` rows due more than ``max_past`` seconds (3600) before ``began``,
      which is the anchor by default.
    - ``columns``: a JSON object of the DataFrame's names of columns, by ours: ``{"value": "text"}``. With it columns
      that mean nothing are ignored, and are no error.
    - ``envelope``: SQS's, in place of what the connection says.
    - ``batch_rows``: messages given to the transport at a time (5000); ``window``: RabbitMQ's unconfirmed messages
      (1000); ``connections``: how many tasks of an executor may send at a time, by default all that it runs.
    - ``connections_file``: a JSON file of connections by name on every machine, or the bare name of a file that
      spark-submit distributes (``--files``).
    - ``headers_file``: the JSON object of ``headers`` in such a file, whose values Spark does not show.
    - ``attempts``: a folder that executors and the driver share, in which attempts note what they have sent, so that
      what failed ones sent is counted. ``manifest``: a file that gets the counts when all is sent.
    - ``dry_run``: ``true`` reads and checks all rows and sends nothing.
    - ``traceparent``, ``tracestate``: the trace that all messages carry, as W3C Trace Context writes it.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "delayed"

    def writer(self, schema: StructType, overwrite: bool) -> DelayedWriter:
        """Check columns and options."""
        if overwrite:
            raise InputError("what was sent cannot be overwritten; use mode('append')")
        from airflow_delayed.spark.connections import ConnectionNotFound, route_of
        from airflow_delayed.spark.options import settings_of

        settings = settings_of(self.options, utcnow())
        check_columns(schema, settings.wanted, naive_ok=settings.rules.zone is not None)
        # connects to nothing, and raises now if options and connection types do not go together; a connection may be
        # unknown to the driver that the executors know
        with suppress(ConnectionNotFound):
            route_of(settings, clock=utcnow).close()
        return DelayedWriter(settings)


class DelayedWriter(DataSourceArrowWriter):
    """Sends in the executors, and reports the counts in the driver."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        #: Keeps apart the files that jobs keep in one folder.
        self._job = uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> PartitionCommit:
        """Send a partition."""
        from airflow_delayed.spark.partition import send_partition

        return send_partition(self._settings, self._job, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Log the counts, and write the manifest."""
        from airflow_delayed.spark.partition import attempts_without_success, commits, remove_attempts
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
        from airflow_delayed.spark.partition import attempts_without_success, commits, remove_attempts
        from airflow_delayed.spark.reporting import log_abort, logger

        done = commits(messages)
        failed = attempts_without_success(self._settings, self._job, done)
        remove_attempts(self._settings, self._job)
        log_abort(logger(), self._settings, [one.counts for one in done], len(messages), failed)


def check_columns(schema: StructType, wanted: ColumnRules, *, naive_ok: bool) -> None:
    """Check names and types."""
    names = schema.fieldNames()
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UnsupportedColumns(f"the DataFrame has more than one column {', '.join(twice)}")
    wanted.check(names, "the DataFrame")
    naive_ok = naive_ok or wanted.names.get("timezone") in names
    problems = []
    for field in schema.fields:
        meanings = {name: COLUMNS[name] for name in wanted.meanings(field.name)}
        kind, is_text = field.dataType.simpleString(), isinstance(field.dataType, StringType)
        if wrong := [name for name, fitting in meanings.items() if not _fits(fitting, field.dataType)]:
            problems += [wrong_type(field.name, kind, name, is_text=is_text) for name in wrong]
        elif meanings and isinstance(field.dataType, TimestampNTZType) and not naive_ok:
            problems.append(
                f"column {field.name} has no time zone (timestamp_ntz); name the zone in which its wall clock is"
                " read by the option timezone, or add a column timezone, or cast it to timestamp, in the session's zone"
            )
    if problems:
        raise UnsupportedColumns(f"the DataFrame: {'; '.join(problems)}")


def _fits(kind: str, found: DataType) -> bool:
    if isinstance(found, NullType):
        return True
    if kind == "a timestamp":
        return isinstance(found, TimestampType | TimestampNTZType)
    if kind == "a number":
        return isinstance(found, NumericType)
    if kind == "a map of text to text":
        return (
            isinstance(found, MapType)
            and isinstance(found.keyType, StringType)
            and isinstance(found.valueType, StringType)
        )
    return isinstance(found, StringType) or (kind == "text or binary" and isinstance(found, BinaryType))
